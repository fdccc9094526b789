"""Products of the sets' rows of the head: with hidden states, and with the gradients of values.

May import what ``sampling_sets`` may, ``row_pass`` and ``row_gradient``. Another order of terms
changes bits that must not depend on what else is in a call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import row_math, sampling_set_math
from .kernel import Kernel
from .launch import ceil_div, limits, resident_programs
from .row_gradient import FLAGS, any_wanted
from .row_pass import row_pass_

# Sums are of float32 products: few terms in every place of a block, then over the block, and in
# float64 from block to block; those of pieces are rounded to float32. Rows of the head that belong
# to broken ids or are multiplied by zero are not read.
#
# Rows and columns of a block, which is in registers, and steps until it is summed. Few rows,
# because sets are often short and most columns are in few sets.
TERMS, WIDTH, STEPS = 8, 512, 8
WARPS = 4
PARTS = 4  # programs that share the products of a row
# Sets and columns of at least twice as many terms are cut into pieces of PIECE terms, each with a
# program of its own; the last piece has the rest, too.
PIECE = 256


@partial(Kernel, specialised=("weight", "H", "weight_stride"))
def _multiply_sets_kernel(
    weight,
    hidden,
    bias,
    counted,
    token_ids,
    offsets,
    shard,
    values,
    K: tl.int64,
    V: tl.int64,
    H: tl.int32,
    weight_stride: tl.int64,
    hidden_stride: tl.int64,
    TERMS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if tl.load(counted + index) != 0:
        begin, size, _ = sampling_set_math.set_of(offsets, index, True, tl.num_programs(0), K)
        row = hidden + index * hidden_stride
        for first in range(tl.program_id(1) * TERMS, size, tl.num_programs(1) * TERMS):
            at = first + tl.arange(0, TERMS)
            column = sampling_set_math.columns_of(token_ids, begin, size, at, shard, V)
            products = tl.zeros((TERMS, WIDTH), tl.float32)
            for left in range(0, H, UNROLL * WIDTH):
                for u in tl.static_range(UNROLL):  # 8 loads of a thread in flight
                    h = left + u * WIDTH + tl.arange(0, WIDTH)
                    x = row_math.widened(tl.load(row + h, h < H, other=0.0))
                    products += _rows(weight, weight_stride, column, h, H) * x[None, :]
            z = tl.sum(products, 1)
            if bias is not None:
                z += tl.load(bias + column, column >= 0, other=0.0)
            z = tl.where(column >= 0, z, sampling_set_math.value_without_column(column))
            tl.store(values + begin + at, z, at < size)


@triton.jit
def _rows(matrix, stride, row, h, H):
    """Columns ``h`` of these rows, as float32; zeros for negative rows."""
    mask = (row >= 0)[:, None] & (h < H)[None, :]
    return row_math.widened(tl.load(matrix + (row * stride)[:, None] + h[None, :], mask, other=0.0))


@triton.jit
def _scaled_rows(matrix, stride, row, factor, h, H):
    """``_rows`` times their factors; a row with the factor 0 is not read."""
    return _rows(matrix, stride, tl.where(factor == 0.0, -1, row), h, H) * factor[:, None]


@triton.jit
def _last_up_to(most, offsets, count):
    """The place of the last of ascending offsets that is at most ``most``; reads 32 per step."""
    found, step = most * 0, most * 0 + 1
    while step * 32 < count:
        step *= 32
    while step > 0:
        at = found + tl.arange(0, 32) * step
        up_to = (at < count) & (tl.load(offsets + at, at < count, other=0) <= most)
        found += tl.maximum(tl.sum(up_to.to(tl.int32), 0) - 1, 0) * step
        step //= 32
    return found


@triton.jit
def _pieces_of(size, PIECE: tl.constexpr):
    return tl.where(size < 2 * PIECE, 0, size // PIECE)


@triton.jit
def _piece_with(last, begin, end, PIECE: tl.constexpr):
    """Begin and end of the piece that has term ``last`` of a segment, and whether there is one.

    A window is PIECE consecutive terms of all segments, and ``last`` its last one: that is in the
    piece that begins in the window, if one does.
    """
    pieces = _pieces_of(end - begin, PIECE)
    piece = tl.minimum((last - begin) // PIECE, pieces - 1)
    first = begin + piece * PIECE
    stop = tl.where(piece < pieces - 1, first + PIECE, end)
    return first, stop, (pieces > 0) & (last >= begin) & (last < first + PIECE)


@partial(Kernel, specialised=("weight", "dhidden", "H", "weight_stride", "dhidden_stride"))
def _sets_dhidden_kernel(
    weight,
    dvalues,
    token_ids,
    offsets,
    shard,
    flags,
    dhidden,
    partials,
    rows: tl.int64,
    K: tl.int64,
    V: tl.int64,
    H: tl.int32,
    weight_stride: tl.int64,
    dhidden_stride: tl.int64,
    WANTED: tl.constexpr,
    PARTIAL: tl.constexpr,
    TERMS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    PIECE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Sums over the sets of rows; or with PARTIAL over the pieces of long sets."""
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    window, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head, sets = (weight, weight_stride, V, H), (dvalues, token_ids, shard)
    if PARTIAL:
        last = (window + 1) * PIECE - 1
        index = _last_up_to(last, offsets, rows)
        begin, size, _ = sampling_set_math.set_of(offsets, index, True, rows, K)
        first, stop, is_piece = _piece_with(last, begin, begin + size, PIECE)
        if is_piece & row_math.is_wanted(flags, index, WANTED):
            places = first - begin, stop - begin
            total = _sum_over_set(head, sets, begin, places, h, TERMS, WIDTH, STEPS)
            tl.store(partials + window * H + h, total.to(tl.float32), h < H)
    else:
        for start in range(window, rows, FLAGS * programs):
            end = tl.minimum(rows, start + FLAGS * programs)
            if any_wanted(flags, start, end, programs, FLAGS, WANTED):
                for index in range(start, end, programs):
                    begin, size, _ = sampling_set_math.set_of(offsets, index, True, rows, K)
                    if row_math.is_wanted(flags, index, WANTED) & (size > 0):
                        pieces = _pieces_of(size, PIECE)
                        places = 0, tl.where(pieces > 0, 0, size)
                        total = _sum_over_set(head, sets, begin, places, h, TERMS, WIDTH, STEPS)
                        for piece in range(begin // PIECE, begin // PIECE + pieces):
                            total += tl.load(partials + piece * H + h, h < H, other=0.0)
                        dh = row_math.rounded(total.to(tl.float32), dhidden.dtype.element_ty)
                        tl.store(dhidden + index * dhidden_stride + h, dh, h < H)


@triton.jit
def _sum_over_set(
    head, sets, begin, places, h, TERMS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr
):
    """The sum, over places of a set, of rows of the head times the gradients of the values."""
    weight, weight_stride, V, H = head
    dvalues, token_ids, shard = sets
    first, stop = places
    total = tl.zeros((WIDTH,), tl.float64)
    for group in range(first, stop, STEPS * TERMS):
        block = tl.zeros((TERMS, WIDTH), tl.float32)
        for place in range(group, tl.minimum(stop, group + STEPS * TERMS), TERMS):
            at = place + tl.arange(0, TERMS)
            column = sampling_set_math.columns_of(token_ids, begin, stop, at, shard, V)
            dz = tl.load(dvalues + begin + at, at < stop, other=0.0)
            block += _scaled_rows(weight, weight_stride, column, dz, h, H)
        total += tl.sum(block, 0)
    return total


@partial(Kernel, specialised=("hidden", "dweight", "H", "hidden_stride", "dweight_stride"))
def _sets_dweight_kernel(
    hidden,
    dvalues,
    order,
    rows,
    segments,
    dweight,
    dbias,
    partials,
    N: tl.int64,
    K: tl.int64,
    V: tl.int64,
    H: tl.int32,
    hidden_stride: tl.int64,
    dweight_stride: tl.int64,
    ADD: tl.constexpr,
    PARTIAL: tl.constexpr,
    TERMS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Sums over the terms of columns; or with PARTIAL over the pieces of long ones."""
    index = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    last = (index + 1) * PIECE - 1
    column = _last_up_to(last, segments, V) if PARTIAL else index
    begin = tl.maximum(tl.load(segments + column), 0)
    end = tl.minimum(tl.load(segments + column + 1), K)
    pieces = _pieces_of(end - begin, PIECE)
    if PARTIAL:
        first, stop, has_sum = _piece_with(last, begin, end, PIECE)
    else:
        first, stop, has_sum = begin, tl.where(pieces > 0, begin, end), (not ADD) | (begin < end)
    if has_sum:
        total = tl.zeros((WIDTH,), tl.float64)
        total_bias = tl.zeros((TERMS,), tl.float64)
        for group in range(first, stop, STEPS * TERMS):
            block = tl.zeros((TERMS, WIDTH), tl.float32)
            for at in range(group, tl.minimum(stop, group + STEPS * TERMS), TERMS):
                i = at + tl.arange(0, TERMS)
                k = tl.load(order + i, i < stop, other=-1)
                dz = tl.load(dvalues + k, (k >= 0) & (k < K), other=0.0)
                row = tl.load(rows + i, i < stop, other=-1).to(tl.int64)
                row = tl.where(row < N, row, -1)
                block += _scaled_rows(hidden, hidden_stride, row, dz, h, H)
                total_bias += dz
            total += tl.sum(block, 0)
        sum_bias = tl.sum(total_bias, 0)
        if PARTIAL:
            to = partials + index * (H + 1)
            tl.store(to + h, total.to(tl.float32), h < H)
            if tl.program_id(1) == 0:
                tl.store(to + H, sum_bias.to(tl.float32))
        else:
            for piece in range(begin // PIECE, begin // PIECE + pieces):
                total += tl.load(partials + piece * (H + 1) + h, h < H, other=0.0)
                sum_bias += tl.load(partials + piece * (H + 1) + H)
            to = dweight + column * dweight_stride + h
            if ADD:
                total += tl.load(to, h < H, other=0.0).to(tl.float32)
            dw = row_math.rounded(total.to(tl.float32), dweight.dtype.element_ty)
            tl.store(to, dw, h < H)
            if dbias is not None:  # noqa: SIM102 (decided when it is compiled)
                if tl.program_id(1) == 0:
                    db = tl.load(dbias + column) + sum_bias
                    tl.debug_barrier()  # every warp loads, and one stores
                    tl.store(dbias + column, db.to(tl.float32))


def multiply_sets(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, counted: Tensor, *sets: Any
) -> None:
    """Takes ``sets``: token_ids, offsets, shard and values."""
    sizes = sets[-1].numel(), *weight.shape, weight.stride(0), hidden.stride(0)
    blocks = TERMS, WIDTH, 4 // weight.element_size()
    _multiply_sets_kernel[(counted.numel(), PARTS)](
        *(weight, hidden, bias, counted, *sets, *sizes, *blocks), **limits(WARPS, registers=128)
    )


def head_sets_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    offsets: Tensor,
    labels: Tensor,
    counted: Tensor,
    *arguments: Any,
) -> None:
    """Runs three operators in turn: rows in flight use more of the head than the cache holds."""
    *inputs, undecided, values, dhidden = arguments
    multiply_sets(hidden, weight, bias, counted, token_ids, offsets, None, values)
    row_pass_(values, offsets, labels, counted, *inputs, undecided)
    sets_dhidden(values, weight, token_ids, offsets, None, undecided, dhidden, wanted=False)


def sets_dhidden(
    dvalues: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    offsets: Tensor,
    shard: Tensor | None,
    flags: Tensor | None,
    dhidden: Tensor,
    wanted: bool = True,
) -> None:
    """Writes rows whose flag is ``wanted``; each slice of H has programs that stride over rows."""
    rows, H = dhidden.shape
    K, slices = dvalues.numel(), ceil_div(H, WIDTH)
    resident = ceil_div(resident_programs(rows * slices, WARPS), slices)
    pieces = K // PIECE if rows and K >= 2 * PIECE else 0
    partials = dvalues.new_empty(pieces * H)
    tensors = weight, dvalues, token_ids, offsets, shard, flags, dhidden, partials
    sizes = rows, K, *weight.shape, weight.stride(0), dhidden.stride(0)
    for programs, partial_sums in ((pieces, True), (resident, False)):
        if programs > 0:
            _sets_dhidden_kernel[(programs, slices)](
                *(*tensors, *sizes, wanted, partial_sums, TERMS, WIDTH, STEPS, PIECE, FLAGS),
                **limits(WARPS, registers=128),
            )


def sets_dweight(
    dvalues: Tensor,
    hidden: Tensor,
    order: Tensor,
    rows: Tensor,
    segments: Tensor,
    add: bool,
    dweight: Tensor,
    dbias: Tensor | None,
) -> None:
    V, H = dweight.shape  # H = 0 if the bias alone has a gradient
    K = dvalues.numel()
    pieces = K // PIECE if V and K >= 2 * PIECE else 0
    partials = dvalues.new_empty(pieces * (H + 1))
    tensors = hidden, dvalues, order, rows, segments, dweight, dbias, partials
    sizes = hidden.shape[0], K, V, H, hidden.stride(0), dweight.stride(0)
    for programs, partial_sums in ((pieces, True), (V, False)):
        if programs > 0:
            _sets_dweight_kernel[(programs, max(1, ceil_div(H, WIDTH)))](
                *(*tensors, *sizes, add, partial_sums, TERMS, WIDTH, STEPS, PIECE),
                **limits(WARPS, registers=128),
            )
