"""What may be adopted: the solver's choice and the uniform ones, with what is needed to make each a `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.devices import Device
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate
from autoprec.planning.memory import holdings
from autoprec.planning.pricing import Prices
from autoprec.planning.problem import Problem, as_written
from autoprec.planning.reasons import Reason, Reasons, violation_text
from autoprec.planning.regions import fp16_regions
from autoprec.planning.roots import resolve_roots
from autoprec.planning.solutions import Choice, Evaluation, Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import PlanTensor
from autoprec.plans import AS_IS, RECOMPUTED, Assignment, Contestant, Dropped, Plan, Region, Storage, Totals
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["LOW_FRAC", "SOLVER", "Proposal", "Proposals", "Question", "rivals", "totals_of"]

#: Peaks within this share of the lowest, of the bytes that precision can change, are as low: predictions of peaks err
#: by as much anyway (docs/measurements/memory.md).
LOW_FRAC = 0.02

#: The name of the solver's own choice where it mixes formats; the others are named after theirs.
SOLVER = "solver"


def totals_of(found: Evaluation) -> Totals:
    """The figures of an evaluation that a plan carries."""
    return Totals(
        seconds=found.seconds,
        saved_bytes=found.saved_bytes,
        peak_bytes=found.peak_bytes,
        loss_sigma=found.loss_sigma,
        gradient_ratio=found.gradient_ratio,
    )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A choice by name, and the limit that its predictions break, or ""."""

    name: str
    solution: Solution
    broken: str = ""


def rivals(problem: Problem, solution: Solution, formats: tuple[str, ...]) -> tuple[Proposal, ...]:
    """The solver's choice first, then one for each format of the policy; of equal choices one. The solver's has the
    name of the format if it uses that one throughout; where none may have another, all are "fp32"."""
    choices = {name: uniform_choice(problem, name) for name in sorted(formats, key=lambda f: f != "fp32")}
    own = next((name for name, choice in choices.items() if choice == solution.choice), SOLVER)
    found = [Proposal(name=own, solution=solution)]
    for name, choice in choices.items():
        if all(choice != p.solution.choice for p in found):
            evaluation = evaluate(problem, choice)
            broken = "; ".join(violation_text(v) for v in evaluation.violations[:1])
            uniform = Solution(choice=choice, evaluation=evaluation, bound=solution.bound)
            found.append(Proposal(name=name, solution=uniform, broken=broken))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A problem, and what it was made from.

    Attributes:
        problem: under the budget that was asked for, or under the lowest peak that was found.
        fp32: totals of the model as it was written.
        budget_bytes: what was asked for, or what the device has.
    """

    graph: OpGraph
    profile: Profile
    device: Device
    policy: Policy
    problem: Problem
    fp32: Totals
    budget_bytes: int | None

    @property
    def at_lowest_peak(self) -> bool:
        """Whether the lowest peak there is takes the place of a budget; that of a device's memory is nobody's wish."""
        return self.policy.objective == "peak" and self.policy.budget is None

    def under(self, budget_bytes: int | None) -> Question:
        """The same question under another budget."""
        return replace(self, problem=replace(self.problem, budget_bytes=budget_bytes), budget_bytes=budget_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposals:
    """Answers to one question, the solver's first."""

    question: Question
    all: tuple[Proposal, ...]

    @property
    def problem(self) -> Problem:
        """What they are choices of."""
        return self.question.problem

    @property
    def best(self) -> Proposal:
        """The solver's."""
        return self.all[0]

    @property
    def stands(self) -> bool:
        """Whether the solver's is adopted by its prediction, however fast the others are predicted to be."""
        return self.question.policy.objective == "bytes" or self.question.at_lowest_peak

    def decisions(self, solution: Solution) -> Plan:
        """A solution of the problem as a plan that can run, without reasons, which take longer."""
        return self._plan(solution, None)

    def plan(self, solution: Solution, *, why: str = "", contestants: tuple[Contestant, ...] = ()) -> Plan:
        """A solution of the problem as a plan with a reason for every decision. `why`: what holds it back, if that is
        known better than from its own alternatives."""
        return self._plan(solution, Reasons(self.problem, solution), why, contestants)

    def _plan(
        self, solution: Solution, reasons: Reasons | None, why: str = "", contestants: tuple[Contestant, ...] = ()
    ) -> Plan:
        problem, choice, policy = self.problem, solution.choice, self.question.policy
        unexplained = Reason(text="")
        unit_reasons = reasons.units if reasons else (unexplained,) * len(problem.units)
        storage_reasons = reasons.storages if reasons else dict.fromkeys(problem.storable, unexplained)
        kept = dict(choice.stored)
        decided = list(zip(problem.units, choice.options, unit_reasons, strict=True))
        return Plan(
            assignments=tuple(
                Assignment(
                    op=u.op,
                    role=u.role,
                    format=u.options[k],
                    reason=why.text,
                    alternatives=why.alternatives if reasons else None,
                    dropped=_all_dropped(why, u.options, policy.formats, "nobody asks for this gradient"),
                )
                for u, k, why in decided
                if not u.is_parameter
            ),
            storages=tuple(
                Storage(
                    tensor=u.op,
                    format=_lives_in(u.options[k]),
                    reason=why.text,
                    alternatives=tuple(replace(a, format=_lives_in(a.format)) for a in why.alternatives)
                    if reasons
                    else None,
                    dropped=why.dropped,
                )
                for u, k, why in decided
                if u.is_parameter
            )
            + tuple(
                Storage(
                    tensor=problem.tensors[t].id,
                    format=kept.get(t, AS_IS),
                    reason=why.text,
                    made_from=_made_from(problem.tensors[t]) if kept.get(t) == RECOMPUTED else (),
                    alternatives=why.alternatives if reasons else None,
                    dropped=_dropped_storages(why, problem.tensors[t], policy),
                )
                for t, why in storage_reasons.items()
            ),
            regions=self._regions(choice),
            saturating=_saturating(problem, choice),
            scales=policy.scales,
            predicted=totals_of(solution.evaluation),
            predicted_fp32=self.question.fp32,
            budget_bytes=self.question.budget_bytes,
            gap=solution.gap,
            binding=why or (reasons.binding if reasons else ""),
            policy=policy.name,
            graph_fingerprint=self.question.graph.fingerprint,
            device=self.question.device.name,
            contestants=contestants,
            memory=holdings(self.question.graph, self._compared(solution)) if reasons else (),
        )

    def _compared(self, solution: Solution) -> dict[str, tuple[Problem, Solution]]:
        """The solution, and those whose memory people compare it with."""
        problems = {
            "fp32": as_written(self.question.graph, self.question.profile, self.question.device, self.question.policy)
        }
        if "bf16" in self.question.policy.formats:
            problems["bf16"] = self.problem
        found = {"plan": (self.problem, solution)}
        for name, problem in problems.items():
            choice = uniform_choice(problem, name)
            found[name] = problem, Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0)
        return found

    def _regions(self, choice: Choice) -> tuple[Region, ...]:
        graph, policy = self.question.graph, self.question.policy
        if policy.loss_scaling.mode != "regional":
            return ()
        roots = resolve_roots(graph)
        prices = Prices(graph, roots, self.question.profile, policy)
        units = zip(self.problem.units, choice.options, strict=True)
        needed = {(u.op, u.role): u.options[k] for u, k in units if u.needed and not u.is_parameter}
        return fp16_regions(graph, roots, prices, needed)


def _lives_in(format_name: str) -> str:
    """The storage of a frozen parameter whose unit has this format."""
    return AS_IS if format_name == "fp32" else format_name


#: Why a storage of the policy's is none of a tensor that has others.
_UNREADABLE = "an op that keeps the tensor cannot read it back from there, or what that costs in noise cannot be judged"


def _dropped_storages(why: Reason, t: PlanTensor, policy: Policy) -> tuple[Dropped, ...]:
    dropped = _all_dropped(why, t.storages, policy.storage.formats, _UNREADABLE)
    if not policy.storage.recompute or RECOMPUTED in (*t.storages, *(d.format for d in dropped)):
        return dropped
    return (*dropped, Dropped(format=RECOMPUTED, why=_NOT_MADE_AGAIN))


def _made_from(t: PlanTensor) -> tuple[str, ...]:
    return () if t.remaking is None else t.remaking.made_from


#: Why a tensor cannot be made again.
_NOT_MADE_AGAIN = (
    "products of matrices alone, or one of two factors, must keep it, and what made it must run again to the same"
    " result from what it keeps itself"
)


def _all_dropped(why: Reason, options: Sequence[str], wanted: Sequence[str], otherwise: str) -> tuple[Dropped, ...]:
    """Every format that the policy wants and that is no option, so that none of them is without a word."""
    told = {*options, *(d.format for d in why.dropped)}
    return (*why.dropped, *(Dropped(format=f, why=otherwise) for f in wanted if f not in told))


def _saturating(problem: Problem, choice: Choice) -> tuple[str, ...]:
    formats = [u.options[k] for u, k in zip(problem.units, choice.options, strict=True)]
    return tuple(
        t.id
        for t in problem.tensors
        if any(use.unit is not None and formats[use.unit] in t.saturates for use in t.readers)
    )
