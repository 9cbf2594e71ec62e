"""What is wrong with a policy before anything is planned: rules that can never apply, and on a graph, rules that do
not, and ops that they leave without a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from autoprec.devices import Device
from autoprec.errors import InfeasibleError, InputError
from autoprec.formats import TF32, format_named
from autoprec.graphs import Op, OpGraph, Role
from autoprec.planning.globs import uncovered
from autoprec.planning.options import decides, options_of, unit_options
from autoprec.planning.pricing import Prices
from autoprec.planning.roots import resolve_roots
from autoprec.plans import Plan
from autoprec.policies import Policy, Rule
from autoprec.policy_problems import nearest_op
from autoprec.profiles import Profile

__all__ = ["Finding", "RuleUse", "for_compiled", "policy_findings", "rule_findings", "rule_uses", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a policy: a "problem" that has to be mended, or a "note". `rule` is its place among the rules."""

    level: Literal["problem", "note"]
    what: str
    rule: int | None = None


@dataclass(frozen=True, kw_only=True)
class RuleUse:
    """One rule on one graph.

    Attributes:
        rule: its place among the rules.
        matches: ops that it matches.
        decides: those of them that take a format, and that no earlier rule matches.
        first: whether it is the first to match any op.
        shadowed_by: earlier rules that match some of its ops.
    """

    rule: int
    matches: int
    decides: int
    first: bool
    shadowed_by: tuple[int, ...]


def for_compiled(policy: Policy, plan: Plan | None = None) -> Policy:
    """The policy as a compiled step can run it: a compiled graph has no place for torch's switches around one product,
    so there TF32 is no choice. Raises `InputError` where a rule, or the plan, wants it all the same."""
    if TF32.name in {r.pin for r in policy.rules} or (plan is not None and TF32.name in plan.formats_used()):
        what = "a rule" if plan is None else "the plan"
        raise InputError(f"{what} computes in tf32, which a compiled graph cannot switch op by op; use eager mode")
    return policy.replaced(formats=tuple(f for f in policy.formats if f != TF32.name))


# The policy alone ---------------------------------------------------------------------------------------------------


def policy_findings(policy: Policy) -> tuple[Finding, ...]:
    """What is certain whatever the model."""
    found = [f for i in range(len(policy.rules)) for f in _of_rule(policy, i)]
    return (*found, *_of_the_whole(policy))


def _of_rule(policy: Policy, index: int) -> Iterator[Finding]:
    rule = policy.rules[index]
    by = _shadowing(policy.rules, index)
    if by:
        names = ", ".join(f"rules[{i}] ({policy.rules[i]})" for i in by)
        demands = {(policy.rules[i].pin, policy.rules[i].floor, policy.rules[i].ceiling) for i in by}
        other = "the same" if demands == {(rule.pin, rule.floor, rule.ceiling)} else "otherwise"
        what = f"certainly shadowed: whatever it matches, {names} matches before, and says {other}"
        yield Finding(level="problem", rule=index, what=what)
    if rule.pin is None and all(rule.allows(f) for f in policy.formats):
        bounds = [f"{name} {f}" for name, f in (("floor", rule.floor), ("ceiling", rule.ceiling)) if f is not None]
        what = f"{' and '.join(bounds)} limits nothing: every format of the policy is within"
        yield Finding(level="note", rule=index, what=what)


def _shadowing(rules: tuple[Rule, ...], index: int) -> list[int]:
    """The earlier rules that together match all that a rule can match; none if that cannot be proven.

    Kinds are open: a rule without kinds is shadowed only by rules without kinds.
    """
    rule, used = rules[index], set()
    for kind, role in product(rule.kinds or (None,), rule.roles or tuple(Role)):
        earlier = [i for i in range(index) if not rules[i].kinds or kind in rules[i].kinds]
        earlier = [i for i in earlier if not rules[i].roles or (rule.roles and role in rules[i].roles)]
        if not earlier or uncovered(rule.match, [rules[i].match for i in earlier]) is not None:
            return []
        alone = [i for i in earlier if uncovered(rule.match, [rules[i].match]) is None]
        used.update(alone[:1] or earlier)
    return sorted(used)


def _of_the_whole(policy: Policy) -> Iterator[Finding]:
    narrow = [f for f in policy.formats if f != "fp32"]
    kept = policy.storage
    if not (narrow or kept.formats or kept.recompute or kept.frozen) and policy.budget is not None:
        what = (
            f"budget {policy.budget}: there is nothing to choose, neither a format but fp32 nor a storage, nor anything"
            " that may be made again or live narrow, to keep it"
        )
        yield Finding(level="problem", what=what)
    pins = {r.pin for r in policy.rules if uncovered("*", [r.match]) is None and not (r.kinds or r.roles or r.optional)}
    for pin in sorted(p for p in pins if p is not None):
        for s in policy.storage.formats:
            if format_named(s).bytes >= format_named(pin).bytes:
                what = f"storage {s} is not narrower than {pin}, which a rule pins for every op"
                yield Finding(level="note", what=what)


# On a graph ---------------------------------------------------------------------------------------------------------


def rule_uses(policy: Policy, graph: OpGraph) -> tuple[RuleUse, ...]:
    """How many ops each rule matches, and decides: first match wins, and only ops that take a format are decided."""
    first = {op.id: _deciding(policy, op) for op in graph.ops}
    uses = []
    for i, rule in enumerate(policy.rules):
        matched = [op for op in graph.ops if rule.matches(op)]
        decided = [op for op in matched if i in first[op.id] and decides(op, graph)]
        by = sorted({k for op in matched for k in first[op.id] if k != i})
        uses.append(RuleUse(rule=i, matches=len(matched), decides=len(decided), shadowed_by=tuple(by),
                            first=any(i in first[op.id] for op in matched)))  # fmt: skip
    return tuple(uses)


def undecided(policy: Policy, graph: OpGraph) -> int:
    """How many of the ops that take a format have a role that no rule matches."""
    return sum(
        any(policy.rule_for(op, role) is None for role in op.roles or (Role.OUTPUT,))
        for op in graph.ops
        if decides(op, graph)
    )


def _deciding(policy: Policy, op: Op) -> list[int]:
    """The first rule that matches each role of the op, or the op where it has none."""
    found = [policy.rule_for(op, role) for role in op.roles or (Role.OUTPUT,)]
    places = [next(i for i, rule in enumerate(policy.rules) if rule is mine) for mine in found if mine is not None]
    return list(dict.fromkeys(places))


def rule_findings(policy: Policy, graph: OpGraph, profile: Profile, device: Device) -> tuple[Finding, ...]:
    """What is wrong on this graph: rules that match nothing or are overruled everywhere, ops without a format."""
    found: list[Finding] = []
    for use in rule_uses(policy, graph):
        rule = policy.rules[use.rule]
        level: Literal["problem", "note"] = "note" if rule.optional else "problem"
        if not use.matches:
            hint = "" if rule.optional else f".{nearest_op(rule.match, rule.kinds, graph, rule.roles)}"
            found.append(Finding(level=level, rule=use.rule, what=f"matches no op of {graph.model}{hint}"))
        elif use.decides:
            continue
        elif not use.first:
            by = ", ".join(f"rules[{i}]" for i in use.shadowed_by)
            what = f"decides nothing: {by} matched every one of its {use.matches} ops before"
            found.append(Finding(level=level, rule=use.rule, what=what))
        else:
            what = f"decides nothing: none of the {use.matches} ops that it matches takes a format"
            found.append(Finding(level="note", rule=use.rule, what=what))
    found += [Finding(level="problem", what=what) for what in policy.unused_raises(graph)]
    return (*found, *_without_a_format(policy, graph, profile, device))


def _without_a_format(policy: Policy, graph: OpGraph, profile: Profile, device: Device) -> Iterator[Finding]:
    """Every op that no format is left for; those that are tied to each other only where there is none on its own."""
    roots = resolve_roots(graph)
    prices = Prices(graph, roots, profile, policy)
    alone = True
    for op in graph.ops:
        if decides(op, graph):
            try:
                options_of(op, graph, prices, policy, device, frozenset())
            except InfeasibleError as error:
                alone = False
                yield Finding(level="problem", rule=next(iter(_deciding(policy, op)), None), what=str(error))
    if alone:
        try:
            unit_options(graph, roots, prices, policy, device, frozenset())
        except InfeasibleError as error:
            alone = False
            yield Finding(level="problem", what=str(error))
    banned = frozenset(ban for entry in policy.schedule for op in graph.ops for ban in entry.bans(op, policy.formats))
    if alone and banned:
        try:
            unit_options(graph, roots, prices, policy, device, banned)
        except InfeasibleError as error:
            yield Finding(level="problem", what=f"once all of the schedule counts: {error}")
