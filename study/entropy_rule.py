"""The Entropy-Clip Rule of the paper, update by update."""

from __future__ import annotations

import torch
from torch import Tensor

from .board import Walks


def predicted_change(
    logp: Tensor, walks: Walks, advantages: Tensor, bounds: tuple[float, float]
) -> float:
    """``-Cov[log pi, A*X]`` over the moves, which is the predicted change up to the factor eta.

    X is 1 where the move is not clipped. The paper's constant C does not change a covariance. Moves
    were drawn from older policies: their weight is the ratio, so that the expectation is that of
    the policy of the update.
    """
    ratio = (logp - walks.log_probs).exp()
    A = advantages[:, None].expand_as(logp)
    lower, upper = bounds
    unclipped = torch.where(A > 0, ratio <= upper, ratio >= lower)
    weight = torch.where(walks.mask, ratio, 0.0)
    weight = weight / weight.sum()
    effect = torch.where(unclipped, A, 0.0)
    centred = torch.where(walks.mask, logp - (weight * logp).sum(), 0.0)
    return -(weight * centred * effect).sum().item()
