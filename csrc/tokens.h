// One token in the kernels of every device: its inputs, the decision on the gradient of its row,
// its part of the search and of the sums, and their report; on params.h. If the row passes decided
// by other functions than the loss sums by, they would write the gradient of another loss.
#pragma once

#include "params.h"

namespace bapo {

BAPO_HD double old_log_prob(const TokenInputs& tokens, int64_t i, double log_prob) {
    return tokens.old_log_probs ? tokens.old_log_probs[i] : on_policy_old(log_prob);
}

// The inputs of a token, which are known before its log-prob. Absent ones are 0.
struct alignas(16) TokenFields {
    double weight;
    float advantage, old_log_prob, ref_log_prob, rollout_is_weight;
    float lower, upper;
};
BAPO_HD TokenFields fields_at(const TokenInputs& tokens, int64_t i) {
    return {
        tokens.weights[i],
        tokens.advantages[i],
        tokens.old_log_probs ? tokens.old_log_probs[i] : 0.0f,
        tokens.ref_log_probs ? tokens.ref_log_probs[i] : 0.0f,
        tokens.rollout_is_weights ? tokens.rollout_is_weights[i] : 0.0f,
        tokens.lower ? tokens.lower[i] : 0.0f,
        tokens.upper ? tokens.upper[i] : 0.0f,
    };
}

BAPO_HD Token token_of(const TokenInputs& tokens, const TokenFields& fields, double log_prob) {
    return {
        log_prob,
        tokens.old_log_probs ? fields.old_log_prob : on_policy_old(log_prob),
        tokens.ref_log_probs ? fields.ref_log_prob : log_prob,
        fields.advantage,
        tokens.rollout_is_weights ? fields.rollout_is_weight : 1.0,
    };
}

BAPO_HD Ratio ratio_at(const TokenInputs& tokens, int64_t i, double log_prob, double old) {
    return tokens.log_ratios ? ratio_of(tokens.log_ratios[i]) : policy_ratio(log_prob, old);
}

// d x/d z in double, for the largest entry of a row's gradient, which is its label's.
BAPO_HD double label_slope(float z, const Transform& transform) {
    if (z == -INFINITY) return 0.0;
    if (!transform.softcapped) return transform.slope;
    const double y = tanh((double)z * transform.logit_scale / transform.softcap);
    return transform.slope * (1.0 - y * y);
}

// Coefficients of a row's gradient: d loss / d log_prob and the weight of the entropy bonus.
struct RowCoefficients {
    double dlog_prob;
    double entropy_bonus;
    BAPO_HD bool zero() const { return dlog_prob == 0.0 && entropy_bonus == 0.0; }
};

// d l/d z of the label, without the cancellation in 1 - p. It is the largest entry of the gradient,
// and in double its error is hardly more than the last rounding. `others` is the sum of the
// d l/d log_prob of the other labels.
BAPO_HD double label_gradient(float z, double log_p, double entropy, double slope,
                              RowCoefficients coefficients, double others = 0.0) {
    const double bonus = coefficients.entropy_bonus;
    double dx = -coefficients.dlog_prob * expm1(log_p);
    if (others != 0.0) dx -= others * exp(log_p);
    if (bonus != 0.0) dx += bonus * exp(log_p) * (log_p + entropy);
    return z == -INFINITY ? 0.0 : dx * slope;
}

struct Decision {
    RowCoefficients coefficients;
    bool undecided;  // the gradient depends on bounds that the search has yet to find
};
// The first and the last bounds that the search can return; both are the same if they are known.
// Bounds are float32 values, and double would take twice the registers.
struct alignas(16) BoundsRange {
    float lower, upper, last_lower, last_upper;

    static BAPO_HD BoundsRange at(float lower, float upper) { return {lower, upper, lower, upper}; }
    BAPO_HD Bounds first() const { return {lower, upper}; }
    BAPO_HD Bounds last() const { return {last_lower, last_upper}; }
};
BAPO_HD BoundsRange bounds_range(const RowPassParams& params) {
    if (params.bounds) return BoundsRange::at(params.bounds[0], params.bounds[1]);
    return {(float)params.start.lower, (float)params.start.upper, (float)params.maximum.lower,
            (float)params.maximum.upper};
}
BAPO_HD Decision decide(const RowPassParams& params, BoundsRange range, const TokenFields& fields,
                        double log_prob) {
    const PolicyOptions& options = params.options;
    if (params.tokens.lower) range = BoundsRange::at(fields.lower, fields.upper);
    const Token token = token_of(params.tokens, fields, log_prob);
    const Ratio ratio = policy_ratio(log_prob, token.old_log_prob);
    const double kl = kl_grad(token, options);
    const double grad = policy_term(token, ratio, range.first(), options).grad + kl;
    const double grad_last = policy_term(token, ratio, range.last(), options).grad + kl;
    return {{fields.weight * grad, fields.weight * options.entropy_coef},
            grad != grad_last && grad == grad};
}

// The weight of a token in the positive or the negative mass.
BAPO_HD double search_weight(const TokenInputs& tokens, bool uniform, int64_t i, double old) {
    return uniform ? 1.0
                   : exp(tokens.rollout_log_probs ? (double)tokens.rollout_log_probs[i] : old);
}

// A token of the search; if it is not counted, its advantage is 0.
struct Candidate {
    double ratio, advantage, weight;
};
BAPO_HD Candidate candidate(const ContributionParams& params, int64_t i) {
    // All are loaded at once: one latency, not three.
    const bool counted = params.tokens.counted[i];
    const double A = params.tokens.advantages[i], log_prob = params.log_probs[i];
    const double old = old_log_prob(params.tokens, i, log_prob);
    if (!counted || !(A > 0.0 || A < 0.0)) return {1.0, 0.0, 0.0};
    return {ratio_at(params.tokens, i, log_prob, old).value, A,
            search_weight(params.tokens, params.uniform_weight, i, old)};
}

// The points of both grids.
struct GridPoints {
    double lower[kMaxGridPoints], upper[kMaxGridPoints];
    int lower_count, upper_count;
};

// The bin of a candidate; the bins of negative advantages come first.
BAPO_HD int bin_of(const GridPoints& points, const Grids& grids, const Candidate& token) {
    const bool negative = token.advantage < 0.0;
    return (negative ? 0 : grids.lower.count + 1) +
           count_points(negative ? points.lower : points.upper,
                        negative ? grids.lower : grids.upper, token.ratio, negative);
}
BAPO_HD Moments moments_of(const Candidate& token) {
    const double mass = token.weight * fabs(token.advantage);
    return {mass * token.ratio, mass};
}

struct GridStep {
    int lower;
    int upper;
};
// Algorithm 1 raises one bound up to its maximum, then the other.
BAPO_HD GridStep step_of_search(const GridPoints& grids, bool upper_first, int k) {
    const int last = (upper_first ? grids.upper_count : grids.lower_count) - 1;
    const int first_side = k < last ? k : last, second_side = k - first_side;
    return upper_first ? GridStep{second_side, first_side} : GridStep{first_side, second_side};
}
BAPO_HD double mass_at(const GridPoints& grids, const Moments* bins, int k, bool unclipped_only) {
    const int lower = grids.lower_count, upper = grids.upper_count;
    return k < lower
               ? negative_mass(bins, grids.lower, lower, k, unclipped_only)
               : positive_mass(bins + lower + 1, grids.upper, upper, k - lower, unclipped_only);
}
BAPO_HD bool is_below_target(const double* table, const GridPoints& grids, const Target& target,
                             GridStep at) {
    const double neg = table[at.lower], pos = table[grids.lower_count + at.upper];
    return tested_quantity(pos, neg, target.is_ratio) < target.value;
}
BAPO_HD void write_result(const double* table, const GridPoints& grids, GridStep at,
                          const SearchResult& result) {
    const double *const neg = table, *const pos = table + grids.lower_count;
    result.bounds[0] = (float)grids.lower[at.lower];
    result.bounds[1] = (float)grids.upper[at.upper];
    const int last_lower = grids.lower_count - 1, last_upper = grids.upper_count - 1;
    *result.masses = {pos[at.upper], neg[at.lower],   pos[0],
                      neg[0],        pos[last_upper], neg[last_lower]};
}

// The sums over tokens; threads of a GPU count in int, which takes half the registers.
template <typename Count>
struct SumsOfTokens {
    double loss, pg_loss, kl_loss, log_ratio, entropy;
    double pos, neg, pos_start, neg_start, pos_last, neg_last;
    double lower, upper;
    Count tokens, count, clipped, dual_clipped;
    Count tokens_pos, tokens_neg, clipped_pos, clipped_neg, acted;
};
using TokenLossSums = SumsOfTokens<double>;
constexpr int kTokenLossSums = sizeof(TokenLossSums) / sizeof(double);

// Bounds of tokens are float32.
BAPO_HD bool differ(Bounds bounds, Bounds start) {
    return bounds.lower != (float)start.lower || bounds.upper != (float)start.upper;
}

// A value of the caller's output: 0 where masked, NaN where unmasked and not counted.
BAPO_HD float output_value(const TokenLossParams& params, int64_t i, double value) {
    if (params.tokens.counted[i]) return (float)value;
    return params.unmasked && params.unmasked[i] ? NAN : 0.0f;
}

// Adds a token to the sums; writes the gradients of its log-prob and entropy, and its outputs.
template <typename Count>
BAPO_HD void add_token(const TokenLossParams& params, int64_t i, SumsOfTokens<Count>& sums) {
    const TokenInputs& tokens = params.tokens;
    const PolicyOptions& options = params.options;
    if (params.dlog_probs) params.dlog_probs[i] = 0.0;
    if (params.dentropy) params.dentropy[i] = 0.0;
    if (params.dlog_ratios) params.dlog_ratios[i] = 0.0;
    if (params.outputs) {
        params.outputs[i] = output_value(params, i, params.log_probs[i]);
        if (params.entropy) {
            params.outputs[params.count + i] = output_value(params, i, params.entropy[i]);
        }
    }
    if (params.unmasked && params.unmasked[i]) ++sums.tokens;
    if (!tokens.counted[i]) return;

    const bool own_bounds = tokens.lower != nullptr;
    const Bounds bounds = own_bounds ? Bounds{tokens.lower[i], tokens.upper[i]}
                                     : Bounds{params.bounds[0], params.bounds[1]};
    const double log_prob = params.log_probs[i];
    const Token token = token_of(tokens, fields_at(tokens, i), log_prob);
    const double A = token.advantage, weight = tokens.weights[i];
    const double entropy = params.entropy ? params.entropy[i] : 0.0;
    if (params.dentropy) params.dentropy[i] = -weight * options.entropy_coef;
    const Ratio ratio = ratio_at(tokens, i, log_prob, token.old_log_prob);
    const PolicyTerm policy = policy_term(token, ratio, bounds, options);
    // With the gradients stored before anything is added, 128 registers are enough.
    const double dkl = kl_grad(token, options);
    if (params.dlog_ratios) {
        params.dlog_ratios[i] = weight * policy.grad;
        params.dlog_probs[i] = weight * dkl;
    } else if (params.dlog_probs) {
        params.dlog_probs[i] = weight * (policy.grad + dkl);
    }
    const double kl = tokens.ref_log_probs
                          ? kl_term(log_prob, token.ref_log_prob, options.kl_loss_type).value
                          : 0.0;
    double loss = policy.loss;
    if (options.kl_loss_coef != 0.0) loss += options.kl_loss_coef * kl;
    if (options.entropy_coef != 0.0) loss -= options.entropy_coef * entropy;

    sums.loss += weight * loss;
    sums.pg_loss += weight * policy.loss;
    sums.kl_loss += weight * kl;
    ++sums.count;
    sums.clipped += policy.clipped;
    sums.dual_clipped += policy.dual_clipped;
    sums.log_ratio += ratio.log_value;
    sums.entropy += entropy;
    if (own_bounds) {
        sums.lower += bounds.lower;
        sums.upper += bounds.upper;
        sums.acted += differ(bounds, params.start);
    }
    if (A > 0.0 || A < 0.0) {
        const double w = search_weight(tokens, params.uniform_weight, i, token.old_log_prob);
        const double at_bounds = w * contribution(ratio.value, A, bounds, params.unclipped_only);
        const double at_start =
            w * contribution(ratio.value, A, params.start, params.unclipped_only);
        const double at_last = w * contribution(ratio.value, A, params.last, params.unclipped_only);
        if (A > 0.0) {
            sums.pos += at_bounds;
            sums.pos_start += at_start;
            sums.pos_last += at_last;
            ++sums.tokens_pos;
            sums.clipped_pos += policy.clipped;
        } else {
            sums.neg += at_bounds;
            sums.neg_start += at_start;
            sums.neg_last += at_last;
            ++sums.tokens_neg;
            sums.clipped_neg += policy.clipped;
        }
    }
}

BAPO_HD double share_of(double value, double total) { return total == 0.0 ? 0.0 : value / total; }

// The smallest negative mass on the lower grid, where it is monotonic.
BAPO_HD double smallest_negative(const TokenLossSums& total) {
    const double first = total.neg_start, last = total.neg_last;
    return first < last || first != first ? first : last;
}

BAPO_HD void report(const TokenLossParams& params, TokenLossSums total) {
    if (params.masses) {
        const Masses& searched = *params.masses;
        total.pos = searched.pos, total.neg = searched.neg;
        total.pos_start = searched.pos_start, total.neg_start = searched.neg_start;
        total.pos_last = searched.pos_last, total.neg_last = searched.neg_last;
    }
    const double quantity = tested_quantity(total.pos, total.neg, params.target.is_ratio);
    const double count = total.count > 0.0 ? total.count : 1.0;
    Report& out = *params.report;
    out.loss = (float)total.loss;
    out.pg_loss = (float)total.pg_loss;
    out.pg_clipfrac = (float)(total.clipped / count);
    out.pg_clipfrac_pos = (float)share_of(total.clipped_pos, total.tokens_pos);
    out.pg_clipfrac_neg = (float)share_of(total.clipped_neg, total.tokens_neg);
    out.pg_clipfrac_lower = (float)(total.dual_clipped / count);
    out.ppo_kl = (float)(-total.log_ratio / count);
    out.entropy = (float)(total.entropy / count);
    out.kl_loss = (float)total.kl_loss;
    out.bapo_clip_low = params.bounds ? params.bounds[0] : (float)(total.lower / count);
    out.bapo_clip_high = params.bounds ? params.bounds[1] : (float)(total.upper / count);
    out.bapo_pos_share = (float)share_of(total.pos, total.pos + total.neg);
    out.bapo_pos_share_start = (float)share_of(total.pos_start, total.pos_start + total.neg_start);
    out.bapo_pos_share_max =
        (float)share_of(total.pos_last, total.pos_last + smallest_negative(total));
    out.bapo_pos_neg_ratio = (float)tested_quantity(total.pos, total.neg, true);
    out.bapo_saturated = quantity < params.target.value ? 1.0f : 0.0f;
    const bool acted = params.bounds ? differ({params.bounds[0], params.bounds[1]}, params.start)
                                     : total.acted > 0.0;
    out.bapo_acted = acted ? 1.0f : 0.0f;
    out.tokens = (float)(params.unmasked ? total.tokens : total.count);
    out.tokens_pos = (float)total.tokens_pos;
    out.tokens_neg = (float)total.tokens_neg;
    out.live_tokens = (float)total.count;
    out.loss_adds_up = 1.0f;  // the caller shows it where it holds
}

}  // namespace bapo
