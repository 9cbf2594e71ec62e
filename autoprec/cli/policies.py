"""`autoprec check` and `autoprec schema`: what is wrong with a policy, and what one may hold."""

from __future__ import annotations

import json
from pathlib import Path

from rich.text import Text

from autoprec.cli.calibrating import device_path
from autoprec.cli.output import show
from autoprec.devices import Device
from autoprec.errors import InputError
from autoprec.planning.rules import Finding, policy_findings, rule_findings, rule_uses, undecided
from autoprec.reporting.policies import check_data, check_tables
from autoprec.serial import load_policy, policy_path, policy_schema, read_device, read_profile, rule_places, write_text

__all__ = ["show_check", "show_schema"]


def show_check(policy: str, profile: Path | None, device: Path | None, *, as_json: bool) -> int:
    """Check a policy on its own, and on the graph of a profile; 1 if something has to be mended."""
    chosen = load_policy(policy)
    places = rule_places(policy_path(policy))
    findings, uses, without = policy_findings(chosen), None, 0
    if profile is not None:
        seen, graph = read_profile(profile)
        beside = device_path(profile)
        if device is None and not beside.exists():
            what = f"there are no timings beside {profile}: kernels that are missing were not looked for"
            findings = (*findings, Finding(level="note", what=what))
            timings = Device(name="unknown", type="cpu", native=("fp32",))
        else:
            timings = read_device(device or beside)
        findings += rule_findings(chosen, graph, seen, timings)
        uses = rule_uses(chosen, graph)
        without = undecided(chosen, graph)
    data = check_data(chosen, places, findings, uses, without)
    tables = check_tables(chosen, places, findings, uses, without)
    show({"file": str(policy_path(policy)), **data}, *tables, as_json=as_json)
    return 0 if data["ok"] else 1


def show_schema(out: Path | None, *, as_json: bool) -> int:
    """Print the schema, or write it and say so."""
    text = json.dumps(policy_schema(), indent=2, ensure_ascii=False)
    if out is None:
        print(text)
        return 0
    write_text(out, text + "\n", InputError)
    use = f"# yaml-language-server: $schema={out}"
    show({"schema": str(out), "first_line": use}, Text(f"schema   {out}\nuse      {use}"), as_json=as_json)
    return 0
