"""Activation checkpoints: their bodies laid flat for planning, folded back for running.

Dynamo hands over a checkpoint as one node with a graph of its own, its body. Whoever names, prices or rewrites ops
works on the flat graph, where the ops of bodies stand among the others; what runs is always nested, because the
checkpoint is what makes a body run again in the backward pass.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import checkpoint

from autoprec.numerics.functions import function_of
from autoprec.numerics.pooling import pooling_of

__all__ = [
    "Change",
    "Checkpoint",
    "Flat",
    "GraphInterpreter",
    "CheckpointPath",
    "checkpointed",
    "flatten",
    "fold",
    "prepare",
]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One checkpoint of a captured graph: the node that stands for it, and the graph that it runs."""

    node: fx.Node
    body: fx.GraphModule


#: The checkpoints around a node, outermost first.
CheckpointPath = tuple[Checkpoint, ...]


class _FirstThenAgain:
    """Runs `first` in the forward pass and the plain body when the backward pass needs it again."""

    def __init__(self, first: Callable[..., Any], again: Callable[..., Any]) -> None:
        self._next, self._again = first, again

    def __call__(self, *args: Any) -> Any:
        run, self._next = self._next, self._again
        return run(*args)


def checkpointed(body: fx.GraphModule, *args: Any, first: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Activation checkpointing of a captured body, with the random state restored for the recomputation.

    `first` runs instead of the body in the forward pass: an interpreter of it that looks at its values. Leaves
    (parameters, buffers, plain inputs) are bound as they are in the user's program: as arguments of `checkpoint` they
    would be held to the version that they had, and running statistics change.
    """
    if first is None and any(isinstance(a, torch.Tensor) and is_fake(a) for a in args):
        # A compiler makes a body run again by itself, and knows which one by torch's own node for it.
        return torch.ops.higher_order.tag_activation_checkpoint(body, *args, **options)
    context = body.meta.get("_checkpoint_context_fn")
    more = {} if context is None else {"context_fn": context}
    kept = {k: options[k] for k in ("determinism_check", "debug", "early_stop") if k in options}
    kept["preserve_rng_state"] = options.get("preserve_rng_state", True)
    leaf = [isinstance(a, torch.Tensor) and a.grad_fn is None for a in args]
    bound = [a if is_leaf else None for a, is_leaf in zip(args, leaf, strict=True)]
    run = body if first is None else _FirstThenAgain(first, body)

    def whole(*given: Any) -> Any:
        rest = iter(given)
        return run(*(a if is_leaf else next(rest) for a, is_leaf in zip(bound, leaf, strict=True)))

    free = [a for a, is_leaf in zip(args, leaf, strict=True) if not is_leaf]
    return checkpoint(whole, *free, use_reentrant=False, **more, **kept)


def prepare(module: fx.GraphModule) -> None:
    """Make a captured graph run in eager mode as the user's program does, its bodies included.

    torch runs a captured checkpoint without restoring the random state (a compiler would), so that dropout inside would
    draw another mask when it is recomputed; and it cannot run the backward pass of a nested compile region at all.
    Max pooling and user's functions become ours, which give the same bits and keep fewer bytes, whatever the plan.
    """
    taken: set[str] = set()
    for node in list(module.graph.nodes):
        if node.target is torch.ops.higher_order.invoke_subgraph:
            _inline(module, node)
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = checkpointed
            name = node.args[0].target
            if name in taken:  # one body per call
                copied = f"{name}_{len(taken)}"
                module.add_submodule(copied, copy.deepcopy(module.get_submodule(name)))
                with module.graph.inserting_before(node):
                    node.update_arg(0, module.graph.get_attr(copied))
                name = copied
            taken.add(name)
            prepare(_body(module, name))
        elif node.op == "call_function":
            node.target = pooling_of(function_of(node.target), node.args, node.kwargs)
    # Not `eliminate_dead_code`: in bodies it takes a statement like `x.mul_(2)` for dead.
    for node in reversed(list(module.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.recompile()


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    """A nested compile region spares the compiler work and means nothing else: its nodes take its place."""
    name, inputs = call.args[0].target, call.args[2:]
    body = _body(module, name)
    prepare(body)
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    values = dict(zip(places, inputs, strict=True))
    with module.graph.inserting_before(call):
        results = module.graph.graph_copy(body.graph, values)
    for node in body.graph.nodes:
        if node.op == "get_attr":
            values[node].target = f"{name}.{node.target}"
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(call)


@dataclass(frozen=True, eq=False)
class Flat:
    """A captured graph with the bodies of its checkpoints laid flat. Never run.

    Attributes:
        graph: all ops in execution order.
        origin: node of the captured graph, or of a body → the flat node that stands for it.
        within: flat node → the checkpoints around it; nodes outside of all are missing.
    """

    graph: fx.Graph
    origin: Mapping[fx.Node, fx.Node]
    within: Mapping[fx.Node, CheckpointPath]


def flatten(module: fx.GraphModule) -> Flat:
    """Lay the bodies flat; a graph without checkpoints is its own flat graph."""
    if all(n.target is not checkpointed for n in module.graph.nodes):
        return Flat(graph=module.graph, origin={n: n for n in module.graph.nodes}, within={})
    graph, origin, within = fx.Graph(), {}, {}

    def lay(source: fx.GraphModule, prefix: str, given: Sequence[Any] | None, path: CheckpointPath) -> Any:
        values: dict[fx.Node, Any] = {}
        arguments = iter(given or ())
        for node in source.graph.nodes:
            if node.op == "placeholder" and given is not None:
                values[node] = next(arguments)
            elif node.op == "output" and given is not None:
                return fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.target is checkpointed:
                name, inputs = node.args[0].target, fx.node.map_arg(node.args[1:], values.__getitem__)
                body = _body(source, name)
                values[node] = lay(body, f"{prefix}{name}.", inputs, (*path, Checkpoint(node, body)))
            elif node.target is operator.getitem and isinstance(values[node.args[0]], (tuple, list)):
                values[node] = values[node.args[0]][node.args[1]]
            elif not (node.op == "get_attr" and all(u.target is checkpointed for u in node.users)):
                new = values[node] = origin[node] = graph.node_copy(node, values.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    new.target = prefix + node.target
                if path:
                    within[new] = path
        return None

    lay(module, "", None, ())
    return Flat(graph=graph, origin=origin, within=within)


def _body(module: nn.Module, name: str) -> fx.GraphModule:
    body = module.get_submodule(name)
    assert isinstance(body, fx.GraphModule)
    return body


def fold(
    graph: fx.Graph, within: Mapping[fx.Node, CheckpointPath], root: fx.GraphModule
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The graph with its checkpoints as nodes again, and where each of its nodes went.

    A body takes what it reads from outside, gives what is read outside, and has the options of the captured one.
    Nodes of one checkpoint must stand together. `root` holds the attributes that the graph names.
    """
    if not any(within.values()):
        return fx.GraphModule(root, graph), {n: n for n in graph.nodes}
    folding = _Folding(within, root)
    return folding.module(list(graph.nodes), 0, (), None), folding.went


class Change:
    """What an interpreter does otherwise at a node; this one, nothing.

    Attributes:
        in_cast: whether it is about a cast, which FP32 does not have.
    """

    in_cast = False

    def arguments(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """(args, kwargs) that the node gets."""
        return args, kwargs

    def result(self, y: Any) -> Any:
        """What becomes of its result."""
        return y


class GraphInterpreter(fx.Interpreter):
    """Runs a graph, and the bodies of its checkpoints in the forward pass, node by node; subclasses look at values.

    A body that runs again in the backward pass runs unseen: recomputation makes no statistics. State that a subclass
    assigns to (and does not only fill) must be held by an object that the interpreters of the bodies share.

    Args:
        module: a captured or a rewritten graph.
        origin: its nodes (those of bodies too) → the flat nodes that ops are known by.
        changes: by flat node, what is done otherwise there.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        origin: Mapping[fx.Node, fx.Node],
        changes: Mapping[fx.Node, Change] | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.origin, self.changes = origin, changes or {}
        self.inside = False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, changed if it is to be."""
        result, change = super().run_node(n), self._change(n)
        return result if change is None else change.result(result)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """What a node is called with, changed if it is to be."""
        (args, kwargs), change = super().fetch_args_kwargs_from_env(n), self._change(n)
        return (args, kwargs) if change is None else change.arguments(n, args, kwargs)

    def _change(self, n: fx.Node) -> Change | None:
        return self.changes.get(self.origin[n]) if self.changes and n in self.origin else None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checkpoints are run by an interpreter of their own."""
        if target is not checkpointed:
            return super().call_function(target, args, kwargs)
        body, *inputs = args
        within = copy.copy(self)
        fx.Interpreter.__init__(within, body, garbage_collect_values=True)
        within.inside = True
        return checkpointed(body, *inputs, first=within.run, **kwargs)


class _Folding:
    """Builds nested modules from flat nodes; `went` says where each node is now."""

    def __init__(self, within: Mapping[fx.Node, CheckpointPath], root: fx.GraphModule) -> None:
        self._within, self._root = within, root
        self.went: dict[fx.Node, fx.Node] = {}

    def module(
        self,
        nodes: Sequence[fx.Node],
        depth: int,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node] | None,
    ) -> fx.GraphModule:
        """A module of the nodes, which are inside `depth` checkpoints; `outputs` is None for the outermost one."""
        graph, attributes = fx.Graph(), {}
        here = {n: graph.placeholder(n.name) for n in inputs}
        for captured, group in itertools.groupby(nodes, lambda n: self._checkpoint(n, depth)):
            inner = list(group)
            if captured is None:
                for n in inner:
                    here[n] = self.went[n] = graph.node_copy(n, here.__getitem__)
                    if n.op in ("get_attr", "call_module"):
                        attributes[n.target] = operator.attrgetter(n.target)(self._root)
                continue
            own = set(inner)
            read = list(dict.fromkeys(m for n in inner for m in n.all_input_nodes if m not in own))
            given = [n for n in inner if any(u not in own for u in n.users)]
            name = f"checkpoint_{len(attributes)}"
            body = attributes[name] = self.module(inner, depth + 1, read, given)
            body.meta.update(captured.body.meta)
            arguments = (graph.get_attr(name), *(here[n] for n in read))
            call = graph.call_function(checkpointed, arguments, dict(captured.node.kwargs))
            for i, n in enumerate(given):
                here[n] = graph.call_function(operator.getitem, (call, i))
        if outputs is not None:
            graph.output(tuple(here[n] for n in outputs))
        return fx.GraphModule(attributes, graph)

    def _checkpoint(self, node: fx.Node, depth: int) -> Checkpoint | None:
        path = self._within.get(node, ())
        return path[depth] if len(path) > depth else None
