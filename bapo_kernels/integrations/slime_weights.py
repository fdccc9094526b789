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
        policy: of the policy term, factors of a correction included.
        others: of the KL and entropy terms, and of what is logged.
        mask: tokens that count in the search; of all ranks.
        log: metrics of the correction.
    """

    policy: Tensor
    others: Tensor
    mask: Tensor
    log: dict[str, Tensor]


def corrects(args: Any) -> bool:
    """Whether slime weighs the tokens by the mismatch of its two engines."""
    return getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)


def weights_of(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    reduction: Callable[[Tensor], Tensor],
    log_probs: Tensor | None,
) -> Weights:
    """The weights that slime's own functions give.

    slime multiplies the policy terms by the factors of its correction (``use_tis``, or the function
    at ``custom_tis_function_path``), so the corrected terms of ones are the factors.

    Args:
        log_probs: ``[R]``, for the correction where the batch has none.
    """
    masks, factors = batch["loss_masks"], None
    log: dict[str, Tensor] = {}
    lengths = batch["total_lengths"], batch["response_lengths"]
    per_token = getattr(args, "calculate_per_token_loss", False)
    if corrects(args):
        train = batch.get("log_probs")
        if not train:
            assert log_probs is not None
            counts = [len(values) for values in batch["advantages"]]
            train = log_probs.detach()[tokens.listed].split(counts)
        factors, masks, metrics = _correction(args)(
            args=args,
            pg_loss=torch.ones(len(tokens.listed), device=tokens.listed.device),
            train_log_probs=list(train),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=masks,
            total_lengths=lengths[0],
            response_lengths=lengths[1],
        )
        log = {name: reduction(value).detach() for name, value in metrics.items()}
        from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

        # Tokens that the correction rejects leave the numerators, not the denominators.
        reduction = get_sum_of_sample_mean(*lengths, masks, batch["rollout_mask_sums"], per_token)
    others = policy = tokens.weights(reduction)
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is not None:
        from slime.utils.misc import load_function

        policy = tokens.weights(load_function(path)(*lengths, masks, per_token))
    if factors is not None:
        policy = policy.index_copy(0, tokens.listed, policy[tokens.listed] * factors.detach())
    return Weights(policy, others, torch.cat(list(masks)).to(others), log)


def opsm(
    args: Any, tokens: ResponseTokens, log_ratios: Tensor, advantages: Tensor, masks: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence masking: the tokens ``[R]`` that it drops, and their logged share.

    These are the tokens of negative advantage of the responses whose mean of ``old - logp`` is
    above ``opsm_delta``.
    """
    dropped, shares = [], []
    ratios, of_samples = log_ratios.split(tokens.lengths), advantages.split(tokens.lengths)
    samples = zip(ratios, of_samples, masks, strict=True)
    for log_ratio, A, mask in samples:
        unmasked = mask.sum().clamp(min=1)
        kl = -(log_ratio * mask).sum() / unmasked
        dropped.append((A < 0) & (kl > args.opsm_delta))
        shares.append(dropped[-1] / unmasked)
    return torch.cat(dropped), torch.cat(shares)[tokens.listed].sum()


def _correction(args: Any) -> Any:
    path = getattr(args, "custom_tis_function_path", None)
    if path is None:
        from slime.backends.megatron_utils.loss import vanilla_tis_function

        return vanilla_tis_function
    from slime.utils.misc import load_function

    return load_function(path)
