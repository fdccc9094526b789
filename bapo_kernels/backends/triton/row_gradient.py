"""The gradient of rows with known statistics, and its scaling; each program strides over the rows.

May import what ``row_pass`` may, and ``labels``. Must write the same gradient of a row as
``row_pass``: the result of the search decides which of the two does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...core.operators import as_rows
from . import row_math
from .kernel import Kernel
from .labels import label_gradients
from .launch import limits, resident_programs, row_shape, row_sizes, set_shape, transform
from .tokens import TEMPERATURES, bits

FLAGS = 64  # rows of a program, whose flags it reads together


@triton.jit
def any_wanted(flags, begin, end, step, FLAGS: tl.constexpr, WANTED: tl.constexpr = True):
    """Whether one of FLAGS rows, ``step`` apart, is wanted."""
    if flags is None:
        wanted = True
    else:
        index = begin + tl.arange(0, FLAGS) * step
        flagged = (tl.load(flags + index, index < end, other=0) != 0) == WANTED
        wanted = tl.max((flagged & (index < end)).to(tl.int32), 0) != 0
    return wanted


def _row_gradient_kernel(
    logits,
    dlogits,
    offsets,
    labels,
    stats,
    entropies,
    dlog_probs,
    dentropies,
    only,
    drawn,
    tokens,
    rows: tl.int64,
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
    SOFTCAP: tl.constexpr,
    PRESENT: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Rows with ``offsets`` are the values of sampling sets, or of samples with ``drawn``.

    Often there is nothing to do, because no row was undecided: few programs find that out sooner
    than one per row.
    """
    sizes = K, rows_per_batch, V, batch_stride, row_stride, dbatch_stride, drow_stride
    transform = inner, scale2, scale, slope
    known = labels, stats, entropies, dlog_probs, dentropies, drawn
    programs = tl.num_programs(0).to(tl.int64)
    for begin in range(tl.program_id(0).to(tl.int64), rows, FLAGS * programs):
        end = tl.minimum(rows, begin + FLAGS * programs)
        if any_wanted(only, begin, end, programs, FLAGS):
            for index in range(begin, end, programs):
                if row_math.is_wanted(only, index):
                    operands = logits, dlogits, offsets, index, rows, sizes
                    row, grad, length, _ = row_math.row_of(*operands, ALIGN)
                    given = row, grad, length, known, (tokens, rows, index, True), transform
                    _write_row_gradient(*given, SOFTCAP, PRESENT, W, UNROLL)


@triton.jit
def _write_row_gradient(
    row,
    grad,
    V,
    known,
    token,
    transform,
    SOFTCAP: tl.constexpr,
    PRESENT: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    labels, stats, entropies, dlog_probs, dentropies, drawn = known
    index = token[2]
    g = tl.load(dlog_probs + index)
    bonus = g * 0.0
    if dentropies is not None:
        bonus = -tl.load(dentropies + index)
    if (g == 0.0) & (bonus == 0.0):
        row_math.write_zeros(grad, V, W, UNROLL)
    else:
        transform = row_math.transform_of(token, transform, SOFTCAP, PRESENT)
        origin = tl.load(stats + 2 * index).to(tl.float32)
        sum_2t = tl.load(stats + 2 * index + 1)
        log_sum = tl.log(sum_2t)
        statistics = origin, sum_2t, log_sum, tl.load(entropies + index)
        label = tl.load(labels + index)
        z = row_math.label_logit(row, label, V)
        logp = row_math.label_log_prob(z, origin, log_sum, transform, SOFTCAP)
        given = row, grad, V, (label, z, logp), statistics, (g, bonus), transform
        BONUS: tl.constexpr = dentropies is not None
        of_sample = None
        if drawn is not None:
            place = drawn + 4 * index
            of_sample = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        tl.debug_barrier()
        row_math.write_gradient(*given, SOFTCAP, BONUS, W, UNROLL, of_sample)


_row_kernel = Kernel(_row_gradient_kernel, specialised=("logits", "dlogits", "V"))
_set_kernel = Kernel(_row_gradient_kernel)  # sets begin anywhere


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
    """Reads and writes no row if the factor is 1, as it often is."""
    by = tl.load(factor)
    if by != 1.0:
        programs = tl.num_programs(0).to(tl.int64)
        for index in range(tl.program_id(0).to(tl.int64), rows, programs):
            row = row_math.row_pointer(x, index, rows_per_batch, batch_stride, row_stride, ALIGN)
            row_math.scale_row(row, V, by, W, UNROLL)


def row_gradient(
    logits: Tensor,
    offsets: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    entropy: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    only: Tensor | None,
    drawn: Tensor | None,
    tokens: Tensor | None,
    present: int,
    options: list[float],
    dlogits: Tensor,
) -> None:
    present &= bits(TEMPERATURES)
    softcapped, numbers = transform(options, bool(present))
    shape = row_shape(logits, softcapped) if offsets is None else set_shape()
    sizes, ALIGN = row_sizes(logits, dlogits, offsets)
    rows, several = entropy.numel(), labels.numel() > entropy.numel()
    matrices, fields = (logits, dlogits, offsets), tokens if present else None
    scalars = *sizes, *numbers, softcapped, present
    if several:
        packed, sums = labels.new_empty(rows + labels.numel()), dlog_probs.new_empty(rows)
        found = labels, stats, entropy, dlog_probs, dentropy, only, fields, packed, sums
        label_operands = *matrices, *found, labels.shape[1], *scalars
        label_gradients(rows, label_operands, found=False)
        labels, dlog_probs = packed, sums
    known = labels, stats, entropy, dlog_probs, dentropy, only, drawn, fields
    kernel = _row_kernel if offsets is None else _set_kernel
    kernel[(resident_programs(rows, shape.num_warps),)](
        *(*matrices, *known, rows, *scalars, ALIGN, shape.W, shape.UNROLL, FLAGS),
        **limits(shape.num_warps, registers=64 if offsets is None else 72),
    )
    if several:
        label_gradients(rows, label_operands, found=True)


def row_gradient_(logits: Tensor, *arguments: Any) -> None:
    row_gradient(*[logits, *arguments, logits])


def scale_(x: Tensor, factor: Tensor) -> None:
    x = as_rows(x)
    shape = row_shape(x)
    (_, *sizes), ALIGN = row_sizes(x, None, None)
    rows = x.shape[0] * x.shape[1]
    _scale_kernel[(resident_programs(rows, shape.num_warps),)](
        *(x, factor, rows, *sizes[:4], ALIGN, shape.W, shape.UNROLL),
        **limits(shape.num_warps, registers=64),
    )
