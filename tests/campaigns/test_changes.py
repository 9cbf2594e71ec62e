"""A few changes of the plan in one run, and a bug that must be noticed."""

from __future__ import annotations

import pytest

from autoprec.execution.slots import Slot
from tests.campaigns.changes import campaign


def test_changes_run_as_claimed() -> None:
    tally = campaign(12, "eager")
    assert tally.wrong == []
    assert tally.changes == 12 and tally.promotions == tally.skipped >= 2
    assert tally.ops_checked >= 100 and len(tally.plans) >= 4
    assert 0.5 < tally.plain_peak_frac <= 1.0


def test_changes_of_compiled_plans_are_lowered_once() -> None:
    tally = campaign(2, "beside", depth=1)
    assert tally.wrong == []
    assert tally.changes == 2 and tally.lowered >= 2


def test_a_slot_that_keeps_its_plan_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt, seen = Slot.adopt, list[object]()

    def only_once(self: Slot, plan: object, device_type: str, **how: object) -> None:
        seen.append(plan)
        if len(seen) <= 2:  # bound, and the first plan
            adopt(self, plan, device_type, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Slot, "adopt", only_once)
    assert any("is planned in" in wrong for wrong in campaign(3, "eager").wrong)
