"""Which tensors may be made again in the backward pass instead of being kept, of what, and what that costs.

An op that keeps what it reads for its own backward pass, and gives the same for the same, may run once more for those
who would keep its result: they are differentiated before it is. What it reads may be kept narrow; the error of that is
then one of the result, too.

Of a gated unit, silu(g)·u into a product, so g and u alone are kept: what the activation makes is made again of g for
the gradient of u, and what the product reads of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf, sqrt

from autoprec.devices import Device
from autoprec.formats import Format, is_operands_only
from autoprec.graphs import Op, Role, TensorKind
from autoprec.planning.flow import Flow
from autoprec.planning.noise import current_scale_log2, relative_error
from autoprec.planning.saved import relative_change
from autoprec.planning.uses import Remaking, Steps

__all__ = ["Remakings", "is_repeatable"]

_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm"})

#: The product of two tensors, or of one and a number.
_PRODUCT = "mul"

#: Kinds that may run again: no random numbers, nothing in place; and they keep what they read (ReLU keeps a bit of its
#: result, so what it reads is made again first, and a product with a number nothing).
_REPEATABLE = _NORMS | {"gelu", "silu", "mish", "relu", _PRODUCT}

#: Ops in a row.
_MOST_OPS = 3


def is_repeatable(kind: str) -> bool:
    """Whether an op of this kind may run once more in the backward pass."""
    return kind in _REPEATABLE


@dataclass(frozen=True)
class _Chain:
    """Ops that make a tensor, in order, and what they start from: the kind of the op that reads it, what that reads,
    and the root of this."""

    ops: tuple[Op, ...]
    reads: tuple[tuple[str, str, str], ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(root for _, _, root in self.reads))


class Remakings:
    """How each root tensor may be made again, for products of matrices and of factors."""

    def __init__(self, flow: Flow, device: Device, changed: Collection[str]) -> None:
        """`changed`: roots that an op changes in place."""
        self._graph, self._roots, self._prices = flow.graph, flow.roots, flow.prices
        self._unit_of, self._device, self._changed = flow.unit_of, device, changed
        #: By root and most ops; forward, so that each is found from those before it.
        self._chains: dict[tuple[str, int], _Chain | None] = {}
        for op in flow.graph.ops:
            for root in op.outputs:
                for most in range(1, _MOST_OPS + 1):
                    self._chains[root, most] = self._found(root, most)

    def of(self, root: str, *, is_factor: bool) -> Remaking | None:
        """None where the tensor cannot be made again, or what that does to gradients cannot be judged. `is_factor`:
        whether a product with another tensor reads it."""
        chain = self._chain(root, _MOST_OPS)
        if chain is None:
            return None
        noise = [(source, f.name, self._noise(chain, source, f))
                 for source in chain.sources for f in self._prices.storages]  # fmt: skip
        known = tuple((source, f, added) for source, f, added in noise if added is not None)
        if len(known) < len(noise):
            return None
        steps = tuple(self._steps(chain))
        return Remaking(
            made_from=chain.sources,
            numel=self._read(chain, steps),
            seconds=tuple((f, self._seconds(chain, f, is_factor=is_factor)) for f in self._formats(chain.ops[-1])),
            noise=known,
            steps=() if self._graph.compiled else steps,
        )

    def _chain(self, root: str, most: int) -> _Chain | None:
        return self._chains.get((root, most))

    def _found(self, root: str, most: int) -> _Chain | None:
        graph, root_of = self._graph, self._roots.root_of
        op = graph.op_by_id.get(graph.producer.get(root, ""))
        if op is None or root in self._changed:
            return None
        if not is_repeatable(op.kind) or op.checkpoints or op.outputs != (root,) or op.calls != 1:
            return None
        kept = {root_of[t] for t in op.saves}
        ops: tuple[Op, ...] = (op,)
        reads: list[tuple[str, str, str]] = []
        for t in op.inputs:
            spec, source = graph.tensor_by_id[t], root_of[t]
            if spec.kind is not TensorKind.ACTIVATION:
                continue
            if not spec.is_float32 or source in self._changed:
                return None
            keeps = source in kept and source != root
            # A factor may be made again itself, so what is made of it starts where it does.
            through = source == t and (op.kind == _PRODUCT or not keeps)
            before = self._chain(t, most - 1) if through else None
            if before is not None:
                ops, reads = (*before.ops, *ops), [*reads, *before.reads]
            elif keeps and not (through and self._chain(t, _MOST_OPS)):
                reads.append((op.kind, t, source))
            else:
                return None
        return _Chain(ops, tuple(reads)) if reads else None

    def _steps(self, chain: _Chain) -> Iterator[tuple[tuple[int | None, int], ...]]:
        """By op, (unit, elements) of what is there while it runs: of what it makes and reads, in its own format; and of
        what was made or decoded before for one that comes later, in the format of that time."""
        ops = list(dict.fromkeys(chain.ops))
        made, decoded = {op.outputs[0] for op in ops}, {t for _, t, _ in chain.reads} if self._prices.storages else ()
        reads = [{t for t in op.inputs if t in made or t in decoded} for op in ops]
        there: dict[str, int | None] = {}
        for k, op in enumerate(ops):
            unit = self._unit_of.get((op.id, Role.OUTPUT))
            later = set().union(*reads[k + 1 :])
            there = {t: u for t, u in there.items() if t in later} | dict.fromkeys((*reads[k], *op.outputs), unit)
            yield tuple((u, self._graph.tensor_by_id[t].numel) for t, u in there.items())

    def _read(self, chain: _Chain, steps: Steps) -> int:
        """Elements that the last op reads. A compiler, of what is made on the way, writes nothing."""
        if self._graph.compiled:
            return self._numel(chain) if self._prices.storages else 0
        return sum(numel for _, numel in steps[-1]) - self._graph.tensor_by_id[chain.ops[-1].outputs[0]].numel

    def _numel(self, chain: _Chain) -> int:
        """Elements of what it starts from."""
        return sum(self._graph.tensor_by_id[t].numel for t in {t for _, t, _ in chain.reads})

    def _formats(self, op: Op) -> tuple[str, ...]:
        """Formats in which the op may have been timed."""
        timed = (f for key, _, f in self._device.seconds_by_key if key == op.timing_key)
        known = {f for f in timed if not is_operands_only(f)}
        return ("fp32", *sorted(known - {"fp32"})) if (op.id, Role.OUTPUT) in self._unit_of else ("fp32",)

    def _seconds(self, chain: _Chain, format_name: str, *, is_factor: bool) -> float:
        """All ops once more in this format, and reading what they start from; of a device that was not asked for the
        forward pass alone, both passes. A compiler makes the tensor where it is read, with what else reads the same:
        what a product of factors reads is not even written, and of the ops before the last nothing is."""
        fuses = self._graph.compiled
        if fuses and is_factor:
            return 0.0
        total = 0.0
        for op in chain.ops[-1:] if fuses else dict.fromkeys(chain.ops):  # each runs once
            for f in (format_name, "fp32"):
                key = (op.timing_key, Role.OUTPUT, f)
                if key in self._device.seconds_by_key:
                    total += self._device.forward_seconds_by_key.get(key, self._device.seconds_by_key[key])
                    break
        if fuses:
            return total
        casts = [self._device.cast_seconds(f.name, format_name, self._numel(chain)) for f in self._prices.storages
                 if f.name != format_name]  # fmt: skip
        return total + max(casts, default=0.0)

    def _noise(self, chain: _Chain, source: str, fmt: Format) -> float | None:
        """Relative variance of the result where one of the things that it is made of is rounded to the format. The
        errors of several are independent; those of one that is read several times are not."""
        values = self._prices.values(source)
        if values is None or values.nonfinite or (not fmt.scaled and values.amax > fmt.max_value):
            return None
        deviation = 0.0
        for kind in (kind for kind, _, root in chain.reads if root == source):
            if kind in _NORMS or kind == _PRODUCT:
                deviation += sqrt(relative_error(values, fmt))
            else:
                deviation += sqrt(relative_change(kind, values, fmt, current_scale_log2(fmt, values.amax)))
        return deviation**2 if deviation < inf else None
