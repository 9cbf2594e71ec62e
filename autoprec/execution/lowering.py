"""How rewritten graphs run: as they are, or through torch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from autoprec.errors import UnsupportedError
from autoprec.execution.checking import CheckingInterpreter
from autoprec.plans import Plan
from autoprec.rewriting.rewrite import Rewritten
from autoprec.tracing.bindings import Binding

if TYPE_CHECKING:
    from autoprec.execution.inductor import Inductor, Order

__all__ = ["BACKENDS", "Backend", "Compiled", "KeptTensor", "PassBytes", "Lowering", "RefusedError", "Runner"]

Backend = Literal["eager", "inductor"]
BACKENDS: tuple[str, ...] = get_args(Backend)


class RefusedError(UnsupportedError):
    """The compiler takes a graph not, or not for these sizes. Nothing has run."""


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """What a compiled graph keeps between its forward and its backward pass, parameters and inputs aside.

    Attributes:
        tensor: id of the tensor that it is, or is a part of computing; "" where nobody knows.
        dtype: torch's name for what is kept.
        bytes: how many; of symbolic sizes at the first call.
        planned: whether it is a storage that the plan names.
        again: whether the plan keeps `tensor` narrow or makes it again, and this is kept beside that.
    """

    tensor: str
    dtype: str
    bytes: int
    planned: bool
    again: bool


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """What the passes of a graph hold at once, predicted from the generated code: parameters and inputs aside,
    gradients included.

    Attributes:
        forward: most in the forward pass.
        held: when that is over.
        outputs: of these, the outputs that have memory of their own.
        entering: gradients that the backward pass is given. A replay of the step needs them: they stay.
        backward: most in the backward pass, if nobody but the graph holds its outputs.
        backward_beside_outputs: the same, beside the outputs, if somebody holds them: a graph that they are given to.
    """

    forward: int
    held: int
    outputs: int
    entering: int = 0
    backward: int = 0
    backward_beside_outputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One graph as the compiler made it.

    Attributes:
        first_op: id of the graph's first op.
        plan: fingerprint of the plan, "" for the graph as it was captured.
        seconds: that it took, forward and backward.
        kept: see there; empty for a graph without backward pass.
        told: what its passes hold where gradients come back to these outputs alone (None: to all); None where that is
            not known.
    """

    first_op: str
    plan: str
    seconds: float
    kept: tuple[KeptTensor, ...]
    told: Callable[[frozenset[int] | None], PassBytes | None] = field(default=lambda _: None, compare=False, repr=False)

    @property
    def kept_bytes(self) -> int:
        """Bytes between the passes, parameters and inputs aside."""
        return sum(t.bytes for t in self.kept)

    @property
    def passes(self) -> PassBytes | None:
        """What they hold where gradients come back to all outputs."""
        return self.told(None)

    @property
    def peak_bytes(self) -> int | None:
        """Most that one of the passes holds."""
        return None if (passes := self.passes) is None else max(passes.forward, passes.backward)


class Runner(Protocol):
    """What a graph runs as. `executed`: op id → format of its result, as seen when it first ran; empty for the graph
    as it was captured. `compiled`: what was made of it, each once."""

    executed: Mapping[str, str]
    compiled: Sequence[Compiled]

    def prepare(self) -> None:
        """Compile what can be compiled before the first call. Raises `RefusedError` if that fails."""

    def __call__(self, *arguments: Any) -> Any:
        """Run it on the graph's inputs. Raises `RefusedError` if they are of sizes that the compiler does not take."""


class Lowering:
    """Makes graphs run. The session's; what is compiled is kept for plans that come back."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        #: Plans that were compiled before the run was stopped: they are not new when they come back.
        self.known_before: frozenset[str] = frozenset()
        #: Plans that run as they are, because compiled they would break a budget of so many bytes.
        self.left_uncompiled: dict[str, int] = {}
        self._graphs: dict[tuple[Binding, str], Inductor] = {}
        self._refused: set[tuple[Binding, str]] = set()

    @property
    def compiles(self) -> bool:
        """Whether graphs go through a compiler."""
        return self.backend != "eager"

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """Everything that was compiled so far."""
        return tuple(made for graph in self._graphs.values() for made in graph.compiled)

    @property
    def known(self) -> frozenset[str]:
        """Fingerprints of plans that were compiled in this run, or refused; "" for graphs as they were captured."""
        return self.known_before | {plan for _, plan in (*self._graphs, *self._refused)}

    def knows(self, plan: Plan) -> bool:
        """Whether it was compiled in this run, or runs as it is."""
        return _name(plan) in self.known or self._stays_uncompiled(plan)

    def leave_uncompiled(self, plan: Plan) -> None:
        """It runs as it is from now on, also when it comes back, under its budget or a smaller one."""
        assert plan.budget_bytes is not None
        self.left_uncompiled[_name(plan)] = plan.budget_bytes

    def _stays_uncompiled(self, plan: Plan) -> bool:
        return plan.budget_bytes is not None and plan.budget_bytes <= self.left_uncompiled.get(_name(plan), -1)

    def runs(
        self, binding: Binding, plan: Plan | None, rewritten: Rewritten | None, *, compiled: bool = True
    ) -> Runner:
        """What is called with the graph's inputs; nothing is compiled before the first call. `rewritten` is None where
        the plan changes nothing, `plan` where there is none yet: that is not worth compiling."""
        if self.backend == "eager" or plan is None or not compiled or self._stays_uncompiled(plan):
            return _Eager(binding, plan, rewritten)
        key = _key(binding, plan, rewritten)
        if key in self._refused:
            return _Eager(binding, plan, rewritten)
        if key not in self._graphs:
            from autoprec.execution.inductor import Inductor  # the compiler takes a second to import

            self._graphs[key] = Inductor(binding, plan, rewritten)
        return self._graphs[key]

    def order(self, binding: Binding, plan: Plan | None, rewritten: Rewritten | None) -> Order | None:
        """What would be compiled for `runs` that is not compiled yet."""
        if plan is None or self._stays_uncompiled(plan):
            return None
        key = _key(binding, plan, rewritten)
        if key in self._refused or key in self._graphs:
            return None
        from autoprec.execution.inductor import Inductor

        return Inductor(binding, plan, rewritten).order

    def uncompiled(self, binding: Binding, plan: Plan, rewritten: Rewritten | None) -> Runner:
        """What the compiler refused, as it is; also when this plan comes back."""
        key = _key(binding, plan, rewritten)
        self._graphs.pop(key, None)
        self._refused.add(key)
        return _Eager(binding, plan, rewritten)


def _key(binding: Binding, plan: Plan, rewritten: Rewritten | None) -> tuple[Binding, str]:
    """Under which a graph is known; one that no plan changes, as it was captured."""
    return binding, "" if rewritten is None else plan.fingerprint


def _name(plan: Plan) -> str:
    """What changes nothing is one plan, whatever it decides."""
    return "" if plan.is_identity else plan.fingerprint


class _Eager:
    """A graph as it is; the first run of a rewritten one is checked against the plan."""

    def __init__(self, binding: Binding, plan: Plan | None, rewritten: Rewritten | None) -> None:
        self._module = binding.template.module if rewritten is None else rewritten.module
        self._unchecked = None
        if rewritten is not None and plan is not None:
            self._unchecked = partial(CheckingInterpreter, rewritten, binding, plan)
        self.executed: Mapping[str, str] = {}
        self.compiled: Sequence[Compiled] = ()

    def prepare(self) -> None:
        """Nothing is compiled."""

    def __call__(self, *arguments: Any) -> Any:
        if self._unchecked is None:
            return self._module.forward(*arguments)
        checking = self._unchecked()
        result = checking.run(*arguments)
        self._unchecked, self.executed = None, checking.executed
        return result
