// The policy mathematics of BAPO for one token: the loss of Algorithm 1, line 20, and the sums of
// Eq. 8 (arXiv 2510.18927), for CPU and CUDA. Includes nothing of ours. All in double, which is
// cheap per token: in float32, decisions on clips and bounds would differ from the reference.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define BAPO_HD __host__ __device__ inline
#else
// Files that are compiled for an instruction set must not define what others could be linked to.
#define BAPO_HD inline __attribute__((always_inline))
#endif

namespace bapo {

constexpr double kLogRatioLimit = 20.0;
constexpr double kKlLimit = 10.0;
constexpr double kRatioEps = 1e-8;
constexpr double kLowestFloat = -3.4028234663852886e38;
constexpr int kMaxGridPoints = 1024;

// config.py has the same numbers.
enum KlLossType : int64_t { kK1 = 0, kK2 = 1, kK3 = 2 };
enum Surrogate : int64_t { kClip = 0, kCispo = 1, kSapo = 2, kMask = 3 };

struct Bounds {
    double lower;
    double upper;
};

// Options of the loss per token; clip_ratio_c is infinite without a dual clip.
struct PolicyOptions {
    int64_t surrogate = kClip;
    double clip_ratio_c = INFINITY;
    double sapo_tau_pos = 1.0;
    double sapo_tau_neg = 1.0;
    double kl_loss_coef = 0.0;
    int64_t kl_loss_type = kK1;
    double entropy_coef = 0.0;
};

// The inputs of a token's loss. An absent rollout_is_weight is 1, an absent ref_log_prob log_prob.
struct Token {
    double log_prob, old_log_prob, ref_log_prob, advantage, rollout_is_weight;
};

struct Ratio {
    double value;      // r; NaN if old_log_prob is not finite, which the clamp would hide
    double log_value;  // clamped log-ratio
    bool saturated;    // the clamp changed it, so that its derivative is 0
};

BAPO_HD double clamp(double x, double low, double high) {
    return x < low ? low : (x > high ? high : x);
}

// The behaviour policy of on-policy data is the policy itself, kept finite at forbidden labels.
BAPO_HD double on_policy_old(double log_prob) {
    return log_prob < kLowestFloat ? kLowestFloat : log_prob;
}

// The argument is log_prob - old_log_prob, or its mean over a sequence; NaN if a term is not
// finite.
BAPO_HD Ratio ratio_of(double log_ratio) {
    const double log_value = clamp(log_ratio, -kLogRatioLimit, kLogRatioLimit);
    return {exp(log_value), log_value, log_value != log_ratio};
}
BAPO_HD Ratio policy_ratio(double log_prob, double old_log_prob) {
    Ratio ratio = ratio_of(log_prob - old_log_prob);
    const bool bad = !(old_log_prob - old_log_prob == 0.0);
    if (bad) ratio.value = NAN;
    return ratio;
}

// Whether the gradient of a token passes the clip (bounds inclusive).
BAPO_HD bool passes_clip(double r, double advantage, Bounds bounds, double clip_ratio_c) {
    return advantage > 0.0 ? r <= bounds.upper : r >= bounds.lower && r <= clip_ratio_c;
}

struct PolicyTerm {
    double loss;
    double grad;  // d loss / d log_prob; of a sequence's ratio, with respect to its logarithm
    bool clipped;
    bool dual_clipped;  // of a mask: below it
};

// l = -min(r*A, clip(r, c_low, c_high)*A); for A < 0 the loss is at most -A*clip_ratio_c.
BAPO_HD PolicyTerm clip_term(double A, const Ratio& ratio, Bounds bounds, double clip_ratio_c) {
    const double r = ratio.value, clipped_r = clamp(r, bounds.lower, bounds.upper);
    const double free = r * A, held = clipped_r * A;
    double loss = -(held < free ? held : free);
    const double cap = -A * clip_ratio_c;
    const bool dual_clipped = A < 0.0 && loss > cap;
    if (dual_clipped) loss = cap;

    double grad = -free;
    const bool defined = grad == grad;
    if (defined && (A == 0.0 || ratio.saturated || !passes_clip(r, A, bounds, clip_ratio_c))) {
        grad = 0.0;
    }
    const bool clipped = (A > 0.0 && r > bounds.upper) || (A < 0.0 && r < bounds.lower);
    return {loss, grad, clipped, dual_clipped};
}

// l = -clip(r, c_low, c_high)*A*log_prob, the clipped ratio held constant.
BAPO_HD PolicyTerm cispo_term(double A, double r, double log_prob, Bounds bounds) {
    const double grad = -clamp(r, bounds.lower, bounds.upper) * A;
    const bool clipped = r < bounds.lower || r > bounds.upper;
    return {grad == 0.0 ? 0.0 : grad * log_prob, grad, clipped, false};
}

// l = -A*(4/tau)*sigmoid(tau*(r - 1)).
BAPO_HD PolicyTerm sapo_term(double A, const Ratio& ratio, double tau) {
    const double r = ratio.value, gate = 1.0 / (1.0 + exp(-tau * (r - 1.0)));
    const double grad = -A * 4.0 * gate * (1.0 - gate) * r;
    const bool zero = ratio.saturated && grad == grad;
    return {-A * (4.0 / tau) * gate, zero ? 0.0 : grad, false, false};
}

// l = -r*A inside of the bounds (inclusive), nothing outside.
BAPO_HD PolicyTerm mask_term(double A, const Ratio& ratio, Bounds bounds) {
    const bool below = ratio.value < bounds.lower, masked = below || ratio.value > bounds.upper;
    const double loss = -A * (masked ? 0.0 : ratio.value);
    return {loss, ratio.saturated && loss == loss ? 0.0 : loss, masked, below};
}

// The surrogate of a token's policy term, times its importance weight.
BAPO_HD PolicyTerm policy_term(const Token& token, const Ratio& ratio, Bounds bounds,
                               const PolicyOptions& options) {
    const double A = token.advantage;
    PolicyTerm term;
    switch (options.surrogate) {
        case kCispo: term = cispo_term(A, ratio.value, token.log_prob, bounds); break;
        case kSapo:
            term = sapo_term(A, ratio, A > 0.0 ? options.sapo_tau_pos : options.sapo_tau_neg);
            break;
        case kMask: term = mask_term(A, ratio, bounds); break;
        default: term = clip_term(A, ratio, bounds, options.clip_ratio_c);
    }
    term.loss *= token.rollout_is_weight;
    term.grad *= token.rollout_is_weight;
    return term;
}

struct KlTerm {
    double value;
    double grad;  // d value / d log_prob
};

// Estimators of http://joschu.net/blog/kl-approx.html; k3 is clamped as verl does.
BAPO_HD KlTerm kl_term(double log_prob, double ref_log_prob, int64_t type) {
    if (type == kK1) return {log_prob - ref_log_prob, 1.0};
    const double delta = ref_log_prob - log_prob;
    if (type == kK2) return {0.5 * delta * delta, -delta};
    const double d = clamp(delta, -kLogRatioLimit, kLogRatioLimit);
    const double value = expm1(d) - d;
    const double held = clamp(value, -kKlLimit, kKlLimit);
    const bool inside = d == delta && held == value;
    return {held, inside || value != value ? -expm1(d) : 0.0};
}

// d loss / d log_prob of a token's KL term.
BAPO_HD double kl_grad(const Token& token, const PolicyOptions& options) {
    if (options.kl_loss_coef == 0.0) return 0.0;
    const KlTerm kl = kl_term(token.log_prob, token.ref_log_prob, options.kl_loss_type);
    return options.kl_loss_coef * kl.grad;
}

// A token's contribution to the positive mass (A > 0) or the negative mass (A < 0), unweighted.
BAPO_HD double contribution(double r, double advantage, Bounds bounds, bool unclipped_only) {
    if (advantage > 0.0) {
        if (unclipped_only) return r > bounds.upper ? 0.0 : advantage * r;
        return advantage * (r > bounds.upper ? bounds.upper : r);
    }
    if (unclipped_only) return r < bounds.lower ? 0.0 : -advantage * r;
    return -advantage * (r < bounds.lower ? bounds.lower : r);
}

// The values that the search tries for a bound, by repeated addition as in Algorithm 1. The last
// step ends at the maximum; with a step of 0 there is one value.
struct Grid {
    double start;
    double maximum;
    double step;
    int count;       // of the points
    float per_unit;  // points in a length of 1

    static BAPO_HD Grid of(double start, double maximum, double step) {
        int count = 1;
        for (double point = start; step > 0.0 && point < maximum && count < kMaxGridPoints;) {
            point += step;
            ++count;
        }
        return {start, maximum, step, count, step > 0.0 ? (float)(1.0 / step) : 0.0f};
    }
    BAPO_HD double last() const { return step > 0.0 ? maximum : start; }
    // The k-th point, whose sum is the start with k steps added.
    BAPO_HD double point(int k, double sum) const {
        return k == 0 || sum < maximum ? sum : maximum;
    }
};

// Number of ascending points below x, or not above x; of NaN none is below, and all are not above.
// Looks for it from where the steps would be without rounding.
BAPO_HD int count_points(const double* points, const Grid& grid, double x, bool not_above) {
    const auto counts = [=](double point) { return not_above ? !(point > x) : point < x; };
    const float steps = (float)(x - grid.start) * grid.per_unit;
    int k = (int)fminf(fmaxf(steps, 0.0f), (float)grid.count);  // 0 for NaN
    while (k < grid.count && counts(points[k])) ++k;
    while (k > 0 && !counts(points[k - 1])) --k;
    return k;
}

// Sums of the tokens of one bin of the ratio.
struct alignas(16) Moments {
    double ratio_mass;  // sum of w*|A|*r
    double mass;        // sum of w*|A|

    BAPO_HD Moments& operator+=(const Moments& other) {
        ratio_mass += other.ratio_mass;
        mass += other.mass;
        return *this;
    }
};

// The positive mass at point j of the upper grid, from tokens with A > 0. Bin b holds the ratios
// that b points are below, so r <= c_j where b <= j.
BAPO_HD double positive_mass(const Moments* bins, const double* points, int count, int j,
                             bool unclipped_only) {
    double kept = 0.0, above = 0.0;
    for (int b = 0; b <= j; ++b) kept += bins[b].ratio_mass;
    if (unclipped_only) return kept;
    for (int b = count; b > j; --b) above += bins[b].mass;
    return kept + points[j] * above;
}

// The negative mass at point i of the lower grid, from tokens with A < 0. Bin b holds the ratios
// that b points are not above, so r >= c_i where b > i.
BAPO_HD double negative_mass(const Moments* bins, const double* points, int count, int i,
                             bool unclipped_only) {
    double kept = 0.0, below = 0.0;
    for (int b = count; b > i; --b) kept += bins[b].ratio_mass;
    if (unclipped_only) return kept;
    for (int b = 0; b <= i; ++b) below += bins[b].mass;
    return kept + points[i] * below;
}

// The search compares this with its target; it is infinite if there is nothing to balance.
BAPO_HD double tested_quantity(double pos, double neg, bool ratio_target) {
    if (ratio_target) return neg <= 0.0 ? INFINITY : pos / (neg + kRatioEps);
    return pos + neg == 0.0 ? INFINITY : pos / (pos + neg);
}

}  // namespace bapo
