"""Faults on purpose, one by one: each is what it says, is told for what it is, and is over when it is over."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError
from autoprec.execution.faults import flipped
from autoprec.testing import KINDS, Injection, inject
from autoprec.testing.watching import Seen, Watch


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def policy(fmt: str, **changes: object) -> autoprec.Policy:
    made = autoprec.Policy(
        name=fmt,
        formats=("fp32", fmt),
        rules=[{"pin": fmt, "optional": True}],
        objective="bytes",
        storage={"formats": ()},
        calibration={"steps": 2},
        noise={"gradient": 10.0, "loss": 10.0},
        monitor={"window_steps": 4, "interval_steps": 1, "cooldown_windows": 2},
    )
    return made.replaced(**changes)


class Training:
    """A compiled model, some steps old."""

    def __init__(self, fmt: str = "fp16", steps: int = 4, backend: str = "eager", **changes: object) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = layers()
        autoprec.compile(self.model, policy=policy(fmt, **changes), events=None, backend=backend)  # type: ignore[arg-type]
        self.session = autoprec.session(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.watch = Watch(self.model, self.optimizer)
        self.steps(steps)

    def step(self, x: Tensor | None = None) -> Seen:
        given = torch.randn(64, 16) if x is None else x
        return self.watch.step(lambda: self.model(given).square().mean())

    def steps(self, count: int) -> list[Seen]:
        return [self.step() for _ in range(count)]

    def told(self, *kinds: str) -> list[autoprec.Event]:
        return [e for e in self.session.events if e.kind in kinds]


@pytest.mark.parametrize("kind", ["forward_overflow", "gradient_overflow"])
@pytest.mark.parametrize("op", ["0:linear#0", "1:gelu#0", "2:layer_norm#0", "5:linear#0"])
def test_an_overflow_is_vetoed_named_and_promoted(op: str, kind: str) -> None:
    run = Training()
    fault = inject(run.model, op, kind)
    seen = run.step()
    assert seen.bad and not seen.changed and run.session.step_was_skipped
    assert [e.op for e in run.told("bad_step", "promoted")] == [op, op]
    assert {e.trigger for e in run.told("bad_step", "promoted")} == {"overflow"}
    assert run.told("bad_step")[0].role == ("output" if kind == "forward_overflow" else "grad_input")
    assert fault.applied_steps == [4]
    assert not any(s.bad for s in run.steps(4)) and run.session.skipped_steps == 1
    assert fault.applied_steps == [4]


def test_the_neighbours_ranges_are_told() -> None:
    run = Training()
    inject(run.model, "3:linear#0")
    run.step()
    lines = run.told("bad_step")[0].evidence.split("; ")
    lines = [line for line in lines if ": result " in line]
    names = [line.split()[0] for line in lines]
    assert names == ["1:gelu#0", "2:layer_norm#0", "3:linear#0", "4:relu#0", "5:linear#0"]
    assert all(" fp16: result up to " in line or "without a finite number" in line for line in lines)


def test_a_flipped_bit_is_no_overflow() -> None:
    """Told apart by what FP32 has there; nothing is promoted, and the run goes on as it was."""
    run = Training("bf16")
    before = run.session.plan
    inject(run.model, "3:linear#0", "bit_flip")
    seen = run.step()
    assert seen.bad and not seen.changed
    [event] = run.told("bad_step")
    assert (event.op, event.trigger) == ("3:linear#0", "corruption") and "not its master's cast" in event.evidence
    assert run.session.plan is before and not run.told("promoted")
    assert not any(s.bad for s in run.steps(3))


def test_what_happens_twice_at_one_op_is_no_flipped_bit() -> None:
    run = Training("bf16")
    inject(run.model, "3:linear#0", "bit_flip", steps=2)
    assert all(s.bad and not s.changed for s in run.steps(2))
    assert [e.trigger for e in run.told("bad_step")] == ["corruption", "overflow"]
    assert [e.op for e in run.told("promoted")] == ["3:linear#0"]


def test_a_nan_that_came_with_the_data_promotes_nothing() -> None:
    run = Training()
    x = torch.randn(64, 16)
    x[3, 5] = math.nan
    assert run.step(x).bad and run.session.step_was_skipped
    [event] = run.told("bad_step")
    assert (event.op, event.trigger) == ("0:linear#0", "nonfinite") and not run.told("promoted")


def test_growth_is_told_before_a_step_is_lost_or_in_the_step() -> None:
    run = Training()
    inject(run.model, "3:linear#0", "amax_growth", steps=40)
    seen = run.steps(24)
    first = run.told("bad_step", "promoted")[0]
    assert first.op in ("3:linear#0", "4:relu#0", "5:linear#0") and not any(s.changed for s in seen)
    assert first.trigger in ("growth", "overflow", "saturation")


@pytest.mark.parametrize("kind", ["underflow", "zero"])
def test_a_result_that_is_lost_is_told_within_a_window(kind: str) -> None:
    run = Training()
    inject(run.model, "3:linear#0", kind, steps=8)
    seen = run.steps(8)
    assert not any(s.bad for s in seen)
    told = run.told("promoted", "incident")[0]
    assert told.op == "3:linear#0" and told.trigger in ("zero", "underflow")
    assert told.step <= 4 + 8


def test_a_gradient_too_large_to_square_is_a_bad_step() -> None:
    """It is finite, and AdamW's second moment would be infinite for good."""
    run = Training("bf16")
    seen = run.watch.step(lambda: run.model(torch.randn(64, 16)).square().mean() * 1e36)
    assert seen.bad and not seen.changed and run.session.step_was_skipped
    assert "second moments" in run.told("bad_step")[0].evidence
    assert all(math.isfinite(s.loss) for s in run.steps(3)) and run.session.skipped_steps == 1


def test_under_inductor_too() -> None:
    run = Training(backend="inductor")
    inject(run.model, "3:linear#0")
    seen = run.step()
    assert seen.bad and not seen.changed
    assert [e.op for e in run.told("bad_step", "promoted")] == ["3:linear#0", "3:linear#0"]
    assert not any(s.bad for s in run.steps(2))


def test_without_faults_nothing_is_different() -> None:
    """A fault that is removed, or for later, changes no bit."""
    losses = []
    for planned in (False, True):
        run = Training()
        if planned:
            with inject(run.model, "3:linear#0"):
                pass
            inject(run.model, "0:linear#0", step=1000)
        losses.append([s.loss for s in run.steps(6)])
    assert losses[0] == losses[1]


def test_where_a_flipped_bit_goes() -> None:
    """The highest exponent bit: of FP32 and BF16 by 2^128, of FP16 by 2^16; from 1 on, out of the numbers."""
    assert flipped(0.5, torch.float32) == 0.5 * 2.0**128 == flipped(0.5, torch.bfloat16)
    assert flipped(0.5, torch.float16) == 0.5 * 2.0**16
    assert math.isinf(flipped(1.0, torch.float16)) and math.isnan(flipped(1.5, torch.bfloat16))
    assert flipped(-0.25, torch.float16) == -0.25 * 2.0**16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": "3:linear#1"}, "Did you mean '3:linear#0'"),
        ({"kind": "overflow"}, "unknown kind 'overflow'"),
        ({"op": "1:gelu#0", "kind": "bit_flip"}, "no weight whose cast could flip"),
        ({"step": 2}, "step 2 is over: 4 training steps"),
        ({"steps": 0}, "steps must be"),
    ],
)
def test_faults_that_cannot_be_are_refused(arguments: dict[str, object], text: str) -> None:
    run = Training()
    with pytest.raises(InputError, match=text):
        inject(run.model, **{"op": "3:linear#0", **arguments})  # type: ignore[arg-type]
    assert run.session.faults == []


def test_a_model_that_has_not_run_is_refused() -> None:
    model = autoprec.compile(layers(), policy=policy("fp16"), events=None)
    with pytest.raises(InputError, match="run one training step"):
        inject(model, "0:linear#0")
    with pytest.raises(InputError, match="was not compiled"):
        inject(copy.deepcopy(model), "0:linear#0")


def test_kinds_are_documented_and_injections_say_what_they_are() -> None:
    run = Training()
    for kind in KINDS:
        made = inject(run.model, "3:linear#0", kind, step=99)
        assert isinstance(made, Injection) and (made.op, made.kind, made.first) == ("3:linear#0", kind, 99)
        made.remove()
    assert run.session.faults == []
