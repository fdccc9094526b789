"""The gradients of several labels per row: computed before the second pass, and written after it.

May import ``row_math``, ``kernel`` and ``launch``. The pass takes no label here, and overwrites the
logits in place: a label written earlier, or computed later, gets a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from . import row_math
from .kernel import Kernel
from .launch import INTERPRETED, limits

LABELS = 128  # per row and step
OTHERS = 512 if INTERPRETED else 8  # compared with them per step; more take too many registers


@triton.jit
def _columns_at(labels, k, count, V, none):
    """The columns of these labels of a row; ``none`` for labels without one."""
    label = tl.load(labels + k, k < count, other=-1)
    return tl.where((label >= 0) & (label < V), label, none).to(tl.int32)


@triton.jit
def _with_equals(labels, values, k, count, V, OTHERS: tl.constexpr):
    """The columns of labels of a row, and for each the sum of the values of all equal labels.

    A column is negative if there is none, or if an earlier label has the same.
    """
    column = _columns_at(labels, k, count, V, -2)
    total, repeats = tl.zeros(k.shape, tl.float64), tl.zeros(k.shape, tl.int32)
    for start in range(0, count, OTHERS):
        j = start + tl.arange(0, OTHERS)
        is_equal = _columns_at(labels, j, count, V, -1)[:, None] == column[None, :]
        value = tl.load(values + j, j < count, other=0.0)[:, None]
        total += tl.sum(tl.where(is_equal, value, 0.0), 0)
        repeats += tl.sum((is_equal & (j[:, None] < k[None, :])).to(tl.int32), 0)
    return tl.where(repeats == 0, column, -1), total


@Kernel
def _label_gradients_kernel(
    logits,
    dlogits,
    offsets,
    labels,
    stats,
    entropies,
    dlog_probs,
    dentropies,
    only,
    tokens,
    packed,
    sums,
    count: tl.int32,
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
    FOUND: tl.constexpr,
    LABELS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Computes gradients, or with FOUND writes those of ``packed``; a program of a warp per row.

    ``packed`` has a label without a column for every row, then column and gradient of every label.
    """
    index, N = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    if row_math.is_wanted(only, index):
        sizes = K, rows_per_batch, V, batch_stride, row_stride, dbatch_stride, drow_stride
        row, grad, V, _ = row_math.row_of(logits, dlogits, offsets, index, N, sizes, 1)
        entries = packed + N + index * count
        if FOUND:
            for first in range(0, count, LABELS):
                k = first + tl.arange(0, LABELS)
                both = tl.load(entries + k, k < count, other=-1)
                column, value = both >> 32, both.to(tl.uint32).to(tl.float32, bitcast=True)
                value = row_math.rounded(value, grad.dtype.element_ty)
                tl.store(grad + column, value, column >= 0)
        else:
            labels += index * count
            dlog_probs += index * count
            lanes, some = tl.zeros((LABELS,), tl.float64), tl.zeros((LABELS,), tl.int32)
            for first in range(0, count, LABELS):
                k = first + tl.arange(0, LABELS)
                g = tl.load(dlog_probs + k, k < count, other=0.0)
                lanes += g
                some |= (g != 0.0).to(tl.int32)
            total = tl.sum(lanes)
            tl.store(packed + index, row_math.IGNORED)
            tl.store(sums + index, total)
            token, transform = (tokens, N, index, True), (inner, scale2, scale, slope)
            transform = row_math.transform_of(token, transform, SOFTCAP, PRESENT)
            origin = tl.load(stats + 2 * index).to(tl.float32)
            log_sum = tl.log(tl.load(stats + 2 * index + 1))
            entropy, bonus = tl.load(entropies + index), total * 0.0
            if dentropies is not None:
                bonus = -tl.load(dentropies + index)
            # A row whose gradient is zero is not read.
            V = tl.where((tl.max(some) != 0) | (bonus != 0.0), V, 0)
            for first in range(0, count, LABELS):
                k = first + tl.arange(0, LABELS)
                column, g = _with_equals(labels, dlog_probs, k, count, V, OTHERS)
                z = row_math.label_logit(row, column, V)
                logp = row_math.label_log_prob(z, origin, log_sum, transform, SOFTCAP)
                given = z, logp, entropy, g, bonus, transform
                dz = row_math.label_gradient(*given, SOFTCAP, others=total - g)
                value = dz.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
                tl.store(entries + k, (column.to(tl.int64) << 32) | value, k < count)


def label_gradients(rows: int, arguments: tuple[Any, ...], found: bool) -> None:
    """Computes the gradients of all labels, or writes those that were ``found``."""
    _label_gradients_kernel[(rows,)](*arguments, found, LABELS, OTHERS, **limits(1, registers=144))
