"""Policies as values: what they accept, what they refuse, and which rule speaks for an op."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from autoprec.errors import InputError, PolicyError
from autoprec.graphs import Op, OpClass, OpGraph
from autoprec.policies import Budget, Monitor, Policy, Rule, StorageOptions, parse_budget
from autoprec.policy_problems import policy_problems


def op(fqn: str, kind: str = "linear") -> Op:
    return Op(id=f"{fqn}:{kind}#0", kind=kind, op_class=OpClass.GEMM, fqn=fqn, inputs=(), outputs=())


def policy(**values: object) -> Policy:
    return Policy.model_validate({"name": "p", "formats": ("fp32", "bf16"), **values})


def repr_short(value: object) -> str:
    return "huge" if isinstance(value, int) and value.bit_length() > 99 else repr(value)[:12]


def problems(**values: object) -> list[tuple[tuple[str | int, ...], str]]:
    with pytest.raises(ValidationError) as caught:
        policy(**values)
    return [(at, what) for at, what, _ in policy_problems(caught.value, Policy)]


GRAPH = OpGraph(
    model="Net", ops=(op("blocks.0.attn.qkv"), op("blocks.0.norm", "layer_norm"), op("lm_head")), tensors=()
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1, Budget(bytes=1)),
        (6442450944, Budget(bytes=6 * 2**30)),
        ("6442450944", Budget(bytes=6 * 2**30)),
        ("6GiB", Budget(bytes=6 * 2**30)),
        ("512 MiB", Budget(bytes=512 * 2**20)),
        ("1.5GB", Budget(bytes=1_500_000_000)),
        ("0.1 KiB", Budget(bytes=102)),
        (" 2tib ", Budget(bytes=2 * 2**40)),
        ("4096.0", Budget(bytes=4096)),
        ("60%", Budget(percent=60.0)),
        ("12.5 %", Budget(percent=12.5)),
        ("100%", Budget(percent=100.0)),
    ],
)
def test_budget_means_what_it_says(value: str | int | None, expected: Budget | None) -> None:
    assert parse_budget(value) == expected


@pytest.mark.parametrize(
    "value",
    ["", " ", "nan", "inf", "-1", "-5%", "0", "0%", "100.1%", "nan%", "6Gib/s", "6 XB", "GiB", "1e9", "6,5GiB", "٣GiB"]
    + [
        0,
        -1,
        True,
        1.5,
        float("nan"),
        (),
        2**63,
        10**5000,
        "9" * 5000,
        "9999999999 TiB",
        "0.4B",
        "6GiB\0",
        "1.5",
        "1.5 b",
    ],
    ids=repr_short,
)
def test_a_wrong_budget_is_refused_with_what_is_valid(value: object) -> None:
    with pytest.raises(PolicyError, match="valid: .*6GiB|at least 1 byte|above 0%") as caught:
        parse_budget(value)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 250


def test_defaults_and_immutability() -> None:
    p = policy()
    assert (p.noise.gradient, p.noise.loss, p.storage.formats) == (0.1, 0.005, ("bf16", "fp8_e4m3"))
    with pytest.raises(ValidationError):
        p.name = "q"  # type: ignore[misc]
    assert Policy.model_validate(p.model_dump()) == p
    json.dumps(Policy.model_json_schema())


@pytest.mark.parametrize(
    ("values", "at", "words"),
    [
        ({"version": True}, ("version",), "whole number 1, not true"),
        ({"version": 1.0}, ("version",), "whole number 1, not 1.0"),
        ({"version": 2}, ("version",), "newer"),
        ({"version": 0}, ("version",), "must be one of 1, not 0"),
        ({"name": ""}, ("name",), "at least 1 character"),
        ({"name": 3}, ("name",), "must be text, not 3"),
        ({"formats": "fp32"}, ("formats",), "must be a list, not text 'fp32'"),
        ({"formats": ("bf16",)}, ("formats",), "fp32 must be among"),
        ({"formats": ("fp32", "fp32")}, ("formats", 1), "twice"),
        ({"formats": ("fp32", "fp8_e3m3")}, ("formats", 1), "make 7 bits, not 8"),
        ({"formats": ("fp32", "bf-16")}, ("formats", 1), "Did you mean 'bf16'"),
        (
            {"storage": {"formats": ("fp16",)}},
            ("storage", "formats", 0),
            "possible: bf16, fp8_e4m3, and formats of a byte or less",
        ),
        ({"storage": {"formats": ("fp8",)}}, ("storage", "formats", 0), "fp8_e4m3"),
        ({"storage": {"recomputed": True}}, ("storage", "recomputed"), "Did you mean 'recompute'"),
        ({"storage": {"recompute": "no"}}, ("storage", "recompute"), "true or false"),
        ({"objective": "tiem"}, ("objective",), "Did you mean 'time'"),
        ({"optimizer": "adamw2"}, ("optimizer",), "Did you mean 'adamw'"),
        ({"noise": {"gradient": 0}}, ("noise", "gradient"), "above 0.0, not 0"),
        ({"noise": {"gradient": True}}, ("noise", "gradient"), "must be a number, not true"),
        ({"noise": {"gradient": "1"}}, ("noise", "gradient"), "must be a number, not text '1'"),
        ({"noise": {"loss": float("inf")}}, ("noise", "loss"), "finite"),
        ({"noise": {"loss": float("nan")}}, ("noise", "loss"), "nan"),
        ({"noise": None}, ("noise",), "must be a mapping, not nothing"),
        ({"calibration": {"steps": 1}}, ("calibration", "steps"), "at least 2, not 1"),
        ({"calibration": {"steps": 8.0}}, ("calibration", "steps"), "must be a whole number, not 8.0"),
        ({"monitor": {"interval_steps": 501}}, ("monitor", "interval_steps"), "501 is more than window_steps 500"),
        ({"monitor": {"window_steps": 49}}, ("monitor", "window_steps"), "more than window_steps 49"),
        ({"monitor": {"saturation_frac": 1.0}}, ("monitor", "saturation_frac"), "below 1.0"),
        ({"guard": {"nonfinite": "skp"}}, ("guard", "nonfinite"), "Did you mean 'skip'"),
        ({"guard": {"patience_steps": 0}}, ("guard", "patience_steps"), "at least 1"),
        ({"budget": "6 XB"}, ("budget",), "6GiB"),
        ({"budget": 1.5}, ("budget",), "6GiB"),
        ({"scheduled": ()}, ("scheduled",), "Did you mean 'schedule'"),
        (
            {"schedule": ({"after": 1.5, "raise": "*", "to": "bf16"},)},
            ("schedule", 0, "after"),
            "whole number of steps",
        ),
        ({"schedule": ({"after": 0, "raise": "*", "to": "bf16"},)}, ("schedule", 0, "after"), "above 0.0"),
        ({"schedule": ({"after": True, "raise": "*", "to": "bf16"},)}, ("schedule", 0, "after"), "a number, not true"),
        ({"schedule": ({"after": 9, "to": "bf16"},)}, ("schedule", 0), "the key 'raise' is missing"),
        ({"schedule": ({"after": 9, "raise": "*", "to": "bf61"},)}, ("schedule", 0, "to"), "Did you mean 'bf16'"),
        ({"schedule": ({"after": 9, "raise": "*", "too": "bf16", "to": "bf16"},)}, ("schedule", 0, "too"), "'to'"),
        ({"guard": {"loss_spike": "halt"}}, ("guard", "loss_spike"), "must be one of report, skip"),
        ({"guard": {"spike_sigmas": 0}}, ("guard", "spike_sigmas"), "above 0.0"),
        ({"rules": ({"match": "*"},)}, ("rules", 0), "either a pin, or a floor or a ceiling or both; it has neither"),
        ({"rules": ({"pin": "bf16", "floor": "fp32"},)}, ("rules", 0), "it has both"),
        ({"rules": ({"pin": "fp16"},)}, ("rules", 0, "pin"), "not among the policy's formats (fp32, bf16)"),
        ({"rules": ({"pin": "fp8_e4m3"},)}, ("rules", 0, "pin"), "not among the policy's formats (fp32, bf16)"),
        ({"rules": ({"pin": "bf16", "roles": ("weight",)},)}, ("rules", 0, "roles", 0), "grad_weight"),
        ({"rules": ({"pin": "bf16", "ceiling": "fp32"},)}, ("rules", 0), "it has both"),
        ({"rules": ({"floor": "fp32", "ceiling": "bf16"},)}, ("rules", 0, "ceiling"), "no format is left"),
        ({"rules": ({"floor": "bf61"},)}, ("rules", 0, "floor"), "Did you mean 'bf16'"),
        ({"rules": ({"floor": "bf16", "kinds": ("a", 1)},)}, ("rules", 0, "kinds", 1), "must be text"),
        ({"rules": ({"floor": "bf16", "optional": 1},)}, ("rules", 0, "optional"), "must be true or false, not 1"),
    ],
)
def test_each_wrong_value_is_one_problem_at_its_place(
    values: dict[str, object], at: tuple[str | int, ...], words: str
) -> None:
    ((found, what),) = problems(**values)
    assert found == at
    assert words in what


def test_valid_edges_are_accepted() -> None:
    assert policy(formats=("fp32",)).formats == ("fp32",)
    assert policy(storage={"formats": ()}).storage == StorageOptions(formats=())
    assert policy(monitor={"interval_steps": 500}).monitor == Monitor(interval_steps=500)
    assert policy(noise={"gradient": 1}).noise.gradient == 1.0


def test_a_thousand_unknown_keys_are_all_told() -> None:
    assert len(problems(**{f"key{i}": 1 for i in range(1000)})) == 1000


@pytest.mark.parametrize(
    ("rule", "fqn", "kind", "expected"),
    [
        ({}, "a", "gelu", True),
        ({}, "", "gelu", True),
        ({"match": "*lm_head"}, "model.lm_head", "linear", True),
        ({"match": "lm_head"}, "model.lm_head", "linear", False),
        ({"match": "LM_head"}, "lm_head", "linear", False),
        ({"match": "LM_head"}, "LM_head", "linear", True),
        ({"match": "blocks.[01].*"}, "blocks.1.mlp", "linear", True),
        ({"match": "blocks.[01].*"}, "blocks.2.mlp", "linear", False),
        ({"kinds": ("linear", "conv2d")}, "a", "conv2d", True),
        ({"kinds": ("linear",)}, "a", "gelu", False),
        ({"match": "b", "kinds": ("linear",)}, "a", "linear", False),
    ],
)
def test_a_rule_matches_by_glob_and_kind(rule: dict[str, object], fqn: str, kind: str, expected: bool) -> None:
    assert Rule.model_validate({"floor": "bf16", **rule}).matches(op(fqn, kind)) is expected


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ({"pin": "bf16"}, {"bf16"}),
        ({"floor": "fp32"}, {"fp32"}),
        ({"floor": "bf16"}, {"fp32", "bf16", "fp16"}),
        ({"floor": "fp16"}, {"fp32", "bf16", "fp16"}),
        ({"floor": "fp8_e5m2"}, {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}),
        ({"ceiling": "bf16"}, {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}),
        ({"floor": "fp16", "ceiling": "bf16"}, {"bf16", "fp16"}),
    ],
)
def test_pin_is_equality_and_floor_is_width(rule: dict[str, str], allowed: set[str]) -> None:
    every = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
    assert {f for f in every if Rule.model_validate(rule).allows(f)} == allowed
    with pytest.raises(InputError, match="unknown format"):
        Rule(floor="bf16").allows("fp4")


def test_the_first_matching_rule_wins() -> None:
    first, second = {"match": "*head", "pin": "fp32"}, {"floor": "bf16"}
    p = policy(rules=(first, second))
    assert p.rule_for(op("lm_head")) == p.rules[0]
    assert p.rule_for(op("mlp")) == p.rules[1]
    assert policy(rules=(first,)).rule_for(op("mlp")) is None


def test_unused_rules_are_named_with_the_nearest_op() -> None:
    used, typo = {"match": "*norm", "floor": "fp32"}, {"match": "*lm_haed", "floor": "fp32"}
    kind = {"kinds": ("layernorm",), "floor": "fp32"}
    p = policy(rules=(used, typo, kind, {"match": "nothing", "floor": "fp32", "optional": True}))
    assert p.unused_rules(GRAPH) == (p.rules[1], p.rules[2])
    with pytest.raises(PolicyError) as caught:
        p.check_against(GRAPH)
    lines = str(caught.value).splitlines()
    assert "rules[1]" in lines[0] and "'lm_head'" in lines[0] and "rules[2]" in lines[1] and "'layer_norm'" in lines[1]
    assert "optional: true" in lines[2] and len(lines) == 3
    policy(rules=(used,)).check_against(GRAPH)
    with pytest.raises(PolicyError, match="no ops"):
        p.check_against(OpGraph(model="Empty", ops=(), tensors=()))


def test_where_no_name_is_like_it_some_are_told() -> None:
    with pytest.raises(PolicyError, match=r"None is like it; there are .*lm_head") as caught:
        policy(rules=({"match": "q7.q8.*", "floor": "fp32"},)).check_against(GRAPH)
    assert "Nearest" not in str(caught.value)


def test_a_schedule_that_matches_nothing_is_refused() -> None:
    """It would be said to have been applied, at the end of a long run."""
    p = policy(schedule=({"after": 9, "raise": "*norm", "to": "fp32"}, {"after": 9, "raise": "lm_haed*", "to": "fp32"}))
    with pytest.raises(PolicyError) as caught:
        p.check_against(GRAPH)
    line, help_ = str(caught.value).splitlines()
    assert "optional: true" in help_
    assert "schedule[1] (raise 'lm_haed*') matches no op" in line and "Nearest module: 'lm_head'" in line
    other = policy(schedule=(p.schedule[0], p.schedule[1].model_copy(update={"optional": True})))
    other.check_against(GRAPH)
    assert other.fingerprint == p.fingerprint  # it asks for the same


def test_the_fingerprint_is_of_what_is_asked_for() -> None:
    rule = {"match": "a", "floor": "fp32"}
    base = policy(rules=(rule,))
    assert base.fingerprint == policy(name="q", description="d", rules=({**rule, "why": "w"},)).fingerprint
    others = [{"objective": "bytes"}, {"noise": {"loss": 0.1}}, {"budget": 1}, {"rules": ()}, {"uncaptured": "report"}]
    assert len({base.fingerprint, *(base.replaced(**change).fingerprint for change in others)}) == 6


def test_replaced_validates() -> None:
    assert policy().replaced(budget="6GiB").budget == "6GiB"
    with pytest.raises(PolicyError) as caught:
        policy().replaced(budget="6 XB", noize=1)
    assert "'p': budget: " in str(caught.value) and "Did you mean 'noise'" in str(caught.value)


def test_no_torch_is_imported() -> None:
    code = "import sys, autoprec.policies, autoprec.serial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("part", "key", "meant"), [(Monitor, "windo_steps", "window_steps"), (Rule, "pinn", "pin")])
def test_an_unknown_key_of_a_part_is_held_against_its_own(part: type[Monitor | Rule], key: str, meant: str) -> None:
    with pytest.raises(PolicyError, match=f"unknown key '{key}'. Did you mean '{meant}'"):
        part(**{key: 1})
