"""Finds the mistake that explains why log-probs of the labels are far from ``old_log_probs``.

May import the reference and the data of a call; ``debug`` alone calls it. A wrong hint costs its
reader more than none: only what explains the distance far better is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..checks import refuse, require
from ..config import BAPOConfig
from ..core.call import Sequences

# Limits on the mean of |log_prob - old_log_prob|, in nats; a correct first step has 0. Below FAR a
# correction must be SURE standard errors better, and only those that change all rows are tried.
NEAR, FAR, SURE = 0.02, 0.2, 10
INVERTED = 1.0  # a mask is inverted if the mean is above this where it is 1, and NEAR where it is 0
BETTER = 4  # a mistake is reported if correcting it makes that mean this many times smaller
SOFTCAP = 30.0  # Gemma's
TEMPERATURES = tuple(t / 10 for t in range(5, 16))
_FEWEST, _MOST = 8, 512  # tokens to compare
_SEQUENCES = 4  # the largest distance to another sequence that is tried
_ROWS = 64  # rows of logits read at a time


class _Mistake(NamedTuple):
    """Row ``t`` belongs to the label ``t + labels_at`` and the old log-prob ``t + old_at``.

    With ``sequences`` these are that many sequences away. ``transform``: scale and soft cap.
    """

    labels_at: int = 0
    old_at: int = 0
    sequences: int = 0
    temperature: float | None = None
    transform: tuple[float, float | None] | None = None


_SHIFTS = [_Mistake(labels_at=by, old_at=old_by) for by in (-1, 1) for old_by in (0, by)]
_SHIFTS += [_Mistake(old_at=by) for by in (-1, 1)]


@dataclass(frozen=True)
class _Comparison:
    """A batch, flattened, and the positions ``at`` of the tokens to compare."""

    rows: Tensor
    labels: Tensor
    old_log_probs: Tensor
    temperatures: Tensor | None
    unmasked: Tensor
    sequence: Tensor
    at: Tensor
    config: BAPOConfig

    def log_probs(self, mistake: _Mistake) -> Tensor:
        """Those of the labels, with a mistake corrected."""
        at, config, T = self.at, self.config, self.temperatures
        temperature = mistake.temperature
        untouched = config.logit_scale, config.final_logit_softcapping
        scale, softcap = mistake.transform or untouched
        label = self.labels[(at + mistake.labels_at).remainder(self.labels.numel())]
        log_probs = [
            reference.log_probs(
                self.rows[some],
                chosen,
                temperature=temperature or (config.temperature if T is None else T[some]),
                logit_scale=scale,
                final_logit_softcapping=softcap,
                return_entropy=False,
            )[0]
            for some, chosen in zip(at.split(_ROWS), label.split(_ROWS), strict=True)
        ]
        return torch.cat(log_probs)

    def distances(self, mistake: _Mistake, log_probs: Tensor | None = None) -> Tensor:
        """``|log_prob - old_log_prob|`` with a mistake corrected; NaN where that is undefined."""
        at, (V, N) = self.at, (self.rows.shape[-1], self.labels.numel())
        labels_at, old_at, sequences, *_ = mistake
        label_places, old_places = ((at + by).remainder(N) for by in (labels_at, old_at))
        label = self.labels[label_places]
        log_probs = self.log_probs(mistake) if log_probs is None else log_probs
        off = (log_probs - self.old_log_probs[old_places]).abs()
        defined = self.unmasked[old_places] & (label >= 0) & (label < V) & off.isfinite()
        for places, by in ((label_places, labels_at), (old_places, old_at)):
            inside = (places == at + by) & (self.sequence[places] == self.sequence[at])
            defined &= inside | bool(sequences)
        return torch.where(defined, off, torch.nan)


def check_alignment(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    temperatures: Tensor | None,
    unmasked: Tensor,
    cu_seqlens: Tensor | None,
    config: BAPOConfig,
) -> tuple[float, float | None]:
    """Raises if ``old_log_probs`` fit other labels or another temperature far better.

    Log-probs of an older policy are far off too, but no mistake explains them better. Tokens with
    a log-prob of ``-inf`` are not compared.

    Returns:
        The means of the log-probs and of their distance from ``old_log_probs`` (``None``).
    """
    N, V = labels.numel(), logits.shape[-1]
    length = labels.shape[-1] if labels.ndim >= 2 else N
    sequence = Sequences(length, cu_seqlens).sequence_ids(N).to(labels.device)
    unmasked = unmasked.reshape(N)
    at, rows, labels = _some(unmasked), logits.reshape(N, V), labels.reshape(N)
    old = rows.new_zeros(N) if old_log_probs is None else old_log_probs.reshape(N)
    comparison = _Comparison(rows, labels, old, temperatures, unmasked, sequence, at, config)
    log_probs = comparison.log_probs(_Mistake())
    log_prob = float(log_probs[log_probs.isfinite()].mean())
    if old_log_probs is None:
        return log_prob, None
    given = comparison.distances(_Mistake(), log_probs)
    off = float(given.nanmean())
    if at.numel() < _FEWEST or not off > NEAR:
        return log_prob, off
    capped = config.final_logit_softcapping is not None or config.logit_scale != 1
    mistakes = [_Mistake(transform=(1.0, None if capped else SOFTCAP))]
    mistakes += [
        _Mistake(temperature=t)
        for t in TEMPERATURES
        if temperatures is not None or t != config.temperature
    ]
    if off > FAR:
        _check_values(old[at], given, sequence[at])
        _check_mask(comparison, off)
        mistakes += _SHIFTS
        if cu_seqlens is None:
            by = [k for k in range(-_SEQUENCES, _SEQUENCES + 1) if 0 < abs(k) * length < N]
            mistakes += [_Mistake(old_at=k * length, sequences=k) for k in by]
            mistakes += [_Mistake(k * length, k * length, sequences=k) for k in by]
    fits = []
    for mistake in mistakes:
        both = torch.stack([comparison.distances(mistake), given])
        both = both[:, ~both.isnan().any(0)]
        if (n := both.shape[1]) >= _FEWEST:
            corrected, as_given = both.mean(1).tolist()
            sure = as_given - corrected > SURE * float((both[1] - both[0]).std()) / math.sqrt(n)
            if corrected * BETTER < as_given and as_given > (NEAR if sure else FAR):
                fits.append((corrected, as_given, mistake))
    if fits:
        corrected, as_given, mistake = min(fits, key=lambda fit: fit[0])
        _report(mistake, config, temperatures, f"{corrected:.2g} instead of {as_given:.2g}")
    return log_prob, off


def _some(tokens: Tensor) -> Tensor:
    """Positions of these, bool ``[N]``, at most ``_MOST``."""
    at = tokens.nonzero().squeeze(1)
    return at[:: math.ceil(at.numel() / _MOST) or 1]


def _check_mask(comparison: _Comparison, off: float) -> None:
    """Raises where ``old_log_probs`` fit at masked tokens alone, of which some were not certain."""
    old, masked = comparison.old_log_probs, ~comparison.unmasked
    at = _some(masked & (old < -0.1) & old.isfinite())
    if off > INVERTED and at.numel() >= _FEWEST:
        others = replace(comparison, unmasked=masked, at=at).distances(_Mistake())
        fits = float(others.nanmean())
        rule = "be 1 at the tokens of old_log_probs, 0 elsewhere"
        got = f"an inverted mask: mean |log_prob - old_log_prob| is {off:.2g} nats where it is 1, "
        enough = int(others.isfinite().sum()) >= _FEWEST
        inverted = enough and fits <= NEAR
        require(not inverted, "response_mask", rule, f"{got}{fits:.2g} where it is 0")


def _check_values(old: Tensor, off: Tensor, sequence: Tensor) -> None:
    """Raises for values that are no log-probs of single tokens, wherever they belong."""
    # An old log-prob of 0 stands for padding, unless the token was certain.
    padded = (old == 0) & (off > 1)
    if not (old != 0).any():
        rule = "be 1 at the tokens that were sampled, 0 elsewhere"
        got = "1 at tokens with old_log_probs 0 alone: an inverted mask, or zeros instead of None"
        require(int(padded.sum()) < _FEWEST, "response_mask", rule, got)
    rule = "be 0 where there is no old log-prob (a prompt, padding)"
    got = f"1 at tokens with old_log_probs 0 and a mean log-prob of {-off[padded].mean():.2g}"
    require(int(padded.sum()) < _FEWEST, "response_mask", rule, got)
    neighbours = sequence[1:] == sequence[:-1]
    same = bool((old[1:] == old[:-1])[neighbours].all() and (old != 0).all())
    got = "the same value at all tokens of each sequence (their sum or mean?)"
    enough = int(neighbours.sum()) >= _FEWEST
    require(not (same and enough), "old_log_probs", "be those of single tokens", got)


def _report(mistake: _Mistake, config: BAPOConfig, temperatures: Tensor | None, fit: str) -> None:
    name, rule = "old_log_probs", "be those of labels"
    by = mistake.labels_at or mistake.old_at
    got = f"those of the position {'after' if by > 0 else 'before'}"
    if mistake.labels_at:
        name, rule = "labels", "be aligned with the rows of logits (logits[:, :-1], tokens[:, 1:])"
        got = f"old_log_probs that fit labels one position {'later' if by > 0 else 'earlier'}"
    if mistake.sequences:
        got = f"those of the sequence at {mistake.sequences:+} in the batch"
    if mistake.temperature is not None:
        name = "config.temperature" if temperatures is None else "temperature"
        rule = "be that of old_log_probs"
        used = "the tensor given" if temperatures is not None else config.temperature
        got = f"{used}, they fit {mistake.temperature}"
    if mistake.transform == (1.0, SOFTCAP):
        name, rule = "config.final_logit_softcapping", "be that of old_log_probs"
        got = f"None, they fit {SOFTCAP}"
    elif mistake.transform is not None:
        name, rule = "config", "have no scale and soft cap for logits that the model returns"
        got = f"{config.logit_scale} and {config.final_logit_softcapping}, applied once more"
    right = "in a correct first step ppo_kl and pg_clipfrac are about 0"
    refuse(name, rule, f"{got}. Corrected, mean |log_prob - old_log_prob| is {fit} nats; {right}")
