"""What torch's compiler is about to make code of, for a CPU, without what it would hold or copy for nothing.

Convolutions on a CPU take images and weights with their channels last. torch's compiler keeps copies of the weights in
that order from the forward pass to the backward pass, where the parameters are there anyway. It gives what several ops
read, one of them the backward pass of a convolution, the order of memory that it has in eager mode, so that it is
copied for each of them; and images of one channel another order than the gradient, which is then copied twice.

What is widened for such a backward pass and for others, as plans have it, is widened once, for the first of them, and
held until the last; and what is kept narrow is kept beside itself, where it was widened to be kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.graph import GraphLowering

__all__ = ["Finishing"]

_CAST = torch.ops.prims.convert_element_type.default
_BACK = torch.ops.aten.convolution_backward.default
#: Which argument of a convolution its image is.
_IMAGE = {torch.ops.aten.convolution.default: 0, _BACK: 1}


class Finishing(CustomGraphPass):
    """The last pass over a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        _give_back_as_given(graph.output_node())
        for node in list(graph.nodes):
            if node.target is _CAST and not _is_there(node):
                _widen_late(node)
        if GraphLowering.decide_layout_opt(graph.owning_module, is_inference=False):
            for node in list(graph.nodes):
                if _is_pointwise(node):
                    _make_channels_last(node)
                elif node.target in _IMAGE:
                    _say_channels_last(node)

    def uuid(self) -> tuple[bytes, str]:
        """By which torch knows what it has compiled with this. Its own name for code does not say for which vectors it
        was written, and of others that code computes wrong numbers: a cache may be shared by unequal machines."""
        return get_hash_for_files((__file__,)), str(pick_vec_isa())


def _give_back_as_given(output: fx.Node) -> None:
    """What the forward pass is given and the backward pass reads again, in the order that it has."""
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    given = [k for k, n in enumerate(results) if isinstance(n, fx.Node) and n.op == "placeholder"]
    output.meta["user_visible_output_idxs"] = [*output.meta.get("user_visible_output_idxs", ()), *given]


def _is_there(cast: fx.Node) -> bool:
    """Whether it gives back what was widened, which is there: its readers read that now."""
    (wide,) = cast.all_input_nodes
    if wide.target is not _CAST:
        return False
    (source,) = wide.all_input_nodes
    given, between, made = (n.meta["val"].dtype for n in (source, wide, cast))
    exact = given is made and between is torch.float32 and given.itemsize < between.itemsize
    if exact and given.is_floating_point and source.op != "placeholder":
        cast.replace_all_uses_with(source)
        cast.graph.erase_node(cast)
        return True
    return False


def _read_on_the_way_back(node: fx.Node) -> list[fx.Node]:
    """The convolutions whose backward passes read it as the gradient that they are given, or as their input."""
    return [user for user in node.users if user.target is _BACK and node in user.args[:2]]


def _widen_late(cast: fx.Node) -> None:
    """Convolutions read a cast of their own, where others read it, too, and what it casts takes less."""
    source, readers = cast.args[0], _read_on_the_way_back(cast)
    assert isinstance(source, fx.Node)
    narrow, wide = source.meta["val"].dtype, cast.meta["val"].dtype
    if narrow.itemsize < wide.itemsize and 0 < len(readers) < len(cast.users):
        with cast.graph.inserting_before(readers[0]):
            own = cast.graph.call_function(_CAST, cast.args, cast.kwargs)
        own.meta.update(cast.meta)
        for reader in readers:
            reader.replace_input_with(cast, own)


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _say_channels_last(convolution: fx.Node) -> None:
    """Images of one channel are in both orders at once. What their strides say decides which kernel torch takes, and in
    which order it gives the result."""
    image = convolution.args[_IMAGE[convolution.target]]
    assert isinstance(image, fx.Node)
    value = image.meta["val"]
    if value.ndim != 4 or not all(isinstance(n, int) for n in value.shape):
        return
    n, channels, height, width = value.shape
    is_whole = _is_pointwise(image) or image.op == "placeholder"  # and no part of something larger
    if channels == 1 and is_whole and value.is_contiguous():
        layout = [n, 1, height, width], [height * width, 1, width, 1]
        with convolution.graph.inserting_before(convolution):
            seen = convolution.graph.call_function(torch.ops.aten.as_strided.default, (image, *layout))
        seen.meta["val"] = value.as_strided(*layout)
        convolution.update_arg(_IMAGE[convolution.target], seen)


def _make_channels_last(node: fx.Node) -> None:
    """Images that are computed element by element, for a convolution, have their channels last from the beginning."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.ndim == 4 and _read_on_the_way_back(node):
        node.meta["val"] = value.contiguous(memory_format=torch.channels_last)
