"""What the JSON schema of a policy says beside its types (`autoprec schema`)."""

from __future__ import annotations

from pydantic.config import JsonDict

from autoprec.budgets import BUDGET_PATTERN, LARGEST_BUDGET_BYTES
from autoprec.formats import COMPUTE_FORMATS, NAME_PATTERN

__all__ = ["BUDGET", "FORMAT", "FORMAT_OR_NONE", "given", "some_of"]


def _format(*names: str) -> JsonDict:
    """One of the names, or that of a format of one's own."""
    return {"type": "string", "anyOf": [{"enum": list(names)}, {"pattern": f"^({NAME_PATTERN})$"}]}


def some_of(names: tuple[str, ...], *, among_them: str | None = None) -> JsonDict:
    """A list of formats, each there once, a certain one among them."""
    said: JsonDict = {"items": _format(*names), "uniqueItems": True}
    return said if among_them is None else said | {"contains": {"const": among_them}}


FORMAT: JsonDict = _format(*COMPUTE_FORMATS)
FORMAT_OR_NONE: JsonDict = {"anyOf": [_format(*COMPUTE_FORMATS), {"type": "null"}]}


def given(key: str) -> JsonDict:
    """There, and not null."""
    return {"required": [key], "properties": {key: {"type": "string"}}}


BUDGET: JsonDict = {
    "anyOf": [
        {"type": "string", "pattern": BUDGET_PATTERN},
        {"type": "integer", "minimum": 1, "maximum": LARGEST_BUDGET_BYTES},
        {"type": "null"},
    ]
}
