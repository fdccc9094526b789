"""The contributions of tokens to the search for the clip bounds, and the search.

May import ``config``, ``policy_math``, ``tokens``, ``kernel`` and ``launch``. The points must be
those of ``config.bound_grid`` to the bit, as every rank and backend has them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...config import Options
from . import policy_math
from .kernel import Kernel
from .launch import ceil_div, grid_sizes, limits, per_options, token_programs
from .tokens import ADVANTAGES, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, bits, load_field

TOKENS, POINTS = 128, 64  # per program and step, with their products in registers


@triton.jit
def _grid_points(place, lower_count, upper_count, grids):
    """The points at these places of a table, by repeated addition as in Algorithm 1."""
    lower_start, lower_max, lower_step, upper_start, upper_max, upper_step = grids
    is_upper = place >= lower_count
    index = tl.where(is_upper, place - lower_count, place)
    zeros = tl.zeros_like(place).to(tl.float64)
    points = tl.where(is_upper, zeros + upper_start, zeros + lower_start)
    step = tl.where(is_upper, zeros + upper_step, zeros + lower_step)
    for k in range(1, tl.maximum(lower_count, upper_count)):
        points = tl.where(k <= index, points + step, points)
    maximum = tl.where(is_upper, zeros + upper_max, zeros + lower_max)
    return tl.where((index == 0) | (points < maximum), points, maximum)


@Kernel
def _contributions_kernel(
    log_probs,
    counted,
    log_ratios,
    tokens,
    table,
    N: tl.int64,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    UNIFORM_WEIGHT: tl.constexpr,
    UNCLIPPED_ONLY: tl.constexpr,
    PRESENT: tl.constexpr,
    TOKENS: tl.constexpr,
    POINTS: tl.constexpr,
):
    """Every program sums its share of the tokens into a row of a table.

    The rows are then added in order, so that every run has the same bits.
    """
    place = tl.program_id(1) * POINTS + tl.arange(0, POINTS)
    is_upper = place >= lower_count
    grids = lower_start, lower_max, lower_step, upper_start, upper_max, upper_step
    points = _grid_points(place, lower_count, upper_count, grids)
    sums = tl.zeros((POINTS,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for begin in range(first, N, tl.num_programs(0) * TOKENS):
        index = begin + tl.arange(0, TOKENS)
        inside = index < N
        inside = inside & (tl.load(counted + index, inside, other=0) != 0)
        A = load_field((tokens, N, index, inside), ADVANTAGES)
        inside = inside & ((A > 0.0) | (A < 0.0))
        token = tokens, N, index, inside
        logp = tl.load(log_probs + index, inside, other=0.0)
        old = policy_math.old_log_prob(token, logp, PRESENT)
        r, _, _ = policy_math.ratio_at(log_ratios, index, inside, logp, old)
        w = policy_math.search_weight(token, old, UNIFORM_WEIGHT, PRESENT)
        A = tl.where(inside, A, 0.0)
        adds = policy_math.contributions_at(r, A, w, points, is_upper, UNCLIPPED_ONLY)
        sums += tl.sum(adds, 0)
    count = lower_count + upper_count
    tl.store(table + tl.program_id(0) * count + place, sums, place < count)


@triton.jit
def _sum_of_rows(table, rows, place, inside, ROWS: tl.constexpr):
    """Adds the rows of a table in order, ``ROWS`` at a time."""
    sums = tl.zeros_like(place).to(tl.float64)
    points = tl.sum(inside.to(tl.int32), 0)
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside[None, :]
        sums += tl.sum(tl.load(table + row * points + place[None, :], mask, other=0.0), 0)
    return sums


@Kernel
def _table_kernel(
    partials,
    table,
    programs: tl.int32,
    points: tl.int32,
    rank: tl.int32,
    ranks: tl.int32,
    ROWS: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    inside = place < points
    sums = _sum_of_rows(partials, programs, place, inside, ROWS)
    for row in range(ranks):
        tl.store(table + row * points + place, tl.where(row == rank, sums, 0.0), inside)


@Kernel
def _solve_kernel(
    table,
    bounds,
    masses,
    rows: tl.int32,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    target: tl.float64,
    TARGET_IS_RATIO: tl.constexpr,
    UPPER_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    inside = place < lower_count + upper_count
    sums = _sum_of_rows(table, rows, place, inside, ROWS)

    # Algorithm 1 raises one bound up to its maximum, then the other. So each place of the table has
    # the step that raises a bound to it, while the other is at its first or at its last point.
    is_upper = place >= lower_count
    if UPPER_FIRST:
        step = tl.where(is_upper, place - lower_count, place + upper_count - 1)
        lower_meanwhile, upper_meanwhile = 0, lower_count + upper_count - 1
    else:
        step = tl.where(is_upper, place - 1, place)
        lower_meanwhile, upper_meanwhile = lower_count - 1, lower_count
    neg = tl.where(is_upper, _at(sums, place, lower_meanwhile), sums)
    pos = tl.where(is_upper, sums, _at(sums, place, upper_meanwhile))
    goes_on = policy_math.tested_quantity(pos, neg, TARGET_IS_RATIO) < target
    last = lower_count + upper_count - 2
    stop = tl.min(tl.where(goes_on | (not inside), last, step), 0)
    if UPPER_FIRST:
        at_upper = tl.minimum(stop, upper_count - 1)
        at_lower = stop - at_upper
    else:
        at_lower = tl.minimum(stop, lower_count - 1)
        at_upper = stop - at_lower
    at_upper += lower_count

    grids = lower_start, lower_max, lower_step, upper_start, upper_max, upper_step
    points = _grid_points(place, lower_count, upper_count, grids)
    tl.store(bounds, _at(points, place, at_lower).to(tl.float32))
    tl.store(bounds + 1, _at(points, place, at_upper).to(tl.float32))
    tl.store(masses, _at(sums, place, at_upper))
    tl.store(masses + 1, _at(sums, place, at_lower))
    tl.store(masses + 2, _at(sums, place, lower_count))
    tl.store(masses + 3, _at(sums, place, 0))
    tl.store(masses + 4, _at(sums, place, lower_count + upper_count - 1))
    tl.store(masses + 5, _at(sums, place, lower_count - 1))


@triton.jit
def _at(values, place, wanted):
    return tl.sum(tl.where(place == wanted, values, 0.0), 0)


def contributions(*operands: Any) -> None:
    """Takes the operands of ``_partial_table``, rank and table."""
    *searched, rank, table = operands
    partials = _partial_table(*searched)
    programs, points = partials.shape
    rows, padded = _tile(points)
    _table_kernel[(1,)](
        *(partials, table, programs, points, rank, table.shape[0], rows, padded),
        **limits(8, registers=128),
    )


def search(*operands: Any) -> None:
    """Takes the operands of ``_partial_table``, bounds and masses."""
    *searched, bounds, masses = operands
    partials = _partial_table(*searched)
    solve(partials, searched[-1], bounds, masses, rows=_tile(partials.shape[1])[0])


def solve(
    table: Tensor, options: list[float], bounds: Tensor, masses: Tensor, rows: int = 1
) -> None:
    """Adds ``rows`` rows of the table at a time; one at a time gives the sum of the CPU."""
    padded = _tile(table.shape[1])[1]
    _solve_kernel[(1,)](
        *(table, bounds, masses, table.shape[0], *_solve_options(options), rows, padded),
        **limits(8, registers=128),
    )


@per_options
def _contributions_options(
    options: Options, present: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The numbers of the options for the kernel, and its flags, with the fields that it reads."""
    weight_field = [] if options.uniform_weight else [ROLLOUT_LOG_PROBS]
    reads = bits(ADVANTAGES, OLD_LOG_PROBS, *weight_field)
    flags = bool(options.uniform_weight), bool(options.unclipped_only), present & reads
    return (*grid_sizes(options), *options[:6]), flags


def _partial_table(
    log_probs: Tensor,
    counted: Tensor,
    log_ratios: Tensor | None,
    tokens: Tensor,
    present: int,
    options: list[float],
) -> Tensor:
    """A table with a row from each program."""
    numbers, flags = _contributions_options(options, present)
    N, points = log_probs.numel(), numbers[0] + numbers[1]
    programs = token_programs(N, TOKENS)
    partials = log_probs.new_empty((programs, points))
    _contributions_kernel[(programs, ceil_div(points, POINTS))](
        *(log_probs, counted, log_ratios, tokens, partials, N, *numbers, *flags, TOKENS, POINTS),
        **limits(4, registers=255),
    )
    return partials


@lru_cache
def _tile(points: int) -> tuple[int, int]:
    """The rows of a table that are added at a time, and the points of a row with padding."""
    padded = triton.next_power_of_2(points)
    return max(1, 8_192 // padded), padded


@per_options
def _solve_options(options: Options) -> tuple[float, ...]:
    """The numbers and flags of the options for the kernel."""
    flags = bool(options.target_is_ratio), bool(options.upper_first)
    return *grid_sizes(options), *options[:6], options.target, *flags
