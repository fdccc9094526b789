// The samples of rows that stand for their gradients, a block per row; on ../sample.h. 2^t must
// have the bits of gradient_of, which compares it with the threshold again.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sample.h"

namespace bapo::cuda {

namespace {

// With four blocks on a multiprocessor, others run while one waits for all of its warps.
constexpr int kThreads = 256, kWarps = kThreads / kWarp, kBlocks = 4;
// A warp takes neighbouring elements of a tile: so many vectors of each lane, with 8 bits of a word
// each.
constexpr int kSteps = 4;
template <typename T>
constexpr int kSpan = kSteps * kWarp * kVec<T>;

__device__ int own_lane() { return threadIdx.x % kWarp; }
__device__ int own_warp() { return threadIdx.x / kWarp; }

// Replaces each value by its sum over all threads of the block, always added in the same order.
template <typename... Double>
__device__ void add_threads(Double&... values) {
    __shared__ double sums[sizeof...(values)][kWarps];
    add_lanes(values...);
    int i = 0;
    if (own_lane() == 0) ((sums[i++][own_warp()] = values), ...);
    __syncthreads();
    const auto total = [](const double* of_warps) {
        double sum = 0.0;
        for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
        return sum;
    };
    i = 0;
    ((values = total(sums[i++])), ...);
}

// From bits of each lane's vectors, which are a warp apart, to those of four neighbouring ones.
__device__ uint32_t in_order(uint32_t bits) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint32_t others = __shfl_sync(kAllLanes, bits, own_lane() * kSteps % kWarp + i);
        word |= (others >> own_lane() * kSteps / kWarp * 8 & 0xff) << 8 * i;
    }
    return word;
}

template <typename T, bool kSoftcap, bool kAligned>
struct SampledRow {
    const SampleParams& params;
    int64_t index;
    const T* logits;
    int vocab, first;
    Scales scales;
    float origin;

    __device__ SampledRow(const SampleParams& params, int64_t index, Scales of_all)
        : params(params),
          index(index),
          logits(params.rows.logits_at<T>(index)),
          vocab((int)params.rows.vocab),
          first(params.columns.shard ? (int)min(params.columns.shard[0], (int64_t)INT_MAX) : 0),
          scales(scales_at(params.rows.transform.at_row(index), of_all)),
          origin((float)params.stats[2 * index]) {}

    __device__ float exponent(float z) const {
        return (transformed<kSoftcap>(z, scales) - origin) * scales.scale2;
    }

    // Calls f(t, column, bit) for every element but labels, and after each tile
    // each(tile, begin, labels), with the bits of labels in the span of this warp.
    template <typename F, typename Each>
    __device__ void for_tiles(F f, Each each) const {
        const int64_t K = params.labels_per_row;
        const int64_t* const labels = params.labels + index * K;
        int64_t next = -1, label;  // the first one that is not behind
        const auto to_next = [&] { label = ++next < K ? labels[next] : INT64_MAX; };
        to_next();
        for (int tile = 0; tile * kWarps * kSpan<T> < vocab; ++tile) {
            const int begin = (tile * kWarps + own_warp()) * kSpan<T>;
            const int end = min(begin + kSpan<T>, vocab), own = begin + own_lane() * kVec<T>;
            constexpr int kStep = kWarp * kVec<T>;
            uint32_t marks = 0;
            if (begin < end) {
                uint4 raw[kSteps];
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const int at = own + step * kStep;
                    raw[step] = load_elements<T, kAligned>(logits, at, vocab, -kInf);
                }
                while (label < begin) to_next();
                for (; label < end; to_next()) {
                    const int at = (int)label - begin, element = at % kVec<T>;
                    if (at % kStep / kVec<T> != own_lane()) continue;
                    marks |= 1u << (at / kStep * 8 + element);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step == at / kStep) raw[step] = without(raw[step], element, T{});
                    }
                }
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    float z[kVec<T>];
                    unpack(raw[step], z, T{});
#pragma unroll
                    for (int i = 0; i < kVec<T>; ++i) {
                        f(exponent(z[i]), own + step * kStep + i, 8 * step + i);
                    }
                }
            }
            each(tile, begin, marks);
        }
    }

    // By all threads of the block, in all of which it is the same.
    __device__ double mass_beside_labels() const {
        double masses = 0.0;
        float mass = 0.0f;
        for_tiles([&](float t, int, int) { mass += exp2_approx(t); },
                  [&](int, int, uint32_t) { masses += mass, mass = 0.0f; });
        add_threads(masses);
        return masses;
    }

    __device__ void draw() const {
        const float threshold = threshold_of(params, index, [&] { return mass_beside_labels(); });
        const auto seed = (uint32_t)params.seeds[index];
        Borders borders = Borders::of(threshold);
        if (threshold == 0.0f) borders.half = NAN;  // which nothing reaches: labels alone are kept
        double masses = 0.0, weighted_masses = 0.0, drawn = 0.0, sum_t = 0.0;
        float mass = 0.0f, weighted = 0.0f;
        uint32_t kept = 0;
        int count = 0;
        for_tiles(
            [&](float t, int column, int bit) {
                const float e = exp2_approx(t);
                const auto hash =
                    (float)(int)hash_of(kIdFactor * (uint32_t)(first + column) + seed);
                if (e >= fmaf(hash, borders.step, borders.half)) kept |= 1u << bit;
                const float small = e < threshold ? e : 0.0f;
                mass += small;
                weighted = fmaf(small, fmaxf(t, kExp2Floor), weighted);
            },
            [&](int tile, int begin, uint32_t labels) {
                masses += mass, weighted_masses += weighted;
                count += keep(tile, begin, count, kept | labels, labels, [&](float t) {
                    if (exp2_approx(t) < threshold) drawn += 1.0, sum_t += t;
                });
                mass = weighted = 0.0f, kept = 0;
            });
        add_threads(masses, weighted_masses, drawn, sum_t);
        if (threadIdx.x != 0) return;
        params.drawn[index] = drawn_of(threshold, (int64_t)drawn, sum_t, masses, weighted_masses);
        // Improbable beyond all measure: the row becomes NaN.
        if (count > params.places) params.values[index * params.places] = NAN;
        params.counts[index] = (int)min((int64_t)count, params.places);
    }

    // Writes ids and logits of a tile, ascending, from place `count` on; returns how many there
    // are. Calls f(t) for those that are no labels.
    template <typename F>
    __device__ int keep(int tile, int begin, int count, uint32_t kept, uint32_t labels, F f) const {
        constexpr int kLabel = 1 << 15;
        __shared__ int counts[2][kWarps];  // in turns, so that one barrier per tile is enough
        __shared__ uint16_t lists[kWarps][kSpan<T>];
        uint16_t* const list = lists[own_warp()];
        kept = in_order(kept);
        labels = __ballot_sync(kAllLanes, labels != 0) ? in_order(labels) : 0;
        int place = __popc(kept);
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const int before = __shfl_up_sync(kAllLanes, place, step);
            if (own_lane() >= step) place += before;
        }
        const int mine = __shfl_sync(kAllLanes, place, kWarp - 1);
        if (own_lane() == 0) counts[tile % 2][own_warp()] = mine;
        __syncthreads();
        const int of_warp = own_lane() < kWarps ? counts[tile % 2][own_lane()] : 0;
        const int all = __reduce_add_sync(kAllLanes, of_warp);
        count += __reduce_add_sync(kAllLanes, own_lane() < own_warp() ? of_warp : 0);
        for (place -= __popc(kept); kept != 0; kept &= kept - 1) {
            const int bit = __ffs(kept) - 1;
            const int at = (own_lane() * kSteps + bit / 8) * kVec<T> + bit % 8;
            list[place++] = (uint16_t)(labels >> bit & 1 ? at | kLabel : at);
        }
        __syncwarp();
        for (int k = own_lane(); k < mine; k += kWarp) {
            const int column = begin + list[k] % kLabel;
            const float z = to_float(logits[column]);
            if (count + k < params.places) {
                params.ids[index * params.places + count + k] = first + column;
                params.values[index * params.places + count + k] = z;
            }
            if (list[k] < kLabel) f(exponent(z));
        }
        return all;
    }
};

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sample_rows_kernel(const __grid_constant__ SampleParams params, Scales scales) {
    SampledRow<T, kSoftcap, kAligned>(params, blockIdx.x, scales).draw();
}

}  // namespace

const char* sample_rows(const SampleParams& params, void* stream) {
    return with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(sample_rows_kernel<T, kSoftcap, kAligned>, params.rows.count(), kThreads,
                      stream, params, scales_of(params.rows.transform));
    });
}

}  // namespace bapo::cuda
