"""The row pass and, as a part of it, the statistics of rows; one program per row or set.

May import the mathematics, ``tokens``, ``kernel`` and ``launch``. Both launchers share the kernel:
otherwise the statistics of a row could have other bits with its gradient than without.
"""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...config import Options
from . import policy_math, row_math, sampling_set_math
from . import tokens as fields
from .kernel import Kernel
from .launch import limits, per_options, row_shape, row_sizes, set_shape, transform
from .tokens import bits, has, load_field

LABELS = 256  # per step, in a row with several


def _row_pass_kernel(
    logits,
    dlogits,
    offsets,
    labels,
    counted,
    weights,
    tokens,
    bounds,
    log_probs,
    entropies,
    stats,
    undecided,
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
    lower_start: tl.float64,
    lower_max: tl.float64,
    upper_start: tl.float64,
    upper_max: tl.float64,
    clip_ratio_c: tl.float64,
    sapo_tau_pos: tl.float64,
    sapo_tau_neg: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    SOFTCAP: tl.constexpr,
    PRESENT: tl.constexpr,
    SURROGATE: tl.constexpr,
    KL_LOSS_TYPE: tl.constexpr,
    BONUS: tl.constexpr,
    SEVERAL: tl.constexpr,
    LABELS: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Rows with ``offsets`` are the values of sampling sets, and labels are positions in these."""
    index, N = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sizes = K, rows_per_batch, V, batch_stride, row_stride, dbatch_stride, drow_stride
    row, grad, V, exists = row_math.row_of(logits, dlogits, offsets, index, N, sizes, ALIGN)
    if (tl.load(counted + index) == 0) | (not exists):
        if SEVERAL:
            row_math.write_zeros(log_probs + index * count, tl.where(exists, count, 0), LABELS, 1)
        else:
            tl.store(log_probs + index, 0.0, exists)
        tl.store(entropies + index, 0.0, exists)
        tl.store(stats + 2 * index, 0.0, exists)
        tl.store(stats + 2 * index + 1, 1.0, exists)
        if dlogits is not None:
            tl.store(undecided + index, 0)
            row_math.write_zeros(grad, V, W, UNROLL)
    else:
        token = tokens, N, index, True
        A = load_field(token, fields.ADVANTAGES).to(tl.float32) if dlogits is not None else 0.0
        transform = inner, scale2, scale, slope
        transform = row_math.transform_of(token, transform, SOFTCAP, PRESENT)
        again = (A != 0.0) | BONUS | has(fields.REF_LOG_PROBS, PRESENT)  # else the gradient is zero
        scale2 = transform[1]
        lanes = row_math.lane_sums(row, V, inner, scale2, again, SOFTCAP, ALIGN, W, UNROLL)
        if not SEVERAL:
            label = tl.load(labels + index)
            z = row_math.label_logit(row, label, V)
        origin, sum_2t, weighted = row_math.row_sums(*lanes, scale2, V)
        log_sum = tl.log(sum_2t)
        entropy = log_sum - row_math.LN2 * weighted / sum_2t
        statistics = origin, sum_2t, log_sum, entropy
        if SEVERAL:
            row_labels = log_probs + index * count, labels + index * count, count, row, V
            IS_SET: tl.constexpr = offsets is not None
            _write_log_probs(*row_labels, statistics, transform, IS_SET, SOFTCAP, LABELS)
        else:
            logp = row_math.label_log_prob(z, origin, log_sum, transform, SOFTCAP)
            if offsets is not None:
                # NaN where the sum is, so that a broken id always shows.
                logp = tl.where(label == sampling_set_math.OUTSIDE, -sum_2t - row_math.INF, logp)
            tl.store(log_probs + index, logp)
        tl.store(entropies + index, entropy)
        tl.store(stats + 2 * index, origin.to(tl.float64))
        tl.store(stats + 2 * index + 1, sum_2t)
        if dlogits is not None:
            tl.debug_barrier()  # before the row is overwritten: a single warp sums without one
            clip, last_clip = (lower_start, upper_start), (lower_max, upper_max)
            if (bounds is not None) | has(fields.LOWER, PRESENT):
                clip = policy_math.load_bounds(bounds, token, PRESENT)
                last_clip = clip
            old = policy_math.old_log_prob(token, logp, PRESENT)
            r, _, saturated = policy_math.policy_ratio(logp, old)
            A = tl.cast(A, tl.float64)
            options = clip_ratio_c, sapo_tau_pos, sapo_tau_neg
            term = policy_math.policy_term(r, saturated, A, logp, clip, options, SURROGATE)
            last = policy_math.policy_term(r, saturated, A, logp, last_clip, options, SURROGATE)
            g, g_last = term[1], last[1]
            if has(fields.ROLLOUT_IS_WEIGHTS, PRESENT):
                is_weight = load_field(token, fields.ROLLOUT_IS_WEIGHTS)
                g *= is_weight
                g_last *= is_weight
            is_undecided = (g != g_last) & (g == g)
            if has(fields.REF_LOG_PROBS, PRESENT):
                ref = load_field(token, fields.REF_LOG_PROBS)
                g += kl_loss_coef * policy_math.kl_term(logp, ref, KL_LOSS_TYPE)[1]
            weight = tl.load(weights + index)
            g *= weight
            bonus = weight * entropy_coef
            tl.store(undecided + index, is_undecided.to(tl.uint8))
            if (g == 0.0) & (bonus == 0.0) & (not is_undecided):
                row_math.write_zeros(grad, V, W, UNROLL)
            elif not is_undecided:
                at_label, coefficients = (label, z, logp), (g, bonus)
                row_math.write_gradient(
                    *(row, grad, V, at_label, statistics, coefficients, transform),
                    *(SOFTCAP, BONUS, W, UNROLL),
                )


@triton.jit
def _write_log_probs(
    log_probs,
    labels,
    count,
    row,
    V,
    statistics,
    transform,
    IS_SET: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LABELS: tl.constexpr,
):
    """Writes the log-probs of several labels of a row; those of ignored labels are 0."""
    origin, sum_2t, log_sum, _ = statistics
    for first in range(0, count, LABELS):
        k = first + tl.arange(0, LABELS)
        label = tl.load(labels + k, k < count, other=row_math.IGNORED)
        z = row_math.label_logit(row, label, V)
        logp = row_math.label_log_prob(z, origin, log_sum, transform, SOFTCAP)
        if IS_SET:
            logp = tl.where(label == sampling_set_math.OUTSIDE, -sum_2t - row_math.INF, logp)
        tl.store(log_probs + k, tl.where(label == row_math.IGNORED, 0.0, logp), k < count)


_row_kernel = Kernel(_row_pass_kernel, specialised=("logits", "dlogits", "V"))
_set_kernel = Kernel(_row_pass_kernel)  # sets begin anywhere


@per_options
def _from_options(
    options: Options, present: int, gradient: bool
) -> tuple[bool, int, tuple[float, ...], tuple[int, ...]]:
    """Whether there is a soft cap, the fields that are read, and the kernel's numbers and flags."""
    softcapped, transformed = transform(options, bool(present & bits(fields.TEMPERATURES)))
    ends = options.lower_start, options.lower_max, options.upper_start, options.upper_max
    numbers = (
        *transformed,
        *(c_float(end).value for end in ends),  # as the bounds are applied
        *(options.clip_ratio_c, options.sapo_tau_pos, options.sapo_tau_neg),
        *(options.kl_loss_coef, options.entropy_coef),
    )
    if not gradient:
        return softcapped, present & bits(fields.TEMPERATURES), numbers, (0, 0, False)
    unread = bits(fields.ROLLOUT_LOG_PROBS, *[] if options.kl_loss_coef else [fields.REF_LOG_PROBS])
    flags = int(options.surrogate), int(options.kl_loss_type), options.entropy_coef != 0
    return softcapped, present & ~unread, numbers, flags


def row_statistics(
    logits: Tensor,
    offsets: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    tokens: Tensor | None,
    present: int,
    options: list[float],
    *statistics: Tensor,
) -> None:
    """Runs the row pass without a gradient, which needs no input of the policy."""
    inputs = None, tokens, present, None, options
    row_pass(logits, offsets, labels, counted, *inputs, *statistics, None, None)


def row_pass(
    logits: Tensor,
    offsets: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    weights: Tensor | None,
    tokens: Tensor | None,
    present: int,
    bounds: Tensor | None,
    options: list[float],
    *results: Tensor | None,
) -> None:
    """Writes ``results``: log_probs, entropy, stats, undecided and dlogits."""
    *statistics, dlogits = results
    gradient = dlogits is not None
    softcapped, present, numbers, flags = _from_options(options, present, gradient)
    if offsets is None:
        shape, registers = row_shape(logits, softcapped, 512 if gradient else 256), 64
    else:
        shape, registers = set_shape(), 72
    sizes, ALIGN = row_sizes(logits, dlogits, offsets)
    several = labels.numel() > counted.numel()
    flags = softcapped, present, *flags, several
    (_row_kernel if offsets is None else _set_kernel)[(counted.numel(),)](
        *(logits, dlogits, offsets, labels, counted, weights, tokens if present else None, bounds),
        *(*statistics, labels.shape[1] if several else 1, *sizes, *numbers),
        *(*flags, LABELS, ALIGN, shape.W, shape.UNROLL),
        **limits(shape.num_warps, registers if gradient else 96),
    )


def row_pass_(logits: Tensor, *arguments: Any) -> None:
    row_pass(*[logits, *arguments, logits])
