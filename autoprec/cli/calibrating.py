"""`autoprec calibrate`: observe a model, and write what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from autoprec.cli.output import progress_console, show

__all__ = ["device_path", "target_path", "write_calibration"]


def device_path(profile: Path) -> Path:
    """Where the timings lie that belong to a profile."""
    return profile.with_name(profile.name + ".device.json")


def target_path(target: str | None) -> Path | None:
    """The file of a TARGET that names one."""
    return None if target is None else Path(target.rpartition(":")[0])


def write_calibration(target: str, out: Path, policy: str, device_out: Path | None, *, as_json: bool) -> int:
    """Calibrate TARGET; write the profile with its graph, and the timings of its ops beside it."""
    from autoprec.errors import DeviceError, ProfileError
    from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS
    from autoprec.serial import check_apart, check_writable, load_policy, policy_path, write_device, write_profile

    # Timed in every format, so that any policy can plan from these files.
    chosen = load_policy(policy)
    formats = tuple(dict.fromkeys((*COMPUTE_FORMATS, *chosen.formats)))
    kept = tuple(dict.fromkeys((*STORAGE_FORMATS, "fp8_e5m2", *chosen.storage.formats)))
    storage = chosen.storage.model_copy(update={"formats": kept})
    chosen = chosen.replaced(formats=formats, storage=storage, schedule=())  # whose shares of steps nobody takes here
    device_out = device_out or device_path(out)
    read = {"the target": target_path(target), "the policy": policy_path(policy)}
    check_apart({"the profile": out, "the timings": device_out}, read)
    check_writable(out, ProfileError)
    check_writable(device_out, DeviceError)
    session = _observed(target, chosen)
    write_profile(out, session.profile, session.graph)
    write_device(device_out, session.device)
    graph, profile = session.graph, session.profile
    data: dict[str, Any] = {
        "profile": str(out),
        "device": str(device_out),
        "device_name": session.device.name,
        "model": graph.model,
        "steps": profile.steps,
        "ops": len(graph.ops),
        "tensors": len(profile.tensors),
        "timings": len(session.device.timings),
        "unknown_kinds": sorted({op.kind for op in graph.ops if op.op_class == "unknown"}),
    }
    lines = [
        f"{graph.model}: {data['ops']} ops observed over {profile.steps} steps, {data['timings']} timings on"
        f" {session.device.name}",
        f"profile  {out}",
        f"device   {device_out}",
        f"next     autoprec plan {out}" + (f" --device {device_out}" if device_out != device_path(out) else ""),
    ]
    if data["unknown_kinds"]:
        lines.append(f"kinds that run in fp32 because autoprec does not know them: {', '.join(data['unknown_kinds'])}")
    show(data, Text("\n".join(lines)), as_json=as_json)
    return 0


def _observed(target: str, policy: Any) -> Any:
    """The session of the compiled model, with profile, graph and device."""
    import autoprec
    from autoprec.cli.targets import load_target

    with progress_console().status("importing the target") as status:
        found = load_target(target)
        model = autoprec.compile(found.model, policy=policy, events=None)
        session = autoprec.session(model)
        status.update("observing forward and backward passes")
        with found.running():
            session.calibrate(found.batches, found.loss_fn)
        status.update("timing each distinct op in each format")
        session.measure_device()
    return session
