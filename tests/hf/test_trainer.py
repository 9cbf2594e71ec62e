"""A model that `transformers.Trainer` trains, with the callback of docs/running.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import autoprec
import autoprec.serial
from autoprec.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "running.md"


def save_session(resume: str | None = None) -> TrainerCallback:
    """As the document has it."""
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"autoprec": autoprec}
    exec(next(block for block in blocks if "TrainerCallback" in block), names)
    made: TrainerCallback = names["SaveSession"](resume)
    return made


def trainer(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (32,), generator=generator) for _ in range(64)]
    policy = autoprec.serial.load_policy("memory").replaced(calibration={"steps": 3})
    autoprec.compile(model, policy=policy, events=None)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=12, save_steps=6, learning_rate=1e-3,
        report_to=[], use_cpu=True, disable_tqdm=True, **changes,
    )  # fmt: skip
    data = [{"input_ids": t, "labels": t} for t in tokens]
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))


def test_it_trains_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With accumulation, clipping, dropout, fused AdamW, a schedule, and a checkpoint behind the first plan."""
    whole = trainer(tmp_path / "whole", save_session(), gradient_accumulation_steps=2)
    whole.train()
    session = autoprec.session(whole.model)
    assert session.steps == 12 and session.skipped_steps == 0 and session.plan is not None
    assert session.executed_formats().keys() >= {a.op for a in session.plan.assignments}
    checkpoint = str(tmp_path / "whole" / "checkpoint-6")
    later = trainer(tmp_path / "later", save_session(checkpoint), gradient_accumulation_steps=2)
    later.train(resume_from_checkpoint=checkpoint)
    assert autoprec.session(later.model).steps == 12
    for (name, p), q in zip(whole.model.named_parameters(), later.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_autocast_of_the_trainers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"inside torch\.autocast"):
        trainer(tmp_path, bf16=True).train()
