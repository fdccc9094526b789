"""Which mistake explains log-probs of the labels that are far from ``old_log_probs``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import reference
from .aggregation import sequence_index
from .checks import require
from .config import BAPOConfig

FAR = 0.2  # nats; the mean of |log_prob - old_log_prob| is 0 in a right first step
BETTER = 4  # a mistake is named if that mean is so many times smaller without it
TEMPERATURES = tuple(t / 10 for t in range(5, 16))
_FEWEST, _MOST = 8, 512  # tokens compared
_ROWS = 64  # read at once


def check_alignment(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    live: Tensor,
    cu_seqlens: Tensor | None,
    config: BAPOConfig,
) -> None:
    """Raises if ``old_log_probs`` fit other labels or another temperature far better than these.

    An older policy's are off too, but nothing explains them better. Tokens where a log-prob is
    ``-inf`` are left out.
    """
    N, V = labels.numel(), logits.shape[-1]
    length = labels.shape[-1] if labels.ndim >= 2 else N
    rows, labels, old = logits.reshape(N, V), labels.reshape(N), old_log_probs.reshape(N)
    live = live.reshape(N)
    at = live.nonzero().squeeze(1)
    at = at[:: math.ceil(at.numel() / _MOST) or 1]
    sequence = torch.arange(N, device=labels.device) // (length or 1)
    if cu_seqlens is not None:
        sequence = sequence_index(cu_seqlens, N)

    def distances(labels_at: int = 0, old_at: int = 0, temperature: float | None = None) -> Tensor:
        """Of row ``t`` with label ``t + labels_at`` from old ``t + old_at``; NaN: there is none."""
        of_label, of_old = ((at + by).clamp(0, N - 1) for by in (labels_at, old_at))
        label = labels[of_label]
        logp = [
            reference.log_probs(
                rows[some],
                chosen,
                temperature=temperature or config.temperature,
                logit_scale=config.logit_scale,
                final_logit_softcapping=config.final_logit_softcapping,
                return_entropy=False,
            )[0]
            for some, chosen in zip(at.split(_ROWS), label.split(_ROWS), strict=True)
        ]
        off = (torch.cat(logp) - old[of_old]).abs()
        there = live[of_old] & (label >= 0) & (label < V) & off.isfinite()
        for of, by in ((of_label, labels_at), (of_old, old_at)):
            there &= (of == at + by) & (sequence[of] == sequence[at])
        return torch.where(there, off, torch.nan)

    if at.numel() < _FEWEST:
        return
    given = distances()
    if not bool(given.nanmean() > FAR):
        return
    # A log-prob of 0 is that of a certain token; all of them 0 are no padding.
    padded = (old[at] == 0) & (given > 1) & (old[at] != 0).any()
    rule = "be 0 where there is no old log-prob (a prompt, padding)"
    got = f"1 at tokens of log-prob {-given[padded].mean():.2g} on average with old_log_probs 0"
    require(int(padded.sum()) < _FEWEST, "response_mask", rule, got)
    others: list[dict[str, Any]] = [
        dict(labels_at=by, old_at=old_by) for by in (-1, 1) for old_by in (0, by)
    ]
    others += [dict(old_at=by) for by in (-1, 1)]
    others += [dict(temperature=t) for t in TEMPERATURES if t != config.temperature]
    fits = []
    for k, other in enumerate(others):
        both = torch.stack([distances(**other), given])
        both = both[:, ~both.isnan().any(0)]
        if both.shape[1] >= _FEWEST:
            fits.append((*both.mean(1).tolist(), k))
    if not fits:
        return
    least, most, best = min(fits)
    if most > FAR and least * BETTER < most:
        _refuse(others[best], config, f"{least:.2g} instead of {most:.2g}")


def _refuse(other: dict[str, Any], config: BAPOConfig, fit: str) -> None:
    name, rule = "old_log_probs", "be those of labels"
    by = other.get("labels_at") or other.get("old_at") or 0
    got = f"those of the position {'after' if by > 0 else 'before'}"
    if "labels_at" in other:
        name, rule = "labels", "be aligned with the rows of logits (logits[:, :-1], tokens[:, 1:])"
        got = f"old_log_probs of the labels one position {'later' if by > 0 else 'earlier'}"
    if "temperature" in other:
        name, rule = "config.temperature", "be that of old_log_probs"
        got = f"{config.temperature}, they fit {other['temperature']}"
    right = "in a right first step ppo_kl ~ 0, pg_clipfrac ~ 0 and ratios ~ 1"
    require(False, name, rule, f"{got}: mean |log_prob - old_log_prob| {fit} nats; {right}")
