"""What a run has observed so far: the graph, the calibration profile, the window of the monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.calibration.foreseeing import foresee
from autoprec.calibration.observer import ObservingInterpreter, StepObserver
from autoprec.calibration.structure import StructureRecorder, TimingCase
from autoprec.execution.lowering import Lowering
from autoprec.execution.measuring import at_the_turn
from autoprec.execution.replay import CallRecord, shadow, shadow_arguments
from autoprec.execution.slots import Slot
from autoprec.graphs import OpGraph
from autoprec.profiles import Profile, TensorProfile
from autoprec.tracing.bindings import Binding

__all__ = ["Observations", "describe_graph"]

#: Elements per tensor that a monitored step looks at: 1/16 of what calibration looks at.
MONITOR_SAMPLE_LIMIT = 1 << 12

#: Steps in a row that are forgotten at most because of results that are not finite and lead to no backward pass: some
#: models have such in every step.
_GIVEN_UP = 3


class Observations:
    """Mutable; owned by the session.

    Attributes:
        graph: the ops of all observed steps so far; None before the first.
        cases: a call of each distinct op (timing needs them), by timing key.
        profile: what calibration recorded so far; None before the first observed step.
        steps: optimizer steps in it (`profile.steps` counts backward passes).
        window: of the window in progress; None before its first observed step.
        learned: (number of the window, value ranges) that count when planning, beside the profile.
        foreseen: whether the structure of a graph was foreseen, because calibration runs under a provisional plan.
        doubted: whether outputs may be differentiated by now that were not while calibrating.
    """

    def __init__(self, describe: Callable[[StructureRecorder], OpGraph]) -> None:
        self._describe = describe
        self.graph: OpGraph | None = None
        self.cases: dict[str, TimingCase] = {}
        self.profile: Profile | None = None
        self.steps = 0
        self.foreseen = False
        self._expected: StructureRecorder | None = None
        self.window: Profile | None = None
        self.learned: tuple[tuple[int, Profile], ...] = ()
        self._observer: StepObserver | None = None
        self._structure: StructureRecorder | None = None
        #: Calls of the step with a result that is not finite, and how many steps in a row were forgotten for one.
        self._nonfinite: list[CallRecord] = []
        self._given_up = 0
        self.doubted = False

    @property
    def observer(self) -> StepObserver | None:
        """The observer of the step in progress, None if it is not observed."""
        return self._observer

    def begin(self, *, calibrating: bool, explicit_loss: bool = False, summed: frozenset[str] = frozenset()) -> None:
        """Observe the step that begins. Each step of calibration also tells the structure: a branch that the first one
        did not take has ops of its own. `explicit_loss`, `summed`: see `StepObserver`."""
        self._expected = None
        self._nonfinite = []
        structure = self._structure = StructureRecorder() if calibrating or self.graph is None else None
        if calibrating:
            self._observer = StepObserver(structure=structure, explicit_loss=explicit_loss)
        else:
            limit = MONITOR_SAMPLE_LIMIT
            self._observer = StepObserver(
                limit=limit, sensitivities=False, structure=structure, summed=summed, masked=self._masked
            )

    @property
    def _masked(self) -> frozenset[tuple[str, str]]:
        """(tensor, field) of what had elements that were not finite: masks, and what is made of them."""
        seen = [t for profile in (self.profile, self.window) if profile is not None for t in profile.tensors]
        values = {(t.id, "values") for t in seen if t.values.nonfinite}
        return frozenset(values | {(t.id, "gradients") for t in seen if t.gradients and t.gradients.nonfinite})

    def run(self, slot: Slot, arguments: Sequence[Any]) -> Any:
        """Run a slot, observed if this step is."""
        if self._observer is None:
            return slot.run(arguments)
        rewritten = slot.rewritten is not None
        if rewritten and self._observer.sensitivities and self._structure is not None:
            foresee(slot.binding, arguments, self._structure)
            self.foreseen = True
        interpreter = ObservingInterpreter(
            slot.module, slot.origin, slot.binding, self._observer, rewritten=rewritten, changes=slot.faults
        )
        outputs = interpreter.run(*arguments)
        if self._structure is not None:
            self._structure.called(slot.binding, arguments, outputs)
        return outputs

    def look(self, record: CallRecord, outputs: Any) -> None:
        """Whether the results of a call are finite, if its step is observed: a loop may give it up if they are not."""
        if self._observer is None:
            return
        given = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        numbers = (y.detach() for y in given if isinstance(y, Tensor) and y.is_floating_point())
        if not all(bool(y.isfinite().all()) for y in numbers):
            self._nonfinite.append(record)

    def how_to_note(self, binding: Binding) -> dict[str, Any]:
        """Which outputs of a graph were not differentiated, and whether this step tells (see `keep_gradients`)."""
        if self._structure is not None or self.graph is None or self.doubted:
            return {"apart": True}
        known = self.graph.tensor_by_id
        return {"unused": {i for i, t in binding.outputs if t in known and known[t].is_unused}}

    def expect(self, slot: Slot, arguments: Sequence[Any]) -> tuple[OpGraph, dict[str, TimingCase]]:
        """The graph of all slots that were asked about in this step, and a call of each distinct op; nothing runs.

        Raises whatever torch says where a graph looks at values.
        """
        if self._expected is None:
            self._expected = StructureRecorder()
        foresee(slot.binding, arguments, self._expected)
        return self._describe(self._expected), self._expected.cases

    def with_loss(self, step: Callable[[], bool], device_type: str) -> bool:
        """`step()`, while it is measured what a loss outside of the graphs takes."""
        observed, found = at_the_turn(step, torch.device(device_type))
        if self.graph is not None:
            self.graph = replace(self.graph, loss_bytes=max(found, self.graph.loss_bytes))
        return observed

    @property
    def loss_bytes(self) -> int:
        """See `OpGraph.loss_bytes`."""
        return 0 if self.graph is None else self.graph.loss_bytes

    def drop(self) -> None:
        """Forget the step in progress (a bad one, or one that was not captured whole)."""
        if self._observer is not None:
            self._observer.close()
        self._observer = self._structure = None

    def keep(self, *, calibrating: bool) -> Profile | None:
        """The step in progress was good: add it to the profile, or to the window. Returns what it showed, if it was
        observed and tells: not if the loop gave up one of its calls before a backward pass, which is then in it."""
        observer = self._observer
        if observer is None:
            return None
        given_up = any(record.returned < 0 for record in self._nonfinite)
        if given_up and self._given_up < _GIVEN_UP:
            self._given_up += 1
            self.drop()
            return None
        self._observer, self._given_up = None, 0
        if self._structure is not None:
            self._learn_structure(self._structure)
        assert self.graph is not None
        seen = observer.harvest(self.graph.fingerprint)
        if calibrating:
            self.profile = seen if self.profile is None else self.profile.merge(seen)
            self.steps += 1
        else:
            self.window = seen if self.window is None else self.window.merge(seen)
        return seen

    def _learn_structure(self, structure: StructureRecorder) -> None:
        seen = self._describe(structure)
        self.graph = seen if self.graph is None else self.graph.extended(seen)
        self.cases = structure.cases | self.cases
        if self.profile is not None:
            self.profile = replace(self.profile, graph_fingerprint=self.graph.fingerprint)
        self._structure = None

    def take_window(self) -> Profile | None:
        """The window, which begins anew."""
        window, self.window = self.window, None
        return window

    def shift_window(self, log2_of: Callable[[str], int]) -> None:
        """Gradients of these tensors carry another factor from now on: as if they had had it all the window."""

        def shifted(t: TensorProfile) -> TensorProfile:
            log2 = 0 if t.gradients is None else log2_of(t.id)
            return t if not log2 or t.gradients is None else replace(t, gradients=t.gradients.shifted(log2))

        if self.window is not None:
            self.window = replace(self.window, tensors=tuple(map(shifted, self.window.tensors)))

    @property
    def known(self) -> Profile | None:
        """Calibration's profile, with the ranges that were learned since."""
        profile = self.profile
        for _, seen in self.learned:
            assert profile is not None
            profile = profile.merge(replace(seen, graph_fingerprint=profile.graph_fingerprint))
        return profile

    def learn(self, seen: Profile, number: int) -> None:
        """Value ranges of a window with this number count when planning, as no step. Gradients of a planned graph carry
        region scales, so they stay out."""
        if self.profile is not None:
            tensors = tuple(TensorProfile(id=t.id, values=t.values) for t in seen.tensors)
            self.learned = (*self.learned, (number, Profile(graph_fingerprint="", steps=0, tensors=tensors)))

    def forget(self, before: int) -> None:
        """What was learned in windows before this one counts no more."""
        self.learned = tuple((number, seen) for number, seen in self.learned if number >= before)

    def learn_from_replay(
        self, calls: Iterable[tuple[CallRecord, Slot]], buffers: Mapping[int, Tensor], number: int
    ) -> None:
        """The FP32 ranges of recorded calls enter the profile, so that no reader of a value that left a format casts
        to it either."""
        if self.graph is None:
            return
        for record, slot in calls:
            observer = StepObserver(limit=MONITOR_SAMPLE_LIMIT, sensitivities=False, masked=self._masked)
            template, binding = record.binding.template, record.binding
            origin, changes = template.flat.origin, slot.faults
            with torch.no_grad(), shadow(record):
                interpreter = ObservingInterpreter(template.module, origin, binding, observer, changes=changes)
                interpreter.run(*shadow_arguments(record, buffers))
            self.learn(observer.harvest(self.graph.fingerprint), number)


def describe_graph(
    structure: StructureRecorder,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    slots: Iterable[Slot],
    lowering: Lowering,
    calls: Iterable[tuple[Binding, set[int]]],
) -> OpGraph:
    """The `OpGraph` of a recorded step, whose `calls` tell which outputs were differentiated; the optimizer's bytes are
    not known yet."""
    sizes = {f: p.numel() * p.element_size() for f, p in parameters.items()}
    bindings = [slot.binding for slot in slots]
    seen = [(binding, entered) for binding, entered in calls if entered]
    known = {id(binding) for binding, _ in seen}
    outputs: dict[str, bool] = {}
    told: list[tuple[Binding, set[int] | None]] = [*seen, *((b, None) for b in bindings if id(b) not in known)]
    for binding, indices in told:
        for i, tensor in binding.outputs:
            outputs[tensor] = outputs.get(tensor, False) or indices is None or i in indices
    return structure.graph(
        model=type(model).__name__,
        parameter_bytes=sum(sizes.values()) + sum(b.numel() * b.element_size() for b in model.buffers()),
        gradient_bytes=sum(n for f, n in sizes.items() if parameters[f].requires_grad),
        optimizer_bytes=0,
        outputs=outputs,
        bindings=bindings,
        compiled=lowering.compiles,
    )
