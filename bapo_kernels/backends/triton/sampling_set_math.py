"""The sets of rows, and the columns of their ids, by the rules of ``csrc/sampling_sets.h``.

May import nothing of the package. Finds the values that break a rule: one that passes reads or
writes foreign memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Positions of labels that are not in their set.
OUTSIDE = tl.constexpr(-1)
NO_TOKEN = tl.constexpr(-2)
# Columns of ids that are on another rank, or break their rule.
ELSEWHERE = tl.constexpr(-1)
BROKEN = tl.constexpr(-2)
MAX_SIZE = tl.constexpr(2**30)  # a set's size, as places in it are int32


@triton.jit
def set_of(offsets, index, mask, rows, K):
    """Begin and size of sets, and whether their offsets break the rule: such sets are empty."""
    spans_all = (tl.load(offsets) == 0) & (tl.load(offsets + rows) == K)
    begin = tl.where(spans_all, tl.load(offsets + index, mask, other=0), -1)
    end = tl.load(offsets + index + 1, mask, other=0)
    is_broken = (begin < 0) | (begin > end) | (end > K) | (end - begin > MAX_SIZE)
    begin, size = tl.where(is_broken, 0, begin), tl.where(is_broken, 0, end - begin).to(tl.int32)
    return begin, size, is_broken


@triton.jit
def columns_of(token_ids, begin, size, at, shard, V):
    """The columns on this rank of the ids ``at`` these places of a set."""
    k = begin + at
    inside = at < size
    id = tl.load(token_ids + k, inside, other=0).to(tl.int64)
    before = tl.load(token_ids + k - 1, inside & (at > 0), other=-1).to(tl.int64)
    first, total = 0, V
    if shard is not None:
        first, total = tl.load(shard), tl.load(shard + 1)
    column = id - first
    is_here = inside & (column >= 0) & (column < V)
    is_broken = inside & ((id < 0) | (id >= total) | (before >= id))
    return tl.where(is_broken, BROKEN, tl.where(is_here, column, ELSEWHERE))


@triton.jit
def value_without_column(column):
    """The value in place of the logit of an id that has no column on this rank."""
    return tl.where(column == BROKEN, float("nan"), -float("inf"))
