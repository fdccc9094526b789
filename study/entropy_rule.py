"""The Entropy-Clip Rule of the paper, update by update."""

from __future__ import annotations

import torch
from torch import Tensor

from .board import Walks


def predicted_change(
    logp: Tensor,
    entropy: Tensor,
    walks: Walks,
    advantages: Tensor,
    bounds: tuple[float, float],
) -> float:
    """The mean over prefixes of ``-Cov[log pi, A*X]``: the predicted change up to the factor eta.

    X is 1 where the move is not clipped; the paper's constant C does not change a covariance. The
    covariance is over the moves after a prefix, of which one was drawn, from an older policy: with
    ``E[log pi] = -entropy`` it is estimated by ``r*A*X*(log pi + entropy)``.
    """
    ratio = (logp - walks.log_probs).exp()
    A = advantages[:, None].expand_as(logp)
    lower, upper = bounds
    unclipped = torch.where(A > 0, ratio <= upper, ratio >= lower)
    covariance = ratio * torch.where(unclipped, A, 0.0) * (logp + entropy)
    return -covariance[walks.mask].mean().item()
