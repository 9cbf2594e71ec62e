"""What the user wants, as frozen values: `Policy`, its parts, and `Budget`."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic import field_validator as validator
from pydantic_core import PydanticCustomError

from autoprec.errors import PolicyError, nearest
from autoprec.formats import COMPUTE_FORMATS, FORMATS, STORAGE_FORMATS, format_named
from autoprec.graphs import Op, OpGraph

__all__ = [
    "Budget",
    "Calibration",
    "Guard",
    "LossScaling",
    "Monitor",
    "Noise",
    "Policy",
    "Rule",
    "StorageOptions",
    "described",
    "dotted",
    "nearest_op",
    "parse_budget",
    "policy_problems",
]

Location = tuple[str | int, ...]


def described(value: object) -> str:
    """A value for an error message: its kind in plain words, and the value itself where it is short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"text {value!r}" if len(value) <= 60 else f"text {value[:60]!r}…"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else "a whole number of more than 128 bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, (list, tuple)) else type(value).__name__


def _refused(message: str, *at: str | int) -> PydanticCustomError:
    """A validator's refusal; `at` is where it is, below the validated field."""
    return PydanticCustomError("autoprec", "{message}", {"message": message, "at": at})


def _named_formats(names: tuple[str, ...], implemented: tuple[str, ...], otherwise: str) -> tuple[str, ...]:
    """The names, each implemented and there once."""
    for i, name in enumerate(names):
        _implemented_format(name, implemented, otherwise, i)
        if name in names[:i]:
            raise _refused(f"{name} is there twice", i)
    return names


def _implemented_format(name: str, implemented: tuple[str, ...], otherwise: str, *at: str | int) -> None:
    if name in implemented:
        return
    if name in [f.name for f in FORMATS]:
        raise _refused(f"{name} {otherwise}; implemented: {', '.join(implemented)}", *at)
    raise _refused(f"unknown format {described(name)}.{nearest(name, implemented)}", *at)


class _Refusing(type(BaseModel)):  # type: ignore[misc]
    """Errors of a call in Python become `PolicyError`; `model_validate` keeps pydantic's, with their locations."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise _policy_error(f"{cls.__name__}()", error) from error


def _policy_error(what: str, error: ValidationError) -> PolicyError:
    return PolicyError("\n".join(f"{what}: {dotted(at)}{problem}" for at, problem, _ in policy_problems(error)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")

#: A tuple; a list is taken for one.
Many = Annotated[tuple[T, ...], BeforeValidator(_tuple)]


if TYPE_CHECKING:  # mypy does not follow a metaclass that is computed
    _Base = BaseModel
else:

    class _Base(BaseModel, metaclass=_Refusing):
        pass


class _Part(_Base):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Noise(_Part):
    """How much rounding noise is allowed, relative to the run's own noise."""

    gradient: float = Field(default=0.05, gt=0.0)
    loss: float = Field(default=0.005, gt=0.0)


class Rule(_Part):
    """What the ops that it matches may use: exactly the format `pin`, or none narrower than `floor`."""

    match: str = "*"
    kinds: Many[str] = ()
    pin: str | None = None
    floor: str | None = None
    optional: bool = False
    why: str = ""

    @validator("pin", "floor")
    @classmethod
    def _known_format(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and info.field_name == "pin":
            _implemented_format(name, COMPUTE_FORMATS, "is not implemented yet as a compute format")
        elif name is not None:
            _implemented_format(name, tuple(f.name for f in FORMATS), "")
        return name

    @model_validator(mode="after")
    def _one_of_pin_and_floor(self) -> Self:
        if (self.pin is None) == (self.floor is None):
            has = "neither" if self.pin is None else "both"
            raise _refused(f"a rule needs exactly one of pin and floor; it has {has}")
        return self

    def matches(self, op: Op) -> bool:
        """Whether it speaks of this op: glob on the FQN, and the kind if any are named."""
        return (not self.kinds or op.kind in self.kinds) and fnmatchcase(op.fqn, self.match)

    def allows(self, format_name: str) -> bool:
        """Whether ops that it matches may compute in this format."""
        if self.pin is not None:
            return format_name == self.pin
        assert self.floor is not None
        return format_named(format_name).bytes >= format_named(self.floor).bytes

    def __str__(self) -> str:
        return f"match {self.match!r}" + (f", kinds {', '.join(self.kinds)}" if self.kinds else "")


class StorageOptions(_Part):
    """Candidate narrow storages of the tensors that are kept for backward; none means as they are."""

    formats: Many[str] = STORAGE_FORMATS

    @validator("formats")
    @classmethod
    def _implemented(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _named_formats(names, STORAGE_FORMATS, "is not implemented yet as a storage")


class Calibration(_Part):
    """How many steps are observed before the first plan."""

    steps: int = Field(default=8, ge=2)


class Monitor(_Part):
    """How often a step is observed while training, and the largest fraction that may saturate."""

    window_steps: int = Field(default=500, ge=1)
    interval_steps: int = Field(default=50, ge=1)
    saturation_frac: float = Field(default=1e-4, gt=0.0, lt=1.0)

    @model_validator(mode="after")
    def _interval_within_window(self) -> Self:
        if self.interval_steps > self.window_steps:
            where = "interval_steps" if "interval_steps" in self.model_fields_set else "window_steps"
            raise _refused(
                f"interval_steps {self.interval_steps} is more than window_steps {self.window_steps};"
                " no step of a window would be observed",
                where,
            )
        return self


class Guard(_Part):
    """What happens on a non-finite gradient, and how many in a row are too many."""

    nonfinite: Literal["skip", "raise"] = "skip"
    patience_steps: int = Field(default=20, ge=1)


class LossScaling(_Part):
    """How FP16 gradients are scaled."""

    mode: Literal["regional", "none"] = "regional"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A limit of the peak: in bytes, or in percent of the part that precision can change."""

    bytes: int | None = None
    percent: float | None = None


_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_AMOUNT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3}|%)\s*", re.ASCII)
_BUDGETS = 'valid: null, whole bytes, or text such as "6GiB", "512 MiB", "1.5GB", "60%"'


def parse_budget(value: str | int | None) -> Budget | None:
    """Bytes ("6GiB", "1.5GB", 6442450944) or a percentage ("60%"); None stays None."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        amount, unit = Fraction(value), "b"
    else:
        found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
        if not found or found[2] != "%" and found[2].lower() not in _UNITS:
            raise PolicyError(f"budget {described(value)} is not valid; {_BUDGETS}")
        amount, unit = Fraction(found[1]), found[2].lower()
    if unit == "%":
        if not 0 < amount <= 100:
            raise PolicyError(f"budget {described(value)} must be above 0% and at most 100%")
        return Budget(percent=float(amount))
    size = int(amount * _UNITS[unit])
    if not 1 <= size < 2**63:
        raise PolicyError(f"budget {described(value)} must be at least 1 byte and less than 8 EiB")
    return Budget(bytes=size)


def _valid_budget(value: Any) -> Any:
    try:
        parse_budget(value)
    except PolicyError as error:
        raise _refused(str(error)) from error
    return value


def _valid_version(value: Any) -> Any:
    if type(value) is not int:
        raise _refused(f"must be the whole number 1, not {described(value)}")
    if value > 1:
        raise _refused(f"version {value} is newer than this autoprec reads (1); upgrade autoprec")
    return value


class Policy(_Part):
    """Everything that a plan and a run are told. `autoprec.serial` reads and finds them."""

    version: Annotated[Literal[1], BeforeValidator(_valid_version)] = 1
    name: str = Field(min_length=1)
    description: str = ""
    formats: Many[str]
    objective: Literal["time", "bytes"] = "time"
    budget: Annotated[str | int | None, BeforeValidator(_valid_budget)] = None
    optimizer: Literal["auto", "none", "sgd", "sgd_momentum", "rmsprop", "adam", "adamw"] = "auto"
    noise: Noise = Noise()
    rules: Many[Rule] = ()
    storage: StorageOptions = StorageOptions()
    calibration: Calibration = Calibration()
    monitor: Monitor = Monitor()
    guard: Guard = Guard()
    loss_scaling: LossScaling = LossScaling()
    uncaptured: Literal["error", "report"] = "error"

    @validator("formats")
    @classmethod
    def _compute_formats(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _named_formats(
            names, COMPUTE_FORMATS, "is not implemented yet as a compute format; for FP8 storage use storage.formats"
        )
        if "fp32" not in names:
            raise _refused("fp32 must be among the formats; an op that can take no other runs in it")
        return names

    @validator("rules")
    @classmethod
    def _pins_are_candidates(cls, rules: tuple[Rule, ...], info: ValidationInfo) -> tuple[Rule, ...]:
        formats = info.data.get("formats", COMPUTE_FORMATS)
        for i, rule in enumerate(rules):
            if rule.pin is not None and rule.pin not in formats:
                raise _refused(f"{rule.pin} is not among the policy's formats ({', '.join(formats)})", i, "pin")
        return rules

    @property
    def fingerprint(self) -> str:
        """Of what it asks for (not of its name, description and reasons)."""
        body = self.model_dump(exclude={"name": True, "description": True, "rules": {"__all__": {"why"}}})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def rule_for(self, op: Op) -> Rule | None:
        """The first rule that matches the op."""
        return next((rule for rule in self.rules if rule.matches(op)), None)

    def unused_rules(self, graph: OpGraph) -> tuple[Rule, ...]:
        """Rules that are not optional and match no op of the graph."""
        return tuple(r for r in self.rules if not r.optional and not any(r.matches(op) for op in graph.ops))

    def check_against(self, graph: OpGraph) -> None:
        """`PolicyError` if a rule that is not optional matches no op of the graph."""
        unused = self.unused_rules(graph)
        if unused:
            lines = [
                f"policy {self.name!r}: rules[{self.rules.index(rule)}] ({rule}) matches no op of {graph.model}."
                f"{nearest_op(rule, graph)}"
                for rule in unused
            ]
            raise PolicyError("\n".join([*lines, "Correct the rule, or give it `optional: true`."]))

    def replaced(self, **changes: Any) -> Policy:
        """A copy with other values (`budget="6GiB"`), validated; `PolicyError` if one is not valid."""
        try:
            return Policy.model_validate({name: getattr(self, name) for name in Policy.model_fields} | changes)
        except ValidationError as error:
            raise _policy_error(f"policy {self.name!r}", error) from error


def nearest_op(rule: Rule, graph: OpGraph) -> str:
    """The kind or FQN of the graph that the rule most nearly names."""
    if not graph.ops:
        return " The graph has no ops."
    kinds = {op.kind for op in graph.ops}
    unknown = [kind for kind in rule.kinds if kind not in kinds]
    if unknown:
        return f" Nearest kind to {unknown[0][:60]!r}: {_closest(unknown[0], {k: k for k in kinds})!r}."
    fqns = {name: op.fqn for op in graph.ops for name in (op.fqn, op.fqn.rpartition(".")[2])}
    return f" Nearest module: {_closest(re.sub(r'[][*?.]+', '.', rule.match).strip('.'), fqns)!r}."


def _closest(name: str, choices: dict[str, str]) -> str:
    return choices[difflib.get_close_matches(name[:200], sorted(choices), n=1, cutoff=0.0)[0]]


_PARTS: dict[str | int, type[_Part]] = {
    "noise": Noise,
    "rules": Rule,
    "storage": StorageOptions,
    "calibration": Calibration,
    "monitor": Monitor,
    "guard": Guard,
    "loss_scaling": LossScaling,
}
_WANTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_LIMITS = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"), "less_than": ("lt", "below")}


def policy_problems(error: ValidationError) -> Iterator[tuple[Location, str, bool]]:
    """Each problem as (location, what is wrong, whether the key itself is), in the order of the fields."""
    hints = 0
    for detail in error.errors(include_url=False):
        at: Location = detail["loc"]
        context: dict[str, Any] = detail.get("ctx", {})
        kind, got = detail["type"], detail["input"]
        if kind == "extra_forbidden":
            model = _PARTS.get(at[0], Policy) if len(at) > 1 else Policy
            hints += 1  # thousands would take a while
            hint = nearest(str(at[-1])[:60], model.model_fields) if hints <= 100 else ""
            yield at, f"unknown key {str(at[-1])[:60]!r}.{hint}", True
        elif kind == "missing":
            yield at[:-1], f"the key {at[-1]!r} is missing", False
        elif kind == "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
            close = difflib.get_close_matches(got if isinstance(got, str) else "", choices, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            yield at, f"must be one of {', '.join(choices)}, not {described(got)}{hint}", False
        elif kind in _WANTED:
            yield at, f"must be {_WANTED[kind]}, not {described(got)}", False
        elif kind in _LIMITS:
            name, words = _LIMITS[kind]
            yield at, f"must be {words} {context[name]}, not {described(got)}", False
        elif kind == "autoprec":
            yield (*at, *context["at"]), context["message"], False
        else:
            yield at, f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, not {described(got)}", False


def dotted(at: Location) -> str:
    """A location as `rules[0].pin: `, or nothing for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")
    return f"{text}: " if text else ""
