"""``loss_agg_mode`` as a weight per token, known before any logit is read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import BAPOConfig


def sequence_index(cu_seqlens: Tensor, N: int) -> Tensor:
    """The sequence that each of ``N`` packed tokens belongs to.

    Tokens behind the last offset get the number of sequences.
    """
    positions = torch.arange(N, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:].long(), right=True)


def token_weights(
    unmasked: Tensor,
    config: BAPOConfig,
    *,
    cu_seqlens: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Weights with which the losses per token add up to the loss, as in verl's ``agg_loss``.

    Args:
        unmasked: bool ``[B, S]``, or ``[N]``. The sequence modes need ``cu_seqlens`` for ``[N]``;
            the tokens behind the last offset must then be masked.

    Returns:
        float64, shape of ``unmasked``; masked tokens have weight 0.

    Examples:
        >>> unmasked = torch.tensor([[True, True, False], [True, False, False]])
        >>> token_weights(unmasked, BAPOConfig(loss_agg_mode="seq-mean-token-mean"))
        tensor([[0.2500, 0.2500, 0.0000],
                [0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    """
    mode = config.loss_agg_mode
    weights = unmasked.double() * dp_size
    if mode == "token-sum":
        return weights
    if mode == "token-mean":
        if batch_num_tokens is None:
            batch_num_tokens = unmasked.sum().clamp(min=1)
        return weights / batch_num_tokens

    if cu_seqlens is None:
        counts = counts_of_token = unmasked.sum(-1, keepdim=True)
    else:
        running = F.pad(unmasked.cumsum(0), (1, 0))
        counts = running[cu_seqlens.long()].diff()
        counts_of_token = F.pad(counts, (0, 1))[sequence_index(cu_seqlens, unmasked.numel())]
    if global_batch_size is None:
        global_batch_size = (counts > 0).sum().clamp(min=1)
    weights = weights / global_batch_size
    if mode == "seq-mean-token-mean":
        weights = weights / counts_of_token.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        weights = weights / (config.loss_scale_factor or unmasked.shape[-1])
    return weights
