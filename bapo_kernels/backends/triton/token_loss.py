"""Loss and metrics of tokens whose log-probs are known, and the gradients of their loss.

May import ``policy_math``, ``tokens``, ``kernel``, ``launch``, ``config`` and ``output``. The
derivatives must be those of ``row_pass`` to the bit: a decided row has its gradient from there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...config import Options
from ...output import REPORT
from . import policy_math
from . import tokens as fields
from .kernel import Kernel
from .launch import MAX_PROGRAMS, limits, per_options, token_programs
from .tokens import bits, has, load_field

TOKENS = 256  # per program and step
# Sums over the tokens of each program, in the order of csrc/tokens.h.
SUMS = (
    *("loss", "pg_loss", "kl_loss", "log_ratio", "entropy"),
    *("pos", "neg", "pos_start", "neg_start", "pos_last", "neg_last", "lower", "upper"),
    *("tokens", "count", "clipped", "dual_clipped"),
    *("tokens_pos", "tokens_neg", "clipped_pos", "clipped_neg", "acted"),
)
_SUM_INDEX = {name: index for index, name in enumerate(SUMS)}
_REPORT_INDEX = {name: index for index, name in enumerate(REPORT)}


@triton.constexpr_function
def _sum_index(name):
    return _SUM_INDEX[name]


@triton.constexpr_function
def _report_index(name):
    return _REPORT_INDEX[name]


@Kernel
def _token_loss_kernel(
    log_probs,
    entropies,
    counted,
    unmasked,
    weights,
    log_ratios,
    tokens,
    bounds,
    masses,
    ticket,
    partials,
    report,
    dlog_probs,
    dentropies,
    outputs,
    dlog_ratios,
    N: tl.int64,
    lower_start: tl.float64,
    upper_start: tl.float64,
    lower_last: tl.float64,
    upper_last: tl.float64,
    target: tl.float64,
    clip_ratio_c: tl.float64,
    sapo_tau_pos: tl.float64,
    sapo_tau_neg: tl.float64,
    kl_loss_coef: tl.float64,
    entropy_coef: tl.float64,
    SURROGATE: tl.constexpr,
    KL_LOSS_TYPE: tl.constexpr,
    UNIFORM_WEIGHT: tl.constexpr,
    UNCLIPPED_ONLY: tl.constexpr,
    TARGET_IS_RATIO: tl.constexpr,
    PRESENT: tl.constexpr,
    TOKENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Every program sums its share of the tokens; the last to finish adds up the sums in order.

    Their bits are therefore the same in every run.
    """
    zeros = tl.zeros((TOKENS,), tl.float64)
    none = tl.zeros((TOKENS,), tl.int32)
    loss_sum, pg_loss_sum, kl_loss_sum, log_ratio_sum = zeros, zeros, zeros, zeros
    entropy_sum, tokens_sum, count, clipped_sum, dual_clipped_sum = zeros, none, none, none, none
    positives, negatives, clipped_pos, clipped_neg = none, none, none, none
    at_bounds, at_start, at_last = (zeros, zeros), (zeros, zeros), (zeros, zeros)
    if has(fields.LOWER, PRESENT):
        lower_sum, upper_sum, acted = zeros, zeros, none
    else:
        clip = policy_math.load_bounds(bounds, None, PRESENT)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for begin in range(program.to(tl.int64) * TOKENS, N, programs * TOKENS):
        index = begin + tl.arange(0, TOKENS)
        inside = index < N
        mask = inside & (tl.load(counted + index, inside, other=0) != 0)
        token = tokens, N, index, mask
        logp = tl.load(log_probs + index, mask, other=0.0)
        old = policy_math.old_log_prob(token, logp, PRESENT)
        A = load_field(token, fields.ADVANTAGES)
        weight = tl.load(weights + index, mask, other=0.0)
        r, log_ratio, saturated = policy_math.ratio_at(log_ratios, index, mask, logp, old)
        if has(fields.LOWER, PRESENT):
            clip = policy_math.load_bounds(bounds, token, PRESENT)
            lower_sum += clip[0]
            upper_sum += clip[1]
            acted += (mask & _differ(clip, lower_start, upper_start)).to(tl.int32)
        given = r, saturated, A, logp, clip, (clip_ratio_c, sapo_tau_pos, sapo_tau_neg)
        pg_loss, grad, clipped, dual_clipped = policy_math.policy_term(*given, SURROGATE)
        if has(fields.ROLLOUT_IS_WEIGHTS, PRESENT):
            is_weight = load_field(token, fields.ROLLOUT_IS_WEIGHTS)
            pg_loss *= is_weight
            grad *= is_weight
        if dlog_ratios is not None:
            tl.store(dlog_ratios + index, tl.where(mask, weight * grad, 0.0), inside)
            grad = zeros
        loss, kl, entropy = pg_loss, zeros, zeros
        if has(fields.REF_LOG_PROBS, PRESENT):
            ref = load_field(token, fields.REF_LOG_PROBS)
            kl, kl_grad = policy_math.kl_term(logp, ref, KL_LOSS_TYPE)
            if kl_loss_coef != 0.0:
                loss += kl_loss_coef * kl
                grad += kl_loss_coef * kl_grad
        if entropies is not None:
            entropy = tl.load(entropies + index, mask, other=0.0)
            if entropy_coef != 0.0:
                loss -= entropy_coef * entropy
        tl.store(dlog_probs + index, tl.where(mask, weight * grad, 0.0), inside)
        if dentropies is not None:
            tl.store(dentropies + index, tl.where(mask, -weight * entropy_coef, 0.0), inside)
        if unmasked is not None:
            is_unmasked = tl.load(unmasked + index, inside, other=0) != 0
            tokens_sum += is_unmasked.to(tl.int32)
        if outputs is not None:
            absent = tl.zeros((TOKENS,), tl.float32)
            if unmasked is not None:
                absent = tl.where(is_unmasked, float("nan"), absent)
            tl.store(outputs + index, tl.where(mask, logp.to(tl.float32), absent), inside)
            if entropies is not None:
                output = tl.where(mask, entropy.to(tl.float32), absent)
                tl.store(outputs + N + index, output, inside)

        loss_sum += tl.where(mask, weight * loss, 0.0)
        pg_loss_sum += tl.where(mask, weight * pg_loss, 0.0)
        kl_loss_sum += tl.where(mask, weight * kl, 0.0)
        count += mask.to(tl.int32)
        clipped_sum += (mask & clipped).to(tl.int32)
        dual_clipped_sum += (mask & dual_clipped).to(tl.int32)
        positive, negative = mask & (A > 0.0), mask & (A < 0.0)
        positives += positive.to(tl.int32)
        negatives += negative.to(tl.int32)
        clipped_pos += (positive & clipped).to(tl.int32)
        clipped_neg += (negative & clipped).to(tl.int32)
        log_ratio_sum += tl.where(mask, log_ratio, 0.0)
        entropy_sum += tl.where(mask, entropy, 0.0)
        if masses is None:
            w = policy_math.search_weight(token, old, UNIFORM_WEIGHT, PRESENT)
            terms = r, A, w, mask
            at_bounds = _add_masses(at_bounds, terms, clip, UNCLIPPED_ONLY)
            at_start = _add_masses(at_start, terms, (lower_start, upper_start), UNCLIPPED_ONLY)
            at_last = _add_masses(at_last, terms, (lower_last, upper_last), UNCLIPPED_ONLY)

    sums = loss_sum, pg_loss_sum, kl_loss_sum, log_ratio_sum, entropy_sum
    _store_sums(partials, "loss", sums)
    _store_sums(partials, "tokens", (tokens_sum, count, clipped_sum, dual_clipped_sum))
    _store_sums(partials, "tokens_pos", (positives, negatives, clipped_pos, clipped_neg))
    if masses is None:
        _store_sums(partials, "pos", at_bounds)
        _store_sums(partials, "pos_start", at_start)
        _store_sums(partials, "pos_last", at_last)
    if has(fields.LOWER, PRESENT):
        _store_sums(partials, "lower", (lower_sum, upper_sum))
        _store_sums(partials, "acted", (acted,))
    # The barrier orders the stores of all threads before the atomic of one of them. It releases
    # them, and in the last program acquires those of the other programs, whose sums are then read
    # past the L1 cache, which is not coherent.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        tl.store(ticket, 0)
        given = bounds, masses, report, lower_start, upper_start, target
        _report(partials, *given, unmasked is not None, TARGET_IS_RATIO, PRESENT, PROGRAMS)


@triton.jit
def _add_masses(sums, terms, clip, UNCLIPPED_ONLY: tl.constexpr):
    """Adds the contributions of tokens at these bounds to the positive and the negative mass."""
    r, A, w, mask = terms
    mass = w * policy_math.contribution(r, A, clip, UNCLIPPED_ONLY)
    positive = sums[0] + tl.where(mask & (A > 0.0), mass, 0.0)
    return positive, sums[1] + tl.where(mask & (A < 0.0), mass, 0.0)


@triton.jit
def _store_sums(partials, first: tl.constexpr, sums):
    """Stores consecutive sums, in the order of SUMS; ``first`` is the name of the first one."""
    programs = tl.num_programs(0)
    place = _sum_index(first) * programs + tl.program_id(0)
    for i in tl.static_range(len(sums)):
        tl.store(partials + place + i * programs, tl.sum(sums[i], 0))


@triton.jit
def _sum_of(partials, name: tl.constexpr, PROGRAMS: tl.constexpr):
    programs = tl.num_programs(0)
    program = tl.arange(0, PROGRAMS)
    place = _sum_index(name) * programs + program
    sums = tl.load(partials + place, program < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@triton.jit
def _differ(clip, lower_start, upper_start):
    """Whether bounds, which are float32, are not the starting bounds."""
    lower, upper = tl.cast(lower_start, tl.float32), tl.cast(upper_start, tl.float32)
    return (clip[0].to(tl.float32) != lower) | (clip[1].to(tl.float32) != upper)


@triton.jit
def _share(value, total):
    return tl.where(total == 0.0, 0.0, value / tl.where(total == 0.0, 1.0, total))


@triton.jit
def _report(
    partials,
    bounds,
    masses,
    report,
    lower_start,
    upper_start,
    target,
    SKIPS: tl.constexpr,
    TARGET_IS_RATIO: tl.constexpr,
    PRESENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    live_tokens = _sum_of(partials, "count", PROGRAMS)
    count = tl.where(live_tokens > 0.0, live_tokens, 1.0)
    if masses is not None:
        pos, neg = tl.load(masses), tl.load(masses + 1)
        pos_start, neg_start = tl.load(masses + 2), tl.load(masses + 3)
        pos_last, neg_last = tl.load(masses + 4), tl.load(masses + 5)
    else:
        pos, neg = _sum_of(partials, "pos", PROGRAMS), _sum_of(partials, "neg", PROGRAMS)
        pos_start = _sum_of(partials, "pos_start", PROGRAMS)
        neg_start = _sum_of(partials, "neg_start", PROGRAMS)
        pos_last = _sum_of(partials, "pos_last", PROGRAMS)
        neg_last = _sum_of(partials, "neg_last", PROGRAMS)
    saturated = policy_math.tested_quantity(pos, neg, TARGET_IS_RATIO) < target
    neg_min = tl.minimum(neg_start, neg_last)
    clipped = _sum_of(partials, "clipped", PROGRAMS)
    dual_clipped = _sum_of(partials, "dual_clipped", PROGRAMS)
    _store_entry(report, "loss", _sum_of(partials, "loss", PROGRAMS))
    _store_entry(report, "pg_loss", _sum_of(partials, "pg_loss", PROGRAMS))
    _store_entry(report, "pg_clipfrac", clipped / count)
    positives = _sum_of(partials, "tokens_pos", PROGRAMS)
    negatives = _sum_of(partials, "tokens_neg", PROGRAMS)
    clipped_pos = _sum_of(partials, "clipped_pos", PROGRAMS)
    clipped_neg = _sum_of(partials, "clipped_neg", PROGRAMS)
    _store_entry(report, "pg_clipfrac_pos", _share(clipped_pos, positives))
    _store_entry(report, "pg_clipfrac_neg", _share(clipped_neg, negatives))
    _store_entry(report, "pg_clipfrac_lower", dual_clipped / count)
    _store_entry(report, "ppo_kl", -_sum_of(partials, "log_ratio", PROGRAMS) / count)
    _store_entry(report, "entropy", _sum_of(partials, "entropy", PROGRAMS) / count)
    _store_entry(report, "kl_loss", _sum_of(partials, "kl_loss", PROGRAMS))
    if has(fields.LOWER, PRESENT):
        _store_entry(report, "bapo_clip_low", _sum_of(partials, "lower", PROGRAMS) / count)
        _store_entry(report, "bapo_clip_high", _sum_of(partials, "upper", PROGRAMS) / count)
        acted = _sum_of(partials, "acted", PROGRAMS) > 0.0
    else:
        clip = policy_math.load_bounds(bounds, None, PRESENT)
        acted = _differ(clip, lower_start, upper_start)
        _store_entry(report, "bapo_clip_low", tl.load(bounds))
        _store_entry(report, "bapo_clip_high", tl.load(bounds + 1))
    _store_entry(report, "bapo_pos_share", _share(pos, pos + neg))
    _store_entry(report, "bapo_pos_share_start", _share(pos_start, pos_start + neg_start))
    _store_entry(report, "bapo_pos_share_max", _share(pos_last, pos_last + neg_min))
    _store_entry(report, "bapo_pos_neg_ratio", policy_math.tested_quantity(pos, neg, True))
    _store_entry(report, "bapo_saturated", saturated)
    _store_entry(report, "bapo_acted", acted)
    if SKIPS:
        _store_entry(report, "tokens", _sum_of(partials, "tokens", PROGRAMS))
    else:
        _store_entry(report, "tokens", live_tokens)
    _store_entry(report, "tokens_pos", positives)
    _store_entry(report, "tokens_neg", negatives)
    _store_entry(report, "live_tokens", live_tokens)
    tl.store(report + _report_index("loss_adds_up"), 1.0)  # the caller shows it where it holds


@triton.jit
def _store_entry(report, name: tl.constexpr, value):
    tl.store(report + _report_index(name), value.to(tl.float32))


@per_options
def _from_options(
    options: Options, present: int, searched: bool
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The numbers of the options for the kernel, and its flags, with the fields that it reads."""
    last = (
        options.lower_max if options.lower_step else options.lower_start,
        options.upper_max if options.upper_step else options.upper_start,
    )
    policy = options.clip_ratio_c, options.sapo_tau_pos, options.sapo_tau_neg
    coefs = options.kl_loss_coef, options.entropy_coef
    without_weight = searched or options.uniform_weight
    unread = bits(fields.TEMPERATURES, *[fields.ROLLOUT_LOG_PROBS] if without_weight else [])
    flags = (
        *(int(options.surrogate), int(options.kl_loss_type), bool(options.uniform_weight)),
        *(bool(options.unclipped_only), bool(options.target_is_ratio), present & ~unread),
    )
    return (*options.start(), *last, options.target, *policy, *coefs), flags


def token_loss(
    log_probs: Tensor,
    entropy: Tensor | None,
    counted: Tensor,
    unmasked: Tensor | None,
    weights: Tensor,
    log_ratios: Tensor | None,
    tokens: Tensor,
    present: int,
    bounds: Tensor | None,
    masses: Tensor | None,
    options: list[float],
    ticket: Tensor,
    *results: Tensor | None,
) -> None:
    """Writes ``results``: report, dlog_probs, dentropy, outputs and dlog_ratios."""
    N = log_probs.numel()
    programs = token_programs(N, TOKENS)
    partials = log_probs.new_empty((len(SUMS), programs))
    given = log_probs, entropy, counted, unmasked, weights, log_ratios, tokens, bounds, masses
    numbers, flags = _from_options(options, present, masses is not None)
    _token_loss_kernel[(programs,)](
        *(*given, ticket, partials, *results, N, *numbers, *flags, TOKENS, MAX_PROGRAMS),
        **limits(8, registers=128),
    )
