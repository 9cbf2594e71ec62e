"""Models of plain torch as people write them: each trains as it is, under the identity plan, and by one added line."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import autoprec
from tests.test_plain_torch import (
    Loop,
    Prepare,
    Run,
    one_line_trains_as_fp32,
    regression,
    same_bits_under_the_identity,
    teacher,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Body(nn.Module):
    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


# Architectures -----------------------------------------------------------------------------------------------------


def stacked_lstm_that_carries_its_state(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor, state: Any) -> Any:
        y, state = m.lstm(x, state)
        return m.head(y), tuple(s.detach() for s in state)

    lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.1, bidirectional=True)
    model = prepare(Body(body, lstm=lstm, head=nn.Linear(32, 1)))
    state = None

    def loss(m: nn.Module, i: int) -> Tensor:
        nonlocal state
        x = torch.randn(5, 6, 8)
        y, state = m(x, state)
        return F.mse_loss(y, teacher(x))

    return train(model, loss, steps)


def gru_and_cell(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor) -> Tensor:
        y, last = m.gru(x)
        state = last[-1]
        for t in range(3):
            state = m.cell(y[:, t], state)
        return m.head(state)

    gru = nn.GRU(8, 16, num_layers=2, batch_first=True)
    model = prepare(Body(body, gru=gru, cell=nn.GRUCell(16, 16), head=nn.Linear(16, 1)))
    x = torch.randn(8, 7, 8)
    return train(model, lambda m, i: F.mse_loss(m(x + 0.1 * torch.randn(8, 7, 8)), x[:, 0, :1]), steps)


def encoder_and_decoder(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padded = source == 0
        y = m.transformer(m.embed(source), m.embed(target), tgt_mask=causal, tgt_is_causal=True,
                          src_key_padding_mask=padded, memory_key_padding_mask=padded)  # fmt: skip
        return m.head(y)

    transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
    model = prepare(Body(body, embed=nn.Embedding(20, 16), transformer=transformer, head=nn.Linear(16, 20)))

    def loss(m: nn.Module, i: int) -> Tensor:
        source, target = torch.randint(1, 20, (4, 6)), torch.randint(1, 20, (4, 7))
        source[:2, 4:] = 0
        return F.cross_entropy(m(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    return train(model, loss, steps)


def attention_to_oneself_and_to_others(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor, other: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        x = x + m.own(x, x, x, attn_mask=mask, need_weights=False)[0]
        y, weights = m.cross(x, other, other)
        return m.head(y) + weights.amax(-1, keepdim=True)

    own = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
    model = prepare(Body(body, own=own, cross=cross, head=nn.Linear(8, 1)))

    def loss(m: nn.Module, i: int) -> Tensor:
        x = torch.randn(4, 5, 8)
        return F.mse_loss(m(x, torch.randn(4, 3, 6)), teacher(x))

    return train(model, loss, steps)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = self.block(1, 8), self.block(8, 16)
        self.middle = self.block(16, 16)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join1, self.join2 = self.block(32, 16), self.block(16, 8)
        self.leave = nn.Conv2d(8, 1, 1)

    def block(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.down(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        b = self.join1(torch.cat([self.up1(c), b], 1))
        return self.leave(self.join2(torch.cat((self.up2(b), a), dim=1)))


def unet(prepare: Prepare, steps: int) -> Run:
    def loss(m: nn.Module, i: int) -> Tensor:
        x = torch.randn(4, 1, 16, 16)
        return F.mse_loss(m(x), torch.tanh(x))

    return train(prepare(UNet()), loss, steps)


def one_layer_at_two_places(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor) -> Tensor:
        h = F.gelu(m.inner(m.enter(x)))
        return m.leave(m.inner(m.norm(h)) + m.norm(m.inner(h)))

    model = Body(body, enter=nn.Linear(8, 16), inner=nn.Linear(16, 16), norm=nn.LayerNorm(16), leave=nn.Linear(16, 1))
    return train(prepare(model), regression, steps)


def one_block_in_two_parents(prepare: Prepare, steps: int) -> Run:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    left, right = nn.Sequential(nn.Linear(8, 8), block), nn.Sequential(block, nn.Linear(8, 8))
    model = Body(lambda m, x: m.head(m.left(x) * m.right(x)), left=left, right=right, head=nn.Linear(8, 1))
    return train(prepare(model), regression, steps)


# Code that Dynamo does not like ------------------------------------------------------------------------------------


def prints_and_items(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        print("mean", h.mean())
        m.seen = h.abs().max().item()
        h = m.norm(m.b(h) / max(m.seen, 1.0))
        return m.c(h)

    parts = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 16), "norm": nn.BatchNorm1d(16), "c": nn.Linear(16, 1)}
    with contextlib.redirect_stdout(None):
        return train(prepare(Body(body, **parts)), regression, steps)


def branching() -> nn.Module:
    def body(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h = m.up(h) if x.sum() > 0 else m.down(h)
        return m.c(torch.tanh(h))

    parts = {"a": nn.Linear(8, 16), "up": nn.Linear(16, 16), "down": nn.Linear(16, 16), "c": nn.Linear(16, 1)}
    return Body(body, **parts)


def one_side_and_the_other(m: nn.Module, i: int) -> Tensor:
    x = torch.randn(16, 8).abs() * (-1 if i % 2 else 1)
    return F.mse_loss(m(x), teacher(x))


def branches_on_values(prepare: Prepare, steps: int) -> Run:
    return train(prepare(branching()), one_side_and_the_other, steps)


def loops_as_often_as_a_tensor_says(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor, count: Tensor) -> Tensor:
        h = m.a(x)
        for _ in range(int(count)):
            h = h + torch.tanh(m.b(h))
        return m.c(h)

    model = prepare(Body(body, a=nn.Linear(8, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 1)))

    def loss(m: nn.Module, i: int) -> Tensor:
        x = torch.randn(16, 8)
        return F.mse_loss(m(x, torch.tensor(i % 3)), teacher(x))

    return train(model, loss, steps)


def every_batch_has_its_own_shape(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = m.norm(m.embed(tokens) + m.place(torch.arange(length)))
        q, k, v = m.qkv(x).view(len(tokens), length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.head(a.transpose(1, 2).reshape(len(tokens), length, 16))

    parts = {"embed": nn.Embedding(20, 16), "place": nn.Embedding(32, 16), "norm": nn.LayerNorm(16)}
    model = prepare(Body(body, qkv=nn.Linear(16, 48), head=nn.Linear(16, 20), **parts))

    def loss(m: nn.Module, i: int) -> Tensor:
        rows = 1 if i % 4 == 3 else 5 + i % 2
        tokens = torch.randint(0, 20, (rows, 6 + 3 * (i % 5)))
        return F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train(model, loss, steps)


# Activation checkpoints --------------------------------------------------------------------------------------------


def checkpoints(prepare: Prepare, steps: int, *, use_reentrant: bool) -> Run:
    def body(m: Any, x: Tensor) -> Tensor:
        h = checkpoint(m.first, m.enter(x), use_reentrant=use_reentrant)
        return m.leave(checkpoint(m.second, h, use_reentrant=use_reentrant))

    first = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    second = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1))
    model = Body(body, enter=nn.Linear(8, 16), first=first, second=second, leave=nn.Linear(16, 1))
    return train(prepare(model), regression, steps)


def reentrant_checkpoints(prepare: Prepare, steps: int) -> Run:
    return checkpoints(prepare, steps, use_reentrant=True)


def checkpoints_without_reentry(prepare: Prepare, steps: int) -> Run:
    return checkpoints(prepare, steps, use_reentrant=False)


def checkpoints_in_sequence(prepare: Prepare, steps: int) -> Run:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.leave(checkpoint_sequential(m.layers, 2, m.enter(x), use_reentrant=False))

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    return train(prepare(Body(body, enter=nn.Linear(8, 16), layers=layers, leave=nn.Linear(16, 1))), regression, steps)


# Adapters ----------------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=64, max_position_embeddings=32, **shape)
    return transformers.LlamaForCausalLM(config)


def with_adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets))


def adapters(prepare: Prepare, steps: int) -> Run:
    model = prepare(with_adapters(language_model()))
    tokens = torch.randint(0, 64, (2, 12))
    return train(model, lambda m, i: m(input_ids=tokens, labels=tokens).loss, steps)


LOOPS: dict[Loop, list[str]] = {
    stacked_lstm_that_carries_its_state: [],
    gru_and_cell: [],
    encoder_and_decoder: [],
    attention_to_oneself_and_to_others: [],
    unet: [],
    one_layer_at_two_places: [],
    one_block_in_two_parents: [],
    prints_and_items: [],
    branches_on_values: [],
    loops_as_often_as_a_tensor_says: [],
    every_batch_has_its_own_shape: [],
    reentrant_checkpoints: [],
    checkpoints_without_reentry: [],
    checkpoints_in_sequence: ["graph_break"],  # Dynamo does not enter this function of torch.utils
    adapters: [],
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_the_identity_is_bitwise(loop: Loop) -> None:
    same_bits_under_the_identity(loop, LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_one_line_trains_as_fp32_does(loop: Loop) -> None:
    one_line_trains_as_fp32(loop, LOOPS[loop])


@pytest.mark.parametrize("first", [0, 1])
def test_a_plan_fits_the_model_whichever_branch_comes_first(first: int) -> None:
    model = branching()
    other = copy.deepcopy(model)
    autoprec.compile(model, policy="bf16", batches=range(8), loss_fn=one_side_and_the_other, events=None)
    plan = autoprec.session(model).plan
    autoprec.compile(other, plan=plan, events=None)
    train(other, one_side_and_the_other, 4, first=first)
    assert autoprec.session(other).steps == 4


def test_adapters_train_alone_and_are_saved_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel

    base = language_model().eval()
    model = autoprec.compile(with_adapters(copy.deepcopy(base)), policy="bf16", events=None)
    tokens = torch.randint(0, 64, (2, 12))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, lambda m, i: m(input_ids=tokens, labels=tokens).loss, 10)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in before if "lora_" in k}
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    autoprec.unwrap(model).eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert torch.equal(PeftModel.from_pretrained(base, tmp_path)(input_ids=tokens).logits, expected)
        torch.testing.assert_close(model.merge_and_unload()(input_ids=tokens).logits, expected)


def test_adapters_put_in_after_compile_are_refused() -> None:
    model = autoprec.compile(language_model(), policy="bf16", events=None)
    tokens = torch.randint(0, 64, (2, 12))
    with pytest.raises(autoprec.NotCapturedError, match="lora_A.*compile it again"):
        with_adapters(model)(input_ids=tokens, labels=tokens)


def test_packed_sequences_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
        return m.head(pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0])

    model = Body(body, lstm=nn.LSTM(8, 16, batch_first=True), head=nn.Linear(16, 1))
    autoprec.compile(model, policy="bf16", events=None)
    with pytest.raises(autoprec.NotCapturedError, match=r"modules: lstm\).*a packed sequence"):
        train(model, lambda m, i: m(torch.randn(3, 5, 8)).square().mean(), 2)
