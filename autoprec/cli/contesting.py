"""`autoprec plan PROFILE --target TARGET`: the proposals run against each other, here."""

from __future__ import annotations

from autoprec.cli.inputs import Inputs
from autoprec.cli.output import progress_console
from autoprec.errors import InputError
from autoprec.graphs import OpGraph
from autoprec.planning.proposals import Proposals
from autoprec.plans import Plan

__all__ = ["contested"]

#: Batches that are run to know what to replay: one shows the modules that are captured on their own, where there are
#: some, and of one the loss is measured.
_STEPS = 2


def contested(target: str, given: Inputs, proposals: Proposals) -> Plan:
    """The winner on a replayed step of the target, in the lowering that was planned for. Raises `InputError` if the
    profile is of another model, or of batches of other sizes."""
    if given.device.source != "measured":
        raise InputError(
            f"--target runs the plans on this machine, and the seconds are those of {given.device.name}, modelled from"
            " a datasheet: leave out --target, or --device"
        )
    import autoprec
    from autoprec.budgeting import tournament_of
    from autoprec.cli.targets import load_target
    from autoprec.scheduling import contest

    with progress_console().status("importing the target") as status:
        found = load_target(target)
        model = autoprec.compile(
            found.model,
            # A schedule may name shares of steps, which nobody takes here.
            policy=given.policy.replaced(calibration={"steps": _STEPS}, schedule=()),
            backend="inductor" if given.graph.compiled else "eager",
            events=None,
        )
        session = autoprec.session(model)
        status.update("running a step to replay")
        with found.running():
            session.calibrate(found.batches, found.loss_fn)
        _check_same(target, given.graph, session.graph)
        status.update("compiling the plans and running them" if given.graph.compiled else "running the plans")
        return contest(proposals, tournament_of(session))


def _check_same(target: str, profiled: OpGraph, here: OpGraph | None) -> None:
    assert here is not None
    if here.fingerprint != profiled.fingerprint:
        known, now = {op.id for op in profiled.ops}, {op.id for op in here.ops}
        differs = sorted(known ^ now)
        what = f"{differs[0]} is only in {'the profile' if differs[0] in known else 'the target'}" if differs else ""
        raise InputError(
            f"{target}: {here.model} is not the {profiled.model} of the profile ({len(now)} and {len(known)} ops"
            f"{'; ' if what else ''}{what}): calibrate this target"
        )
    shapes = {t.id: t.shape for t in here.tensors}
    for t in profiled.tensors:
        if shapes.get(t.id, t.shape) != t.shape:
            raise InputError(
                f"{target}: {t.id} is {list(shapes[t.id])} here and {list(t.shape)} in the profile: calibrate with"
                " batches of these sizes"
            )
