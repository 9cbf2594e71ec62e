"""Which tensors may be kept for backward in a narrow format: who keeps them, and what all of those can read."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.graphs import Op, Role
from autoprec.planning.flow import Flow
from autoprec.planning.saved import PRODUCTS
from autoprec.planning.values import Saver

__all__ = ["Keeping", "Stores"]


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a tensor may be kept, as in `PlanTensor`."""

    storages: tuple[str, ...] = ()
    stored_by: tuple[int, int | None] = (0, None)
    gemms: tuple[int, ...] = ()
    others: tuple[Saver, ...] = ()
    masks: tuple[int, ...] = ()


class Stores:
    """The ways to keep each root tensor."""

    def __init__(self, flow: Flow, gemm_of: dict[str, int], passing: dict[int, tuple[tuple[int, float], ...]]) -> None:
        """`passing`: forward moment → `GradientNode.inputs`."""
        self._graph, self._roots, self._prices = flow.graph, flow.roots, flow.prices
        self._unit_of, self._numbers = flow.unit_of, flow.numbers
        self._gemm_of, self._passing = gemm_of, passing
        roots = flow.roots
        self._savers: dict[str, list[tuple[int, Op]]] = {}
        self._closed: set[str] = set()
        changed: set[str] = set()
        for moment, op in enumerate(flow.graph.ops):
            for root in dict.fromkeys(roots.root_of[t] for t in op.saves):
                self._savers.setdefault(root, []).append((moment, op))
            touched = {roots.root_of[t] for t in (*op.inputs, *op.outputs)}
            if op.checkpoints:  # what is made again is not kept, what goes in is kept by the checkpoint
                self._closed |= touched
            if op.kind != "relu" and self._changes(op):
                changed |= {roots.root_of[t] for t in op.outputs}
        self._changed = changed

    def of(self, root: str) -> Keeping:
        """Nothing where the tensor is kept as it is."""
        nothing = Keeping()
        if root in self._closed:
            return nothing
        root_of = self._roots.root_of
        makers: list[tuple[int, int | None]] = []
        gemms: list[int] = []
        masks: list[int] = []
        others: list[Saver] = []
        for moment, op in self._savers.get(root, ()):
            unit = self._unit_of.get((op.id, Role.OUTPUT))
            if op.id in self._gemm_of and root_of[op.inputs[0]] == root and not self._prices.unjudged(op):
                if root in [root_of[t] for t in (*op.inputs[1:], *op.outputs)]:
                    return nothing
                gemms.append(self._gemm_of[op.id])
                makers.append((moment, unit))
            elif op.kind == "relu" and unit is not None and root_of[op.outputs[0]] == root:
                masks.append(moment)
            elif savers := self._others(op, root, moment, unit):
                others += savers
                makers.append((moment, unit))
            else:
                return nothing
        storages = tuple(f.name for f in self._prices.storages if all(f.name in dict(s.noise) for s in others))
        if not storages or not makers or (others and root in self._changed):
            return nothing
        return Keeping(
            storages=storages,
            stored_by=makers[0],
            gemms=tuple(gemms),
            others=tuple(others),
            masks=tuple(masks),
        )

    def _others(self, op: Op, root: str, moment: int, unit: int | None) -> list[Saver]:
        """What an op that is no GEMM keeps of a tensor; nothing if that must be kept as it is."""
        if self._changes(op):
            return []
        found = []
        for t in dict.fromkeys(t for t in op.saves if self._roots.root_of[t] == root):
            spec = self._graph.tensor_by_id[t]
            noise = self._prices.saver_noise(op, t)
            if not spec.is_float32 or not noise:
                return []
            reached = self._reached(op, t, self._passing.get(moment, ()))
            found.append(Saver(moment=moment, unit=unit, numel=spec.numel, noise=tuple(noise.items()), reached=reached))
        return found

    def _reached(self, op: Op, kept: str, inputs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        """Whose gradients are made with the kept tensor: those of the other factors of a product, else all inputs'. So
        too where a factor is repeated: its gradient is a sum whose terms may cancel, and their errors do not."""
        rest = list(op.inputs)
        if op.kind not in PRODUCTS or kept not in rest:
            return inputs
        rest.remove(kept)
        sizes = {self._graph.tensor_by_id[t].numel for t in (kept, *rest)}
        if op.kind == "mul" and len(sizes) > 1:
            return inputs
        others = {self._numbers[t] for t in rest}
        return tuple((k, share) for k, share in inputs if k in others)

    def _changes(self, op: Op) -> bool:
        """Whether the op changes a tensor in place."""
        return not self._roots.is_view(op) and any(self._roots.root_of[t] != t for t in op.outputs)
