"""The parts of one token that log-probs, search and loss share: mask, advantage, ratio.

Imports the config and the checks; nothing of the kernels, whose truth it is.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..config import LOG_RATIO_LIMIT, RatioLevel
from ..core.arguments.single import rising_offsets


def unmasked_tokens(
    like: Tensor, response_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Unmasked tokens; those behind the last sequence are masked."""
    unmasked = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if cu_seqlens is not None:
        unmasked[rising_offsets(cu_seqlens, like.numel())[-1] :] = False
    return unmasked if response_mask is None else unmasked & (response_mask != 0)


def per_token(values: Tensor, like: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """One value per token, from one per token or per sequence."""
    if values.shape == like.shape:
        return values
    if cu_seqlens is not None:
        packed = values.repeat_interleave(cu_seqlens.diff())
        return torch.nn.functional.pad(packed, (0, like.numel() - packed.numel()))
    return values.reshape(-1, *(1 for _ in like.shape[1:])).expand(like.shape)


def behaviour_log_probs(logp: Tensor, old_log_probs: Tensor | None) -> Tensor:
    """The behaviour policy's log-probs; on-policy those of the policy itself, kept finite."""
    if old_log_probs is not None:
        return old_log_probs.detach()
    return logp.detach().clamp(min=torch.finfo(logp.dtype).min)


def clamp(values: Tensor, lower: float | Tensor, upper: float | Tensor) -> Tensor:
    """``torch.clamp`` with derivative 1 at the limits too, where torch 2.15 has 1/2 or 0."""
    clamped = torch.clamp(values.detach(), lower, upper)  # type: ignore[arg-type]
    return torch.where(values == clamped, values, clamped)


def ratios(
    logp: Tensor, old: Tensor, unmasked: Tensor, level: RatioLevel, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``r = exp(clamp(logp - old, -20, 20))``, and its logarithm.

    Of a sequence, the mean over its unmasked tokens takes the place of ``logp - old``.
    """
    # An old log-prob that is not finite is bad data; the clamp would hide it.
    bad = torch.where(torch.isfinite(old), 0.0, torch.nan)
    log_ratio = logp - old
    if level == "sequence":
        log_ratio = sequence_mean(log_ratio + bad, unmasked, cu_seqlens)
    log_ratio = clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    r = log_ratio.exp()
    return r + bad if level == "token" else r, log_ratio


def sequence_mean(values: Tensor, unmasked: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean over the unmasked tokens of its sequence, for each token."""
    values = torch.where(unmasked, values, 0.0)
    if cu_seqlens is None:
        mean = values.sum(-1, keepdim=True) / unmasked.sum(-1, keepdim=True).clamp(min=1)
        return mean.expand(values.shape)
    pieces = pairwise(rising_offsets(cu_seqlens, values.numel()))
    means = [values[a:b].sum() / unmasked[a:b].sum().clamp(min=1) for a, b in pieces]
    return per_token(torch.stack(means), values, cu_seqlens)


def clipped(r: Tensor, A: Tensor, lower: float | Tensor, upper: float | Tensor) -> Tensor:
    """Where the clip removes the gradient: A < 0 below the lower bound, A > 0 above the upper."""
    return ((A < 0) & (r < lower)) | ((A > 0) & (r > upper))
