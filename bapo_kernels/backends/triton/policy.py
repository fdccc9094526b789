"""Loss and metrics of tokens whose log-probs are known, and the gradients of their loss.

Sums are of chunks of fixed size, then of the chunks in order: the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...output import REPORT
from . import policy_math
from .launch import CHUNK, PER_TOKEN, limits

# Of each chunk of tokens, as PolicySums in csrc/tokens.h.
SUMS = (
    *("loss", "pg_loss", "kl_loss", "count", "clipped", "dual_clipped", "log_ratio", "entropy"),
    *("pos", "neg", "pos_start", "neg_start"),
)
_SUM_INDEX = {name: index for index, name in enumerate(SUMS)}
_REPORT_INDEX = {name: index for index, name in enumerate(REPORT)}


@triton.constexpr_function
def _sum_index(name):
    return _SUM_INDEX[name]


@triton.constexpr_function
def _report_index(name):
    return _REPORT_INDEX[name]


@triton.jit(do_not_specialize=("count", "chunks"), do_not_specialize_on_alignment=PER_TOKEN)
def _policy_kernel(
    log_probs,
    entropies,
    counted,
    old_log_probs,
    advantages,
    weights,
    is_weights,
    ref_log_probs,
    rollout_log_probs,
    bounds,
    partials,
    dlog_probs,
    dentropies,
    count: tl.int64,
    chunks: tl.int64,
    lower_start: tl.float64,
    upper_start: tl.float64,
    clip_ratio_c: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    KL_TYPE: tl.constexpr,
    UNIFORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < count
    mask = inside & (tl.load(counted + index, inside, other=0) != 0)
    zeros = tl.zeros((CHUNK,), tl.float64)
    lower, upper = tl.load(bounds).to(tl.float64), tl.load(bounds + 1).to(tl.float64)

    logp = tl.load(log_probs + index, mask, other=0.0)
    old = policy_math.old_log_prob(old_log_probs, index, mask, logp)
    A = tl.load(advantages + index, mask, other=0.0).to(tl.float64)
    weight = tl.load(weights + index, mask, other=0.0)
    r, log_ratio, saturated = policy_math.policy_ratio(logp, old)
    pg_loss, clipped, dual_clipped = policy_math.policy_loss(r, A, lower, upper, clip_ratio_c)
    grad = policy_math.policy_grad(r, saturated, A, lower, upper, clip_ratio_c)
    if is_weights is not None:
        is_weight = tl.load(is_weights + index, mask, other=0.0).to(tl.float64)
        pg_loss *= is_weight
        grad *= is_weight
    loss, kl, entropy = pg_loss, zeros, zeros
    if ref_log_probs is not None:
        ref = tl.load(ref_log_probs + index, mask, other=0.0).to(tl.float64)
        kl, kl_grad = policy_math.kl_term(logp, ref, KL_TYPE)
        if kl_loss_coef != 0.0:
            loss += kl_loss_coef * kl
            grad += kl_loss_coef * kl_grad
    if entropies is not None:
        entropy = tl.load(entropies + index, mask, other=0.0)
        if entropy_coef != 0.0:
            loss -= entropy_coef * entropy
    tl.store(dlog_probs + index, tl.where(mask, weight * grad, 0.0), inside)
    if dentropies is not None:
        tl.store(dentropies + index, tl.where(mask, -weight * entropy_coef, 0.0), inside)

    w = policy_math.search_weight(rollout_log_probs, index, mask, old, UNIFORM)
    at_bounds = w * policy_math.contribution(r, A, lower, upper, GRADIENT)
    at_start = w * policy_math.contribution(r, A, lower_start, upper_start, GRADIENT)
    partials += chunk
    _store_sum(partials, "loss", chunks, mask, weight * loss)
    _store_sum(partials, "pg_loss", chunks, mask, weight * pg_loss)
    _store_sum(partials, "kl_loss", chunks, mask, weight * kl)
    _store_sum(partials, "count", chunks, mask, zeros + 1.0)
    _store_sum(partials, "clipped", chunks, mask & clipped, zeros + 1.0)
    _store_sum(partials, "dual_clipped", chunks, mask & dual_clipped, zeros + 1.0)
    _store_sum(partials, "log_ratio", chunks, mask, log_ratio)
    _store_sum(partials, "entropy", chunks, mask, entropy)
    _store_sum(partials, "pos", chunks, mask & (A > 0.0), at_bounds)
    _store_sum(partials, "neg", chunks, mask & (A < 0.0), at_bounds)
    _store_sum(partials, "pos_start", chunks, mask & (A > 0.0), at_start)
    _store_sum(partials, "neg_start", chunks, mask & (A < 0.0), at_start)


@triton.jit
def _store_sum(partials, name: tl.constexpr, chunks, mask, values):
    tl.store(partials + _sum_index(name) * chunks, tl.sum(tl.where(mask, values, 0.0), 0))


@triton.jit
def _sum_of(partials, name: tl.constexpr, chunks, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, chunks, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        sums += tl.load(partials + _sum_index(name) * chunks + chunk, chunk < chunks, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _share(value, total):
    return tl.where(total == 0.0, 0.0, value / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=("chunks",), do_not_specialize_on_alignment=PER_TOKEN)
def _report_kernel(
    partials,
    bounds,
    masses,
    report,
    chunks: tl.int64,
    target: tl.float64,
    RATIO_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    live_tokens = _sum_of(partials, "count", chunks, BLOCK)
    count = tl.where(live_tokens > 0.0, live_tokens, 1.0)
    if masses is not None:
        pos, neg = tl.load(masses), tl.load(masses + 1)
        pos_start, neg_start = tl.load(masses + 2), tl.load(masses + 3)
    else:
        pos, neg = _sum_of(partials, "pos", chunks, BLOCK), _sum_of(partials, "neg", chunks, BLOCK)
        pos_start = _sum_of(partials, "pos_start", chunks, BLOCK)
        neg_start = _sum_of(partials, "neg_start", chunks, BLOCK)
    saturated = policy_math.tested_quantity(pos, neg, RATIO_TARGET) < target
    _store_entry(report, "loss", _sum_of(partials, "loss", chunks, BLOCK))
    _store_entry(report, "pg_loss", _sum_of(partials, "pg_loss", chunks, BLOCK))
    _store_entry(report, "pg_clipfrac", _sum_of(partials, "clipped", chunks, BLOCK) / count)
    _store_entry(
        report, "pg_clipfrac_lower", _sum_of(partials, "dual_clipped", chunks, BLOCK) / count
    )
    _store_entry(report, "ppo_kl", -_sum_of(partials, "log_ratio", chunks, BLOCK) / count)
    _store_entry(report, "entropy", _sum_of(partials, "entropy", chunks, BLOCK) / count)
    _store_entry(report, "kl_loss", _sum_of(partials, "kl_loss", chunks, BLOCK))
    _store_entry(report, "bapo_clip_low", tl.load(bounds))
    _store_entry(report, "bapo_clip_high", tl.load(bounds + 1))
    _store_entry(report, "bapo_pos_share", _share(pos, pos + neg))
    _store_entry(report, "bapo_pos_share_start", _share(pos_start, pos_start + neg_start))
    _store_entry(report, "bapo_pos_neg_ratio", policy_math.tested_quantity(pos, neg, True))
    _store_entry(report, "bapo_saturated", saturated)
    _store_entry(report, "live_tokens", live_tokens)


@triton.jit
def _store_entry(report, name: tl.constexpr, value):
    tl.store(report + _report_index(name), value.to(tl.float32))


def policy(
    log_probs: Tensor,
    entropy: Tensor | None,
    counted: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    rollout_is_weights: Tensor | None,
    ref_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    bounds: Tensor,
    masses: Tensor | None,
    grids: Sequence[float],
    uniform_weight: bool,
    gradient: bool,
    target: float,
    ratio_target: bool,
    clip_ratio_c: float | None,
    kl_loss_coef: float,
    kl_loss_type: int,
    entropy_coef: float,
    report: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
) -> None:
    chunks = triton.cdiv(log_probs.numel(), CHUNK)
    partials = log_probs.new_empty((len(SUMS), chunks), dtype=torch.float64)
    _policy_kernel[(chunks,)](
        log_probs,
        entropy,
        counted,
        old_log_probs,
        advantages,
        weights,
        rollout_is_weights,
        ref_log_probs,
        rollout_log_probs,
        bounds,
        partials,
        dlog_probs,
        dentropy,
        log_probs.numel(),
        chunks,
        lower_start=grids[0],
        upper_start=grids[3],
        clip_ratio_c=math.inf if clip_ratio_c is None else clip_ratio_c,
        kl_loss_coef=kl_loss_coef,
        entropy_coef=entropy_coef,
        KL_TYPE=kl_loss_type,
        UNIFORM=uniform_weight,
        GRADIENT=gradient,
        CHUNK=CHUNK,
        **limits(8, registers=128),
    )
    _report_kernel[(1,)](
        partials,
        bounds,
        masses,
        report,
        chunks,
        target=target,
        RATIO_TARGET=ratio_target,
        BLOCK=128,
        **limits(4, registers=128),
    )
