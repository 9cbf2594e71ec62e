"""From a graph, a profile, a device and a policy to a `Problem`: pure data that solvers and the evaluator share.

What the planner assumes, and the rewriter does:

* A tensor's root (views and in-place results resolved, `roots.resolve_roots`) has a born format: that of the output
  role of the op that makes it; FP32 for inputs, parameters, buffers and wide ops. A view output without a base is a
  copy in the same format: a root of its own.
* An op reads every float32 input in the format of its output role; norms keep parameters and buffers in FP32. A cast
  is made once per (root, format), as soon as the tensor exists, and lives until its last reader in that format.
* Weights are cast where they are read, and cast again in the backward pass; their gradients come back in FP32.
* A gradient arrives in the format in which the tensor was born.
* A frozen parameter may live in a narrow format: `frozen`.
* An activation checkpoint keeps what it reads from outside, in the formats in which it reads it. What is made inside is
  made again, all at once, when its backward pass begins, and is not kept narrower than it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autoprec.devices import Device
from autoprec.errors import DeviceError, ProfileError
from autoprec.formats import held_as, other_operand, result_format
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind, TensorSpec, shared_path
from autoprec.planning.activations import Activations
from autoprec.planning.breaks import crossings
from autoprec.planning.flow import Flow
from autoprec.planning.frozen import frozen_nodes, frozen_units, reading_wide
from autoprec.planning.gradients import gradient_nodes
from autoprec.planning.kept_inputs import with_kept_inputs
from autoprec.planning.kinks import kink_nodes
from autoprec.planning.noise import saturates_by_design
from autoprec.planning.options import Options, decides, in_place_pairs, reads_narrow, unit_options
from autoprec.planning.parts import resolve_parts, senders, sent_in
from autoprec.planning.pricing import Prices
from autoprec.planning.products import Products
from autoprec.planning.roots import Roots, resolve_roots
from autoprec.planning.standing import passing_bytes, standing
from autoprec.planning.stores import Keeping, Stores
from autoprec.planning.sums import sharing_gradients
from autoprec.planning.uses import Use
from autoprec.planning.values import PlanTensor, Problem, Unit
from autoprec.planning.workspaces import Workspaces
from autoprec.plans import RECOMPUTED
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["ITEM_BYTES", "Problem", "as_written", "build_problem", "fixed_bytes", "optimizer_bytes"]

#: Bytes per element by the name of the torch dtype.
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "complex32": 4, "int64": 8, "uint64": 8, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

#: What a loss outside of the graph is among the ops of a problem.
_LOSS = "a loss outside of the model"

#: FP32 values of state per gradient value, by the policy's name for the optimizer.
_STATE_PER_GRADIENT = {"sgd_momentum": 1, "rmsprop": 1, "adam": 2, "adamw": 2}


def optimizer_bytes(optimizer: str, gradient_bytes: int) -> int:
    """Bytes of an optimizer's state, from the policy's name for it; 0 for "auto", "none" and plain "sgd"."""
    return _STATE_PER_GRADIENT.get(optimizer, 0) * gradient_bytes


def fixed_bytes(graph: OpGraph) -> int:
    """What a step holds whatever the plan: parameters, gradients, optimizer state, inputs."""
    return graph.parameter_bytes + graph.gradient_bytes + graph.optimizer_bytes + graph.input_bytes


def build_problem(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, ...]] = frozenset(),
    living: Mapping[str, str] | None = None,
) -> Problem:
    """The program whose best choice is the plan.

    `banned` holds (op id, format) pairs that proved unstable, (op id, format, role) that must not be, and (tensor id,
    format, "kept") of how tensors must not be kept; `living` the formats in which frozen parameters live already, by
    tensor id. `InfeasibleError` if a rule leaves an op no format that it can run in, `DeviceError` naming the first
    timing that the device lacks, `ProfileError` for another graph's profile.
    """
    if profile.graph_fingerprint != graph.fingerprint:
        raise ProfileError(
            f"the profile was recorded on graph {profile.graph_fingerprint}, not on {graph.fingerprint}"
            f" ({graph.model}); calibrate this model"
        )
    if profile.steps < 1:
        raise ProfileError("the profile holds no step; calibrate for at least two")
    return _Builder(graph, profile, device, policy, banned, living or {}).build(budget_bytes)


def as_written(graph: OpGraph, profile: Profile, device: Device, policy: Policy) -> Problem:
    """The model as it was written: all in FP32, saved tensors as they are, whatever the policy allows."""
    plain = policy.replaced(formats=("fp32",), rules=(), budget=None, storage={"formats": ()})
    return build_problem(graph, profile, device, plain)


class _Builder:
    def __init__(
        self,
        graph: OpGraph,
        profile: Profile,
        device: Device,
        policy: Policy,
        banned: frozenset[tuple[str, ...]],
        living: Mapping[str, str],
    ) -> None:
        self.roots: Roots = resolve_roots(graph)
        self.parts = resolve_parts(graph, self.roots)
        kept = with_kept_inputs(graph, self.roots, self.parts)
        self.workspaces, self.copied_parts = Workspaces(kept, device, graph), kept.copied_parts
        self.graph = graph = kept.graph
        self.profile = profile
        self.device = device
        self.policy = policy
        self.prices = Prices(graph, self.roots, profile, policy)
        self.moment = {op.id: i for i, op in enumerate(graph.ops)}
        #: The last forward moment: a loss outside of the graph is an op of its own behind all others.
        self.last = len(graph.ops) - (0 if graph.loss_bytes else 1)
        self.checkpoint_end = {op.checkpoints[:k]: i for i, op in enumerate(graph.ops)
                               for k in range(1, len(op.checkpoints) + 1)}  # fmt: skip
        self.crossing = crossings(graph, self.roots, self._backward(0))
        self.entered = {t: i for crosses in self.crossing.values() for t, i in crosses.entered.items()
                        if not crosses.is_added(t)}  # fmt: skip
        options = unit_options(graph, self.roots, self.prices, policy, device, banned)
        self.unit_of = {(o.op.id, o.role): i for i, o in enumerate(options)}
        #: By kernel, the format of gradients in which it runs once more for them, unless it ran in that.
        self.again = {o.op.id: o.formats[0] for o in options if o.role is Role.GRAD_INPUT and o.needed
                      and not o.op.is_plain_product and not o.one_kernel}  # fmt: skip
        frozen = frozen_units(graph, self.prices, policy, device, banned, living)
        #: By frozen parameter, the unit of what it lives in.
        self.frozen = {unit.op: len(options) + i for i, unit in enumerate(frozen)}
        self.units = (*reading_wide([self._unit(o) for o in options], frozen, graph, device), *frozen)
        of = self.unit_of
        self.kernels = {(of[o.op.id, Role.OUTPUT], of[o.op.id, o.role]) for o in options if o.one_kernel}
        self.members: dict[str, list[TensorSpec]] = {}
        for t in graph.tensors:
            self.members.setdefault(self.roots.root_of[t.id], []).append(t)
        products = [op for op in graph.ops if Role.GRAD_INPUT in op.roles and decides(op, graph)]
        #: Of products with a weight, their places among all products.
        self.weighted = {op.id: k for k, op in enumerate(products) if op.weights}
        flow = Flow(graph, self.roots, self.prices, self.unit_of)
        self.products = Products(flow, self.units, products, device)
        self.activations = Activations(flow)
        forward, backward = self.activations.nodes(), gradient_nodes(flow, self.activations)
        passing = {node.moment: node.inputs for node in backward}
        rounded = frozen_nodes(flow, self.activations, self.frozen, passing)
        self.nodes = (*backward, *kink_nodes(flow, self.activations, forward, passing), *forward, *rounded)
        self.variances = 2 * flow.gradients
        made_on = device if policy.storage.recompute else None
        self.senders = senders(graph, self.roots, self.parts, self.crossing, self.unit_of, self._born)
        self.stores = Stores(flow, self.weighted, passing, self.workspaces, made_on, banned)

    def build(self, budget_bytes: int | None) -> Problem:
        graph, policy = self.graph, self.policy
        readers, savers = self._uses()
        made = [
            self._tensor(root, readers.get(root, []), savers.get(root, []))
            for root in self.members
            if root in graph.producer or root in readers or root in savers
        ]
        tensors = sharing_gradients((*made, *self._parts(made, readers, savers)), graph, self.roots)
        index = {t.id: i for i, t in enumerate(tensors)}
        constant = sum(
            self.device.seconds_by_key.get((op.timing_key, Role.OUTPUT, "fp32"), 0.0) * op.calls
            for op in graph.ops
            if not decides(op, graph)
        )
        loss_limit = None
        if self.profile.loss is not None and self.profile.loss.spread > 0.0:
            loss_limit = (policy.noise.loss * self.profile.loss.spread) ** 2
        loss_total = sum(max((e for _, e in t.loss_noise), default=0.0) for t in tensors)
        private = tuple(
            (i, self._made_again(op.checkpoints) or i, op.private_saved_bytes * op.calls)
            for i, op in enumerate(graph.ops)
            if op.private_saved_bytes and not decides(op, graph)
        )
        kept = [t for t in made if any(use.kept_from is None for use in t.savers)]
        saved = sum(t.numel * 4 for t in kept) + sum(size for i, first, size in private if first == i)
        saved += sum(u.kept[0] for u in self.units if u.kept and u.kept_from is None)
        ties = {
            (self.unit_of[op.id, Role.OUTPUT], self.unit_of[owner, Role.OUTPUT])
            for op, owner in in_place_pairs(graph, self.roots)
            if owner is not None and (op.id, Role.OUTPUT) in self.unit_of and (owner, Role.OUTPUT) in self.unit_of
        } | self.kernels
        self._check_casts({f for t in tensors for f in t.storages} - {RECOMPUTED})
        return Problem(
            ops=(*(op.id for op in graph.ops), *([_LOSS] if graph.loss_bytes else [])),
            units=self.units,
            tensors=tensors,
            gemms=self.products.gemms(index),
            nodes=self.nodes,
            rows=self.products.rows(float(policy.noise.gradient), self.activations),
            variances=self.variances,
            ties=tuple(sorted((a, b) for a, b in ties if a != b)),
            casts=self.device.casts,
            constant_seconds=constant,
            fixed_bytes=fixed_bytes(graph) - sum(4 * graph.tensor_by_id[t].numel for t in self.frozen),
            private=private,
            standing=tuple(standing(graph, self.roots, self.crossing, self._backward(0))),
            workspace=tuple(self._fixed_workspace()),
            replacements=tuple(self.stores.replacements(tensors)),
            loss_limit=loss_limit,
            budget_bytes=budget_bytes,
            objective="bytes" if policy.objective == "bytes" else "time",
            seconds_scale=(constant + sum(u.seconds[0] for u in self.units)) or 1.0,
            bytes_scale=float(saved or 1),
            loss_scale=loss_limit or loss_total or 1.0,
        )

    def _backward(self, moment: int) -> int:
        return 2 * self.last + 1 - moment

    def _fixed_workspace(self) -> Iterator[tuple[int, int]]:
        """(moment, bytes) of ops without a decision, and of a loss outside of the graph."""
        if self.graph.loss_bytes:
            yield self.last, self.graph.loss_bytes
        for i, op in enumerate(self.graph.ops):
            if decides(op, self.graph):
                continue
            now, then = self.workspaces.of(op, Role.OUTPUT, "fp32", 0)
            then += passing_bytes(op, self.graph)
            if op.op_class is OpClass.VIEW and op.saves and not self.roots.copied_from.keys() & {*op.outputs}:
                # It changes memory, and sends a gradient of its own to what was there, beside the one that arrives.
                then += 4 * sum(self.graph.tensor_by_id[t].numel for t in op.outputs)
            yield from ((m, size) for m, size in ((i, now), (self._backward(i), then)) if size)

    def _check_casts(self, storages: set[str]) -> None:
        computed = {"fp32"} | {f for u in self.units for f in u.options}
        computed |= {f(c) for c in computed for f in (result_format, other_operand)}
        computed = set(map(held_as, computed))
        for a, b in product(sorted(computed | storages), repeat=2):
            if a != b and (a in computed or b in computed):
                self.device.cast_seconds(a, b, 0)

    # Units

    def _seconds(self, op: Op, role: Role, format_name: str) -> float:
        found = self.device.seconds_by_key.get((op.timing_key, role, format_name))
        if found is None:
            raise DeviceError(
                f"device {self.device.name!r} has no timing of {op.kind} ({op.timing_key!r}), role {role}, in"
                f" {format_name} (op {op.id}); calibrate there under this policy"
            )
        return found * op.calls

    def _unit(self, options: Options) -> Unit:
        op, role = options.op, options.role
        again = self.again.get(op.id) if role is Role.OUTPUT else None
        i = self.moment[op.id]
        weights = [self.graph.tensor_by_id[t].numel for t in (f"param:{w}" for w in op.weights)
                   if t in self.graph.tensor_by_id] if op.op_class is OpClass.GEMM else []  # fmt: skip
        if role is not Role.OUTPUT:
            weights = weights[:1]
        seconds, workspace, backward_workspace = [], [], []
        for f in options.formats:
            seconds.append(self._seconds(op, role, f) if options.needed else 0.0)
            if again is not None and f != again:
                seconds[-1] += self._seconds(op, role, again) / (1 + len(op.checkpoints))
            now, then = self.workspaces.of(op, role, f, sum(weights)) if options.needed else (0, 0)
            made = passing_bytes(op, self.graph)
            workspace.append(now + (made if role is Role.GRAD_WEIGHT and options.needed else 0))
            backward_workspace.append(then + (made if len(op.roles) == 1 else 0))
        kept = tuple(self.workspaces.private(op, f) for f in options.formats) if role is Role.OUTPUT else ()
        return Unit(
            op=op.id,
            role=role,
            options=tuple(options.formats),
            seconds=tuple(seconds),
            workspace=tuple(workspace),
            backward_workspace=tuple(backward_workspace) if any(backward_workspace) else (),
            moment=i if role is Role.OUTPUT else self._backward(i),
            kept=kept if any(kept) else (),
            kept_from=self._made_again(op.checkpoints),
            dropped=tuple(options.dropped.items()),
            rule=options.rule,
            needed=options.needed,
        )

    # Tensors

    def _born(self, root: str) -> int | None:
        while root in self.roots.copied_from:
            root = self.roots.copied_from[root]
        if root in self.frozen:
            return self.frozen[root]
        return self.unit_of.get((self.graph.producer.get(root, ""), Role.OUTPUT))

    def _uses(self) -> tuple[dict[str, list[Use]], dict[str, list[Use]]]:
        """Readers and savers by root and by part, in forward order."""
        graph, root_of = self.graph, self.roots.root_of
        readers: dict[str, list[Use]] = {}
        savers: dict[str, list[Use]] = {}

        def note(found: dict[str, list[Use]], tensor: str, use: Use, as_born: bool = False) -> None:
            part, root = self.parts.copied_of[tensor], root_of[tensor]
            uses = [(root, use)] if part == root or as_born else [(part, use), (root, replace(use, part=True))]
            for t, one in uses:
                if one not in found.setdefault(t, []):
                    found[t].append(one)

        for i, op in enumerate(graph.ops):
            unit = self.unit_of.get((op.id, Role.OUTPUT))
            view = self.roots.is_view(op)
            copying = any(t in self.roots.copied_from for t in op.outputs)
            for t in dict.fromkeys(op.inputs):
                root, narrow = root_of[t], graph.tensor_by_id[t].is_float32
                if view and narrow:
                    uses = [Use(moment=i, unit=self._born(root))] if copying else []
                elif unit is not None and narrow:
                    wide = [Use(moment=i, unit=self.frozen.get(root))] if op.op_class is OpClass.LOOKUP else []
                    uses = [Use(moment=i, unit=unit)] if reads_narrow(op, t, graph) else wide
                else:
                    uses = [Use(moment=i, unit=None)]
                readers.setdefault(root, [])
                for use in uses:
                    note(readers, t, use, view)
                    if (held := self._held_by_checkpoint(op, root, use)) is not None:
                        note(savers, t, held, view)
            for t in dict.fromkeys(op.saves):
                spec, root = graph.tensor_by_id[t], root_of[t]
                if graph.tensor_by_id[root].kind is TensorKind.PARAMETER:
                    continue
                if not spec.is_float32:
                    saved_as = None
                elif view:
                    saved_as = self._born(root)
                else:
                    saved_as = unit if reads_narrow(op, t, graph) else None
                path = shared_path(self._path(root), op.checkpoints)
                copied = None
                if t in self.copied_parts.get(op.id, ()):
                    copied = self.unit_of.get((op.id, Role.GRAD_INPUT), unit)
                note(savers, t, Use(moment=i, unit=saved_as, kept_from=self._made_again(path), copied=copied), view)
            if op.op_class is OpClass.RECURRENT and unit is not None:
                for w in op.weights:  # casts of its weights, for the backward pass; made outside of checkpoints
                    savers.setdefault(f"param:{w}", []).append(Use(moment=i, unit=unit))
        for root, unit in self.frozen.items():  # rounded to what it lives in, whoever reads it
            readers.setdefault(root, []).append(Use(moment=0, unit=unit))
        over = self._backward(0)
        for spec in graph.tensors:
            if spec.is_output:
                crosses = self.crossing.get(spec.id)
                ends = (self.last,) if crosses is None else (crosses.returned, over)
                for end in ends:
                    note(readers, spec.id, Use(moment=end, unit=None))
        in_order = {t: sorted(uses, key=lambda use: use.moment) for t, uses in readers.items()}
        return in_order, {root: uses for root, uses in savers.items() if uses}

    # Checkpoints

    def _path(self, root: str) -> tuple[str, ...]:
        """Checkpoints around the op that makes a root tensor."""
        producer = self.graph.producer.get(root)
        return self.graph.op_by_id[producer].checkpoints if producer is not None else ()

    def _made_again(self, path: tuple[str, ...]) -> int | None:
        """The backward moment at which what is made inside these checkpoints is made again; None outside of any."""
        return self._backward(self.checkpoint_end[path]) if path else None

    def _held_by_checkpoint(self, op: Op, root: str, use: Use) -> Use | None:
        """What a checkpoint reads from outside is kept until it has run again."""
        shared = shared_path(self._path(root), op.checkpoints)
        if len(shared) == len(op.checkpoints) or self.graph.tensor_by_id[root].kind is TensorKind.PARAMETER:
            return None
        end = self.checkpoint_end[op.checkpoints[: len(shared) + 1]]
        return Use(moment=end, unit=use.unit, kept_from=self._made_again(shared))

    def _tensor(self, root: str, readers: list[Use], savers: list[Use]) -> PlanTensor:
        spec = self.graph.tensor_by_id[root]
        members = self.members[root]
        activation, as_it_is = spec.kind is TensorKind.ACTIVATION, spec.numel * ITEM_BYTES.get(spec.dtype, 4)
        born = self._born(root) if spec.is_float32 else None
        producer = self.graph.producer.get(root)
        first = min((u.moment for u in (*readers, *savers)), default=0)
        requires_grad = any(t.requires_grad for t in members)
        histogram = self.prices.values(root)
        kept = self.stores.of(root) if activation and spec.is_float32 else Keeping()
        weights = [op in self.weighted for op in self.graph.readers.get(root, ()) if spec.kind is TensorKind.PARAMETER]
        return PlanTensor(
            id=root,
            numel=spec.numel if spec.is_float32 else -(-as_it_is // 4),
            is_float32=spec.is_float32,
            wide_bytes=as_it_is if activation else 0,
            narrow_costs=spec.kind is not TensorKind.PARAMETER or bool(savers),
            birth=self.moment[producer] if producer is not None else self.entered.get(root, first),
            born=born,
            inherits=root in self.roots.copied_from,
            readers=tuple(readers),
            savers=tuple(savers),
            storages=kept.storages,
            stored_by=kept.stored_by,
            gemms=kept.gemms,
            others=kept.others,
            masks=kept.masks,
            remaking=kept.remaking,
            gradient_readers=self.senders.get(root, ()),
            casts_back=requires_grad and not any(weights),
            # Products cast their weights themselves: that is in their seconds.
            runs=0 if root in self.frozen or (weights and all(weights)) else 1 + len(self._path(root)),
            loss_noise=tuple((f.name, e) for f in self.prices.narrow if (e := self.prices.loss_noise(root, f)) > 0.0),
            saturates=tuple(
                f.name
                for f in self.prices.narrow
                if histogram and not f.scaled and histogram.amax > f.max_value
                and (not requires_grad or saturates_by_design(histogram, f))
            ),
        )  # fmt: skip

    def _parts(
        self, whole: Sequence[PlanTensor], readers: dict[str, list[Use]], savers: dict[str, list[Use]]
    ) -> Iterator[PlanTensor]:
        """Parts that are read, or have a gradient."""
        index = {t.id: i for i, t in enumerate(whole)}
        for part, root in self.parts.root_of.items():
            if root not in index or not (part in readers or part in savers or part in self.senders):
                continue
            spec, root_tensor, sent = self.graph.tensor_by_id[part], whole[index[root]], self.senders.get(part, ())
            expanded = self.parts.copied_of[part] != part
            as_it_is = spec.numel * ITEM_BYTES.get(spec.dtype, 4)
            yield PlanTensor(
                id=part,
                numel=spec.numel if spec.is_float32 else -(-as_it_is // 4),
                is_float32=spec.is_float32,
                wide_bytes=as_it_is,
                narrow_costs=True,
                birth=self.moment[self.graph.producer[part]],
                born=sent_in(sent, root_tensor.born) if expanded else root_tensor.born,
                inherits=True,
                part_of=index[root],
                readers=tuple(readers.get(part, ())),
                savers=tuple(savers.get(part, ())),
                gradient_readers=sent,
                casts_back=root_tensor.casts_back,
                runs=root_tensor.runs,
            )
