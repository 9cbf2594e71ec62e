"""The state of a run: one `Session` per compiled model.

States: observing (calibration) → planned, or, where no plan keeps the budgets, FP32 for good. Every change of
executables happens at a step boundary. The session is the only thing that writes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoprec import refusals
from autoprec.checks import described, is_iterable
from autoprec.devices import Device
from autoprec.errors import InputError, NonFiniteError, NotCapturedError, StateError
from autoprec.events import EventLog
from autoprec.execution import dispatch
from autoprec.execution.calls import StepCalls
from autoprec.execution.faults import Fault
from autoprec.execution.freezing import FrozenParameters
from autoprec.execution.lowering import Backend, Lowering
from autoprec.execution.replay import in_backward, keep_gradients, record_call, written_to
from autoprec.execution.slots import Slot
from autoprec.execution.stepping import StepGuard
from autoprec.execution.takeover import Takeover
from autoprec.graphs import OpGraph
from autoprec.incidents import tell_incident
from autoprec.loss_watch import LossWatch
from autoprec.observing import Observations, describe_graph
from autoprec.parts import Parts
from autoprec.planning.rules import for_compiled
from autoprec.plans import Event, Plan
from autoprec.policies import Policy
from autoprec.profiles import Profile
from autoprec.provisional import Provisional
from autoprec.replanning import Replanning
from autoprec.resuming import Resumable
from autoprec.schedules import Schedule
from autoprec.scheduling import Scheduler, cuda_devices
from autoprec.settling import Settling
from autoprec.stability import Stability
from autoprec.tracing.bindings import Binding, bind
from autoprec.tracing.checkpoints import Change
from autoprec.tracing.sites import SiteRegister
from autoprec.tracing.templates import Template

__all__ = ["Session", "session_of"]


def session_of(model: nn.Module) -> Session:
    """The session of a compiled model. Raises `InputError` if it has none."""
    found = dispatch.installed(model)
    if not isinstance(found, Session) or found.model is not model:
        raise InputError(
            f"this {type(model).__name__} was not compiled by autoprec (a deepcopy is the plain FP32 model);"
            " call autoprec.compile(model) first"
        )
    return found


class Session(Settling, Replanning, Resumable):
    """The state of one compiled model's run. Made by `autoprec.compile`.

    Attributes:
        policy: what was asked for.
        plan: what runs now; None while calibrating.
        steps: optimizer steps completed, bad ones not counted.
        lowering: how graphs run, and what was compiled for it.
        faults: what is put into steps on purpose (`autoprec.testing.inject`).
        step_was_skipped: whether the last step was vetoed; for learning-rate schedulers.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        *,
        budget: str | int | None,
        plan: Plan | None,
        device: Device | None,
        events_path: Path | None,
        backend: Backend = "eager",
        total_steps: int | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self.lowering = Lowering(backend)
        asked = policy if budget is None else policy.replaced(budget=budget)
        self.policy = for_compiled(asked, plan) if self.lowering.compiles else asked
        self.plan = plan
        self._given_plan = plan is not None
        self._ops_of_state: tuple[str, ...] = ()
        self._told: Plan | None = None  # the plan whose peak is as its compiled code tells it
        self._log = EventLog(events_path)
        self.steps = self.skipped_steps = 0
        self.step_was_skipped = False
        self._names: dict[int, list[str]] = {}
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        for fqn, p in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(p), []).append(fqn)
        if not self._parameters:
            raise InputError(f"{type(model).__name__} has no parameters: there is nothing to schedule")
        refusals.refuse_half(self._parameters)
        self._sites = SiteRegister()
        self._slots: dict[tuple[Template, tuple[int, ...]], Slot] = {}
        self.unowned: set[Template] = set()
        self._observed = Observations(
            lambda s: describe_graph(
                s, self.model, self._parameters, self._slots.values(), self.lowering, self._calls.differentiated()
            )
        )
        compiles = backend != "eager"
        self._scheduler = Scheduler(self.policy, device, self._device_type, self._observed, given=plan, fuses=compiles)
        self._schedule = Schedule.of(self.policy, total_steps)
        self._raised = frozenset[int]()  # entries of it that the plan knows
        self._stability = Stability(self.policy, self._observed)
        self._provisional = Provisional(self._scheduler, self._device_type)
        self._window_steps = self._bad_in_row = 0
        self._up_front = self._entered = False
        self._losses = LossWatch(self.policy.guard)
        self._takeover = Takeover(self.lowering, self.policy.monitor.takeover_steps)
        self._parts = Parts(self)
        self._calls = StepCalls()
        self._ran: set[Slot] = set()
        self._incident = ""
        self.faults: list[Fault] = []
        self._frozen = FrozenParameters(model, self._parameters, self._event)
        if plan is not None:
            self._frozen.check(plan)
        dispatch.adopt(list(self._parameters.values()), self)
        dispatch.install(model, self)
        self._guard = StepGuard(model, self._parameters, self)
        if plan is not None:
            self._frozen.adopt(plan)
            self._log.note(0, "planned", trigger="given", evidence=f"{', '.join(plan.formats_used()) or 'fp32'}; given")
            self._log.assign(0, None, plan)

    # What people read ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The compiled model."""
        model = self._model()
        if model is None:
            raise InputError("the model of this session no longer exists")
        return model

    @property
    def events(self) -> list[Event]:
        """Everything that happened, oldest first."""
        self.settle()
        return self._log.events

    def report(self, path: str | PathLike[str]) -> None:
        """Write what the run has told so far as one HTML page (see `autoprec report`).

        Raises `InputError` if the run writes no file of events, or the page cannot be written.
        """
        self.settle()
        from autoprec.reporting.pages import write_page  # its pictures take half a second to import

        file, events = self._log.told()
        write_page(Path(path), str(file), events)

    @property
    def device(self) -> Device | None:
        """Measured timings; None until a plan was made."""
        return self._scheduler.device

    @property
    def graph(self) -> OpGraph | None:
        """The captured ops; None before the first observed step."""
        return self._observed.graph

    @property
    def profile(self) -> Profile | None:
        """What calibration recorded so far; None before the first observed step."""
        return self._observed.profile

    @property
    def calibrating(self) -> bool:
        """True until a plan was made."""
        return self.plan is None

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Every captured graph with its owner, in the order of first execution."""
        return tuple(slot.binding for slot in self._slots.values())

    def executed_calls(self) -> dict[str, int]:
        """How often each (owner, template) ran, by its first op's id: for counting that each owner ran its own."""
        return {slot.binding.ops[0].id: slot.calls for slot in self._slots.values() if slot.binding.ops}

    def executed_formats(self) -> dict[str, str]:
        """Op id → format of its output, read off what ran (not off the plan) at the first run of each graph."""
        return {op: fmt for slot in self._slots.values() for op, fmt in slot.executed.items()}

    # Running ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The model, or a part of it that is captured on its own, is called (called by the dispatcher)."""
        self.settle()
        self._entered = True
        if not in_backward():  # where a checkpoint calls it once more
            self._guard.enter(trains=torch.is_grad_enabled() or self.model.training)

    def run(self, template: Template, arguments: Sequence[Any]) -> Any:
        """Run a captured graph for the owner of its parameters (called by the dispatcher)."""
        key = (template, tuple(id(arguments[p]) for p in template.parameter_positions))
        if torch._C._is_any_autocast_enabled():  # which the device need not be asked for
            refusals.refuse_autocast(self._device_type)
        slot = self._slots.get(key)
        if slot is not None:
            return self._run_slot(slot, arguments)
        slot = self._slots[key] = self._bind(template, arguments)
        try:
            return self._run_slot(slot, arguments)
        except Exception:  # of a batch of another dtype, say, which the loop may leave out: no graph of the model
            self._slots.pop(key, None)
            self._ran.discard(slot)
            raise

    def _run_slot(self, slot: Slot, arguments: Sequence[Any]) -> Any:
        slot.calls += 1
        if not (slot.trains and torch.is_grad_enabled()):
            return slot.run(arguments)
        if in_backward() and slot in self._ran:
            return slot.run(arguments)  # recomputed by an eager checkpoint, seen when it first ran
        return self._run_training(slot, arguments)

    def run_unowned(self, template: Template, arguments: Sequence[Any]) -> Any:
        """A graph without parameters runs as the user wrote it, and is listed in `unowned`."""
        refusals.refuse_strangers(self.model, template, arguments)
        self.unowned.add(template)
        return template.module.forward(*arguments)

    def _bind(self, template: Template, arguments: Sequence[Any]) -> Slot:
        refusals.refuse_half(self._parameters)
        self._frozen.thaw_trainable()
        buffer_names = {id(b): fqn for fqn, b in self.model.named_buffers()}
        refusals.refuse_strangers(self.model, template, arguments, known=self._names)
        trains = torch.is_grad_enabled() and self.model.training
        if trains and self._sites.settle():
            self._slots.clear()
        binding = bind(template, arguments, self._names, buffer_names, self._sites)
        fqns = [binding.parameters[node] for node in written_to(binding)]
        self._guard.buffers.watch({fqn: self._parameters[fqn] for fqn in fqns})
        trainable = any(self._parameters[f].requires_grad for f in binding.parameters.values())
        trains = trainable and torch.is_grad_enabled()
        slot = Slot(binding, trains, self.lowering, tell=self._tell_refused, tell_unmade=self._tell_unmade)
        slot.adopt(self.plan, self._device_type, compiled=self._takeover.due_step is None)
        if (
            self.plan
            and self.graph
            and trainable
            and (late := refusals.unplanned(binding, self.graph, len(self._slots)))
        ):
            self._log.add_once(self.steps, "warning", trigger="unplanned", evidence=late)
        return slot

    def _tell_refused(self, why: str) -> None:
        self._event("warning", trigger="lowering", evidence=f"{why}; runs uncompiled under this plan")

    def _tell_unmade(self, why: str) -> None:
        self._log.add_once(self.steps, "warning", trigger="kept", evidence=f"{why}; in that graph it is kept as it is")

    @property
    def _device_type(self) -> str:
        return next(iter(self._parameters.values())).device.type

    def _run_training(self, slot: Slot, arguments: Sequence[Any]) -> Any:
        if self._guard.begin():
            self._begin_step()
        if self.faults and slot not in self._ran:
            slot.faults = self._faults_in(slot.binding)
        self._ran.add(slot)
        self._guard.covered.add(slot.binding.covers)
        self._calls.drop_given_up()
        returned, on_cpu = self._calls.are_over, next(iter(self._parameters.values())).is_cpu
        if returned and on_cpu and self._guard.watch.verdict():
            self._calls.let_go()
        record = record_call(slot.binding, arguments)
        self._calls.add(record, after_a_bad_one=bool(self._guard.watch.bad))
        if self.calibrating and (told := self._provisional.weigh(slot, arguments, self._guard.optimizer_bytes)):
            self._log.add_once(self.steps, "warning", trigger="memory", evidence=told)
        try:
            outputs = self._observed.run(slot, arguments)
        except BaseException:
            self._calls.drop(record)
            raise
        how = self._observed.how_to_note(slot.binding)
        self._losses.look(record, outputs)
        self._observed.look(record, outputs)
        # While the host asks a device how the micro-batch before went, that has this forward pass to do.
        if returned and not on_cpu and self._guard.watch.verdict():
            self._calls.let_go(but=record)
        keep_gradients(record, outputs, self._guard.covered, **how)
        return outputs

    def is_between_steps(self) -> bool:
        """Or the step in progress has nothing that waits for a backward pass, and is given up."""
        return not self._guard.in_step or (self._calls.are_given_up and self._guard.give_up())

    def _faults_in(self, binding: Binding) -> dict[fx.Node, Change]:
        attempt = self.steps + self.skipped_steps
        asked = [
            (op.node, f.change(op, self.plan, attempt, self._parameters)) for op in binding.ops for f in self.faults
        ]
        return {node: change for node, change in asked if change is not None}

    def _begin_step(self) -> None:
        """The first training forward after a boundary, or after the loop has given up what it had: is this step
        observed?"""
        self.on_begin()
        self._frozen.thaw_trainable()  # Dynamo need not notice, and what nobody captures anew is not bound anew
        interval = self.policy.monitor.interval_steps
        monitored = self.steps % interval == interval - 1 and self._stability.watches(self.plan)
        if self.calibrating:
            self._provisional.begin_step()
        # To raise precision in a plan that was given, its ops must be known.
        needed = self.graph is None and bool(self._schedule.due(self.steps + 1, self._raised))
        if self.calibrating or monitored or needed:
            summed = self._stability.summed(self.plan)
            self._observed.begin(calibrating=self.calibrating, explicit_loss=self._up_front, summed=summed)

    # The step boundary -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark a step boundary by hand, before the update, in a loop without a torch optimizer.

        `step_was_skipped` tells afterwards whether the gradients were bad: then do not apply them.
        """
        self._guard.end_by_hand()

    def note_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of the step in progress, where the model does not return it: spikes are told against the
        spread of a window, or vetoed (`guard.loss_spike` of the policy). Of several in a step the mean counts. Raises
        `InputError` if it is no number."""
        self.settle()
        self._losses.note(loss)

    def loss_is_off(self) -> bool:
        """Whether the step's loss is a spike, and the policy vetoes those (called by the guard)."""
        return self._losses.is_off()

    def before_first_update(self, missed: list[str], *, scaled: bool | None) -> None:
        """Every parameter with a fresh gradient must have gone through a captured graph (called by the guard)."""
        refusals.refuse_unscaled(self.plan, self.policy, scaled=scaled)
        if self._guard.in_step and not self._guard.bad:
            self.step_was_skipped = False  # as far as anybody knows
        if self._given_plan and self.steps == 0 and self.plan is not None and self._guard.in_step:
            ran = [slot.binding for slot in self._ran]
            if waiting := refusals.check_plan_fits(self.plan, self.model, self.bindings, ran):
                what = f"{len(waiting)} ops of the plan did not run in the first step, the first: {waiting[0]}"
                self._event("warning", trigger="not_run", evidence=what)
        if self._ops_of_state and (differs := refusals.other_ops(self._ops_of_state, self.bindings)):
            raise StateError(f"the state is of another model: {differs}")
        self._ops_of_state = ()
        if not missed or (self._entered and self._capture_parts(missed)):
            return
        text = refusals.uncaptured(missed, self._parameters, type(self.model).__name__, entered=self._entered)
        if self.policy.uncaptured == "error":
            raise NotCapturedError(text)
        self._log.add_once(self.steps, "warning", trigger="uncaptured", evidence=text)
        self._guard.watch.fresh.clear()

    def on_begin(self) -> None:
        """A step begins, and nothing of the one before counts any more; called by the guard for a step that no captured
        graph has begun."""
        self.forget_left()
        self._calls.begin()
        self._ran.clear()
        self._incident = ""

    def on_bad_gradients(self, *, own: bool) -> None:
        """Name the first offender; promote it if its format is to blame (called by the guard)."""
        self.step_was_skipped = True  # hooks of the optimizer may ask
        tell_incident(self, own=own)

    def on_abort(self) -> None:
        """Nothing of the step counts that an error ends, or that the loop has given up (called by the guard)."""
        for slot in self._ran:
            slot.faults = {}
        self._losses.drop()
        self._observed.drop()

    def on_end(self, *, bad: bool) -> None:
        """Count the step, take its observations, plan at the end of calibration (called by the guard)."""
        self._entered, self.step_was_skipped = False, bad
        self.notice_overwritten()
        self.forget_left()
        for slot in self._ran:
            slot.faults = {}
        if bad:
            self.skipped_steps += 1
            self._bad_in_row += 1
            self._losses.drop()
            self._observed.drop()
        else:
            if any(call.twice for call in self._calls):
                self._log.add_once(self.steps, "warning", trigger="memory", evidence=refusals.TWICE)
            self.steps += 1
            self._bad_in_row = 0
            self._losses.keep(self.steps)
            self.plan_or_judge(self._observed.keep(calibrating=self.calibrating))
        if self.plan is None or self.plan.budget_bytes is None or bad:
            self._calls.clear()  # under a budget the step stays until the next begins: to measure a plan by
        if self._bad_in_row >= self.policy.guard.patience_steps:
            raise NonFiniteError(
                f"{self._bad_in_row} bad steps in a row (guard.patience_steps {self.policy.guard.patience_steps});"
                f" the last: {self._incident}. Parameters, buffers and optimizer state are as before them;"
                " look at the data and the learning rate, or promote the named op by a rule"
            )

    def _capture_parts(self, missed: Sequence[str]) -> bool:
        """Capture on their own the modules of missed parameters. False if there is no module left to try. The step that
        showed them is not observed."""
        names = {name for fqn in missed for name in self._names[id(self._parameters[fqn])]}
        if not self._parts.capture(self.model, {name.rpartition(".")[0] for name in names}):
            return False
        self._event("warning", trigger="graph_break", evidence=f"captured on their own: {', '.join(sorted(names))}")
        self._guard.watch.fresh.clear()
        self._observed.drop()
        return True

    def _event(self, kind: str, **fields: str) -> None:
        self._log.add(self.steps, kind, **fields)

    # Up-front calibration, and the end -------------------------------------------------------------------------

    def calibrate(self, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], Tensor]) -> Profile:
        """Observe forward and backward passes over `calibration.steps` batches, without an optimizer step.

        Gradients, buffers and random state are bitwise as before. `InputError` if there is no batch or no scalar loss.
        """
        if self.plan is not None:
            raise InputError("this session has a plan already; autoprec.unwrap(model) first")
        if not is_iterable(batches):
            raise InputError(f"batches must be an iterable of batches, not {described(batches)}")
        if not callable(loss_fn):
            raise InputError(f"loss_fn must be a function, loss_fn(model, batch), not {described(loss_fn)}")
        kept = {f: p.grad for f, p in self._parameters.items()}
        seen = 0
        self._up_front = True
        try:
            with torch.random.fork_rng(devices=cuda_devices(self._device_type)):
                for batch in islice(batches, self.policy.calibration.steps):
                    # A first pass may only have shown which modules must be captured on their own.
                    step = partial(self._calibration_step, batch, loss_fn)
                    if not (self._observed.with_loss(step, self._device_type) if seen == 1 else step()) and not step():
                        raise NotCapturedError("loss_fn ran no captured graph of this model; call model(...) in it")
                    seen += 1
        finally:
            self._up_front = False
            for f, p in self._parameters.items():
                p.grad = kept[f]
        if self.profile is None or seen < 2:
            good = 0 if self.profile is None else min(seen, self.profile.steps)
            raise InputError(f"calibration needs at least 2 batches with finite gradients, got {good} of {seen}")
        return self.profile

    def _calibration_step(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]) -> bool:
        """One observed forward and backward pass; False if nothing of it was observed."""
        self.model.zero_grad()
        before = [p.grad for p in self._parameters.values()]
        loss = loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn(model, batch) must return a scalar tensor, not {got}")
        if any(p.grad is not g for p, g in zip(self._parameters.values(), before, strict=True)):
            raise InputError("loss_fn(model, batch) must return the loss and not differentiate it: without backward()")
        if not loss.requires_grad:
            raise InputError(
                "the loss that loss_fn(model, batch) returns depends on no parameter that is trained: it was detached,"
                " computed without gradients, or every parameter is frozen (requires_grad=False)"
            )
        if self._observed.observer is not None:
            self._observed.observer.output(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.before_first_update(self._guard.missed(), scaled=None)
        bad = not self._guard.watch.verdict()
        self._guard.in_step = False
        self._guard.buffers.restore()
        observed = self._observed.observer is not None
        if bad:
            self._observed.drop()
            self._event("warning", trigger="nonfinite", evidence="a calibration batch had non-finite gradients")
        else:
            self._observed.keep(calibrating=True)
        return observed

    def close(self) -> None:
        """Take everything off the model; it is the plain FP32 model again."""
        try:
            self.settle()
        finally:
            dispatch.uninstall(self.model)
            self._parts.close()
            dispatch.release(list(self._parameters.values()))
            self._guard.remove()
            self._takeover.close()
            self._observed.drop()
            self._slots.clear()
            self._calls.clear()
            self._event("unwrapped", evidence=self._frozen.close())
