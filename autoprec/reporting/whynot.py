"""Why a decision is not another one: the recorded price of a format, or what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.errors import InputError, PlanError, nearest
from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS, format_named, is_scaled
from autoprec.planning.reasons import bytes_text, seconds_text, violation_text
from autoprec.plans import AS_IS, RECOMPUTED, Alternative, Assignment, Plan, Storage
from autoprec.reporting.plans import OpDecision, how_decided, storage_text

__all__ = ["Answer", "answer_tables", "answers_data", "why_not"]

Verdict = Literal["chosen", "allowed", "forbidden", "dropped", "no candidate", "undecided"]

#: Ways to keep a tensor that are no formats.
_WAYS = (AS_IS, RECOMPUTED)
_KNOWN = (*COMPUTE_FORMATS, *_WAYS)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What speaks against one format of one decision.

    Attributes:
        op: whose decision it is.
        decision: a role, or "kept: tensor"; "" where the op has no decision of that kind.
        asked, chosen: formats.
        verdict: "chosen" it is what the plan has; "allowed" it could have been taken, at a price; "forbidden" it breaks
            a limit; "dropped" the op cannot have it; "no candidate" the policy does not name it; "undecided" there is
            nothing to decide.
        why: a sentence.
        price: what it adds to the step; None where that was not asked.
        next_best: the best of the other formats, None if there is none.
    """

    op: str
    decision: str
    asked: str
    chosen: str
    verdict: Verdict
    why: str
    price: Alternative | None = None
    next_best: Alternative | None = None


def why_not(plan: Plan, found: tuple[OpDecision, ...], asked: str) -> tuple[Answer, ...]:
    """For each decision of these ops that can be a compute format or a storage called `asked`, why it is not.

    `InputError` for a name that is neither, `PlanError` for a plan that did not record its alternatives.
    """
    _check_name(asked)
    answers: list[Answer] = []
    for d in found:
        of_op = [_answer(plan, d.op, str(a.role), a, asked) for a in d.roles if _speaks_of(a, asked)]
        if asked in (*_WAYS, *STORAGE_FORMATS) or is_scaled(asked):
            of_op += [_answer(plan, d.op, how_decided(s), s, asked) for s in d.storages]
        answers += of_op or [_undecided(d, asked)]
    return tuple(answers)


def _speaks_of(made: Assignment, asked: str) -> bool:
    """Whether it was a question for the role. A format with a scale is a storage first."""
    if asked in _WAYS:
        return False
    if not is_scaled(asked):
        return True
    return asked in (made.format, *(a.format for a in made.alternatives or ()), *(d.format for d in made.dropped))


def _check_name(asked: str) -> None:
    if asked in _KNOWN:
        return
    if asked.lower().startswith(("as", "rec")):
        raise InputError(f"unknown format {asked[:60]!r}.{nearest(asked, _KNOWN)}")
    format_named(asked[:60])


def _undecided(d: OpDecision, asked: str) -> Answer:
    why = "the plan does not decide in which format it computes"
    if asked in _WAYS or is_scaled(asked):
        why = "what it makes is not kept for backward, or can only be kept as it is"
    return Answer(op=d.op, decision="", asked=asked, chosen="", verdict="undecided", why=why)


def _answer(plan: Plan, op: str, decision: str, made: Assignment | Storage, asked: str) -> Answer:
    others = made.alternatives
    best = next((a for a in others or () if not a.broken), None) or next(iter(others or ()), None)

    def answer(verdict: Verdict, why: str, price: Alternative | None = None) -> Answer:
        parts: dict[str, Any] = {"op": op, "decision": decision, "asked": asked, "chosen": made.format}
        return Answer(verdict=verdict, why=why, price=price, next_best=best, **parts)

    name = storage_text(asked)
    if made.format == asked:
        return answer("chosen", f"it is {name} already: {made.reason}")
    if others is None:
        raise PlanError(
            f"{op}: this plan does not record the alternatives of its decisions (it was written by hand, or by an older"
            " autoprec). Make it again: autoprec plan PROFILE -o PLAN"
        )
    price = next((a for a in others if a.format == asked), None)
    if price is not None and price.broken:
        return answer("forbidden", "; ".join(violation_text(v) for v in price.broken), price)
    if price is not None:
        return answer("allowed", "it keeps every limit, at this price", price)
    dropped = next((d.why for d in made.dropped if d.format == asked), None)
    if dropped is not None:
        return answer("dropped", dropped)
    what = "formats" if isinstance(made, Assignment) else "storages"
    return answer("no candidate", f"{name} is not among the {what} of the policy {plan.policy!r}")


def answers_data(answers: tuple[Answer, ...]) -> list[dict[str, Any]]:
    """Plain data of each answer."""
    return [asdict(a) for a in answers]


def answer_tables(answers: tuple[Answer, ...], plan: Plan) -> Iterator[RenderableType]:
    """One table per op: each decision as it is, as asked, and as the next best, then the sentences; last what holds the
    whole plan back."""
    by_op: dict[str, list[Answer]] = {}
    for a in answers:
        by_op.setdefault(a.op, []).append(a)
    for op, mine in by_op.items():
        decided = [a for a in mine if a.verdict != "undecided"]
        if decided:
            yield _table(op, decided)
        yield Text("\n".join(f"{a.decision or op}, {storage_text(a.asked)}: {a.why}" for a in mine))
    yield Text(f"binding  {plan.binding}")


def _table(op: str, answers: list[Answer]) -> Table:
    table = Table(title=f"{op}: predicted differences from the plan", title_justify="left")
    table.add_column("decision", overflow="fold")
    for name in ("format", ""):
        table.add_column(name)
    for name in ("step time", "kept", "peak", "noise"):
        table.add_column(name, justify="right")
    for a in answers:
        table.add_row(a.decision, storage_text(a.chosen), "the plan")
        if a.verdict != "chosen":
            table.add_row("", storage_text(a.asked), a.verdict, *_price(a.price))
        if a.next_best is not None and a.next_best.format != a.asked:
            broken = ", forbidden" if a.next_best.broken else ""
            table.add_row("", storage_text(a.next_best.format), f"next best{broken}", *_price(a.next_best))
    return table


def _price(price: Alternative | None) -> tuple[str, ...]:
    if price is None:
        return ()
    sizes = (bytes_text(size, sign=True) for size in (price.saved_bytes, price.peak_bytes))
    return seconds_text(price.seconds), *sizes, f"{price.noise:+.2g}"
