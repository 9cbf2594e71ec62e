"""What is wrong with the values of a policy, in the words of a person."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from autoprec.checks import described
from autoprec.errors import nearest
from autoprec.graphs import OpGraph

__all__ = ["Location", "dotted", "nearest_op", "policy_problems"]

Location = tuple[str | int, ...]

_WANTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def policy_problems(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Location, str, bool]]:
    """Each problem as (location, what is wrong, whether the key itself is), in the order of the fields. `model` is what
    was validated."""
    hints = 0
    for detail in error.errors(include_url=False):
        at: Location = detail["loc"]
        context: dict[str, Any] = detail.get("ctx", {})
        kind, got = detail["type"], detail["input"]
        if kind == "extra_forbidden":
            hints += 1  # thousands would take a while
            hint = nearest(str(at[-1])[:60], _keys(model, at[:-1])) if hints <= 100 else ""
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


def _keys(model: type[BaseModel], at: Location) -> list[str]:
    """What may be there."""
    for part in at:
        if isinstance(part, str):
            model = _model_in(_fields(model)[part]) or model
    return list(_fields(model))


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Key → type."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type is, or is a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)


def nearest_op(match: str, kinds: Collection[str], graph: OpGraph, roles: Collection[str] = ()) -> str:
    """The kind or FQN of the graph that a rule most nearly names, which matches none; or which roles there are, where
    those alone do not match."""
    if not graph.ops:
        return " The graph has no ops."
    named = [op for op in graph.ops if (not kinds or op.kind in kinds) and fnmatchcase(op.fqn, match)]
    if roles and named:
        told = ", ".join(dict.fromkeys(role for op in named for role in op.roles)) or "no role"
        return f" It names {len(named)} ops, the first {named[0].id}, which have {told}, and not {', '.join(roles)}."
    there = {op.kind for op in graph.ops}
    unknown = [kind for kind in kinds if kind not in there]
    if unknown:
        return f" Nearest kind to {unknown[0][:60]!r}: {_closest(unknown[0], {k: k for k in there})!r}."
    fqns = {name: op.fqn for op in graph.ops for name in (op.fqn, op.fqn.rpartition(".")[2])}
    meant = re.sub(r"[][*?.]+", ".", match).strip(".")
    if not difflib.get_close_matches(meant[:200], fqns, n=1, cutoff=_ALIKE):
        names = sorted({fqn for fqn in fqns.values() if fqn})
        return f" None is like it; there are {', '.join(names[:5])}{', …' if len(names) > 5 else ''}." if names else ""
    return f" Nearest module: {_closest(meant, fqns)!r}."


#: How alike two names are, by difflib's ratio, of which one may be meant for the other.
_ALIKE = 0.4


def _closest(name: str, choices: dict[str, str]) -> str:
    return choices[difflib.get_close_matches(name[:200], sorted(choices), n=1, cutoff=0.0)[0]]


def dotted(at: Location) -> str:
    """A location as `rules[0].pin: `, or nothing for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")
    return f"{text}: " if text else ""
