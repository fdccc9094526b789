"""The gradient of known rows, and its scaling; each program strides over the rows.

Often there is nothing to do, because no row was undecided or the factor is 1: few programs find
that out sooner than one per row. With ``offsets`` rows are the values of sets, as in ``row_pass``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...inputs import as_rows
from . import row_math, set_math
from .kernel import Kernel
from .launch import (
    alignment,
    limits,
    resident_programs,
    row_arguments,
    row_shape,
    set_shape,
    transform_arguments,
)

FLAGS = 64  # rows of a program whose flags it reads at once


@triton.jit
def is_wanted(flags, index, WANTED: tl.constexpr = True):
    """Whether a row has this flag; without flags every row is wanted."""
    if flags is None:
        wanted = True
    else:
        wanted = (tl.load(flags + index) != 0) == WANTED
    return wanted


@triton.jit
def any_wanted(flags, begin, end, step, FLAGS: tl.constexpr, WANTED: tl.constexpr = True):
    """Whether one of FLAGS rows, ``step`` apart, is wanted."""
    if flags is None:
        wanted = True
    else:
        index = begin + tl.arange(0, FLAGS) * step
        of_rows = (tl.load(flags + index, index < end, other=0) != 0) == WANTED
        wanted = tl.max((of_rows & (index < end)).to(tl.int32), 0) != 0
    return wanted


def _row_gradient_kernel(
    logits,
    dlogits,
    labels,
    stats,
    entropies,
    dlog_probs,
    dentropies,
    temperatures,
    only,
    offsets,
    K: tl.int64,
    rows: tl.int64,
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
    FLAGS: tl.constexpr,
):
    programs = tl.num_programs(0).to(tl.int64)
    for begin in range(tl.program_id(0).to(tl.int64), rows, FLAGS * programs):
        end = tl.minimum(rows, begin + FLAGS * programs)
        if any_wanted(only, begin, end, programs, FLAGS):
            for index in range(begin, end, programs):
                if is_wanted(only, index):
                    if offsets is None:
                        row = row_math.row_pointer(
                            logits, index, rows_per_batch, batch_stride, row_stride, ALIGN
                        )
                        grad = row_math.row_pointer(
                            dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN
                        )
                    else:
                        first, V, _ = set_math.set_of(offsets, index, True, rows, K)
                        row, grad = logits + first, dlogits + first
                    _gradient_of_row(
                        row,
                        grad,
                        labels,
                        stats,
                        entropies,
                        dlog_probs,
                        dentropies,
                        temperatures,
                        index,
                        V,
                        inner,
                        scale2,
                        scale,
                        slope,
                        SOFTCAP,
                        W,
                        UNROLL,
                    )


@triton.jit
def _gradient_of_row(
    row,
    grad,
    labels,
    stats,
    entropies,
    dlog_probs,
    dentropies,
    temperatures,
    index,
    V,
    inner,
    scale2,
    scale,
    slope,
    SOFTCAP: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    g = tl.load(dlog_probs + index)
    bonus = g * 0.0
    if dentropies is not None:
        bonus = -tl.load(dentropies + index)
    if (g == 0.0) & (bonus == 0.0):
        row_math.write_zeros(grad, V, W, UNROLL)
    else:
        if temperatures is not None:
            temperature = tl.load(temperatures + index)
            scale2 = row_math.scale2_at(scale, temperature)
            scale = row_math.at_temperature(scale, temperature)
            slope = row_math.at_temperature(slope, temperature) if SOFTCAP else scale
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


_kernel_of_rows = Kernel(_row_gradient_kernel, specialised=("logits", "dlogits", "V"))
_kernel_of_sets = Kernel(_row_gradient_kernel)  # they begin anywhere


@partial(Kernel, specialised=("x", "V"))
def _scale_kernel(
    x,
    factor,
    rows: tl.int64,
    rows_per_batch: tl.int64,
    V: tl.int32,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    by = tl.load(factor)
    if by != 1.0:
        programs = tl.num_programs(0).to(tl.int64)
        for index in range(tl.program_id(0).to(tl.int64), rows, programs):
            row = row_math.row_pointer(x, index, rows_per_batch, batch_stride, row_stride, ALIGN)
            row_math.scale_row(row, V, by, W, UNROLL)


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
    temperatures: Tensor | None,
    dlogits: Tensor,
    *,
    offsets: Tensor | None = None,
) -> None:
    of_rows = temperatures is not None
    softcapped, transform = transform_arguments(temperature, logit_scale, softcap, of_rows)
    shape = row_shape(logits, softcapped) if offsets is None else set_shape()
    kernel = _kernel_of_rows if offsets is None else _kernel_of_sets
    rows = labels.numel()
    kernel[(resident_programs(rows, shape.num_warps),)](
        logits,
        dlogits,
        labels,
        stats,
        entropy,
        dlog_probs,
        dentropy,
        temperatures,
        only,
        offsets,
        rows=rows,
        **row_arguments(logits, dlogits, offsets),
        **transform,
        SOFTCAP=softcapped,
        W=shape.W,
        UNROLL=shape.UNROLL,
        FLAGS=FLAGS,
        **limits(shape.num_warps, registers=64 if offsets is None else 72),
    )


def row_gradient_(logits: Tensor, *arguments: Any) -> None:
    row_gradient(*[logits, *arguments, logits])


def scale_(x: Tensor, factor: Tensor) -> None:
    x = as_rows(x)
    shape = row_shape(x)
    rows = x.shape[0] * x.shape[1]
    _scale_kernel[(resident_programs(rows, shape.num_warps),)](
        x,
        factor,
        rows=rows,
        rows_per_batch=x.shape[1],
        V=x.shape[2],
        batch_stride=x.stride(0),
        row_stride=x.stride(1),
        ALIGN=alignment(x.element_size(), x.shape, x.stride()),
        W=shape.W,
        UNROLL=shape.UNROLL,
        **limits(shape.num_warps, registers=64),
    )
