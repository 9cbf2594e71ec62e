"""Seconds of each distinct op in each format, measured once on the device at hand, with the arithmetic that will run.

GEMMs with a weight are timed role by role; other ops forward and backward together, as their `output` role. What an
activation checkpoint recomputes runs forward as often as in a step. Medians of a few repeats after a warm-up; equal
layers share a timing key and are timed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autoprec.calibration.clocks import rounds, seconds_of
from autoprec.calibration.convolving import compiled_workspace, pieces
from autoprec.calibration.fusing import packs, product_runs, unpacks
from autoprec.calibration.structure import TensorMeta, TimingCase, tensors_of
from autoprec.devices import CastTiming, Device, NoKernel, OpTiming
from autoprec.execution.measuring import backward_workspace_bytes, workspace_bytes
from autoprec.formats import is_operands_only, is_scaled, result_format
from autoprec.graphs import OpClass, Role
from autoprec.numerics.contractions import weighted_product
from autoprec.numerics.convolutions import ConvOptions
from autoprec.numerics.dtypes import dtype_of, has_dtype, native_formats
from autoprec.numerics.gemm import matmul
from autoprec.numerics.lean import lean
from autoprec.numerics.norms import layer_norm, norm, takes_one_dtype
from autoprec.numerics.packing import Packed, decode, encode
from autoprec.numerics.specs import NORM_SIGNATURE, fit_scalars, gemm_spec, norm_call
from autoprec.numerics.switches import fp32_arithmetic
from autoprec.planning.remaking import is_repeatable
from autoprec.tracing.gemms import gemm_arguments
from autoprec.tracing.kinds import GROUPED, only_computes, out_of_place

__all__ = ["measure_casts", "time_ops"]

_FORMATS = ("fp32", "bf16", "fp16")

#: Always in the dtype that the user wrote.
_UNDECIDED = (OpClass.WIDE, OpClass.UNKNOWN)


#: Smaller differences between formats count as none; two timings of one op differ by about that much here.
_NOISE_FRAC = 0.1

#: What torch does instead is many small ops that round at each step, and takes ten times as long in FP16
#: (docs/measurements/recurrent.md).
_NO_FUSED_LSTM = "torch has no fused LSTM in it here"


def _has_fused_lstm(fmt: str, device_type: str) -> bool:
    """oneDNN trains LSTMs in FP32, and in BF16 where the CPU has it; cuDNN in all three."""
    return fmt in native_formats(device_type) and not (device_type == "cpu" and fmt == "fp16")


#: Elements of the tensors that casts are timed with: few, and what keeps the device busy for a while.
_CAST_SIZES = {"cpu": (1 << 12, 1 << 20), "cuda": (1 << 16, 1 << 26)}


def measure_casts(device_type: str, formats: Iterable[str] = (), *, fused: bool = False) -> Device:
    """A `Device` with its native formats and measured casts, into the given formats with a scale and out of them as
    well, E4M3 always among them; op timings are added by `time_ops`. Each pair is measured once in a process. `fused`:
    see `Device.fused_casts`."""
    narrow = dict.fromkeys(["fp8_e4m3", *(f for f in formats if is_scaled(f))])
    names = (*_FORMATS, *narrow)
    casts = tuple(_cast(device_type, a, b, fused) for a in names for b in names if a != b)
    name = torch.cuda.get_device_name() if device_type == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    native, switches = native_formats(device_type), fp32_arithmetic(device_type)
    return Device(name=name, type=device_type, native=native, casts=casts, fp32_products=switches, fused_casts=fused)


@cache
def _cast(device_type: str, source: str, target: str, fused: bool) -> CastTiming:
    device = torch.device(device_type)
    runs: list[Callable[[], object]] = []
    sizes = _CAST_SIZES[device_type]
    for n in sizes:
        x = torch.randn(n, device=device).to(dtype_of("fp32" if is_scaled(source) else source))
        if not is_scaled(source):
            dtype = None if is_scaled(target) else dtype_of(target)
            into = packs if fused and has_dtype(target) else encode
            runs.append(partial(into, x, target) if dtype is None else partial(x.to, dtype))
        elif fused and has_dtype(source) and not is_scaled(target):
            runs.append(partial(unpacks, encode(x, source).payload, source, dtype_of(target)))
        else:
            runs.append(partial(_again, encode(x, source), target))
    return _cast_timing(source, target, sizes, [seconds_of(run, device) for run in runs])


def _again(packed: Packed, target: str) -> object:
    """Out of a format with a scale, by way of BF16 into another one."""
    return encode(decode(packed, torch.bfloat16), target) if is_scaled(target) else decode(packed, dtype_of(target))


def _cast_timing(source: str, target: str, sizes: Sequence[int], seconds: Sequence[float]) -> CastTiming:
    per_element = max(seconds[1] - seconds[0], 0.0) / (sizes[1] - sizes[0])
    per_call = max(seconds[0] - per_element * sizes[0], 0.0)
    return CastTiming(source=source, target=target, seconds_per_element=per_element, seconds_per_call=per_call)


def time_ops(cases: Mapping[str, TimingCase], formats: Iterable[str], device: Device) -> Device:
    """The device with every case timed in every format that it may take; what it knows already is not timed again.

    The formats of one op are timed in turn, round by round, so that a drift of the machine's speed hits all of them.
    """
    known, missing = device.seconds_by_key, device.no_kernel_by_key
    timings: list[OpTiming] = []
    no_kernels: list[NoKernel] = []
    state = torch.get_rng_state()
    try:
        for key, case in cases.items():
            wanted = _candidates(case, formats)
            wanted = tuple(fmt for fmt in wanted if (key, fmt) not in missing)
            roles = case.op.roles or (Role.OUTPUT,)
            if any((key, role.value, fmt) not in known for fmt in wanted for role in roles):
                found, lacking = _time_case(key, case, wanted, device)
                timings += found
                no_kernels += lacking
    finally:
        torch.set_rng_state(state)
    # Timings from before a role was timed on its own count it elsewhere.
    taken = {(t.timing_key, t.format) for t in timings}
    kept = tuple(t for t in device.timings if (t.timing_key, t.format) not in taken)
    return replace(device, timings=kept).extended(tuple(timings), tuple(no_kernels))


def _candidates(case: TimingCase, formats: Iterable[str]) -> tuple[str, ...]:
    if case.op.inplace is not None:
        return ()
    if case.op.op_class in _UNDECIDED:  # but its seconds and its workspace count
        return ("fp32",) if only_computes(case.op.node) else ()
    if not case.op.roles:
        return ()
    taken = (f for f in formats if case.op.is_plain_product or not is_operands_only(f))
    return ("fp32",) if case.op.pinned else tuple(dict.fromkeys(("fp32", *taken)))


def _time_case(
    key: str, case: TimingCase, formats: Sequence[str], device: Device
) -> tuple[list[OpTiming], list[NoKernel]]:
    runs: dict[tuple[Role | None, str], Callable[[], object]] = {}
    found: dict[str, _Runs] = {}
    lacking: list[NoKernel] = []
    for fmt in formats:
        if case.op.op_class is OpClass.RECURRENT and not _has_fused_lstm(fmt, device.type):
            lacking.append(NoKernel(timing_key=key, format=fmt, reason=_NO_FUSED_LSTM))
            continue
        try:
            found[fmt] = _role_runs(case, fmt, device)
            for run in found[fmt].runs.values():
                run()
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError) as error:
            # torch's only sign of a missing kernel; its words become the plan's reason
            if case.op.op_class in _UNDECIDED:
                return [], []  # it does not take made-up values; nothing is decided for it
            if fmt == "fp32" or isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                raise
            found.pop(fmt, None)
            lacking.append(NoKernel(timing_key=key, format=fmt, reason=str(error).partition("\n")[0][:200]))
            continue
        for role, run in found[fmt].runs.items():
            runs[(role, fmt)] = run
        if (forward := found[fmt].forward) is not None:
            runs[(None, fmt)] = forward
    seconds = rounds(runs, torch.device(device.type))
    timings = [
        OpTiming(
            timing_key=key,
            role=role.value,
            format=fmt,
            seconds=_significant(taken, seconds.get((role, "fp32"), taken)),
            private_saved_bytes=found[fmt].private_bytes if role is Role.OUTPUT else None,
            workspace_bytes=found[fmt].workspace.get(role),
            backward_workspace_bytes=found[fmt].backward_workspace if role is Role.OUTPUT else None,
            mixed_workspace_bytes=found[fmt].mixed.get(role),
            piece_frac=found[fmt].piece_frac.get(role),
            compiled_workspace_bytes=found[fmt].compiled_workspace.get(role),
            forward_seconds=seconds.get((None, fmt)) if role is Role.OUTPUT else None,
        )
        for (role, fmt), taken in seconds.items()
        if role is not None
    ]
    return timings, lacking


def _significant(seconds: float, fp32: float) -> float:
    """FP32's seconds where the difference is within what repeated timings of one op differ by."""
    return fp32 if abs(seconds - fp32) <= _NOISE_FRAC * fp32 else seconds


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """What to time for each role of an op in one format, the bytes that it keeps privately, and its workspace by role.

    Ops that are not products have one role, forward and backward together, and `backward_workspace`; `forward` is one
    forward pass of those that may be made again. `mixed`, `piece_frac` and `compiled_workspace`: see `OpTiming`.
    """

    runs: dict[Role, Callable[[], object]]
    private_bytes: int
    workspace: dict[Role, int]
    backward_workspace: int = 0
    mixed: dict[Role, int] = field(default_factory=dict)
    piece_frac: dict[Role, float] = field(default_factory=dict)
    compiled_workspace: dict[Role, int] = field(default_factory=dict)
    forward: Callable[[], object] | None = None


@contextmanager
def _only(wanted: Sequence[Tensor], leaves: Sequence[Tensor]) -> Iterator[None]:
    """No other leaf requires a gradient."""
    others = [t for t in leaves if t.requires_grad and not any(t is w for w in wanted)]
    for t in others:
        t.requires_grad_(False)
    try:
        yield
    finally:
        for t in others:
            t.requires_grad_()


def _role_runs(case: TimingCase, fmt: str, on: Device) -> _Runs:
    forward, leaves, given = _callable(case, fmt, on.type)

    def once() -> None:
        with torch.no_grad():
            forward()

    def without_graph() -> None:
        for _ in range(1 + len(case.op.checkpoints)):
            once()

    y, private = _with_private_bytes(forward, given)
    device = torch.device(on.type)
    with torch.enable_grad():
        held = {Role.OUTPUT: workspace_bytes(forward, device)}
    ends = _differentiated(case, y)
    if not ends:
        nothing = {role: lambda: None for role in case.op.roles}
        return _Runs(runs=nothing | {Role.OUTPUT: without_graph}, private_bytes=private, workspace=held)
    # Gradients arrive in the order of the results.
    arriving = [torch.randn_like(y.detach(), dtype=torch.float32).to(y.dtype) for y in ends]

    def backward(ends: Sequence[Tensor], wanted: Sequence[Tensor]) -> Callable[[], object]:
        live = [t for t in wanted if t.requires_grad]
        if not live:
            return lambda: None
        return lambda: torch.autograd.grad(ends, live, arriving, retain_graph=True, allow_unused=True)

    @torch.enable_grad()
    def once_more() -> list[Tensor]:
        return _differentiated(case, forward())

    def backward_alone(wanted: Sequence[Tensor]) -> Callable[[], object]:
        """Of a graph in which nothing else takes a gradient: an autograd.Function makes every one that was ever
        wanted."""
        with _only(wanted, leaves), torch.enable_grad():
            return backward(_differentiated(case, forward()), wanted)

    roles: dict[Role, Callable[[], object]] = {Role.OUTPUT: without_graph}
    if case.op.gemm is not None:
        x, *parameters = leaves
        roles |= {Role.GRAD_INPUT: backward_alone([x]), Role.GRAD_WEIGHT: backward_alone(parameters)}
    elif case.op.op_class is OpClass.GEMM:
        roles[Role.GRAD_INPUT] = backward(ends, leaves)
    if len(roles) > 1:
        if case.op.gemm is None:
            held[Role.GRAD_INPUT] = backward_workspace_bytes(once_more, leaves, arriving, device)
        else:
            held |= {role: workspace_bytes(run, device) for role, run in roles.items() if role is not Role.OUTPUT}
        if case.op.kind in GROUPED and fmt == "fp32":  # may give both gradients, whichever is wanted
            held |= dict.fromkeys((Role.GRAD_INPUT, Role.GRAD_WEIGHT), workspace_bytes(backward(ends, leaves), device))
        mixed = _mixed(case, on.type) if fmt == "fp32" and case.op.is_plain_product else {}
        if case.op.gemm is not None and on.fused_casts and is_scaled(fmt) and fmt in on.native:
            fused = product_runs(leaves[0], leaves[1], case.op.gemm.how, fmt)
            roles |= {} if fused is None else {role: fused[role] for role in roles}
        found = _Runs(runs=roles, private_bytes=private, workspace=held, mixed=mixed)
        if case.op.gemm is None or not isinstance(case.op.gemm.how, ConvOptions) or on.type != "cpu":
            return found
        given_to = (case.op.gemm.how, fmt, on, leaves[0], leaves[1], ends[0])
        return replace(found, piece_frac=pieces(*given_to), compiled_workspace=compiled_workspace(*given_to))
    whole = backward(ends, leaves)
    runs: dict[Role, Callable[[], object]] = {Role.OUTPUT: lambda: (without_graph(), whole())}
    return _Runs(
        runs=runs,
        private_bytes=private,
        workspace=held,
        backward_workspace=backward_workspace_bytes(once_more, leaves, arriving, device),
        forward=once if is_repeatable(case.op.kind) else None,
    )


def _with_private_bytes(forward: Callable[[], Any], given: Sequence[Tensor]) -> tuple[Any, int]:
    """The result, and what is kept for its backward pass beside it and what it is given."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()  # an op's own result would keep the op alive, and the op it

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = forward()
    known = {t.untyped_storage().data_ptr() for t in (*given, *tensors_of(y))}
    return y, sum(size for pointer, size in kept.items() if pointer not in known)


def _differentiated(case: TimingCase, result: Any) -> list[Tensor]:
    """What an op's gradients are those of: of a recurrent layer's results the first, of which the states that follow
    are parts, but for the last cells."""
    found = [result[0]] if case.op.op_class is OpClass.RECURRENT else tensors_of(result)
    return [y for y in found if y.requires_grad]


def _mixed(case: TimingCase, device_type: str) -> dict[Role, int]:
    """Workspace of our own product in FP32, by gradient role: its backward pass makes one gradient after the other."""
    found, device = {}, torch.device(device_type)
    forward, (x, *parameters), _ = _callable(case, "fp32", device_type, ours=True)
    if case.op.gemm is None:  # of two activations
        with torch.enable_grad():
            y = forward()
        live = [t for t in (x, *parameters) if t.requires_grad]
        run = partial(torch.autograd.grad, y, live, torch.randn_like(y), retain_graph=True, allow_unused=True)
        return {Role.GRAD_INPUT: workspace_bytes(run, device)}
    needed = x.requires_grad
    for role, wanted in ((Role.GRAD_INPUT, [x]), (Role.GRAD_WEIGHT, parameters)):
        for t in (x, *parameters):
            t.requires_grad_(any(t is w for w in wanted) and (t is not x or needed))
        if live := [t for t in wanted if t.requires_grad]:
            with torch.enable_grad():
                y = forward()
            run = partial(torch.autograd.grad, y, live, torch.randn_like(y), retain_graph=True)
            found[role] = workspace_bytes(run, device)
    return found


def _callable(
    case: TimingCase, fmt: str, device_type: str, *, ours: bool = False
) -> tuple[Callable[[], Any], list[Tensor], list[Tensor]]:
    """A function that runs the op in `fmt`, the tensors whose gradients it gives, and all that it is given. `ours`: by
    our own product, also in FP32."""
    op, node, dtype = case.op, case.op.node, dtype_of(result_format(fmt))
    leaves: list[Tensor] = []
    given: list[Tensor] = []
    narrow_weights = fmt == "bf16" and takes_one_dtype(op.kind, device_type)

    def make(v: Any) -> Any:
        if not isinstance(v, TensorMeta):
            return v
        x = _like(v)
        if x.dtype is torch.float32:
            is_weight = bool(leaves) and op.op_class is OpClass.NORM
            keeps_fp32 = op.op_class is OpClass.LOOKUP or (is_weight and not narrow_weights)
            if op.gemm is None and not keeps_fp32:
                x = x.to(dtype)
            x.requires_grad_(v.requires_grad and x.dtype.is_floating_point)
            leaves.append(x)
        elif v.requires_grad:  # of the dtype that the user wrote
            leaves.append(x.requires_grad_())
        given.append(x)
        return x

    args, kwargs = fx.node.map_aggregate(case.args, make), fx.node.map_aggregate(case.kwargs, make)
    args, kwargs = fit_scalars(op.kind, args, fmt), fit_scalars(op.kind, kwargs, fmt)
    if op.gemm is not None:
        named = gemm_arguments(op.kind, args, kwargs)
        x, w, b = named["input"], named["weight"], named.get("bias")
        x = x.detach().to(dtype).requires_grad_(x.requires_grad)
        leaves[:] = [x, w] if b is None else [x, w, b]
        given.append(x)
        if fmt != "fp32" or ours:
            spec = gemm_spec({Role.OUTPUT: fmt}, device_type)
            copy = encode(x, fmt) if is_scaled(fmt) else None
            given += [] if copy is None else [copy.payload]
            offs = _even(named["offs"], x.shape[0]) if op.kind in GROUPED else None
            how = op.gemm.how
            return lambda: weighted_product(x, w, b, None, offs, spec, how, operand=copy), leaves, given
        own = {id(named["input"]): x}
        if op.kind in GROUPED:
            own[id(named["offs"])] = _even(named["offs"], x.shape[0])
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda v: own.get(id(v), v))
    if op.is_plain_product and (fmt != "fp32" or ours):
        spec = gemm_spec({Role.OUTPUT: fmt}, device_type)
        return lambda: matmul(leaves[0], leaves[-1], spec), leaves, given
    if op.op_class is OpClass.NORM and fmt == "fp16":
        named = dict(zip(NORM_SIGNATURE.get(op.kind, ()), args, strict=False)) | kwargs
        call = norm_call(op.kind, named, 0)
        if call is not None:
            x, *others = (named.get(n) for n in ("input", "weight", "bias", "running_mean", "running_var"))
            return lambda: norm(x, *others, call), leaves, given
    target = layer_norm if node.target is F.layer_norm and fmt != "fp32" else node.target
    if op.functional:
        target, args, kwargs = out_of_place(op.kind, target, args, kwargs)
    if fmt != "fp32":
        target = lean(target)
    if (op.op_class is OpClass.LOOKUP or op.kind in ("rms_norm", "instance_norm")) and fmt != "fp32":
        return lambda: target(*args, **kwargs).to(dtype), leaves, given
    if isinstance(target, str):
        return lambda: getattr(args[0], target)(*args[1:], **kwargs), leaves, given
    return lambda: target(*args, **kwargs), leaves, given


def _even(offs: Tensor, rows: int) -> Tensor:
    """Ends of groups of equal size."""
    ends = torch.arange(1, len(offs) + 1, device=offs.device) * rows // len(offs)
    return ends.to(offs.dtype)


def _like(meta: TensorMeta) -> Tensor:
    """Random values of the same shape and strides; zeros for integers and booleans (valid indices)."""
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        # Positive, because variances are among the arguments of norms.
        values = torch.rand(meta.shape, dtype=meta.dtype, device=meta.device).mul_(0.75).add_(0.25)
        if 0 in meta.stride:
            return values
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(values)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
