"""SkyRL 0.3: a registered policy loss.

May import public modules, the package's checks, and SkyRL inside of functions. SkyRL expects a sum:
a mean would be divided twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks import require
from ..config import BAPOConfig
from ..functional import bapo_loss_from_log_probs
from . import BOUND_METRICS, CLIP_METRICS, config_of, left_to, on_host


def bapo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    bapo: BAPOConfig | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The sum of the losses of tokens ``[B, T]``, as SkyRL expects, and metrics.

    SkyRL has already divided the advantages by counts of tokens or sequences. A constant divisor
    changes no decision, but with ``loss_reduction=sequence_mean`` long sequences weigh less in it.
    ``config.off_policy_correction`` works as in SkyRL's own losses. Tokens that it masks get
    advantage 0.

    Args:
        bapo: options of the loss and the search; default: the paper's, with ``config.clip_ratio_c``
            if ``config.policy_loss_type="dual_clip"``. SkyRL decides temperature, KL and entropy.

    Raises:
        ValueError: ``bapo.loss_agg_mode`` is not ``"token-sum"``, or ``bapo`` sets an option that
            SkyRL decides.
    """
    if bapo is None:
        dual = getattr(config, "policy_loss_type", None) == "dual_clip"
        clip_ratio_c = config.clip_ratio_c if dual else None
        bapo = config_of("paper", loss_agg_mode="token-sum", clip_ratio_c=clip_ratio_c)
    mode = bapo.loss_agg_mode
    require(mode == "token-sum", "bapo.loss_agg_mode", "be 'token-sum'", repr(mode))
    for name, owner in left_to("SkyRL").items():
        value = getattr(bapo, name)
        is_default = value == getattr(BAPOConfig, name)
        require(is_default, f"bapo.{name}", f"be left to {owner}", repr(value))
    weights, correction_metrics = None, {}
    correction = getattr(config, "off_policy_correction", None)
    if correction is not None and rollout_logprobs is not None:
        from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import (
            compute_off_policy_correction,
        )

        weights, correction_metrics, kept = compute_off_policy_correction(
            old_log_probs, rollout_logprobs, loss_mask, correction
        )
        weights = None if weights is None else weights.expand_as(log_probs)
        advantages = advantages * kept
    out = bapo_loss_from_log_probs(
        log_probs,
        old_log_probs,
        advantages,
        loss_mask,
        config=bapo,
        rollout_log_probs=rollout_logprobs,
        rollout_is_weights=weights,
    )
    metrics = on_host(bapo, out.metrics, (*CLIP_METRICS[:3], *BOUND_METRICS))
    return out.loss, {"clip_ratio": metrics.pop("pg_clipfrac"), **metrics, **correction_metrics}


def register(name: str = "bapo") -> None:
    """Adds the loss to SkyRL's registry, for ``trainer.algorithm.policy_loss_type=bapo``.

    Call it where the trainer is set up: SkyRL passes registered losses to its workers.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss

    register_policy_loss(name)(bapo_policy_loss)
