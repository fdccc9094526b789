"""Finds the mistake that explains why log-probs of the labels are far from ``old_log_probs``.

Imports the reference and the data of a call; ``debug`` alone calls it. A hint that is wrong
costs its reader more than none: only what explains the distance far better is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .config import BAPOConfig
from .core.call import Sequences
from .core.checks import refuse, require

FAR = 0.2  # nats; in a correct first step the mean of |log_prob - old_log_prob| is 0
BETTER = 4  # a mistake is reported if correcting it makes that mean this many times smaller
TEMPERATURES = tuple(t / 10 for t in range(5, 16))
_FEWEST, _MOST = 8, 512  # tokens to compare
_ROWS = 64  # rows of logits read at a time


class _Mistake(NamedTuple):
    """Row ``t`` belongs to the label ``t + labels_at`` and the old log-prob ``t + old_at``."""

    labels_at: int = 0
    old_at: int = 0
    temperature: float | None = None


_SHIFTS = [_Mistake(labels_at=by, old_at=old_by) for by in (-1, 1) for old_by in (0, by)]
_SHIFTS += [_Mistake(old_at=by) for by in (-1, 1)]


@dataclass(frozen=True)
class _Comparison:
    """A batch, flattened, and the positions ``at`` which its tokens are compared."""

    rows: Tensor
    labels: Tensor
    old_log_probs: Tensor
    temperatures: Tensor | None
    unmasked: Tensor
    sequence: Tensor
    at: Tensor
    config: BAPOConfig

    def _temperature(self, rows: Tensor) -> float | Tensor:
        return self.config.temperature if self.temperatures is None else self.temperatures[rows]

    def distances(self, mistake: _Mistake) -> Tensor:
        """``|log_prob - old_log_prob|`` with a mistake corrected; NaN where that is undefined."""
        labels_at, old_at, temperature = mistake
        at, N = self.at, self.labels.numel()
        of_label, of_old = ((at + by).clamp(0, N - 1) for by in (labels_at, old_at))
        label = self.labels[of_label]
        log_probs = [
            reference.log_probs(
                self.rows[some],
                chosen,
                temperature=temperature or self._temperature(some),
                logit_scale=self.config.logit_scale,
                final_logit_softcapping=self.config.final_logit_softcapping,
                return_entropy=False,
            )[0]
            for some, chosen in zip(at.split(_ROWS), label.split(_ROWS), strict=True)
        ]
        off = (torch.cat(log_probs) - self.old_log_probs[of_old]).abs()
        V = self.rows.shape[-1]
        defined = self.unmasked[of_old] & (label >= 0) & (label < V) & off.isfinite()
        for of, by in ((of_label, labels_at), (of_old, old_at)):
            defined &= (of == at + by) & (self.sequence[of] == self.sequence[at])
        return torch.where(defined, off, torch.nan)


def check_alignment(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    temperatures: Tensor | None,
    unmasked: Tensor,
    cu_seqlens: Tensor | None,
    config: BAPOConfig,
) -> None:
    """Raises if ``old_log_probs`` fit other labels or another temperature far better.

    Log-probs of an older policy are far off too, but no mistake explains them better. Tokens with
    a log-prob of ``-inf`` are not compared.
    """
    N, V = labels.numel(), logits.shape[-1]
    length = labels.shape[-1] if labels.ndim >= 2 else N
    sequence = Sequences(length, cu_seqlens).sequence_ids(N).to(labels.device)
    unmasked = unmasked.reshape(N)
    at = unmasked.nonzero().squeeze(1)
    at = at[:: math.ceil(at.numel() / _MOST) or 1]
    if at.numel() < _FEWEST:
        return
    rows, labels, old = logits.reshape(N, V), labels.reshape(N), old_log_probs.reshape(N)
    comparison = _Comparison(rows, labels, old, temperatures, unmasked, sequence, at, config)
    given = comparison.distances(_Mistake())
    if not bool(given.nanmean() > FAR):
        return
    # An old log-prob of 0 stands for padding, unless all of them are 0 (tokens that were certain).
    padded = (old[at] == 0) & (given > 1) & (old[at] != 0).any()
    rule = "be 0 where there is no old log-prob (a prompt, padding)"
    got = f"1 at tokens with old_log_probs 0 and a mean log-prob of {-given[padded].mean():.2g}"
    require(int(padded.sum()) < _FEWEST, "response_mask", rule, got)
    mistakes = [*_SHIFTS, *(_Mistake(temperature=t) for t in TEMPERATURES)]
    fits = []
    for k, mistake in enumerate(mistakes):
        if temperatures is None and mistake.temperature == config.temperature:
            continue
        both = torch.stack([comparison.distances(mistake), given])
        both = both[:, ~both.isnan().any(0)]
        if both.shape[1] >= _FEWEST:
            fits.append((*both.mean(1).tolist(), k))
    if not fits:
        return
    corrected, as_given, best = min(fits)
    if as_given > FAR and corrected * BETTER < as_given:
        used = "temperature", "the tensor given"
        if temperatures is None:
            used = "config.temperature", f"{config.temperature}"
        _report(mistakes[best], used, f"{corrected:.2g} instead of {as_given:.2g}")


def _report(mistake: _Mistake, temperature: tuple[str, str], fit: str) -> None:
    name, rule = "old_log_probs", "be those of labels"
    by = mistake.labels_at or mistake.old_at
    got = f"those of the position {'after' if by > 0 else 'before'}"
    if mistake.labels_at:
        name, rule = "labels", "be aligned with the rows of logits (logits[:, :-1], tokens[:, 1:])"
        got = f"old_log_probs that fit labels one position {'later' if by > 0 else 'earlier'}"
    if mistake.temperature is not None:
        name, rule = temperature[0], "be that of old_log_probs"
        got = f"{temperature[1]}, they fit {mistake.temperature}"
    right = "in a correct first step ppo_kl and pg_clipfrac are about 0"
    refuse(name, rule, f"{got}. Corrected, mean |log_prob - old_log_prob| is {fit} nats; {right}")
