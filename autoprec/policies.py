"""What the user wants, as frozen values: `Policy`, its parts, and `Budget`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic import field_validator as validator
from pydantic_core import PydanticCustomError

from autoprec.budgets import Budget, parse_budget
from autoprec.checks import described
from autoprec.errors import InputError, PolicyError
from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS, Format, format_named
from autoprec.graphs import Op, OpGraph, Role
from autoprec.policy_problems import dotted, nearest_op, policy_problems
from autoprec.policy_schema import BUDGET, FORMAT, FORMAT_OR_NONE, given, some_of

__all__ = [
    "Budget",
    "Calibration",
    "Guard",
    "LossScaling",
    "Monitor",
    "Noise",
    "Policy",
    "Raise",
    "Rule",
    "StorageOptions",
    "parse_budget",
]


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
    try:
        described_format = format_named(name[:60])
    except InputError as error:
        raise _refused(str(error), *at) from error
    if not described_format.scaled:
        raise _refused(f"{name} {otherwise}; possible: {', '.join(implemented)}, and formats of a byte or less", *at)


class _Refusing(type(BaseModel)):  # type: ignore[misc]
    """Errors of a call in Python become `PolicyError`; `model_validate` keeps pydantic's, with their locations."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise _policy_error(f"{cls.__name__}()", error, cls) from error


def _policy_error(what: str, error: ValidationError, model: type[BaseModel]) -> PolicyError:
    return PolicyError("\n".join(f"{what}: {dotted(at)}{problem}" for at, problem, _ in policy_problems(error, model)))


def _tuple(value: Any) -> Any:
    """A list as a tuple, and a `Format` in it by its name."""
    if not isinstance(value, (list, tuple)):
        return value
    for f in value:
        if isinstance(f, Format) and format_named(f.name) != f:
            raise _refused(f"{f} is not what its name says: {format_named(f.name)}")
    return tuple(f.name if isinstance(f, Format) else f for f in value)


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

    gradient: float = Field(
        default=0.1,
        gt=0.0,
        description="σ of each weight gradient's rounding noise, as a share of its spread over batches.",
    )
    loss: float = Field(
        default=0.005, gt=0.0, description="σ of the loss's rounding noise, as a share of its spread over batches."
    )


class Rule(_Part):
    """What the ops that it matches may use: exactly the format `pin`, or none narrower than `floor` and none wider than
    `ceiling`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [given("pin"), {"anyOf": [given("floor"), given("ceiling")]}]}
    )

    match: str = Field(default="*", description="Glob on the dotted name of the module that owns an op.")
    kinds: Many[str] = Field(default=(), description="Kinds of op (linear, gelu, …); none means all.")
    roles: Many[Literal["output", "grad_input", "grad_weight"]] = Field(
        default=(), description="Roles that it speaks of; none means all. Only products have the gradient roles."
    )
    pin: str | None = Field(default=None, json_schema_extra=FORMAT_OR_NONE, description="Exactly this format.")
    floor: str | None = Field(
        default=None,
        json_schema_extra=FORMAT_OR_NONE,
        description="Nothing with fewer bits than this format.",
    )
    ceiling: str | None = Field(
        default=None, json_schema_extra=FORMAT_OR_NONE, description="Nothing with more bits than this format."
    )
    optional: bool = Field(
        default=False,
        description="No error where it matches nothing; gives way to fp32 where an op cannot take the format.",
    )
    why: str = Field(default="", description="The reason, for people.")

    @validator("pin", "floor", "ceiling")
    @classmethod
    def _known_format(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and info.field_name == "pin":
            _implemented_format(name, COMPUTE_FORMATS, "is no compute format")
        elif name is not None:
            _implemented_format(name, COMPUTE_FORMATS, "is no format")
        return name

    @model_validator(mode="after")
    def _a_pin_or_bounds(self) -> Self:
        bounded = self.floor is not None or self.ceiling is not None
        if (self.pin is None) != bounded:
            has = "neither" if self.pin is None else "both"
            raise _refused(f"a rule needs either a pin, or a floor or a ceiling or both; it has {has}")
        if self.floor and self.ceiling and format_named(self.floor).bits > format_named(self.ceiling).bits:
            raise _refused(f"floor {self.floor} is above ceiling {self.ceiling}: no format is left", "ceiling")
        return self

    def matches(self, op: Op) -> bool:
        """Whether it speaks of this op: glob on the FQN, and the kind and a role if any are named."""
        roles = not self.roles or any(role in self.roles for role in op.roles)
        return roles and (not self.kinds or op.kind in self.kinds) and fnmatchcase(op.fqn, self.match)

    def allows(self, format_name: str) -> bool:
        """Whether ops that it matches may compute in this format."""
        if self.pin is not None:
            return format_name == self.pin
        size = format_named(format_name).bits
        least, most = (None if f is None else format_named(f).bits for f in (self.floor, self.ceiling))
        return (least is None or least <= size) and (most is None or size <= most)

    def __str__(self) -> str:
        parts = [("kinds", self.kinds), ("roles", self.roles)]
        return f"match {self.match!r}" + "".join(f", {name} {', '.join(some)}" for name, some in parts if some)


class StorageOptions(_Part):
    """Candidate narrow storages of the tensors that are kept for backward; none means as they are."""

    formats: Many[str] = Field(
        default=STORAGE_FORMATS,
        json_schema_extra=some_of(STORAGE_FORMATS),
        description="What a tensor may be kept in instead of as it is.",
    )
    recompute: bool = Field(
        default=True, description="Whether a tensor may be made again in the backward pass from what others keep."
    )
    frozen: Many[str] = Field(
        default=(),
        json_schema_extra=some_of(STORAGE_FORMATS),
        description="What a frozen weight may live in for good, without an FP32 copy; none means in FP32.",
    )

    @validator("formats", "frozen")
    @classmethod
    def _implemented(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _named_formats(names, STORAGE_FORMATS, "is no storage")


class Calibration(_Part):
    """How many steps are observed before the first plan."""

    steps: int = Field(
        default=8, ge=2, le=1_000_000, description="Steps that are observed, in FP32, before the first plan."
    )


class Monitor(_Part):
    """How often a step is observed while training, what a format must not do to an op, and when it may come back."""

    window_steps: int = Field(default=500, ge=1, description="Steps that one judgement is about.")
    interval_steps: int = Field(default=50, ge=1, description="Every so many steps one is observed.")
    saturation_frac: float = Field(
        default=1e-4,
        gt=0.0,
        lt=1.0,
        description="The largest fraction of a tensor that may crowd the format's largest value.",
    )
    underflow_frac: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="The largest fraction that may round to zero, unless twice as much as in calibration is more.",
    )
    sqnr_drop_db: float = Field(
        default=6.0, gt=0.0, description="Decibels of signal to rounding noise that may be lost since calibration."
    )
    cooldown_windows: int = Field(
        default=2, ge=1, description="Windows between changes of an op, and to be well for, before a format comes back."
    )
    takeover_steps: int = Field(
        default=100,
        ge=0,
        description="Steps that a new plan runs uncompiled while a copy of the process compiles it; 0: the run waits.",
    )

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

    nonfinite: Literal["skip", "raise"] = Field(
        default="skip", description="A bad step changes nothing, or is an error."
    )
    patience_steps: int = Field(default=20, ge=1, description="So many bad steps in a row are an error.")
    loss_spike: Literal["report", "skip"] = Field(
        default="report", description="A loss far above the window's is told, or its step changes nothing either."
    )
    spike_sigmas: float = Field(
        default=10.0, gt=0.0, description="How far: in spreads of the window's losses above their median."
    )


class LossScaling(_Part):
    """How FP16 gradients are scaled. All but `mode` is what `autoprec.GradScaler(model=model)` starts from."""

    mode: Literal["regional", "global", "none"] = Field(
        default="regional", description="One scale per region of FP16 ops, one for the loss by a GradScaler, or none."
    )
    init: Annotated[float | str, BeforeValidator(_valid_scale)] = Field(
        default="auto",
        json_schema_extra={"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "auto"}]},
        description="The first loss scale; auto reads it off calibration.",
    )
    growth: float = Field(default=2.0, gt=1.0, description="What the loss scale is multiplied by.")
    backoff: float = Field(default=0.5, gt=0.0, lt=1.0, description="What it is multiplied by after an overflow.")
    interval_steps: int = Field(default=2000, ge=1, description="So many good steps before it grows.")


#: More steps than a float counts.
_MOST_STEPS = 2**53


class Raise(_Part):
    """From some step on, no format with fewer bits than `to` for the ops that it matches."""

    after: float = Field(
        gt=0.0, description="Optimizer steps; below 1, a share of the planned ones (`compile(total_steps=…)`)."
    )
    match: str = Field(alias="raise", min_length=1, description="Glob on the dotted name of the module of an op.")
    to: str = Field(json_schema_extra=FORMAT, description="The narrowest format from then on.")
    roles: Many[Literal["output", "grad_input", "grad_weight"]] = Field(
        default=(), description="Roles that it speaks of; none means all."
    )
    optional: bool = Field(default=False, description="No error where it matches nothing.")

    def roles_of(self, op: Op) -> tuple[Role, ...]:
        """The roles of this op that it speaks of."""
        spoken = (role for role in op.roles if not self.roles or role in self.roles)
        return tuple(spoken) if fnmatchcase(op.fqn, self.match) else ()

    def bans(self, op: Op, formats: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """(op, format, role) that no plan may have of these formats, once this counts."""
        narrow = [f for f in formats if format_named(f).bits < format_named(self.to).bits]
        yield from ((op.id, f, str(role)) for role in self.roles_of(op) for f in narrow)

    @validator("after", mode="before")
    @classmethod
    def _whole_steps(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and value >= 1 and not (value <= _MOST_STEPS and value == int(value)):
            raise _refused(f"must be a share below 1 or a whole number of steps, not {described(value)}")
        return float(value) if number else value

    @validator("to")
    @classmethod
    def _known_format(cls, name: str) -> str:
        _implemented_format(name, COMPUTE_FORMATS, "is no format")
        return name


def _valid_budget(value: Any) -> Any:
    try:
        parse_budget(value)
    except PolicyError as error:
        raise _refused(str(error)) from error
    return value


def _valid_scale(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value != "auto" and not (number and 0.0 < value < float("inf")):
        raise _refused(f"must be auto or a finite number above 0, not {described(value)}")
    return float(value) if number else value


def _valid_version(value: Any) -> Any:
    if type(value) is not int:
        raise _refused(f"must be the whole number 1, not {described(value)}")
    if value > 1:
        raise _refused(f"version {value} is newer than this autoprec reads (1); upgrade autoprec")
    return value


class Policy(_Part):
    """Everything that a plan and a run are told. `autoprec.serial` reads and finds them."""

    version: Annotated[Literal[1], BeforeValidator(_valid_version)] = Field(
        default=1, description="Of this file format."
    )
    name: str = Field(min_length=1, description="What plans and tables call it.")
    description: str = Field(default="", description="What it is for, for people.")
    formats: Many[str] = Field(
        json_schema_extra=some_of(COMPUTE_FORMATS, among_them="fp32"),
        description="The candidates to compute in; fp32 must be among them.",
    )
    objective: Literal["time", "bytes", "peak"] = Field(
        default="time",
        description="What is minimised: seconds of a step, bytes kept for backward, or the peak, without a budget:"
        " the fastest at the lowest.",
    )
    budget: Annotated[str | int | None, BeforeValidator(_valid_budget)] = Field(
        default=None,
        json_schema_extra=BUDGET,
        description="Limit of a step's peak: bytes, 6GiB, or 60% of the part that precision can change.",
    )
    optimizer: Literal["auto", "none", "sgd", "sgd_momentum", "rmsprop", "adam", "adamw"] = Field(
        default="auto", description="Whose state counts when planning offline; auto looks at the one in use."
    )
    noise: Noise = Field(default=Noise(), description="How much rounding noise is allowed.")
    rules: Many[Rule] = Field(
        default=(), description="What some ops may use; the first that matches an op speaks of it."
    )
    storage: StorageOptions = Field(default=StorageOptions(), description="How tensors may be kept for backward.")
    calibration: Calibration = Field(default=Calibration(), description="Observation before the first plan.")
    monitor: Monitor = Field(default=Monitor(), description="Observation while training.")
    guard: Guard = Field(default=Guard(), description="What happens on a non-finite gradient.")
    loss_scaling: LossScaling = Field(default=LossScaling(), description="The scale of FP16 gradients.")
    schedule: Many[Raise] = Field(default=(), description="When precision is raised, whatever was planned.")
    scales: Literal["tensorwise", "rowwise"] = Field(
        default="tensorwise", description="What has a scale of its own in FP8: a tensor, or in linears each row."
    )
    uncaptured: Literal["error", "report"] = Field(
        default="error", description="What a parameter is that trains outside the captured graph."
    )

    @validator("formats")
    @classmethod
    def _compute_formats(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _named_formats(names, COMPUTE_FORMATS, "is no compute format")
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
        body = self.model_dump(
            exclude={
                "name": True,
                "description": True,
                "rules": {"__all__": {"why"}},
                "schedule": {"__all__": {"optional"}},
            }
        )
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def rule_for(self, op: Op, role: Role = Role.OUTPUT) -> Rule | None:
        """The first rule that matches a role of the op."""
        spoken = (rule for rule in self.rules if not rule.roles or role in rule.roles)
        return next((rule for rule in spoken if rule.matches(op)), None)

    def unused_rules(self, graph: OpGraph) -> tuple[Rule, ...]:
        """Rules that are not optional and match no op of the graph."""
        return tuple(r for r in self.rules if not r.optional and not any(r.matches(op) for op in graph.ops))

    def unused_raises(self, graph: OpGraph) -> tuple[str, ...]:
        """A sentence for each entry of the schedule that is not optional and matches no op of the graph."""
        return tuple(
            f"schedule[{i}] (raise {entry.match!r}) matches no op of {graph.model}."
            f"{nearest_op(entry.match, (), graph, entry.roles)}"
            for i, entry in enumerate(self.schedule)
            if not entry.optional and not any(entry.roles_of(op) for op in graph.ops)
        )

    def check_against(self, graph: OpGraph) -> None:
        """`PolicyError` if a rule or an entry of the schedule that is not optional matches no op of the graph."""
        lines = [
            f"policy {self.name!r}: rules[{self.rules.index(rule)}] ({rule}) matches no op of {graph.model}."
            f"{nearest_op(rule.match, rule.kinds, graph, rule.roles)}"
            for rule in self.unused_rules(graph)
        ]
        lines += [f"policy {self.name!r}: {what}" for what in self.unused_raises(graph)]
        if lines:
            raise PolicyError("\n".join([*lines, "Correct the rule, or give it `optional: true`."]))

    def replaced(self, **changes: Any) -> Policy:
        """A copy with other values (`budget="6GiB"`), validated; `PolicyError` if one is not valid."""
        try:
            return Policy.model_validate({name: getattr(self, name) for name in Policy.model_fields} | changes)
        except ValidationError as error:
            raise _policy_error(f"policy {self.name!r}", error, Policy) from error
