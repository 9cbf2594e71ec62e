"""What a plan that no solver made takes, by the problem that it would have been an answer to."""

from __future__ import annotations

from autoprec.devices import Device
from autoprec.errors import DeviceError, InfeasibleError
from autoprec.graphs import OpGraph, Role
from autoprec.planning.evaluator import evaluate
from autoprec.planning.problem import build_problem
from autoprec.planning.proposals import totals_of
from autoprec.planning.solutions import Choice
from autoprec.plans import AS_IS, Plan, Totals
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["predicted_totals"]


def predicted_totals(plan: Plan, graph: OpGraph, profile: Profile, device: Device, policy: Policy) -> Totals | None:
    """The totals of a plan; None where it has what nobody has priced: a format that an op was not timed in."""
    try:
        problem = build_problem(graph, profile, device, policy.replaced(rules=()), living=plan.living)
    except (InfeasibleError, DeviceError):
        return None
    lives = {(tensor, Role.OUTPUT): fmt for tensor, fmt in plan.living.items()}
    wanted = [(plan.format_of | lives).get((u.op, u.role), "fp32") for u in problem.units]
    if any(f not in u.options for u, f in zip(problem.units, wanted, strict=True)):
        return None
    kept = [(i, plan.storage_of.get(t.id, AS_IS), t.storages) for i, t in enumerate(problem.tensors)]
    choice = Choice(
        options=tuple(u.options.index(f) for u, f in zip(problem.units, wanted, strict=True)),
        stored=frozenset((i, f) for i, f, storages in kept if f in storages),
    )
    return totals_of(evaluate(problem, choice))
