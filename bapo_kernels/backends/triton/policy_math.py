"""The policy mathematics of BAPO, for one token or a block of them.

May import ``tokens`` alone. A formula that changes here and not in ``csrc/policy_math.h`` gives the
backends different losses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tokens import LOWER, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, UPPER, has, load_field

# The loss of Algorithm 1, line 20, the surrogates in its place, and the sums of Eq. 8 (arXiv
# 2510.18927). float64 costs a few operations per token, and decisions (clipped or not, which
# bounds) then agree with the float64 reference.

LOG_RATIO_LIMIT = tl.constexpr(20.0)
KL_LIMIT = tl.constexpr(10.0)
RATIO_EPS = tl.constexpr(1e-8)
LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
K1 = tl.constexpr(0)
K2 = tl.constexpr(1)
CISPO = tl.constexpr(1)
SAPO = tl.constexpr(2)
MASK = tl.constexpr(3)


@triton.jit
def clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def expm1(x):
    """exp(x) - 1, accurate near 0 too: the rounding of exp cancels in (u - 1)/log(u)."""
    u = tl.exp(x)
    log_u = tl.log(tl.where(u == 1.0, 2.0, u))
    inside = tl.where(u == 1.0, x, (u - 1.0) * (x / log_u))
    return tl.where(u == 0.0, -1.0, inside)


@triton.jit
def old_log_prob(token, log_prob, PRESENT: tl.constexpr):
    """The given old log-prob; on-policy the policy's own, kept finite at forbidden labels."""
    if has(OLD_LOG_PROBS, PRESENT):
        old = load_field(token, OLD_LOG_PROBS)
    else:
        old = tl.where(log_prob < LOWEST_FLOAT, LOWEST_FLOAT, log_prob)
    return old


@triton.jit
def load_bounds(bounds, token, PRESENT: tl.constexpr):
    """Lower and upper bound: a token's own, or those of all tokens."""
    if has(LOWER, PRESENT):
        lower, upper = load_field(token, LOWER), load_field(token, UPPER)
    else:
        lower, upper = tl.load(bounds).to(tl.float64), tl.load(bounds + 1).to(tl.float64)
    return lower, upper


@triton.jit
def ratio_of(log_ratio):
    """r, its clamped logarithm, and whether the clamp makes its derivative 0."""
    held = clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return tl.exp(held), held, held != log_ratio


@triton.jit
def policy_ratio(log_prob, old):
    """``ratio_of`` for a token; r is NaN if ``old`` is not finite, which the clamp would hide."""
    r, log_ratio, saturated = ratio_of(log_prob - old)
    return tl.where(old - old == 0.0, r, float("nan")), log_ratio, saturated


@triton.jit
def ratio_at(log_ratios, index, mask, log_prob, old):
    """``ratio_of`` for given log-ratios, else ``policy_ratio``."""
    if log_ratios is None:
        ratio = policy_ratio(log_prob, old)
    else:
        ratio = ratio_of(tl.load(log_ratios + index, mask, other=0.0))
    return ratio


@triton.jit
def passes_clip(r, A, lower, upper, clip_ratio_c):
    """Whether the clip lets the gradient of a token pass (bounds inclusive)."""
    return ((A > 0.0) & (r <= upper)) | ((A <= 0.0) & (r >= lower) & (r <= clip_ratio_c))


@triton.jit
def clip_term(r, saturated, A, lower, upper, clip_ratio_c):
    """-min(r*A, clip(r, c_low, c_high)*A), at most -A*clip_ratio_c for A < 0."""
    free, held = r * A, clamp(r, lower, upper) * A
    loss = -tl.where(held < free, held, free)
    cap = -A * clip_ratio_c
    dual_clipped = (A < 0.0) & (loss > cap)
    clipped = ((A > 0.0) & (r > upper)) | ((A < 0.0) & (r < lower))
    grad = -r * A
    kept = (A != 0.0) & ~saturated & passes_clip(r, A, lower, upper, clip_ratio_c)
    grad = tl.where(kept | (grad != grad), grad, 0.0)
    return tl.where(dual_clipped, cap, loss), grad, clipped, dual_clipped


@triton.jit
def cispo_term(r, A, log_prob, lower, upper):
    """-clip(r, c_low, c_high)*A*log_prob, with the clipped ratio held constant."""
    grad = -clamp(r, lower, upper) * A
    # The row pass knows early whether A is 0; without this ptxas spills it for sm_100.
    grad = tl.where((A != 0.0) | (grad != grad), grad, 0.0)
    loss = tl.where(grad == 0.0, 0.0, grad * log_prob)
    return loss, grad, (r < lower) | (r > upper), tl.zeros_like(r).to(tl.int1)


@triton.jit
def sapo_term(r, saturated, A, tau_pos, tau_neg):
    """-A*(4/tau)*sigmoid(tau*(r - 1))."""
    tau = tl.where(A > 0.0, tau_pos, tau_neg)
    gate = 1.0 / (1.0 + tl.exp(-tau * (r - 1.0)))
    grad = -A * 4.0 * gate * (1.0 - gate) * r
    grad = tl.where(saturated & (grad == grad), 0.0, grad)
    never = tl.zeros_like(r).to(tl.int1)
    return -A * (4.0 / tau) * gate, grad, never, never


@triton.jit
def mask_term(r, saturated, A, lower, upper):
    """-r*A inside of the bounds (inclusive), 0 outside."""
    below = r < lower
    masked = below | (r > upper)
    loss = -A * tl.where(masked, 0.0, r)
    return loss, tl.where(saturated & (loss == loss), 0.0, loss), masked, below


@triton.jit
def policy_term(r, saturated, A, log_prob, clip, options, SURROGATE: tl.constexpr):
    """Loss, its derivative by log_prob, and whether the clip (or mask) and the dual clip applied.

    With the ratio of a sequence, the derivative is by the logarithm of that. ``clip``: lower and
    upper bound; ``options``: clip_ratio_c, sapo_tau_pos and sapo_tau_neg.
    """
    lower, upper = clip
    if SURROGATE == CISPO:
        term = cispo_term(r, A, log_prob, lower, upper)
    elif SURROGATE == SAPO:
        term = sapo_term(r, saturated, A, options[1], options[2])
    elif SURROGATE == MASK:
        term = mask_term(r, saturated, A, lower, upper)
    else:
        term = clip_term(r, saturated, A, lower, upper, options[0])
    return term


@triton.jit
def kl_term(log_prob, ref_log_prob, KL_LOSS_TYPE: tl.constexpr):
    """Estimator of http://joschu.net/blog/kl-approx.html and its derivative; k3 as in verl."""
    delta = ref_log_prob - log_prob
    if KL_LOSS_TYPE == K1:
        kl, grad = -delta, tl.zeros_like(delta) + 1.0
    elif KL_LOSS_TYPE == K2:
        kl, grad = 0.5 * delta * delta, -delta
    else:
        d = clamp(delta, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        slope = expm1(d)
        value = slope - d
        kl = clamp(value, -KL_LIMIT, KL_LIMIT)
        inside = ((d == delta) & (kl == value)) | (value != value)
        grad = tl.where(inside, -slope, 0.0)
    return kl, grad


@triton.jit
def search_weight(token, old, UNIFORM_WEIGHT: tl.constexpr, PRESENT: tl.constexpr):
    """The weight of a token in both masses: its probability under the rollout policy, or 1."""
    if UNIFORM_WEIGHT:
        w = tl.zeros_like(old) + 1.0
    elif has(ROLLOUT_LOG_PROBS, PRESENT):
        w = tl.exp(load_field(token, ROLLOUT_LOG_PROBS))
    else:
        w = tl.exp(old)
    return w


@triton.jit
def contribution(r, A, clip, UNCLIPPED_ONLY: tl.constexpr):
    """A token's addend of the positive (A > 0) or negative (A < 0) mass, without its weight."""
    lower, upper = clip
    if UNCLIPPED_ONLY:
        positive, negative = tl.where(r > upper, 0.0, r), tl.where(r < lower, 0.0, r)
    else:
        positive, negative = tl.where(r > upper, upper, r), tl.where(r < lower, lower, r)
    return tl.where(A > 0.0, A * positive, -A * negative)


@triton.jit
def contributions_at(r, A, w, points, is_upper, UNCLIPPED_ONLY: tl.constexpr):
    """``[tokens, points]``: the addends of tokens in the masses at points of both grids.

    A lower point bounds r from below, and so -r from above: both grids take the same operations.
    """
    x = tl.where(A > 0.0, r, -r)[:, None]
    limit = tl.where(is_upper, points, -points)[None, :]
    held = tl.where(x > limit, 0.0 if UNCLIPPED_ONLY else limit, x)
    side = tl.where(A > 0.0, 1, tl.where(A < 0.0, -1, 0))[:, None]
    adds = side == tl.where(is_upper, 1, -1)[None, :]
    return tl.where(adds, (w * A)[:, None] * held, 0.0)


@triton.jit
def tested_quantity(pos, neg, TARGET_IS_RATIO: tl.constexpr):
    """The quantity that the search compares with its target; infinite with nothing to balance."""
    if TARGET_IS_RATIO:
        nothing, divisor = neg <= 0.0, neg + RATIO_EPS
    else:
        nothing, divisor = pos + neg == 0.0, pos + neg
    return tl.where(nothing, float("inf"), pos / tl.where(nothing, 1.0, divisor))
