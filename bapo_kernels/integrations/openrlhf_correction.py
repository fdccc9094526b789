"""OpenRLHF's importance sampling correction: from rollout to training log-probs, as weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import require

# The names of 0.11.0 and 0.11.1: level and mode. All of them test the ratio.
_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
_CHOICES = dict(
    level=("off", "token", "seq"), mode=("mask", "clip"), gating=("ratio", "binary_kl", "tv")
)


class Correction(NamedTuple):
    """A statistic of each token or sequence, and what happens where it leaves its range.

    ``"clip"`` clamps the ratio of a token. ``"mask"`` gives weight 0 to the token or sequence;
    tokens inside have their own ratio, unclamped.
    """

    level: str
    mode: str
    gating: str
    low: float
    high: float

    @classmethod
    def of(
        cls, level: str, mode: str, gating: str, threshold: Sequence[float]
    ) -> Correction | None:
        """From the ``is_correction_...`` of 0.11.2; ``None``: no correction."""
        for (name, choices), value in zip(_CHOICES.items(), (level, mode, gating), strict=True):
            rule = f"be one of {', '.join(map(repr, choices))}"
            require(value in choices, f"is_correction_{name}", rule, repr(value))
        rule = "be 'mask' unless a token is clipped by its ratio"
        clips = level != "seq" and gating == "ratio"
        require(mode == "mask" or clips, "is_correction_mode", rule, repr(mode))
        if level == "off":
            return None
        low, high = _range("is_correction_threshold", threshold)
        rule = f"have a lower bound <= 0 with is_correction_gating={gating!r}"
        require(gating == "ratio" or low <= 0, "is_correction_threshold", rule, threshold)
        return cls(level, mode, gating, low, high)

    @classmethod
    def of_type(cls, kind: str, threshold: Sequence[float] | None) -> Correction:
        """From the ``vllm_is_...`` of 0.11.0."""
        rule = f"be one of {', '.join(map(repr, _TYPES))}"
        require(kind in _TYPES, "vllm_is_correction_type", rule, repr(kind))
        level, mode = _TYPES[kind]
        return cls(level, mode, "ratio", *_range("vllm_is_truncated_threshold", threshold))

    def weights(self, old: Tensor, rollout: Tensor, unmasked: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each token, and the share of the tokens or sequences outside the range.

        Args:
            old, rollout: ``[B, T]``, log-probs of the policy before the update, by the trainer and
                by the engine that generated.
        """
        log_ratio = torch.where(unmasked, old - rollout, 0.0)
        statistic = log_ratio if self.gating == "ratio" else self._divergence(old, rollout)
        if self.level == "seq":
            of_sequence = torch.where(unmasked, statistic, 0.0).sum(-1, keepdim=True)
            # NaN without tokens, which is outside the range, as in OpenRLHF.
            statistic = of_sequence / unmasked.sum(-1, keepdim=True)
        if self.gating == "ratio":
            statistic = statistic.exp()
        inside = (statistic >= self.low) & (statistic <= self.high)
        if self.mode == "clip":
            weights = statistic.clamp(self.low, self.high)
        else:
            weights = torch.where(inside, log_ratio.exp(), 0.0)
        outside = (~inside).float()
        share = outside.mean() if self.level == "seq" else masked_mean(outside, unmasked)
        return weights, share

    def _divergence(self, old: Tensor, rollout: Tensor) -> Tensor:
        """Of two coins, the sampled token or any other, in float64.

        In float32 the binary KL of equal policies rounds to either side of 0, the lower bound.
        """
        q, p = (values.double().exp().clamp(1e-6, 1 - 1e-6) for values in (old, rollout))
        if self.gating == "tv":
            return (p - q).abs()
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).clamp(min=0.0)


def masked_mean(values: Tensor, unmasked: Tensor) -> Tensor:
    """The mean over the unmasked tokens; 0 if there is none."""
    return torch.where(unmasked, values, 0.0).sum() / unmasked.sum().clamp(min=1)


def _range(name: str, threshold: Sequence[float] | None) -> tuple[float, float]:
    numbers = threshold if isinstance(threshold, Sequence) else ()
    rule = "be two numbers, low <= high"
    require(len(numbers) == 2 and numbers[0] <= numbers[1], name, rule, repr(threshold))
    return float(numbers[0]), float(numbers[1])
