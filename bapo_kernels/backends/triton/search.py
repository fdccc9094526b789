"""The contributions of tokens to the search for the clip bounds, and the search.

Sums are of chunks of fixed size, then of the chunks in order: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...config import bound_grid
from . import policy_math
from .launch import CHUNK, PER_TOKEN, limits


@triton.jit
def _grid_points(start, maximum, step, count, first, point):
    """Points of a grid at ``first + k``, by the same repeated addition as in Algorithm 1."""
    values = tl.zeros_like(point) + start
    for k in range(1, count):
        moved = values + step
        moved = tl.where(moved < maximum, moved, maximum)
        values = tl.where(point >= first + k, moved, values)
    return values


@triton.jit(
    do_not_specialize=("count", "lower_count", "upper_count"),
    do_not_specialize_on_alignment=PER_TOKEN,
)
def _contributions_kernel(
    log_probs,
    counted,
    old_log_probs,
    advantages,
    rollout_log_probs,
    partials,
    count: tl.int64,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    UNIFORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    zeros = tl.zeros((POINTS,), tl.float64)
    is_upper = place >= lower_count
    lower = _grid_points(lower_start, lower_max, lower_step, lower_count, 0, place + zeros)
    upper = _grid_points(
        upper_start, upper_max, upper_step, upper_count, lower_count, place + zeros
    )
    sums = zeros
    chunk = tl.program_id(0).to(tl.int64)
    for begin in range(0, CHUNK, TOKENS):
        index = chunk * CHUNK + begin + tl.arange(0, TOKENS)
        inside = index < count
        inside = inside & (tl.load(counted + index, inside, other=0) != 0)
        A = tl.load(advantages + index, inside, other=0.0).to(tl.float64)
        inside = inside & ((A > 0.0) | (A < 0.0))
        logp = tl.load(log_probs + index, inside, other=0.0)
        old = policy_math.old_log_prob(old_log_probs, index, inside, logp)
        r, _, _ = policy_math.policy_ratio(logp, old)
        w = policy_math.search_weight(rollout_log_probs, index, inside, old, UNIFORM)
        mine = inside[:, None] & (is_upper[None, :] == (A > 0.0)[:, None])
        added = w[:, None] * policy_math.contribution(
            r[:, None], A[:, None], lower[None, :], upper[None, :], GRADIENT
        )
        sums += tl.sum(tl.where(mine, added, 0.0), 0)
    tl.store(partials + chunk * POINTS + place, sums)


@triton.jit(do_not_specialize=("chunks", "points"), do_not_specialize_on_alignment=PER_TOKEN)
def _add_partials_kernel(
    partials,
    table,
    chunks: tl.int32,
    points: tl.int32,
    CHUNKS: tl.constexpr,
    POINTS: tl.constexpr,
):
    place = tl.arange(0, POINTS)
    sums = tl.zeros((POINTS,), tl.float64)
    for begin in range(0, chunks, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        offset = chunk[:, None].to(tl.int64) * POINTS + place[None, :]
        sums += tl.sum(tl.load(partials + offset, chunk[:, None] < chunks, other=0.0), 0)
    inside = place < points
    tl.store(table + place, tl.load(table + place, inside) + sums, inside)


@triton.jit(
    do_not_specialize=("lower_count", "upper_count"), do_not_specialize_on_alignment=PER_TOKEN
)
def _solve_kernel(
    table,
    bounds,
    masses,
    lower_count: tl.int32,
    upper_count: tl.int32,
    lower_start: tl.float64,
    lower_max: tl.float64,
    lower_step: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    upper_step: tl.float64,
    target: tl.float64,
    RATIO_TARGET: tl.constexpr,
    UPPER_FIRST: tl.constexpr,
    STEPS: tl.constexpr,
):
    # Algorithm 1 raises one bound up to its maximum, then the other: the points of its k-th step.
    step = tl.arange(0, STEPS)
    steps = lower_count + upper_count - 1
    if UPPER_FIRST:
        j = tl.minimum(step, upper_count - 1)
        i = step - j
    else:
        i = tl.minimum(step, lower_count - 1)
        j = step - i
    inside = step < steps
    neg = tl.load(table + i, inside, other=0.0)
    pos = tl.load(table + lower_count + j, inside, other=0.0)
    goes_on = policy_math.tested_quantity(pos, neg, RATIO_TARGET) < target
    stop = tl.min(tl.where(goes_on, steps - 1, step), 0)
    at = step == stop
    i, j = tl.sum(tl.where(at, i, 0), 0), tl.sum(tl.where(at, j, 0), 0)
    zero = tl.zeros((), tl.float64)
    lower = _grid_points(lower_start, lower_max, lower_step, lower_count, 0, i + zero)
    upper = _grid_points(upper_start, upper_max, upper_step, upper_count, 0, j + zero)
    tl.store(bounds, lower.to(tl.float32))
    tl.store(bounds + 1, upper.to(tl.float32))
    tl.store(masses, tl.load(table + lower_count + j))
    tl.store(masses + 1, tl.load(table + i))
    tl.store(masses + 2, tl.load(table + lower_count))
    tl.store(masses + 3, tl.load(table))


def contributions(
    log_probs: Tensor,
    counted: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    rollout_log_probs: Tensor | None,
    grids: Sequence[float],
    uniform_weight: bool,
    gradient: bool,
    table: Tensor,
) -> None:
    points = table.numel()
    POINTS = triton.next_power_of_2(points)
    chunks = triton.cdiv(log_probs.numel(), CHUNK)
    partials = table.new_empty((chunks, POINTS))
    _contributions_kernel[(chunks,)](
        log_probs,
        counted,
        old_log_probs,
        advantages,
        rollout_log_probs,
        partials,
        log_probs.numel(),
        **_grids(grids),
        UNIFORM=uniform_weight,
        GRADIENT=gradient,
        TOKENS=max(1, min(32, 1024 // POINTS)),
        CHUNK=CHUNK,
        POINTS=POINTS,
        **limits(4, registers=128),
    )
    _add_partials_kernel[(1,)](
        partials,
        table,
        chunks,
        points,
        CHUNKS=max(1, min(32, 4096 // POINTS)),
        POINTS=POINTS,
        **limits(4, registers=128),
    )


def solve(
    table: Tensor,
    grids: Sequence[float],
    target: float,
    ratio_target: bool,
    upper_first: bool,
    bounds: Tensor,
    masses: Tensor,
) -> None:
    _solve_kernel[(1,)](
        table,
        bounds,
        masses,
        **_grids(grids),
        target=target,
        RATIO_TARGET=ratio_target,
        UPPER_FIRST=upper_first,
        STEPS=triton.next_power_of_2(table.numel() - 1),
        **limits(1, registers=128),
    )


def _grids(grids: Sequence[float]) -> dict[str, float]:
    """The numbers of both grids, and how many points each has, as the kernels take them."""
    names = ("start", "max", "step")
    lower, upper = grids[:3], grids[3:]
    return dict(
        lower_count=len(bound_grid(*lower)),
        upper_count=len(bound_grid(*upper)),
        **{f"lower_{name}": number for name, number in zip(names, lower, strict=True)},
        **{f"upper_{name}": number for name, number in zip(names, upper, strict=True)},
    )
