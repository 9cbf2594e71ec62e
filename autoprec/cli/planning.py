"""`autoprec plan` and `autoprec explain`: files in, a plan or its explanation out. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.text import Text

from autoprec.cli.calibrating import device_path
from autoprec.cli.output import show
from autoprec.devices import Device
from autoprec.errors import DeviceError, PlanError
from autoprec.graphs import OpGraph
from autoprec.planning.planner import make_plan
from autoprec.planning.problem import optimizer_bytes
from autoprec.planning.roofline import modelled_device
from autoprec.policies import Policy
from autoprec.reporting.plans import device_line, matching, op_table, ops_table, plan_data, summary, totals_table
from autoprec.serial import (
    check_writable,
    datasheet_names,
    load_device,
    load_policy,
    read_plan,
    read_profile,
    write_plan,
)

__all__ = ["show_plan", "write_offline_plan"]


def write_offline_plan(
    profile: Path, policy: str, budget: str | None, device: Path | None, out: Path, *, as_json: bool
) -> int:
    """Plan from a profile and timings (or a datasheet, which models them), and write the plan."""
    check_writable(out, PlanError)
    chosen = load_policy(policy)
    if budget is not None:
        chosen = chosen.replaced(budget=budget)
    seen, graph = read_profile(profile)
    beside = device_path(profile)
    if device is None and not beside.exists():
        raise DeviceError(
            f"{beside}: there are no timings beside {profile}; name them with --device FILE, or a device whose"
            f" datasheet is here: {', '.join(datasheet_names())}"
        )
    timings, memory_bytes = _timings(device or beside, graph)
    graph = _with_optimizer(graph, chosen)
    chosen.check_against(graph)
    made = make_plan(graph, seen, timings, chosen, budget_bytes=memory_bytes if chosen.budget is None else None)
    write_plan(out, made)
    written = Text(f"plan     {out}\nnext     autoprec explain {out}, or autoprec.compile(model, plan={str(out)!r})")
    show({"plan": str(out), **plan_data(made)}, summary(made), totals_table(made), written, as_json=as_json)
    return 0


def show_plan(path: Path, op: str | None, *, as_json: bool) -> int:
    """Explain a whole plan, or the ops that match a glob."""
    plan = read_plan(path)
    if op is not None:
        found = matching(plan, op)
        show(plan_data(plan, found), device_line(plan), *(op_table(d) for d in found), as_json=as_json)
        return 0
    show(plan_data(plan), ops_table(plan), totals_table(plan), summary(plan), as_json=as_json)
    return 0


def _timings(device: Path, graph: OpGraph) -> tuple[Device, int | None]:
    """The device with its seconds, and the memory that is the budget where nobody gave one: a datasheet's."""
    found = load_device(device)
    if isinstance(found, Device):
        return found, None
    memory = found.memory_bytes
    return modelled_device(found, graph), None if memory is None else int(memory.value)


def _with_optimizer(graph: OpGraph, policy: Policy) -> OpGraph:
    """The graph with the state of the optimizer that the policy names: there is none to look at offline."""
    if graph.optimizer_bytes:
        return graph
    return replace(graph, optimizer_bytes=optimizer_bytes(policy.optimizer, graph.gradient_bytes))
