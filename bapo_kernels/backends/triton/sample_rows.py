"""The samples of rows that stand for their gradients, by the rules of ``csrc/sample.h``.

May import ``row_math``, ``tokens``, ``kernel`` and ``launch``. The tests compare sets with those of
the reference's hash, and ``row_gradient`` compares 2^t with the threshold again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import row_math
from .kernel import Kernel
from .launch import limits, resident_programs, row_shape, row_sizes, transform
from .tokens import TEMPERATURES, bits

# Below, 1 - p of the labels is mostly rounding, and the mass beside them is summed.
LEAST_DIFFERENCE = tl.constexpr(2.0**-10)
# Below, borders would be denormals: nothing beside the labels is kept.
LEAST_THRESHOLD = tl.constexpr(2.0**-100)
NO_LABEL = tl.constexpr(2**62)  # beyond all columns


@triton.jit
def _hash(id, seed):
    """24 bits of uint32 ids and the seed of their row."""
    x = id * 0x9E3779B9 + seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)) >> 8


@triton.jit
def _load(row, column, begin, V, W: tl.constexpr):
    """W logits; -inf beyond the row."""
    if begin + W <= V:
        z = tl.load(row + column)
    else:
        z = tl.load(row + column, column < V, other=-row_math.INF)
    return z


@triton.jit
def _marks(column, end, labels, next, K):
    """Marks the ascending labels from ``next`` on that are below ``end``; and the next one."""
    is_label = column < 0
    label = tl.load(labels + next, next < K, other=NO_LABEL)
    while label < end:
        is_label |= column == tl.maximum(label, -1).to(tl.int32)
        next += 1
        label = tl.load(labels + next, next < K, other=NO_LABEL)
    return is_label, next


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _lanes_sum(lanes):
    """The float64 sum of at most 8,192 lanes as integers, whose order does not matter."""
    exponent = (tl.max(tl.abs(lanes)).to(tl.int32, bitcast=True) >> 23) - 126
    fixed = (lanes.to(tl.float64) * _power_of_two(49 - exponent)).to(tl.int64)
    return tl.sum(fixed).to(tl.float64) * _power_of_two(exponent - 49)


@triton.jit
def _mass_beside_labels(row, V, labels, K, of_exp, SOFTCAP: tl.constexpr, W: tl.constexpr):
    mass, next = tl.zeros((W,), tl.float32), 0
    for begin in range(0, V, W):
        column = begin + tl.arange(0, W)
        is_label, next = _marks(column, begin + W, labels, next, K)
        _, _, e = row_math.exp_of(_load(row, column, begin, V, W), *of_exp, SOFTCAP)
        mass += tl.where(is_label, 0.0, e)
    return _lanes_sum(mass)


@Kernel
def _sample_rows_kernel(
    logits,
    labels,
    stats,
    besides,
    seeds,
    shard,
    tokens,
    counts,
    ids,
    values,
    drawn,
    K: tl.int32,
    samples: tl.int32,
    places: tl.int32,
    rows: tl.int64,
    rows_per_batch: tl.int64,
    V: tl.int32,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    inner: tl.float64,
    scale2: tl.float32,
    scale: tl.float64,
    slope: tl.float64,
    SOFTCAP: tl.constexpr,
    PRESENT: tl.constexpr,
    W: tl.constexpr,
):
    """A thread takes elements apart, as its stores are: wide loads would be exchanged for them."""
    first = 0
    if shard is not None:
        first = tl.load(shard).to(tl.int32)
    programs = tl.num_programs(0).to(tl.int64)
    for index in range(tl.program_id(0).to(tl.int64), rows, programs):
        row = row_math.row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, 1)
        of_row = labels + index * K
        transform = inner, scale2, scale, slope
        token = tokens, rows, index, True
        transform = row_math.transform_of(token, transform, SOFTCAP, PRESENT)
        of_exp = tl.load(stats + 2 * index).to(tl.float32), inner, transform[1]
        sum_2t, beside = tl.load(stats + 2 * index + 1), tl.load(besides + index)
        rest = beside * sum_2t
        if beside < LEAST_DIFFERENCE:
            here = _mass_beside_labels(row, V, of_row, K, of_exp, SOFTCAP, W)
            if shard is not None:  # a part, and both may round to less
                here = tl.maximum(here, rest)
            rest = here
        threshold = (rest / samples).to(tl.float32)
        is_sampled = (threshold >= LEAST_THRESHOLD) & (sum_2t < row_math.INF)
        threshold = tl.where(is_sampled, threshold, 0.0)
        # An id with hash h is kept if its 2^t is at least (h + 0.5)/2^24 of the threshold; none is
        # at least NaN.
        step, half = threshold * 2.0**-24, tl.where(is_sampled, threshold * 2.0**-25, float("nan"))
        seed = tl.load(seeds + index).to(tl.uint32, bitcast=True)
        at = index * places
        mass = tl.zeros((W,), tl.float32)
        weighted_mass, sum_t = tl.zeros_like(mass), tl.zeros_like(mass)
        next, count, count_small = 0, 0, 0
        for begin in range(0, V, W):
            column = begin + tl.arange(0, W)
            is_label, next = _marks(column, begin + W, of_row, next, K)
            z = _load(row, column, begin, V, W)
            _, t, e = row_math.exp_of(z, *of_exp, SOFTCAP)
            border = _hash((first + column).to(tl.uint32), seed).to(tl.float32) * step + half
            is_drawn = (e >= border) & ~is_label
            is_small = (e < threshold) & ~is_label
            small = tl.where(is_small, e, 0.0)
            mass += small
            weighted_mass += tl.maximum(t, row_math.FLOOR) * small
            is_small &= is_drawn
            sum_t += tl.where(is_small, t, 0.0)
            is_kept = (is_drawn | is_label) & (column < V)
            place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            has_place = is_kept & (place < places)
            tl.store(ids + at + place, first + column, has_place)
            tl.store(values + at + place, row_math.widened(z), has_place)
            both = tl.sum(is_kept.to(tl.int32) + (is_small.to(tl.int32) << 16))
            count += both & 0xFFFF
            count_small += both >> 16
        if count > places:  # improbable beyond all measure: the row becomes NaN
            tl.debug_barrier()  # after the thread that wrote its first value
            tl.store(values + at, float("nan"))
        tl.store(counts + index, tl.minimum(count, places))
        total, weighted = _lanes_sum(mass), _lanes_sum(weighted_mass)
        share = tl.where(count_small > 0, 1.0 / tl.maximum(count_small, 1).to(tl.float64), 0.0)
        part = total * share
        shift = (weighted - part * _lanes_sum(sum_t)) * share
        tl.store(drawn + 4 * index, threshold.to(tl.float64))
        tl.store(drawn + 4 * index + 1, part)
        tl.store(drawn + 4 * index + 2, shift)
        tl.store(drawn + 4 * index + 3, total)


def sample_rows(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    beside: Tensor,
    seeds: Tensor,
    shard: Tensor | None,
    gradient_samples: int,
    tokens: Tensor | None,
    present: int,
    options: list[float],
    counts: Tensor,
    ids: Tensor,
    values: Tensor,
    drawn: Tensor,
) -> None:
    present &= bits(TEMPERATURES)
    softcapped, numbers = transform(options, bool(present))
    shape = row_shape(logits, softcapped, 256)
    W = shape.W * logits.element_size() // 4  # with more than four per thread ptxas spills
    (_, *sizes), _ = row_sizes(logits, None, None)
    N, places = ids.shape
    K, fields = labels.numel() // max(1, N), tokens if present else None
    _sample_rows_kernel[(resident_programs(N, shape.num_warps),)](
        *(logits, labels, stats, beside, seeds, shard, fields, counts, ids, values, drawn),
        *(K, gradient_samples, places, N, *sizes[:4], *numbers),
        *(softcapped, present, W),
        **limits(shape.num_warps, registers=96),
    )
