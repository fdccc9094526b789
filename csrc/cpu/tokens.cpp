// Kernels over tokens whose log-probs are known: contributions to the search, the search, the loss.
// Sums are of chunks of fixed size, then of the chunks in order: the same bits for any number of
// threads.

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

}  // namespace

int64_t contribution_bins(const ContributionParams& params) {
    const Grids grids(params.lower, params.upper);
    return grids.lower_count + 1 + grids.upper_count + 1;
}

void contributions_chunk(const ContributionParams& params, int64_t chunk, Moments* bins) {
    const Grids grids(params.lower, params.upper);
    Moments* const lower_bins = bins;
    Moments* const upper_bins = bins + grids.lower_count + 1;
    const int64_t end = chunk_end(chunk, params.count);
    for (int64_t i = chunk * kTokensPerChunk; i < end; ++i) {
        const auto [r, A, w] = candidate(params, i);
        if (A == 0.0) continue;
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
    double* const neg = params.table;
    double* const pos = params.table + grids.lower_count;
    add_negative(total, grids.lower, grids.lower_count, params.gradient, neg);
    add_positive(total + grids.lower_count + 1, grids.upper, grids.upper_count, params.gradient,
                 pos);
}

void solve(const double* table, const Grid& lower, const Grid& upper, const TargetParams& target,
           float* bounds, double* masses) {
    const Grids grids(lower, upper);
    search_table(table, grids.lower, grids.lower_count, grids.upper, grids.upper_count, target,
                 bounds, masses);
}

void policy_chunk(const PolicyParams& params, int64_t chunk, PolicySums& sums) {
    const int64_t end = chunk_end(chunk, params.count);
    sums = {};
    for (int64_t i = chunk * kTokensPerChunk; i < end; ++i) add_token(params, i, sums);
}

void policy_reduce(const PolicyParams& params, const PolicySums* partials, int64_t chunks) {
    PolicySums total{};
    auto* const out = reinterpret_cast<double*>(&total);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto* const part = reinterpret_cast<const double*>(partials + chunk);
        for (int k = 0; k < kPolicySums; ++k) out[k] += part[k];
    }
    report(params, total);
}

}  // namespace bapo::cpu
