"""Backward passes that are themselves differentiated (`create_graph=True`), where that cannot give the right answer.

torch's own `once_differentiable` is silent where the arriving gradient needs no gradient (a gradient penalty on the
last layer): what the result owes to the weights is then missing without a word.
"""

from __future__ import annotations

import torch

from autoprec.errors import UnsupportedError

__all__ = ["refuse_double_backward"]


def refuse_double_backward(what: str) -> None:
    """Raise `UnsupportedError` in a backward pass that is being recorded."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"a backward pass with create_graph=True goes through {what}, whose second derivative is not implemented;"
            " keep the layers on its way as they are by a rule with `pin: fp32`, and no narrow storage"
            " (`storage: {formats: []}`)"
        )
