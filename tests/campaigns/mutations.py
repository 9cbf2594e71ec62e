"""Valid documents of each kind, and structural mutations of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from tests.campaigns import schemas

RICH_POLICY = {
    "version": 1,
    "name": "everything",
    "description": "each key once",
    "formats": ["fp32", "bf16", "fp16"],
    "objective": "time",
    "budget": "6GiB",
    "optimizer": "adamw",
    "noise": {"gradient": 0.05, "loss": 5e-3},
    "rules": [
        {"match": "*lm_head", "kinds": ["linear"], "floor": "bf16", "optional": True, "why": "logits"},
        {"match": "blocks.*", "kinds": ["linear", "conv2d"], "pin": "fp16"},
        {"match": "*", "floor": "fp8_e4m3"},
    ],
    "storage": {"formats": ["bf16", "fp8_e4m3"]},
    "calibration": {"steps": 4},
    "monitor": {
        "window_steps": 100,
        "interval_steps": 10,
        "saturation_frac": 1e-4,
        "underflow_frac": 0.1,
        "sqnr_drop_db": 3.5,
        "cooldown_windows": 3,
        "takeover_steps": 50,
    },
    "guard": {"nonfinite": "skip", "patience_steps": 20, "loss_spike": "skip", "spike_sigmas": 8.5},
    "schedule": [
        {"after": 0.5, "raise": "blocks.*", "to": "bf16", "roles": ["grad_weight"]},
        {"after": 9000, "raise": "*", "to": "fp32"},
    ],
    "loss_scaling": {"mode": "regional"},
    "scales": "rowwise",
    "uncaptured": "error",
}
_TOTALS = {"seconds": 0.3, "saved_bytes": 1 << 40, "peak_bytes": 7, "loss_sigma": 1e-9, "gradient_ratio": 0.02}
PLAN = {
    "autoprec": "plan",
    "version": 1,
    "budget_bytes": 6 << 30,
    "gap": 1e-17,
    "binding": "the budget",
    "policy": "balanced",
    "graph_fingerprint": "0123456789abcdef",
    "device": "cpu",
    "predicted": _TOTALS,
    "predicted_fp32": dict(_TOTALS, gradient_ratio=0.0),
    "assignments": [
        {"op": f"blocks.{i}:linear#0", "role": role, "format": fmt, "reason": "no: it is 3× faster"}
        for i, fmt in enumerate(schemas.NAMES[:3])
        for role in schemas.ROLES
    ],
    "storages": [
        {
            "tensor": "input:x",
            "format": "fp8_e4m3",
            "reason": "yes",
            "alternatives": [
                {"format": "as_is", "seconds": -1e-6, "saved_bytes": 3072, "peak_bytes": 0, "noise": -0.25},
                {
                    "format": "bf16",
                    "seconds": 0.0,
                    "saved_bytes": 1024,
                    "peak_bytes": 1024,
                    "noise": -0.1,
                    "broken": [{"kind": "peak", "what": "forward of x", "value": 1025.0, "limit": 1024.0}],
                },
            ],
            "dropped": [{"format": "fp16", "why": "no: it overflows, [here]"}],
        },
        {"tensor": "blocks.0:linear#0:0", "format": "as_is", "reason": "null\ntwo lines"},
    ],
    "regions": [{"ops": ["blocks.2:linear#0", "blocks.2:gelu#0"], "scale_log2": -12, "reason": "1e-3"}],
    "saturating": ["mask", "input:mask"],
    "scales": "rowwise",
}
DEVICE = {
    "autoprec": "device",
    "version": 1,
    "name": "cpu AVX2",
    "type": "cpu",
    "native": ["fp32", "bf16"],
    "source": "measured",
    "timings": [
        {
            "timing_key": "linear[8, 8]",
            "role": role,
            "format": fmt,
            "seconds": 1.25e-6,
            "private_saved_bytes": 64,
            "workspace_bytes": 32,
            "backward_workspace_bytes": 16,
            "mixed_workspace_bytes": 24,
            "piece_frac": 0.25,
        }
        for role in schemas.ROLES
        for fmt in ("fp32", "bf16")
    ],
    "casts": [{"source": "fp32", "target": "bf16", "seconds_per_element": 1e-10, "seconds_per_call": 1e-6}],
    "no_kernels": [{"timing_key": "avg_pool3d", "format": "bf16", "reason": "not implemented"}],
}
HEADER = {
    "autoprec": "profile",
    "version": 1,
    "steps": 8,
    "loss_steps": 8,
    "graph": {
        "model": "Net",
        "parameter_bytes": 24,
        "gradient_bytes": 24,
        "optimizer_bytes": 48,
        "input_bytes": 24,
        "ops": [
            {
                "id": "fc:linear#0",
                "kind": "linear",
                "op_class": "gemm",
                "fqn": "fc",
                "inputs": ["input:x", "fc.weight"],
                "outputs": ["fc:linear#0:0"],
                "weights": ["fc.weight"],
                "flops": 96,
                "saves": ["input:x"],
                "timing_key": "linear[2, 3]",
                "calls": 1,
            },
            {
                "id": ":relu#0",
                "kind": "relu",
                "op_class": "pointwise",
                "fqn": "",
                "inputs": ["fc:linear#0:0"],
                "outputs": [":relu#0:0"],
                "private_saved_bytes": 4,
                "pinned": False,
                "checkpoints": [":checkpoint#0"],
            },
        ],
        "tensors": [
            {"id": "input:x", "shape": [2, 3], "dtype": "float32", "kind": "input", "requires_grad": False},
            {"id": "fc.weight", "shape": [2, 3], "dtype": "float32", "kind": "parameter", "requires_grad": True},
            {"id": "fc:linear#0:0", "shape": [2, 2], "dtype": "float32", "kind": "activation", "requires_grad": True},
            {
                "id": ":relu#0:0",
                "shape": [2, 2],
                "dtype": "float32",
                "kind": "activation",
                "requires_grad": True,
                "base": "fc:linear#0:0",
                "is_output": True,
                "is_unused": True,
            },
        ],
    },
    "tensors": [
        {"id": "input:x", "histograms": [{"part": "values", "bins": 2}]},
        {"id": ":relu#0:0", "histograms": [{"part": "values", "bins": 1}, {"part": "gradients", "bins": 1}]},
    ],
    "weights": [{"fqn": "fc.weight", "steps": 8, "samples": 3}],
}
ARRAYS = {
    "bins": np.array([3, 508, 500, 501], np.int16),
    "moments": np.ones((4, 3)),
    "ranges": np.array([[1.5, 0.0, 6.0]] * 3),
    "grad_sum": np.arange(3.0),
    "weights": np.array([[9.0, 0.5]]),
    "loss": np.array([[1.0, 0.6]]),
}


# -- mutations of trees ------------------------------------------------------------------------------------------------

Path_ = tuple[str | int, ...]


def places(tree: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Paths of all values, the root's last."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))
    yield at


def value_at(tree: Any, at: Path_) -> Any:
    for part in at:
        tree = tree[part]
    return tree


def typo(word: str, chance: Random) -> str:
    """One letter left out, doubled, swapped with the next, replaced, or its case changed."""
    i = chance.randrange(max(1, len(word)))
    head, letter, tail = word[:i], word[i : i + 1], word[i + 1 :]
    return chance.choice(
        [head + tail, head + 2 * letter + tail, head + tail[:1] + letter + tail[1:], head + "q" + tail, word.swapcase()]
    )


def other_value(value: Any, chance: Random) -> Any:
    """A value of another type, range or spelling."""
    if isinstance(value, str) and chance.random() < 0.6:
        return chance.choice([typo(value, chance), "", value + " ", "x" * 300, "ü", "no", "1e-3", "~", "null"])
    if isinstance(value, bool) and chance.random() < 0.5:
        return chance.choice([0, 1, "true", "yes", None])
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.7:
        extreme = [0, -1, -value, value + 0.5, float(value), value * 10**30, 2**63, -(2**70), 10**90, 1e-320]
        return chance.choice([*extreme, math.nan, math.inf, -math.inf, 1e308, str(value), True, 2, 127])
    return chance.choice(
        [None, True, False, 0, 1, -1, 2.5, "", "fp8_e5m2", "fp64", [], {}, [1], [None], {"a": 1}, [["bf16"]], "60%"]
    )


def mutate(tree: Any, chance: Random) -> Any:
    """The tree after one change of a key, a value, or the order or number of things."""
    tree = copy.deepcopy(tree)
    at = chance.choice(list(places(tree)))
    if not at:
        return chance.choice([None, [], {}, "text", 3, [tree], {"policy": tree}])
    holder, key = value_at(tree, at[:-1]), at[-1]
    change = chance.randrange(10)
    if change <= 3:
        holder[key] = other_value(holder[key], chance)
    elif change == 4:
        del holder[key]
    elif change == 5 and isinstance(holder, dict):
        renamed = chance.choice([typo(str(key), chance), "extra", f"{key} ", "version_", "x" * 100])
        pairs = [(renamed if k == key else k, v) for k, v in holder.items()]
        holder.clear()
        holder.update(pairs)
    elif change == 6 and isinstance(holder, dict):
        holder[chance.choice(["extra", typo(str(key), chance), "x" * 80])] = copy.deepcopy(holder[key])
    elif change in (5, 6, 7) and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif change == 8:
        other = chance.choice([p for p in places(tree) if p])
        if other[: len(at)] != at and at[: len(other)] != other:
            there = value_at(tree, other[:-1])
            holder[key], there[other[-1]] = there[other[-1]], holder[key]
    else:  # an order that means nothing, or does
        items = list(holder.items()) if isinstance(holder, dict) else holder
        chance.shuffle(items)
        if isinstance(holder, dict):
            ordered = dict(items)
            holder.clear()
            holder.update(ordered)
    return tree
