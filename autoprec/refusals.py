"""What a run does not accept, each with the sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.errors import InputError, NotCapturedError, PlanError
from autoprec.execution.dispatch import RECOMPILE_LIMIT
from autoprec.graphs import OpClass, OpGraph
from autoprec.plans import Plan
from autoprec.policies import Policy
from autoprec.tracing.bindings import Binding
from autoprec.tracing.templates import Template

__all__ = [
    "check_plan_fits",
    "other_ops",
    "refuse_autocast",
    "refuse_half",
    "refuse_model",
    "refuse_strangers",
    "refuse_unscaled",
    "uncaptured",
    "unplanned",
]


def refuse_autocast(device_type: str) -> None:
    """Raise `InputError` inside an ambient autocast."""
    if torch.is_autocast_enabled(device_type):
        raise InputError(
            "the model is called inside torch.autocast, which would cast on top of the plan without being seen in"
            " the captured graph; remove the autocast context (policy='bf16' is its uniform counterpart)"
        )


def refuse_strangers(
    model: nn.Module, template: Template, arguments: Sequence[Any], known: Collection[int] = ()
) -> None:
    """Raise `NotCapturedError` for parameters that were put into the model after compile: they have neither guard nor
    plan. `known` holds the ids of those that were there."""
    if template.parameter_positions:
        mine = {id(p): fqn for fqn, p in model.named_parameters() if id(p) not in known}
        new = [mine[i] for p in template.parameter_positions if (i := id(arguments[p])) in mine]
        if new:
            raise NotCapturedError(
                f"{', '.join(new[:3])} was put into the model after autoprec.compile (a replaced layer, or"
                " load_state_dict(assign=True)); autoprec.unwrap(model) and compile it again"
            )


def refuse_model(model: nn.Module) -> None:
    """Raise `InputError` for models that cannot be captured, or have no numbers yet."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"this {kind} is TorchScript, which has no Python left to capture: compile the model itself")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [f for f, t in tensors if is_lazy(t)]:
        raise InputError(
            f"{len(lazy)} parameters and buffers of this {kind} have no shape yet ({lazy[0]}, …): call it with a batch"
            " before compile(), as torch asks for lazy modules"
        )
    if meta := [f for f, p in model.named_parameters() if p.is_meta]:
        raise InputError(
            f"{len(meta)} parameters of this {kind} are on the meta device, without numbers ({meta[0]}, …): materialize"
            " it (model.to_empty(device=...), then its weights) before compile()"
        )


def refuse_half(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `InputError` for trainable half-precision parameters."""
    half = [f for f, p in parameters.items() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise InputError(
            f"{len(half)} trainable parameters are {parameters[half[0]].dtype} ({half[0]}, …); autoprec keeps FP32"
            " masters and casts per op: pass the model in FP32 (model.float())"
        )


def uncaptured(missed: Sequence[str], parameters: Collection[str], model: str, *, entered: bool) -> str:
    """The sentence for gradients from outside the captured graphs. `entered`: the model itself was called."""
    modules = sorted({m.rpartition(".")[0] or model for m in missed})
    if entered:
        what = (
            "Dynamo did not capture the code that uses them: a graph break in a module that owns parameters, a full"
            f" backward hook on one, more than {RECOMPILE_LIMIT} recompilations, or an input that it does not take (a"
            " packed sequence). TORCH_LOGS=graph_breaks,recompiles shows which. Or the loop uses them itself, in a"
            " penalty over model.parameters() or as weights of losses: then `uncaptured: report` in the policy lets it"
        )
    else:
        what = (
            "Call the model itself, model(x): calls of model.forward(x), of a submodule, or through a torch.compile of"
            " your own go round it. Or several optimizers step in one backward pass, in hooks on its gradients, which"
            " no verdict on the whole step can come before"
        )
    return (
        f"{len(missed)} of {len(parameters)} parameters got gradients outside the captured graph"
        f" (modules: {_some(modules)}). {what}"
    )


def check_plan_fits(
    plan: Plan, model: nn.Module, bindings: Iterable[Binding], trained: Iterable[Binding]
) -> tuple[str, ...]:
    """Raise `PlanError` if the plan names ops of modules that the model does not have, or if it was calibrated and does
    not name a layer that was trained, or names other ops in a module. Returns the other ops that none of the captured
    graphs has: they may belong to a branch that was not taken yet."""
    known = {op.id for binding in bindings for op in binding.ops}
    waiting = sorted({a.op for a in plan.assignments} - known)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [op for op in waiting if op.rpartition(":")[0] not in modules]
    if unknown or (waiting and len(waiting) == len({a.op for a in plan.assignments})):
        unknown = unknown or waiting
        raise PlanError(
            f"{len(unknown)} ops of the plan are not in this model, the first: {unknown[0]}."
            " The plan was made for another model or input; calibrate this one"
        )
    if plan.graph_fingerprint and (differs := other_ops({a.op for a in plan.assignments}, bindings)):
        raise PlanError(f"the plan was made for another model: {differs}; calibrate this one")
    layers = [op.id for binding in trained for op in binding.ops if op.op_class is OpClass.GEMM and op.weights]
    named = {a.op for a in plan.assignments}
    new = [op for op in layers if op not in named]
    if plan.graph_fingerprint and new:
        raise PlanError(
            f"{len(new)} of {len(layers)} trained layers are not in the plan, the first: {new[0]}."
            " The plan was made for another version of the model; calibrate this one"
        )
    return tuple(waiting)


def other_ops(known: Iterable[str], bindings: Iterable[Binding]) -> str:
    """What differs, if a module does something else than what is known of it: of ops that take a format it has some,
    and none that is known. "" otherwise: ops may belong to a branch that was not taken yet."""
    ops = (op.id for binding in bindings for op in binding.ops if op.roles)
    there, here = _by_module(known), _by_module(ops)
    for module in here.keys() & there.keys():
        if not here[module] & there[module]:
            mine, theirs = (_some(sorted(found[module])) for found in (here, there))
            return f"it has {theirs}, and this one has {mine} in its place"
    return ""


def _by_module(ops: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for op in ops:
        found.setdefault(op.rpartition(":")[0], set()).add(op)
    return found


#: What is said of a loop that differentiates gradients.
TWICE = (
    "the loop differentiates gradients (create_graph=True): what that holds is in no predicted peak, and a memory"
    " budget is not kept with it; measure a step, and leave it the difference"
)


def unplanned(binding: Binding, graph: OpGraph, captured: int) -> str:
    """The sentence for layers of a captured graph that no calibration step ran, or "". `captured`: graphs so far."""
    new = [op.id for op in binding.ops if op.op_class is OpClass.GEMM and op.weights and op.id not in graph.op_by_id]
    if not new:
        return ""
    if captured >= RECOMPILE_LIMIT:
        return (
            f"torch has captured this model {captured} times and captures it no more: something that forward reads is"
            f" another in every call (a list that grows, a text, a length). {_some(new)} and whatever else is captured"
            " by itself from now on stays in fp32; keep what changes out of forward, or in a tensor"
        )
    return f"{_some(new)} did not run while calibrating and stays in fp32; raise calibration.steps"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def refuse_unscaled(plan: Plan | None, policy: Policy, *, scaled: bool | None) -> None:
    """Refuse FP16 gradients whose loss nobody scales: most of them would be 0, and nothing would say so.

    `scaled`: whether a GradScaler takes the step; None where that cannot be known.
    """
    if plan is None or scaled is not False or policy.loss_scaling.mode != "global":
        return
    if any(a.format == "fp16" for a in plan.assignments):
        raise InputError(
            f"policy {policy.name!r} has one scale for the loss (loss_scaling.mode global) and gradients in fp16, but"
            " no GradScaler takes this optimizer's step: gradients below 3e-8 are 0 then. In the loop: scaler ="
            " autoprec.GradScaler(model=model); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()."
            " Or loss_scaling: {mode: regional} in the policy, which needs no scaler"
        )
