"""`autoprec check`: what is wrong with a policy, alone and on a graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.graphs import Op, OpClass
from autoprec.planning.options import decides
from autoprec.planning.rules import policy_findings
from autoprec.policies import Policy, Rule
from autoprec.serial import policy_names
from tests.test_cli_why_not import made_case
from tests.test_house import ROOT

Run = Callable[..., tuple[int, str, str]]


def check(run: Run, text: str, *more: str, name: str = "policy.yaml") -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and text for a policy's rules (or whole text)."""
    head = "" if "formats:" in text else "name: mine\nformats: [fp32, bf16, fp16]\n"
    Path(name).write_text(head + text)
    code, out, err = run("check", name, *more, "--json")
    text_code, said, _ = run("check", name, *more)
    assert code == text_code and err == ""
    return code, json.loads(out), " ".join(said.split())


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_that_comes_with_autoprec_passes(name: str, run: Run, profile: str) -> None:
    for arguments in ((name,), (ROOT / "policies" / f"{name}.yaml",), (name, profile)):
        code, out, err = run("check", *arguments)
        assert (code, err) == (0, ""), out
        assert out.endswith(f"{name}: nothing is wrong\n")


def test_a_rule_behind_one_that_matches_everything_is_shadowed(run: Run) -> None:
    rules = 'rules:\n  - {match: "blocks.*", pin: bf16}\n  - {match: "blocks.3.*", kinds: [linear], floor: fp32}\n'
    code, data, said = check(run, rules)
    assert code == 1 and not data["ok"]
    assert [(f["level"], f["rule"], f["at"]) for f in data["findings"]] == [("problem", 1, "policy.yaml:5:5")]
    assert (
        "certainly shadowed: whatever it matches, rules[0] (match 'blocks.*') matches before, and says otherwise"
        in said
    )
    assert said.endswith("mine: 1 problem")
    code, data, said = check(run, rules.replace("floor: fp32", "pin: bf16"))
    assert code == 1 and "and says the same" in said


@pytest.mark.parametrize(
    "rules",
    [
        '  - {match: "blocks.3.*", pin: bf16}\n  - {match: "blocks.*", floor: fp32}\n',  # the narrow one first
        '  - {match: "*", kinds: [linear], pin: bf16}\n  - {match: "*head", floor: fp32}\n',  # kinds are open
        '  - {match: "*", kinds: [linear], pin: bf16}\n  - {kinds: [linear, conv2d], floor: fp32}\n',
        '  - {match: "a*", pin: bf16}\n  - {match: "*a", floor: fp32}\n',
    ],
)
def test_a_rule_that_can_still_apply_is_not_shadowed(run: Run, rules: str) -> None:
    code, data, _ = check(run, f"rules:\n{rules}")
    assert code == 0 and data["findings"] == []


def test_rules_shadow_together(run: Run) -> None:
    text = (
        "rules:\n  - {kinds: [linear], pin: bf16}\n  - {kinds: [conv2d], pin: fp16}\n"
        "  - {match: x, kinds: [conv2d, linear], floor: fp32}\n"
    )
    code, data, said = check(run, text)
    assert code == 1 and data["findings"][0]["rule"] == 2
    assert "rules[0] (match '*', kinds linear), rules[1] (match '*', kinds conv2d) matches before" in said


def test_a_shadowed_rule_never_decides_an_op() -> None:
    """The proof against the policy itself, on names and kinds that could be anything."""
    names = ["", "a", "b", "a.b", "b.a", "a.b.a", "ab"]
    globs = ["*", "a*", "*b", "a.*", "?", "a", "*.*"]
    shadowed = 0
    for i in range(0, 7**3 * 4, 5):
        a, b, c = globs[i % 7], globs[i // 7 % 7], globs[i // 49 % 7]
        kinds = [(), ("linear",), ("linear", "gelu")][i % 3]
        rules = (
            Rule(match=a, kinds=("linear",), pin="bf16"),
            Rule(match=b, pin="fp32"),
            Rule(match=c, kinds=kinds, pin="bf16"),
        )
        policy = Policy(name="x", formats=["fp32", "bf16"], rules=rules)
        found = {f.rule for f in policy_findings(policy) if "shadowed" in f.what}
        shadowed += len(found)
        ops = [
            Op(id=f"{n}:{k}#0", kind=k, op_class=OpClass.GEMM, fqn=n, inputs=(), outputs=())
            for n in names
            for k in ("linear", "gelu", "conv2d")
        ]
        for k in found:
            assert not any(policy.rule_for(op) is policy.rules[k] for op in ops if k is not None)
    assert shadowed > 50


def test_a_floor_that_limits_nothing_and_a_storage_that_saves_nothing_are_notes(run: Run) -> None:
    code, data, said = check(run, 'rules:\n  - {match: "x*", floor: fp8_e4m3}\n  - {pin: bf16}\n')
    assert code == 0 and data["ok"] and {f["level"] for f in data["findings"]} == {"note"}
    assert "floor fp8_e4m3 limits nothing" in said and "storage bf16 is not narrower than bf16" in said


def test_a_budget_that_nothing_can_keep(run: Run) -> None:
    text = "name: x\nformats: [fp32]\nbudget: 6GiB\nstorage: {formats: [], recompute: false}\n"
    code, _, said = check(run, text)
    assert code == 1 and "there is nothing to choose" in said
    for lowers in ("recompute: true", "frozen: [bf16]"):
        code, _, said = check(run, text.replace("recompute: false", lowers))
        assert code == 0, said


def test_an_op_whose_roles_are_two_rules_is_counted_once(run: Run, profile: str) -> None:
    rules = """rules:
  - {match: "*", kinds: [linear], roles: [grad_weight], pin: fp32}
  - {match: "*", ceiling: bf16, floor: bf16}
"""
    code, data, said = check(run, rules, profile)
    assert code == 0 and data["ops_without_a_rule"] == 0, said
    assert "floor bf16, ceiling bf16" in said and "None" not in said
    alone = "\n".join(rules.splitlines()[:2]) + "\n"
    _, data, _ = check(run, alone, profile)
    everything = sum(decides(op, made_case().graph) for op in made_case().graph.ops)
    assert data["ops_without_a_rule"] == everything  # each has another role, or is no linear


def test_roles_that_no_op_has_are_named(run: Run, profile: str) -> None:
    kind = next(op for op in made_case().graph.ops if op.roles == ("output",))
    rules = f'rules:\n  - {{match: "{kind.fqn}", kinds: [{kind.kind}], roles: [grad_weight], pin: fp32}}\n'
    _, _, said = check(run, rules, profile)
    assert f"the first {kind.id}, which have output, and not grad_weight" in said


def test_bad_files_are_bad_input(run: Run, tmp_path: Path) -> None:
    for text, words in (
        (
            "rules:\n  - {pin: bf16, floor: fp32}\n",
            "policy.yaml:4:5: rules[0]: a rule needs either a pin, or a floor",
        ),
        ("name: x\nformats: [fp32]\nrules:\n  - {pin: bf16}\n", "bf16 is not among the policy's formats"),
        ("name: x\nformats: [fp32]\nrulez: []\n", "Did you mean 'rules'?"),
    ):
        Path("policy.yaml").write_text(("" if "formats:" in text else "name: x\nformats: [fp32, bf16]\n") + text)
        code, out, err = run("check", "policy.yaml")
        assert (code, out) == (2, "") and words in err
    assert run("check", "memry")[0] == 2
    assert run("check", "memory", "gone.safetensors")[0] == 2


# On a graph ----------------------------------------------------------------------------------------------------------


def test_what_each_rule_does_on_a_graph(run: Run, profile: str) -> None:
    graph = made_case().graph
    text = (
        "rules:\n  - {match: ruld, pin: bf16}\n  - {match: gone, pin: bf16, optional: true}\n"
        "  - {kinds: [linear], floor: bf16}\n  - {match: first, floor: fp32}\n  - {match: loss, floor: fp32}\n"
    )
    code, data, said = check(run, text, profile)
    levels = {(f["rule"], f["level"]) for f in data["findings"]}
    assert code == 1 and levels >= {(0, "problem"), (1, "note"), (3, "problem"), (4, "note")}
    assert "rules[0] (match 'ruld'): matches no op of Made. Nearest module: 'ruled'." in said
    assert "rules[3] (match 'first'): decides nothing: rules[2] matched every one of its 1 ops before" in said
    assert "rules[4] (match 'loss'): decides nothing: none of the 1 ops that it matches takes a format" in said
    counts = {r["rule"]: (r["matches"], r["decides"]) for r in data["rules"]}
    assert counts == {0: (0, 0), 1: (0, 0), 2: (3, 3), 3: (1, 0), 4: (1, 0)}
    with_units = sum(decides(op, graph) for op in graph.ops)
    assert data["ops_without_a_rule"] == with_units - 3


def test_every_op_that_is_left_without_a_format_is_named(run: Run, profile: str) -> None:
    code, data, said = check(run, "rules:\n  - {match: act, pin: fp16}\n  - {match: wide, pin: fp16}\n", profile)
    wrong = [f for f in data["findings"] if f["level"] == "problem"]
    assert code == 1 and [f["rule"] for f in wrong] == [0, 1]
    assert "act:gelu#1, role output: rule (match 'act') leaves no format" in said and "fp16 overflows" in said
    # The same sentence as plan's.
    planned = run("plan", profile, "--policy", "policy.yaml")
    assert planned[0] == 1 and wrong[0]["what"] in planned[2]


def test_without_timings_missing_kernels_are_not_looked_for(run: Run, profile: str) -> None:
    Path("p.safetensors.device.json").rename("d.json")
    code, data, said = check(run, "rules:\n  - {match: act, pin: fp16}\n", profile)
    assert code == 0 and "kernels that are missing were not looked for" in said
    assert check(run, "rules:\n  - {match: act, pin: fp16}\n", profile, "--device", "d.json")[0] == 1
