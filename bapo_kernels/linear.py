"""The public functions of hidden states. Imports core, the backends and the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from .backends import choose
from .checks import count, names_instead
from .config import BAPOConfig
from .core.arguments.options import RowOptions, SoftmaxOptions
from .core.arguments.prepare import prepared
from .core.arguments.single import check_head, config_or_default
from .core.arguments.together import log_probs_arguments, loss_arguments
from .core.autograd import in_backward, output_with_gradients
from .core.call import Products, Statistics
from .core.distributed import local_head
from .core.head.head import Head
from .core.head.hidden import loss_of_hidden
from .core.head.log_probs import LinearLogProbs
from .core.head.top_k import top_k
from .core.tokens import differentiable_loss
from .output import BAPOOutput, GivenBounds
from .sampling_mask import SamplingMask


@names_instead
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
    bounds: GivenBounds | None = None,
    temperature: float | Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    gradient_samples: int | None = None,
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
    ``statistics="live"`` so are rows that cannot change the loss. Rows whose gradient is zero at
    any bounds take part in the forward GEMM only. The logits of undecided rows are recomputed once
    the bounds are known. The host reads the row counts of each chunk. Under ``torch.compile``, and
    in float16, backward computes the gradient, and recomputes the logits of the rows that have one.
    With a frozen head (neither ``lm_head_weight`` nor ``bias`` requires a gradient) the gradient of
    each log-prob is computed at once, and scaled when the loss is known. No logits are then
    recomputed, except in float16 and for an entropy term.

    Args:
        hidden_states: ``[..., H]`` float32, bfloat16 or float16; float64 runs on the reference
            (slow, for checks).
        lm_head_weight: ``[V, H]`` in the same dtype (any, under autocast), as ``nn.Linear.weight``.
        bias: ``[V]``.
        sampling_mask: as in :func:`bapo_loss`. The logits of a set are dot products with its rows
            of the head, in float32 whatever ``logits_dtype``. ``K`` ids in all take ``2*K*H``
            operations for their logits and ``4*K*H`` for the gradients (``2*K*H`` with a frozen
            head), and never a row of ``V`` logits.
        chunk_tokens: at most that many rows of logits exist at a time; default: 1 GiB of them.
            Chunks are equal, and as few as possible. With a trained head in half precision that
            ``vocab_group`` does not shard, up to ``2*H`` rows (``2*H/3`` with float32 logits) are
            one chunk: several would take more memory, for a float32 sum.
        logits_dtype: ``torch.float32`` keeps the logits of bfloat16 or float16 inputs in float32,
            the dtype in which their products are summed. Their gradient is rounded to the dtype of
            the inputs, except on a CPU that multiplies this dtype in float32 (``python -m
            bapo_kernels`` shows it). Default: the dtype of the inputs, or of autocast.
        gradient_samples: an integer C from 1 to 65,536 makes the gradient of each row from a sample
            of its ids, whose mean is the exact one (to 0.3/C of its L1 norm, without an entropy
            term): at most C entries are expected, and its label. A row then takes one product with
            the head, and no logits are recomputed. Rows with a set stay exact. Default: exact.
            docs/hidden_states.md has the rule (Wangni et al. 2017, arXiv 1710.09854), its error,
            and what it means for Adam.
        vocab_group: the rows of ``lm_head_weight`` and ``bias`` are sharded over it, in rank order,
            any number of them. Every rank passes the same hidden states and labels of the whole
            vocabulary. It gets the same output, the gradient of its rows, and the whole gradient of
            the hidden states, by one all-reduce in the pass that computes it. The statistics take
            an all-gather of 8 bytes, and for each chunk one of 32 bytes per token.

    ``lm_head_weight`` and ``bias`` may be DTensors, sharded along the vocabulary over
    ``vocab_group``, or by FSDP2. Forward gathers those of FSDP2, and backward scatters their
    gradient as the mean of the ranks. Everything else is as in :func:`bapo_loss`. The loss is
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
    options: RowOptions = dict(
        config=config_or_default(config),
        bounds=bounds,
        temperature=temperature,
        sampling_mask=sampling_mask,
        statistics=statistics,
        process_group=process_group,
        vocab_group=vocab_group,
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
    )
    products = check_head(
        *(hidden_states, lm_head_weight, bias, labels, logits_dtype, chunk_tokens, vocab_group),
        gradient_samples=gradient_samples,
    )
    batch = old_log_probs, advantages, response_mask
    arguments = loss_arguments(labels, *batch, **options)
    backend = _choose(backend, hidden_states, products)
    weight, bias = local_head(lm_head_weight, bias, vocab_group)
    needs = _needs(hidden_states, weight, bias)
    arguments.check_ranks("bapo_linear_loss", backend, **_in_common(needs, products))
    products = _sampled_where_it_saves(products, needs, weight, vocab_group)
    if backend == "reference":
        operands = hidden_states.to(products.dtype), weight.to(products.dtype)
        return reference.bapo_linear_loss(
            *(*operands, labels, *batch),
            bias=bias,
            logits_dtype=products.logits_dtype,
            gradient_samples=products.gradient_samples,
            **options,
        )

    call, parameters = prepared(backend, arguments, weight.shape[0]), (hidden_states, weight, bias)
    # A compiler cannot trace the loop over chunks; it is inside an operator there.
    if (any(needs) or torch.compiler.is_compiling()) and in_backward(products.dtype):
        unscaled = _leaves_unscaled(needs, products) and not call.options.entropy_coef
        logp, entropy, *_ = LinearLogProbs.apply(*parameters, call, unscaled, products)
        return differentiable_loss(call, logp, entropy)
    with torch.no_grad():
        head = Head.of(*parameters, products, call.shard)
        output, gradients = loss_of_hidden(call, head, needs)
    made = [None, None, None] if gradients is None else gradients.like(*parameters)
    return output_with_gradients(output, backend, parameters, made)


@names_instead
def linear_log_probs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    sampling_mask: SamplingMask | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    gradient_samples: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`log_probs` of ``hidden_states @ lm_head_weight.T + bias``, a chunk of rows at a time.

    Backward recomputes the logits of the rows whose incoming gradients are not zero. With a frozen
    head (neither ``lm_head_weight`` nor ``bias`` requires a gradient) forward computes the gradient
    of each log-prob with respect to its hidden state, and backward scales it. No logits are then
    recomputed, except in float16 and for a gradient of the entropy. K labels per row take the
    products of one, and with a frozen head ``2*N*K*H`` FLOPs in backward; ``[N, K, H]`` never
    exists.

    Args:
        hidden_states: ``[..., H]``; ``lm_head_weight``: ``[V, H]``; ``bias``: ``[V]``; dtypes and
            shards as in :func:`bapo_linear_loss`.
        vocab_group: as in :func:`bapo_linear_loss`; with K labels the all-gather has 8*(3 + K)
            bytes per token. The all-reduce is in backward. With a frozen head and labels ``[...]``
            it is in forward, except in float16, and a gradient of the entropy takes another in
            backward.
        chunk_tokens, logits_dtype: as in :func:`bapo_linear_loss`.
        gradient_samples: as there. Forward keeps the samples, of 8 bytes per entry, and backward
            recomputes no logits, also with a gradient of the entropy.

    Examples:
        >>> hidden, weight = torch.ones(2, 4), torch.zeros(10, 4)
        >>> linear_log_probs(hidden, weight, torch.tensor([3, -100]), chunk_tokens=1)
        (tensor([-2.3026,  0.0000]), tensor([2.3026, 0.0000]))
    """
    options: SoftmaxOptions = dict(
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
        sampling_mask=sampling_mask,
        vocab_group=vocab_group,
    )
    parameters = hidden_states, lm_head_weight, bias
    given = *parameters, labels, logits_dtype, chunk_tokens, vocab_group, True
    products = check_head(*given, gradient_samples=gradient_samples)
    arguments = log_probs_arguments(labels, labels.ndim == hidden_states.ndim, **options)
    backend = _choose(backend, hidden_states, products)
    weight, bias = local_head(lm_head_weight, bias, vocab_group)
    needs = _needs(hidden_states, weight, bias)
    arguments.check_ranks("linear_log_probs", backend, **_in_common(needs, products))
    products = _sampled_where_it_saves(products, needs, weight, vocab_group)
    if backend == "reference":
        operands = hidden_states.to(products.dtype), weight.to(products.dtype)
        return reference.linear_log_probs(
            *operands,
            labels,
            bias=bias,
            return_entropy=return_entropy,
            logits_dtype=products.logits_dtype,
            gradient_samples=products.gradient_samples,
            **options,
        )
    call = prepared(backend, arguments, weight.shape[0])
    unscaled = _leaves_unscaled(needs, products)
    logp, entropy, *_ = LinearLogProbs.apply(hidden_states, weight, bias, call, unscaled, products)
    entropy = entropy.float().view(hidden_states.shape[:-1]) if return_entropy else None
    return logp.float().view(labels.shape), entropy


@names_instead
@torch.no_grad()
def linear_top_k(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    sampling_mask: SamplingMask | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` most probable ids of each row and their log-probs, without a gradient.

    What a teacher sends, or the student's own support: :func:`linear_log_probs` takes the ids as
    labels. Logits exist a chunk of rows at a time; their products are those of one forward.

    Args:
        hidden_states: ``[..., H]``; ``lm_head_weight``: ``[V, H]``; ``bias``: ``[V]``, and the
            other arguments as in :func:`linear_log_probs`.
        k: from 1 to ``V``.
        vocab_group: every rank gets the same ids, of the whole vocabulary. Each chunk takes an
            all-gather of 16 bytes per token and id, and those of :func:`linear_log_probs`.

    Returns:
        Log-probs, float32 ``[..., k]`` (of float64 float64), and ids, int64 ``[..., k]``, the most
        probable first. A row with fewer ids (:class:`SamplingMask`) ends in -inf and -100.

    Examples:
        >>> hidden, weight = torch.tensor([[1.0]]), torch.tensor([0.0, 2.0, 1.0])[:, None]
        >>> linear_top_k(hidden, weight, 2)
        (tensor([[-0.4076, -1.4076]]), tensor([[1, 2]]))
    """
    options: SoftmaxOptions = dict(
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
        sampling_mask=sampling_mask,
        vocab_group=vocab_group,
    )
    parameters, k = (hidden_states, lm_head_weight, bias), count("k", k)
    products = check_head(*parameters, None, logits_dtype, chunk_tokens, vocab_group)
    rows = torch.zeros_like(hidden_states[..., 0], dtype=torch.int64)
    arguments = log_probs_arguments(rows, **options)
    backend = _choose(backend, hidden_states, products)
    weight, bias = local_head(lm_head_weight, bias, vocab_group)
    arguments.check_ranks("linear_top_k", backend, k=k, **products._asdict())
    if backend == "reference":
        operands = hidden_states.to(products.dtype), weight.to(products.dtype)
        return reference.linear_top_k(
            *operands, k, bias=bias, logits_dtype=products.logits_dtype, **options
        )
    call = prepared(backend, arguments, weight.shape[0])
    logp, ids = top_k(call, products, k, hidden_states, weight, bias)
    return logp.float().view(*rows.shape, k), ids.view(*rows.shape, k)


def _choose(backend: str | None, hidden_states: Tensor, products: Products) -> str:
    """The backend, for logits that are products in this dtype."""
    like = hidden_states.new_empty(0, dtype=products.dtype)
    return choose(backend, like, "hidden_states")


def _needs(*parameters: Tensor | None) -> tuple[bool, ...]:
    """Whether hidden states, weight and bias need a gradient."""
    return tuple(
        torch.is_grad_enabled() and parameter is not None and parameter.requires_grad
        for parameter in parameters
    )


def _in_common(needs: tuple[bool, ...], products: Products) -> dict[str, Any]:
    """Facts that must be the same on the ranks of ``vocab_group``, too, by name."""
    names = (f"requires_grad of {name}" for name in ("hidden_states", "lm_head_weight", "bias"))
    return dict(zip(names, needs, strict=True)) | products._asdict()


def _leaves_unscaled(needs: tuple[bool, ...], products: Products) -> bool:
    """Whether forward makes the gradients of log-probs, to be scaled in backward.

    In float16 that would lose small probabilities, which a gradient times a loss scale keeps. The
    entries of a sample take less memory.
    """
    is_exact = products.gradient_samples is None
    return needs == (True, False, False) and products.dtype != torch.float16 and is_exact


def _sampled_where_it_saves(
    products: Products,
    needs: tuple[bool, ...],
    weight: Tensor,
    vocab_group: dist.ProcessGroup | None,
) -> Products:
    """Exact products where there is no gradient, or where all entries of a row would be kept."""
    samples = products.gradient_samples
    is_whole = samples is not None and vocab_group is None and samples >= weight.shape[0]
    return products._replace(gradient_samples=None) if is_whole or not any(needs) else products
