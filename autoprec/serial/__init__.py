"""Strict reading and atomic writing of policies, plans, devices, datasheets, profiles, cases, states and events."""

from autoprec.serial.cases import check_case_path, read_case, write_case
from autoprec.serial.files import check_apart, check_writable, write_text
from autoprec.serial.profiles import read_profile, write_profile
from autoprec.serial.schemas import policy_schema
from autoprec.serial.states import read_state, state_from_parts, state_parts, write_state
from autoprec.serial.values import (
    datasheet_names,
    event_from_json_line,
    event_to_json_line,
    load_device,
    load_policy,
    policy_names,
    policy_path,
    read_datasheet,
    read_device,
    read_plan,
    read_policy,
    rule_places,
    write_device,
    write_plan,
)

__all__ = [
    "check_case_path",
    "check_apart",
    "check_writable",
    "datasheet_names",
    "event_from_json_line",
    "event_to_json_line",
    "load_device",
    "load_policy",
    "policy_names",
    "policy_path",
    "policy_schema",
    "read_case",
    "read_datasheet",
    "read_device",
    "read_plan",
    "read_policy",
    "read_profile",
    "read_state",
    "rule_places",
    "state_from_parts",
    "state_parts",
    "write_case",
    "write_device",
    "write_plan",
    "write_profile",
    "write_state",
    "write_text",
]
