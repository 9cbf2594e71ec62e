"""The state of a run: one `Session` per compiled model.

States: observing (calibration) → planned. Every change of executables happens at a step boundary. The session is the
only thing that writes them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.calibration.timing import measure_casts, time_ops
from autoprec.devices import Device
from autoprec.errors import InfeasibleError, InputError, NonFiniteError, NotCapturedError, PlanError
from autoprec.execution import dispatch
from autoprec.execution.attribution import investigate
from autoprec.execution.replay import CallRecord, record_call
from autoprec.execution.slots import Slot
from autoprec.execution.stepping import StepGuard
from autoprec.graphs import OpGraph, Role
from autoprec.monitoring.judging import judge
from autoprec.observing import Observations, describe_graph
from autoprec.planning.planner import make_plan
from autoprec.planning.problem import optimizer_bytes
from autoprec.plans import Assignment, Event, Plan
from autoprec.policies import Policy
from autoprec.profiles import Profile
from autoprec.serial import event_to_json_line
from autoprec.tracing.bindings import Binding, SiteRegister, bind
from autoprec.tracing.templates import Template

__all__ = ["Session", "session_of"]

#: Calls of a step that are kept for replay; of more micro-batches than that, the last ones.
_MOST_CALLS = 64


def session_of(model: nn.Module) -> Session:
    """The session of a compiled model. Raises `InputError` if it has none."""
    found = dispatch.installed(model)
    if not isinstance(found, Session) or found.model is not model:
        raise InputError(
            f"this {type(model).__name__} was not compiled by autoprec (a deepcopy is the plain FP32 model);"
            " call autoprec.compile(model) first"
        )
    return found


class Session:
    """The state of one compiled model's run. Made by `autoprec.compile`.

    Attributes:
        policy: what was asked for.
        plan: what runs now; None while calibrating.
        device: measured timings; None until a plan was made.
        events: everything that happened, oldest first.
        steps: optimizer steps completed, bad ones not counted.
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
    ) -> None:
        self._model = weakref.ref(model)
        self.policy = policy if budget is None else policy.replaced(budget=budget)
        self.plan, self.device = plan, device
        self._given_plan = plan is not None
        self._events_path = events_path
        self.events: list[Event] = []
        self.steps = 0
        self.skipped_steps = 0
        self.step_was_skipped = False
        self._names: dict[int, list[str]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for fqn, p in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(p), []).append(fqn)
        for fqn, p in model.named_parameters():
            self._parameters[fqn] = p
        if not self._parameters:
            raise InputError(f"{type(model).__name__} has no parameters: there is nothing to schedule")
        _refuse_half(self._parameters)
        self._sites = SiteRegister()
        self._sites_settled = False
        self._slots: dict[tuple[Template, tuple[int, ...]], Slot] = {}
        self.unowned: set[Template] = set()
        self._banned: set[tuple[str, str]] = set()
        self._observed = Observations(
            lambda structure: describe_graph(structure, self.model, self._parameters, self._slots.values())
        )
        self._window_steps = 0
        self._up_front = False
        self._entered = False
        self._parts: list[nn.Module] = []
        self._calls: deque[CallRecord] = deque(maxlen=_MOST_CALLS)
        self._bad_in_row = 0
        self._incident = ""
        dispatch.adopt(list(self._parameters.values()), self)
        dispatch.install(model, self)
        self._guard = StepGuard(model, self._parameters, self)

    # What people read ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The compiled model."""
        model = self._model()
        if model is None:
            raise InputError("the model of this session no longer exists")
        return model

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
        self._entered = True

    def run(self, template: Template, arguments: Sequence[Any]) -> Any:
        """Run a captured graph for the owner of its parameters (called by the dispatcher)."""
        key = (template, tuple(id(arguments[p]) for p in template.parameter_positions))
        self._refuse_autocast()
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._bind(template, arguments)
        slot.calls += 1
        if not (slot.trains and torch.is_grad_enabled()):
            return slot.run(arguments)
        return self._run_training(slot, arguments)

    def run_unowned(self, template: Template, arguments: Sequence[Any]) -> Any:
        """A graph without parameters runs as the user wrote it, and is listed in `unowned`."""
        self._refuse_strangers(template, arguments)
        self.unowned.add(template)
        return template.module.forward(*arguments)

    def _refuse_strangers(self, template: Template, arguments: Sequence[Any]) -> None:
        """Parameters of the model that were put in after compile have neither guard nor plan."""
        if template.parameter_positions:
            mine = {id(p): fqn for fqn, p in self.model.named_parameters()}
            new = [mine[i] for p in template.parameter_positions if (i := id(arguments[p])) in mine]
            if new:
                raise NotCapturedError(
                    f"{', '.join(new[:3])} was put into the model after autoprec.compile (a replaced layer, or"
                    " load_state_dict(assign=True)); autoprec.unwrap(model) and compile it again"
                )

    def _bind(self, template: Template, arguments: Sequence[Any]) -> Slot:
        buffer_names = {id(b): fqn for fqn, b in self.model.named_buffers()}
        self._refuse_strangers(template, [a if id(a) not in self._names else None for a in arguments])
        trains = torch.is_grad_enabled() and self.model.training
        if trains and not self._sites_settled:
            # Call sites are numbered in the order of the training graphs, also where an evaluation came first.
            self._sites_settled = True
            if self.graph is None:
                self._sites = SiteRegister()
                self._slots.clear()
        binding = bind(template, arguments, self._names, buffer_names, self._sites)
        slot = Slot(binding=binding, trains=any(self._parameters[f].requires_grad for f in binding.parameters.values()))
        slot.adopt(self.plan, self._device_type)
        return slot

    @property
    def _device_type(self) -> str:
        return next(iter(self._parameters.values())).device.type

    @property
    def _cuda_devices(self) -> list[int]:
        return [torch.cuda.current_device()] if self._device_type == "cuda" else []

    def _run_training(self, slot: Slot, arguments: Sequence[Any]) -> Any:
        if self._guard.begin():
            self._begin_step()
        self._guard.covered.update(slot.binding.parameters.values())
        record = record_call(slot.binding, arguments)
        self._calls.append(record)
        outputs = self._observed.run(slot, arguments)
        for i, y in enumerate(outputs if isinstance(outputs, (tuple, list)) else (outputs,)):
            if isinstance(y, Tensor) and y.requires_grad and not y.is_leaf:
                y.register_hook(_keeper(record, i))
        return outputs

    def _begin_step(self) -> None:
        """The first training forward after a boundary: is this step observed?"""
        self._calls.clear()
        self._incident = ""
        interval = self.policy.monitor.interval_steps
        monitored = self.plan is not None and not self.plan.is_identity and self.steps % interval == interval - 1
        if self.calibrating or monitored:
            self._observed.begin(calibrating=self.calibrating, explicit_loss=self._up_front)

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self._device_type):
            raise InputError(
                "the model is called inside torch.autocast, which would cast on top of the plan without being seen in"
                " the captured graph; remove the autocast context (policy='bf16' is its uniform counterpart)"
            )

    # The step boundary -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark a step boundary by hand, before the update, in a loop without a torch optimizer.

        `step_was_skipped` tells afterwards whether the gradients were bad: then do not apply them.
        """
        self._guard.end_by_hand()

    def before_first_update(self, missed: list[str]) -> None:
        """Every parameter with a fresh gradient must have gone through a captured graph (called by the guard)."""
        if self._given_plan and self.steps == 0 and self.plan is not None and self._guard.in_step:
            check_plan_fits(self.plan, self.bindings)
        if not missed or (self._entered and self._capture_parts(missed)):
            return
        modules = sorted({m.rpartition(".")[0] or type(self.model).__name__ for m in missed})
        shown = ", ".join(modules[:5]) + (f" and {len(modules) - 5} more" if len(modules) > 5 else "")
        text = (
            f"{len(missed)} of {len(self._parameters)} parameters got gradients outside the captured graph"
            f" (modules: {shown}). Call the model itself, model(x): calls of model.forward(x) or of a submodule go"
            " round it"
        )
        if self.policy.uncaptured == "error":
            raise NotCapturedError(text)
        self._event("warning", trigger="uncaptured", evidence=text)
        self._guard.watch.fresh.clear()

    def on_bad_gradients(self) -> None:
        """Name the first offender; promote it if its format is to blame (called by the guard)."""
        incident = investigate(
            list(self._calls), list(self._slots.values()), self._guard.buffers.values(), sorted(self._guard.watch.bad)
        )
        self._incident = incident.evidence
        trigger = "overflow" if incident.cause else "nonfinite"
        self._event("bad_step", op=incident.op, was=incident.cause, trigger=trigger, evidence=incident.evidence)
        if incident.cause:
            self._promote(incident.op, incident.cause, "overflow", f"{incident.evidence}; finite in fp32")
            self._observed.learn_from_replay(self._calls, self._guard.buffers.values())
            self._replan()
        if self.policy.guard.nonfinite == "raise":
            raise NonFiniteError(f"step {self.steps}: {self._incident}; parameters are unchanged")

    def on_end(self, *, bad: bool) -> None:
        """Count the step, take its observations, plan at the end of calibration (called by the guard)."""
        self._entered = False
        self.step_was_skipped = bad
        self._calls.clear()
        if bad:
            self.skipped_steps += 1
            self._bad_in_row += 1
            self._observed.drop()
        else:
            self.steps += 1
            self._bad_in_row = 0
            self._observed.keep(calibrating=self.calibrating)
            self._plan_or_judge()
        if self._bad_in_row >= self.policy.guard.patience_steps:
            raise NonFiniteError(
                f"{self._bad_in_row} bad steps in a row (guard.patience_steps {self.policy.guard.patience_steps});"
                f" the last: {self._incident}. Parameters, buffers and optimizer state are as before them;"
                " look at the data and the learning rate, or promote the named op by a rule"
            )

    def _capture_parts(self, missed: Sequence[str]) -> bool:
        """Capture on their own the modules that graph breaks left in frames that Dynamo runs eagerly.

        Frames of torch.nn classes are skipped by Dynamo unless a function of ours calls them. False if there is no
        module left to try. The step that showed them is not observed.
        """
        names = {name for fqn in missed for name in self._names[id(self._parameters[fqn])]}
        modules = {self.model.get_submodule(name.rpartition(".")[0]) for name in names}
        new = [m for m in modules if m is not self.model and m not in self._parts]
        if not new:
            return False
        for module in new:
            dispatch.install(module, self)
            self._parts.append(module)
        self._event("warning", trigger="graph_break", evidence=f"captured on their own: {', '.join(sorted(names))}")
        self._guard.watch.fresh.clear()
        self._observed.drop()
        return True

    # Calibration, planning, monitoring -------------------------------------------------------------------------

    def _plan_or_judge(self) -> None:
        """At the end of a good step: is calibration over, is a window over?"""
        if self.calibrating:
            if self.profile is not None and self.profile.steps >= self.policy.calibration.steps:
                self.make_plan()
        elif self.steps - self._window_steps >= self.policy.monitor.window_steps:
            self._judge_window()

    def _optimizer_bytes(self) -> int:
        """Bytes of the optimizers' state: asked of the optimizers seen, otherwise of the policy's name for one."""
        measured = sum(
            v.numel() * v.element_size()
            for optimizer in self._guard.optimizers
            for state in optimizer.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        )
        assert self.graph is not None
        return measured or optimizer_bytes(self.policy.optimizer, self.graph.gradient_bytes)

    def make_plan(self) -> Plan:
        """Plan from what calibration recorded, and run it from the next step on.

        Raises `InputError` if nothing was observed yet, `InfeasibleError` if no plan keeps the budgets.
        """
        if self.graph is None or self.profile is None:
            raise InputError("nothing was observed yet: run at least one training step, or pass batches= and loss_fn=")
        graph = self._observed.graph = replace(self.graph, optimizer_bytes=self._optimizer_bytes())
        self.policy.check_against(graph)
        device = self.measure_device()
        plan = make_plan(graph, self.profile, device, self.policy, banned=frozenset(self._banned))
        self._adopt(plan)
        self._event("planned", evidence=f"{', '.join(plan.formats_used()) or 'fp32'}; binding: {plan.binding}")
        return plan

    def measure_device(self) -> Device:
        """Time every distinct op of the model in the policy's formats, once; what is known is not timed again.

        Raises `InputError` if nothing was observed yet.
        """
        structure = self._observed.structure
        if structure is None or self.graph is None:
            raise InputError("nothing was observed yet: run at least one training step, or pass batches= and loss_fn=")
        with torch.random.fork_rng(devices=self._cuda_devices):
            known = self.device if self.device is not None else measure_casts(self._device_type)
            self.device = time_ops(structure.cases, self.policy.formats, known)
        return self.device

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        for slot in self._slots.values():
            slot.adopt(plan, self._device_type)

    def _judge_window(self) -> None:
        window, self._window_steps = self._observed.take_window(), self.steps
        if window is None or self.plan is None or self.graph is None:
            return
        verdicts = judge(self.plan, self.graph, window, self.policy.monitor)
        for v in verdicts:
            self._promote(v.op, v.format, v.trigger, v.evidence)
        if verdicts:
            self._observed.learn(window)
            self._replan()

    def _promote(self, op: str, fmt: str, trigger: str, evidence: str) -> None:
        self._banned.add((op, fmt))
        self._event("promoted", op=op, was=fmt, now="", trigger=trigger, evidence=evidence)

    def _replan(self) -> None:
        """Solve again without what was banned; the promotions' events get the formats that came out."""
        assert self.plan is not None
        before = self.plan
        try:
            if self.graph is None or self.profile is None or self.device is None:
                raise InfeasibleError("the plan came from a file, without the profile that it was made from")
            plan = make_plan(
                self.graph,
                self.profile,
                self.device,
                self.policy,
                budget_bytes=before.budget_bytes,
                banned=frozenset(self._banned),
            )
        except InfeasibleError as error:
            plan = _without(before, self._banned)
            self._event(
                "warning",
                trigger="budget",
                evidence=f"the promoted ops run in fp32 outside the budgets: {error}",
            )
        self._adopt(plan)
        for i, e in enumerate(self.events):
            if e.kind == "promoted" and not e.now:
                now = plan.format_of.get((e.op, Role.OUTPUT), "fp32")
                self.events[i] = replace(e, now=now)
                self._write(self.events[i])

    # Events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: str) -> None:
        event = Event(step=self.steps, kind=kind, **fields)
        self.events.append(event)
        if kind != "promoted":  # written once its new format is known
            self._write(event)

    def _write(self, event: Event) -> None:
        if self._events_path is not None:
            with self._events_path.open("a", encoding="utf-8") as file:
                file.write(event_to_json_line(event) + "\n")

    # Up-front calibration, and the end -------------------------------------------------------------------------

    def calibrate(self, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], Tensor]) -> Profile:
        """Observe forward and backward passes over `calibration.steps` batches, without an optimizer step.

        Gradients, buffers and random state are bitwise as before afterwards. Raises `InputError` if there are no
        batches or the loss is not a scalar.
        """
        if self.plan is not None:
            raise InputError("this session has a plan already; autoprec.unwrap(model) first")
        kept = {f: p.grad for f, p in self._parameters.items()}
        wanted = self.policy.calibration.steps
        seen = 0
        self._up_front = True
        try:
            with torch.random.fork_rng(devices=self._cuda_devices):
                for batch in batches:
                    if seen == wanted:
                        break
                    # A first pass may only have shown which modules must be captured on their own.
                    if not self._calibration_step(batch, loss_fn) and not self._calibration_step(batch, loss_fn):
                        raise NotCapturedError("loss_fn ran no captured graph of this model; call model(...) in it")
                    seen += 1
        finally:
            self._up_front = False
            for f, p in self._parameters.items():
                p.grad = kept[f]
        if self.profile is None or seen < 2:
            raise InputError(f"calibration needs at least 2 batches with finite gradients, got {seen}")
        return self.profile

    def _calibration_step(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]) -> bool:
        """One observed forward and backward pass; False if nothing of it was observed."""
        for p in self._parameters.values():
            p.grad = None
        loss = loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn(model, batch) must return a scalar tensor, not {got}")
        if self._observed.observer is not None:
            self._observed.observer.output(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.before_first_update(self._guard.missed())
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
        model = self.model
        for module in (model, *self._parts):
            dispatch.uninstall(module)
        dispatch.release(list(self._parameters.values()))
        self._guard.remove()
        self._observed.drop()
        self._slots.clear()
        self._calls.clear()
        self._event("unwrapped")


def _keeper(record: CallRecord, index: int) -> Callable[[Tensor], None]:
    def keep(g: Tensor) -> None:
        record.output_gradients[index] = g

    return keep


def _refuse_half(parameters: dict[str, nn.Parameter]) -> None:
    half = [f for f, p in parameters.items() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise InputError(
            f"{len(half)} trainable parameters are {parameters[half[0]].dtype} ({half[0]}, …); autoprec keeps FP32"
            " masters and casts per op: pass the model in FP32 (model.float())"
        )


def _without(plan: Plan, banned: set[tuple[str, str]]) -> Plan:
    """The plan with banned (op, format) pairs in FP32, outside every region."""

    def fix(a: Assignment) -> Assignment:
        return replace(a, format="fp32", reason="promoted") if (a.op, a.format) in banned else a

    left = {op for op, fmt in banned if fmt == "fp16"}
    regions = tuple(replace(r, ops=tuple(op for op in r.ops if op not in left)) for r in plan.regions)
    return replace(plan, assignments=tuple(fix(a) for a in plan.assignments), regions=regions)


def check_plan_fits(plan: Plan, bindings: Iterable[Binding]) -> None:
    """Raise `PlanError` if the plan names ops that none of the captured graphs has."""
    known = {op.id for binding in bindings for op in binding.ops}
    unknown = sorted({a.op for a in plan.assignments} - known)
    if unknown:
        raise PlanError(
            f"{len(unknown)} ops of the plan are not in this model, the first: {unknown[0]}."
            " The plan was made for another model or input; calibrate this one"
        )
