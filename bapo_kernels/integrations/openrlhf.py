"""OpenRLHF (signatures of 0.11.0 and 0.11.2): ``PolicyLoss`` with the BAPO loss.

In a subclass of ``ActorPPOTrainer``, or on a trainer that already exists::

    trainer.actor_loss_fn = PolicyLoss(dual_clip=args.dual_clip)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import require
from ..functional import bapo_loss_from_log_probs
from . import config_of, left_to

_OWNERS = left_to(
    "OpenRLHF",
    loss_agg_mode="token_level_loss",
    loss_scale_factor="token_level_loss",
    clip_ratio_c="dual_clip",
    ratio_level="policy_loss_type",
)


class PolicyLoss(torch.nn.Module):
    """Drop-in replacement of ``openrlhf.models.loss.PolicyLoss``.

    Args:
        clip_eps_low, clip_eps_high: accepted, but not used: the bounds are searched.
        dual_clip: cap of the ratio for negative advantages; ``None``: that of the preset.
        token_level_loss: whether to take the mean over all tokens, or the mean over sequences of
            the means over their tokens.
        policy_loss_type: ``"ppo"``, or ``"gspo"``, the ratio of a sequence, for which
            ``token_level_loss`` is ``False`` whatever is given, as in OpenRLHF.
        preset, options: of the search, by the names of :class:`bapo_kernels.BAPOConfig`; an option
            that OpenRLHF decides raises.
        process_group: data-parallel ranks that decide together.
        others: further arguments, whose names depend on the version of OpenRLHF. A correction by
            importance sampling raises, because it would be ignored.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        preset: str = "paper",
        options: dict[str, Any] | None = None,
        process_group: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        kind, rule = policy_loss_type, "be 'ppo' or 'gspo'"
        require(kind in ("ppo", "gspo"), "policy_loss_type", rule, repr(kind))
        level = others.get("is_correction_level", "off")
        require(level == "off", "is_correction_level", "be 'off' with BAPO", repr(level))
        correction = others.get("enable_vllm_is_correction", False)
        require(not correction, "enable_vllm_is_correction", "be False with BAPO", correction)
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        """``(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)`` of tensors ``[B, T]``.

        OpenRLHF 0.11.0 unpacks the first four. ``self.metrics`` has all metrics of the loss.
        """
        out = bapo_loss_from_log_probs(
            log_probs,
            old_log_probs,
            advantages,
            action_mask,
            config=self.config,
            rollout_log_probs=rollout_log_probs,
            dp_size=dp_size,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            process_group=self.process_group,
        )
        self.metrics = out.metrics
        vllm_kl = None
        if rollout_log_probs is not None:
            unmasked = torch.ones_like(log_probs) if action_mask is None else action_mask
            unmasked = unmasked != 0
            difference = torch.where(unmasked, rollout_log_probs - old_log_probs, 0.0)
            vllm_kl = difference.sum() / unmasked.sum().clamp(min=1)
        return out.loss, out.metrics["pg_clipfrac"], out.metrics["ppo_kl"], vllm_kl, None
