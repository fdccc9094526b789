// The next rows of a cluster, and the decision of a warp on a row; on row_math.cuh. Every block
// decides for itself: from other values, the parts of a gradient would not match.
#pragma once

#include "row_math.cuh"

namespace bapo::cuda {

// Bit k tells whether row first + k*step is counted.
__device__ inline uint32_t counted_rows(const bool* counted, int64_t first, int64_t step,
                                        int64_t count) {
    const int64_t row = first + (threadIdx.x % kWarp) * step;
    return __ballot_sync(kAllLanes, row < count && counted[row]);
}

struct Decisions {  // in shared memory
    BoundsRange range;
    TokenFields fields[kWarp];  // of the cluster's next 32 rows
    SecondPass pass;
    float z_label;
};

// The cluster's next 32 rows, as a bit of both masks and a lane for each.
struct NextRows {
    uint32_t counted;
    uint32_t kept;  // for a second pass: their gradient may not be zero
    int label;
    float temperature;
    float scale2;
};
// Loads what the decisions need, so that they do not wait for it.
__device__ inline NextRows next_rows(const RowPassParams& params, Scales scales, int64_t first,
                                     int64_t step, int64_t count, int vocab,
                                     TokenFields (&fields)[kWarp]) {
    const PolicyOptions& options = params.options;
    const bool other_terms = options.kl_loss_coef != 0.0 || options.entropy_coef != 0.0;
    const bool gradients = params.rows.grad != nullptr;
    const uint32_t counted = counted_rows(params.tokens.counted, first, step, count);
    const int lane = threadIdx.x % kWarp;
    const int64_t row = first + lane * step;
    const bool mine = counted >> lane & 1;
    const bool kept = mine && gradients && (other_terms || params.tokens.advantages[row] != 0);
    const int64_t label = mine ? params.labels[row] : -1;
    const Transform& transform = params.rows.transform;
    const bool own = mine && transform.temperatures != nullptr;
    const float temperature = own ? transform.temperatures[row] : 1.0f;
    const NextRows next{counted, __ballot_sync(kAllLanes, kept), label_index(label, vocab),
                        temperature, own ? scale2_of(transform.at(temperature)) : scales.scale2};
    if (threadIdx.x < kWarp) {
        if (mine && gradients) shared_store(&fields[lane], fields_at(params.tokens, row));
    }
    return next;
}

// Decides on the k-th of the next rows.
__device__ inline void decide_row(const RowPassParams& params, Decisions& shared, int64_t index,
                                  int k, const RowSums& total, const Label& label,
                                  const Transform& transform, Scales scales, bool first_rank) {
    const bool gradients = params.rows.grad != nullptr;
    const bool first_lane = threadIdx.x % kWarp == 0;
    const bool first = first_lane && (first_rank || !gradients);
    const RowStatistics row = row_statistics(params, index, total, label, transform, scales, first);
    if (!gradients) return;
    const SecondPass pass =
        decided_pass(params, index, shared_load(&shared.range), shared_load(&shared.fields[k]), row,
                     label, transform, first);
    if (first_lane) shared_store(&shared.pass, pass);
}

}  // namespace bapo::cuda
