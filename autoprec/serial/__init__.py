"""Strict reading and atomic writing of policies, plans, devices, datasheets, profiles and events."""

from autoprec.serial.files import check_writable
from autoprec.serial.profiles import read_profile, write_profile
from autoprec.serial.values import (
    datasheet_names,
    event_from_json_line,
    event_to_json_line,
    load_device,
    load_policy,
    policy_names,
    read_datasheet,
    read_device,
    read_plan,
    read_policy,
    write_device,
    write_plan,
)

__all__ = [
    "check_writable",
    "datasheet_names",
    "event_from_json_line",
    "event_to_json_line",
    "load_device",
    "load_policy",
    "policy_names",
    "read_datasheet",
    "read_device",
    "read_plan",
    "read_policy",
    "read_profile",
    "write_device",
    "write_plan",
    "write_profile",
]
