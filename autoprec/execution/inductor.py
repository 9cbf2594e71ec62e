"""Graphs through torch's compiler. The casts of a plan survive fusion (`emulate_precision_casts`), and random numbers
are eager's (`fallback_random`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from autoprec.execution.checking import CheckingInterpreter
from autoprec.execution.dry_run import as_first_seen, dry_run, size_hint
from autoprec.execution.finishing import Finishing
from autoprec.execution.fusing import INPUT, lean_code
from autoprec.execution.lowering import Compiled, PassBytes, RefusedError
from autoprec.execution.partitioning import Narrow, Partitioner, results_of
from autoprec.execution.undifferentiated import Reach
from autoprec.numerics.compilers import OF_TENSOR
from autoprec.numerics.dtypes import dtype_of, has_dtype
from autoprec.numerics.frozen import NarrowParameter, format_held, narrow_like
from autoprec.numerics.recurrent import as_one_kernel
from autoprec.plans import AS_IS, RECOMPUTED, Plan
from autoprec.rewriting.rewrite import Rewritten
from autoprec.tracing.bindings import Binding

__all__ = ["Inductor", "Order", "compile_graph"]

#: How torch names the gradients that a backward pass is given.
_GIVEN = "tangents_"

_OPTIONS = {"emulate_precision_casts": True, "fallback_random": True}


#: Of frozen parameters of which the plan wants no FP32 copy: place among the inputs, the format in which it is held all
#: the same (None: it is in FP32 again), and whether it is trained by now.
_Held = tuple[tuple[int, str | None, bool], ...]


class Inductor:
    """One graph under one plan, compiled for the sizes that come: once with the symbols that Dynamo captured, and again
    for sizes that what was compiled does not hold for."""

    def __init__(self, binding: Binding, plan: Plan | None, rewritten: Rewritten | None) -> None:
        self._binding, self._plan, self._rewritten = binding, plan, rewritten
        self._fakes = [n.meta["example_value"] for n in binding.template.placeholders]
        self._symbols = [i for i, x in enumerate(self._fakes) if isinstance(x, torch.SymInt)]
        #: Dynamo need not notice that they have become such.
        self._living = {} if plan is None else _living(binding, plan)
        self._general: dict[_Held, tuple[Callable[..., Any], Callable[..., bool]]] = {}
        self._special: dict[tuple[_Held, tuple[int, ...]], Callable[..., Any]] = {}
        self.compiled: list[Compiled] = []
        self.executed: Mapping[str, str] = {}

    def prepare(self) -> None:
        """Compile with the symbols that Dynamo captured, and for parameters that live as the plan has them."""
        self._of(self._planned)

    @property
    def _planned(self) -> _Held:
        return tuple((i, fmt, False) for i, fmt in self._living.items())

    def _of(self, held: _Held) -> tuple[Callable[..., Any], Callable[..., bool]]:
        if held not in self._general:
            self._general[held] = self._compile_with_symbols(held)
        return self._general[held]

    def __call__(self, *arguments: Any) -> Any:
        """Run it, compiled now if nothing that is there fits."""
        sizes = tuple(int(arguments[i]) for i in self._symbols)
        held = tuple((i, format_held(p := arguments[i]), p.requires_grad) for i in self._living)
        run, holds = self._of(held)
        if not holds(sizes):
            if (held, sizes) not in self._special:
                self._special[held, sizes] = self._compile(list(arguments))
            run = self._special[held, sizes]
        results = run(*arguments)
        if self._reach.differs and torch.is_grad_enabled():
            self._reach.watch(arguments, results)
        return results

    def _compile_with_symbols(self, held: _Held) -> tuple[Callable[..., Any], Callable[..., bool]]:
        mode = detect_fake_mode(self._fakes)
        assert mode is not None
        with tracing(TracingContext(mode)):
            examples = self._examples(held)
            if self._rewritten is not None and self._plan is not None:
                checking = CheckingInterpreter(self._rewritten, self._binding, self._plan)
                with mode, torch.no_grad():
                    checking.run(*map(as_first_seen, examples))
                self.executed = checking.executed
            run = self._compile(examples)
        if not self._symbols:
            return run, lambda _: True
        environment = mode.shape_env
        code = environment.produce_guards_expression([self._fakes[i] for i in self._symbols])
        return run, lambda sizes: not code or environment.evaluate_guards_expression(code, sizes)

    def _examples(self, held: _Held) -> list[Any]:
        """What Dynamo captured the graph with, but parameters in the formats that they are held in."""
        examples = list(self._fakes)
        for i, fmt, trained in held:
            x = examples[i]
            if format_held(x) != fmt:
                plain = torch.empty_like(x.payload, dtype=torch.float32) if isinstance(x, NarrowParameter) else x
                x = plain if fmt is None else narrow_like(plain, fmt)
            examples[i] = x if x.requires_grad == trained else x.detach().requires_grad_(trained)
        return examples

    @property
    def order(self) -> Order:
        """What `prepare` compiles."""
        return self._order(self._examples(self._planned))

    def _order(self, examples: Sequence[Any]) -> Order:
        # On a GPU, where a read that is saved is worth more, nobody has measured what that costs.
        return Order(self._labelled(), examples, bool(self._narrow) and _on_cpu(examples))

    def _compile(self, examples: Sequence[Any]) -> Callable[..., Any]:
        begin = time.perf_counter()
        try:
            run, passes, partitioner = compile_graph(self._order(examples), self._narrow)
        except Exception as error:
            what = " ".join(str(error).split())[:300]
            raise RefusedError(
                f"inductor does not compile the graph of {self._name} under this plan: {what}; use backend='eager'"
            ) from error
        self.compiled.append(
            Compiled(
                first_op=self._name,
                plan="" if self._plan is None else self._plan.fingerprint,
                seconds=time.perf_counter() - begin,
                kept=partitioner.kept,
                told=cache(partial(_told, passes, partitioner.outputs, self._differentiable)),
            )
        )
        return run

    @cached_property
    def _reach(self) -> Reach:
        return Reach(self._binding.template.module.graph, self._differentiable)

    @property
    def _differentiable(self) -> list[int]:
        """Outputs to which a gradient may come back."""
        (results,) = self._binding.template.module.graph.output_node().args
        assert isinstance(results, (tuple, list))
        values = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in results]
        return [i for i, y in enumerate(values) if isinstance(y, Tensor) and y.requires_grad]

    @cached_property
    def _narrow(self) -> dict[str, Narrow]:
        """The tensors that the plan does not keep as they are."""
        found = {}
        kept = {} if self._plan is None else self._plan.storage_of
        made_of = {output: op.inputs for op in self._binding.ops for output in op.outputs}
        for node, tensor in self._binding.tensor_id.items():
            value, storage = node.meta.get("example_value"), kept.get(tensor, AS_IS)
            if storage != AS_IS and isinstance(value, Tensor):
                dtype = str(dtype_of(storage)) if storage != RECOMPUTED and has_dtype(storage) else ""
                inputs = tuple(t for _, t in made_of.get(tensor, ()) if kept.get(t) == AS_IS)
                found[tensor] = Narrow(size_hint(value.numel()), dtype.removeprefix("torch."), inputs)
        return found

    @property
    def _name(self) -> str:
        return self._binding.ops[0].id if self._binding.ops else "a graph without ops"

    def _labelled(self) -> fx.GraphModule:
        """A copy, because compilers change what they are given; its nodes say which tensor they are about."""
        template = self._binding.template
        if self._rewritten is None:
            return _labelled(template.module, template.flat.origin, self._binding.tensor_id)
        return _labelled(self._rewritten.module, self._rewritten.origin, self._binding.tensor_id)


def _living(binding: Binding, plan: Plan) -> dict[int, str]:
    """Places of frozen parameters among a graph's inputs, and the formats in which the plan has them live."""
    names = {i: binding.parameters.get(n, "") for i, n in enumerate(binding.template.placeholders)}
    found = {i: plan.living.get(f"param:{fqn}") for i, fqn in names.items()}
    return {i: fmt for i, fmt in found.items() if fmt is not None}


class Order(NamedTuple):
    """What the compiler is given: a graph whose nodes say which tensor they are about, examples of its inputs, and
    whether its code should be lean: the plan keeps something narrow, or makes it again, and it runs on a CPU."""

    module: fx.GraphModule
    examples: Sequence[Any]
    is_lean: bool = False


def compile_graph(
    order: Order, narrow: Mapping[str, Narrow] | None = None
) -> tuple[Callable[..., Any], list[_Pass], Partitioner]:
    """(what runs, its forward pass and its backward pass if it has one, what knows what is kept). `narrow`: by tensor,
    what the plan does not keep as it is; only what is then told of it depends on this."""
    partitioner, passes = Partitioner(narrow or {}, order.is_lean), list[_Pass]()
    as_one_kernel(order.module)

    def compile_pass(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # torch refuses a second backward pass where nobody has said so
        names = tuple(n.name for n in graph.graph.nodes if n.op == "placeholder")
        results = tuple(n.name if isinstance(n, fx.Node) else "" for n in results_of(graph))
        code = compile_fx_inner(graph, inputs, **options)
        passes.append(_Pass(getattr(code, "current_callable", None), inputs, names, results))
        return code

    # What the forward pass has kept is not written to: another backward pass may read it (`retain_graph`). It takes a
    # sixtieth of a transformer's peak (docs/measurements/lowering.md).
    options = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True, "donated_buffer": False}
    own = dict(custom_partitioner_fn=partitioner, **_OPTIONS)
    if _on_cpu(order.examples) and inductor_config.post_grad_custom_post_pass is None:  # or what the user has there
        own["post_grad_custom_post_pass"] = Finishing()
    with (
        inductor_config.patch(own),
        functorch_config.patch(options),
        lean_code() if order.is_lean else nullcontext(),
    ):
        return compile_fx(order.module, list(order.examples), inner_compile=compile_pass), passes, partitioner


def _on_cpu(examples: Iterable[Any]) -> bool:
    return all(x.is_cpu for x in examples if isinstance(x, Tensor))


class _Pass(NamedTuple):
    """The generated code of one pass, examples of its inputs, and the names of its inputs and results."""

    code: Any
    inputs: Sequence[Any]
    names: Sequence[str]
    results: Sequence[str]


def _told(
    passes: Sequence[_Pass], outputs: int | None, differentiable: Sequence[int], entering: frozenset[int] | None
) -> PassBytes | None:
    """`Compiled.told`: for outputs to which no gradient comes back the code is given zeros, and lets go of them."""
    count = sum(n.startswith(_GIVEN) for p in passes[1:] for n in p.names)
    if entering is None or count != len(differentiable):
        return _predicted(passes, outputs)
    return _predicted(passes, outputs, {f"{_GIVEN}{k}" for k, i in enumerate(differentiable, 1) if i in entering})


def _predicted(
    passes: Sequence[_Pass], outputs: int | None, entering: Container[str] | None = None
) -> PassBytes | None:
    """Of the forward pass, the first of them, and of the backward pass if there is one; None where that is not known.
    `outputs`: how many of the first results are no tensors kept for the backward pass; None: all. `entering`: which of
    the gradients that the backward pass is given come from outside; None: all."""
    forward = passes[0]
    run = dry_run(forward.code, forward.inputs, [not n.startswith(INPUT) for n in forward.names], outputs)
    if run is None:
        return None
    found = PassBytes(forward=run.peak_bytes, held=run.held_bytes, outputs=run.output_bytes)
    own = dict(zip(forward.results, run.own, strict=False))  # a name for each, or the rest is whoever's
    for backward in passes[1:]:
        # What the forward pass kept, copies of inputs in another layout among it, is the backward pass's to let go of.
        # The gradients that come from outside are there until it is over: a replay of the step needs them.
        stay = {n for n in backward.names if n.startswith(_GIVEN) and (entering is None or n in entering)}
        owned = [own.get(n, n not in stay and not n.startswith(INPUT)) for n in backward.names]
        mine = [mine and n not in forward.results[:outputs] for n, mine in zip(backward.names, owned, strict=True)]
        alone = dry_run(backward.code, backward.inputs, owned)
        beside = alone if mine == owned else dry_run(backward.code, backward.inputs, mine)
        if alone is None or beside is None:
            return None
        given = _bytes(x for n, x in zip(backward.names, backward.inputs, strict=True) if n in stay)
        found = replace(
            found,
            entering=given,
            backward=given + alone.peak_bytes,
            backward_beside_outputs=given + beside.peak_bytes,
        )
    return found


def _bytes(values: Iterable[Any]) -> int:
    """Of their storages."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return sum({x.untyped_storage()._cdata: size_hint(x.untyped_storage().nbytes()) for x in tensors}.values())


def _labelled(
    module: fx.GraphModule, origin: Mapping[fx.Node, fx.Node], tensor_id: Mapping[fx.Node, str]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    made = fx.GraphModule(module, graph)
    named: dict[fx.Node, str] = {}
    for node, copied in copies.items():
        read = [named[n] for n in node.all_input_nodes if n in named]
        tensor = tensor_id.get(origin.get(node, node)) or (read[0] if read else None)  # a cast is of what it casts
        if tensor is not None:
            named[node] = tensor
            copied.meta["custom"] = {**copied.meta.get("custom", {}), OF_TENSOR: tensor}
        if node.op == "get_attr" and isinstance(body := getattr(module, str(node.target), None), fx.GraphModule):
            again = _labelled(body, origin, tensor_id)
            again.meta.update(body.meta)
            setattr(made, str(node.target), again)
    return made
