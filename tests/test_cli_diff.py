"""`autoprec diff`: nothing that differs is left out, and the exit code speaks of decisions alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autoprec.graphs import Role
from autoprec.plans import Assignment, Plan, Region, Storage, Totals
from autoprec.reporting.differences import differences
from autoprec.serial import write_plan

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


def totals(seconds: float) -> Totals:
    return Totals(seconds=seconds, saved_bytes=7 << 20, peak_bytes=9 << 20, loss_sigma=1e-4, gradient_ratio=0.01)


def assignment(op: str, role: Role, fmt: str) -> Assignment:
    return Assignment(op=op, role=role, format=fmt, reason="so be it")


def layered(formats: dict[int, str], layers: int = 60, **more: Any) -> Plan:
    """One linear a layer; layer i in `formats[i]`, others in fp32."""
    return Plan(
        assignments=tuple(
            assignment(f"blocks.{i}.up:linear#0", role, formats.get(i, "fp32")) for i in range(layers) for role in Role
        ),
        storages=tuple(
            Storage(tensor=f"blocks.{i}.up:linear#0", format="as_is", reason="so be it") for i in range(layers)
        ),
        **more,
    )


def diff(run: Run, before: Plan, after: Plan) -> tuple[int, dict[str, Any], str]:
    write_plan("a.yaml", before)
    write_plan("b.yaml", after)
    code, text, err = run("diff", "a.yaml", "b.yaml")
    same_code, data, _ = run("diff", "a.yaml", "b.yaml", "--json")
    assert code == same_code and err == ""
    return code, json.loads(data), text


def test_equal_decisions_made_for_something_else_are_the_same(run: Run) -> None:
    before = layered({1: "bf16"}, policy="memory", predicted=totals(2.0), budget_bytes=1 << 30)
    after = dataclasses.replace(before, policy="mine", device="cpu", predicted=totals(1.0), budget_bytes=None)
    code, data, text = diff(run, before, after)
    assert code == 0 and data["same_decisions"] is True and "The decisions are the same." in text
    assert data["headers"]["policy"] == {"was": "memory", "now": "mine"}
    assert data["headers"]["budget_bytes"] == {"was": 1 << 30, "now": None}
    assert (data["predicted"]["was"]["seconds"], data["predicted"]["now"]["seconds"]) == (2.0, 1.0)
    for words in ("memory", "mine", "1 GiB", "0.50", "2 s"):
        assert words in text
    assert diff(run, before, before)[0] == 0


def test_layers_that_change_alike_share_a_row_and_json_has_each(run: Run) -> None:
    narrow = dict.fromkeys(range(10, 40), "bf16")
    code, data, text = diff(run, layered({}), layered(narrow | {3: "fp16"}))
    assert code == 1 and data["same_decisions"] is False
    said = {(c["of"], c["what"]): (c["was"], c["now"]) for c in data["roles"]}
    assert said == {
        (f"blocks.{i}.up:linear#0", str(role)): ("fp32", f) for i, f in (narrow | {3: "fp16"}).items() for role in Role
    }
    assert "blocks.*.up:linear#0" in text and " 30 " in text and "blocks.3.up:linear#0" in text
    assert "blocks.11.up" not in text and "more rows" not in text


def test_a_long_table_says_what_it_leaves_out(run: Run) -> None:
    names = [f"layer_{chr(97 + i // 26)}{chr(97 + i % 26)}:linear#0" for i in range(100)]
    before, after = (Plan(assignments=tuple(assignment(n, Role.OUTPUT, f) for n in names)) for f in ("fp32", "bf16"))
    code, data, text = diff(run, before, after)
    assert code == 1 and [c["of"] for c in data["roles"]] == names
    assert sum(n in text for n in names) == 40 and "and 60 more rows; --json has them all" in text


def test_plans_of_different_graphs(run: Run) -> None:
    before, after = layered({}, layers=2, graph_fingerprint="a"), layered({}, layers=3, graph_fingerprint="b")
    code, data, text = diff(run, before, after)
    assert code == 1 and data["only_before"] == [] and data["only_after"] == ["blocks.2.up:linear#0"]
    assert {(c["was"], c["now"]) for c in data["roles"]} == {("", "fp32")}
    assert "Ops in the second plan only" in text and "Ops in the first" not in text and "Decisions that" not in text
    assert "Ops in the first plan only" in diff(run, after, before)[2]


def test_storages_regions_and_saturating_casts_are_told(run: Run) -> None:
    before = layered({0: "fp16"}, layers=1, saturating=("mask",))
    kept = Storage(tensor="blocks.0.up:linear#0", format="fp8_e4m3", reason="so be it")
    region = Region(ops=("blocks.0.up:linear#0",), scale_log2=5, reason="so be it")
    after = dataclasses.replace(before, storages=(kept,), regions=(region,), saturating=("input:m",))
    code, data, text = diff(run, before, after)
    assert code == 1 and data["roles"] == []
    assert data["storages"] == [
        {"of": "blocks.0.up:linear#0", "what": "kept", "was": "as_is", "now": "fp8_e4m3"},
    ]
    assert data["regions"] == [{"ops": ["blocks.0.up:linear#0"], "was": None, "now": 5}]
    assert (data["stopped_saturating"], data["saturating"]) == (["mask"], ["input:m"])
    for words in ("kept as it is → fp8_e4m3", "no such region", "2^5", "mask", "input:m"):
        assert words in text


OPS = ("a:linear#0", "b.1:linear#0", "b.2:linear#0")
PLANS = st.builds(
    lambda formats, storages, scale, saturating, policy: Plan(
        assignments=tuple(assignment(op, role, f) for (op, role), f in formats.items()),
        storages=tuple(Storage(tensor=t, format=f, reason="") for t, f in storages.items()),
        regions=() if scale is None else (Region(ops=("a:linear#0",), scale_log2=scale, reason=""),),
        saturating=tuple(saturating),
        policy=policy,
    ),
    st.dictionaries(st.tuples(st.sampled_from(OPS), st.sampled_from(list(Role))), st.sampled_from(["fp32", "bf16"]),
                    max_size=3),
    st.dictionaries(st.sampled_from(OPS), st.sampled_from(["as_is", "bf16"]), max_size=1),
    st.sampled_from([None, 1]),
    st.sets(st.sampled_from(["m"])),
    st.sampled_from(["x", "y"]),
)  # fmt: skip


@given(PLANS, PLANS)
def test_the_decisions_are_the_same_exactly_where_the_fingerprints_are(before: Plan, after: Plan) -> None:
    found = differences(before, after)
    assert found.same_decisions == (before.fingerprint == after.fingerprint)
    # And what is told turns the one into the other.
    formats = dict(before.format_of)
    for c in found.roles:
        assert formats.pop((c.of, Role(c.what)), "") == c.was
        if c.now:
            formats[c.of, Role(c.what)] = c.now
    assert formats == after.format_of
