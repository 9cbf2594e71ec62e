"""Who reads a tensor, and how it is kept for the backward pass: parts of a `Problem` (`values`) as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Opening", "Remaking", "Replacement", "Saver", "Steps", "Use"]

#: By op that runs for a tensor that is made again, (unit, elements) of what is there then.
Steps = tuple[tuple[tuple[int | None, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Use:
    """A read (or a save) of a tensor at a forward moment in the format of `unit`; None is FP32 (or as it is).

    What is made inside an activation checkpoint is not kept but made again: `kept_from` is then the backward moment
    at which that happens, and None for what is kept since it was made.

    Of a reader's gradient: `shared_until` is the forward moment at whose backward pass it becomes the tensor's own; it
    is another tensor's before (`sums`), unless it is cast. None: from the beginning; `NEVER`: it is held whatever the
    choice, as the gradients that enter at the outputs are (`Problem.standing`). `instead`: (unit, moment) of the
    other term of the sum: where that was born in another format than the sum's, it has a cast of its own, and this is
    the tensor's own from that moment on. `to_a_view`: what the reader sends is added to a view (what a sum sends back),
    which takes a tensor more, made when what arrived at the reader is gone.

    `part`: it is a use of a part of the tensor (`parts`), which has its copies in other formats; this is of the tensor
    only where it has the format of birth, and until it has been cast. `copied`, of a saver of a part: where that
    unit and this are FP32, torch's own product keeps a contiguous copy of it, whatever the format of birth.
    """

    moment: int
    unit: int | None
    kept_from: int | None = None
    shared_until: int | None = None
    instead: tuple[int | None, int] | None = None
    to_a_view: bool = False
    part: bool = False
    copied: int | None = None


@dataclass(frozen=True, kw_only=True)
class Saver:
    """An op that keeps a tensor for its backward pass, and can read a narrow copy of it there. GEMMs are in `Gemm`.

    Attributes:
        moment: of its forward pass.
        unit: in whose format it reads the tensor, as in `Use`.
        numel: elements that it keeps (of a view, fewer than the tensor has).
        noise: by storage, the relative variance that the rounding adds to the gradient that the op passes on.
        reached: (variance, share) as in `GradientNode.inputs`: where the rounding is added. A product of two tensors
            reads one of them for the gradient of the other.
        in_pieces: whether it reads a narrow copy a piece at a time, and not the whole of it again.
    """

    moment: int
    unit: int | None
    numel: int
    noise: tuple[tuple[str, float], ...]
    reached: tuple[tuple[int, float], ...] = ()
    in_pieces: bool = False

    def noise_in(self, storage: str | None) -> float:
        """The relative variance under a storage; 0.0 for None, as it is."""
        return sum(relative for f, relative in self.noise if f == storage)


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """An op that in FP32 is torch's own, and ours where a tensor that it keeps is kept narrow: attention that runs op
    by op, and cross entropy.

    Attributes:
        moment: of its forward pass.
        unit: in whose format it runs, as in `Use`.
        tensors: any of which is kept narrow.
        workspace: bytes of workspace that ours takes more in its forward and its backward pass, below 0 for fewer.
        spared: bytes that ours does not hold from the one to the other.
    """

    moment: int
    unit: int | None
    tensors: tuple[int, ...]
    workspace: tuple[int, int] = (0, 0)
    spared: int = 0


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Where a factor that is made again is made: before the `mul` that reads it makes anything, autograd reads all that
    it kept, the second factor first.

    Attributes:
        given_numel: elements of the gradients that the `mul` makes afterwards.
        later: id of the root tensor that is read after the factor, if that is kept; later_numel: elements of it.
    """

    given_numel: int
    later: str | None = None
    later_numel: int = 0


@dataclass(frozen=True, kw_only=True)
class Remaking:
    """How a tensor is made again in the backward pass, for those who would keep it.

    Attributes:
        made_from: ids of the root tensors that it is made of, which others keep.
        numel: elements that the op which makes it reads.
        seconds: by the format in which it is born.
        steps: by op that runs for it, (unit, elements) of what is there then, in whose format; none where a compiler
            makes one step of all.
        opening: of a factor, where it is made.
        noise: (source, storage, relative variance): what keeping a source narrow adds to the result. Where all are kept
            as they are, what is made again is what was there.
    """

    made_from: tuple[str, ...]
    numel: int
    seconds: tuple[tuple[str, float], ...]
    noise: tuple[tuple[str, str, float], ...]
    steps: Steps = ()
    opening: Opening | None = None
