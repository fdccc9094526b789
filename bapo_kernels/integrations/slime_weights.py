"""Weights of the response tokens of slime: its reductions, its corrections, OPSM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .slime_tokens import ResponseTokens


class Weights(NamedTuple):
    """Of every response token, ``[R]``; zero where another rank has the token in its lists.

    Attributes:
        policy: of the policy term, factors of OPSM and of a correction included.
        others: of the KL and entropy terms: zero where a correction rejects the token.
        logged: of what is logged of all tokens, rejected ones included.
        kept: 0 for tokens that a correction rejects, of all ranks. Their advantages become 0, which
            takes them out of the search, and leaves them in the ratio of a sequence as in slime.
        log: metrics of OPSM and of the correction.
    """

    policy: Tensor
    others: Tensor
    logged: Tensor
    kept: Tensor
    log: dict[str, Tensor]


def corrects(args: Any) -> bool:
    """Whether slime corrects, or measures, the mismatch of its two engines."""
    return bool(args.use_tis or args.get_mismatch_metrics)


def weights_of(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    reduction: Callable[[Tensor], Tensor],
    log_probs: Tensor | None,
    old_log_probs: Tensor | None,
) -> Weights:
    """The weights that slime's own functions give.

    OPSM and the correction (``use_tis``, or the function at ``custom_tis_function_path``) multiply
    the policy terms by factors, so what they make of ones are the factors.

    Args:
        log_probs: ``[R]``, for OPSM, and for a correction where the batch has none.
        old_log_probs: ``[R]``; default: ``log_probs``.
    """
    lengths, masks = (batch["total_lengths"], batch["response_lengths"]), batch["loss_masks"]
    per_token = args.calculate_per_token_loss
    logged = others = tokens.weights(reduction)
    factors = torch.ones(len(tokens.listed), device=logged.device)
    log: dict[str, Tensor] = {}
    if args.use_opsm:
        factors, log["opsm_clipfrac"] = _opsm(args, batch, tokens, log_probs, old_log_probs)
    if corrects(args):
        from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

        factors, masks, metrics = _correction(args)(
            args=args,
            pg_loss=factors,
            train_log_probs=_train_log_probs(batch, tokens, log_probs),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=masks,
            total_lengths=lengths[0],
            response_lengths=lengths[1],
        )
        log |= {name: reduction(value) for name, value in metrics.items()}
        # Rejected tokens leave the numerators, not the denominators.
        kept = get_sum_of_sample_mean(*lengths, masks, batch["rollout_mask_sums"], per_token)
        others = tokens.weights(kept)
    policy, path = others, getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is not None:
        policy = tokens.weights(_load(path)(*lengths, masks, per_token))
    policy = policy.index_copy(0, tokens.listed, policy[tokens.listed] * factors.detach())
    return Weights(policy, others, logged, torch.cat(list(masks)).to(others), log)


def _opsm(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    log_probs: Tensor | None,
    old_log_probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Factors of off-policy sequence masking, and the share that it drops."""
    from slime.utils.ppo_utils import compute_opsm_mask

    assert log_probs is not None
    old = log_probs if old_log_probs is None else old_log_probs
    factors, share = compute_opsm_mask(
        args=args,
        full_log_probs=log_probs.detach().split(tokens.lengths),
        full_old_log_probs=old.detach().split(tokens.lengths),
        advantages=batch["advantages"],
        loss_masks=batch["loss_masks"],
    )
    return factors, share


def _train_log_probs(
    batch: dict[str, Any], tokens: ResponseTokens, log_probs: Tensor | None
) -> list[Tensor]:
    if batch.get("log_probs"):
        return list(batch["log_probs"])
    assert log_probs is not None
    counts = [len(values) for values in batch["advantages"]]
    return list(log_probs.detach()[tokens.listed].split(counts))


def _correction(args: Any) -> Any:
    if args.custom_tis_function_path is not None:
        return _load(args.custom_tis_function_path)
    from slime.backends.megatron_utils.loss import vanilla_tis_function

    return vanilla_tis_function


def _load(path: str) -> Any:
    from slime.utils.misc import load_function

    return load_function(path)
