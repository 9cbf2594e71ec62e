"""Every architecture of the catalog at the size of a test: captured whole, bitwise, some of them planned by one line.

`python -m tests.hf.architectures` prints the whole table, with the one line, BF16 and 60 % plans of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

import torch

from tests.hf import architectures
from tests.hf.catalog import ARCHITECTURES, Architecture

#: A decoder, one with addmm, experts, and one that reads images.
PLANNED = {"Llama", "GPT-2", "Mixtral", "ResNet"}


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    threads = torch.get_num_threads()
    architectures.quietly()
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_architecture(architecture: Architecture, capsys: pytest.CaptureFixture[str]) -> None:
    row = architectures.measure(architecture, steps=10, one_line=architecture.name in PLANNED, whole=False)
    with capsys.disabled():
        print(f"\n  {architectures.line(row)}", end="")
    assert row.broken() == []
