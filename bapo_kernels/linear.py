"""The public functions of hidden states: check, run the chunks, attach the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from ._autograd import (
    LinearLogProbs,
    differentiable_loss,
    in_backward,
    output_with_gradients,
)
from .backends import choose
from .call import LossOptions, Statistics, log_probs_call, loss_call
from .checks import check_group
from .chunks import loss_of_hidden
from .config import BAPOConfig
from .distributed import VocabShard, local_parameter, warn_if_not_synchronised
from .gemm import Head
from .inputs import (
    check_head,
    check_options,
    checked_temperature,
    config_or_default,
    gemm_dtype,
)
from .output import BAPOOutput, ClipBounds


def bapo_linear_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
    temperature: Tensor | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    statistics: Statistics = "all",
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
    vocab_group: dist.ProcessGroup | None = None,
) -> BAPOOutput:
    """:func:`bapo_loss` of ``hidden_states @ lm_head_weight.T + bias``, never fully materialised.

    The logits exist one chunk of rows at a time. Masked rows are skipped, and with
    ``statistics="live"`` so are rows that cannot change the loss. Rows whose gradient is zero
    whatever the bounds take part in the forward GEMM only; the logits of undecided rows are
    recomputed once the bounds are known. Two row counts per chunk are read on the host. Under
    ``torch.compile``, and in float16, the gradient is made in backward, where the logits of rows
    that have one are recomputed.

    Args:
        hidden_states: ``[..., H]`` float32, bfloat16 or float16; float64 runs on the reference
            (slow, for checks).
        lm_head_weight: ``[V, H]`` in the same dtype (any, under autocast), as ``nn.Linear.weight``.
        bias: ``[V]``.
        chunk_tokens: rows of logits that exist at a time; default: 1 GiB of them.
        vocab_group: the rows of ``lm_head_weight`` and ``bias`` are sharded over it. Every rank
            passes the same hidden states and gets their whole gradient, by one all-reduce in
            forward (in float16, in backward).

    ``lm_head_weight`` and ``bias`` may be DTensors: sharded by FSDP2 (they are gathered for the
    forward, and their gradient is scattered in backward as the mean of the ranks), or along the
    vocabulary over ``vocab_group``. Everything else is as in :func:`bapo_loss`. The loss is
    differentiable with respect to ``hidden_states``, ``lm_head_weight`` and ``bias``.

    Examples:
        >>> hidden, lm_head = torch.ones(3, 4, requires_grad=True), torch.nn.Linear(4, 10)
        >>> labels, advantages = torch.tensor([5, 7, -100]), torch.tensor([1.0, 0.0, 1.0])
        >>> options = dict(bias=lm_head.bias, statistics="live")
        >>> out = bapo_linear_loss(hidden, lm_head.weight, labels, None, advantages, **options)
        >>> out.log_probs.isnan()  # with advantage 0 a row is skipped
        tensor([False,  True, False])
        >>> out.loss.backward()
        >>> (hidden.grad != 0).any(-1)
        tensor([ True, False, False])
    """
    options: LossOptions = dict(
        config=config_or_default(config),
        bounds=bounds,
        statistics=statistics,
        process_group=process_group,
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
    )
    check_head(hidden_states, lm_head_weight, bias, labels, chunk_tokens, vocab_group)
    check_options(statistics, process_group, vocab_group)
    weight, bias, dtype, backend = _local_head(
        hidden_states, lm_head_weight, bias, vocab_group, backend
    )
    batch = old_log_probs, advantages, response_mask
    columns = weight.shape[0]
    of_logits: Any = dict(temperature=temperature, vocab_group=vocab_group)
    call = loss_call(labels, backend, *batch, columns=columns, **of_logits, **options)
    if backend == "reference":
        return reference.bapo_linear_loss(
            hidden_states, weight, labels, *batch, bias=bias, **of_logits, **options
        )

    parameters = hidden_states, weight, bias
    needs = tuple(
        torch.is_grad_enabled() and parameter is not None and parameter.requires_grad
        for parameter in parameters
    )
    # A compiler cannot trace the loop over chunks; it is inside an operator there.
    if (any(needs) or torch.compiler.is_compiling()) and in_backward(dtype):
        logp, entropy = LinearLogProbs.apply(*parameters, call, dtype, chunk_tokens)
        return differentiable_loss(call, logp, entropy)
    with torch.no_grad():
        head = Head.of(*parameters, dtype, call.shard)
        output, gradients = loss_of_hidden(call, head, needs, chunk_tokens)
    made = [None, None, None] if gradients is None else gradients.of(*parameters)
    return output_with_gradients(output, backend, parameters, made)


def linear_log_probs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`log_probs` of ``hidden_states @ lm_head_weight.T + bias``, a chunk of rows at a time.

    Backward recomputes the logits of the rows whose incoming gradients are not zero.

    Args:
        hidden_states: ``[..., H]``; ``lm_head_weight``: ``[V, H]``; ``bias``: ``[V]``; dtypes and
            shards as in :func:`bapo_linear_loss`. With ``vocab_group``, backward makes one
            all-reduce.
        chunk_tokens: rows of logits that exist at a time; default: 1 GiB of them.

    Examples:
        >>> hidden, weight = torch.ones(2, 4), torch.zeros(10, 4)
        >>> linear_log_probs(hidden, weight, torch.tensor([3, -100]), chunk_tokens=1)
        (tensor([-2.3026,  0.0000]), tensor([2.3026, 0.0000]))
    """
    config = BAPOConfig(
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
    )
    check_head(hidden_states, lm_head_weight, bias, labels, chunk_tokens, vocab_group)
    check_group("vocab_group", vocab_group)
    of_tokens = None
    if isinstance(temperature, Tensor):
        of_tokens = checked_temperature(temperature, labels, "labels")
    weight, bias, dtype, backend = _local_head(
        hidden_states, lm_head_weight, bias, vocab_group, backend
    )
    if backend == "reference":
        return reference.linear_log_probs(
            hidden_states,
            weight,
            labels,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            final_logit_softcapping=final_logit_softcapping,
            return_entropy=return_entropy,
            vocab_group=vocab_group,
        )
    shard = VocabShard.of(weight.shape[0], labels, vocab_group)
    call = log_probs_call(labels, config, backend, shard, of_tokens)
    logp, entropy = LinearLogProbs.apply(hidden_states, weight, bias, call, dtype, chunk_tokens)
    entropy = entropy.float().view(labels.shape) if return_entropy else None
    return logp.float().view(labels.shape), entropy


def _local_head(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    vocab_group: dist.ProcessGroup | None,
    backend: str | None,
) -> tuple[Tensor, Tensor | None, torch.dtype, str]:
    """What this rank computes with: weight and bias, dtype of the GEMMs, backend."""
    dtype = gemm_dtype(hidden_states, lm_head_weight, bias)
    warn_if_not_synchronised(hidden_states, lm_head_weight)
    weight = local_parameter("lm_head_weight", lm_head_weight, vocab_group)
    bias = None if bias is None else local_parameter("bias", bias, vocab_group)
    like = hidden_states.new_empty(0, dtype=dtype)
    return weight, bias, dtype, choose(backend, like, "hidden_states")
