"""The kernels' inputs per token, from arguments in the dtypes and strides of the caller.

May import ``config``, ``tokens``, ``kernel`` and ``launch``. Nothing else checks values on the
device: those that break a rule must make the weights NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import IGNORE_INDEX, Options
from .kernel import Kernel
from .launch import ceil_div, limits
from .tokens import ADVANTAGES, LOWER, UPPER

TOKENS = 2_048  # per program and step
ALONE = 4 * TOKENS  # tokens that one program takes: one launch in place of three
_COUNT, _WRITE, _COUNT_AND_WRITE = (1, 0), (0, 1), (1, 1)
_IGNORE_INDEX = tl.constexpr(IGNORE_INDEX)
# Modes of aggregation by number, in the order of LossAggMode.
_MODE = Options._fields.index("loss_agg_mode")
_SCALE_FACTOR = Options._fields.index("loss_scale_factor")
_TOKEN_MEAN, _TOKEN_SUM, _SEQ_MEAN_TOKEN_SUM_NORM, _SEQ_MEAN_TOKEN_MEAN = 0, 1, 3, 4


@triton.jit
def offset_at(cu_seqlens, stride, at, mask, N):
    """``cu_seqlens[at]``, clamped to the number of tokens."""
    offset = tl.load(cu_seqlens + at * stride, mask, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(offset, 0), N)


@triton.jit
def _sequence_of(cu_seqlens, stride, K, steps, index, N):
    """The number of sequences that end before the token or at it: a bisection in ``steps``."""
    sequence = tl.zeros_like(index)
    size = sequence + K
    for _ in range(steps):
        half = size // 2
        end = offset_at(cu_seqlens, stride, sequence + half + 1, size > 0, N)
        is_behind = (size > 0) & (end <= index)
        sequence = tl.where(is_behind, sequence + half + 1, sequence)
        size = tl.where(is_behind, size - half - 1, half)
    return sequence


@triton.jit
def _label_and_unmasked(labels, mask, index, N, S):
    """Loads from matrices ``(pointer, row stride, column stride)``; log-probs have no labels."""
    labels, label_row, label_column = labels
    mask, mask_row, mask_column = mask
    inside = index < N
    row, column = index // S, index % S
    label, unmasked = index, inside
    if not labels.dtype.element_ty.is_floating():
        label = tl.load(labels + row * label_row + column * label_column, inside, other=0)
        label = label.to(tl.int64)
        unmasked = unmasked & (label != _IGNORE_INDEX)
    if mask is not None:
        given = tl.load(mask + row * mask_row + column * mask_column, inside, other=0)
        if given.dtype == tl.bfloat16:
            given = given.to(tl.float32)  # the interpreter of Triton 3.9 compares bits, so not -0.0
        unmasked = unmasked & (given != 0)
    return label, unmasked


@triton.jit
def _count(unmasked, index, first, begin, end, sequence, K, N, counts, SEQUENCES: tl.constexpr):
    """Adds unmasked tokens to counts[1]; or with SEQUENCES adds those of each sequence to its entry
    of counts[2:], and to counts[1] the sequences that had none before.
    """
    if SEQUENCES:
        # Each sequence takes one atomic: the running count at its last token here, less that before
        # its first. Offsets that fall make the loss NaN, so that only the addresses matter.
        TOKENS: tl.constexpr = index.shape[0]
        running = tl.cumsum(unmasked.to(tl.int32), 0)
        start = tl.minimum(tl.maximum(begin - first, 0), TOKENS - 1).to(tl.int32)
        before = tl.gather(running - unmasked.to(tl.int32), start, 0)
        tokens = (running - before).to(tl.int64)
        is_last = (index + 1 == end) | (index + 1 == first + TOKENS) | (index + 1 == N)
        adds = is_last & (index < N) & (sequence < K) & (tokens > 0)
        others = tl.atomic_add(counts + 2 + sequence, tokens, adds, sem="relaxed")
        found = tl.sum((adds & (others == 0)).to(tl.int64), 0)
    else:
        found = tl.sum(unmasked.to(tl.int64), 0)
    if found > 0:
        tl.atomic_add(counts + 1, found, sem="relaxed")


@triton.jit
def _count_broken(cu_seqlens, stride, index, K, N, counts):
    """Adds to counts[0] the steps of the offsets that do not rise from 0 to at most N."""
    at = tl.load(cu_seqlens + index * stride, index <= K, other=0).to(tl.int64)
    then = tl.load(cu_seqlens + (index + 1) * stride, index < K, other=0).to(tl.int64)
    is_broken = (index <= K) & (tl.where(index < K, then, N) < at)
    broken = tl.sum((is_broken | ((index == 0) & (at != 0))).to(tl.int64), 0)
    if broken > 0:
        tl.atomic_add(counts, broken, sem="relaxed")


@Kernel
def _prepare_kernel(
    labels_or_log_probs,
    mask,
    advantages,
    old_log_probs,
    rollout_log_probs,
    rollout_is_weights,
    ref_log_probs,
    temperatures,
    lower,
    upper,
    cu_seqlens,
    device_divisor,
    bounds,
    counts,
    unmasked,
    counted,
    labels,
    weights,
    tokens,
    ticket,
    N: tl.int64,
    S: tl.int64,
    K: tl.int64,
    steps: tl.int32,
    count: tl.int32,
    write: tl.int32,
    scale: tl.float64,
    length: tl.float64,
    divisor: tl.float64,
    label_row: tl.int64,  # strides
    label_column: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    advantage_row: tl.int64,
    advantage_column: tl.int64,
    old_row: tl.int64,
    old_column: tl.int64,
    rollout_row: tl.int64,
    rollout_column: tl.int64,
    is_weight_row: tl.int64,
    is_weight_column: tl.int64,
    ref_row: tl.int64,
    ref_column: tl.int64,
    temperature_row: tl.int64,
    temperature_column: tl.int64,
    lower_row: tl.int64,
    lower_column: tl.int64,
    upper_row: tl.int64,
    upper_column: tl.int64,
    offset_stride: tl.int64,
    PER_SEQUENCE: tl.constexpr,  # a bit per field
    LIVE: tl.constexpr,
    MEAN: tl.constexpr,
    DIVISOR: tl.constexpr,
    MEAN_OF_SEQUENCE: tl.constexpr,
    NORM: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Counts, or writes with the counts, or does both in one program.

    All sums are of integers, so that the order of the atomics does not matter.
    """
    first = tl.program_id(0).to(tl.int64) * TOKENS
    stride = tl.num_programs(0).to(tl.int64) * TOKENS
    lane = tl.arange(0, TOKENS)
    label_matrix = labels_or_log_probs, label_row, label_column
    mask_matrix = mask, mask_row, mask_column
    if counts is not None:  # noqa: SIM102 (decided when it is compiled)
        if count:
            if write:
                for begin in range(0, 2 + K if SEQUENCES else 2, TOKENS):
                    tl.store(counts + begin + lane, 0, begin + lane < (2 + K if SEQUENCES else 2))
                tl.debug_barrier()
            if cu_seqlens is not None:
                for begin in range(first, K + 1, stride):
                    _count_broken(cu_seqlens, offset_stride, begin + lane, K, N, counts)
            for begin in range(first, N, stride):
                index = begin + lane
                _, is_unmasked = _label_and_unmasked(label_matrix, mask_matrix, index, N, S)
                if cu_seqlens is not None:
                    sequence = _sequence_of(cu_seqlens, offset_stride, K, steps, index, N)
                    is_unmasked = is_unmasked & (sequence < K)
                    start = offset_at(cu_seqlens, offset_stride, sequence, index < N, N)
                    end = offset_at(cu_seqlens, offset_stride, sequence + 1, sequence < K, N)
                else:
                    sequence = index // S
                    start = sequence * S
                    end = start + S
                _count(is_unmasked, index, begin, start, end, sequence, K, N, counts, SEQUENCES)
            if write:
                tl.debug_barrier()
    if write:
        if ticket is not None:
            tl.store(ticket, 0, tl.program_id(0) == 0)
        fields = (  # in the order of FIELDS
            (advantages, advantage_row, advantage_column),
            (old_log_probs, old_row, old_column),
            (rollout_log_probs, rollout_row, rollout_column),
            (rollout_is_weights, is_weight_row, is_weight_column),
            (ref_log_probs, ref_row, ref_column),
            (temperatures, temperature_row, temperature_column),
            (lower, lower_row, lower_column),
            (upper, upper_row, upper_column),
        )
        for begin in range(first, N, stride):
            index = begin + lane
            inside = index < N
            row, column = index // S, index % S
            sequence, is_broken = row, False
            label, is_unmasked = _label_and_unmasked(label_matrix, mask_matrix, index, N, S)
            if cu_seqlens is not None:
                sequence = _sequence_of(cu_seqlens, offset_stride, K, steps, index, N)
                is_broken = tl.load(counts) > 0
                is_unmasked = is_unmasked & (sequence < tl.where(is_broken, K + 1, K))
            tl.store(unmasked + index, is_unmasked, inside)
            if labels is not None:
                tl.store(labels + index, label, inside)

            is_counted = is_unmasked
            for i in tl.static_range(8):
                field, row_stride, column_stride = fields[i]
                if field is not None:
                    if PER_SEQUENCE >> i & 1:  # tokens after the last sequence take its
                        place = tl.minimum(sequence, K - 1) * column_stride
                    else:
                        place = row * row_stride + column * column_stride
                    value = tl.load(field + place, inside, other=0).to(tl.float32)
                    if i == ADVANTAGES:
                        if cu_seqlens is not None:
                            value = tl.where(is_broken, float("nan"), value)
                        if LIVE:
                            is_counted = is_counted & (value != 0.0)
                    tl.store(tokens + i * N + index, value, inside)
                    if i == LOWER:
                        lower_bound = value
                    if i == UPPER:
                        upper_bound = value
            if counted is not None:
                tl.store(counted + index, is_counted, inside)

            if weights is not None:
                weight = tl.zeros((TOKENS,), tl.float64) + scale
                if MEAN:
                    if device_divisor is not None:
                        by = tl.load(device_divisor).to(tl.float64)
                        is_count = (by > 0.0) & (by < float("inf"))
                        weight = weight / tl.where(is_count, by, float("nan"))
                    elif DIVISOR:
                        weight = weight / divisor
                    else:
                        weight = weight / tl.maximum(tl.load(counts + 1), 1).to(tl.float64)
                if MEAN_OF_SEQUENCE:
                    tokens_there = tl.load(counts + 2 + sequence, inside & (sequence < K), other=1)
                    weight = weight / tl.maximum(tokens_there, 1).to(tl.float64)
                if NORM:
                    weight = weight / length
                if bounds is not None:
                    weight = _where_valid(tl.load(bounds), tl.load(bounds + 1), weight)
                if lower is not None:
                    weight = _where_valid(lower_bound, upper_bound, weight)
                if cu_seqlens is not None:
                    weight = tl.where(is_broken, float("nan"), weight)
                tl.store(weights + index, tl.where(is_unmasked, weight, 0.0), inside)


@triton.jit
def _where_valid(lower, upper, weight):
    """The weight; NaN where bounds of the ratio are negative, in the wrong order, or NaN."""
    return tl.where((lower >= 0.0) & (lower <= upper), weight, float("nan"))


def prepare(
    labels_or_log_probs: Tensor,
    response_mask: Tensor | None,
    fields: list[Tensor | None],
    cu_seqlens: Tensor | None,
    scale: float,
    divisor: float | None,
    device_divisor: Tensor | None,
    bounds: Tensor | None,
    live: bool,
    options: Sequence[float],
    unmasked: Tensor,
    counted: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    tokens: Tensor | None,
    ticket: Tensor | None,
) -> None:
    R, S = labels_or_log_probs.shape
    N, K, offset_stride = R * S, R, 0
    if cu_seqlens is not None:
        K, offset_stride = cu_seqlens.numel() - 1, cu_seqlens.stride(0)
    places = N if cu_seqlens is None else max(N, K + 1)
    mode, scale_factor = options[_MODE], options[_SCALE_FACTOR]
    given = divisor is not None or device_divisor is not None
    counts_tokens = weights is not None and mode == _TOKEN_MEAN and not given
    counts_sequences = weights is not None and (
        mode == _SEQ_MEAN_TOKEN_MEAN or (mode > _TOKEN_SUM and not given)
    )

    counts, phases = None, [_WRITE]
    if counts_tokens or counts_sequences or cu_seqlens is not None:
        is_alone = places <= ALONE
        phases = [_COUNT_AND_WRITE] if is_alone else [_COUNT, _WRITE]
        new = torch.empty if is_alone else torch.zeros
        size = 2 + K if counts_sequences else 2
        counts = new(size, dtype=torch.int64, device=unmasked.device)
    inputs = labels_or_log_probs, response_mask, *fields, cu_seqlens, device_divisor, bounds
    outputs = counts, unmasked, counted, labels, weights, tokens, ticket
    numbers = (
        scale,
        scale_factor or float(S),
        math.nan if divisor is None else divisor,
        *labels_or_log_probs.stride(),
        *[stride for each in (response_mask, *fields) for stride in _strides(each)],
        offset_stride,
    )
    vectors = [i for i, field in enumerate(fields) if field is not None and field.ndim == 1]
    per_sequence = sum(1 << i for i in vectors)
    modes = mode == _SEQ_MEAN_TOKEN_MEAN, mode == _SEQ_MEAN_TOKEN_SUM_NORM
    flags = per_sequence, live, mode != _TOKEN_SUM, divisor is not None, *modes, counts_sequences
    for phase in phases:
        programs = 1 if phase == _COUNT_AND_WRITE else max(1, ceil_div(places, TOKENS))
        _prepare_kernel[(programs,)](
            *(*inputs, *outputs, N, S, K, K.bit_length(), *phase, *numbers, *flags, TOKENS),
            **limits(16, registers=128),
        )


def _strides(matrix: Tensor | None) -> tuple[int, ...]:
    if matrix is None:
        return 0, 0
    return matrix.stride() if matrix.ndim == 2 else (0, *matrix.stride())
