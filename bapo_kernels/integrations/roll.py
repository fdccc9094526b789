"""ROLL 0.3: the policy term of an actor worker.

May import public modules. With another divisor than that of ROLL's ``agg_loss``, its KL and entropy
terms would have another weight against the policy's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..functional import bapo_loss_from_log_probs
from . import averageable, config_of, left_to, masked_reduction

_OWNERS = left_to("ROLL", loss_agg_mode="loss_agg_mode", loss_scale_factor="loss_agg_mode")


def bapo_pg_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    batch_num_tokens: float | Tensor | None = None,
    global_valid_samples: float | Tensor | None = None,
    weights: Tensor | None = None,
    train_infer_is_weight: Tensor | None = None,
    infer_log_probs: Tensor | None = None,
    preset: str = "paper",
    options: dict[str, Any] | None = None,
    process_group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss of tensors ``[B, T]``, and metrics ``actor/...``.

    The KL and entropy terms remain ROLL's. Aggregates like ROLL's ``agg_loss``:
    ``seq-mean-token-sum-norm`` divides the sum by the padded length alone, and without
    ``global_valid_samples`` a mean over sequences counts all of them.
    ``weights`` are ROLL's weights ``[B]`` of the samples. ``options`` set the search, the dual
    clip, the surrogate and the level of the ratio. An option that ROLL decides raises.
    """
    mode, counts = masked_reduction(
        loss_agg_mode, response_mask, batch_num_tokens, global_valid_samples
    )
    is_weights = train_infer_is_weight
    if weights is not None:
        per_token = weights[:, None].expand(log_probs.shape)
        is_weights = per_token if is_weights is None else per_token * is_weights
    config = config_of(preset, options, _OWNERS, loss_agg_mode=mode)
    out = bapo_loss_from_log_probs(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        config=config,
        rollout_log_probs=infer_log_probs,
        rollout_is_weights=is_weights,
        process_group=process_group,
        **counts,
    )
    metrics = averageable(config, out.metrics)
    return out.loss, {f"actor/{name}": value for name, value in metrics.items()}
