// Kernels over the values of sampling masks, and between these and rows of logits. A warp takes a
// row, or a block one whose set is long.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sampling_set_row.cuh"

namespace bapo::cuda {

namespace {

constexpr int kThreads = kSetWarps * kWarp, kBlocks = 2;
constexpr int kAtOnce = 4;  // ids of a lane, whose loads overlap

int64_t blocks_of(int64_t count, int per_block) { return (count + per_block - 1) / per_block; }

__global__ void __launch_bounds__(kThreads)
    find_labels_kernel(const __grid_constant__ FindLabelsParams params) {
    const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (i < params.sets.rows * params.labels_per_row) find_label(params, i);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gather_sets_kernel(const __grid_constant__ MoveSetsParams params) {
    for_sets(params.sets, [&]<typename Team>(int64_t row) {
        if (!params.counted[row]) return;
        const SetOfRow set = set_of(params.sets, row);
        const T* const logits = params.rows.logits_at<T>(row);
        for (int64_t first = Team::thread(); first < set.size; first += kAtOnce * Team::kThreads) {
            float z[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int64_t at = first + i * Team::kThreads;
                if (at >= set.size) continue;
                const int64_t column = column_of(params.sets, params.columns, set, set.begin + at);
                z[i] = column >= 0 ? to_float(logits[column]) : value_without_column(column);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int64_t at = first + i * Team::kThreads;
                if (at < set.size) params.values[set.begin + at] = z[i];
            }
        }
    });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scatter_sets_kernel(const __grid_constant__ MoveSetsParams params) {
    for_sets(params.sets, [&]<typename Team>(int64_t row) {
        if (!params.counted[row]) return;
        const SetOfRow set = set_of(params.sets, row);
        T* const grad = params.rows.grad_at<T>(row);
        for (int64_t first = Team::thread(); first < set.size; first += kAtOnce * Team::kThreads) {
            int64_t columns[kAtOnce];
            float dz[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int64_t at = first + i * Team::kThreads, k = set.begin + at;
                const bool inside = at < set.size;
                columns[i] = inside ? column_of(params.sets, params.columns, set, k) : kElsewhere;
                dz[i] = inside ? params.values[k] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (columns[i] >= 0) grad[columns[i]] = from_float<T>(dz[i]);
            }
        }
    });
}

template <bool kSoftcap>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sets_pass_kernel(const __grid_constant__ RowPassParams params, Scales scales) {
    for_sets(params.rows.sets, [&]<typename Team>(int64_t row) {
        pass_over_set<kSoftcap, Team>(params, row, scales);
    });
}

template <bool kSoftcap, bool kSampled>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sets_gradient_kernel(const __grid_constant__ RowGradientParams params, Scales scales) {
    const LogitRows& rows = params.rows;
    for_sets(rows.sets, [&]<typename Team>(int64_t row) {
        if (params.only && !params.only[row]) return;
        const SetOfRow set = set_of(rows.sets, row);
        if (set.size == 0) return;
        SetRow<kSoftcap, Team> set_row(rows.values(), set, params.labels[row],
                                       rows.transform.at_row(row), scales);
        const SecondPass pass = set_row.gradient(params, row);
        const auto small = kSampled ? SmallIds::of(params.drawn[row], pass.a) : SmallIds{};
        set_row.template second_pass<kSampled>(pass, rows.dvalues() + set.begin, small);
    });
}

}  // namespace

const char* find_labels(const FindLabelsParams& params, void* stream) {
    const int64_t count = params.sets.rows * params.labels_per_row;
    return launch(find_labels_kernel, blocks_of(count, kThreads), kThreads, stream, params);
}

const char* gather_sets(const MoveSetsParams& params, void* stream) {
    return over_rows([&]<typename T>() { return gather_sets_kernel<T>; }, params.rows, stream,
                     params);
}

const char* scatter_sets(const MoveSetsParams& params, void* stream) {
    return over_rows([&]<typename T>() { return scatter_sets_kernel<T>; }, params.rows, stream,
                     params);
}

const char* sets_pass(const RowPassParams& params, void* stream) {
    const Transform& transform = params.rows.transform;
    return launch(transform.softcapped ? sets_pass_kernel<true> : sets_pass_kernel<false>,
                  blocks_of(params.rows.rows, kSetWarps), kThreads, stream, params,
                  scales_of(transform));
}

const char* sets_gradient(const RowGradientParams& params, void* stream) {
    const Transform& transform = params.rows.transform;
    const auto with_softcap = [&]<bool kSampled>() {
        return transform.softcapped ? sets_gradient_kernel<true, kSampled>
                                    : sets_gradient_kernel<false, kSampled>;
    };
    const auto kernel =
        params.drawn ? with_softcap.operator()<true>() : with_softcap.operator()<false>();
    return launch(kernel, blocks_of(params.rows.rows, kSetWarps), kThreads, stream, params,
                  scales_of(transform));
}

}  // namespace bapo::cuda
