"""`GradScaler` beside torch's own: the same run to the bit, and what torch's cannot do."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError, NonFiniteError
from autoprec.planning.loss_scaling import largest_loss_scale_log2, overflow_frac, underflow_frac
from autoprec.policies import Policy
from autoprec.serial import load_policy

CORE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def ours(**kwargs: Any) -> autoprec.GradScaler:
    """With a floor and a patience that are not reached."""
    return autoprec.GradScaler("cpu", min_scale=1e-30, patience_steps=10_000, **kwargs)


def theirs(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **kwargs)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def run(scaler: torch.amp.GradScaler, kind: str, seed: int) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    """Forty steps with one or two optimizers, accumulation, clipping of unscaled gradients, infs here and there, scales
    set by hand, and a restart from the state."""
    generator = torch.Generator().manual_seed(seed)

    def chance(p: float) -> bool:
        return float(torch.rand((), generator=generator)) < p

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    groups = [model[0].parameters(), model[2].parameters()] if seed % 2 else [model.parameters()]
    optimizers = [OPTIMIZERS[kind](list(p)) for p in groups]
    scales = []
    for _ in range(40):
        for _ in range(2 if chance(0.3) else 1):
            loss = model(torch.randn(6, 8, generator=generator)).square().mean()
            scaler.scale(loss).backward()
        if chance(0.2):
            next(model[2 * int(chance(0.5))].parameters()).grad[0, 0] = math.inf if chance(0.5) else math.nan
        for optimizer in optimizers:
            if chance(0.5):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            scaler.step(optimizer)
            optimizer.zero_grad()
        if chance(0.05):
            scaler.update(64.0 if chance(0.5) else torch.tensor(32.0))
        else:
            scaler.update()
        if chance(0.1):
            state = scaler.state_dict()
            scaler = type(scaler)("cpu", growth_factor=4.0) if chance(0.5) else pickle.loads(pickle.dumps(scaler))
            scaler.load_state_dict(state)
        scales.append(scaler.get_scale())
    return scales, {k: scaler.state_dict()[k] for k in CORE}, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_ours_is_a_run_with_torchs(kind: str, seed: int) -> None:
    settings = {"init_scale": 2.0**20, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 3}
    a, b = run(ours(**settings), kind, seed), run(theirs(**settings), kind, seed)
    assert a[0] == b[0] and a[1] == b[1] and len(set(a[0])) > 3
    assert all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))


@pytest.mark.parametrize("make", [ours, theirs])
def test_scaling_of_outputs_and_order_of_calls(make: Callable[..., torch.amp.GradScaler]) -> None:
    """What torch's own tests ask of a scaler: nested outputs, and errors for calls out of order."""
    scaler = make(init_scale=4.0)
    x = torch.ones(2)
    assert [t.tolist() for t in scaler.scale([x, x * 2])] == [[4.0, 4.0], [8.0, 8.0]]
    a, (b, c) = scaler.scale((x, (x, [x])))
    assert a.tolist() == b.tolist() == c[0].tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="iterable"):
        scaler.scale(3)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))  # it has no gradient
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="losure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.update()
    assert p.tolist() == [0.0, 0.0] and scaler.get_scale() == 4.0
    fresh = make()
    with pytest.raises(AssertionError, match="_scale is None"):
        fresh.update()
    with pytest.raises(AssertionError, match="_scale is None"):
        fresh.unscale_(optimizer)


@pytest.mark.parametrize("make", [ours, theirs])
def test_not_enabled_is_not_there(make: Callable[..., torch.amp.GradScaler]) -> None:
    scaler = make(enabled=False)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    assert scaler.scale(p) is p and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    p.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert p.tolist() == [0.0, 0.0] and not scaler.is_enabled()


def overflow(scaler: torch.amp.GradScaler, p: nn.Parameter, optimizer: torch.optim.Optimizer, bad: bool = True) -> None:
    scaler.scale(p.sum()).backward()
    if bad:
        p.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_four_hundred_overflows_in_a_row() -> None:
    """torch's scale becomes 0, and the next good step writes NaN. Ours stops with an error, weights untouched."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = theirs()
    for _ in range(400):
        overflow(scaler, p, optimizer)
    overflow(scaler, p, optimizer, bad=False)
    assert scaler.get_scale() == 0.0 and bool(p.isnan().all())

    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    found = autoprec.GradScaler("cpu")
    errors = 0
    for _ in range(400):
        try:
            overflow(found, p, optimizer)
        except NonFiniteError as error:
            errors += 1
            assert "it is not the scale" in str(error) and "smallest loss scale, 6.1e-05" in str(error)
            optimizer.zero_grad()
    # 30 halvings from 2^16 to 2^-14; from the 50th on one look in twenty.
    assert errors == (400 - 40) // 20 and p.tolist() == [1.0, 1.0, 1.0]
    overflow(found, p, optimizer, bad=False)
    assert bool(p.isfinite().all()) and found.get_scale() == 2.0**-14
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_a_search_for_the_scale_is_no_error() -> None:
    """From 2^100 down to where it fits: more overflows in a row than patience has, none of them at the floor."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = autoprec.GradScaler("cpu", init_scale=2.0**100)
    for _ in range(90):
        overflow(scaler, p, optimizer)
    overflow(scaler, p, optimizer, bad=False)
    assert scaler.get_scale() == 2.0**10


def test_hysteresis() -> None:
    """Two overflows are let pass until the scale has grown again; the third halves it, and each that follows."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = autoprec.GradScaler("cpu", init_scale=64.0, growth_interval=2, hysteresis=3)
    seen = []
    for bad in (True, True, True, True, False, False, True, True, True):
        overflow(scaler, p, optimizer, bad)
        if len(seen) == 1:  # half of the patience is used up: it is part of the state
            state = scaler.state_dict()
            scaler = autoprec.GradScaler("cpu")
            scaler.load_state_dict(state)
        seen.append(scaler.get_scale())
    assert seen == [64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0]


BAD = [math.nan, math.inf, -1.0, 0.0, "65536", None, True]


@pytest.mark.parametrize(
    "key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "hysteresis"]
)
@pytest.mark.parametrize("value", BAD, ids=str)
def test_a_corrupt_state_is_refused_by_name(key: str, value: Any) -> None:
    scaler = autoprec.GradScaler("cpu", init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises(InputError, match=f"state of the GradScaler: {key} must be"):
        scaler.load_state_dict(before | {key: value})
    assert scaler.state_dict() == before


def test_other_states_that_are_refused() -> None:
    scaler = autoprec.GradScaler("cpu")
    state = scaler.state_dict()
    for key in CORE:
        with pytest.raises(InputError, match=f"{key} is missing"):
            scaler.load_state_dict({k: v for k, v in state.items() if k != key})
    for change, words in (
        ({"_growth_tracker": -1}, "_growth_tracker must be"),
        ({"growth_interval": 2.5}, "growth_interval must be a finite whole number"),
        ({"growth_factor": 1.0}, "growth_factor must be a finite number above 1, not 1.0"),
        ({"backoff_factor": 1.0}, "above 0 and below 1"),
        ({"scale": 1.0, "min_scale": 2.0}, "scale 1 is below min_scale 2"),
        ({"_overflows": [1]}, "_overflows must be two whole numbers"),
        ({"_waits": 1}, "_waits must be true or false"),
    ):
        with pytest.raises(InputError, match=words):
            scaler.load_state_dict(state | change)
    with pytest.raises(InputError, match="not enabled"):
        scaler.load_state_dict({})


def test_arguments_are_checked_by_name() -> None:
    for arguments, words in (
        ({"init_scale": math.inf}, "init_scale must be"),
        ({"init_scale": 1e-6}, "init_scale 1e-06 is below min_scale"),
        ({"growth_factor": 1.0}, "growth_factor must be"),
        ({"backoff_factor": 0.0}, "backoff_factor must be"),
        ({"growth_interval": 0}, "growth_interval must be"),
        ({"min_scale": 0.0}, "min_scale must be"),
        ({"hysteresis": 0}, "hysteresis must be"),
        ({"patience_steps": 1.5}, "patience_steps must be"),
        ({"init_scale": "auto"}, r"GradScaler\(model=model\)"),
    ):
        with pytest.raises(InputError, match=words):
            autoprec.GradScaler("cpu", **arguments)
    scaler = autoprec.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for value in (math.nan, 0.0, torch.tensor(-1.0)):
        with pytest.raises(InputError, match="new_scale"):
            scaler.update(value)


def test_states_go_to_torchs_and_come_back() -> None:
    scaler = autoprec.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    torchs = theirs()
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.get_scale() == 512.0 and torchs.get_growth_interval() == 7
    again = autoprec.GradScaler("cpu", hysteresis=2)
    again.load_state_dict(torchs.state_dict())
    assert again.state_dict() == scaler.state_dict() | {"hysteresis": 2}
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()
    assert isinstance(scaler, torch.amp.GradScaler)


# With a model ---------------------------------------------------------------------------------------------------------


def small_gradients() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    """Gradients of about 1e-9: zero in FP16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, lambda m, x: m(x).square().mean() * 1e-6


def global_policy(**scaling: Any) -> Policy:
    pins = {"match": "*", "kinds": ["linear", "tanh"], "pin": "fp16"}
    return Policy(name="test", formats=("fp32", "fp16"), rules=(pins,), calibration={"steps": 3},
                  noise={"gradient": 1e3, "loss": 1e3}, storage={"formats": ()},
                  loss_scaling={"mode": "global", **scaling})  # fmt: skip


def test_the_first_scale_is_read_off_calibration() -> None:
    """The largest power of two with which nothing overflows: checked against the gradients themselves."""
    model, loss_fn = small_gradients()
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    largest = 0.0
    for x in batches[:3]:
        outputs: list[Tensor] = []

        def look(m: nn.Module, a: Any, y: Tensor, outputs: list[Tensor] = outputs) -> None:
            y.retain_grad()
            outputs.append(y)

        handles = [m.register_forward_hook(look) for m in model]
        model.zero_grad()
        loss_fn(model, x).backward()
        largest = max(largest, *(float(y.grad.abs().max()) for y in (*outputs, *model.parameters())))
        for handle in handles:
            handle.remove()
    model.zero_grad()
    expected = 2.0 ** math.floor(math.log2(65504 / largest))
    autoprec.compile(model, policy=global_policy(), events=None)
    scaler = autoprec.GradScaler(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = autoprec.session(model)
    for i, x in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1.0 if i < 2 else expected)
    assert session.skipped_steps == 0 and {a.format for a in session.plan.assignments} == {"fp16"}
    assert overflow_frac(session.profile, expected) == 0.0 < overflow_frac(session.profile, 1e3 * expected)
    assert underflow_frac(session.profile, expected) < 0.01 < 0.9 < underflow_frac(session.profile, 1.0)
    assert 2.0 ** largest_loss_scale_log2(session.profile) == expected


def test_what_the_policy_says_is_where_it_starts() -> None:
    model, _ = small_gradients()
    autoprec.compile(model, policy="dynamic", events=None)
    state = autoprec.GradScaler(model=model).state_dict()
    assert [state[k] for k in CORE[:4]] == [4096.0, 2.0, 0.5, 2000]
    assert autoprec.GradScaler(model=model, init_scale=8.0).get_scale() == 8.0
    assert load_policy("dynamic").monitor.window_steps == 500
    assert load_policy("fp16").loss_scaling.init == 2.0**16


def test_a_scale_for_the_loss_is_as_good_as_one_for_each_region() -> None:
    """Weight gradients under both, against FP32's."""
    found = {}
    for mode in ("global", "regional", "fp32"):
        model, loss_fn = small_gradients()
        batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        if mode != "fp32":
            chosen = global_policy().replaced(loss_scaling={"mode": mode})
            autoprec.compile(model, policy=chosen, batches=batches[:3], loss_fn=loss_fn, events=None)
        scale = 1.0
        if mode == "global":
            scale = 2.0 ** largest_loss_scale_log2(autoprec.session(model).profile)
        (loss_fn(model, batches[3]) * scale).backward()
        found[mode] = [p.grad / scale for p in model.parameters()]
    for a, b, c in zip(*found.values(), strict=True):
        assert float((a - c).norm()) < 2e-3 * float(c.norm()) and float((b - c).norm()) < 2e-3 * float(c.norm())


def six_linears() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    """Nothing but products, and a loss whose gradient is 1e-9 for every output."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, bias=False) for _ in range(6)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # gradients keep their size on the way
    return nn.Sequential(*layers), lambda m, x: (m(x).float() * 1e-9).sum()


def test_gradients_of_1e_9_through_six_layers_in_fp16() -> None:
    """One scale for the region brings them through; autocast without a scaler makes every one of them 0.

    A weight's gradient is a product of at most 12 factors (6 activations' and gradients' roundings, 6 weights'), each
    within 2^-11 of FP32's; relative errors add up to 12·2^-11 at most, and like √12·2^-11 where they are independent.
    """
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    model, loss_fn = six_linears()
    loss_fn(model, x).backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(x)
    loss_fn(lambda _: y, x).backward()
    assert not any(p.grad.any() for p in model.parameters())

    model, loss_fn = six_linears()
    chosen = global_policy().replaced(loss_scaling={"mode": "regional"})
    autoprec.compile(model, policy=chosen, batches=[x, x * 1.1, x * 0.9], loss_fn=loss_fn, events=None)
    session = autoprec.session(model)
    assert {a.format for a in session.plan.assignments} == {"fp16"} and len(session.plan.regions) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_fn(model, x).backward()
    for found, wanted in zip((p.grad for p in model.parameters()), exact, strict=True):
        assert float((found - wanted).norm()) < 12 * 2.0**-11 * float(wanted.norm())
    optimizer.step()
    assert session.steps == 1 and session.skipped_steps == 0
