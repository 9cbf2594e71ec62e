"""Steps whose verdict a device has, and the host reads later: a GPU's way, on a CPU whose tensors say that they are
elsewhere. The oracle is the same run, where the host waits for each verdict before the update."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError, NonFiniteError
from autoprec.execution import stepping
from autoprec.execution.coming import Coming
from tests.leaving import Net, adamw, batch, compiled, everything, is_left, running, step
from tests.test_guard import same

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu")


def test_the_host_reads_nothing_between_the_forward_pass_and_the_next(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session, optimizer = running()
    reads: list[str] = []
    for name in READS:
        method = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, _n=name, _m=method: (reads.append(_n), _m(self, *a))[1])
    x, y = batch(5), batch(6)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        reads.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert reads == [] and is_left(session)
    model(y)
    assert sorted(set(reads)) == ["tolist"] and not is_left(session)
    assert session.steps == 7


@pytest.mark.parametrize("factor", [1e12, 1e20])
def test_a_large_gradient_is_told_from_one_that_is_not_finite(elsewhere: None, factor: float) -> None:
    """By its norm, or by the replay where that is infinite: the gradient itself is gone by then."""
    model, session, optimizer = running("observe")
    optimizer.zero_grad()
    (model(batch(5)).sum() * factor * 1e10).backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    assert is_left(session) and session.step_was_skipped
    event = session.events[-1]
    assert event.trigger == "nonfinite" and "does not hold the sum of its squares" in event.evidence, event
    told = float(event.evidence.split("up to ")[1].split(":")[0])
    assert largest * 0.999 <= told <= largest * 32


@pytest.mark.parametrize("kind", ["nan", "large", "infinite buffer"])
def test_a_bad_step_changes_nothing_before_anybody_asks(elsewhere: None, kind: str) -> None:
    model, session, optimizer = running()
    before = everything(model, optimizer)
    if kind == "nan":
        step(model, optimizer, batch(5, bad=True))
    elif kind == "large":
        step(model, optimizer, batch(5), 1e12)
    else:
        optimizer.zero_grad()
        model(batch(5)).square().mean().backward()
        model.norm.running_var.fill_(math.inf)
        optimizer.step()
    assert is_left(session) and same(before, everything(model, optimizer))
    assert not hasattr(optimizer, "found_inf")
    assert session.step_was_skipped and not is_left(session) and session.skipped_steps == 1
    assert same(before, everything(model, optimizer))
    event = session.events[-1]
    assert event.kind == "bad_step" and event.op == {"nan": "first:linear#0"}.get(kind, event.op)
    step(model, optimizer, batch(6))
    assert not session.step_was_skipped and not same(before[0], everything(model, optimizer)[0])


def test_such_a_run_is_that_of_a_host_that_waits(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: losses, weights, buffers, optimizer, plan and events; with bad steps, promotions and windows."""
    rules = [{"match": "first**", "pin": "fp16"}, {"match": "**", "pin": "fp32"}]

    def run(places: set[str]) -> list[Any]:
        monkeypatch.setattr(stepping, "LEAVES_OUT", places)
        monitor = {"interval_steps": 5, "window_steps": 10}
        model, session = compiled("bf16", monitor=monitor, formats=["fp32", "bf16", "fp16"], rules=rules)
        optimizer, losses, left = adamw(model), [], 0
        for k in range(40):
            losses.append(
                step(
                    model,
                    optimizer,
                    batch(k, bad=k in (9, 23, 24)) * (1e5 if k == 31 else 1.0),
                    1e12 if k == 17 else 1.0,
                )
            )
            left += is_left(session)
        told = [(e.step, e.kind, e.op, e.role, e.was, e.now, e.trigger) for e in session.events]
        counted = (session.steps, session.skipped_steps, session._bad_in_row)
        return [
            left,
            repr(losses),
            everything(model, optimizer),
            counted,
            told,
            session.plan.format_of,
            session.plan.regions,
        ]

    left, *with_device = run({"cpu"})
    none, *waiting = run(set())
    assert left > 20 and none == 0 and all(same(a, b) for a, b in zip(with_device, waiting, strict=True))
    assert [kind for _, kind, *_ in waiting[3]].count("bad_step") == 4 and "promoted" in str(waiting[3])


def test_an_overflow_is_promoted_before_the_next_step(elsewhere: None) -> None:
    model, session, optimizer = running(
        "bf16", rules=[{"match": "first**", "pin": "fp16"}], formats=["fp32", "bf16", "fp16"]
    )
    assert "fp16" in session.plan.formats_used()
    before = everything(model, optimizer)
    step(model, optimizer, batch(5) * 1e6)
    assert is_left(session) and same(before, everything(model, optimizer))
    loss = step(model, optimizer, batch(5) * 1e6)
    assert math.isfinite(loss) and session.steps == 5 and session.skipped_steps == 1
    assert [e.kind for e in session.events if e.op == "first:linear#0"][:2] == ["bad_step", "promoted"]


@pytest.mark.parametrize("name", ["not fused", "plain gradient descent", "one group is not", "a class of the user's"])
def test_optimizers_that_cannot_are_waited_for(elsewhere: None, name: str) -> None:
    class Mine(torch.optim.AdamW):
        pass

    model, session = compiled()
    groups = [{"params": [p], "fused": name != "one group is not" or k > 0} for k, p in enumerate(model.parameters())]
    optimizer: torch.optim.Optimizer = {
        "not fused": lambda: torch.optim.AdamW(model.parameters()),
        "plain gradient descent": lambda: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        "one group is not": lambda: torch.optim.AdamW(groups),
        "a class of the user's": lambda: Mine(model.parameters(), fused=True),
    }[name]()
    for k in range(4):
        step(model, optimizer, batch(k))
    before = everything(model, optimizer)
    step(model, optimizer, batch(5, bad=True))
    assert not is_left(session) and session.step_was_skipped and same(before, everything(model, optimizer))


@pytest.mark.parametrize("what", ["state", "policy", "spikes", "observed", "scaler", "calibrating"])
def test_where_the_verdict_cannot_wait(elsewhere: None, what: str) -> None:
    """The step after these would be left; for one reason it is not."""
    guard = {"policy": {"nonfinite": "raise"}, "spikes": {"loss_spike": "skip"}}.get(what, {})
    model, session = compiled(guard=guard, monitor={"interval_steps": 6, "window_steps": 12})
    optimizer = adamw(model)
    for k in range(5 if what == "observed" else 1 if what == "calibrating" else 4):
        step(model, optimizer, batch(k))
    if what == "state":  # of one parameter, which a step would make
        optimizer.state.pop(model.first.bias)
        assert not optimizer.state[model.first.bias]  # looked at, there is something
    before = everything(model, optimizer)
    if what == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.zero_grad()
        scaler.scale(model(batch(4)).square().mean()).backward()
        scaler.step(optimizer)
    elif what == "policy":
        with pytest.raises(NonFiniteError, match="parameters are unchanged"):
            step(model, optimizer, batch(4, bad=True))
        assert same(before, everything(model, optimizer))
    else:
        step(model, optimizer, batch(4, bad=what == "state"))
        assert what != "state" or same(before[0], everything(model, optimizer)[0])
    assert not is_left(session)
    if what == "state":
        assert not optimizer.state[model.first.bias] and session.step_was_skipped
    if what in ("observed", "calibrating"):
        step(model, optimizer, batch(5))
        step(model, optimizer, batch(6))
        assert is_left(session)


@pytest.mark.parametrize(
    "ask", ["steps", "skipped_steps", "step_was_skipped", "plan", "events", "save", "unwrap", "eval", "report"]
)
def test_whoever_asks_is_told_of_all_steps(elsewhere: None, ask: str, tmp_path: Path) -> None:
    model, session, optimizer = running()
    step(model, optimizer, batch(5, bad=True))
    assert is_left(session)
    if ask == "save":
        session.save(tmp_path / "state.safetensors")
        other = autoprec.compile(Net(), policy=session.policy, events=None)
        again = autoprec.session(other)
        again.load(tmp_path / "state.safetensors")
        assert (again.steps, again.skipped_steps, again.step_was_skipped) == (4, 1, True)
    elif ask == "unwrap":
        autoprec.unwrap(model)
    elif ask == "eval":
        model.eval()
        with torch.inference_mode():
            model(batch(6))
    elif ask == "report":
        with pytest.raises(InputError, match="no file"):
            session.report(tmp_path / "report.html")
    else:
        getattr(session, ask)
    assert not is_left(session) and session._skipped_steps == 1


def test_several_optimizers_answer_together(elsewhere: None) -> None:
    """The second asks how the step went that the first has made."""
    model, session = compiled()
    first = adamw(model.first)
    second = torch.optim.AdamW([*model.norm.parameters(), *model.last.parameters()], lr=1e-2)

    def both(x: Tensor) -> None:
        for optimizer in (first, second):
            optimizer.zero_grad()
        model(x).square().mean().backward()
        first.step()
        second.step()

    for k in range(4):
        both(batch(k))
    before = [everything(model, optimizer) for optimizer in (first, second)]
    model(batch(3))  # settles
    first.zero_grad()
    model(batch(3)).square().mean().backward()
    first.step()
    assert is_left(session)
    before = [everything(model, optimizer) for optimizer in (first, second)]
    both(batch(4, bad=True))
    assert not is_left(session)  # the second waited
    assert session.step_was_skipped and same(before, [everything(model, optimizer) for optimizer in (first, second)])
    assert [e.kind for e in session.events].count("bad_step") == 1
    both(batch(5))
    assert session.steps == 6 and not same(before, [everything(model, optimizer) for optimizer in (first, second)])


def test_a_backward_pass_after_the_step_is_not_of_it(elsewhere: None) -> None:
    model, session, optimizer = running(model=nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer.zero_grad()
    y = model(batch(4))
    y.square().mean().backward(retain_graph=True)
    optimizer.step()
    assert is_left(session)
    before = everything(model, optimizer)
    (y.sum() * math.nan).backward()
    assert is_left(session) and session.steps == 5 and not session.step_was_skipped
    optimizer.step()
    assert same(before, everything(model, optimizer))


def test_micro_batches_are_judged_together(elsewhere: None) -> None:
    model, session, optimizer = running()
    for bad in (None, 0, 2):
        before = everything(model, optimizer)
        optimizer.zero_grad()
        for k in range(3):
            model(batch(k, bad=k == bad)).square().mean().backward()
        optimizer.step()
        assert is_left(session) == (bad in (None, 2))  # what was bad before the last forward pass is known
        assert same(before[0], everything(model, optimizer)[0]) == (bad is not None)
        assert session.step_was_skipped == (bad is not None)


def test_a_closure_is_judged_inside(elsewhere: None) -> None:
    model, session = compiled()
    optimizer = adamw(model)

    def closed(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    for k in range(4):
        closed(batch(k))
    before = everything(model, optimizer)
    closed(batch(4, bad=True))
    assert is_left(session) and same(before, everything(model, optimizer)) and session.step_was_skipped


def test_a_loop_that_overwrites_its_batches_is_noticed(elsewhere: None) -> None:
    """What the step was given is needed to name its culprit: from the second of its steps on the host waits."""
    model, session = compiled()
    optimizer, x, left = adamw(model), batch(0), []
    for k in range(6):
        x.copy_(batch(k))
        step(model, optimizer, x)
        left.append(is_left(session))
    assert left == [False, False, True, False, False, False]
    assert [e.trigger for e in session.events if e.kind == "warning"] == ["overwritten"]
    before = everything(model, optimizer)
    x[0] = math.nan
    step(model, optimizer, x)
    assert same(before, everything(model, optimizer)) and session.events[-1].op == "first:linear#0"


def test_what_was_overwritten_names_no_culprit(elsewhere: None) -> None:
    model, session, optimizer = running()
    x = batch(4, bad=True)
    step(model, optimizer, x)
    x.zero_()
    bad = [e for e in session.events if e.kind == "bad_step"]
    assert session.skipped_steps == 1 and [e.op for e in bad] == [""] and "another batch by now" in bad[0].evidence


def test_a_wait_that_is_interrupted_loses_nothing(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session, optimizer = running()
    step(model, optimizer, batch(5, bad=True))
    with monkeypatch.context() as patched:
        patched.setattr(Coming, "read", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session.settle()
    assert is_left(session) and session.skipped_steps == 1
    step(model, optimizer, batch(6))
    assert session.steps == 5


def test_another_thread_may_ask(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session = compiled()
    optimizer = adamw(model)
    read, over = Coming.read, threading.Event()
    monkeypatch.setattr(Coming, "read", lambda self: (time.sleep(0.005), read(self))[1])

    def ask() -> None:
        while not over.is_set():
            assert session.steps >= 0

    asking = threading.Thread(target=ask)
    asking.start()
    for k in range(30):
        step(model, optimizer, batch(k, bad=k % 7 == 6))
    over.set()
    asking.join()
    assert (session.steps, session.skipped_steps) == (26, 4)


def test_a_flag_of_ours_stays_with_nobody(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer raised, and the model is unwrapped or gone."""
    for gone in (False, True):
        model, session, optimizer = running()
        with monkeypatch.context() as patched:
            patched.setattr(optimizer, "_init_group", lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(model, optimizer, batch(5, bad=True))
        assert float(optimizer.found_inf) == 1.0  # type: ignore[attr-defined]
        if gone:
            del model, session
            gc.collect()
        else:
            autoprec.unwrap(model)
        assert not hasattr(optimizer, "found_inf")


def test_unwrapping_ends_with_the_plain_model(elsewhere: None) -> None:
    """Also where the last step has ended the run's patience."""
    model, session, optimizer = running(guard={"patience_steps": 1})
    step(model, optimizer, batch(5, bad=True))
    with pytest.raises(NonFiniteError):
        autoprec.unwrap(model)
    with pytest.raises(InputError, match="not compiled"):
        autoprec.session(model)
    assert session.skipped_steps == 1


def test_patience_ends_at_the_next_call(elsewhere: None) -> None:
    model, session, optimizer = running(guard={"patience_steps": 2})
    before = everything(model, optimizer)
    step(model, optimizer, batch(4, bad=True))
    step(model, optimizer, batch(5, bad=True))
    with pytest.raises(NonFiniteError, match="2 bad steps in a row"):
        model(batch(6))
    assert same(before, everything(model, optimizer)) and session.skipped_steps == 2


def test_an_optimizer_that_raises_leaves_no_flag(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session, optimizer = running()
    before = everything(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_init_group", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, optimizer, batch(5, bad=True))
    optimizer.step()
    assert is_left(session) and not hasattr(optimizer, "found_inf")
    assert same(before, everything(model, optimizer)) and session.step_was_skipped


def test_what_a_step_that_raised_was_given_names_nobody_later(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer raised when the device had the verdict; the step that follows is waited for, and bad."""
    model, session, optimizer = running()
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_init_group", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, optimizer, batch(5))
    monkeypatch.setattr(stepping, "LEAVES_OUT", set[str]())
    step(model, optimizer, batch(6, bad=True))
    assert session.step_was_skipped and session.events[-1].op == "first:linear#0"


def test_models_with_many_buffers_are_waited_for(elsewhere: None) -> None:
    model = nn.Sequential(nn.Linear(16, 8), *[nn.BatchNorm1d(8) for _ in range(24)])
    model, session = compiled(model=model)
    optimizer = adamw(model)
    for k in range(5):
        step(model, optimizer, batch(k))
    assert not is_left(session) and session.steps == 5


def test_the_last_step_of_a_program_is_told(tmp_path: Path) -> None:
    """Nobody calls the model again, or asks."""
    program = f"""
    import torch, autoprec
    from torch import Tensor, nn
    from autoprec.execution import stepping
    Tensor.is_cpu, stepping.LEAVES_OUT = property(lambda self: False), {{"cpu"}}
    model = nn.Linear(4, 4)
    policy = autoprec.serial.load_policy("bf16").replaced(calibration={{"steps": 2}})
    autoprec.compile(model, policy=policy, events={str(tmp_path / "events.jsonl")!r})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for k in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 4) * (float("nan") if k == 5 else 1.0)).sum().backward()
        optimizer.step()
    assert autoprec.session(model)._guard.owes
    """
    source = "import autoprec.serial\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"kind":"bad_step"' in (tmp_path / "events.jsonl").read_text().replace('": "', '":"')


def test_hooks_of_the_optimizer_see_what_a_bad_step_leaves(elsewhere: None) -> None:
    """Buffers among it, which the device puts back before they look."""
    model, session, optimizer = running()
    seen: list[Any] = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(everything(model, optimizer)))
    before = everything(model, optimizer)
    step(model, optimizer, batch(5, bad=True))
    assert is_left(session) and same(seen[-1], before)
    step(model, optimizer, batch(6))
    assert len(seen) == 2 and not same(seen[-1], before)
    handle.remove()
    step(model, optimizer, batch(7))
    assert len(seen) == 2 and session.skipped_steps == 1 and not optimizer._optimizer_step_post_hooks
