"""What the public functions return."""

from __future__ import annotations

from typing import NamedTuple

import torch

# What the kernels report, in their order.
REPORT = (
    "loss",
    "pg_loss",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "entropy",
    "kl_loss",
    "bapo_clip_low",
    "bapo_clip_high",
    "bapo_pos_share",
    "bapo_pos_share_start",
    "bapo_pos_neg_ratio",
    "bapo_saturated",
    "live_tokens",
)


class ClipBounds(NamedTuple):
    """Bounds of the probability ratio: 0-dim float32 tensors on the device of the loss.

    Given as ``bounds=`` they may be numbers too, which must keep ``0 <= lower <= 1 <= upper``: 0.8,
    1.2, not the epsilons 0.2, 0.2. Tensors are not read: :func:`bapo_kernels.debug.check_inputs`
    names those that break this rule.

    Examples:
        >>> bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2))
        >>> log_probs, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])
        >>> out = bapo_loss_from_log_probs(log_probs, old, torch.ones(2), bounds=bounds)
        >>> out.metrics["pg_clipfrac"]  # of the ratios 1 and 2.72 one is above 1.2
        tensor(0.5000)
    """

    lower: torch.Tensor
    upper: torch.Tensor


class BAPOOutput(NamedTuple):
    """Result of a loss.

    Attributes:
        loss: 0-dim float32 (float64 on the reference in float64), with the gradient of the inputs.
        log_probs: float32, leading shape of the labels; 0 at masked tokens, NaN at tokens that
            ``statistics="live"`` left out. A backward through them raises where forward made the
            gradient of the loss, and is right elsewhere.
        entropy: float32, same shape and rules; ``None`` if it was not computed.
        bounds: the clip bounds that were used.
        metrics: detached 0-dim float32 tensors. ``pg_loss`` and ``kl_loss`` are aggregated like
            the loss; ``pg_clipfrac``, ``pg_clipfrac_lower`` (dual clip), ``ppo_kl`` and ``entropy``
            are means over tokens; ``bapo_clip_low``, ``bapo_clip_high`` are the bounds;
            ``bapo_pos_share`` = P/(P+N) and ``bapo_pos_neg_ratio`` = P/(N + 1e-8) hold at these
            bounds, ``bapo_pos_share_start`` at the start bounds (shares are 0 if P + N = 0);
            ``bapo_saturated`` is 1 where the tested quantity stays below the target;
            ``live_tokens`` counts the tokens behind the means with ``statistics="live"``.

    Examples:
        >>> out = bapo_loss(torch.zeros(2, 4), torch.tensor([3, -100]), None, torch.ones(2))
        >>> out.loss, out.log_probs
        (tensor(-1.), tensor([-1.3863,  0.0000]))
        >>> out.metrics["entropy"], out.metrics["bapo_pos_share"]
        (tensor(1.3863), tensor(1.))
    """

    loss: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    bounds: ClipBounds
    metrics: dict[str, torch.Tensor]
