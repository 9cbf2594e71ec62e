"""Compiled code of a plan that was made for little memory holds nothing that need not be."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.common import device_codegens
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

import autoprec
from autoprec.execution import fusing, inductor
from autoprec.execution.fusing import lean_code
from autoprec.execution.inductor import Inductor
from autoprec.execution.measuring import peak_bytes
from autoprec.execution.partitioning import Partitioner
from autoprec.plans import Plan
from tests.test_lowering import plan_of, step

FORMATS = {op: "bf16" for op in ("0:linear#0", "1:gelu#0", "2:linear#0", "3:gelu#0", "4:linear#0", "5:gelu#0")}
KEPT = {"1:gelu#0": "fp8_e4m3", "2:linear#0": "fp8_e4m3", "3:gelu#0": "fp8_e4m3", "5:gelu#0": "fp8_e4m3"}


def layers() -> nn.Module:
    """Four products with activations between them."""
    torch.manual_seed(0)
    wide = [nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(nn.Linear(16, 256), *wide, nn.Linear(256, 1))


def compiled(plan: Plan, x: Tensor) -> tuple[nn.Module, int, dict[str, Tensor]]:
    """The model, the measured peak of a step, and its gradients."""
    torch._dynamo.reset()
    model = layers()
    autoprec.compile(model, plan=plan, events=None, backend="inductor")
    with fresh_cache():
        _, gradients = step(model, x)
    return model, peak_bytes(lambda: model(x).square().mean().backward(), x.device), gradients


def test_its_peak_is_lower_and_its_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, x = plan_of(FORMATS, KEPT), torch.randn(2048, 16)
    model, peak, gradients = compiled(plan, x)
    assert autoprec.session(model).lowering.compiled[0].peak_bytes == pytest.approx(peak, rel=0.02)
    monkeypatch.setattr(inductor, "lean_code", nullcontext)
    _, torchs_peak, torchs = compiled(plan, x)
    assert peak < 0.96 * torchs_peak  # 0.87 where the CPU computes in BF16
    assert gradients.keys() == torchs.keys()
    for name, g in gradients.items():  # a reduction may add up in another order
        assert (g - torchs[name]).norm() <= 1e-5 * torchs[name].norm()


def test_the_code_of_other_plans_is_as_fast_as_it_gets() -> None:
    x = torch.randn(2048, 16)
    for plan, lean in ((plan_of(FORMATS), False), (plan_of(FORMATS, KEPT), True), (plan_of(), False)):
        model, _, _ = compiled(plan, x)
        (slot,) = autoprec.session(model)._slots.values()
        assert Inductor(slot.binding, plan, slot.rewritten).order.is_lean is lean


def beside_each_other(x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """Both read what is made in the first product; either is done with before the other need be there."""
    hidden = x @ wide
    return hidden.relu() @ narrow, hidden.sigmoid() @ narrow


def one_of_the_other(x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """The second is made of the first, and not needed before the largest product is done with."""
    hidden = (x @ wide).relu()
    return (hidden @ wide).sum(), hidden.sigmoid() @ narrow


@pytest.mark.parametrize(
    ("function", "choice"),
    [(beside_each_other, "can_fuse_horizontal"), (one_of_the_other, "can_fuse_vertical")],
)
def test_no_fusion_holds_a_tensor_more(
    function: Callable[..., Any], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, wide, narrow = torch.randn(1024, 256), torch.randn(256, 256), torch.randn(256, 4)

    def tensors_held(code: AbstractContextManager[None]) -> float:
        torch._dynamo.reset()
        with torch.no_grad(), fresh_cache():
            with code:
                run = torch.compile(function)
                run(x, wide, narrow)
            return peak_bytes(lambda: run(x, wide, narrow), x.device) / (x.numel() * x.element_size())

    assert tensors_held(lean_code()) == pytest.approx(2, abs=0.05)
    assert tensors_held(nullcontext()) == pytest.approx(3, abs=0.05)
    monkeypatch.setattr(fusing._LeanChoices, choice, staticmethod(getattr(InductorChoices, choice)))
    assert tensors_held(lean_code()) == pytest.approx(3, abs=0.05)  # it is this choice that makes the difference


def test_code_of_one_kind_is_not_taken_for_the_other() -> None:
    """Out of torch's cache, which knows nothing of fusions that were not made."""
    lean, other = Partitioner({}, is_lean=True), Partitioner({}, is_lean=False)
    assert lean.uuid() != other.uuid() and pickle.dumps(lean) != pickle.dumps(other)


def backend() -> str:
    """Of a CPU, as this thread would compile now."""
    return type(device_codegens["cpu"].scheduling(None)).__name__


def test_others_compile_as_before() -> None:
    """In other threads meanwhile, and in this one after an error."""
    found = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lean_code():
            assert backend() == "_OneByOne" and type(V.choices) is not InductorChoices
            assert not config.allow_buffer_reuse
            other = threading.Thread(target=lambda: found.append((backend(), type(V.choices))))
            other.start()
            other.join()
            raise ZeroDivisionError
        found.append((backend(), type(V.choices)))
    assert found == [("CppScheduling", InductorChoices)] * 4 and config.allow_buffer_reuse


def test_another_backend_that_somebody_has_chosen_stays() -> None:
    with lean_code(), config.patch(cpu_backend="triton"):
        assert backend() == "TritonScheduling"
