"""What policies, plans, devices, datasheets and profile headers may hold, said a second time: JSON schemas, and the
laws between values that a schema cannot say. Written from docs and docstrings, not from the readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from tests.campaigns import budget_texts

Path = tuple[str | int, ...]

#: Built in, and those that may be described: 2 to 6 exponent bits, at least one of mantissa, 3 to 8 in all; integers.
NAMES = ["fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3"]
OWN = [
    f"fp{1 + e + m}_e{e}m{m}{suffix}"
    for e in range(2, 7)
    for m in range(1, 8 - e)
    for suffix in ("", "fn")
    if f"fp{1 + e + m}_e{e}m{m}{suffix}" not in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fn")
]
FORMATS = [*NAMES, *OWN, *(f"int{bits}" for bits in range(2, 9))]
COMPUTE = FORMATS
STORAGES = [f for f in FORMATS if f not in ("fp32", "tf32", "fp16")]
ROLES = ["output", "grad_input", "grad_weight"]
TEXT = {"type": "string"}
SOME_TEXT = {"type": "string", "minLength": 1}
MAYBE_TEXT = {"type": ["string", "null"]}
COUNT = {"type": "integer", "minimum": 0}
AMOUNT = {"type": "number", "minimum": 0, "exclusiveMaximum": math.inf}
FRACTION = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
TEXTS = {"type": "array", "items": TEXT}


def one_of(names: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def mapping(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """Null as well; the keywords of a schema are about other types than null."""
    return schema | {"type": [schema["type"], "null"]}


POLICY = mapping(
    {"name": SOME_TEXT, "formats": items(one_of(COMPUTE))},
    version={"type": "integer", "enum": [1]},
    description=TEXT,
    objective=one_of(["time", "bytes", "peak"]),
    budget={"type": ["string", "integer", "null"]},
    optimizer=one_of(["auto", "none", "sgd", "sgd_momentum", "rmsprop", "adam", "adamw"]),
    noise=mapping(
        {},
        gradient={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": math.inf},
        loss={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": math.inf},
    ),
    rules=items(
        mapping(
            {},
            match=TEXT,
            kinds=TEXTS,
            roles=items(one_of(ROLES)),
            pin=maybe(one_of([*COMPUTE, None])),  # type: ignore[list-item]
            floor=maybe(one_of([*FORMATS, None])),  # type: ignore[list-item]
            ceiling=maybe(one_of([*FORMATS, None])),  # type: ignore[list-item]
            optional={"type": "boolean"},
            why=TEXT,
        )
    ),
    storage=mapping({}, formats=items(one_of(STORAGES)), recompute={"type": "boolean"}, frozen=items(one_of(STORAGES))),
    calibration=mapping({}, steps={"type": "integer", "minimum": 2, "maximum": 1_000_000}),
    monitor=mapping(
        {},
        window_steps={"type": "integer", "minimum": 1},
        interval_steps={"type": "integer", "minimum": 1},
        saturation_frac={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        underflow_frac={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        sqnr_drop_db={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": math.inf},
        cooldown_windows={"type": "integer", "minimum": 1},
        takeover_steps={"type": "integer", "minimum": 0},
    ),
    guard=mapping(
        {},
        nonfinite=one_of(["skip", "raise"]),
        patience_steps={"type": "integer", "minimum": 1},
        loss_spike=one_of(["report", "skip"]),
        spike_sigmas={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": math.inf},
    ),
    schedule=items(
        mapping(
            {
                "after": {
                    "anyOf": [
                        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                        {"type": "number", "multipleOf": 1, "minimum": 1, "maximum": 2**53},
                    ]
                },
                "raise": SOME_TEXT,
                "to": one_of(COMPUTE),
            },
            roles=items(one_of(ROLES)),
        )
    ),
    loss_scaling=mapping(
        {},
        mode=one_of(["regional", "global", "none"]),
        init={"anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": math.inf}, {"const": "auto"}]},
        growth={"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": math.inf},
        backoff={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        interval_steps={"type": "integer", "minimum": 1},
    ),
    scales=one_of(["tensorwise", "rowwise"]),
    uncaptured=one_of(["error", "report"]),
)

TOTALS = mapping(
    {
        "seconds": AMOUNT,
        "saved_bytes": COUNT,
        "peak_bytes": COUNT,
        "loss_sigma": AMOUNT,
        "gradient_ratio": {"type": "number", "minimum": 0},
    }
)
ENVELOPE = {"version": {"type": "integer", "enum": [1]}}

NUMBER = {"type": "number"}
FINITE = {"type": "number", "exclusiveMinimum": -math.inf, "exclusiveMaximum": math.inf}
ANY_FORMAT = one_of([*COMPUTE, "as_is", "recomputed"])
BROKEN = mapping(
    {"kind": one_of(["peak", "loss", "gradient", "tie"]), "what": TEXT, "value": NUMBER, "limit": NUMBER},
)
OTHERS = {
    "alternatives": maybe(
        items(
            mapping(
                {
                    "format": ANY_FORMAT,
                    "seconds": FINITE,
                    "saved_bytes": {"type": "integer"},
                    "peak_bytes": {"type": "integer"},
                    "noise": FINITE,
                },
                broken=items(BROKEN),
            )
        )
    ),
    "dropped": items(mapping({"format": ANY_FORMAT, "why": TEXT})),
}

PLAN = mapping(
    {
        "autoprec": one_of(["plan"]),
        **ENVELOPE,
        "assignments": items(
            mapping({"op": SOME_TEXT, "role": one_of(ROLES), "format": one_of(COMPUTE), "reason": TEXT}, **OTHERS)
        ),
    },
    storages=items(
        mapping(
            {"tensor": SOME_TEXT, "format": one_of(["as_is", "recomputed", *STORAGES]), "reason": TEXT},
            made_from=TEXTS,
            **OTHERS,
        )
    ),
    regions=items(
        mapping(
            {
                "ops": TEXTS | {"minItems": 1},
                "scale_log2": {"type": "integer", "minimum": -126, "maximum": 126},
                "reason": TEXT,
            }
        )
    ),
    saturating=TEXTS,
    scales=one_of(["tensorwise", "rowwise"]),
    predicted=maybe(TOTALS),
    predicted_fp32=maybe(TOTALS),
    budget_bytes={"type": ["integer", "null"], "minimum": 1},
    gap=AMOUNT,
    binding=TEXT,
    policy=TEXT,
    graph_fingerprint=TEXT,
    device=TEXT,
)

DEVICE = mapping(
    {
        "autoprec": one_of(["device"]),
        **ENVELOPE,
        "name": SOME_TEXT,
        "type": one_of(["cpu", "cuda"]),
        "native": items(one_of(FORMATS)),
    },
    timings=items(
        mapping(
            {"timing_key": TEXT, "role": one_of(ROLES), "format": one_of(FORMATS), "seconds": AMOUNT},
            private_saved_bytes=maybe(COUNT),
            workspace_bytes=maybe(COUNT),
            backward_workspace_bytes=maybe(COUNT),
            mixed_workspace_bytes=maybe(COUNT),
            piece_frac=maybe(FRACTION),
            forward_seconds=maybe(AMOUNT),
        )
    ),
    casts=items(
        mapping(
            {"source": one_of(FORMATS), "target": one_of(FORMATS), "seconds_per_element": AMOUNT},
            seconds_per_call=AMOUNT,
        )
    ),
    no_kernels=items(mapping({"timing_key": TEXT, "format": one_of(FORMATS), "reason": TEXT})),
    source=one_of(["measured", "modelled"]),
    fp32_products=TEXT,
    fused_casts={"type": "boolean"},
)

AT_LEAST_ONE = {"type": "number", "minimum": 1, "exclusiveMaximum": math.inf}


def sourced(value: dict[str, Any]) -> dict[str, Any]:
    return mapping({"value": value, "source": SOME_TEXT})


DATASHEET = mapping(
    {
        "autoprec": one_of(["datasheet"]),
        **ENVELOPE,
        "name": SOME_TEXT,
        "type": one_of(["cpu", "cuda"]),
        "peak_flops_per_second": items(
            mapping({"format": one_of(COMPUTE), "value": AT_LEAST_ONE, "source": SOME_TEXT})
        ),
        "memory_bytes_per_second": sourced(AT_LEAST_ONE),
        "launch_seconds": sourced(AMOUNT),
        "attainable_compute_frac": sourced(FRACTION),
        "attainable_bandwidth_frac": sourced(FRACTION),
    },
    memory_bytes=maybe(sourced(AT_LEAST_ONE)),
)

CLASSES = ["gemm", "pointwise", "norm", "view", "wide", "unknown"]
PARTS = ["values", "loss", "gradients", "input_weight_grad", "gradient_weight_grad"]
HEADER = mapping(
    {
        "autoprec": one_of(["profile"]),
        **ENVELOPE,
        "graph": mapping(
            {
                "model": TEXT,
                "ops": items(
                    mapping(
                        {
                            "id": TEXT,
                            "kind": TEXT,
                            "op_class": one_of(CLASSES),
                            "fqn": TEXT,
                            "inputs": TEXTS,
                            "outputs": TEXTS,
                        },
                        weights=TEXTS,
                        flops=COUNT,
                        saves=TEXTS,
                        private_saved_bytes=COUNT,
                        pinned={"type": "boolean"},
                        timing_key=TEXT,
                        calls={"type": "integer", "minimum": 1},
                        checkpoints=TEXTS,
                    )
                ),
                "tensors": items(
                    mapping(
                        {
                            "id": TEXT,
                            "shape": items(COUNT),
                            "dtype": TEXT,
                            "kind": one_of(["input", "parameter", "buffer", "activation"]),
                            "requires_grad": {"type": "boolean"},
                        },
                        base=MAYBE_TEXT,
                        is_output={"type": "boolean"},
                        is_unused={"type": "boolean"},
                    )
                ),
            },
            parameter_bytes=COUNT,
            gradient_bytes=COUNT,
            optimizer_bytes=COUNT,
            input_bytes=COUNT,
            loss_bytes=COUNT,
            first_ops=TEXTS,
            compiled={"type": "boolean"},
        ),
        "steps": COUNT,
        "tensors": items(mapping({"id": TEXT, "histograms": items(mapping({"part": one_of(PARTS), "bins": COUNT}))})),
        "weights": items(mapping({"fqn": TEXT, "steps": COUNT, "samples": COUNT})),
    },
    loss_steps=maybe(COUNT),
)

SCHEMAS = {"policy": POLICY, "plan": PLAN, "device": DEVICE, "datasheet": DATASHEET, "profile": HEADER}

# Strict types: 1.0 is no whole number, true is no number, nan is none either. Tuples do not occur.
_CHECKER = Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        "integer": lambda _, v: type(v) is int,
        "number": lambda _, v: type(v) is int or (type(v) is float and not math.isnan(v)),
    }
)
_STRICT = extend(Draft202012Validator, type_checker=_CHECKER)
_VALIDATORS = {kind: _STRICT(schema) for kind, schema in SCHEMAS.items()}


def faults(kind: str, tree: Any) -> list[tuple[Path, bool]]:
    """Every place where a tree is not valid, and whether the key is meant and not its value; none if it is valid."""
    found: list[tuple[Path, bool]] = []
    for error in _VALIDATORS[kind].iter_errors(tree):
        at = tuple(error.absolute_path)
        if error.validator == "additionalProperties":
            found += [((*at, key), True) for key in error.instance if key not in error.schema["properties"]]
        else:
            found.append((at, False))
    return found + [(at, False) for at in _LAWS[kind](tree)]


# -- laws between values; where a tree does not even keep the schema they look at what there is ----------------------


def _value(tree: Any, *at: str) -> Any:
    for part in at:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _list(tree: Any, *at: str) -> list[Any]:
    found = _value(tree, *at)
    return found if isinstance(found, list) else []


def _twice(values: Sequence[Any], *at: str | int) -> Iterator[Path]:
    yield from ((*at, i) for i, v in enumerate(values) if v in values[:i])


def _bits(name: str) -> int:
    """The first number of a format's name; TF32 has 19."""
    return 19 if name == "tf32" else int("".join(c if c.isdigit() else " " for c in name).split()[0])


def _policy(tree: Any) -> Iterator[Path]:
    formats = _list(tree, "formats")
    yield from _twice(formats, "formats")
    if "fp32" not in formats:
        yield ("formats",)
    yield from _twice(_list(tree, "storage", "formats"), "storage", "formats")
    yield from _twice(_list(tree, "storage", "frozen"), "storage", "frozen")
    for i, rule in enumerate(_list(tree, "rules")):
        pin, floor, ceiling = (_value(rule, key) for key in ("pin", "floor", "ceiling"))
        if (pin is None) == (floor is None and ceiling is None):
            yield ("rules", i)
        elif floor in FORMATS and ceiling in FORMATS and _bits(floor) > _bits(ceiling):
            yield ("rules", i, "ceiling")
        if pin is not None and pin not in formats:
            yield ("rules", i, "pin")
    given = _value(tree, "monitor")
    monitor = {"window_steps": 500, "interval_steps": 50} | (given if isinstance(given, dict) else {})
    if all(type(n) is int for n in list(monitor.values())[:2]) and monitor["interval_steps"] > monitor["window_steps"]:
        yield ("monitor", "interval_steps") if "interval_steps" in given else ("monitor", "window_steps")
    if not budget_texts.valid(_value(tree, "budget")):
        yield ("budget",)


def _plan(tree: Any) -> Iterator[Path]:
    pairs = [(_value(a, "op"), _value(a, "role")) for a in _list(tree, "assignments")]
    yield from _twice(pairs, "assignments")
    yield from _twice([_value(s, "tensor") for s in _list(tree, "storages")], "storages")
    for i, s in enumerate(_list(tree, "storages")):
        yield from _twice(_list(s, "made_from"), "storages", i, "made_from")
        if bool(_value(s, "made_from")) != (_value(s, "format") == "recomputed"):
            yield ("storages", i, "made_from")
    yield from _twice(_list(tree, "saturating"), "saturating")
    for i, region in enumerate(_list(tree, "regions")):
        yield from _twice(_list(region, "ops"), "regions", i, "ops")


def _device(tree: Any) -> Iterator[Path]:
    yield from _twice(_list(tree, "native"), "native")
    timings = [[_value(t, k) for k in ("timing_key", "role", "format")] for t in _list(tree, "timings")]
    yield from _twice(timings, "timings")
    yield from _twice([[_value(c, "source"), _value(c, "target")] for c in _list(tree, "casts")], "casts")
    lacking = [[_value(k, "timing_key"), _value(k, "format")] for k in _list(tree, "no_kernels")]
    yield from _twice(lacking, "no_kernels")


def _datasheet(tree: Any) -> Iterator[Path]:
    formats = [_value(peak, "format") for peak in _list(tree, "peak_flops_per_second")]
    yield from _twice(formats, "peak_flops_per_second")
    if "fp32" not in formats:
        yield ("peak_flops_per_second",)


def _header(tree: Any) -> Iterator[Path]:
    tensors = _list(tree, "graph", "tensors")
    known = [_value(t, "id") for t in tensors]
    yield from _twice([_value(op, "id") for op in _list(tree, "graph", "ops")], "graph", "ops")
    yield from _twice(known, "graph", "tensors")
    for i, op in enumerate(_list(tree, "graph", "ops")):
        for part in ("inputs", "outputs", "saves"):
            yield from (("graph", "ops", i, part, k) for k, t in enumerate(_list(op, part)) if t not in known)
    for i, t in enumerate(tensors):
        if (base := _value(t, "base")) is not None and base not in known:
            yield ("graph", "tensors", i, "base")
    for i, t in enumerate(_list(tree, "tensors")):
        parts = [_value(h, "part") for h in _list(t, "histograms")]
        if "values" not in parts or any(p in parts[:k] for k, p in enumerate(parts)):
            yield ("tensors", i)
    yield from _twice([_value(t, "id") for t in _list(tree, "tensors")], "tensors")
    yield from _twice([_value(w, "fqn") for w in _list(tree, "weights")], "weights")


_LAWS: dict[str, Callable[[Any], Iterator[Path]]] = {
    "policy": _policy,
    "plan": _plan,
    "device": _device,
    "datasheet": _datasheet,
    "profile": _header,
}
