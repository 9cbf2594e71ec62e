"""`autoprec schema`: it takes what autoprec takes, and refuses wrong types and unknown keys as autoprec does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from autoprec.policies import Policy
from autoprec.policy_problems import policy_problems
from autoprec.serial import policy_names, policy_path, policy_schema
from tests.campaigns.mutations import RICH_POLICY, mutate

Run = Callable[..., tuple[int, str, str]]
Tree = dict[str, Any]

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    3,
    -1,
    0.5,
    "",
    "text",
    "fp32",
    "6GiB",
    [],
    ["fp32"],
    ["x", 1],
    {},
    {"x": 1},
)


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = policy_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def refusals(tree: Tree) -> list[str]:
    """Kinds of problems that autoprec has with a policy, as pydantic calls them; "autoprec" is a law between values."""
    try:
        Policy.model_validate(tree)
    except ValidationError as error:
        assert list(policy_problems(error, Policy))
        return [str(e["type"]) for e in error.errors()]
    return []


def agree(validator: Draft202012Validator, tree: Tree) -> str:
    """What happened to a policy in both hands."""
    kinds, valid = refusals(tree), validator.is_valid(tree)
    if not kinds:
        assert valid, (tree, next(validator.iter_errors(tree)))
        return "taken"
    if {*kinds} - {"autoprec"}:
        assert not valid, (kinds, tree)
        return "refused"
    return "refused by both" if not valid else "by autoprec alone"


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_that_comes_with_autoprec_is_valid(name: str, validator: Draft202012Validator) -> None:
    tree = yaml.safe_load(Path(policy_path(name)).read_text(encoding="utf-8"))
    validator.validate(tree)
    assert agree(validator, tree) == "taken"


def inside(tree: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Places of all values, the root's apart."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from inside(value, (*at, key))


def changed(tree: Tree, at: tuple[str | int, ...], value: Any) -> Tree:
    made: Any = copy.deepcopy(tree)
    holder = made
    for part in at[:-1]:
        holder = holder[part]
    holder[at[-1]] = value
    return made


def test_every_value_in_every_place(validator: Draft202012Validator) -> None:
    assert agree(validator, RICH_POLICY) == "taken"
    seen: dict[str, int] = {}
    for at in inside(RICH_POLICY):
        for value in VALUES:
            what = agree(validator, changed(RICH_POLICY, at, value))
            seen[what] = seen.get(what, 0) + 1
    assert seen["taken"] > 30 and seen["refused"] > 300 and seen["refused by both"] > 20, seen
    # Laws that a schema cannot say: a pin among the formats, an interval within its window, a budget's percentage.
    assert seen.get("by autoprec alone", 0) < 20, seen


def test_unknown_and_missing_keys(validator: Draft202012Validator) -> None:
    for at in [(), *inside(RICH_POLICY)]:
        here: Any = RICH_POLICY
        for part in at:
            here = here[part]
        if isinstance(here, dict):
            assert agree(validator, changed(RICH_POLICY, (*at, "formatz"), 1)) == "refused"
    for key in RICH_POLICY:
        agree(validator, {k: v for k, v in RICH_POLICY.items() if k != key})


def test_the_campaigns_mutations(validator: Draft202012Validator) -> None:
    chance = Random(0)
    outcomes = []
    for _ in range(1500):
        candidate = mutate(RICH_POLICY, chance)
        # 3.0 is a whole number to a schema, and .inf a number.
        if isinstance(candidate, dict) and not any(
            isinstance(v, float) and (v != v or v in (float("inf"), -float("inf")) or v.is_integer())
            for v in leaves(candidate)
        ):
            outcomes.append(agree(validator, candidate))
    assert len(outcomes) > 800 and {"taken", "refused"} <= set(outcomes)


def leaves(tree: Any) -> Iterator[Any]:
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else [tree]:
        yield from [value] if not isinstance(value, (dict, list, tuple)) else leaves(value)


@pytest.mark.parametrize("rule", [{"pin": "bf16", "floor": "fp32"}, {}, {"pin": None, "floor": None}])
def test_a_rule_has_one_of_pin_and_floor(rule: Tree, validator: Draft202012Validator) -> None:
    assert agree(validator, {**RICH_POLICY, "rules": [rule]}) == "refused by both"
    for given in ({"pin": "bf16", "floor": None}, {"floor": "fp32"}):
        assert agree(validator, {**RICH_POLICY, "rules": [given]}) == "taken"


@pytest.mark.parametrize("budget", ["6GiB", " 512 MiB ", "1.5gb", "60%", "7", "7 b", 1, 2**63 - 1, "1 KB", "0.5TIB"])
def test_budgets_that_are_valid(budget: Any, validator: Draft202012Validator) -> None:
    assert agree(validator, {**RICH_POLICY, "budget": budget}) == "taken"


@pytest.mark.parametrize("budget", ["", "GiB", "6 GB iB", "1e3", "-1", "6 XB", "1,5GB", "1_0", "1.5", 0, 2**63, "٣GB"])
def test_budgets_that_are_not(budget: Any, validator: Draft202012Validator) -> None:
    assert agree(validator, {**RICH_POLICY, "budget": budget}) == "refused by both"


def test_every_key_is_described() -> None:
    schema = policy_schema()
    for name, part in [("policy", schema), *schema["$defs"].items()]:
        for key, said in part["properties"].items():
            assert len(said.get("description", "")) > 10, f"{name}.{key}"
    assert set(schema["properties"]) == set(Policy.model_fields)


def test_the_command_prints_it_or_writes_it(run: Run) -> None:
    code, out, err = run("schema")
    assert (code, err) == (0, "") and json.loads(out) == policy_schema()
    code, said, _ = run("schema", "-o", "policy.schema.json")
    assert code == 0 and Path("policy.schema.json").read_text() == out
    assert "# yaml-language-server: $schema=policy.schema.json" in said
    code, said, _ = run("schema", "-o", "policy.schema.json", "--json")
    assert json.loads(said)["schema"] == "policy.schema.json"
    code, _, err = run("schema", "-o", "no/such/folder/x.json")
    assert code == 2 and "no/such/folder/x.json: its directory does not exist" in err
