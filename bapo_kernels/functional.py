"""The public functions of logits and log-probs: check, run the kernels, attach the gradient.

Imports core, the backends and the reference. Users rely on the names, order and defaults of the
arguments. A call that the reference runs makes nothing for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from .backends import choose
from .checks import names_instead, refuse, typed
from .config import BAPOConfig
from .core.arguments.options import LossOptions, RowOptions, SoftmaxOptions
from .core.arguments.prepare import prepared
from .core.arguments.single import check_inplace, check_logits, config_or_default
from .core.arguments.together import log_probs_arguments, loss_arguments, token_arguments
from .core.autograd import OverwrittenLogits, in_backward, output_with_gradients
from .core.call import Statistics
from .core.rows import differentiable_log_probs, loss_of_logits
from .core.tokens import differentiable_loss
from .output import BAPOOutput, GivenBounds
from .sampling_mask import SamplingMask


@names_instead
def bapo_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    bounds: GivenBounds | None = None,
    temperature: float | Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    backend: str | None = None,
    inplace: bool = False,
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
    """BAPO policy loss of logits: bounds, loss and gradient in one call (Algorithm 1).

    Let ``x = transform(z)/temperature``, ``logp = x_label - logsumexp(x)`` and
    ``r = exp(clamp(logp - old_log_prob, -20, 20))``. The policy term of a token is
    ``-min(r*A, clip(r, c_low, c_high)*A)``, at most ``-A*clip_ratio_c`` for A < 0 (dual clip). The
    loss of the token is this term times the importance weight,
    ``+ kl_loss_coef*kl - entropy_coef*entropy``. ``config.loss_agg_mode`` says how the tokens are
    aggregated. ``config.surrogate`` has other policy terms (CISPO, SAPO, masks), and
    ``config.ratio_level`` the ratio of a sequence (GSPO).

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any row strides. ``-inf`` forbids a
            token. float64 runs on the reference (slow, for checks).
        labels: ``[...]`` integers, aligned with the rows; -100 marks a masked token.
        old_log_probs: ``[...]``, of the policy that the update starts from; ``None`` is on-policy.
        advantages: ``[...]``, or one per sequence.
        response_mask: ``[...]`` bool, int or float; 0 is masked, every other value counts as 1.
            Masked entries of every argument may hold anything.
        config: options of the loss and the search; default: the paper's.
        bounds: clip bounds of the ratio, lower <= 1 <= upper, which replace the search. Each is a
            number, or a tensor that is 0-dim, ``[...]``, or one per sequence. :class:`ClipBounds`
            has the rules of their values.
        temperature: a number, or a tensor ``[...]``, one per sequence or 0-dim: of the distribution
            that each token was sampled from. It replaces ``config.temperature``; a tensor is read
            as float32, without gradient.
        sampling_mask: the set of ids that each token could have been drawn from; an empty set is
            the whole vocabulary. Log-prob, entropy, KL and gradient are those of the distribution
            over the set. ``old_log_probs``, ``rollout_log_probs`` and ``ref_log_probs`` must be
            over the same sets. A label outside its set has log-prob -inf;
            ``metrics["label_outside_mask"]`` counts these.
        backend: ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``; default: the first of them
            that can run.
        inplace: overwrite ``logits`` with the gradient; using them again raises in backward, and
            without autograd reads that gradient.
            Otherwise the gradient on a CPU reuses the buffer of the previous one once that is
            unreferenced (:func:`empty_cache`).
        statistics: ``"all"`` computes log-probs, entropy and metrics of every unmasked token.
            ``"live"`` skips tokens that cannot change the loss. Loss and gradient are the same.
        cu_seqlens: ``[B + 1]`` sequence offsets of packed ``[N]`` tokens, from 0; tokens after the
            last offset are masked.
        rollout_log_probs: ``[...]``, token weights of the search; default: ``old_log_probs``.
        rollout_is_weights: ``[...]``, factors of the policy term.
        ref_log_probs: ``[...]``, of the reference policy, for the KL term.
        batch_num_tokens: as in verl, the divisor of the mean over tokens; default: the number of
            unmasked tokens of this call.
        global_batch_size: as in verl, the divisor of the mean over sequences; default: the number
            of sequences of this call that have an unmasked token. If you give only one of the two
            counts, the mode must divide by it.
        dp_size: as in verl, a factor of the loss. With the counts of all ranks above and the number
            of ranks here, the mean of the ranks' gradients is the gradient of the whole batch.
        process_group: the search covers the tokens of all its ranks, by one all-reduce. With
            ``bounds`` there is none, and all metrics are those of this rank. ``None``: this rank
            alone (``dist.group.WORLD`` is ``None`` before ``init_process_group``).
        vocab_group: the vocabulary is sharded over its ranks. ``logits`` are the columns of this
            rank, in rank order, any number of them. Every rank passes the same tokens, with labels
            of the whole vocabulary. It gets the same output, and the gradient of its columns. Costs
            an all-gather of 8 bytes, and one of 32 bytes per token.

    Returns:
        :class:`BAPOOutput`; ``loss`` has the gradient of ``logits``, in their dtype. Forward
        computes it, except in float16 (which needs the loss scale) and under ``torch.compile``.
        Where forward computed it, a backward through ``log_probs`` or ``entropy`` raises; elsewhere
        it is supported.

    Raises:
        ValueError: an argument breaks its rule, the named backend cannot run, or the ranks of a
            group differ in its first call. Values that only the device knows (a label outside the
            vocabulary, NaN logits, a non-finite old log-prob, a temperature that is not finite and
            > 0) make the loss NaN; :func:`bapo_kernels.debug.check_inputs` finds them.

    Examples:
        >>> logits, labels = torch.zeros(3, 4, requires_grad=True), torch.tensor([0, 1, -100])
        >>> old_log_probs = torch.tensor([-1.4, -2.4, torch.nan])
        >>> out = bapo_loss(logits, labels, old_log_probs, torch.tensor([1.0, 1.0, 1.0]))
        >>> out.bounds  # all tokens are positive: no search
        ClipBounds(lower=tensor(0.6000), upper=tensor(1.2000))
        >>> out.loss.backward()
        >>> (logits.grad != 0).any(-1)  # kept, clipped, masked
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
    check_logits(logits, labels, vocab_group)
    backend = choose(backend, logits, "logits")
    if not isinstance(inplace, bool):
        refuse("inplace", "be a bool", typed(inplace))
    if inplace:
        check_inplace(logits)
    batch = old_log_probs, advantages, response_mask
    arguments = loss_arguments(labels, *batch, **options)
    arguments.check_ranks("bapo_loss", backend)

    def reference_loss(logits: Tensor) -> BAPOOutput:
        return reference.bapo_loss(logits, labels, *batch, **options)

    if backend == "reference" and not inplace:
        return reference_loss(logits)
    overwritten = OverwrittenLogits() if inplace else None
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if backend == "reference":
        output, dlogits = _in_place(reference_loss, logits)
        output = output_with_gradients(output, backend, (logits,), (dlogits,), overwritten)
    else:
        call = prepared(backend, arguments, logits.shape[-1])
        if needs_gradient and in_backward(logits.dtype):
            logp, entropy = differentiable_log_probs(call, logits, overwritten)
            output = differentiable_loss(call, logp, entropy)
        else:
            with torch.no_grad():
                output, dlogits = loss_of_logits(call, logits.detach(), needs_gradient, inplace)
            output = output_with_gradients(output, backend, (logits,), (dlogits,), overwritten)
    if overwritten is not None and not logits.is_inference():
        overwritten.mark(logits)
    return output


@names_instead
def bapo_loss_from_log_probs(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    config: BAPOConfig | None = None,
    bounds: GivenBounds | None = None,
    backend: str | None = None,
    statistics: Statistics = "all",
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> BAPOOutput:
    """:func:`bapo_loss` of log-probs that were computed elsewhere (verl, TRL, OpenRLHF).

    Args:
        log_probs: ``[...]`` floating point, of the labels under the current policy. float64 runs on
            the reference.
        entropy: ``[...]``, required if ``config.entropy_coef`` is not 0.

    Everything else is as in :func:`bapo_loss`. The output's ``loss``, ``log_probs`` and
    ``entropy`` have gradients for the arguments ``log_probs`` and ``entropy``, in their dtypes.

    Examples:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> old, A = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0])
        >>> ppo = BAPOConfig.fixed(0.8, 1.2)
        >>> loss = bapo_loss_from_log_probs(log_probs, old, A, config=ppo).loss
        >>> print(f"{loss:.4f}")  # (-1 + 0.8)/2
        -0.1000
        >>> torch.autograd.grad(loss, log_probs)[0]  # the second ratio, 0.37, is below 0.8
        tensor([-0.5000,  0.0000])
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
    batch = old_log_probs, advantages, response_mask
    arguments = token_arguments(log_probs, *batch, entropy=entropy, **options)
    backend = choose(backend, log_probs, "log_probs")
    arguments.check_ranks("bapo_loss_from_log_probs", backend)
    if backend == "reference":
        return reference.bapo_loss_from_log_probs(log_probs, *batch, entropy=entropy, **options)
    call = prepared(backend, arguments)
    flat_entropy = None if entropy is None else entropy.double().reshape(-1).contiguous()
    return differentiable_loss(call, log_probs.double().reshape(-1).contiguous(), flat_entropy)


@names_instead
def log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    sampling_mask: SamplingMask | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probs of the labels, one or several per row, and entropies of the rows.

    ``logp = x_label - logsumexp(x)`` and ``entropy = logsumexp(x) - sum_j p_j x_j``, with
    ``x = softcap*tanh(logit_scale*z/softcap)/temperature``, or ``logit_scale*z/temperature``.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any row strides; float64 runs on the
            reference (slow, for checks).
        labels: ``[...]`` or ``[..., K]`` integers, K >= 1. -100 gives 0 and no gradient; others
            outside ``[0, V)`` NaN. Of K labels, those that are repeated have each their value, and
            their gradients add; a log-prob of -inf or NaN has no gradient. A row of -100 alone is
            not read. In a sum of probabilities a 0 counts as probability 1: mask it.
        temperature: a number, or a tensor ``[...]``, one per sequence or 0-dim, as in
            :func:`bapo_loss`.
        sampling_mask: as in :func:`bapo_loss`.
        vocab_group: the columns of ``logits`` are sharded over it, as in :func:`bapo_loss`.
        return_entropy: if false, the second output is ``None``.

    Returns:
        Log-probs in the shape of the labels and entropies ``[...]``, float32 (of float64 logits
        float64). Backward reads the logits again and writes their gradient.

    Examples:
        >>> logits = torch.tensor([[1.0, 1.0, -torch.inf], [1.0, 1.0, 1.0]])
        >>> log_probs(logits, torch.tensor([0, 2]), temperature=0.7)
        (tensor([-0.6931, -1.0986]), tensor([0.6931, 1.0986]))
        >>> log_probs(logits, torch.tensor([[0, 1], [2, -100]]), return_entropy=False)[0]
        tensor([[-0.6931, -0.6931],
                [-1.0986,  0.0000]])
    """
    options: SoftmaxOptions = dict(
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
        sampling_mask=sampling_mask,
        vocab_group=vocab_group,
    )
    check_logits(logits, labels, vocab_group, several=True)
    arguments = log_probs_arguments(labels, labels.ndim == logits.ndim, **options)
    backend = choose(backend, logits, "logits")
    arguments.check_ranks("log_probs", backend)
    if backend == "reference":
        return reference.log_probs(logits, labels, return_entropy=return_entropy, **options)
    call = prepared(backend, arguments, logits.shape[-1])
    logp, entropies = differentiable_log_probs(call, logits)
    entropy = entropies.float().view(logits.shape[:-1]) if return_entropy else None
    return logp.float().view(labels.shape), entropy


def _in_place(
    reference_loss: Callable[[Tensor], BAPOOutput], logits: Tensor
) -> tuple[BAPOOutput, Tensor | None]:
    """A differentiable loss and its gradient, which is written over the logits."""
    # In float32, so that a loss scale finds what float16 could not hold.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    source = logits.detach().to(dtype, copy=True).requires_grad_()
    with torch.enable_grad():
        output = reference_loss(source)
    (dlogits,) = torch.autograd.grad(output.loss, source)
    logits.detach().copy_(dlogits)
    loss, logp, entropy, bounds, metrics = output
    entropy = None if entropy is None else entropy.detach()
    return BAPOOutput(loss.detach(), logp.detach(), entropy, bounds, metrics), dlogits
