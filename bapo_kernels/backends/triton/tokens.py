"""Kernels over tokens whose log-probs are known: contributions to the search, the search, the loss.

Sums go over chunks of fixed size, and over the chunks in order: the same bits every run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import bound_grid
from . import policy_math
from .launch import limits

CHUNK = 256  # tokens of a program
SUMS = tl.constexpr(12)


@triton.jit
def _grid_points(start, maximum, step, count, first, point):
    """Points of a grid at the places ``first + k``, by the same repeated addition as the loop."""
    values = tl.zeros_like(point) + start
    for k in range(1, count):
        moved = values + step
        moved = tl.where(moved < maximum, moved, maximum)
        values = tl.where(point >= first + k, moved, values)
    return values


@triton.jit
def _search_weight(rollout_log_probs, index, mask, old, UNIFORM: tl.constexpr):
    """Weight of a token in P and N: its probability under the rollout policy, or 1."""
    if UNIFORM:
        w = tl.zeros_like(old) + 1.0
    elif rollout_log_probs is not None:
        w = tl.exp(tl.load(rollout_log_probs + index, mask, other=0.0).to(tl.float64))
    else:
        w = tl.exp(old)
    return w


@triton.jit(do_not_specialize=("count", "lower_count", "upper_count"))
def _contributions_kernel(
    log_probs,
    live,
    old_log_probs,
    advantages,
    rollout_log_probs,
    partials,
    count: tl.int64,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    UNIFORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    zeros = tl.zeros((POINTS,), tl.float64)
    is_upper = place >= lower_count
    lower = _grid_points(lower_start, lower_max, lower_step, lower_count, 0, place + zeros)
    upper = _grid_points(
        upper_start, upper_max, upper_step, upper_count, lower_count, place + zeros
    )
    sums = zeros
    chunk = tl.program_id(0).to(tl.int64)
    for begin in range(0, CHUNK, TOKENS):
        index = chunk * CHUNK + begin + tl.arange(0, TOKENS)
        inside = index < count
        inside = inside & (tl.load(live + index, inside, other=0) != 0)
        A = tl.load(advantages + index, inside, other=0.0).to(tl.float64)
        inside = inside & ((A > 0.0) | (A < 0.0))
        logp = tl.load(log_probs + index, inside, other=0.0)
        old = policy_math.old_log_prob(old_log_probs, index, inside, logp)
        r, _, _ = policy_math.policy_ratio(logp, old)
        w = _search_weight(rollout_log_probs, index, inside, old, UNIFORM)
        mine = inside[:, None] & (is_upper[None, :] == (A > 0.0)[:, None])
        added = w[:, None] * policy_math.contribution(
            r[:, None], A[:, None], lower[None, :], upper[None, :], GRADIENT
        )
        sums += tl.sum(tl.where(mine, added, 0.0), 0)
    tl.store(partials + chunk * POINTS + place, sums)


@triton.jit(do_not_specialize=("chunks", "points"))
def _add_partials_kernel(
    partials,
    table,
    chunks: tl.int32,
    points: tl.int32,
    CHUNKS: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    sums = tl.zeros((POINTS,), tl.float64)
    for begin in range(0, chunks, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        offset = chunk[:, None].to(tl.int64) * POINTS + place[None, :]
        sums += tl.sum(tl.load(partials + offset, chunk[:, None] < chunks, other=0.0), 0)
    inside = place < points
    tl.store(table + place, tl.load(table + place, inside) + sums, inside)


@triton.jit(do_not_specialize=("lower_count", "upper_count"))
def _solve_kernel(
    table,
    bounds,
    shares,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    target: tl.float64,
    RATIO_TARGET: tl.constexpr,
    UPPER_FIRST: tl.constexpr,
    VISITS: tl.constexpr,
):
    # One bound goes up to its maximum, then the other: the loop's k-th visit.
    visit = tl.arange(0, VISITS)
    visits = lower_count + upper_count - 1
    if UPPER_FIRST:
        j = tl.minimum(visit, upper_count - 1)
        i = visit - j
    else:
        i = tl.minimum(visit, lower_count - 1)
        j = visit - i
    inside = visit < visits
    N = tl.load(table + i, inside, other=0.0)
    P = tl.load(table + lower_count + j, inside, other=0.0)
    goes_on = policy_math.tested_quantity(P, N, RATIO_TARGET) < target
    stop = tl.min(tl.where(goes_on, visits - 1, visit), 0)
    at = visit == stop
    i, j = tl.sum(tl.where(at, i, 0), 0), tl.sum(tl.where(at, j, 0), 0)
    zero = tl.zeros((), tl.float64)
    lower = _grid_points(lower_start, lower_max, lower_step, lower_count, 0, i + zero)
    upper = _grid_points(upper_start, upper_max, upper_step, upper_count, 0, j + zero)
    tl.store(bounds, lower.to(tl.float32))
    tl.store(bounds + 1, upper.to(tl.float32))
    tl.store(shares, tl.load(table + lower_count + j))
    tl.store(shares + 1, tl.load(table + i))
    tl.store(shares + 2, tl.load(table + lower_count))
    tl.store(shares + 3, tl.load(table))


@triton.jit(do_not_specialize=("count", "chunks"))
def _policy_kernel(
    log_probs,
    entropies,
    live,
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
    on = inside & (tl.load(live + index, inside, other=0) != 0)
    zeros = tl.zeros((CHUNK,), tl.float64)
    lower, upper = tl.load(bounds).to(tl.float64), tl.load(bounds + 1).to(tl.float64)

    logp = tl.load(log_probs + index, on, other=0.0)
    old = policy_math.old_log_prob(old_log_probs, index, on, logp)
    A = tl.load(advantages + index, on, other=0.0).to(tl.float64)
    weight = tl.load(weights + index, on, other=0.0)
    r, log_ratio, saturated = policy_math.policy_ratio(logp, old)
    pg_loss, clipped, dual_clipped = policy_math.policy_loss(r, A, lower, upper, clip_ratio_c)
    grad = policy_math.policy_grad(r, saturated, A, lower, upper, clip_ratio_c)
    if is_weights is not None:
        is_weight = tl.load(is_weights + index, on, other=0.0).to(tl.float64)
        pg_loss *= is_weight
        grad *= is_weight
    loss, kl, entropy = pg_loss, zeros, zeros
    if ref_log_probs is not None:
        ref = tl.load(ref_log_probs + index, on, other=0.0).to(tl.float64)
        kl, kl_grad = policy_math.kl_term(logp, ref, KL_TYPE)
        if kl_loss_coef != 0.0:
            loss += kl_loss_coef * kl
            grad += kl_loss_coef * kl_grad
    if entropies is not None:
        entropy = tl.load(entropies + index, on, other=0.0)
        if entropy_coef != 0.0:
            loss -= entropy_coef * entropy
    if dlog_probs is not None:
        tl.store(dlog_probs + index, tl.where(on, weight * grad, 0.0), inside)
    if dentropies is not None:
        tl.store(dentropies + index, tl.where(on, -weight * entropy_coef, 0.0), inside)

    w = _search_weight(rollout_log_probs, index, on, old, UNIFORM)
    at_bounds = w * policy_math.contribution(r, A, lower, upper, GRADIENT)
    at_start = w * policy_math.contribution(r, A, lower_start, upper_start, GRADIENT)
    partials += chunk
    _store_sum(partials, 0, chunks, on, weight * loss)
    _store_sum(partials, 1, chunks, on, weight * pg_loss)
    _store_sum(partials, 2, chunks, on, weight * kl)
    _store_sum(partials, 3, chunks, on, zeros + 1.0)
    _store_sum(partials, 4, chunks, on & clipped, zeros + 1.0)
    _store_sum(partials, 5, chunks, on & dual_clipped, zeros + 1.0)
    _store_sum(partials, 6, chunks, on, log_ratio)
    _store_sum(partials, 7, chunks, on, entropy)
    _store_sum(partials, 8, chunks, on & (A > 0.0), at_bounds)
    _store_sum(partials, 9, chunks, on & (A < 0.0), at_bounds)
    _store_sum(partials, 10, chunks, on & (A > 0.0), at_start)
    _store_sum(partials, 11, chunks, on & (A < 0.0), at_start)


@triton.jit
def _store_sum(partials, which, chunks, mask, values):
    tl.store(partials + which * chunks, tl.sum(tl.where(mask, values, 0.0), 0))


@triton.jit
def _sum_of(partials, which, chunks, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, chunks, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        sums += tl.load(partials + which * chunks + chunk, chunk < chunks, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _share(value, total):
    return tl.where(total == 0.0, 0.0, value / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=("chunks",))
def _report_kernel(
    partials,
    bounds,
    shares,
    report,
    chunks: tl.int64,
    target: tl.float64,
    RATIO_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    live_tokens = _sum_of(partials, 3, chunks, BLOCK)
    count = tl.where(live_tokens > 0.0, live_tokens, 1.0)
    if shares is not None:
        P, N = tl.load(shares), tl.load(shares + 1)
        P_start, N_start = tl.load(shares + 2), tl.load(shares + 3)
    else:
        P, N = _sum_of(partials, 8, chunks, BLOCK), _sum_of(partials, 9, chunks, BLOCK)
        P_start = _sum_of(partials, 10, chunks, BLOCK)
        N_start = _sum_of(partials, 11, chunks, BLOCK)
    saturated = policy_math.tested_quantity(P, N, RATIO_TARGET) < target
    # In the order of output.py.
    _store_float(report, 0, _sum_of(partials, 0, chunks, BLOCK))
    _store_float(report, 1, _sum_of(partials, 1, chunks, BLOCK))
    _store_float(report, 2, _sum_of(partials, 4, chunks, BLOCK) / count)
    _store_float(report, 3, _sum_of(partials, 5, chunks, BLOCK) / count)
    _store_float(report, 4, -_sum_of(partials, 6, chunks, BLOCK) / count)
    _store_float(report, 5, _sum_of(partials, 7, chunks, BLOCK) / count)
    _store_float(report, 6, _sum_of(partials, 2, chunks, BLOCK))
    _store_float(report, 7, tl.load(bounds))
    _store_float(report, 8, tl.load(bounds + 1))
    _store_float(report, 9, _share(P, P + N))
    _store_float(report, 10, _share(P_start, P_start + N_start))
    _store_float(report, 11, policy_math.tested_quantity(P, N, True))
    _store_float(report, 12, saturated)
    _store_float(report, 13, live_tokens)


@triton.jit
def _store_float(report, place, value):
    tl.store(report + place, value.to(tl.float32))


def contributions(
    log_probs: Tensor,
    live: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    rollout_log_probs: Tensor | None,
    lower_start: float,
    lower_max: float,
    lower_step: float,
    upper_start: float,
    upper_max: float,
    upper_step: float,
    uniform_weight: bool,
    gradient: bool,
    table: Tensor,
) -> None:
    grids = _grids(lower_start, lower_max, lower_step, upper_start, upper_max, upper_step)
    points = table.numel()
    POINTS = triton.next_power_of_2(points)
    chunks = triton.cdiv(log_probs.numel(), CHUNK)
    partials = table.new_empty((chunks, POINTS))
    _contributions_kernel[(chunks,)](
        log_probs,
        live,
        old_log_probs,
        advantages,
        rollout_log_probs,
        partials,
        log_probs.numel(),
        **grids,
        UNIFORM=uniform_weight,
        GRADIENT=gradient,
        TOKENS=max(1, min(32, 1024 // POINTS)),
        CHUNK=CHUNK,
        POINTS=POINTS,
        **limits(4, registers=128),
    )
    _add_partials_kernel[(1,)](
        partials,
        table,
        chunks,
        points,
        CHUNKS=max(1, min(32, 4096 // POINTS)),
        POINTS=POINTS,
        **limits(4, registers=128),
    )


def solve(
    table: Tensor,
    lower_start: float,
    lower_max: float,
    lower_step: float,
    upper_start: float,
    upper_max: float,
    upper_step: float,
    target: float,
    ratio_target: bool,
    upper_first: bool,
    bounds: Tensor,
    shares: Tensor,
) -> None:
    _solve_kernel[(1,)](
        table,
        bounds,
        shares,
        **_grids(lower_start, lower_max, lower_step, upper_start, upper_max, upper_step),
        target=target,
        RATIO_TARGET=ratio_target,
        UPPER_FIRST=upper_first,
        VISITS=triton.next_power_of_2(table.numel() - 1),
        **limits(1, registers=128),
    )


def policy(
    log_probs: Tensor,
    entropy: Tensor | None,
    live: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    rollout_is_weights: Tensor | None,
    ref_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    bounds: Tensor,
    shares: Tensor | None,
    lower_start: float,
    upper_start: float,
    uniform_weight: bool,
    gradient: bool,
    target: float,
    ratio_target: bool,
    clip_ratio_c: float | None,
    kl_loss_coef: float,
    kl_loss_type: int,
    entropy_coef: float,
    report: Tensor,
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
) -> None:
    chunks = triton.cdiv(log_probs.numel(), CHUNK)
    partials = log_probs.new_empty((SUMS.value, chunks), dtype=torch.float64)
    _policy_kernel[(chunks,)](
        log_probs,
        entropy,
        live,
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
        lower_start=lower_start,
        upper_start=upper_start,
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
        shares,
        report,
        chunks,
        target=target,
        RATIO_TARGET=ratio_target,
        BLOCK=128,
        **limits(4, registers=128),
    )


def _grids(
    lower_start: float,
    lower_max: float,
    lower_step: float,
    upper_start: float,
    upper_max: float,
    upper_step: float,
) -> dict[str, float]:
    return dict(
        lower_count=len(bound_grid(lower_start, lower_max, lower_step)),
        upper_count=len(bound_grid(upper_start, upper_max, upper_step)),
        lower_start=lower_start,
        lower_max=lower_max,
        lower_step=lower_step,
        upper_start=upper_start,
        upper_max=upper_max,
        upper_step=upper_step,
    )
