// Both passes over the values of a row's set, by a warp or by a block; on row_math.cuh, so that
// sets and whole rows have the same bits.
#pragma once

#include "row_math.cuh"
#include "sampling_sets.h"

namespace bapo::cuda {

constexpr int kSetWarps = kRowsPerBlock;  // of a block; two blocks leave a thread 128 registers
constexpr int64_t kLongSet = 8 << 10;     // the size from which all of them share a row

// The warps that share a row.
template <int kWarps>
struct Team {
    static constexpr int kThreads = kWarps * kWarp;
    __device__ static int thread() { return (int)threadIdx.x % kThreads; }
    __device__ static int warp() { return thread() / kWarp; }
    __device__ static void sync() { kWarps == 1 ? __syncwarp() : __syncthreads(); }
};

// Calls f.operator()<Team>(row) with a row for each warp, then for all warps with those of long
// sets.
template <typename F>
__device__ void for_sets(const Sets& sets, F f) {
    const int64_t first = (int64_t)blockIdx.x * kSetWarps;
    const int count = (int)min(sets.rows - first, (int64_t)kSetWarps), warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    uint32_t rows =
        __ballot_sync(kAllLanes, lane < count && set_of(sets, first + lane).size >= kLongSet);
    if (warp < count && !(rows >> warp & 1)) f.template operator()<Team<1>>(first + warp);
    for (; rows != 0; rows &= rows - 1) {
        f.template operator()<Team<kSetWarps>>(first + __ffs(rows) - 1);
        __syncthreads();  // before the sums of the next row
    }
}

// The elements of a set that a warp holds in registers. A warp reads neighbours: element i of
// vector v of a lane is element (4v + i)*32 + lane of the group.
struct Group {
    static constexpr int kVectors = 8;
    static constexpr int kPerVector = kVec<float> * kWarp;
    static constexpr int kSize = kVectors * kPerVector;

    uint4 vectors[kVectors];

    __device__ static int index(int vector, int element) {
        return (vector * kVec<float> + element) * kWarp + (int)(threadIdx.x % kWarp);
    }
    // -inf beyond the end of the set.
    __device__ void load(const float* values, int64_t count) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float z[kVec<float>];
#pragma unroll
            for (int i = 0; i < kVec<float>; ++i) {
                z[i] = index(v, i) < count ? values[index(v, i)] : -kInf;
            }
            vectors[v] = pack(z, 0.0f);
        }
    }
    // The sums of this lane, without the element at `label` if the group has it.
    template <bool kSoftcap>
    __device__ RowSums sums(int64_t count, int64_t label, Scales scales) const {
        const bool mine = label >= 0 && label < kSize && label % kWarp == threadIdx.x % kWarp;
        const int at = mine ? (int)label / kPerVector : -1;
        const int element = (int)(label / kWarp % kVec<float>);
        Lane<float, kSoftcap> lane;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            uint4 raw[1] = {vectors[v]};
            if (v * kPerVector < count) lane.add(raw, at - v, element, scales);
        }
        return RowSums::of(lane);
    }
};

// A row with a set, or with broken offsets, whose set is then empty.
template <bool kSoftcap, typename Team>
class SetRow {
  public:
    __device__ SetRow(const float* values, const SetOfRow& set, int64_t position,
                      const Transform& transform, Scales scales)
        : values_(values + set.begin),
          size_(set.size),
          position_(set.broken ? kNoToken : position),
          transform_(transform),
          scales_(scales_at(transform, scales)) {
        const bool found = position_ >= 0 && position_ < size_;
        const float z = found ? values_[position_] : (float)log_prob_without_position(position_);
        label_ = label_of<kSoftcap>(found ? (int)position_ : -1, z, transform_, scales_);
    }

    __device__ RowStatistics first_pass(const RowPassParams& params, int64_t row) {
        RowSums mine{-kInf, 0.0, 0.0};
        for (int64_t first = own_; first < size_; first += kStride) {
            last_.load(values_ + first, size_ - first);
            mine.add(last_.template sums<kSoftcap>(size_ - first, label_.index - first, scales_),
                     scales_.scale2);
        }
        const RowSums total = total_of_team(mine);
        const bool first = Team::thread() == 0;
        RowStatistics statistics =
            row_statistics(params, row, total, label_, transform_, scales_, first);
        if (label_.index < 0) {
            // A row with a value that is NaN has no log-prob either.
            const double none = total.sum - total.sum;
            statistics.log_prob = log_prob_without_position(position_) + none;
            if (first) params.log_probs[row] = statistics.log_prob;
        }
        return statistics;
    }

    __device__ SecondPass decided(const RowPassParams& params, int64_t row,
                                  const RowStatistics& statistics) const {
        return decided_pass(params, row, bounds_range(params), fields_at(params.tokens, row),
                            statistics, label_, transform_, Team::thread() == 0);
    }
    __device__ SecondPass gradient(const RowGradientParams& params, int64_t row) {
        const int64_t last = last_group();
        if (last >= 0) last_.load(values_ + last, size_ - last);
        return gradient_pass(statistics_at(params, row, label_, transform_), label_,
                             coefficients_at(params, row), transform_.slope);
    }

    // Writes gradients, perhaps over the values; the last group first, which is still in registers.
    template <bool kSampled = false>
    __device__ void second_pass(const SecondPass& pass, float* to, const SmallIds& small = {}) {
        if (pass.action == SecondPass::kNothing || size_ == 0) return;
        Team::sync();  // after every lane has read the label's value
        for (int64_t first = last_group(); first >= 0; first -= kStride) {
            if (first != last_group()) last_.load(values_ + first, size_ - first);
            write<kSampled>(pass, first, to, small);
        }
    }

  private:
    // The warps take groups in turn; the start of the last one of this warp is negative if it has
    // none.
    static constexpr int kStride = Team::kThreads / kWarp * Group::kSize;
    __device__ int64_t last_group() const {
        return own_ + (size_ - 1 - own_ + kStride) / kStride * kStride - kStride;
    }

    __device__ RowSums total_of_team(const RowSums& mine) const {
        const RowSums total = warp_total(mine, scales_.scale2);
        if constexpr (Team::kThreads == kWarp) return total;
        __shared__ PartialSums<Team::kThreads / kWarp> partials;
        if (threadIdx.x % kWarp == 0) partials.store(Team::warp(), total);
        __syncthreads();
        return total_of(partials, Team::kThreads / kWarp, scales_.scale2);
    }

    template <bool kSampled>
    __device__ void write(const SecondPass& pass, int64_t first, float* to,
                          const SmallIds& small) const {
#pragma unroll
        for (int v = 0; v < Group::kVectors; ++v) {
            float z[kVec<float>];
            unpack(last_.vectors[v], z, 0.0f);
#pragma unroll
            for (int i = 0; i < kVec<float>; ++i) {
                const int64_t at = first + Group::index(v, i);
                float dz = 0.0f;
                if (pass.action == SecondPass::kGradient) {
                    dz = at == label_.index
                             ? pass.label_grad
                             : gradient_of<kSoftcap, true, kSampled>(z[i], pass, scales_, small);
                }
                if (at < size_) to[at] = dz;
            }
        }
    }

    const float* values_;
    int own_ = Team::warp() * Group::kSize;
    int64_t size_;
    int64_t position_;
    Transform transform_;
    Scales scales_;
    Label label_;
    Group last_;
};

// Both passes over one row; a row without a set is left alone.
template <bool kSoftcap, typename Team>
__device__ void pass_over_set(const RowPassParams& params, int64_t row, Scales scales) {
    const LogitRows& rows = params.rows;
    const bool first = Team::thread() == 0;
    const SetOfRow set = set_of(rows.sets, row);
    if (set.absent()) {
        if (first && params.undecided) params.undecided[row] = 0;
    } else if (!params.tokens.counted[row]) {
        if (first) finish_skipped(params, row);
        if (rows.grad == nullptr) return;
        float* const grad = rows.dvalues() + set.begin;
        for (int64_t k = Team::thread(); k < set.size; k += Team::kThreads) grad[k] = 0.0f;
    } else {
        SetRow<kSoftcap, Team> set_row(rows.values(), set, params.labels[row],
                                       rows.transform.at_row(row), scales);
        const RowStatistics statistics = set_row.first_pass(params, row);
        if (rows.grad == nullptr) return;
        set_row.second_pass(set_row.decided(params, row, statistics), rows.dvalues() + set.begin);
    }
}

}  // namespace bapo::cuda
