"""The row pass, with one program per row, and the statistics of rows, which are a part of it.

With ``offsets`` rows are the values of sets, and labels are positions in these.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import triton.language as tl
from torch import Tensor

from . import policy_math, row_math, set_math
from .kernel import Kernel
from .launch import limits, row_arguments, row_shape, set_shape, transform_arguments


def _row_pass_kernel(
    logits,
    dlogits,
    labels,
    counted,
    old_log_probs,
    advantages,
    weights,
    is_weights,
    ref_log_probs,
    temperatures,
    bounds,
    log_probs,
    entropies,
    stats,
    undecided,
    offsets,
    K: tl.int64,
    rows_per_batch: tl.int64,
    V: tl.int32,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    dbatch_stride: tl.int64,
    drow_stride: tl.int64,
    inner: tl.float64,
    scale2: tl.float32,
    scale: tl.float64,
    slope: tl.float64,
    lower_start: tl.float64,
    lower_max: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    clip_ratio_c: tl.float64,
    sapo_tau_pos: tl.float64,
    sapo_tau_neg: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    SOFTCAP: tl.constexpr,
    SURROGATE: tl.constexpr,
    OWN_BOUNDS: tl.constexpr,
    KL_TYPE: tl.constexpr,
    BONUS: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    exists = True
    if offsets is None:
        row = row_math.row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, ALIGN)
        if dlogits is not None:
            grad = row_math.row_pointer(
                dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN
            )
    else:
        begin, V, is_broken = set_math.set_of(offsets, index, True, tl.num_programs(0), K)
        exists = (V > 0) | is_broken
        row = logits + begin
        if dlogits is not None:
            grad = dlogits + begin
    if (tl.load(counted + index) == 0) | (not exists):
        tl.store(log_probs + index, 0.0, exists)
        tl.store(entropies + index, 0.0, exists)
        tl.store(stats + 2 * index, 0.0, exists)
        tl.store(stats + 2 * index + 1, 1.0, exists)
        if dlogits is not None:
            tl.store(undecided + index, 0)
            row_math.write_zeros(grad, V, W, UNROLL)
    else:
        A = tl.load(advantages + index) if dlogits is not None else 0.0
        if temperatures is not None:
            temperature = tl.load(temperatures + index)
            scale2 = row_math.scale2_at(scale, temperature)
            scale = row_math.at_temperature(scale, temperature)
            slope = row_math.at_temperature(slope, temperature) if SOFTCAP else scale
        again = (A != 0.0) | BONUS | (ref_log_probs is not None)  # else the gradient is zero
        lanes = row_math.lane_sums(row, V, inner, scale2, again, SOFTCAP, ALIGN, W, UNROLL)
        label = tl.load(labels + index)
        z = row_math.label_logit(row, label, V)
        origin, sum_2t, weighted = row_math.row_sums(*lanes, scale2, V)
        log_sum = tl.log(sum_2t)
        entropy = log_sum - row_math.LN2 * weighted / sum_2t
        logp = row_math.label_log_prob(z, origin, log_sum, inner, scale, SOFTCAP)
        if offsets is not None:
            # NaN where the sum is, so that a broken id always shows.
            logp = tl.where(label == set_math.OUTSIDE, -sum_2t - row_math.INF, logp)
        tl.store(log_probs + index, logp)
        tl.store(entropies + index, entropy)
        tl.store(stats + 2 * index, origin.to(tl.float64))
        tl.store(stats + 2 * index + 1, sum_2t)
        if dlogits is not None:
            tl.debug_barrier()  # before the row is overwritten: one warp sums without
            lower_first, upper_first = lower_start, upper_start
            lower_last, upper_last = lower_max, upper_max
            if bounds is not None:
                lower_first, upper_first = policy_math.load_bounds(
                    bounds, index, True, tl.num_programs(0), OWN_BOUNDS
                )
                lower_last, upper_last = lower_first, upper_first
            old = policy_math.old_log_prob(old_log_probs, index, None, logp)
            r, _, saturated = policy_math.policy_ratio(logp, old)
            A = tl.cast(A, tl.float64)
            options = clip_ratio_c, sapo_tau_pos, sapo_tau_neg
            g = policy_math.policy_term(
                r, saturated, A, logp, lower_first, upper_first, options, SURROGATE
            )[1]
            g_last = policy_math.policy_term(
                r, saturated, A, logp, lower_last, upper_last, options, SURROGATE
            )[1]
            if is_weights is not None:
                is_weight = tl.load(is_weights + index).to(tl.float64)
                g *= is_weight
                g_last *= is_weight
            is_undecided = (g != g_last) & (g == g)
            if ref_log_probs is not None:
                ref = tl.load(ref_log_probs + index).to(tl.float64)
                g += kl_loss_coef * policy_math.kl_term(logp, ref, KL_TYPE)[1]
            weight = tl.load(weights + index)
            g *= weight
            bonus = weight * entropy_coef
            tl.store(undecided + index, is_undecided.to(tl.uint8))
            if not is_undecided:
                if (g == 0.0) & (bonus == 0.0):
                    row_math.write_zeros(grad, V, W, UNROLL)
                else:
                    row_math.write_gradient(
                        row,
                        grad,
                        V,
                        label,
                        row_math.label_gradient(z, logp, entropy, g, bonus, inner, slope, SOFTCAP),
                        origin,
                        sum_2t,
                        log_sum,
                        entropy,
                        g,
                        bonus,
                        inner,
                        scale2,
                        slope,
                        SOFTCAP,
                        BONUS,
                        W,
                        UNROLL,
                    )


_kernel_of_rows = Kernel(_row_pass_kernel, specialised=("logits", "dlogits", "V"))
_kernel_of_sets = Kernel(_row_pass_kernel)  # they begin anywhere


@lru_cache
def _ends(grids: tuple[float, ...]) -> dict[str, float]:
    """Of the ranges of the bounds, which are applied as float32."""
    lower_start, lower_max, _, upper_start, upper_max, _ = grids
    ends = lower_start, lower_max, upper_start, upper_max
    names = "lower_start", "lower_max", "upper_start", "upper_max"
    return dict(zip(names, struct.unpack("4f", struct.pack("4f", *ends)), strict=True))


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    temperatures: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    stats: Tensor,
    *,
    offsets: Tensor | None = None,
) -> None:
    """The row pass without a gradient, which needs no input of the policy."""
    of_rows = temperatures is not None
    softcapped, transform = transform_arguments(temperature, logit_scale, softcap, of_rows)
    shape = row_shape(logits, softcapped, threads=256) if offsets is None else set_shape()
    kernel = _kernel_of_rows if offsets is None else _kernel_of_sets
    kernel[(labels.numel(),)](
        logits,
        None,
        labels,
        counted,
        old_log_probs=None,
        advantages=None,
        weights=None,
        is_weights=None,
        ref_log_probs=None,
        temperatures=temperatures,
        bounds=None,
        log_probs=log_probs,
        entropies=entropy,
        stats=stats,
        undecided=None,
        offsets=offsets,
        **row_arguments(logits, None, offsets),
        **transform,
        lower_start=0.0,
        lower_max=0.0,
        upper_start=0.0,
        upper_max=0.0,
        clip_ratio_c=math.inf,
        sapo_tau_pos=1.0,
        sapo_tau_neg=1.0,
        kl_loss_coef=0.0,
        entropy_coef=0.0,
        SOFTCAP=softcapped,
        SURROGATE=0,
        OWN_BOUNDS=False,
        KL_TYPE=0,
        BONUS=False,
        W=shape.W,
        UNROLL=shape.UNROLL,
        **limits(shape.num_warps, registers=96),
    )


def row_pass(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    rollout_is_weights: Tensor | None,
    ref_log_probs: Tensor | None,
    bounds: Tensor | None,
    grids: Sequence[float],
    surrogate: int,
    kl_loss_type: int,
    coefficients: Sequence[float],
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    temperatures: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    stats: Tensor,
    undecided: Tensor,
    dlogits: Tensor,
    *,
    offsets: Tensor | None = None,
) -> None:
    of_rows = temperatures is not None
    softcapped, transform = transform_arguments(temperature, logit_scale, softcap, of_rows)
    shape = row_shape(logits, softcapped) if offsets is None else set_shape()
    kernel = _kernel_of_rows if offsets is None else _kernel_of_sets
    clip_ratio_c, sapo_tau_pos, sapo_tau_neg, kl_loss_coef, entropy_coef = coefficients
    kernel[(labels.numel(),)](
        logits,
        dlogits,
        labels,
        counted,
        old_log_probs,
        advantages,
        weights,
        rollout_is_weights,
        ref_log_probs if kl_loss_coef else None,
        temperatures,
        bounds,
        log_probs,
        entropy,
        stats,
        undecided,
        offsets,
        **row_arguments(logits, dlogits, offsets),
        **transform,
        **_ends(tuple(grids)),
        clip_ratio_c=clip_ratio_c,
        sapo_tau_pos=sapo_tau_pos,
        sapo_tau_neg=sapo_tau_neg,
        kl_loss_coef=kl_loss_coef,
        entropy_coef=entropy_coef,
        SOFTCAP=softcapped,
        SURROGATE=surrogate,
        OWN_BOUNDS=bounds is not None and bounds.ndim == 2,
        KL_TYPE=kl_loss_type,
        BONUS=entropy_coef != 0,
        W=shape.W,
        UNROLL=shape.UNROLL,
        **limits(shape.num_warps, registers=64 if offsets is None else 72),
    )


def row_pass_(logits: Tensor, *arguments: Any) -> None:
    row_pass(*[logits, *arguments, logits])
