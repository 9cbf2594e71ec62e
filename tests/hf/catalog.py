"""Small, randomly initialised models of architectures that people train, from transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "Architecture", "Batch"]

Batch = dict[str, Tensor]

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS = 64, 16, 64, 3, 4


@dataclass(frozen=True)
class Architecture:
    """One row: how to make the model and a batch of random data, and what to do with it after training."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    after: Callable[[nn.Module, Batch], Any]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's own loss."""
        found = model(**batch).loss
        assert isinstance(found, Tensor)
        return found


def tokens(seed: int, rows: int = 8, length: int = LENGTH) -> Tensor:
    """Tokens with something to learn: each is likely to follow its predecessor by one."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(4, VOCABULARY, (rows, 1), generator=generator)
    jump = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    keep = torch.rand(rows, length, generator=generator) < 0.9
    counted = 4 + (start + torch.arange(length)) % (VOCABULARY - 4)
    return torch.where(keep, counted, jump)


def pixels(seed: int, size: int = 32, rows: int = 8) -> Batch:
    """Images whose class is their brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    noise = torch.randn(rows, 3, size, size, generator=generator)
    return {"pixel_values": noise + labels[:, None, None, None].float(), "labels": labels}


def many_pixels(seed: int) -> Batch:
    """For convolutions: torch's kernel for depthwise weight gradients takes 3 MB whatever the batch, which at eight
    images would be most of the step's peak. With batch norm over eight images FP32 is not within 2 % of itself
    (`python -m tests.hf.perturbed`)."""
    return pixels(seed, rows=32)


def causal(seed: int) -> Batch:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids}


def masked(seed: int) -> Batch:
    """Masked language modelling, with padding at the end of some rows."""
    ids = tokens(seed)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.3
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    labels = torch.where(hidden & (mask == 1), ids, -100)
    return {"input_ids": torch.where(hidden, 3, ids), "attention_mask": mask, "labels": labels}


def translation(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed).flip(1)}


def speech(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = tokens(seed, length=12)
    return {"input_features": torch.randn(8, 16, 64, generator=generator), "labels": ids}


def generates(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "input_features")}
    found = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert found.shape[1] >= 4
    return found


def evaluates(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


T = transformers
GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**SIZES, "num_key_value_heads": 2}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
    "image_size": 32, "patch_size": 8, "num_labels": 4,
}  # fmt: skip


def decoder(name: str, config: Callable[[], Any], model: Any) -> Architecture:
    return Architecture(name, lambda: model(config()), causal, generates)


def encoder(name: str, config: Callable[[], Any], model: Any) -> Architecture:
    return Architecture(name, lambda: model(config()), masked, evaluates)


def vision(name: str, config: Callable[[], Any], model: Any, batch: Callable[[int], Batch] = pixels) -> Architecture:
    return Architecture(name, lambda: model(config()), batch, evaluates)


ARCHITECTURES: tuple[Architecture, ...] = (
    decoder("Llama", lambda: T.LlamaConfig(**LLAMA), T.LlamaForCausalLM),
    decoder("Mistral", lambda: T.MistralConfig(**LLAMA), T.MistralForCausalLM),
    decoder("Qwen3", lambda: T.Qwen3Config(**LLAMA, head_dim=16), T.Qwen3ForCausalLM),
    decoder("Gemma2", lambda: T.Gemma2Config(**LLAMA, head_dim=16, query_pre_attn_scalar=16), T.Gemma2ForCausalLM),
    decoder("Phi3", lambda: T.Phi3Config(**LLAMA), T.Phi3ForCausalLM),
    decoder("GPT-2", lambda: T.GPT2Config(**GPT), T.GPT2LMHeadModel),
    decoder("GPT-NeoX", lambda: T.GPTNeoXConfig(**SIZES), T.GPTNeoXForCausalLM),
    decoder(
        "OPT",
        lambda: T.OPTConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_hidden_layers=LAYERS,
                            num_attention_heads=HEADS, max_position_embeddings=64, word_embed_proj_dim=WIDTH,
                            pad_token_id=0, bos_token_id=1, eos_token_id=2),
        T.OPTForCausalLM,
    ),
    decoder(
        "Bloom",
        lambda: T.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, pad_token_id=0),
        T.BloomForCausalLM,
    ),
    decoder(
        "Mixtral",
        lambda: T.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
        T.MixtralForCausalLM,
    ),
    decoder(
        "Mamba",
        # Its class asks whether it is being compiled and then computes its scan in another way.
        lambda: T.MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8,
                              pad_token_id=0, bos_token_id=1, eos_token_id=2, use_associative_scan=False),
        T.MambaForCausalLM,
    ),
    encoder("BERT", lambda: T.BertConfig(**SIZES), T.BertForMaskedLM),
    encoder(
        "ModernBERT",
        lambda: T.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2,
                                   local_attention=16),
        T.ModernBertForMaskedLM,
    ),
    encoder(
        "DeBERTa-v2",
        lambda: T.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16),
        T.DebertaV2ForMaskedLM,
    ),
    Architecture(
        "T5",
        lambda: T.T5ForConditionalGeneration(
            T.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=4 * WIDTH, num_layers=LAYERS,
                       num_heads=HEADS, decoder_start_token_id=0)
        ),
        translation,
        generates,
    ),
    Architecture(
        "BART",
        lambda: T.BartForConditionalGeneration(
            T.BartConfig(**ENCODER_DECODER, max_position_embeddings=64, forced_eos_token_id=2)
        ),
        translation,
        generates,
    ),
    vision("ViT", lambda: T.ViTConfig(**VISION), T.ViTForImageClassification),
    vision(
        "ConvNeXt",
        lambda: T.ConvNextConfig(num_stages=3, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], patch_size=2,
                                 num_labels=4, image_size=32),
        T.ConvNextForImageClassification,
        many_pixels,
    ),
    vision(
        "Swin",
        lambda: T.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                             window_size=4, num_labels=4),
        T.SwinForImageClassification,
    ),
    vision(
        "ResNet",
        lambda: T.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], layer_type="basic",
                               num_labels=4),
        T.ResNetForImageClassification,
        many_pixels,
    ),
    Architecture(
        "Whisper",
        lambda: T.WhisperForConditionalGeneration(
            T.WhisperConfig(**ENCODER_DECODER, num_mel_bins=16, max_source_positions=32, max_target_positions=32,
                            suppress_tokens=None, begin_suppress_tokens=None)
        ),
        speech,
        generates,
    ),
)  # fmt: skip
