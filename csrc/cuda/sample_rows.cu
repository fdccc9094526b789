// The samples of rows that stand for their gradients, a block per row; on ../sample.h. 2^t must
// have the bits of gradient_of, which compares it with the threshold again.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sample.h"

namespace bapo::cuda {

namespace {

// Four blocks fit on a multiprocessor, so that others run while one waits for its warps.
constexpr int kThreads = 256, kWarps = kThreads / kWarp, kBlocks = 4;
constexpr int kSteps = 4;  // vectors of a lane in a tile, with 8 bits each in a word
// Elements of a warp in a tile: neighbours, so that only warps and their counts need an order.
template <typename T>
constexpr int kSpan = kSteps * kWarp * kVec<T>;

__device__ int own_lane() { return threadIdx.x % kWarp; }
__device__ int own_warp() { return threadIdx.x / kWarp; }

// Replaces each value by its sum over all threads of the block, always added in the same order.
template <typename... Double>
__device__ void add_threads(Double&... values) {
    __shared__ double partials[sizeof...(values)][kWarps];
    add_lanes(values...);
    int number = 0;
    if (own_lane() == 0) ((partials[number++][own_warp()] = values), ...);
    __syncthreads();
    const auto total = [](const double* of_warps) {
        double sum = 0.0;
        for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
        return sum;
    };
    number = 0;
    ((values = total(partials[number++])), ...);
}

// From bits of each lane's vectors, which are a warp apart, to those of four neighbouring vectors.
__device__ uint32_t in_order(uint32_t bits) {
    const int step = own_lane() / 8;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint32_t there = __shfl_sync(kAllLanes, bits, own_lane() % 8 * kSteps + i);
        word |= (there >> 8 * step & 0xff) << 8 * i;
    }
    return word;
}

__device__ int sum_up_to_lane(int value) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int before = __shfl_up_sync(kAllLanes, value, step);
        if (own_lane() >= step) value += before;
    }
    return value;
}

template <typename T, bool kSoftcap, bool kAligned>
class SampledRow {
  public:
    __device__ SampledRow(const SampleParams& params, int64_t index, Scales scales)
        : params_(params),
          index_(index),
          row_(params.rows.logits_at<T>(index)),
          vocab_((int)params.rows.vocab),
          scales_(scales_at(params.rows.transform.at_row(index), scales)),
          origin_((float)params.stats[2 * index]),
          first_(params.columns.shard ? (int)min(params.columns.shard[0], (int64_t)INT_MAX) : 0) {}

    __device__ void draw() {
        const float threshold = threshold_of(params_, index_, [&] { return mass_beside_labels(); });
        const auto seed = (uint32_t)params_.seeds[index_];
        Borders borders = Borders::of(threshold);
        if (threshold == 0.0f) borders.half = NAN;  // nothing is at least NaN: labels alone
        double masses = 0.0, weighted_masses = 0.0, drawn = 0.0, sum_t = 0.0;
        float mass = 0.0f, weighted = 0.0f;
        uint32_t kept = 0;
        int count = 0;
        for_tiles(
            [&](float t, int column, int bit) {
                const float e = exp2_approx(t);
                const auto hash = (float)(int)hash_of((uint32_t)(first_ + column), seed);
                if (e >= fmaf(hash, borders.step, borders.half)) kept |= 1u << bit;
                const float small = e < threshold ? e : 0.0f;
                mass += small;
                weighted = fmaf(small, fmaxf(t, kExp2Floor), weighted);
            },
            [&](int tile, int begin, uint32_t labels) {
                masses += mass, weighted_masses += weighted;
                mass = weighted = 0.0f;
                count += keep(tile, begin, count, kept | labels, labels, [&](float t) {
                    if (exp2_approx(t) < threshold) drawn += 1.0, sum_t += t;
                });
                kept = 0;
            });
        add_threads(masses, weighted_masses, drawn, sum_t);
        if (threadIdx.x != 0) return;
        params_.drawn[index_] = drawn_of(threshold, (int64_t)drawn, sum_t, masses, weighted_masses);
        // Improbable beyond all measure: the row becomes NaN.
        if (count > params_.places) params_.values[index_ * params_.places] = NAN;
        params_.counts[index_] = (int)min((int64_t)count, params_.places);
    }

  private:
    __device__ float exponent(float z) const {
        return (transformed<kSoftcap>(z, scales_) - origin_) * scales_.scale2;
    }

    // Calls f(t, column, bit) for every element but labels, and each(tile, begin, labels) after the
    // span of a warp, with the bits of its labels.
    template <typename F, typename Each>
    __device__ void for_tiles(F f, Each each) const {
        const int64_t K = params_.labels_per_row;
        const int64_t* const labels = params_.labels + index_ * K;
        int64_t next = -1, label;  // the first that no tile has passed
        const auto to_next = [&] { label = ++next < K ? labels[next] : INT64_MAX; };
        to_next();
        for (int tile = 0; tile * kWarps * kSpan<T> < vocab_; ++tile) {
            const int begin = (tile * kWarps + own_warp()) * kSpan<T>;
            const int end = min(begin + kSpan<T>, vocab_);
            uint32_t marks = 0;
            if (begin < end) {
                uint4 raw[kSteps];
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const int at = begin + (step * kWarp + own_lane()) * kVec<T>;
                    raw[step] = load_elements<T, kAligned>(row_, at, vocab_, -kInf);
                }
                while (label < begin) to_next();
                for (; label < end; to_next()) {
                    const int vector = ((int)label - begin) / kVec<T>;
                    const int element = ((int)label - begin) % kVec<T>;
                    if (vector % kWarp != own_lane()) continue;
                    marks |= 1u << (vector / kWarp * 8 + element);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step == vector / kWarp) raw[step] = without(raw[step], element, T{});
                    }
                }
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    float z[kVec<T>];
                    unpack(raw[step], z, T{});
#pragma unroll
                    for (int i = 0; i < kVec<T>; ++i) {
                        const int column = begin + (step * kWarp + own_lane()) * kVec<T> + i;
                        f(exponent(z[i]), column, 8 * step + i);
                    }
                }
            }
            each(tile, begin, marks);
        }
    }

    __device__ double mass_beside_labels() const {
        double masses = 0.0;
        float mass = 0.0f;
        for_tiles([&](float t, int, int) { mass += exp2_approx(t); },
                  [&](int, int, uint32_t) { masses += mass, mass = 0.0f; });
        add_threads(masses);
        return masses;
    }

    // Writes the ids and logits of a tile from place `count` on, ascending, and returns how many
    // there are; calls f(t) for those that are no labels.
    template <typename F>
    __device__ int keep(int tile, int begin, int count, uint32_t kept, uint32_t labels, F f) const {
        constexpr int kIsLabel = 1 << 15;
        __shared__ int counts[2][kWarps];  // in turns: one barrier per tile is enough
        __shared__ uint16_t lists[kWarps][kSpan<T>];
        uint16_t* const list = lists[own_warp()];
        const bool has_labels = __ballot_sync(kAllLanes, labels != 0) != 0;
        kept = in_order(kept);
        labels = has_labels ? in_order(labels) : 0;
        int place = sum_up_to_lane(__popc(kept));
        const int mine = __shfl_sync(kAllLanes, place, kWarp - 1);
        if (own_lane() == 0) counts[tile % 2][own_warp()] = mine;
        __syncthreads();
        const int of_warp = own_lane() < kWarps ? counts[tile % 2][own_lane()] : 0;
        const int all = __reduce_add_sync(kAllLanes, of_warp);
        count += __reduce_add_sync(kAllLanes, own_lane() < own_warp() ? of_warp : 0);
        place -= __popc(kept);
        for (; kept != 0; kept &= kept - 1) {
            const int bit = __ffs(kept) - 1;
            const int element = (own_lane() * kSteps + bit / 8) * kVec<T> + bit % 8;
            list[place++] = (uint16_t)(element | (labels >> bit & 1) * kIsLabel);
        }
        __syncwarp();
        for (int k = own_lane(); k < mine; k += kWarp) {
            const int column = begin + list[k] % kIsLabel;
            const float z = to_float(row_[column]);
            if (count + k < params_.places) {
                const int64_t at = index_ * params_.places + count + k;
                params_.ids[at] = first_ + column;
                params_.values[at] = z;
            }
            if (list[k] < kIsLabel) f(exponent(z));
        }
        return all;
    }

    const SampleParams& params_;
    int64_t index_;
    const T* row_;
    int vocab_;
    Scales scales_;
    float origin_;
    int first_;
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
