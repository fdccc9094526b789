"""OpenRLHF (signatures of 0.11.0, 0.11.1 and 0.11.2): ``PolicyLoss`` with the BAPO loss.

May import public modules and the package's checks. OpenRLHF unpacks the outputs by position, so
another order would log and filter by wrong numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import refuse, require
from ..functional import bapo_loss_from_log_probs
from . import averageable, config_of, left_to

_OWNERS = left_to(
    "OpenRLHF",
    loss_agg_mode="token_level_loss",
    loss_scale_factor="token_level_loss",
    clip_ratio_c="dual_clip",
    ratio_level="policy_loss_type",
)
# Level and mode of the names of 0.11.0 and 0.11.1, all of which test the ratio.
_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
_CHOICES = dict(
    level=("off", "token", "seq"), mode=("mask", "clip"), gating=("ratio", "binary_kl", "tv")
)


class PolicyLoss(torch.nn.Module):
    """Drop-in replacement of ``openrlhf.models.loss.PolicyLoss``.

    Args:
        clip_eps_low, clip_eps_high: are ignored, because the search sets the bounds.
        dual_clip: cap of the ratio for negative advantages; ``None`` takes the preset's.
        token_level_loss: ``True``: the mean over all tokens. ``False``: the mean over sequences of
            the means over their tokens.
        policy_loss_type: ``"ppo"``, or ``"gspo"``: the ratio of a sequence. As in OpenRLHF,
            ``"gspo"`` always takes ``token_level_loss`` as ``False``.
        is_correction_level, is_correction_mode, is_correction_gating, is_correction_threshold: the
            importance sampling correction of 0.11.2. As in OpenRLHF, with ``"gspo"`` it weights
            nothing, and the ratio is to the rollout log-probs.
        enable_vllm_is_correction, vllm_is_truncated_threshold, vllm_is_correction_type: the
            correction of 0.11.0 and 0.11.1. Giving the first, ``True`` or ``False``, selects the
            four outputs of these versions.
        preset, options: preset and options of the search, named as in
            :class:`bapo_kernels.BAPOConfig`. An option that OpenRLHF decides raises.
        process_group: data-parallel ranks that decide together.

    Raises:
        ValueError: an argument breaks its rule, or the corrections of two versions are given.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
        *,
        enable_vllm_is_correction: bool | None = None,
        vllm_is_truncated_threshold: Sequence[float] | None = None,
        vllm_is_correction_type: str = "tis",
        preset: str = "paper",
        options: dict[str, Any] | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        kind, rule = policy_loss_type, "be 'ppo' or 'gspo'"
        require(kind in ("ppo", "gspo"), "policy_loss_type", rule, repr(kind))
        self.correction = _Correction.of(
            is_correction_level, is_correction_mode, is_correction_gating, is_correction_threshold
        )
        self.four_outputs = enable_vllm_is_correction is not None
        level, rule = is_correction_level, "be 'off' with enable_vllm_is_correction"
        conflict = self.four_outputs and self.correction
        require(not conflict, "is_correction_level", rule, repr(level))
        if enable_vllm_is_correction:
            _require_choice("vllm_is_correction_type", vllm_is_correction_type, _TYPES)
            limits = _range("vllm_is_truncated_threshold", vllm_is_truncated_threshold)
            self.correction = _Correction(*_TYPES[vllm_is_correction_type], "ratio", *limits)
        per_token = kind == "ppo" and token_level_loss
        self.config = config_of(
            preset,
            options,
            _OWNERS,
            loss_agg_mode="token-mean" if per_token else "seq-mean-token-mean",
            clip_ratio_c=dual_clip,
            ratio_level="sequence" if kind == "gspo" else "token",
        )
        self.process_group = process_group
        self.metrics: dict[str, Tensor] = {}

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """``(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)`` of tensors ``[B, T]``.

        OpenRLHF 0.11.0 and 0.11.1 get the first four. ``self.metrics`` has all metrics of the
        loss that can be averaged.
        """
        unmasked = (torch.ones_like(log_probs) if action_mask is None else action_mask) != 0
        behaviour, weights, vllm_kl, filtered = old_log_probs, None, None, None
        if self.correction is not None:
            if rollout_log_probs is None:
                refuse("rollout_log_probs", "be given with a correction", None)
            if self.config.ratio_level == "sequence":
                behaviour = rollout_log_probs
            else:
                weights, filtered = self.correction.weights(
                    old_log_probs, rollout_log_probs, unmasked
                )
                vllm_kl = _masked_mean(rollout_log_probs - old_log_probs, unmasked)
        out = bapo_loss_from_log_probs(
            log_probs,
            behaviour,
            advantages,
            unmasked,
            config=self.config,
            rollout_log_probs=rollout_log_probs,
            rollout_is_weights=weights,
            dp_size=dp_size,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            process_group=self.process_group,
        )
        self.metrics = averageable(self.config, out.metrics)
        ppo_kl = _masked_mean(old_log_probs - log_probs.detach(), unmasked)
        outputs = out.loss, out.metrics["pg_clipfrac"], ppo_kl, vllm_kl, filtered
        return outputs[:4] if self.four_outputs else outputs


class _Correction(NamedTuple):
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
    ) -> _Correction | None:
        """Reads the ``is_correction_...`` of 0.11.2; returns ``None`` without a correction."""
        for (name, choices), value in zip(_CHOICES.items(), (level, mode, gating), strict=True):
            _require_choice(f"is_correction_{name}", value, choices)
        rule = "be 'mask' unless is_correction_level is 'token' and is_correction_gating is 'ratio'"
        clips = level != "seq" and gating == "ratio"
        require(mode == "mask" or clips, "is_correction_mode", rule, repr(mode))
        if level == "off":
            return None
        low, high = _range("is_correction_threshold", threshold)
        rule = f"have a lower bound <= 0 with is_correction_gating={gating!r}"
        require(gating == "ratio" or low <= 0, "is_correction_threshold", rule, threshold)
        return cls(level, mode, gating, low, high)

    def weights(self, old: Tensor, rollout: Tensor, unmasked: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each token, and the share of the tokens or sequences outside the range.

        Args:
            old, rollout: ``[B, T]``, log-probs of the policy before the update, computed by the
                trainer and by the engine that generated.
        """
        log_ratio = torch.where(unmasked, old - rollout, 0.0)
        statistic = log_ratio if self.gating == "ratio" else self._divergence(old, rollout)
        if self.level == "seq":
            total = torch.where(unmasked, statistic, 0.0).sum(-1, keepdim=True)
            # NaN without tokens, which is outside the range, as in OpenRLHF.
            statistic = total / unmasked.sum(-1, keepdim=True)
        if self.gating == "ratio":
            statistic = statistic.exp()
        inside = (statistic >= self.low) & (statistic <= self.high)
        if self.mode == "clip":
            weights = statistic.clamp(self.low, self.high)
        else:
            weights = torch.where(inside, log_ratio.exp(), 0.0)
        outside = (~inside).float()
        share = outside.mean() if self.level == "seq" else _masked_mean(outside, unmasked)
        return weights, share

    def _divergence(self, old: Tensor, rollout: Tensor) -> Tensor:
        """The divergence of two binary distributions: the sampled token, or any other.

        It is float64: in float32 the binary KL of equal policies can round to below 0, the lower
        bound.
        """
        q, p = (values.double().exp().clamp(1e-6, 1 - 1e-6) for values in (old, rollout))
        if self.gating == "tv":
            return (p - q).abs()
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).clamp(min=0.0)


def _masked_mean(values: Tensor, unmasked: Tensor) -> Tensor:
    """The mean over the unmasked tokens; 0 if there is none."""
    return torch.where(unmasked, values, 0.0).sum() / unmasked.sum().clamp(min=1)


def _require_choice(name: str, value: str, choices: Collection[str]) -> None:
    require(value in choices, name, f"be one of {', '.join(map(repr, choices))}", repr(value))


def _range(name: str, threshold: Sequence[float] | None) -> tuple[float, float]:
    numbers = threshold if isinstance(threshold, Sequence) else ()
    rule = "be two numbers, low <= high"
    require(len(numbers) == 2 and numbers[0] <= numbers[1], name, rule, repr(threshold))
    return float(numbers[0]), float(numbers[1])
