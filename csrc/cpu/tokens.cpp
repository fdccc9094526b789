// Kernels over tokens: their flat inputs, contributions to the search, the search, the loss, on the
// mathematics shared with CUDA. Sums are of chunks of fixed size, then of the chunks in order: with
// chunks that depend on the number of threads, so would the bits.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "launch.h"
#include "prepare.h"
#include "sampling_sets.h"
#include "sequences.h"

namespace bapo::cpu {

namespace {

int fill_grid(const Grid& grid, double* points) {
    double sum = grid.start;
    for (int k = 0; k < grid.count; ++k, sum += grid.step) points[k] = grid.point(k, sum);
    return grid.count;
}
GridPoints points_of(const Grids& grids) {
    GridPoints points;
    points.lower_count = fill_grid(grids.lower, points.lower);
    points.upper_count = fill_grid(grids.upper, points.upper);
    return points;
}

template <typename F>
void for_chunk(int64_t chunk, int64_t count, F f) {
    const int64_t begin = chunk * kTokensPerChunk, end = std::min(begin + kTokensPerChunk, count);
    for (int64_t i = begin; i < end; ++i) f(i);
}

int64_t bin_of_value(const SortSetsParams& params, int64_t k) {
    const Columns& columns = params.columns;
    const int64_t column = params.sets.token_ids[k] - (columns.shard ? columns.shard[0] : 0);
    return std::clamp<int64_t>(column, -1, columns.count) + 1;
}

}  // namespace

void count_tokens(const PrepareParams& params, TokenCounts& counts, int64_t* sequence_counts) {
    for (int64_t k = 0; params.offsets.data && k <= params.sequences; ++k) {
        counts.bad_offsets += offset_is_bad(params, k);
    }
    for (int64_t i = 0; i < params.count(); ++i) {
        const Position at = position_of(params, i);
        if (!is_unmasked_and_inside(params, at)) continue;
        counts.tokens += 1;
        counts.sequences += sequence_counts[at.sequence]++ == 0;
    }
}

void prepare_chunk(const PrepareParams& params, int64_t chunk, const TokenCounts& counts,
                   const int64_t* sequence_counts) {
    const double weight = shared_weight(params, counts);
    for_chunk(chunk, params.count(),
              [&](int64_t i) { prepare_token(params, i, counts, sequence_counts, weight); });
}

double* sums_of_equal(const int64_t* labels, const double* values, int64_t K) {
    static thread_local std::vector<double> sums;
    static thread_local std::vector<std::pair<int64_t, int64_t>> order;  // by label, then place
    sums.assign(values, values + K);
    if (K == 1) return sums.data();  // short rows of sampling masks would notice the rest
    order.resize(K);
    for (int64_t k = 0; k < K; ++k) order[k] = {labels[k], k};
    std::sort(order.begin(), order.end());
    for (auto first = order.begin(); first != order.end();) {
        double sum = 0.0;
        auto end = first;
        for (; end != order.end() && end->first == first->first; ++end) sum += values[end->second];
        for (; first != end; ++first) sums[first->second] = sum;
    }
    return sums.data();
}

void find_labels_chunk(const FindLabelsParams& params, int64_t chunk) {
    const int64_t count = params.sets.rows * params.labels_per_row;
    for_chunk(chunk, count, [&](int64_t i) { find_label(params, i); });
}

void count_columns(const SortSetsParams& params, int64_t begin, int64_t end, int64_t* counts) {
    for (int64_t k = begin; k < end; ++k) ++counts[bin_of_value(params, k)];
}
void sort_values(const SortSetsParams& params, int64_t begin, int64_t end, int64_t* places) {
    const Sets& sets = params.sets;
    const int64_t* const first_behind =
        std::upper_bound(sets.offsets, sets.offsets + sets.rows, begin);
    int64_t row = std::max<int64_t>(first_behind - sets.offsets - 1, 0);
    for (int64_t k = begin; k < end; ++k) {
        while (row + 1 < sets.rows && sets.offsets[row + 1] <= k) ++row;
        const int64_t place = places[bin_of_value(params, k)]++;
        params.order[place] = k;
        params.rows[place] = (int32_t)row;
    }
}

void sequence_mean(const SequenceMeanParams& params, int64_t k) {
    const Span span = span_of(params.sequences, k);
    SequenceSum total{};
    for (int64_t i = span.begin; i < span.end; ++i) total.add(params, i);
    for (int64_t i = span.begin; i < span.end; ++i) write_mean(params, i, total.mean());
}

void contributions_chunk(const ContributionParams& params, int64_t chunk, Moments* bins) {
    const GridPoints grids = points_of(params.grids);
    for_chunk(chunk, params.count, [&](int64_t i) {
        const Candidate token = candidate(params, i);
        if (token.advantage != 0.0) bins[bin_of(grids, params.grids, token)] += moments_of(token);
    });
}

void contributions_reduce(const ContributionParams& params, const Moments* partials,
                          int64_t chunks) {
    const GridPoints grids = points_of(params.grids);
    const int bins = params.grids.bins(), points = params.grids.points();
    Moments total[2 * (kMaxGridPoints + 1)] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int b = 0; b < bins; ++b) total[b] += partials[chunk * bins + b];
    }
    std::fill(params.table, params.table + params.ranks * points, 0.0);
    for (int k = 0; k < points; ++k) {
        params.table[params.rank * points + k] = mass_at(grids, total, k, params.unclipped_only);
    }
}

void solve(const SolveParams& params) {
    const GridPoints grids = points_of(params.grids);
    double table[2 * kMaxGridPoints] = {};
    const int points = params.grids.points();
    for (int64_t rank = 0; rank < params.ranks; ++rank) {
        for (int i = 0; i < points; ++i) table[i] += params.table[rank * points + i];
    }
    const auto step = [&](int k) { return step_of_search(grids, params.target.upper_first, k); };
    int k = 0;
    while (k + 2 < points && is_below_target(table, grids, params.target, step(k))) ++k;
    write_result(table, grids, step(k), params.result);
}

void token_loss_chunk(const TokenLossParams& params, int64_t chunk, TokenLossSums& sums) {
    sums = {};
    for_chunk(chunk, params.count, [&](int64_t i) { add_token(params, i, sums); });
}

void token_loss_reduce(const TokenLossParams& params, const TokenLossSums* partials,
                       int64_t chunks) {
    TokenLossSums total{};
    auto* const out = reinterpret_cast<double*>(&total);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto* const part = reinterpret_cast<const double*>(partials + chunk);
        for (int k = 0; k < kTokenLossSums; ++k) out[k] += part[k];
    }
    report(params, total);
}

}  // namespace bapo::cpu
