// The sample of a row that stands for its gradient, as the kernels of every device draw it: the
// hash and its borders; on params.h. With another hash than bapo_kernels/reference/sampled.py, the
// tests could not compare sets.
#pragma once

#include "params.h"

namespace bapo {

// 24 bits of kIdFactor*id + seed, of an id in the whole vocabulary and the seed of its row; of one
// such sum, or of a vector.
constexpr uint32_t kIdFactor = 0x9E3779B9u;
template <typename Uint>
BAPO_HD Uint hash_of(Uint x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return (x ^ (x >> 16)) >> 8;
}

// An id with hash h is kept if its 2^t is at least h*step + half, which is (h + 0.5)/2^24 of the
// threshold.
struct Borders {
    float step, half;

    static BAPO_HD Borders of(float threshold) {
        return {threshold * 0x1p-24f, threshold * 0x1p-25f};
    }
};

// Below, 1 - p of the labels is mostly rounding, and the mass beside them is summed.
constexpr double kLeastDifference = 0x1p-10;
// Below, borders would be denormals: nothing beside the labels is kept.
constexpr float kLeastThreshold = 0x1p-100f;

// The threshold of a row, in units of its 2^t; 0: its labels alone are kept. `summed` gives the
// mass beside the labels here, in these units. With a shard that is a part, and both may round to
// less.
template <typename F>
BAPO_HD float threshold_of(const SampleParams& params, int64_t row, F summed) {
    const double sum = params.stats[2 * row + 1];
    double beside = params.beside[row];
    if (beside < kLeastDifference) {
        const double here = summed() / sum;
        beside = params.columns.shard && beside > here ? beside : here;
    }
    const auto threshold = (float)(beside / (double)params.samples * sum);
    return threshold >= kLeastThreshold && sum < (double)INFINITY ? threshold : 0.0f;
}

// What the smaller ids that were drawn stand for, of their number and the sum of their t, and of
// the sums of 2^t and t*2^t over all smaller ones.
BAPO_HD Drawn drawn_of(float threshold, int64_t count, double sum_t, double mass,
                       double weighted_mass) {
    if (count == 0) return {threshold, 0.0, 0.0, mass};
    const double part = mass / (double)count;
    return {threshold, part, (weighted_mass - part * sum_t) / (double)count, mass};
}

}  // namespace bapo
