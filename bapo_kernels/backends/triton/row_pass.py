"""Kernels with one program a row: the single pass, the gradient of known rows, the scaling."""

from __future__ import annotations

import math
import struct
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...inputs import as_rows
from . import policy_math, rows
from .launch import alignment, limits, row_shape

# Of every argument that is no constexpr: a value that changes compiles nothing.
_RUN_TIME = ("rows_per_batch", "batch_stride", "row_stride", "dbatch_stride", "drow_stride")


@triton.jit(do_not_specialize=_RUN_TIME)
def _row_pass_kernel(
    logits,
    dlogits,
    labels,
    live,
    old_log_probs,
    advantages,
    weights,
    is_weights,
    ref_log_probs,
    bounds,
    log_probs,
    entropies,
    stats,
    undecided,
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
    fixed: tl.float32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    clip_ratio_c: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    SOFTCAP: tl.constexpr,
    KL_TYPE: tl.constexpr,
    BONUS: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = rows.row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, ALIGN)
    if dlogits is not None:
        grad = rows.row_pointer(dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN)
    if tl.load(live + index) == 0:
        tl.store(log_probs + index, 0.0)
        tl.store(entropies + index, 0.0)
        tl.store(stats + 2 * index, 0.0)
        tl.store(stats + 2 * index + 1, 1.0)
        if dlogits is not None:
            tl.store(undecided + index, 0)
            rows.write_zeros(grad, V, W, UNROLL)
    else:
        label = tl.load(labels + index)
        z = rows.label_logit(row, label, V)  # the sums over the row wait for all threads
        origin, sum_2t, weighted = rows.row_statistics(
            row, V, inner, scale2, fixed, SOFTCAP, W, UNROLL
        )
        log_sum = tl.log(sum_2t)
        entropy = log_sum - rows.LN2 * weighted / sum_2t
        logp = rows.label_log_prob(z, origin, log_sum, inner, scale, SOFTCAP)
        tl.store(log_probs + index, logp)
        tl.store(entropies + index, entropy)
        tl.store(stats + 2 * index, origin.to(tl.float64))
        tl.store(stats + 2 * index + 1, sum_2t)
        if dlogits is not None:
            lower_first, upper_first = lower_start, upper_start
            lower_last, upper_last = lower_max, upper_max
            if bounds is not None:
                lower_first = tl.load(bounds).to(tl.float64)
                upper_first = tl.load(bounds + 1).to(tl.float64)
                lower_last, upper_last = lower_first, upper_first
            old = policy_math.old_log_prob(old_log_probs, index, None, logp)
            r, _, saturated = policy_math.policy_ratio(logp, old)
            A = tl.load(advantages + index).to(tl.float64)
            g = policy_math.policy_grad(r, saturated, A, lower_first, upper_first, clip_ratio_c)
            g_last = policy_math.policy_grad(r, saturated, A, lower_last, upper_last, clip_ratio_c)
            if is_weights is not None:
                is_weight = tl.load(is_weights + index).to(tl.float64)
                g *= is_weight
                g_last *= is_weight
            waits = (g != g_last) & (g == g)
            if ref_log_probs is not None:
                ref = tl.load(ref_log_probs + index).to(tl.float64)
                g += kl_loss_coef * policy_math.kl_term(logp, ref, KL_TYPE)[1]
            weight = tl.load(weights + index)
            g *= weight
            bonus = weight * entropy_coef
            tl.store(undecided + index, waits.to(tl.uint8))
            if not waits:
                if (g == 0.0) & (bonus == 0.0):
                    rows.write_zeros(grad, V, W, UNROLL)
                else:
                    rows.write_gradient(
                        row,
                        grad,
                        V,
                        label,
                        rows.label_gradient(z, logp, entropy, g, bonus, inner, slope, SOFTCAP),
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


@triton.jit(do_not_specialize=_RUN_TIME)
def _row_gradient_kernel(
    logits,
    dlogits,
    labels,
    stats,
    entropies,
    dlog_probs,
    dentropies,
    only,
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
    SOFTCAP: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    wanted = True
    if only is not None:
        wanted = tl.load(only + index) != 0
    if wanted:
        grad = rows.row_pointer(dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN)
        g = tl.load(dlog_probs + index)
        bonus = g * 0.0
        if dentropies is not None:
            bonus = -tl.load(dentropies + index)
        if (g == 0.0) & (bonus == 0.0):
            rows.write_zeros(grad, V, W, UNROLL)
        else:
            row = rows.row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, ALIGN)
            origin = tl.load(stats + 2 * index).to(tl.float32)
            sum_2t = tl.load(stats + 2 * index + 1)
            log_sum = tl.log(sum_2t)
            entropy = tl.load(entropies + index)
            label = tl.load(labels + index)
            z = rows.label_logit(row, label, V)
            logp = rows.label_log_prob(z, origin, log_sum, inner, scale, SOFTCAP)
            tl.debug_barrier()
            rows.write_gradient(
                row,
                grad,
                V,
                label,
                rows.label_gradient(z, logp, entropy, g, bonus, inner, slope, SOFTCAP),
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
                dentropies is not None,
                W,
                UNROLL,
            )


@triton.jit(do_not_specialize=_RUN_TIME)
def _scale_kernel(
    x,
    factor,
    rows_per_batch: tl.int64,
    V: tl.int32,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
):
    by = tl.load(factor)
    if by != 1.0:
        index = tl.program_id(0).to(tl.int64)
        row = rows.row_pointer(x, index, rows_per_batch, batch_stride, row_stride, ALIGN)
        for begin in range(0, V, W):
            column = begin + tl.arange(0, W)
            scaled = tl.load(row + column, column < V).to(tl.float32) * by
            tl.store(row + column, rows.rounded(scaled, x.dtype.element_ty), column < V)


def _transform(
    temperature: float, logit_scale: float, softcap: float | None
) -> tuple[bool, dict[str, float]]:
    """x = scale*y with y = z, or y = tanh(inner*z) under softcap; dx/dz = slope*derivative(y)."""
    slope = logit_scale / temperature
    scale = slope if softcap is None else softcap / temperature
    inner = 1.0 if softcap is None else logit_scale / softcap
    return softcap is not None, dict(
        inner=inner, scale2=scale / math.log(2), scale=scale, slope=slope
    )


def _places(logits: Tensor, dlogits: Tensor | None) -> dict[str, int]:
    """Where the rows are."""
    grad = logits if dlogits is None else dlogits
    return dict(
        rows_per_batch=logits.shape[1],
        V=logits.shape[2],
        batch_stride=logits.stride(0),
        row_stride=logits.stride(1),
        dbatch_stride=grad.stride(0),
        drow_stride=grad.stride(1),
        ALIGN=alignment(logits, grad),
    )


def _float32(value: float) -> float:
    """Bounds are applied as float32: so are the ends of their ranges."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def row_pass(
    logits: Tensor,
    labels: Tensor,
    live: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | None,
    weights: Tensor | None,
    rollout_is_weights: Tensor | None,
    ref_log_probs: Tensor | None,
    bounds: Tensor | None,
    lower_start: float,
    lower_max: float,
    upper_start: float,
    upper_max: float,
    clip_ratio_c: float | None,
    kl_loss_coef: float,
    kl_loss_type: int,
    entropy_coef: float,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    log_probs: Tensor,
    entropy: Tensor,
    stats: Tensor,
    dlogits: Tensor | None,
    undecided: Tensor | None,
) -> None:
    softcapped, transform = _transform(temperature, logit_scale, softcap)
    shape = row_shape(logits, softcapped, threads=256 if dlogits is None else 512)
    _row_pass_kernel[(labels.numel(),)](
        logits,
        dlogits,
        labels,
        live,
        old_log_probs,
        advantages,
        weights,
        rollout_is_weights,
        ref_log_probs if kl_loss_coef else None,
        bounds,
        log_probs,
        entropy,
        stats,
        undecided,
        **_places(logits, dlogits),
        **transform,
        fixed=2.0 ** (61 - logits.shape[2].bit_length()),
        lower_start=_float32(lower_start),
        lower_max=_float32(lower_max),
        upper_start=_float32(upper_start),
        upper_max=_float32(upper_max),
        clip_ratio_c=math.inf if clip_ratio_c is None else clip_ratio_c,
        kl_loss_coef=kl_loss_coef,
        entropy_coef=entropy_coef,
        SOFTCAP=softcapped,
        KL_TYPE=kl_loss_type,
        BONUS=entropy_coef != 0,
        W=shape.W,
        UNROLL=shape.UNROLL,
        **limits(shape.num_warps, registers=96 if dlogits is None else 64),
    )


def row_pass_(logits: Tensor, *arguments: Any) -> None:
    row_pass(*[logits, *arguments[:-1], logits, arguments[-1]])


def row_gradient(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    entropy: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    only: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    dlogits: Tensor,
) -> None:
    softcapped, transform = _transform(temperature, logit_scale, softcap)
    shape = row_shape(logits, softcapped)
    _row_gradient_kernel[(labels.numel(),)](
        logits,
        dlogits,
        labels,
        stats,
        entropy,
        dlog_probs,
        dentropy,
        only,
        **_places(logits, dlogits),
        **transform,
        SOFTCAP=softcapped,
        W=shape.W,
        UNROLL=shape.UNROLL,
        **limits(shape.num_warps, registers=64),
    )


def row_gradient_(logits: Tensor, *arguments: Any) -> None:
    row_gradient(*[logits, *arguments, logits])


def scale_(x: Tensor, factor: Tensor) -> None:
    rows = as_rows(x)
    shape = row_shape(rows)
    _scale_kernel[(rows.shape[0] * rows.shape[1],)](
        rows,
        factor,
        rows_per_batch=rows.shape[1],
        V=rows.shape[2],
        batch_stride=rows.stride(0),
        row_stride=rows.stride(1),
        ALIGN=alignment(rows),
        W=shape.W,
        **limits(shape.num_warps, registers=64),
    )
