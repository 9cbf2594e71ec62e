"""`autoprec plan`, `explain` and `diff`: files in, a plan or what there is to say of it out. No torch, unless the plans
are to run on a target."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.text import Text

from autoprec.cli.calibrating import device_path, target_path
from autoprec.cli.inputs import Inputs, read_inputs
from autoprec.cli.output import show
from autoprec.errors import InfeasibleError, InputError, PlanError, SolverError
from autoprec.planning.cases import Case
from autoprec.planning.planner import ask, by_prediction, propose
from autoprec.planning.proposals import Proposals
from autoprec.plans import Plan
from autoprec.reporting.contestants import contestants_table
from autoprec.reporting.differences import difference_tables, differences, differences_data
from autoprec.reporting.memory import memory_data, memory_tables
from autoprec.reporting.plans import device_line, matching, op_table, ops_table, plan_data, summary, totals_table
from autoprec.reporting.whynot import answer_tables, answers_data, why_not
from autoprec.serial import check_apart, check_case_path, check_writable, policy_path, read_plan, write_case, write_plan

__all__ = ["show_differences", "show_plan", "write_offline_plan"]


def write_offline_plan(
    profile: Path,
    policy: str,
    budget: str | None,
    device: Path | None,
    compiled: bool | None,
    out: Path | None,
    case_out: Path | None,
    target: str | None,
    *,
    as_json: bool,
) -> int:
    """Plan from a profile and timings; write the plan, and the problem if asked. Nothing is written without `out`. The
    proposals run on the `target` if there is one, else the predictions decide."""
    if out is None and case_out is not None:
        raise InputError("--dry-run writes no file, and --save-case names one: give one of the two")
    read = {"the profile": profile, "the timings": device or device_path(profile), "the target": target_path(target)}
    read["the policy"] = policy_path(policy)
    check_apart({"the plan": out, "the case": case_out}, read)
    if case_out is not None:
        check_case_path(case_out)
        check_writable(case_out, InputError)
    if out is not None:
        check_writable(out, PlanError)
    given = read_inputs(profile, policy, budget, device, compiled)
    question = ask(given.graph, given.profile, given.device, given.policy, budget_bytes=given.memory_bytes)
    try:
        proposals = propose(question)
    except (InfeasibleError, SolverError):
        if case_out is not None:  # then more than ever
            write_case(case_out, Case(problem=question.problem))
        raise
    made, solution = _decided(target, given, proposals), proposals.best.solution
    if case_out is not None:
        found = solution.evaluation.objective
        write_case(case_out, Case(problem=proposals.problem, objective=found, gap=solution.gap))
    written = "nothing was written: this was a dry run"
    if out is not None:
        write_plan(out, made)
        how = ", backend='inductor'" if given.graph.compiled else ""
        use = f"autoprec explain {shlex.quote(str(out))}, or autoprec.compile(model, plan={str(out)!r}{how})"
        case = "" if case_out is None else f"case     {case_out}\n"
        written = f"plan     {out}\n{case}next     {use}"
    if given.graph.compiled and target is None:
        written += f"\n{_NOT_COMPILED}"
    said = {
        "plan": None if out is None else str(out),
        "case": None if case_out is None else str(case_out),
        "dry_run": out is None,
    }
    tables = totals_table(made), *([] if target is None else [contestants_table(made)])
    show({**said, **plan_data(made)}, summary(made), *tables, Text(written), as_json=as_json)
    return 0


#: docs/measurements/lowering.md
_NOT_COMPILED = (
    "note     the peak is one without fusion: compiled, the step may take half of it, or a third more; --target TARGET"
    " compiles the plans, and tells it from their code"
)


def _decided(target: str | None, given: Inputs, proposals: Proposals) -> Plan:
    if target is None:
        return by_prediction(proposals)
    from autoprec.cli.contesting import contested

    return contested(target, given, proposals)


def show_plan(path: Path, op: str | None, why_not_format: str | None, *, memory: bool, as_json: bool) -> int:
    """Explain a whole plan, or the ops that match a glob, or why these are not in another format, or the peak."""
    plan = read_plan(path)
    if memory:
        if op is not None or why_not_format is not None:
            raise InputError("--memory is about the whole plan: leave out OP and --why-not")
        try:
            show(memory_data(plan), device_line(plan), *memory_tables(plan), as_json=as_json)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        return 0
    if op is None:
        if why_not_format is not None:
            raise InputError("--why-not asks about ops: name one, or a glob, after the plan: autoprec explain PLAN OP")
        tables = ops_table(plan), totals_table(plan), contestants_table(plan), summary(plan)
        show(plan_data(plan), *tables, as_json=as_json)
        return 0
    found = matching(plan, op)
    if why_not_format is None:
        show(plan_data(plan, found), device_line(plan), *(op_table(d) for d in found), as_json=as_json)
        return 0
    try:
        answers = why_not(plan, found, why_not_format)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    data = {"plan": str(path), "binding": plan.binding, "answers": answers_data(answers)}
    show(data, *answer_tables(answers, plan), as_json=as_json)
    return 0


def show_differences(before: Path, after: Path, *, as_json: bool) -> int:
    """Compare two plans; 1 if they decide otherwise."""
    was, now = read_plan(before), read_plan(after)
    found = differences(was, now)
    data = {"plans": [str(before), str(after)], **differences_data(found, was, now)}
    show(data, *difference_tables(found, was, now), as_json=as_json)
    return 0 if found.same_decisions else 1
