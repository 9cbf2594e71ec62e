"""Masks in graphs through torch's compiler: one bit per element, and code that is fast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import autoprec
from autoprec.numerics import lean
from tests.test_lowering import BF16_EPS, both, furthest, plan_of


def test_relu_keeps_bits() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    eager, compiled, model = both(Net(), plan_of({":relu#0": "fp32"}, {":relu#0": "fp8_e4m3"}), torch.randn(256, 16))
    assert furthest(eager[0][1], compiled[0][1]) < 1e-5
    (made,) = autoprec.session(model).lowering.compiled
    assert sorted(t.bytes for t in made.kept) == [4, 256 * 64 // 8, 256 * 64]


class Images(nn.Module):
    """Convolutions with ReLUs between; scores of the places of an image, through a ReLU as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.a(x)) + 1.0)
        y = torch.relu(self.b(y))
        q = y.flatten(2).unflatten(1, (2, 4)).transpose(2, 3)
        return torch.relu(q @ q.transpose(2, 3)).mean((1, 2))


@pytest.mark.parametrize("formats", [{}, {"norm:batch_norm#0": "bf16", ":relu#0": "bf16", "b:conv2d#0": "bf16"}])
def test_bits_of_images_lie_as_the_images_do(formats: dict[str, str]) -> None:
    """Code with booleans takes ten times as long, and so does code that unpacks across the layout, or writes a byte
    for each element of a result across it to pack them."""
    relus = [f":relu#{i}" for i in range(3)]
    plan = plan_of(dict.fromkeys(relus, "fp32") | formats, dict.fromkeys(relus, "fp8_e4m3"))
    seen: list[bool] = []
    bits, x = lean._bits_of_result, torch.randn(4, 4, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, "_bits_of_result", lambda y, images: seen.append(images) or bits(y, images))
        (eager, compiled, _), code = run_and_get_code(both, Images(), plan, x)
    assert seen[:3] == [False] * 3 and seen[3:6] == [True, True, False]  # in eager mode as the numbers lie
    assert furthest(eager[0][1], compiled[0][1]) < (4 * BF16_EPS if formats else 1e-4)
    kernels = [line for text in code for line in text.splitlines() if "cpp_pybinding" in line]
    assert kernels and not any("bool" in line for line in kernels)
    assert not any("'uint8_t*'" in line for line in kernels)  # bytes are read there, and not written
