"""The public functions: check, choose the backend, run its kernels, attach the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from ._autograd import LogProbs, attach, mark_overwritten, without_gradient
from .backends import choose
from .checks import check_floating, check_like, require, typed
from .config import IGNORE_INDEX, BAPOConfig, transform_of
from .distributed import VocabShard, local_parameter, warn_if_not_synchronised
from .fused import (
    counted_tokens,
    int64_labels,
    loss_of_log_probs,
    loss_of_logits,
    shaped,
)
from .inputs import (
    TokenInputs,
    as_rows,
    bounds_tensor,
    check_head,
    check_logits,
    check_options,
    config_or_default,
    token_inputs,
)
from .linear import LinearLogProbs, head, loss_of_hidden
from .output import BAPOOutput, ClipBounds

Statistics = Literal["all", "live"]


def bapo_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
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
    """BAPO policy loss of logits, bounds searched and gradient made in one pass (Eq. 8, Alg. 1).

    With ``x = transform(z)/temperature``, ``logp = x_label - logsumexp(x)`` and
    ``r = exp(clamp(logp - old_log_prob, -20, 20))``, a token's loss is
    ``-min(r*A, clip(r, c_low, c_high)*A)``, at most ``-A*clip_ratio_c`` for A < 0 (dual clip),
    times the importance weight, ``+ kl_loss_coef*kl - entropy_coef*H``; the tokens are aggregated
    by ``config.loss_agg_mode``.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any row strides. ``-inf`` forbids a
            token. float64 runs on the reference (slow, for checks).
        labels: ``[...]`` integers, aligned with the rows; -100 is a masked token.
        old_log_probs: ``[...]``, of the policy that the update starts from; ``None``: on-policy.
        advantages: ``[...]``, or one a sequence.
        response_mask: ``[...]`` bool, int or float; 0 is masked. Masked entries of every argument
            may hold anything. Every other value counts as 1.
        config: options of the loss and the search; default: the paper's.
        bounds: clip bounds of the ratio, lower <= 1 <= upper, to use instead of a search
            (:class:`ContributionHistogram`).
        backend: ``"cuda"``, ``"triton"``, ``"cpu"``, ``"reference"``; default: the first that runs.
        inplace: overwrite ``logits`` with the gradient; using them again raises in backward.
        statistics: ``"all"``: log-probs, entropy and metrics cover every unmasked token;
            ``"live"``: tokens that cannot change the loss are not computed. Same gradient.
        cu_seqlens: ``[B + 1]`` sequence offsets of packed ``[N]`` tokens, from 0; tokens behind the
            last offset are masked.
        rollout_log_probs: ``[...]``, token weights of the search; default: ``old_log_probs``.
        rollout_is_weights: ``[...]``, factor of the policy term.
        ref_log_probs: ``[...]``, reference policy of the KL term.
        batch_num_tokens, global_batch_size, dp_size: verl's. The divisor of the token mean, that of
            the mean over sequences (default: the counts of this call), and a factor of the loss:
            with the counts of all ranks and their number, the mean of the ranks' gradients is that
            of the whole batch.
        process_group: search over the tokens of all its ranks (one all-reduce; none with
            ``bounds``, where the metrics are those of this rank); ``None``: of this one alone
            (``dist.group.WORLD`` is ``None`` before ``init_process_group``).
        vocab_group: shares out the vocabulary: ``logits`` are this rank's columns of it, in rank
            order, on any number; every rank passes the same tokens and labels of the whole
            vocabulary, and gets the same output and the gradient of its columns. One all-gather of
            32 bytes a token.

    Returns:
        :class:`BAPOOutput`; ``loss`` has the gradient of ``logits``, in their dtype. It is made in
        forward, but for float16 (which needs the scale of the loss) and under ``torch.compile``.
        A backward through ``log_probs`` or ``entropy`` raises where forward made the gradient, and
        is right elsewhere.

    Raises:
        ValueError: an argument breaks its rule, or the named backend cannot run. Values that only
            the device knows (a label outside of the vocabulary, NaN logits, a non-finite old
            log-prob) make the loss NaN; :func:`bapo_kernels.debug.check_inputs` finds them.

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
    config = config_or_default(config)
    check_logits(logits, labels, vocab_group)
    labels = labels.long()
    check_options(statistics, process_group, vocab_group)
    backend = choose(backend, logits, "logits")
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    require(isinstance(inplace, bool), "inplace", "be a bool", typed(inplace))
    if inplace:
        _check_inplace(logits)
    options: dict[str, Any] = dict(
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
    )
    tokens = token_inputs(
        labels,
        "labels",
        config,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        **options,
    )
    given = None if bounds is None else bounds_tensor(bounds, labels)
    dlogits: Tensor | None
    if backend == "reference":
        source = logits
        if inplace:  # in float32, so that a loss scale finds what float16 could not hold
            dtype = torch.promote_types(logits.dtype, torch.float32)
            source = logits.detach().to(dtype, copy=True).requires_grad_()
        with torch.set_grad_enabled(inplace or torch.is_grad_enabled()):
            output = reference.bapo_loss(
                source,
                labels,
                old_log_probs,
                advantages,
                response_mask,
                config=config,
                bounds=None if given is None else ClipBounds(*given.unbind()),
                statistics=statistics,
                process_group=process_group,
                vocab_group=vocab_group,
                **options,
            )
        if not inplace:
            return output
        (dlogits,) = torch.autograd.grad(output.loss, source)
        logits.detach().copy_(dlogits)
        output = output._replace(loss=output.loss.detach())
    else:
        counted = counted_tokens(tokens, config, statistics)
        shard = VocabShard.of(logits.shape[-1], logits, vocab_group)
        if needs_gradient and _logit_gradient_in_backward(logits):
            flat = as_rows(logits), int64_labels(labels), counted, transform_of(config)
            logp, entropy = LogProbs.apply(*flat, backend, shard, inplace)
            if inplace:
                mark_overwritten(logits, logp)
            return _loss_of_log_probs(
                logp, entropy, labels.shape, counted, tokens, config, backend, given, process_group
            )
        with torch.no_grad():
            output, dlogits = loss_of_logits(
                logits.detach(),
                labels,
                tokens,
                config,
                backend,
                given,
                counted,
                needs_gradient or inplace,
                inplace,
                process_group,
                shard,
            )
    output = _attached(output, backend, (logits,), (dlogits,))
    if inplace and not logits.is_inference():
        mark_overwritten(logits, output.loss)
    return output


def bapo_loss_from_log_probs(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
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
        entropy: ``[...]``, needed where ``config.entropy_coef`` is not 0.

    Everything else is as in :func:`bapo_loss`; the loss, and ``log_probs`` and ``entropy`` of the
    output, have the gradients of ``log_probs`` and ``entropy``, in their dtypes.

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
    config = config_or_default(config)
    check_floating("log_probs", log_probs)
    check_options(statistics, process_group)
    rule = "be given when config.entropy_coef is not 0"
    require(entropy is not None or not config.entropy_coef, "entropy", rule, None)
    if entropy is not None:
        check_like("entropy", entropy, log_probs, "log_probs")
    backend = choose(backend, log_probs, "log_probs")
    options: dict[str, Any] = dict(
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
    )
    tokens = token_inputs(
        log_probs,
        "log_probs",
        config,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        **options,
    )
    given = None if bounds is None else bounds_tensor(bounds, log_probs)
    if backend == "reference":
        return reference.bapo_loss_from_log_probs(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            entropy=entropy,
            config=config,
            bounds=None if given is None else ClipBounds(*given.unbind()),
            statistics=statistics,
            process_group=process_group,
            **options,
        )
    return _loss_of_log_probs(
        log_probs.double().reshape(-1).contiguous(),
        None if entropy is None else entropy.double().reshape(-1).contiguous(),
        log_probs.shape,
        counted_tokens(tokens, config, statistics),
        tokens,
        config,
        backend,
        given,
        process_group,
    )


def log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable ``logp = x_label - logsumexp(x)`` and ``H = logsumexp(x) - sum_j p_j x_j``.

    ``x = softcap*tanh(logit_scale*z/softcap)/temperature``, or ``logit_scale*z/temperature``.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any row strides; float64 runs on the
            reference (slow, for checks).
        labels: ``[...]`` integers; -100 gives 0 and no gradient, others outside of ``[0, V)`` NaN.
        vocab_group: shares out the columns of ``logits``, as in :func:`bapo_loss`.
        return_entropy: otherwise the second output is ``None``.

    Returns:
        float32 ``[...]`` tensors. Backward reads the logits once more and writes their gradient.

    Examples:
        >>> logits = torch.tensor([[1.0, 1.0, -torch.inf], [1.0, 1.0, 1.0]])
        >>> log_probs(logits, torch.tensor([0, 2]), temperature=0.7)
        (tensor([-0.6931, -1.0986]), tensor([0.6931, 1.0986]))
    """
    config = BAPOConfig(
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
    )
    check_logits(logits, labels, vocab_group)
    labels = labels.long()
    check_options("all", None, vocab_group)
    backend = choose(backend, logits, "logits")
    if backend == "reference":
        return reference.log_probs(
            logits,
            labels,
            temperature=temperature,
            logit_scale=logit_scale,
            final_logit_softcapping=final_logit_softcapping,
            return_entropy=return_entropy,
            vocab_group=vocab_group,
        )
    shard = VocabShard.of(logits.shape[-1], logits, vocab_group)
    rows, flat_labels = as_rows(logits), int64_labels(labels)
    live = flat_labels != IGNORE_INDEX
    logp, entropy = LogProbs.apply(
        rows, flat_labels, live, transform_of(config), backend, shard, False
    )
    return _reported(logp, entropy if return_entropy else None, labels.shape)


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
    """:func:`bapo_loss` of ``hidden_states @ lm_head_weight.T + bias``, which never exists whole.

    Masked rows never meet the lm_head (nor do, with ``statistics="live"``, rows that cannot change
    the loss); rows whose gradient is zero whatever the bounds take part in the forward GEMM only;
    rows that wait for the bounds are computed a second time. Reads two row counts a chunk on the
    host. Under ``torch.compile``, as in float16, the gradient is made in backward: the rows that
    have one are computed a second time there.

    Args:
        hidden_states: ``[..., H]`` float32, bfloat16 or float16; float64 runs on the reference
            (slow, for checks).
        lm_head_weight: ``[V, H]`` in the same dtype (any, under autocast), as ``nn.Linear.weight``.
        bias: ``[V]``.
        chunk_tokens: rows of logits that exist at a time; default: 1 GiB of them.
        vocab_group: shares out the rows of ``lm_head_weight`` and ``bias``; every rank passes the
            same hidden states and gets their whole gradient (one all-reduce, in forward; of
            float16 in backward).

    ``lm_head_weight`` and ``bias`` may be DTensors, sharded by FSDP2 (gathered for the forward, the
    gradient is scattered in backward, as the mean of the ranks) or along the vocabulary over
    ``vocab_group``. Everything else is as in :func:`bapo_loss`; the loss has the gradients of
    ``hidden_states``, ``lm_head_weight`` and ``bias``, as far as they require one.

    Examples:
        >>> hidden, lm_head = torch.ones(3, 4, requires_grad=True), torch.nn.Linear(4, 10)
        >>> labels, advantages = torch.tensor([5, 7, -100]), torch.tensor([1.0, 0.0, 1.0])
        >>> options = dict(bias=lm_head.bias, statistics="live")
        >>> out = bapo_linear_loss(hidden, lm_head.weight, labels, None, advantages, **options)
        >>> out.log_probs.isnan()  # with advantage 0 a row never meets the lm_head
        tensor([False,  True, False])
        >>> out.loss.backward()
        >>> (hidden.grad != 0).any(-1)
        tensor([ True, False, False])
    """
    config = config_or_default(config)
    check_head(hidden_states, lm_head_weight, bias, labels, chunk_tokens, vocab_group)
    labels = labels.long()
    check_options(statistics, process_group, vocab_group)
    dtype = _gemm_dtype(hidden_states, lm_head_weight, bias)
    warn_if_not_synchronised(hidden_states, lm_head_weight)
    lm_head_weight = local_parameter("lm_head_weight", lm_head_weight, vocab_group)
    bias = None if bias is None else local_parameter("bias", bias, vocab_group)
    backend = choose(backend, hidden_states.new_empty(0, dtype=dtype), "hidden_states")
    options: dict[str, Any] = dict(
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
    )
    tokens = token_inputs(
        labels,
        "labels",
        config,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        **options,
    )
    given = None if bounds is None else bounds_tensor(bounds, labels)
    if backend == "reference":
        return reference.bapo_linear_loss(
            hidden_states,
            lm_head_weight,
            labels,
            old_log_probs,
            advantages,
            response_mask,
            bias=bias,
            config=config,
            bounds=None if given is None else ClipBounds(*given.unbind()),
            statistics=statistics,
            process_group=process_group,
            vocab_group=vocab_group,
            **options,
        )
    parameters = (hidden_states, lm_head_weight, bias)
    needs = tuple(
        torch.is_grad_enabled() and parameter is not None and parameter.requires_grad
        for parameter in parameters
    )
    counted = counted_tokens(tokens, config, statistics)
    shard = VocabShard.of(lm_head_weight.shape[0], labels, vocab_group)
    if torch.compiler.is_compiling() or (any(needs) and _in_backward(dtype)):
        transform = transform_of(config)
        of_rows = int64_labels(labels), counted, transform, dtype, backend, chunk_tokens, shard
        logp, H = LinearLogProbs.apply(*parameters, *of_rows)
        return _loss_of_log_probs(
            logp, H, labels.shape, counted, tokens, config, backend, given, process_group
        )
    with torch.no_grad():
        output, gradients = loss_of_hidden(
            head(hidden_states, lm_head_weight, bias, dtype, shard),
            labels,
            tokens,
            config,
            backend,
            given,
            counted,
            needs,
            chunk_tokens,
            process_group,
        )
    made = [None, None, None] if gradients is None else gradients.of(*parameters)
    made = [
        None if parameter is None or gradient is None else gradient.reshape(parameter.shape)
        for parameter, gradient in zip(parameters, made, strict=True)
    ]
    return _attached(output, backend, parameters, made)


def linear_log_probs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`log_probs` of ``hidden_states @ lm_head_weight.T + bias``, a chunk of rows at a time.

    Backward makes the logits of those rows again whose incoming gradients are not zero.

    Args:
        hidden_states: ``[..., H]``; ``lm_head_weight``: ``[V, H]``; ``bias``: ``[V]``; dtypes and
            shards as in :func:`bapo_linear_loss`. With ``vocab_group`` backward makes one
            all-reduce.
        chunk_tokens: rows of logits that exist at a time; default: 1 GiB of them.

    Examples:
        >>> hidden, weight = torch.ones(2, 4), torch.zeros(10, 4)
        >>> linear_log_probs(hidden, weight, torch.tensor([3, -100]), chunk_tokens=1)
        (tensor([-2.3026,  0.0000]), tensor([2.3026, 0.0000]))
    """
    config = BAPOConfig(
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
    )
    check_head(hidden_states, lm_head_weight, bias, labels, chunk_tokens, vocab_group)
    labels = labels.long()
    check_options("all", None, vocab_group)
    dtype = _gemm_dtype(hidden_states, lm_head_weight, bias)
    warn_if_not_synchronised(hidden_states, lm_head_weight)
    lm_head_weight = local_parameter("lm_head_weight", lm_head_weight, vocab_group)
    bias = None if bias is None else local_parameter("bias", bias, vocab_group)
    backend = choose(backend, hidden_states.new_empty(0, dtype=dtype), "hidden_states")
    if backend == "reference":
        return reference.linear_log_probs(
            hidden_states,
            lm_head_weight,
            labels,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            final_logit_softcapping=final_logit_softcapping,
            return_entropy=return_entropy,
            vocab_group=vocab_group,
        )
    flat_labels = int64_labels(labels)
    logp, entropy = LinearLogProbs.apply(
        hidden_states,
        lm_head_weight,
        bias,
        flat_labels,
        flat_labels != IGNORE_INDEX,
        transform_of(config),
        dtype,
        backend,
        chunk_tokens,
        VocabShard.of(lm_head_weight.shape[0], labels, vocab_group),
    )
    return _reported(logp, entropy if return_entropy else None, labels.shape)


def _attached(
    output: BAPOOutput,
    backend: str,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> BAPOOutput:
    """With the gradient of the loss that forward made; nothing else has one."""
    loss = attach(output.loss, backend, inputs, gradients)
    log_probs = without_gradient(output.log_probs, loss)
    entropy = None if output.entropy is None else without_gradient(output.entropy, loss)
    return output._replace(loss=loss, log_probs=log_probs, entropy=entropy)


def _in_backward(dtype: torch.dtype) -> bool:
    """Whether the gradient of such hidden states or logits is made in backward.

    The range of float16 ends at 6e-8, where many of a loss's derivatives are; those of a loss times
    a scale are above, and the scale is known in backward.
    """
    return dtype == torch.float16


def _logit_gradient_in_backward(logits: Tensor) -> bool:
    """Whether the gradient of these logits is made in backward.

    A compiled backward copies what forward made before an operator may scale it: reading the logits
    again moves fewer bytes.
    """
    return _in_backward(logits.dtype) or torch.compiler.is_compiling()


def _loss_of_log_probs(
    log_probs: Tensor,
    entropy: Tensor | None,
    shape: torch.Size,
    counted: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    backend: str,
    given: Tensor | None,
    process_group: dist.ProcessGroup | None,
) -> BAPOOutput:
    """Of flat float64 log-probs and entropy, whose gradients the output has."""
    with torch.no_grad():
        H = None if entropy is None else entropy.detach()
        output, dlog_probs, dentropy = loss_of_log_probs(
            log_probs.detach(), H, counted, tokens, config, backend, given, process_group
        )
    of_tokens = log_probs, entropy
    gradients = [
        made if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad else None
        for tensor, made in zip(of_tokens, (dlog_probs, dentropy), strict=True)
    ]
    loss = attach(output.loss, backend, of_tokens, gradients)
    output = BAPOOutput(loss, log_probs, entropy, output.bounds, output.metrics)
    return shaped(output, shape, tokens.live, counted)


def _reported(
    log_probs: Tensor, entropy: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """What a caller gets of flat float64 values."""
    return log_probs.float().view(shape), None if entropy is None else entropy.float().view(shape)


def _gemm_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """That of autocast where it is on; else all must have the same."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    for name, tensor in (("lm_head_weight", weight), ("bias", bias)):
        rule = f"have the dtype of hidden_states {hidden.dtype}"
        require(
            tensor is None or tensor.dtype == hidden.dtype,
            name,
            rule,
            getattr(tensor, "dtype", None),
        )
    return hidden.dtype


def _check_inplace(logits: Tensor) -> None:
    base = logits if logits._base is None else logits._base
    rule = "not be a leaf that requires grad, or a view of one, with inplace=True"
    is_leaf = torch.is_grad_enabled() and base.requires_grad and base.is_leaf
    require(not is_leaf, "logits", rule, "such a leaf" if base is logits else "such a view")
    sizes_and_strides = list(zip(logits.shape, logits.stride(), strict=True))
    plain = all(stride > 0 or size <= 1 for size, stride in sizes_and_strides)
    plain = plain and (logits.stride(-1) == 1 or logits.shape[-1] == 1)
    if plain and logits.ndim > 3:
        plain = logits.is_contiguous()
    rule = "have rows without overlap, stride 1 along them, and be contiguous beyond 3 dimensions"
    got = f"shape {tuple(logits.shape)}, strides {logits.stride()}"
    require(plain, "logits", f"{rule} with inplace=True", got)
