"""Sampling masks: gathers the values of sets from rows of logits, and scatters their gradients.

May import ``row_math``, ``sampling_set_math``, ``kernel`` and ``launch``. Ids come from outside:
addresses must follow from ``set_of`` and ``columns_of``, or a broken id reaches foreign memory.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from . import row_math, sampling_set_math
from .kernel import Kernel
from .launch import ceil_div, limits

LABELS = 128  # per program
IDS = 128  # per set and step


@Kernel
def _find_labels_kernel(
    labels,
    token_ids,
    offsets,
    positions,
    N: tl.int64,
    K: tl.int64,
    vocab: tl.int64,
    per_row: tl.int32,
    LABELS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * LABELS + tl.arange(0, LABELS)
    inside = index < N * per_row
    begin, size, is_broken = sampling_set_math.set_of(offsets, index // per_row, inside, N, K)
    label = tl.load(labels + index, inside, other=0)
    position, count = tl.zeros_like(size), size
    while tl.max(count, 0) > 0:
        half = count // 2
        id = tl.load(token_ids + begin + position + half, count > 0, other=0)
        is_below = (count > 0) & (id < label)
        position = tl.where(is_below, position + half + 1, position)
        count = tl.where(is_below, count - half - 1, half)
    is_in_set = position < size
    is_found = is_in_set & (tl.load(token_ids + begin + position, is_in_set, other=0) == label)
    is_token = (label >= 0) & (label < vocab) & ~is_broken
    found = tl.where(is_found, position, sampling_set_math.OUTSIDE)
    found = tl.where(is_token, found, sampling_set_math.NO_TOKEN).to(tl.int64)
    found = tl.where(label == row_math.IGNORED, label, found)
    tl.store(positions + index, found, inside & ((size > 0) | is_broken))


@Kernel
def _move_sets_kernel(
    rows,
    values,
    counted,
    token_ids,
    offsets,
    shard,
    K: tl.int64,
    V: tl.int64,
    rows_per_batch: tl.int64,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    GATHER: tl.constexpr,
    IDS: tl.constexpr,
):
    """Gathers from the rows, or scatters into them."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(counted + index) != 0:
        begin, size, _ = sampling_set_math.set_of(offsets, index, True, tl.num_programs(0), K)
        row = row_math.row_pointer(rows, index, rows_per_batch, batch_stride, row_stride, 1)
        for first in range(0, size, IDS):
            at = first + tl.arange(0, IDS)
            column = sampling_set_math.columns_of(token_ids, begin, size, at, shard, V)
            if GATHER:
                z = row_math.widened(tl.load(row + column, column >= 0, other=0.0))
                z = tl.where(column >= 0, z, sampling_set_math.value_without_column(column))
                tl.store(values + begin + at, z, at < size)
            else:
                dz = tl.load(values + begin + at, column >= 0, other=0.0)
                tl.store(row + column, row_math.rounded(dz, row.dtype.element_ty), column >= 0)


def find_labels(
    labels: Tensor, token_ids: Tensor, offsets: Tensor, vocab: int, positions: Tensor
) -> None:
    N, K = labels.shape[0], token_ids.numel()
    per_row = labels.shape[1] if labels.ndim == 2 else 1
    _find_labels_kernel[(ceil_div(labels.numel(), LABELS),)](
        *(labels, token_ids, offsets, positions, N, K, vocab, per_row, LABELS),
        **limits(4, registers=64),
    )


def gather_sets(logits: Tensor, counted: Tensor, *operands: Any) -> None:
    *sets, values = operands
    _move(logits, values, counted, sets, gather=True)


def scatter_sets(dvalues: Tensor, counted: Tensor, *operands: Any) -> None:
    *sets, dlogits = operands
    _move(dlogits, dvalues, counted, sets, gather=False)


def _move(rows: Tensor, values: Tensor, counted: Tensor, sets: list[Any], gather: bool) -> None:
    """Takes ``sets``: token_ids, offsets and shard."""
    sizes = values.numel(), rows.shape[2], rows.shape[1], *rows.stride()[:2]
    _move_sets_kernel[(counted.numel(),)](
        *(rows, values, counted, *sets, *sizes, gather, IDS), **limits(1, registers=64)
    )
