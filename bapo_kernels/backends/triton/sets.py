"""Sampling masks: the values of sets, which are short rows.

They are gathered from rows of logits, passed over as these are, and their gradients scattered.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from . import row_gradient, row_math, row_pass, set_math
from .kernel import Kernel
from .launch import ceil_div, limits

LABELS = 128  # of a program
IDS = 128  # of a set at once


@Kernel
def _find_labels_kernel(
    labels,
    token_ids,
    offsets,
    positions,
    N: tl.int64,
    K: tl.int64,
    vocab: tl.int64,
    LABELS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * LABELS + tl.arange(0, LABELS)
    inside = index < N
    begin, size, is_broken = set_math.set_of(offsets, index, inside, N, K)
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
    found = tl.where(is_found, position, set_math.OUTSIDE)
    found = tl.where(is_token, found, set_math.NO_TOKEN).to(tl.int64)
    tl.store(positions + index, found, inside & ((size > 0) | is_broken))


@Kernel
def _gather_sets_kernel(
    logits,
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
    IDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if tl.load(counted + index) != 0:
        begin, size, _ = set_math.set_of(offsets, index, True, tl.num_programs(0), K)
        row = row_math.row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, 1)
        for first in range(0, size, IDS):
            at = first + tl.arange(0, IDS)
            column = set_math.columns_of(token_ids, begin, size, at, shard, V)
            z = row_math.widened(tl.load(row + column, column >= 0, other=0.0))
            z = tl.where(column >= 0, z, set_math.value_without_column(column))
            tl.store(values + begin + at, z, at < size)


@Kernel
def _scatter_sets_kernel(
    dlogits,
    dvalues,
    counted,
    token_ids,
    offsets,
    shard,
    K: tl.int64,
    V: tl.int64,
    rows_per_batch: tl.int64,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    IDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if tl.load(counted + index) != 0:
        begin, size, _ = set_math.set_of(offsets, index, True, tl.num_programs(0), K)
        grad = row_math.row_pointer(dlogits, index, rows_per_batch, batch_stride, row_stride, 1)
        for first in range(0, size, IDS):
            at = first + tl.arange(0, IDS)
            column = set_math.columns_of(token_ids, begin, size, at, shard, V)
            dz = tl.load(dvalues + begin + at, column >= 0, other=0.0)
            tl.store(grad + column, row_math.rounded(dz, grad.dtype.element_ty), column >= 0)


def find_labels(
    labels: Tensor, token_ids: Tensor, offsets: Tensor, vocab: int, positions: Tensor
) -> None:
    N = labels.numel()
    _find_labels_kernel[(ceil_div(N, LABELS),)](
        labels,
        token_ids,
        offsets,
        positions,
        N,
        token_ids.numel(),
        vocab,
        LABELS=LABELS,
        **limits(4, registers=64),
    )


def gather_sets(
    logits: Tensor,
    counted: Tensor,
    token_ids: Tensor,
    offsets: Tensor,
    shard: Tensor | None,
    values: Tensor,
) -> None:
    _gather_sets_kernel[(counted.numel(),)](
        logits,
        values,
        counted,
        token_ids,
        offsets,
        shard,
        **_sizes(logits, token_ids),
        IDS=IDS,
        **limits(1, registers=64),
    )


def scatter_sets(
    dvalues: Tensor,
    counted: Tensor,
    token_ids: Tensor,
    offsets: Tensor,
    shard: Tensor | None,
    dlogits: Tensor,
) -> None:
    _scatter_sets_kernel[(counted.numel(),)](
        dlogits,
        dvalues,
        counted,
        token_ids,
        offsets,
        shard,
        **_sizes(dlogits, token_ids),
        IDS=IDS,
        **limits(1, registers=64),
    )


def _sizes(rows: Tensor, token_ids: Tensor) -> dict[str, int]:
    return dict(
        K=token_ids.numel(),
        V=rows.shape[2],
        rows_per_batch=rows.shape[1],
        batch_stride=rows.stride(0),
        row_stride=rows.stride(1),
    )


def sets_statistics(values: Tensor, offsets: Tensor, *arguments: Any) -> None:
    row_pass.row_statistics(values, *arguments, offsets=offsets)


def sets_pass_(values: Tensor, offsets: Tensor, *arguments: Any) -> None:
    row_pass.row_pass(*[values, *arguments, values], offsets=offsets)


def sets_gradient(values: Tensor, offsets: Tensor, *arguments: Any) -> None:
    row_gradient.row_gradient(values, *arguments, offsets=offsets)


def sets_gradient_(values: Tensor, offsets: Tensor, *arguments: Any) -> None:
    row_gradient.row_gradient(*[values, *arguments, values], offsets=offsets)
