"""Checks that values make of their parts; each error says at which part, and describes what is there."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from autoprec.errors import InputError, nearest
from autoprec.formats import format_named, is_storage

__all__ = [
    "check_amount",
    "check_choice",
    "check_format",
    "check_kind",
    "check_storage",
    "check_text",
    "check_unique",
    "described",
    "is_iterable",
]


def check_kind(value: object, kinds: type | tuple[type, ...], what: str, wanted: str) -> None:
    """Of one of these types; None passes, and a boolean is no number. Raises `InputError`."""
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise InputError(f"{what} must be {wanted}, not {described(value)}")


def check_choice(value: str, choices: Sequence[str], what: str, error: type[InputError], *at: str | int) -> None:
    """One of a few names."""
    if value not in choices:
        raise error(f"unknown {what} {value[:60]!r}.{nearest(value[:60], choices)}", at=at)


def check_format(value: str, error: type[InputError], *at: str | int, among: Sequence[str] = ()) -> None:
    """A number format's name, or one of a few other words."""
    if value in among:
        return
    try:
        format_named(value[:60])
    except InputError as problem:
        raise error(str(problem), at=at) from problem


def check_storage(value: str, error: type[InputError], *at: str | int, among: Sequence[str] = ()) -> None:
    """A format that tensors may be kept in, or one of a few other words."""
    check_format(value, error, *at, among=among)
    if value not in among and not is_storage(value):
        raise error(
            f"{value} is no storage; possible: {', '.join((*among, 'bf16'))} and formats of a byte or less", at=at
        )


def check_amount(value: float | None, what: str, error: type[InputError], *at: str | int, least: float = 0.0) -> None:
    """A finite number that is at least `least`; None passes."""
    if value is not None and not (least <= value < math.inf):
        raise error(f"{what} must be finite and at least {least:g}, not {value}", at=at)


def check_text(value: str, what: str, error: type[InputError], *at: str | int) -> None:
    """Not empty."""
    if not value:
        raise error(f"{what} must not be empty", at=at)


def check_unique(values: Sequence[Hashable], what: str, error: type[InputError], *at: str | int) -> None:
    """Each there once; the error is at the first that comes a second time."""
    seen: set[Hashable] = set()
    for i, value in enumerate(values):
        if value in seen:
            raise error(f"{what} {value!r} is there twice", at=(*at, i))
        seen.add(value)


def is_iterable(value: object) -> bool:
    """Whether a loop takes it, also a Dataset of torch's, which has no iterator of its own. Nobody is asked for one:
    that of a DataLoader draws a random number, and starts its processes."""
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


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
