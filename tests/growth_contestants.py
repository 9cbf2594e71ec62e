"""The growth study's model, and who trains it: FP32, BF16 and FP16 as people do it, and two policies of autoprec."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode

import autoprec
from tests.bench.workloads import next_byte_loss, text_batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the experiment. `patience`: a run is dead when of so many attempts in a row not a tenth changed a
    weight (torch's GradScaler reaches 0 after 166 that did not)."""

    width: int = 64
    heads: int = 2
    depth: int = 3
    context: int = 64
    rows: int = 12
    steps: int = 500
    warm_steps: int = 50
    rate: float = 5e-3
    mlp_rate: float = 4e-2
    clip: float = 1.0
    patience: int = 170
    window_steps: int = 20
    interval_steps: int = 2

    def batch(self, generator: Generator, *, unseen: bool = False) -> Tensor:
        return text_batch(generator, unseen=unseen, rows=self.rows, length=self.context)

    def share_of_rate(self, attempt: int) -> float:
        """Up over the warm steps, and down to 0."""
        return min(1.0, (attempt + 1) / self.warm_steps) * (1.0 - attempt / self.steps)


# The model -----------------------------------------------------------------------------------------------------------


class GatedBlock(nn.Module):
    """Pre-norm attention, and an MLP whose hidden layer is up · relu(gate)²: of degree three in what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (nn.Linear(a, b) for a, b in ((width, 4 * width),) * 2 + ((4 * width, width),))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same."""
        n, t, width = x.shape
        heads = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(n, t, width))
        z = self.norm2(x)
        return x + self.down(self.up(z) * F.relu(self.gate(z)).square())


class GatedTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(setting.context, width))
        self.blocks = nn.ModuleList(GatedBlock(width, setting.heads) for _ in range(setting.depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes → (batch, time, 256) logits."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Largest(TorchFunctionMode):
    """The largest |x| among the results of the functions that are called."""

    amax = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.amax = max(self.amax, float(result.detach().abs().max()))
        return result


class Probe:
    """An FP32 copy of a model, which makes forward passes with the weights of the moment."""

    def __init__(self, model: nn.Module) -> None:
        self._followed, self._copy = model, copy.deepcopy(model)

    @torch.no_grad()
    def largest(self, tokens: Tensor) -> float:
        """The largest |activation| of a forward pass."""
        for own, theirs in zip(self._copy.parameters(), self._followed.parameters(), strict=True):
            own.copy_(theirs)
        with _Largest() as seen:
            self._copy(tokens[:, :-1])
        return seen.amax


# Contestants ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A plain training loop in FP32, or under autocast. `model` has the FP32 weights, which `optimizer` updates."""

    def __init__(self, setting: Setting, dtype: torch.dtype | None = None) -> None:
        self.setting, self.dtype = setting, dtype
        self.model: nn.Module = GatedTransformer(setting)
        self.optimizer: Optimizer = AdamW(groups_of(self.model, setting), betas=(0.9, 0.95), weight_decay=0.0)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.updates = 0
        # A GradScaler that skips a step does not call the optimizer.
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        """Where every gradient is zero nothing is learned from the batch."""
        self.updates += any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters())

    def loss(self, tokens: Tensor) -> Tensor:
        """In the arithmetic of this contestant."""
        with nullcontext() if self.dtype is None else torch.autocast("cpu", dtype=self.dtype):
            return next_byte_loss(self.model, tokens)

    def attempt(self, number: int, tokens: Tensor) -> tuple[float, bool]:
        """One step of the loop: its loss, and whether the weights were updated."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.setting.share_of_rate(number)
        before = self.updates
        self.optimizer.zero_grad()
        loss = self.loss(tokens)
        self.update(loss)
        return float(loss.detach()), self.updates > before

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self._clip()
        self.optimizer.step()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)

    def told(self, losses: Sequence[float]) -> str:
        """What is to be said of the end of a run with these losses."""
        return ""


class Scaled(Trainer):
    """With torch's GradScaler."""

    def __init__(self, setting: Setting, dtype: torch.dtype | None = None) -> None:
        super().__init__(setting, dtype)
        self.scaler = torch.amp.GradScaler("cpu")

    def update(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def told(self, losses: Sequence[float]) -> str:
        last = losses[-self.setting.patience :]
        lost = sum(not math.isfinite(x) for x in last)
        return f"{lost} of the last {len(last)} losses not finite, loss scale {self.scaler.get_scale():.2g}"


class Half(Scaled):
    """`model.half()`, with FP32 masters of its weights for the optimizer."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._narrow = copy.deepcopy(self.model).half()
        self._pairs = list(zip(self.model.parameters(), self._narrow.parameters(), strict=True))

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self._narrow(tokens[:, :-1]).float()  # the loss itself in FP32, as people have it
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def _hand_over(self) -> None:
        for master, narrow in self._pairs:
            master.grad = None if narrow.grad is None else narrow.grad.float()
            narrow.grad = None

    def update(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self._hand_over()
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for master, narrow in self._pairs:
                narrow.copy_(master)


class Ours(Trainer):
    """Under a policy of autoprec: the same loop as in FP32."""

    def __init__(self, setting: Setting, formats: tuple[str, ...], events: Path) -> None:
        super().__init__(setting)
        autoprec.compile(self.model, policy=policy_of(formats, setting), events=events)
        self.session = autoprec.session(self.model)
        self._kept: list[float] = []

    def attempt(self, number: int, tokens: Tensor) -> tuple[float, bool]:
        loss, _ = super().attempt(number, tokens)
        plan = self.session.plan
        if plan is not None and plan.predicted is not None and plan.predicted_fp32 is not None:
            self._kept.append(plan.predicted.saved_bytes / plan.predicted_fp32.saved_bytes)
        return loss, not self.session.step_was_skipped

    def told(self, losses: Sequence[float]) -> str:
        return f"keeps {self._kept[0]:.2f} → {self._kept[-1]:.2f} of FP32's bytes for backward" if self._kept else ""


def groups_of(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    """The MLPs learn faster than the rest."""
    named = list(model.named_parameters())
    of_mlps = {name for name, _ in named if any(f".{layer}." in name for layer in ("gate", "up", "down"))}
    return [
        {"params": [p for name, p in named if name in of_mlps], "lr": setting.mlp_rate},
        {"params": [p for name, p in named if name not in of_mlps], "lr": setting.rate},
    ]


def policy_of(formats: tuple[str, ...], setting: Setting) -> autoprec.Policy:
    """Keep few bytes for the backward pass, in formats of 16 bits where the noise allows it. (This CPU has no FP16
    arithmetic: a policy for the least time would never choose it.) Windows as short as the run is."""
    return autoprec.Policy(
        name="growth",
        formats=formats,
        objective="bytes",
        storage={"formats": (), "recompute": False},
        monitor={"window_steps": setting.window_steps, "interval_steps": setting.interval_steps},
    )


OURS, OURS_BF16 = "autoprec, fp32 and fp16", "autoprec, with bf16"
FP32, BF16, AUTOCAST, HALF = "fp32", "bf16 autocast", "fp16 autocast", "fp16 weights"

#: Name → (setting, file of events) → the contestant.
CONTESTANTS: dict[str, Callable[[Setting, Path], Trainer]] = {
    FP32: lambda setting, _: Trainer(setting),
    BF16: lambda setting, _: Trainer(setting, torch.bfloat16),
    AUTOCAST: lambda setting, _: Scaled(setting, torch.float16),
    HALF: lambda setting, _: Half(setting),
    OURS: lambda setting, events: Ours(setting, ("fp32", "fp16"), events),
    OURS_BF16: lambda setting, events: Ours(setting, ("fp32", "bf16", "fp16"), events),
}
