"""What planning commands read: profile with graph, timings and policy, ready to plan from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.cli.calibrating import device_path
from autoprec.devices import Device
from autoprec.errors import DeviceError
from autoprec.graphs import OpGraph
from autoprec.planning.problem import optimizer_bytes
from autoprec.policies import Policy
from autoprec.profiles import Profile
from autoprec.serial import load_policy, read_device, read_profile

__all__ = ["Inputs", "read_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a plan is made from; the policy's rules have been checked against the graph."""

    graph: OpGraph
    profile: Profile
    device: Device
    policy: Policy


def read_inputs(profile: Path, policy: str, budget: str | None, device: Path | None) -> Inputs:
    """Read the files; `InputError` names the first that is not valid."""
    chosen = load_policy(policy)
    if budget is not None:
        chosen = chosen.replaced(budget=budget)
    seen, graph = read_profile(profile)
    beside = device_path(profile)
    if device is None and not beside.exists():
        raise DeviceError(f"{beside}: there are no timings beside {profile}; name them with --device FILE")
    timings = read_device(device or beside)
    graph = _with_optimizer(graph, chosen)
    chosen.check_against(graph)
    return Inputs(graph=graph, profile=seen, device=timings, policy=chosen)


def _with_optimizer(graph: OpGraph, policy: Policy) -> OpGraph:
    """The graph with the state of the optimizer that the policy names: there is none to look at offline."""
    if graph.optimizer_bytes:
        return graph
    return replace(graph, optimizer_bytes=optimizer_bytes(policy.optimizer, graph.gradient_bytes))
