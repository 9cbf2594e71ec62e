"""What is to be said of a policy, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.planning.rules import Finding, RuleUse
from autoprec.policies import Policy, Rule

__all__ = ["check_data", "check_tables"]


def check_data(
    policy: Policy, places: Sequence[str], findings: Sequence[Finding], uses: Sequence[RuleUse] | None, undecided: int
) -> dict[str, Any]:
    """Plain data; `places` of the rules, `uses` of them on a graph if there is one, and the ops that none decides."""
    data: dict[str, Any] = {
        "policy": policy.name,
        "ok": not any(f.level == "problem" for f in findings),
        "findings": [asdict(f) | {"at": _place(places, f.rule)} for f in findings],
    }
    if uses is not None:
        rules = [asdict(use) | {"at": _place(places, use.rule), "text": str(policy.rules[use.rule])} for use in uses]
        data |= {"rules": rules, "ops_without_a_rule": undecided}
    return data


def check_tables(
    policy: Policy, places: Sequence[str], findings: Sequence[Finding], uses: Sequence[RuleUse] | None, undecided: int
) -> Iterator[RenderableType]:
    """Findings, problems first, and what each rule does on the graph."""
    ordered = sorted(findings, key=lambda f: f.level == "note")
    if ordered:
        yield Text("\n".join(_line(policy, places, f) for f in ordered))
    if uses is not None:
        table = Table(title="What each rule does", title_justify="left")
        for name in ("", "rule", "says"):
            table.add_column(name, overflow="fold")
        for name in ("matches", "decides"):
            table.add_column(name, justify="right")
        for use in uses:
            rule = policy.rules[use.rule]
            table.add_row(f"rules[{use.rule}]", str(rule), _demand(rule), str(use.matches), str(use.decides))
        table.add_row("", "no rule", "any of " + ", ".join(policy.formats), "", str(undecided))
        yield table
    problems = sum(f.level == "problem" for f in findings)
    told = "nothing is wrong" if not problems else "1 problem" if problems == 1 else f"{problems} problems"
    yield Text(f"{policy.name}: {told}")


def _line(policy: Policy, places: Sequence[str], f: Finding) -> str:
    where = f"{_place(places, f.rule) or policy.name}: "
    rule = "" if f.rule is None else f"rules[{f.rule}] ({policy.rules[f.rule]}): "
    return f"{f.level:8} {where}{rule}{f.what}"


def _demand(rule: Rule) -> str:
    said = {"pin": rule.pin, "floor": rule.floor, "ceiling": rule.ceiling}
    return ", ".join(f"{what} {fmt}" for what, fmt in said.items() if fmt is not None)


def _place(places: Sequence[str], rule: int | None) -> str:
    return places[rule] if rule is not None and rule < len(places) else ""
