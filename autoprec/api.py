"""`compile`, `session`, `unwrap`: what a training script calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from autoprec.checks import check_amount, check_choice, check_kind, described
from autoprec.devices import Device
from autoprec.errors import InputError
from autoprec.execution.lowering import BACKENDS, Backend
from autoprec.execution.ranks import own_file
from autoprec.plans import Plan
from autoprec.policies import Policy
from autoprec.refusals import refuse_model
from autoprec.serial import load_policy, read_plan
from autoprec.sessions import Session, session_of

__all__ = ["compile", "session", "unwrap"]

M = TypeVar("M", bound=nn.Module)

EVENTS_FILE = "autoprec_events.jsonl"


def compile(
    model: M,
    *,
    policy: str | Path | Policy = "balanced",
    budget: str | int | None = None,
    plan: str | Path | Plan | None = None,
    batches: Iterable[Any] | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    device: Device | None = None,
    events: str | Path | None = EVENTS_FILE,
    backend: Backend = "eager",
    total_steps: int | None = None,
) -> M:
    """Schedule the precision of each layer of `model` while it trains. Returns the same object.

    With nothing but the model, the first `calibration.steps` training steps of the caller's own loop are observed in
    FP32, then the plan takes over at the step boundary. With `batches` and `loss_fn` calibration happens here, without
    an optimizer step; with `plan` it happened elsewhere.

    Args:
        model: an FP32 model; parameters stay the same FP32 objects under the same names. Frozen weights may live in a
            narrow format where the policy says so (`storage.frozen`), and then have no FP32 copy.
        policy: a name in policies/, a file, or a `Policy`.
        budget: peak bytes of one training step: `"6GiB"`, an int, or `"60%"` of the part that precision can change.
        plan: a plan file or a `Plan`.
        batches: up to `calibration.steps` batches for `loss_fn`.
        loss_fn: `loss_fn(model, batch)` returns the scalar to differentiate.
        device: timings measured before, so that nothing is timed again.
        events: JSON-lines file that events are appended to; None for no file. Of several processes (torch.distributed)
            those after the first append to one of their own, with `.rank1` and so on before its suffix.
        total_steps: optimizer steps that the run is planned to have, for shares in the policy's schedule.
        backend: "eager" runs the rewritten graphs as they are, "inductor" through torch's compiler.

    Raises:
        InputError: an argument is not valid, or the model is compiled already.
        InfeasibleError: no plan keeps the budgets (with `batches`; otherwise at the end of calibration).
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"compile() takes an nn.Module, not {type(model).__name__}")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise InputError(
            f"this {type(model).__name__} is compiled already; autoprec.unwrap(model) (or drop model.compile()) first"
        )
    refuse_model(model)
    check_kind(budget, (str, int), "budget=", 'bytes, or text such as "6GiB" or "60%"')
    check_kind(plan, (str, PathLike, Plan), "plan=", "a plan file or a Plan")
    check_kind(device, Device, "device=", "measured timings: `session(model).device` of a calibrated model")
    check_kind(events, (str, PathLike), "events=", "a file, or None for no file")
    check_kind(total_steps, int, "total_steps=", "a whole number of optimizer steps")
    check_choice(backend if isinstance(backend, str) else described(backend), BACKENDS, "backend", InputError)
    check_amount(total_steps, "total_steps", InputError, least=1)
    if (batches is None) != (loss_fn is None):
        raise InputError("batches= and loss_fn= belong together: give both, or neither to calibrate in your own loop")
    if plan is not None and (batches is not None or budget is not None):
        raise InputError("plan= is final: it takes neither batches= nor budget= beside it")
    chosen = plan if isinstance(plan, Plan) or plan is None else read_plan(Path(plan))
    made = Session(
        model,
        load_policy(policy),
        budget=budget,
        plan=chosen,
        device=device,
        events_path=None if events is None else own_file(Path(events)),
        backend=backend,
        total_steps=total_steps,
    )
    if batches is not None and loss_fn is not None:
        try:
            made.calibrate(batches, loss_fn)
            made.make_plan()
        except BaseException:
            made.close()
            raise
    return model


def session(model: nn.Module) -> Session:
    """The session of a compiled model: `.plan`, `.profile`, `.events`, `.steps`. Raises `InputError` if none."""
    return session_of(model)


def unwrap(model: M) -> M:
    """Undo `compile`: the plain FP32 model, no hooks, no plan. Returns the same object. Frozen weights that lived in a
    narrow format have the values that they were rounded to."""
    session_of(model).close()
    return model
