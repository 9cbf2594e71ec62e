"""Products inside kernels of torch: formats of their gradients apart from their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.graphs import Role
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.kernels import kernel
from autoprec.numerics.specs import gemm_spec
from autoprec.plans import Assignment, Plan, Region
from tests.test_regressions import Body

KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled_dot_product_attention": lambda x, z: F.scaled_dot_product_attention(x, z, 2.0 * z, is_causal=True),
    "einsum": lambda x, z: torch.einsum("bij,bkj->bik", x, z),
    "baddbmm": lambda x, z: torch.baddbmm(x, z @ x.mT, z),
}


class InKernel(nn.Module):
    """A product inside a kernel of torch's, of two activations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gain, self.kind = nn.Parameter(torch.full((8,), 0.5)), kind

    def forward(self, x: Tensor) -> Tensor:
        return KERNELS[self.kind](x, self.gain * x)


@pytest.mark.parametrize("kind", list(KERNELS))
@pytest.mark.parametrize(("output", "grad_input"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")])
def test_gradients_of_a_kernel_have_a_format_of_their_own(kind: str, output: str, grad_input: str) -> None:
    """Bitwise the kernel in one format, and its gradients by autograd in the other."""
    model, scale = InKernel(kind), 20 if grad_input == "fp16" else 0
    op = f":{kind}#0"
    roles = {Role.OUTPUT: output, Role.GRAD_INPUT: grad_input}
    assignments = tuple(Assignment(op=op, role=r, format=f, reason="") for r, f in roles.items())
    regions = (Region(ops=(op,), scale_log2=scale, reason=""),) if scale else ()
    autoprec.compile(model, plan=Plan(assignments=assignments, regions=regions), events=None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 8, generator=generator).requires_grad_()
    y = model(x)
    g = 1e-6 * torch.randn(y.shape, generator=generator)
    y.backward(g)
    z = (0.5 * x.detach()).requires_grad_()
    own = x.detach().requires_grad_()
    first, second = dtype_of(output), dtype_of(grad_input)
    # What feeds the kernel is in FP32.
    if kind == "baddbmm":
        operands, run = [own, z.detach() @ own.detach().mT, z], torch.baddbmm
    elif kind == "einsum":
        operands, run = [own, z], KERNELS[kind]
    else:
        operands, run = [own, z, 2.0 * z], partial(F.scaled_dot_product_attention, is_causal=True)
    narrow = [t.detach().to(first) for t in operands]
    assert torch.equal(y, run(*narrow).float())
    again = [t.to(second).requires_grad_() for t in narrow]
    arriving = (g.to(first).float() * 2.0**scale).to(second)
    found = [t.float() * 2.0**-scale for t in torch.autograd.grad(run(*again), again, arriving)]
    found = [t.to(first).float() for t in found]
    if kind == "baddbmm":
        found = [found[0] + found[1].mT @ z.detach(), found[2] + found[1] @ own.detach()]
    expected = found[0] + 0.5 * (found[1] + (2.0 * found[2] if len(found) > 2 else 0.0))
    torch.testing.assert_close(x.grad, expected, rtol=2**-20, atol=2**-20 * float(expected.abs().max()))
    assert float(x.grad.abs().max()) > 0.0


def test_the_result_of_such_a_kernel_may_be_changed_in_place() -> None:
    """What einsum gives is a view."""
    spec = gemm_spec({Role.OUTPUT: "fp32", Role.GRAD_INPUT: "bf16"}, "cpu")
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = kernel("bij,bkj->kib", x, x, function=torch.einsum, spec=spec)
    y[0] = 0
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.any())


def test_a_masked_row_has_its_gradient_in_the_other_format() -> None:
    """The lowest FP32 number would be −inf in BF16: such a row sees nothing, in FP32 all alike."""
    spec = gemm_spec({Role.OUTPUT: "fp32", Role.GRAD_INPUT: "bf16"}, "cpu")
    x = torch.randn(2, 4, 8, requires_grad=True)
    mask = torch.zeros(4, 4).index_fill(0, torch.tensor([1]), torch.finfo(torch.float32).min)
    g = torch.randn(2, 4, 8)
    (plain,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, attn_mask=mask), x, g)
    kernel(x, x, x, attn_mask=mask, function=F.scaled_dot_product_attention, spec=spec).backward(g)
    assert x.grad is not None and float((x.grad - plain).norm()) < 0.02 * float(plain.norm())


@pytest.mark.parametrize("role", [Role.GRAD_INPUT, Role.GRAD_WEIGHT])
def test_a_role_that_an_op_has_not_is_refused(role: Role) -> None:
    """A gradient of its own for dropout would be that of another mask."""
    model = Body(lambda m, x: F.dropout(m.a(x), 0.5).sum(), a=nn.Linear(8, 8))
    roles = {Role.OUTPUT: "bf16", role: "fp32"}
    plan = Plan(assignments=tuple(Assignment(op=":dropout#0", role=r, format=f, reason="") for r, f in roles.items()))
    autoprec.compile(model, plan=plan, events=None)
    with pytest.raises(autoprec.PlanError, match=f"a format for {role}, but dropout has output alone"):
        model(torch.randn(4, 8))


def test_attention_that_drops_out_runs_in_one_format() -> None:
    class Dropping(InKernel):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, self.gain * x, x, dropout_p=0.5)

    roles = {Role.OUTPUT: "bf16", Role.GRAD_INPUT: "fp32"}
    plan = Plan(assignments=tuple(Assignment(op=":scaled_dot_product_attention#0", role=r, format=f, reason="")
                                  for r, f in roles.items()))  # fmt: skip
    model = autoprec.compile(Dropping(""), plan=plan, events=None)
    with pytest.raises(autoprec.PlanError, match="it would drop others; give both roles one format"):
        model(torch.randn(2, 8, 8))
