"""Means over the counted tokens of each sequence, with one program per sequence.

May import ``policy_math``, ``tokens``, ``kernel``, ``launch`` and ``prepare``. The bits of a mean
must depend on its sequence alone, not on what it is packed with.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import policy_math
from .kernel import Kernel
from .launch import limits
from .prepare import offset_at
from .tokens import OLD_LOG_PROBS, bits

TOKENS = 2_048  # per step, so that a single long sequence takes few steps


@triton.jit
def _is_counted(counted, index, end):
    inside = index < end
    return inside & (tl.load(counted + index, inside, other=0) != 0)


@Kernel
def _sequence_mean_kernel(
    values,
    counted,
    tokens,
    cu_seqlens,
    out,
    N: tl.int64,
    length: tl.int64,
    K: tl.int64,
    offset_stride: tl.int64,
    LOG_RATIOS: tl.constexpr,
    PRESENT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes the means of log-ratios, or adds means of gradients.

    Lane ``j % TOKENS`` adds the ``j``-th token of the sequence, then the lanes are added.
    """
    program = tl.program_id(0).to(tl.int64)
    if cu_seqlens is None:
        begin, end = program * length, (program + 1) * length
        last = end
    else:
        # The first program has the tokens before all sequences, the last one those after them.
        begin = offset_at(cu_seqlens, offset_stride, program - 1, program > 0, N)
        end = offset_at(cu_seqlens, offset_stride, program, program <= K, N)
        end = tl.where(program <= K, end, N)
        last = tl.where((program > 0) & (program <= K), end, begin)  # none is counted elsewhere
    sums = tl.zeros((TOKENS,), tl.float64)
    counts = tl.zeros((TOKENS,), tl.int32)
    for first in range(begin, end, TOKENS):
        index = first + tl.arange(0, TOKENS)
        mask = _is_counted(counted, index, last)
        value = tl.load(values + index, mask, other=0.0)
        if LOG_RATIOS:
            old = policy_math.old_log_prob((tokens, N, index, mask), value, PRESENT)
            value = tl.where(old - old == 0.0, value - old, float("nan"))
        sums += tl.where(mask, value, 0.0)
        counts += mask.to(tl.int32)
    mean = tl.sum(sums, 0) / tl.maximum(tl.sum(counts, 0), 1).to(tl.float64)
    for first in range(begin, end, TOKENS):
        index = first + tl.arange(0, TOKENS)
        mask = _is_counted(counted, index, last)
        if LOG_RATIOS:
            tl.store(out + index, tl.where(mask, mean, 0.0), index < end)
        else:
            tl.store(out + index, tl.load(out + index, mask, other=0.0) + mean, mask)


def sequence_log_ratios(
    log_probs: Tensor, counted: Tensor, tokens: Tensor, present: int, *sequences: Any
) -> None:
    flags = True, present & bits(OLD_LOG_PROBS)
    _launch(log_probs, counted, tokens, flags, *sequences)


def add_sequence_means_(dlog_ratios: Tensor, counted: Tensor, *sequences: Any) -> None:
    _launch(dlog_ratios, counted, None, (False, 0), *sequences)


def _launch(
    values: Tensor,
    counted: Tensor,
    tokens: Tensor | None,
    flags: tuple[bool, int],
    length: int,
    cu_seqlens: Tensor | None,
    out: Tensor,
) -> None:
    N = values.numel()
    if cu_seqlens is None:
        K, stride = N // max(1, length), 0
        programs = K
    else:
        K, stride = cu_seqlens.numel() - 1, cu_seqlens.stride(0)
        programs = K + 2
    _sequence_mean_kernel[(programs,)](
        *(values, counted, tokens, cu_seqlens, out, N, length, K, stride, *flags, TOKENS),
        **limits(8, registers=128),
    )
