"""Frozen parameters that live in a narrow format, without an FP32 copy.

To everybody but our products such a parameter is the float32 tensor that its bytes decode to: it is decoded where it is
read, and encoded again, with a new scale, where somebody writes into it. It stays the same Python object under the same
name, so optimizers, modules and guards that know it still do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoprec.errors import InputError
from autoprec.formats import is_scaled
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.packing import Packed, decode, encode

__all__ = ["NarrowParameter", "format_held", "narrow", "narrow_like", "packed_of", "widen"]

_aten = torch.ops.aten

#: What only looks at all of a tensor in another way is another way to look at its bytes; and at a part of it.
_OF_ALL = {
    _aten.alias.default, _aten.detach.default, _aten.permute.default, _aten.t.default, _aten.transpose.int,
    _aten.unsqueeze.default, _aten.view.default,
}  # fmt: skip
_OF_A_PART = {_aten.expand.default, _aten.select.int, _aten.slice.Tensor, _aten.squeeze.dim}


class NarrowParameter(Tensor):
    """A float32 tensor that is held as `packed`: `payload`, `inverse_scale` and `format`. Made by `narrow`."""

    def __new__(cls, packed: Packed, *, whole: bool = True) -> NarrowParameter:
        """`whole`: whether it is all that has this scale."""
        payload = packed.payload
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, payload.shape, strides=payload.stride(), dtype=torch.float32, device=payload.device
        )

    def __init__(self, packed: Packed, *, whole: bool = True) -> None:
        self.payload, self.inverse_scale, self.format = packed
        self.whole = whole

    @property
    def packed(self) -> Packed:
        """Its bytes, their scale, and the name of the format."""
        return Packed(self.payload, self.inverse_scale, self.format)

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        """As of any tensor. What is assigned is encoded: it is a copy, and not the tensor itself."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.device != self.device:
            raise InputError(
                f"a frozen parameter of shape {tuple(self.shape)} on {self.device} lives in {self.format}, and its data"
                f" is replaced by {tuple(value.shape)} on {value.device}: autoprec.unwrap(model) first"
            )
        with torch.no_grad():
            self.copy_(value)

    # What reads the memory of a tensor reads the values.

    def numpy(self, *, force: bool = False) -> Any:
        """A copy."""
        return _wide(self).numpy(force=force)

    def tolist(self) -> Any:
        """As of any tensor."""
        return _wide(self).tolist()

    def data_ptr(self) -> int:
        """Of its bytes."""
        return self.payload.data_ptr()

    def __array__(self, dtype: Any = None) -> Any:
        return _wide(self).__array__(dtype)

    def __format__(self, spec: str) -> str:
        return format(_wide(self), spec)

    # What compilers ask of a tensor that is made of others.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, bool]]:
        return ["payload", *(["inverse_scale"] if self.inverse_scale is not None else [])], (self.format, self.whole)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], how: tuple[str, bool], size: Any, stride: Any
    ) -> NarrowParameter:
        fmt, whole = how
        return NarrowParameter(Packed(inner["payload"], inner.get("inverse_scale"), fmt), whole=whole)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_ALL or func in _OF_A_PART:
            (x, *rest) = args
            return cls(x.packed._replace(payload=func(x.payload, *rest, **kwargs)), whole=x.whole and func in _OF_ALL)
        if func is _aten.embedding.default and isinstance(args[0], cls):  # rows of it, not all of it
            rows = args[0].packed._replace(payload=func(args[0].payload, *args[1:], **kwargs))
            return decode(rows, torch.float32)
        wide_args, wide_kwargs = pytree.tree_map_only(cls, _wide, (args, kwargs))
        result = func(*wide_args, **wide_kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given, made = (dict(zip(names, some, strict=False)) | named
                       for some, named in ((args, kwargs), (wide_args, wide_kwargs)))  # fmt: skip
        written = [
            pair
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
            for pair in zip(*(pytree.tree_leaves(d[argument.name]) for d in (given, made)), strict=True)
        ]
        for x, wide in written:
            if isinstance(x, cls):
                _write(x, wide)
        # What is changed in place, or given as `out`, is what comes back.
        return next((x for x, wide in written if wide is result), result)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{_wide(self)!r} (held in {self.format})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(_wide(self), requires_grad=self.requires_grad)
        copied.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in _OWN}, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_wide(self), requires_grad=self.requires_grad).__reduce_ex__(protocol)


def _wide(x: NarrowParameter) -> Tensor:
    with torch.no_grad():
        return decode(x.packed, torch.float32)


def _write(x: NarrowParameter, wide: Tensor) -> None:
    """Encode what was written into a tensor of ours."""
    if not x.whole and x.inverse_scale is not None:
        raise InputError(
            f"a part of a frozen parameter that lives in {x.format} is written to, and the rest shares its scale:"
            " write all of it (param.copy_), or autoprec.unwrap(model) first"
        )
    packed = encode(wide, x.format)
    x.payload.copy_(packed.payload)
    if x.inverse_scale is not None and packed.inverse_scale is not None:
        x.inverse_scale.copy_(packed.inverse_scale)


def packed_of(x: Tensor | Packed) -> Tensor | Packed:
    """How a product reads an operand: a narrow parameter from its bytes, others as they are."""
    return x.packed if isinstance(x, NarrowParameter) else x


def format_held(x: Tensor) -> str | None:
    """Of a narrow parameter, its format; of others None."""
    return x.format if isinstance(x, NarrowParameter) else None


def narrow_like(x: Tensor, format_name: str) -> NarrowParameter:
    """A narrow parameter of the shape and the layout of `x`, without its values: what a compiler is shown."""
    held = dtype_of(format_name) if not is_scaled(format_name) else torch.uint8
    scale = x.new_empty((), dtype=torch.float32) if is_scaled(format_name) else None
    return NarrowParameter(Packed(torch.empty_like(x, dtype=held, requires_grad=False), scale, format_name))


def _become(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Give a parameter the contents and the class of another. `torch.utils.swap_tensors` does this, but refuses where
    there are weak references, and Dynamo's guards hold one of every parameter; they go on to mean the same object."""
    kind, mine, theirs = type(other), dict(parameter.__dict__), dict(other.__dict__)
    torch._C._swap_tensor_impl(parameter, other)
    parameter.__class__ = kind
    for name in _OWN:
        mine.pop(name, None)
    parameter.__dict__.clear()
    parameter.__dict__.update(mine | theirs)
    # Hooks are the object's, and autograd calls what it finds with the contents.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks) is not None:
            setattr(parameter, hooks, getattr(parameter, hooks))


#: Attributes of a narrow parameter, `nn.Parameter`'s mark on it among them; all others are the user's.
_OWN = ("payload", "inverse_scale", "format", "whole", "_is_param")


def narrow(parameter: nn.Parameter, format_name: str) -> None:
    """Let a frozen parameter live in a format (of STORAGE_FORMATS) from now on; its FP32 values are gone."""
    _become(parameter, nn.Parameter(NarrowParameter(encode(parameter, format_name)), requires_grad=False))


def widen(parameter: nn.Parameter) -> None:
    """Make an ordinary FP32 parameter of it again, with the values that it had, rounded as they are."""
    if isinstance(parameter, NarrowParameter):
        _become(parameter, nn.Parameter(_wide(parameter), requires_grad=parameter.requires_grad))
