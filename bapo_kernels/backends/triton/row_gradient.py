"""Kernels with one program per row for the gradient of known rows, and for its scaling."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...inputs import as_rows
from . import row_math
from .launch import RUN_TIME, alignment, limits, row_arguments, row_shape, transform_arguments


@triton.jit(do_not_specialize=RUN_TIME)
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
        grad = row_math.row_pointer(
            dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN
        )
        g = tl.load(dlog_probs + index)
        bonus = g * 0.0
        if dentropies is not None:
            bonus = -tl.load(dentropies + index)
        if (g == 0.0) & (bonus == 0.0):
            row_math.write_zeros(grad, V, W, UNROLL)
        else:
            row = row_math.row_pointer(
                logits, index, rows_per_batch, batch_stride, row_stride, ALIGN
            )
            origin = tl.load(stats + 2 * index).to(tl.float32)
            sum_2t = tl.load(stats + 2 * index + 1)
            log_sum = tl.log(sum_2t)
            entropy = tl.load(entropies + index)
            label = tl.load(labels + index)
            z = row_math.label_logit(row, label, V)
            logp = row_math.label_log_prob(z, origin, log_sum, inner, scale, SOFTCAP)
            tl.debug_barrier()
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
                dentropies is not None,
                W,
                UNROLL,
            )


@triton.jit(do_not_specialize=RUN_TIME)
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
        row = row_math.row_pointer(x, index, rows_per_batch, batch_stride, row_stride, ALIGN)
        for begin in range(0, V, W):
            column = begin + tl.arange(0, W)
            scaled = tl.load(row + column, column < V).to(tl.float32) * by
            tl.store(row + column, row_math.rounded(scaled, x.dtype.element_ty), column < V)


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
    softcapped, transform = transform_arguments(temperature, logit_scale, softcap)
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
        **row_arguments(logits, dlogits),
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
