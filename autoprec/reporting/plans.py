"""A `Plan` for people: what each op got and why, and what the whole of it is predicted to cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoprec.errors import InputError, nearest
from autoprec.formats import is_scaled
from autoprec.graphs import Role
from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.plans import AS_IS, RECOMPUTED, Assignment, Plan, Storage, Totals, is_parameter
from autoprec.serial.codec import encode

__all__ = [
    "TOTALS",
    "OpDecision",
    "decisions",
    "device_line",
    "how_decided",
    "maker",
    "matching",
    "op_table",
    "ops_table",
    "plan_data",
    "storage_text",
    "summary",
    "totals_table",
]

_OUTPUT_OF = re.compile(r"(?P<op>.*#\d+)(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class OpDecision:
    """Everything that a plan says about one op, or about one tensor that no op makes.

    Attributes:
        op: `fqn:kind#k`, `input:name`, or `fqn:name` of a frozen parameter.
        kind: of the op, or "input", or "parameter".
        roles: its assignments.
        storages: of the tensors that it makes.
    """

    op: str
    kind: str
    roles: tuple[Assignment, ...]
    storages: tuple[Storage, ...]

    def format_of(self, role: Role) -> str:
        """The format of a role, "" if there is nothing to decide."""
        return next((a.format for a in self.roles if a.role is role), "")

    @property
    def kept_as(self) -> str:
        """How its results are kept for backward, "" if that was not decided."""
        return ", ".join(dict.fromkeys(storage_text(s.format) for s in self.storages))

    @property
    def changes(self) -> bool:
        """Whether anything is narrower than the user wrote it."""
        return any(a.format != "fp32" for a in self.roles) or any(s.format != AS_IS for s in self.storages)

    @property
    def reason(self) -> str:
        """Of the output's format, and of the storage where that is narrower."""
        lines = [a.reason for a in self.roles if a.role is Role.OUTPUT]
        lines += [f"{_how_kept(s)}: {s.reason}" for s in self.storages if s.format != AS_IS]
        return "\n".join(lines)


def decisions(plan: Plan) -> tuple[OpDecision, ...]:
    """By op, in the order of the plan."""
    roles: dict[str, list[Assignment]] = {}
    storages: dict[str, list[Storage]] = {}
    for a in plan.assignments:
        roles.setdefault(a.op, []).append(a)
    for s in plan.storages:
        storages.setdefault(maker(s.tensor), []).append(s)
    return tuple(
        OpDecision(
            op=op,
            kind="parameter" if any(is_parameter(s.tensor) for s in storages.get(op, ())) else _kind(op),
            roles=tuple(roles.get(op, ())),
            storages=tuple(storages.get(op, ())),
        )
        for op in dict.fromkeys((*roles, *storages))
    )


def matching(plan: Plan, pattern: str) -> tuple[OpDecision, ...]:
    """The ops whose id or module is this text, or, where none is, matches it as a glob; `InputError` with the nearest
    one if there is none."""
    known = decisions(plan)
    found = tuple(d for d in known if pattern in (d.op, _module(d.op)))  # names of modules may have brackets
    found = found or tuple(d for d in known if fnmatchcase(d.op, pattern) or fnmatchcase(_module(d.op), pattern))
    if not found:
        names = {name for d in known for name in (d.op, _module(d.op))}
        hint = nearest(pattern.replace("*", ""), names) if len(names) <= 20 else _nearest_of_many(pattern, names)
        raise InputError(f"no op of the plan matches {pattern!r}.{hint}")
    return found


def ops_table(plan: Plan, *, changed_only: bool = False) -> Table:
    """One row per op: formats of its roles and storage, and below them the reason."""
    rows = [d for d in decisions(plan) if d.changes or not changed_only]
    hidden = len(decisions(plan)) - len(rows)
    table = Table(title="What each op got, and why", title_justify="left", caption_justify="left", show_lines=True)
    if hidden:
        table.caption = f"and {hidden} ops wholly in fp32"
    table.add_column(_line("op", *_DECIDED), ratio=1)
    for d in rows:
        formats = _line(d.op, *(d.format_of(role) for role in Role), d.kept_as)
        table.add_row(Group(formats, Text(d.reason, style="dim")) if d.reason else formats)
    return table


_DECIDED = ("output", "grad_input", "grad_weight", "kept as")


def _line(op: str, *formats: str) -> Table:
    """The op, and its formats in columns that are equally wide in every row."""
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(overflow="fold", ratio=1)
    for name in _DECIDED:
        line.add_column(width=max(len(name), len(RECOMPUTED)))
    line.add_row(op, *formats)
    return line


def op_table(decision: OpDecision) -> Table:
    """Every decision about one op, each with its own reason."""
    table = Table(title=decision.op, title_justify="left")
    table.add_column("decision")
    table.add_column("format")
    table.add_column("reason", overflow="fold", ratio=1)
    for a in decision.roles:
        table.add_row(str(a.role), a.format, a.reason)
    for s in decision.storages:
        made_of = f"from {', '.join(s.made_from)}; " if s.made_from else ""
        table.add_row(how_decided(s), storage_text(s.format), made_of + s.reason)
    return table


def totals_table(plan: Plan) -> Table | None:
    """Predicted totals of the plan beside those of FP32; None if the plan carries none."""
    if plan.predicted is None:
        return None
    on = f" for {plan.device}" if plan.device else ""
    table = Table(title=f"One training step, predicted{on}", title_justify="left")
    for name in ("", "fp32", "this plan", "plan / fp32"):
        table.add_column(name, justify="left" if not name else "right")
    for label, field, text in TOTALS:
        if field == "saved_bytes" and plan.decides_parameters:
            label = "kept, frozen weights too"
        mine = getattr(plan.predicted, field)
        theirs = None if plan.predicted_fp32 is None else getattr(plan.predicted_fp32, field)
        ratio = f"{mine / theirs:.2f}" if theirs else ""
        table.add_row(label, "" if theirs is None else text(theirs), text(mine), ratio)
    return table


def device_line(plan: Plan) -> Text:
    """Whose seconds the reasons speak of; the name says so where they are modelled."""
    return Text(f"device   {plan.device or 'unknown'}")


def summary(plan: Plan) -> Text:
    """Policy, formats, budget, gap and what holds the plan back, one a line."""
    peak = "none" if plan.budget_bytes is None else f"{bytes_text(plan.budget_bytes)} ({plan.budget_bytes} bytes)"
    by_row = plan.scales == "rowwise" and any(is_scaled(a.format) for a in plan.assignments)
    lines = {
        "policy": plan.policy or "unknown",
        "device": plan.device or "unknown",
        "formats": (", ".join(plan.formats_used()) or "fp32") + (", scales by row" if by_row else ""),
        "budget": peak,
        "gap": "proven optimal" if plan.gap <= 0.0 else f"at most {100 * plan.gap:.2g} % above the optimum",
        "binding": plan.binding,
    }
    return Text("\n".join(f"{name:8} {value}" for name, value in lines.items()))


def plan_data(plan: Plan, chosen: tuple[OpDecision, ...] | None = None) -> dict[str, Any]:
    """Plain data of a plan for programs: its header, and its ops (or the `chosen` ones)."""
    return {
        "policy": plan.policy,
        "device": plan.device,
        "formats": list(plan.formats_used()),
        "scales": plan.scales,
        "predicted": _totals_data(plan.predicted),
        "predicted_fp32": _totals_data(plan.predicted_fp32),
        "budget_bytes": plan.budget_bytes,
        "gap": plan.gap,
        "binding": plan.binding,
        "contestants": [encode(c) for c in plan.contestants],
        "fingerprint": plan.fingerprint,
        "graph_fingerprint": plan.graph_fingerprint,
        "ops": [encode(d) | {"kept_as": d.kept_as} for d in (decisions(plan) if chosen is None else chosen)],
    }


#: (label, field of `Totals`, value to text).
TOTALS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step time", "seconds", lambda s: seconds_text(s).lstrip("+")),
    ("kept for backward", "saved_bytes", bytes_text),
    ("peak", "peak_bytes", bytes_text),
    ("loss noise σ", "loss_sigma", lambda x: f"{x:.2g}"),
    ("gradient noise / spread", "gradient_ratio", lambda x: f"{x:.2g}"),
)


def _totals_data(totals: Totals | None) -> dict[str, Any] | None:
    return None if totals is None else asdict(totals)


def storage_text(name: str) -> str:
    """A storage (or format) for people."""
    return "as it is" if name == AS_IS else name


def _how_kept(s: Storage) -> str:
    """ "kept bf16", "lives in bf16", "recomputed from blocks.0.up:linear#0"."""
    if is_parameter(s.tensor):
        return f"lives in {s.format}"
    return f"recomputed from {', '.join(s.made_from)}" if s.format == RECOMPUTED else f"kept {s.format}"


def how_decided(s: Storage) -> str:
    """A storage's name among the decisions about an op: "kept: blocks.0.up:linear#0"."""
    return "lives in" if is_parameter(s.tensor) else f"kept: {s.tensor}"


def maker(tensor: str) -> str:
    """The op, or the module, that a tensor's row belongs to."""
    if is_parameter(tensor):
        return ":".join(tensor.removeprefix("param:").rpartition(".")[::2])
    found = _OUTPUT_OF.fullmatch(tensor)
    return found["op"] if found else tensor


def _module(op: str) -> str:
    return op.rpartition(":")[0]


def _kind(op: str) -> str:
    return op.rpartition(":")[2].partition("#")[0] if "#" in op else op.partition(":")[0]


def _nearest_of_many(pattern: str, names: set[str]) -> str:
    hint = nearest(pattern.replace("*", ""), names)
    return hint if hint.startswith(" Did") else f" It has {len(names)} names; explain the plan without one to see them."
