"""The loss of a token (Algorithm 1, line 20) and its aggregation, with verl's extra terms.

Imports the other files of the reference and the checks; nothing of the kernels, whose truth it is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import IGNORE_INDEX, BAPOConfig
from ..core.arguments.single import (
    bounds_are_valid,
    check_head,
    check_logits,
    checked_bounds,
    rising_offsets,
)
from ..core.arguments.together import loss_arguments, token_arguments
from ..core.call import bounds_tensor
from ..core.distributed import whole_vocabulary
from ..output import BAPOOutput, ClipBounds
from ..sampling_mask import SamplingMask
from .sampling_sets import outside_of_sets
from .search import Contributions, differ, find_clip_bounds, search_metrics
from .softmax import head_logits, log_probs
from .tokens import (
    behaviour_log_probs,
    clamp,
    clipped,
    per_token,
    ratios,
    sequence_mean,
    unmasked_tokens,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.arguments.options import LossOptions, RowOptions


def bapo_loss_from_log_probs(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    **options: Unpack[LossOptions],
) -> BAPOOutput:
    """The paper's loss (Algorithm 1, line 20) on given log-probs, with verl's extra terms.

    ``J = min(r*A, clip(r, c_low, c_high)*A)`` and ``l = -J``, capped at ``-A*clip_ratio_c`` for
    A < 0 (dual clip), times the importance weight, ``+ kl_loss_coef*kl - entropy_coef*entropy``.
    :class:`bapo_kernels.BAPOConfig` has the other surrogates, and the ratio of a sequence.

    Examples:
        >>> log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        >>> def loss(log_probs):
        ...     A = torch.tensor([1.0, 0.5])
        ...     return reference.bapo_loss_from_log_probs(log_probs, torch.full((2,), -1.1), A).loss
        >>> torch.autograd.gradcheck(loss, log_probs)
        True
    """
    batch = old_log_probs, advantages, response_mask
    given = token_arguments(log_probs, *batch, entropy=entropy, **options)
    config, cu_seqlens = given.config, given.cu_seqlens
    rollout_log_probs = given.fields.get("rollout_log_probs")
    work = torch.promote_types(log_probs.dtype, torch.float32)
    unmasked = unmasked_tokens(log_probs, response_mask, cu_seqlens)
    A = per_token(advantages, log_probs, cu_seqlens).detach().to(work)
    A = torch.where(unmasked, A, 0.0)
    given_logp = log_probs.to(work)
    logp = torch.where(unmasked, given_logp, 0.0)
    old = torch.where(unmasked, behaviour_log_probs(logp, old_log_probs).to(work), 0.0)

    bounds = options.get("bounds")
    searched = bounds is None and config.has_bounds
    valid = torch.ones((), device=log_probs.device)
    if searched:
        bounds = at = find_clip_bounds(
            *(given_logp, old_log_probs, A, unmasked),
            config=config,
            rollout_log_probs=rollout_log_probs,
            cu_seqlens=cu_seqlens,
            process_group=given.process_group,
        )
    elif bounds is None:
        bounds = at = ClipBounds(*bounds_tensor(config.options.start(), log_probs).unbind())
    else:
        pair = checked_bounds(bounds, log_probs, config, cu_seqlens)
        bounds = ClipBounds(*(_of_tokens(bound, log_probs, cu_seqlens) for bound in pair))
        at = ClipBounds(*(torch.where(unmasked, b, 1.0) if b.ndim else b.clone() for b in bounds))
        valid = torch.where(bounds_are_valid(*at), 1.0, torch.nan)
    is_weights, ref = (
        None if value is None else torch.where(unmasked, value.detach().to(work), 0.0)
        for value in map(given.fields.get, ("rollout_is_weights", "ref_log_probs"))
    )
    ent = torch.zeros_like(logp) if entropy is None else torch.where(unmasked, entropy.to(work), 0)
    r, log_ratio = ratios(logp, old, unmasked, config.ratio_level, cu_seqlens)
    terms = _token_terms(config, logp, r, A, at, is_weights, ref, ent)

    def aggregate(values: Tensor) -> Tensor:
        values = torch.where(counted, values * valid, 0.0)
        counts = options.get("batch_num_tokens"), options.get("global_batch_size")
        return aggregated(values, unmasked, config, cu_seqlens, *counts, given.dp_size)

    counted = unmasked
    if given.is_live():
        live = (A != 0).to(work)
        if config.ratio_level == "sequence":
            live = sequence_mean(live, unmasked, cu_seqlens)
        counted = unmasked & (live > 0)
    positive, negative = counted & (A > 0), counted & (A < 0)

    def mean(values: Tensor) -> Tensor:
        return share(values, counted)

    def share(values: Tensor, of: Tensor) -> Tensor:
        return (torch.where(of, values.to(work), 0.0).sum() / of.sum().clamp(min=1)).detach()

    group = given.process_group if searched else None
    tokens = given_logp, old_log_probs, A, unmasked, rollout_log_probs, group, cu_seqlens
    masses = _masses(Contributions(config, *tokens), at, searched)
    means = ClipBounds(*(bound if bound.ndim == 0 else mean(bound) for bound in at))
    acted = (differ(at, config) & counted).any() if at.lower.ndim else None
    metrics = {
        "pg_loss": aggregate(terms.policy).detach(),
        "pg_clipfrac": mean(terms.clipped),
        "pg_clipfrac_pos": share(terms.clipped, positive),
        "pg_clipfrac_neg": share(terms.clipped, negative),
        "pg_clipfrac_lower": mean(terms.dual_clipped),
        "ppo_kl": mean(-log_ratio),
        "entropy": mean(ent),
        "kl_loss": aggregate(torch.where(counted, terms.kl, 0.0)).detach(),
        **search_metrics(means, masses, config, acted),
        "tokens": unmasked.sum(),
        "tokens_pos": positive.sum(),
        "tokens_neg": negative.sum(),
    }
    if given.statistics == "live":
        metrics["live_tokens"] = counted.sum()
    if given.adds_up():
        metrics["loss_adds_up"] = torch.ones_like(metrics["pg_loss"])
    metrics = {name: value.to(work) for name, value in metrics.items()}

    def report(values: Tensor) -> Tensor:
        return torch.where(unmasked & ~counted, torch.nan, torch.where(unmasked, values, 0.0))

    values = report(given_logp), None if entropy is None else report(ent)
    return BAPOOutput(aggregate(terms.loss), *values, bounds, metrics)


class _Terms(NamedTuple):
    """The loss of each token, its policy and KL terms, and the tokens that the metrics count."""

    loss: Tensor
    policy: Tensor
    kl: Tensor
    clipped: Tensor
    dual_clipped: Tensor  # of a mask: below it


def _token_terms(
    config: BAPOConfig,
    logp: Tensor,
    r: Tensor,
    A: Tensor,
    bounds: ClipBounds,
    is_weights: Tensor | None,
    ref: Tensor | None,
    entropy: Tensor,
) -> _Terms:
    lower, upper = (bound.to(logp.dtype) for bound in bounds)
    is_clipped = dual_clipped = torch.zeros_like(A, dtype=torch.bool)
    if config.surrogate == "sapo":
        tau = torch.where(A > 0, torch.full_like(A, config.sapo_tau_pos), config.sapo_tau_neg)
        policy = -A * (4 / tau) * torch.sigmoid(tau * (r - 1))
    elif config.surrogate == "cispo":
        weight = torch.clamp(r.detach(), lower, upper) * A
        policy = torch.where(weight == 0, 0.0, -weight * logp)  # also where logp is -inf
        is_clipped = (r < lower) | (r > upper)
    elif config.surrogate == "mask":
        dual_clipped, is_clipped = r < lower, (r < lower) | (r > upper)
        policy = -A * torch.where(is_clipped, 0.0, r)
    else:
        policy = -torch.minimum(r * A, clamp(r, lower, upper) * A)
        if config.clip_ratio_c is not None:
            cap = -A * config.clip_ratio_c
            dual_clipped = (A < 0) & (policy > cap)
            policy = torch.where(dual_clipped, cap, policy)
        is_clipped = clipped(r, A, lower, upper)
    if is_weights is not None:
        policy = policy * is_weights
    kl = torch.zeros_like(logp) if ref is None else _kl(logp, ref, config.kl_loss_type)

    loss = policy
    if config.kl_loss_coef:
        loss = loss + config.kl_loss_coef * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return _Terms(loss, policy, kl, is_clipped, dual_clipped)


def bapo_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    gradient_samples: int | None = None,
    **options: Unpack[LossOptions],
) -> BAPOOutput:
    """:func:`log_probs`, then :func:`bapo_loss_from_log_probs`. ``logits``: ``[..., V]``.

    ``temperature`` (a number, ``[...]``, ``[B]`` or 0-dim) replaces ``config.temperature``. With
    ``sampling_mask`` the metric ``label_outside_mask`` counts the unmasked tokens outside the set
    of their row.

    Examples:
        >>> logits = torch.linspace(-2, 2, 20).view(2, 10)
        >>> batch = torch.tensor([3, 4]), torch.tensor([-2.5, -2.0]), torch.tensor([1.0, -1.0])
        >>> loss = bapo_loss(logits, *batch).loss
        >>> truth = reference.bapo_loss(logits.double(), *batch).loss
        >>> bool((loss - truth).abs() < 1e-6)
        True
    """
    check_logits(logits, labels, vocab_group)
    batch = old_log_probs, advantages, response_mask
    row_options: RowOptions = dict(
        temperature=temperature, sampling_mask=sampling_mask, vocab_group=vocab_group, **options
    )
    config = loss_arguments(labels, *batch, **row_options).config
    labels, cu_seqlens = labels.long(), options.get("cu_seqlens")
    logits = whole_vocabulary(logits, vocab_group, -1)
    unmasked = unmasked_tokens(labels, response_mask, cu_seqlens) & (labels != IGNORE_INDEX)
    if not isinstance(temperature, Tensor):
        temperature = config.temperature
    elif temperature.ndim:
        temperature = per_token(temperature, labels, cu_seqlens)
    logp, entropy = log_probs(
        logits,
        torch.where(unmasked, labels, IGNORE_INDEX),
        temperature=temperature,
        logit_scale=config.logit_scale,
        final_logit_softcapping=config.final_logit_softcapping,
        sampling_mask=sampling_mask,
        gradient_samples=gradient_samples,
    )
    output = bapo_loss_from_log_probs(
        logp, old_log_probs, advantages, unmasked, entropy=entropy, **options
    )
    if sampling_mask is not None:
        outside = unmasked & outside_of_sets(sampling_mask, labels, logits.shape[-1])
        output.metrics["label_outside_mask"] = outside.sum().to(logp.dtype)
    return output


def bapo_linear_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    gradient_samples: int | None = None,
    **options: Unpack[RowOptions],
) -> BAPOOutput:
    """:func:`bapo_loss` of ``hidden_states @ lm_head_weight.T + bias``.

    Examples:
        >>> hidden, weight, labels = torch.eye(2, 4), torch.eye(10, 4), torch.tensor([0, 1])
        >>> out = reference.bapo_linear_loss(hidden, weight, labels, None, torch.ones(2))
        >>> out.loss, out.metrics["pg_clipfrac"]  # on-policy every ratio is 1
        (tensor(-1.), tensor(0.))
    """
    vocab_group = options.get("vocab_group")
    parameters = hidden_states, lm_head_weight, bias
    check_head(*parameters, labels, logits_dtype, vocab_group=vocab_group)
    batch = old_log_probs, advantages, response_mask
    loss_arguments(labels, *batch, **options)
    unmasked = unmasked_tokens(labels, response_mask, options.get("cu_seqlens"))
    unmasked = unmasked & (labels.long() != IGNORE_INDEX)
    logits = head_logits(*parameters, unmasked, vocab_group, logits_dtype)
    options["vocab_group"] = None  # all columns are here now
    return bapo_loss(logits, labels, *batch, gradient_samples=gradient_samples, **options)


def _kl(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """KL estimators of http://joschu.net/blog/kl-approx.html, k3 clamped as verl does."""
    if kind == "k1":
        return logp - ref
    if kind == "k2":
        return 0.5 * (logp - ref).square()
    delta = clamp(ref - logp, -20.0, 20.0)
    return clamp(delta.exp() - delta - 1.0, -10.0, 10.0)


def aggregated(
    values: Tensor,
    unmasked: Tensor,
    config: BAPOConfig,
    cu_seqlens: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """verl's ``agg_loss``, for padded ``[B, S]`` or packed ``[N]`` values."""
    mode = config.loss_agg_mode
    values = torch.where(unmasked, values, 0.0)
    if mode == "token-sum":
        return values.sum() * dp_size
    if mode == "token-mean":
        tokens = unmasked.sum().clamp(min=1)
        if batch_num_tokens is not None:
            tokens = _valid_count(batch_num_tokens, values)
        return values.sum() / tokens * dp_size

    if cu_seqlens is not None:
        pieces = list(pairwise(rising_offsets(cu_seqlens, values.numel())))
        sums = torch.stack([values[a:b].sum() for a, b in pieces])
        counts = torch.stack([unmasked[a:b].sum() for a, b in pieces])
    else:
        sums, counts = values.sum(-1), unmasked.sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / counts.clamp(min=1)
    sequences = (counts > 0).sum().clamp(min=1)
    if global_batch_size is not None:
        sequences = _valid_count(global_batch_size, values)
    loss = sums.sum() / sequences * dp_size
    if mode == "seq-mean-token-sum-norm":
        loss = loss / (config.loss_scale_factor or max(values.shape[-1], 1))
    return loss


def _valid_count(count: float | Tensor, like: Tensor) -> Tensor:
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device).reshape(())
    return torch.where((count > 0) & (count < torch.inf), count, torch.nan)


def _of_tokens(bound: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A bound of each token, or the 0-dim one of all, float32."""
    spread = bound if bound.ndim == 0 else per_token(bound, like, cu_seqlens)
    return spread.float()


def _masses(probe: Contributions, bounds: ClipBounds, searched: bool) -> Tensor:
    """The masses at the bounds, at the starting bounds and at the last points of the grids."""
    config = probe.config
    lower, upper = (bound.double() for bound in bounds)
    if searched:
        lower, upper = _on_grid(lower, config.lower_grid), _on_grid(upper, config.upper_grid)
    last = config.lower_grid[-1], config.upper_grid[-1]
    at = (lower, upper), config.options.start(), last
    return torch.cat([probe.masses(*each) for each in at])


def _on_grid(bound: Tensor, grid: list[float]) -> Tensor:
    """The float64 grid point that a float32 bound stands for."""
    points = torch.tensor(grid, dtype=torch.float64, device=bound.device)
    return points[points.float() == bound][0]
