"""Which tensors may be kept for backward in a narrow format: who keeps them, and what all of those can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoprec.devices import Device
from autoprec.graphs import ATTENTION, Op, Role
from autoprec.planning.flow import Flow
from autoprec.planning.kept_inputs import is_unfused, keeps_logits
from autoprec.planning.noise import relative_error
from autoprec.planning.remaking import Remakings
from autoprec.planning.saved import PRODUCTS, logits_variance
from autoprec.planning.uses import Opening, Remaking, Replacement, Saver
from autoprec.planning.values import PlanTensor
from autoprec.planning.workspaces import Workspaces
from autoprec.plans import KEPT, RECOMPUTED

__all__ = ["Keeping", "Stores"]


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a tensor may be kept, as in `PlanTensor`."""

    storages: tuple[str, ...] = ()
    stored_by: tuple[int, int | None] = (0, None)
    gemms: tuple[int, ...] = ()
    others: tuple[Saver, ...] = ()
    masks: tuple[int, ...] = ()
    remaking: Remaking | None = None


class Stores:
    """The ways to keep each root tensor."""

    def __init__(
        self,
        flow: Flow,
        gemm_of: dict[str, int],
        passing: dict[int, tuple[tuple[int, float], ...]],
        workspaces: Workspaces,
        device: Device | None,
        banned: frozenset[tuple[str, ...]],
    ) -> None:
        """`passing`: forward moment → `GradientNode.inputs`. `device`: for seconds of making tensors again; None if
        that is not wanted. `banned`: of (tensor id, format, "kept"), how roots must not be kept."""
        self._flow, self._graph, self._roots, self._prices = flow, flow.graph, flow.roots, flow.prices
        self._unit_of, self._numbers = flow.unit_of, flow.numbers
        self._gemm_of, self._passing, self._workspaces = gemm_of, passing, workspaces
        roots, self._banned = flow.roots, banned
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
        self._remakings = None if device is None else Remakings(flow, device, changed)

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
        wanted = [f.name for f in self._prices.storages if (root, f.name, KEPT) not in self._banned]
        storages = tuple(f for f in wanted if all(f in dict(s.noise) for s in others))
        remaking = None
        if self._remakings is not None and (not others or self._is_factor(root)):
            remaking = self._remakings.of(root, is_factor=bool(others))
            if remaking is not None and others:
                remaking = replace(remaking, opening=self._opening(root))
        if remaking is not None:
            storages = (*storages, RECOMPUTED)
        if not storages or not makers or (others and root in self._changed):
            return nothing
        return Keeping(
            storages=storages,
            stored_by=makers[0],
            gemms=tuple(gemms),
            others=tuple(others),
            masks=tuple(masks),
            remaking=remaking,
        )

    def _is_factor(self, root: str) -> bool:
        """Whether a product of two tensors, one of them all of this one, is all that keeps it."""
        savers, root_of = [op for _, op in self._savers.get(root, ())], self._roots.root_of
        if len(savers) != 1 or savers[0].kind != "mul" or root not in savers[0].inputs:
            return False
        return [root_of[t] for t in savers[0].inputs].count(root) == 1

    def _opening(self, root: str) -> Opening:
        """What the only `mul` that keeps the tensor makes, and reads, after it."""
        ((_, op),) = self._savers[root]
        tensors = self._graph.tensor_by_id
        given = sum(tensors[op.outputs[0]].numel for t in op.inputs if tensors[t].requires_grad)  # summed up later
        first = op.inputs[0]
        if first == root or self._roots.root_of[first] not in {self._roots.root_of[t] for t in op.saves}:
            return Opening(given_numel=given)
        return Opening(given_numel=given, later=self._roots.root_of[first], later_numel=tensors[first].numel)

    def replacements(self, tensors: Iterable[PlanTensor]) -> Iterator[Replacement]:
        """The ops that are ours where they keep one of the tensors narrow."""
        keep: dict[int, dict[int, Saver]] = {}
        for i, t in enumerate(tensors):
            for saver in t.others:
                keep.setdefault(saver.moment, {})[i] = saver
        for moment, found in sorted(keep.items()):
            op, (saver, *_) = self._graph.ops[moment], found.values()
            spared, workspace = 0, (0, 0)
            if is_unfused(op):
                spared, again = self._workspaces.made_again(op)
                workspace = 0, again
            elif keeps_logits(op, self._graph):
                workspace = self._workspaces.a_few_rows(op)
            if spared or any(workspace):
                yield Replacement(
                    moment=moment, unit=saver.unit, tensors=tuple(found), workspace=workspace, spared=spared
                )

    def _others(self, op: Op, root: str, moment: int, unit: int | None) -> list[Saver]:
        """What an op that is no GEMM keeps of a tensor; nothing if that must be kept as it is."""
        unfused, logits = is_unfused(op), keeps_logits(op, self._graph)
        if self._changes(op):
            return []
        found = []
        own = (*op.inputs[:3], *(() if unfused else op.outputs)) if op.kind == ATTENTION else op.saves
        for t in dict.fromkeys(t for t in own if self._roots.root_of[t] == root):
            spec, of_logits = self._graph.tensor_by_id[t], logits and t == op.inputs[0]
            priced = self._of_logits if of_logits else self._of_attention if op.kind == ATTENTION else None
            noise = self._prices.saver_noise(op, t) if priced is None else priced(op, t)
            if not spec.is_float32 or not (noise or (op.kind == "mul" and not self._prices.storages)):
                return []
            times = op.inputs.count(t) if op.kind == "mul" else 1  # each factor is read by itself
            found.append(
                Saver(
                    moment=moment,
                    unit=unit,
                    numel=times * min(spec.numel, self._graph.tensor_by_id[root].numel),  # what repeats is read once
                    noise=tuple(noise.items()),
                    reached=self._reached(op, t, self._passing.get(moment, ())),
                    in_pieces=of_logits,
                )
            )
        return found

    def _of_attention(self, op: Op, kept: str) -> dict[str, float]:
        """By storage, what keeping a query, key, value or result of attention in it adds to the relative variance of
        the gradients that it reaches: P = exp(q·kᵀ/√d − L) is made again with the rounded q and k, each of which is a
        factor of the other's gradient besides."""
        values = self._prices.values(kept)
        if values is None or values.nonfinite:
            return {}
        factor = 1.0 + self._flow.gains.of_scores(op) if kept in op.inputs[:2] else 1.0
        return {f.name: factor * relative_error(values, f) for f in self._prices.storages
                if f.scaled or values.amax <= f.max_value}  # fmt: skip

    def _of_logits(self, op: Op, logits: str) -> dict[str, float]:
        """By storage, what keeping the logits of a cross entropy in it adds to the relative variance of their
        gradient."""
        prices = self._prices
        values, loss, gradients = prices.values(logits), prices.loss(logits), prices.gradients(logits)
        if values is None or loss is None or gradients is None or values.nonfinite:
            return {}
        found = {f.name: logits_variance(values, loss, gradients, f) for f in prices.storages}
        return {f: noise for f, noise in found.items() if noise is not None}

    def _into_scores(self, op: Op) -> dict[int, float]:
        """What a relative variance in the values, or the result, of attention is multiplied by in the gradients of
        queries and keys.

        dS = P∘(g·vᵀ − Σ g·o) is a difference in which most may cancel, so the error is taken as it is: that of v adds
        ΣP²·ms(v)·‖g‖² to ‖dS‖², with ΣP²·ms(v) = ms(o), and dq = dS·k/√d has ms(k) times as much (ms: mean square).
        That of o, which is the same for all keys, may add as much.
        """
        gains, prices = self._flow.gains, self._prices
        added = gains.mean_square(op.outputs[0]) * prices.gradient_energy(op, [op.outputs[0]])
        found: dict[int, float] = {}
        for t, other in (op.inputs[:2], op.inputs[1::-1]):
            whole = prices.gradients(self._roots.root_of[t])
            if added > 0.0 and whole is not None and whole.energy > 0.0:
                share = added * gains.mean_square(other) / whole.energy
                found[self._numbers[t]] = found.get(self._numbers[t], 0.0) + share
        return found

    def _reached(self, op: Op, kept: str, inputs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        """Whose gradients are made with the kept tensor: those of the other factors of a product, else all inputs'. So
        too where a factor is repeated: its gradient is a sum whose terms may cancel, and their errors do not."""
        if op.kind == ATTENTION and kept not in op.inputs[:2]:
            return tuple(self._into_scores(op).items()) or inputs
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
