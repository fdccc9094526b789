"""Loss and metrics of tokens whose log-probs are known, and the gradients of their loss.

Every program sums its share of the tokens; the last to finish adds up the sums in order: the same
bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...output import REPORT
from . import policy_math
from .kernel import Kernel
from .launch import MAX_PROGRAMS, limits, token_programs

TOKENS = 256  # of a program at once
# Of each program's tokens, as PolicySums in csrc/tokens.h.
SUMS = (
    *("loss", "pg_loss", "kl_loss", "count", "clipped", "dual_clipped", "log_ratio", "entropy"),
    *("pos", "neg", "pos_start", "neg_start", "pos_last", "neg_last", "lower", "upper"),
)
_SUM_INDEX = {name: index for index, name in enumerate(SUMS)}
_REPORT_INDEX = {name: index for index, name in enumerate(REPORT)}


@triton.constexpr_function
def _sum_index(name):
    return _SUM_INDEX[name]


@triton.constexpr_function
def _report_index(name):
    return _REPORT_INDEX[name]


@Kernel
def _policy_kernel(
    log_probs,
    entropies,
    counted,
    old_log_probs,
    log_ratios,
    advantages,
    weights,
    is_weights,
    ref_log_probs,
    rollout_log_probs,
    bounds,
    masses,
    unmasked,
    ticket,
    partials,
    report,
    dlog_probs,
    dentropies,
    outputs,
    dlog_ratios,
    N: tl.int64,
    lower_start: tl.float64,
    upper_start: tl.float64,
    lower_last: tl.float64,
    upper_last: tl.float64,
    target: tl.float64,
    clip_ratio_c: tl.float64,
    sapo_tau_pos: tl.float64,
    sapo_tau_neg: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    SURROGATE: tl.constexpr,
    OWN_BOUNDS: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNIFORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    RATIO_TARGET: tl.constexpr,
    TOKENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    zeros = tl.zeros((TOKENS,), tl.float64)
    loss_sum, pg_loss_sum, kl_loss_sum, count = zeros, zeros, zeros, zeros
    clipped_sum, dual_clipped_sum, log_ratio_sum, entropy_sum = zeros, zeros, zeros, zeros
    pos, neg, pos_start, neg_start = zeros, zeros, zeros, zeros
    pos_last, neg_last = zeros, zeros
    if OWN_BOUNDS:
        lower_sum, upper_sum = zeros, zeros
    else:
        lower, upper = policy_math.load_bounds(bounds, 0, None, N, OWN_BOUNDS)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for begin in range(program.to(tl.int64) * TOKENS, N, programs * TOKENS):
        index = begin + tl.arange(0, TOKENS)
        inside = index < N
        mask = inside & (tl.load(counted + index, inside, other=0) != 0)
        logp = tl.load(log_probs + index, mask, other=0.0)
        old = policy_math.old_log_prob(old_log_probs, index, mask, logp)
        A = tl.load(advantages + index, mask, other=0.0).to(tl.float64)
        weight = tl.load(weights + index, mask, other=0.0)
        r, log_ratio, saturated = policy_math.ratio_at(log_ratios, index, mask, logp, old)
        if OWN_BOUNDS:
            lower, upper = policy_math.load_bounds(bounds, index, mask, N, OWN_BOUNDS)
            lower_sum += lower
            upper_sum += upper
        options = clip_ratio_c, sapo_tau_pos, sapo_tau_neg
        pg_loss, grad, clipped, dual_clipped = policy_math.policy_term(
            r, saturated, A, logp, lower, upper, options, SURROGATE
        )
        if is_weights is not None:
            is_weight = tl.load(is_weights + index, mask, other=0.0).to(tl.float64)
            pg_loss *= is_weight
            grad *= is_weight
        if dlog_ratios is not None:
            tl.store(dlog_ratios + index, tl.where(mask, weight * grad, 0.0), inside)
            grad = zeros
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
        if outputs is not None:
            absent = tl.zeros((TOKENS,), tl.float32)
            if unmasked is not None:
                is_unmasked = tl.load(unmasked + index, inside, other=0) != 0
                absent = tl.where(is_unmasked, float("nan"), absent)
            tl.store(outputs + index, tl.where(mask, logp.to(tl.float32), absent), inside)
            if entropies is not None:
                output = tl.where(mask, entropy.to(tl.float32), absent)
                tl.store(outputs + N + index, output, inside)

        loss_sum += tl.where(mask, weight * loss, 0.0)
        pg_loss_sum += tl.where(mask, weight * pg_loss, 0.0)
        kl_loss_sum += tl.where(mask, weight * kl, 0.0)
        count += tl.where(mask, 1.0, 0.0)
        clipped_sum += tl.where(mask & clipped, 1.0, 0.0)
        dual_clipped_sum += tl.where(mask & dual_clipped, 1.0, 0.0)
        log_ratio_sum += tl.where(mask, log_ratio, 0.0)
        entropy_sum += tl.where(mask, entropy, 0.0)
        if masses is None:
            w = policy_math.search_weight(rollout_log_probs, index, mask, old, UNIFORM)
            at_bounds = w * policy_math.contribution(r, A, lower, upper, GRADIENT)
            at_start = w * policy_math.contribution(r, A, lower_start, upper_start, GRADIENT)
            at_last = w * policy_math.contribution(r, A, lower_last, upper_last, GRADIENT)
            pos += tl.where(mask & (A > 0.0), at_bounds, 0.0)
            neg += tl.where(mask & (A < 0.0), at_bounds, 0.0)
            pos_start += tl.where(mask & (A > 0.0), at_start, 0.0)
            neg_start += tl.where(mask & (A < 0.0), at_start, 0.0)
            pos_last += tl.where(mask & (A > 0.0), at_last, 0.0)
            neg_last += tl.where(mask & (A < 0.0), at_last, 0.0)

    _store_sum(partials, "loss", loss_sum)
    _store_sum(partials, "pg_loss", pg_loss_sum)
    _store_sum(partials, "kl_loss", kl_loss_sum)
    _store_sum(partials, "count", count)
    _store_sum(partials, "clipped", clipped_sum)
    _store_sum(partials, "dual_clipped", dual_clipped_sum)
    _store_sum(partials, "log_ratio", log_ratio_sum)
    _store_sum(partials, "entropy", entropy_sum)
    if masses is None:
        _store_sum(partials, "pos", pos)
        _store_sum(partials, "neg", neg)
        _store_sum(partials, "pos_start", pos_start)
        _store_sum(partials, "neg_start", neg_start)
        _store_sum(partials, "pos_last", pos_last)
        _store_sum(partials, "neg_last", neg_last)
    if OWN_BOUNDS:
        _store_sum(partials, "lower", lower_sum)
        _store_sum(partials, "upper", upper_sum)
    # The barrier orders the stores of all threads before the atomic of one of them. It releases
    # them, and in the last program acquires those of the other programs, whose sums are then read
    # past the L1 cache, which is not coherent.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        tl.store(ticket, 0)
        _report(partials, bounds, masses, report, target, RATIO_TARGET, OWN_BOUNDS, PROGRAMS)


@triton.jit
def _store_sum(partials, name: tl.constexpr, values):
    place = _sum_index(name) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partials + place, tl.sum(values, 0))


@triton.jit
def _sum_of(partials, name: tl.constexpr, PROGRAMS: tl.constexpr):
    programs = tl.num_programs(0)
    program = tl.arange(0, PROGRAMS)
    place = _sum_index(name) * programs + program
    sums = tl.load(partials + place, program < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@triton.jit
def _share(value, total):
    return tl.where(total == 0.0, 0.0, value / tl.where(total == 0.0, 1.0, total))


@triton.jit
def _report(
    partials,
    bounds,
    masses,
    report,
    target,
    RATIO_TARGET: tl.constexpr,
    OWN_BOUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    live_tokens = _sum_of(partials, "count", PROGRAMS)
    count = tl.where(live_tokens > 0.0, live_tokens, 1.0)
    if masses is not None:
        pos, neg = tl.load(masses), tl.load(masses + 1)
        pos_start, neg_start = tl.load(masses + 2), tl.load(masses + 3)
        pos_last, neg_last = tl.load(masses + 4), tl.load(masses + 5)
    else:
        pos, neg = _sum_of(partials, "pos", PROGRAMS), _sum_of(partials, "neg", PROGRAMS)
        pos_start = _sum_of(partials, "pos_start", PROGRAMS)
        neg_start = _sum_of(partials, "neg_start", PROGRAMS)
        pos_last = _sum_of(partials, "pos_last", PROGRAMS)
        neg_last = _sum_of(partials, "neg_last", PROGRAMS)
    saturated = policy_math.tested_quantity(pos, neg, RATIO_TARGET) < target
    neg_min = tl.minimum(neg_start, neg_last)
    clipped = _sum_of(partials, "clipped", PROGRAMS)
    dual_clipped = _sum_of(partials, "dual_clipped", PROGRAMS)
    _store_entry(report, "loss", _sum_of(partials, "loss", PROGRAMS))
    _store_entry(report, "pg_loss", _sum_of(partials, "pg_loss", PROGRAMS))
    _store_entry(report, "pg_clipfrac", clipped / count)
    _store_entry(report, "pg_clipfrac_lower", dual_clipped / count)
    _store_entry(report, "ppo_kl", -_sum_of(partials, "log_ratio", PROGRAMS) / count)
    _store_entry(report, "entropy", _sum_of(partials, "entropy", PROGRAMS) / count)
    _store_entry(report, "kl_loss", _sum_of(partials, "kl_loss", PROGRAMS))
    if OWN_BOUNDS:
        _store_entry(report, "bapo_clip_low", _sum_of(partials, "lower", PROGRAMS) / count)
        _store_entry(report, "bapo_clip_high", _sum_of(partials, "upper", PROGRAMS) / count)
    else:
        _store_entry(report, "bapo_clip_low", tl.load(bounds))
        _store_entry(report, "bapo_clip_high", tl.load(bounds + 1))
    _store_entry(report, "bapo_pos_share", _share(pos, pos + neg))
    _store_entry(report, "bapo_pos_share_start", _share(pos_start, pos_start + neg_start))
    _store_entry(report, "bapo_pos_share_max", _share(pos_last, pos_last + neg_min))
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
    log_ratios: Tensor | None,
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
    surrogate: int,
    kl_loss_type: int,
    coefficients: Sequence[float],
    unmasked: Tensor | None,
    ticket: Tensor,
    report: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    outputs: Tensor | None,
    dlog_ratios: Tensor | None,
) -> None:
    programs = token_programs(log_probs.numel(), TOKENS)
    lower_start, lower_max, lower_step, upper_start, upper_max, upper_step = grids
    clip_ratio_c, sapo_tau_pos, sapo_tau_neg, kl_loss_coef, entropy_coef = coefficients
    _policy_kernel[(programs,)](
        log_probs,
        entropy,
        counted,
        old_log_probs,
        log_ratios,
        advantages,
        weights,
        rollout_is_weights,
        ref_log_probs,
        rollout_log_probs,
        bounds,
        masses,
        unmasked,
        ticket,
        log_probs.new_empty((len(SUMS), programs)),  # partials
        report,
        dlog_probs,
        dentropy,
        outputs,
        dlog_ratios,
        log_probs.numel(),
        lower_start,
        upper_start,
        lower_max if lower_step else lower_start,
        upper_max if upper_step else upper_start,
        target,
        clip_ratio_c,
        sapo_tau_pos,
        sapo_tau_neg,
        kl_loss_coef,
        entropy_coef,
        surrogate,
        bounds.ndim == 2,
        kl_loss_type,
        uniform_weight,
        gradient,
        ratio_target,
        TOKENS=TOKENS,
        PROGRAMS=MAX_PROGRAMS,
        **limits(8, registers=128),
    )
