// Kernels over tokens whose log-probs are known: contributions to the search, the search, the loss.
// Sums go over chunks of fixed size, and over the chunks in order: the same bits for any threads.

#include <cmath>

#include "launch.h"

namespace bapo::cpu {

namespace {

struct Grids {
    double lower[kMaxGridPoints];
    double upper[kMaxGridPoints];
    int lower_count;
    int upper_count;

    Grids(const Grid& lower_grid, const Grid& upper_grid)
        : lower_count(fill_grid(lower_grid, lower)), upper_count(fill_grid(upper_grid, upper)) {}
};

int64_t chunk_end(int64_t chunk, int64_t count) {
    const int64_t end = (chunk + 1) * kTokensPerChunk;
    return end < count ? end : count;
}

double old_log_prob(const TokenInputs& tokens, int64_t i, double log_prob) {
    return tokens.old_log_probs ? tokens.old_log_probs[i] : on_policy_old(log_prob);
}

// Weight of a token in P and N.
double search_weight(bool uniform, const float* rollout_log_probs, int64_t i, double old) {
    return uniform ? 1.0 : std::exp(rollout_log_probs ? (double)rollout_log_probs[i] : old);
}

double ratio_or(double value, double total, double otherwise) {
    return total == 0.0 ? otherwise : value / total;
}

}  // namespace

int64_t contribution_bins(const ContributionParams& params) {
    const Grids grids(params.lower, params.upper);
    return grids.lower_count + 1 + grids.upper_count + 1;
}

void contributions_chunk(const ContributionParams& params, int64_t chunk, Moments* bins) {
    const Grids grids(params.lower, params.upper);
    Moments* const lower_bins = bins;
    Moments* const upper_bins = bins + grids.lower_count + 1;
    const TokenInputs& tokens = params.tokens;
    const int64_t end = chunk_end(chunk, params.count);
    for (int64_t i = chunk * kTokensPerChunk; i < end; ++i) {
        const double A = tokens.advantages[i];
        if (!tokens.live[i] || !(A > 0.0 || A < 0.0)) continue;
        const double log_prob = params.log_probs[i], old = old_log_prob(tokens, i, log_prob);
        const double r = policy_ratio(log_prob, old).value;
        const double w = search_weight(params.uniform_weight, params.rollout_log_probs, i, old);
        Moments& bin = A > 0.0 ? upper_bins[count_below(grids.upper, grids.upper_count, r)]
                               : lower_bins[count_not_above(grids.lower, grids.lower_count, r)];
        const double mass = w * std::fabs(A);
        bin.ratio_mass += mass * r;
        bin.mass += mass;
    }
}

void contributions_reduce(const ContributionParams& params, const Moments* partials,
                          int64_t chunks) {
    const Grids grids(params.lower, params.upper);
    const int64_t count = grids.lower_count + 1 + grids.upper_count + 1;
    Moments total[2 * (kMaxGridPoints + 1)] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t b = 0; b < count; ++b) {
            total[b].ratio_mass += partials[chunk * count + b].ratio_mass;
            total[b].mass += partials[chunk * count + b].mass;
        }
    }
    double* const N = params.table;
    double* const P = params.table + grids.lower_count;
    add_negative(total, grids.lower, grids.lower_count, params.gradient, N);
    add_positive(total + grids.lower_count + 1, grids.upper, grids.upper_count, params.gradient, P);
}

void solve(const double* table, const Grid& lower, const Grid& upper, const TargetParams& target,
           float* bounds, double* shares) {
    const Grids grids(lower, upper);
    const double* const N = table;
    const double* const P = table + grids.lower_count;
    int at_lower, at_upper;
    solve_bounds(P, grids.upper_count, N, grids.lower_count, target.target, target.ratio,
                 target.upper_first, &at_lower, &at_upper);
    bounds[0] = (float)grids.lower[at_lower];
    bounds[1] = (float)grids.upper[at_upper];
    shares[0] = P[at_upper];
    shares[1] = N[at_lower];
    shares[2] = P[0];
    shares[3] = N[0];
}

void policy_chunk(const PolicyParams& params, int64_t chunk, PolicySums& sums) {
    const TokenInputs& tokens = params.tokens;
    const PolicyOptions& options = params.options;
    const Bounds bounds{params.bounds[0], params.bounds[1]};
    const int64_t end = chunk_end(chunk, params.count);
    sums = {};
    for (int64_t i = chunk * kTokensPerChunk; i < end; ++i) {
        if (params.dlog_probs) params.dlog_probs[i] = 0.0;
        if (params.dentropy) params.dentropy[i] = 0.0;
        if (!tokens.live[i]) continue;

        const double log_prob = params.log_probs[i], old = old_log_prob(tokens, i, log_prob);
        const double A = tokens.advantages[i], weight = tokens.weights[i];
        const double entropy = params.entropy ? params.entropy[i] : 0.0;
        const Token token{log_prob, old, tokens.ref_log_probs ? tokens.ref_log_probs[i] : log_prob,
                          A, tokens.is_weights ? tokens.is_weights[i] : 1.0};
        const Ratio ratio = policy_ratio(log_prob, old);
        const PolicyTerm policy = policy_term(token, ratio, bounds, options.clip_ratio_c);
        const double kl = tokens.ref_log_probs
                              ? kl_term(log_prob, token.ref_log_prob, options.kl_loss_type).value
                              : 0.0;
        double loss = policy.loss;
        if (options.kl_loss_coef != 0.0) loss += options.kl_loss_coef * kl;
        if (options.entropy_coef != 0.0) loss -= options.entropy_coef * entropy;

        sums.loss += weight * loss;
        sums.pg_loss += weight * policy.loss;
        sums.kl_loss += weight * kl;
        sums.count += 1.0;
        sums.clipped += policy.clipped;
        sums.dual_clipped += policy.dual_clipped;
        sums.log_ratio += ratio.log_value;
        sums.entropy += entropy;
        if (A > 0.0 || A < 0.0) {
            const double w = search_weight(params.uniform_weight, params.rollout_log_probs, i, old);
            double& at_bounds = A > 0.0 ? sums.P : sums.N;
            double& at_start = A > 0.0 ? sums.P_start : sums.N_start;
            at_bounds += w * contribution(ratio.value, A, bounds, params.gradient);
            at_start += w * contribution(ratio.value, A, params.first, params.gradient);
        }
        if (params.dlog_probs) {
            const double grad = token_grad(token, ratio, bounds, options);
            params.dlog_probs[i] = weight * grad;
        }
        if (params.dentropy) params.dentropy[i] = -weight * options.entropy_coef;
    }
}

void policy_reduce(const PolicyParams& params, const PolicySums* partials, int64_t chunks) {
    PolicySums total{};
    auto* const out = reinterpret_cast<double*>(&total);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto* const part = reinterpret_cast<const double*>(partials + chunk);
        for (size_t k = 0; k < sizeof(PolicySums) / sizeof(double); ++k) out[k] += part[k];
    }
    if (params.shares) {
        total.P = params.shares[0];
        total.N = params.shares[1];
        total.P_start = params.shares[2];
        total.N_start = params.shares[3];
    }
    const double quantity = tested_quantity(total.P, total.N, params.target.ratio);
    const double count = total.count > 0.0 ? total.count : 1.0;
    const double report[] = {
        total.loss,
        total.pg_loss,
        total.clipped / count,
        total.dual_clipped / count,
        -total.log_ratio / count,
        total.entropy / count,
        total.kl_loss,
        params.bounds[0],
        params.bounds[1],
        ratio_or(total.P, total.P + total.N, 0.0),
        ratio_or(total.P_start, total.P_start + total.N_start, 0.0),
        tested_quantity(total.P, total.N, true),
        quantity < params.target.target ? 1.0 : 0.0,
        total.count,
    };
    for (size_t k = 0; k < sizeof report / sizeof *report; ++k) params.report[k] = (float)report[k];
}

}  // namespace bapo::cpu
