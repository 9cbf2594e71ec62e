"""What planning commands read: profile with graph, timings and policy, ready to plan from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.cli.calibrating import device_path
from autoprec.devices import Device
from autoprec.errors import DeviceError
from autoprec.graphs import OpGraph
from autoprec.planning.problem import optimizer_bytes
from autoprec.planning.roofline import modelled_device
from autoprec.planning.rules import for_compiled
from autoprec.policies import Policy
from autoprec.profiles import Profile
from autoprec.serial import datasheet_names, load_device, load_policy, read_profile

__all__ = ["Inputs", "read_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a plan is made from; the policy's rules have been checked against the graph. `memory_bytes`: the budget
    where the policy has none, a datasheet's; None for no limit."""

    graph: OpGraph
    profile: Profile
    device: Device
    policy: Policy
    memory_bytes: int | None = None


def read_inputs(profile: Path, policy: str, budget: str | None, device: Path | None, compiled: bool | None) -> Inputs:
    """Read the files; `InputError` names the first that is not valid. `compiled`: whether the step will be; None for
    as it was calibrated."""
    chosen = load_policy(policy)
    if budget is not None:
        chosen = chosen.replaced(budget=budget)
    seen, graph = read_profile(profile)
    beside = device_path(profile)
    if device is None and not beside.exists():
        raise DeviceError(
            f"{beside}: there are no timings beside {profile}; name them with --device FILE, or a device whose"
            f" datasheet is here: {', '.join(datasheet_names())}"
        )
    timings, memory_bytes = _timings(device or beside, graph)
    graph = _with_optimizer(graph, chosen)
    if compiled is not None:
        graph = replace(graph, compiled=compiled)
    if graph.compiled:
        chosen = for_compiled(chosen)
    chosen.check_against(graph)
    own = memory_bytes if chosen.budget is None else None
    return Inputs(graph=graph, profile=seen, device=timings, policy=chosen, memory_bytes=own)


def _timings(device: Path, graph: OpGraph) -> tuple[Device, int | None]:
    """The device with its seconds, and the memory of a datasheet's."""
    found = load_device(device)
    if isinstance(found, Device):
        return found, None
    memory = found.memory_bytes
    return modelled_device(found, graph), None if memory is None else int(memory.value)


def _with_optimizer(graph: OpGraph, policy: Policy) -> OpGraph:
    """The graph with the state of the optimizer that the policy names: there is none to look at offline."""
    if graph.optimizer_bytes:
        return graph
    return replace(graph, optimizer_bytes=optimizer_bytes(policy.optimizer, graph.gradient_bytes))
