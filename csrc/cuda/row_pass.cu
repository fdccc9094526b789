// Kernels with one block per row, whose second pass reads from L1 or L2: the row pass for GPUs
// without clusters, for short rows and for rows that no cluster holds, the gradient of rows whose
// statistics are known, and the scaling of a gradient.

#include <algorithm>
#include <bit>

#include "cluster_plan.h"
#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

// Two blocks of kThreads fill a multiprocessor; the row pass takes up to kMostThreads.
constexpr int kThreads = 512, kMostThreads = 1024;

template <typename T, bool kSoftcap, bool kAligned>
__device__ Lane<T, kSoftcap> first_pass(const T* row, int vocab, int label, Scales scales,
                                        int threads) {
    constexpr int n = kVec<T>, kSteps = 4;
    const int stride = threads * n;
    Lane<T, kSoftcap> lane;
    // The step in which this thread has the label.
    const bool has_label = label >= 0 && label / n % threads == (int)threadIdx.x;
    int label_step = has_label ? label / stride : -kSteps;
    const int element = label % n;
    int first = threadIdx.x * n;
    for (; first - (int)threadIdx.x * n + kSteps * stride <= vocab; first += kSteps * stride) {
        uint4 raw[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            raw[step] = load_elements<T, kAligned>(row, first + step * stride, vocab, -kInf);
        }
        lane.add(raw, label_step, element, scales);
        label_step -= kSteps;
    }
    for (; first < vocab; first += stride) {
        uint4 raw[1] = {load_elements<T, kAligned>(row, first, vocab, -kInf)};
        lane.add(raw, label_step, element, scales);
        --label_step;
    }
    return lane;
}

// Calls f with each element before the first vector of a row and after the last one.
template <typename T, bool kAligned, typename F>
__device__ void for_single_elements(const Row<T, kAligned>& row, F f) {
    if ((int)threadIdx.x < row.head) f(threadIdx.x);
    if ((int)threadIdx.x < row.tail()) f(row.vocab - 1 - threadIdx.x);
}

// Backwards from the end of the row, which was read last and is still in the cache.
template <typename T, bool kSoftcap, bool kAligned, bool kBonus>
__device__ void write_gradient(const Row<T, kAligned>& row, const SecondPass& pass, Scales scales,
                               int threads) {
    for_single_elements(row, [&](int i) {
        const float z = to_float(row.logits[i]);
        row.grad[i] = from_float<T>(gradient_of<kSoftcap, kBonus>(z, pass, scales));
    });
    const T* const from = row.logits + row.head;
#pragma unroll 4
    for (int v = row.vectors - 1 - (int)threadIdx.x; v >= 0; v -= threads) {
        float z[kVec<T>];
        unpack(load_vector<T, kAligned>(from + v * kVec<T>), z, T{});
#pragma unroll
        for (float& each : z) each = gradient_of<kSoftcap, kBonus>(each, pass, scales);
        store_streaming(row.vector(v), pack(z, T{}));
    }
}

template <typename T, bool kAligned>
__device__ void write_zeros(const Row<T, kAligned>& row, int threads) {
    for_single_elements(row, [&](int i) { row.grad[i] = from_float<T>(0.0f); });
    for (int v = threadIdx.x; v < row.vectors; v += threads) {
        store_streaming(row.vector(v), uint4{0, 0, 0, 0});
    }
}

// Ends with a barrier, after which the decision may be overwritten.
template <typename T, bool kSoftcap, bool kAligned>
__device__ void run_second_pass(const SecondPass* decision, const Row<T, kAligned>& row, int label,
                                Scales scales, int threads) {
    const SecondPass pass = shared_load(decision);
    const bool writes = pass.action == SecondPass::kGradient;
    if (pass.action == SecondPass::kZeros) write_zeros(row, threads);
    if (writes && pass.a != 0.0f) {
        write_gradient<T, kSoftcap, kAligned, true>(row, pass, scales, threads);
    } else if (writes) {
        write_gradient<T, kSoftcap, kAligned, false>(row, pass, scales, threads);
    }
    __syncthreads();  // after the thread that wrote the label's vector
    if (writes && threadIdx.x == 0 && label >= 0) {
        row.grad[label] = from_float<T>(pass.label_grad);
    }
}

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kMostThreads, 1)
    row_pass_kernel(const __grid_constant__ RowPassParams params, Scales scales, int threads) {
    __shared__ PartialSums<kMostThreads / kWarp> partials;
    __shared__ SecondPass shared_pass;
    const int64_t index = blockIdx.x;
    const Row<T, kAligned> row(params.rows, index);
    if (!params.tokens.counted[index]) {
        if (threadIdx.x == 0) finish_skipped(params, index);
        if (row.grad != nullptr) write_zeros(row, threads);
        return;
    }
    const int label = label_index(params.labels[index], row.vocab);
    const T stored = row.stored_label(label);
    const Transform transform = params.rows.transform.at_row(index);
    scales = scales_at(transform, scales);

    const auto lane =
        first_pass<T, kSoftcap, kAligned>(row.logits, row.vocab, label, scales, threads);
    const RowSums warp = warp_total(RowSums::of(lane), scales.scale2);
    if (threadIdx.x % kWarp == 0) partials.store(threadIdx.x / kWarp, warp);
    __syncthreads();
    if (threadIdx.x < kWarp) {
        const RowSums total = total_of(partials, threads / kWarp, scales.scale2);
        const bool first = threadIdx.x == 0;
        const auto about_label =
            label_of<kSoftcap>(label, label_logit(label, stored), transform, scales);
        const RowStatistics statistics =
            row_statistics(params, index, total, about_label, transform, scales, first);
        SecondPass pass = SecondPass::without_gradient(SecondPass::kNothing);
        if (row.grad != nullptr) {
            pass =
                decided_pass(params, index, bounds_range(params), fields_at(params.tokens, index),
                             statistics, about_label, transform, first);
        }
        if (first) shared_store(&shared_pass, pass);
    }
    __syncthreads();
    run_second_pass<T, kSoftcap>(&shared_pass, row, label, scales, threads);
}

// Calls f with the rows blockIdx.x, blockIdx.x + gridDim.x, ..., or with those that have a flag.
// Each warp reads the flags of 32 rows at once.
template <typename F>
__device__ void for_rows(int64_t count, const uint8_t* only, F f) {
    const int64_t step = gridDim.x;
    for (int64_t first = blockIdx.x; first < count; first += kWarp * step) {
        const int64_t mine = first + threadIdx.x % kWarp * step;
        uint32_t flags = __ballot_sync(kAllLanes, mine < count && (!only || only[mine]));
        for (; flags != 0; flags &= flags - 1) f(first + (__ffs(flags) - 1) * step);
    }
}

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    row_gradient_kernel(const __grid_constant__ RowGradientParams params, Scales scales) {
    __shared__ SecondPass shared_pass;
    for_rows(params.rows.count(), params.only, [&](int64_t index) {
        const Row<T, kAligned> row(params.rows, index);
        const int label = label_index(params.labels[index], row.vocab);
        const Transform transform = params.rows.transform.at_row(index);
        const Scales row_scales = scales_at(transform, scales);
        if (threadIdx.x == 0) {
            const Label about_label = label_of<kSoftcap>(
                label, label_logit(label, row.stored_label(label)), transform, row_scales);
            const auto statistics = statistics_at(params, index, about_label, transform);
            shared_store(&shared_pass,
                         gradient_pass(statistics, about_label, coefficients_at(params, index),
                                       transform.slope));
        }
        __syncthreads();
        run_second_pass<T, kSoftcap>(&shared_pass, row, label, row_scales, kThreads);
    });
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ LogitRows rows, const float* factor) {
    const float by = *factor;
    if (by == 1.0f) return;
    for_rows(rows.count(), nullptr, [&](int64_t index) {
        const Row<T, kAligned> row(rows, index);
        for_single_elements(
            row, [&](int i) { row.grad[i] = from_float<T>(to_float(row.grad[i]) * by); });
#pragma unroll 4
        for (int v = threadIdx.x; v < row.vectors; v += kThreads) {
            uint4* const vector = reinterpret_cast<uint4*>(row.vector(v));
            float z[kVec<T>];
            unpack(*vector, z, T{});
#pragma unroll
            for (float& each : z) each *= by;
            *vector = pack(z, T{});
        }
    });
}

// Threads of a block of the row pass, with 128 to 256 bytes each: the rows in flight on a
// multiprocessor are then at most 256 KB, or one long row, which L1 or L2 keeps for the second pass
// (27 MB on an A100, whose L2 has 40). The bits of a row must depend on its length alone.
int threads_of_rows(int64_t bytes) {
    return (int)std::bit_ceil((uint64_t)std::clamp<int64_t>(bytes / 256, kWarp, kMostThreads));
}

// As many blocks as are resident at once: a launch that finds nothing to do then ends soon.
int64_t resident_blocks(const LogitRows& rows) {
    const int multiprocessors = std::max(1, device_attribute(cudaDevAttrMultiProcessorCount));
    return std::min<int64_t>(rows.count(), 2 * multiprocessors);
}

}  // namespace

const char* row_pass(const RowPassParams& params, void* stream) {
    const char* error = nullptr;
    if (row_pass_cluster(params, stream, &error)) return error;
    return with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        const int threads = threads_of_rows(params.rows.vocab * sizeof(T));
        return launch(row_pass_kernel<T, kSoftcap, kAligned>, params.rows.count(), threads, stream,
                      params, scales_of(params.rows.transform), threads);
    });
}

const char* row_gradient(const RowGradientParams& params, void* stream) {
    return with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(row_gradient_kernel<T, kSoftcap, kAligned>, resident_blocks(params.rows),
                      kThreads, stream, params, scales_of(params.rows.transform));
    });
}

const char* scale(const LogitRows& rows, const float* factor, void* stream) {
    return with_row_type(rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(scale_kernel<T, kAligned>, resident_blocks(rows), kThreads, stream, rows,
                      factor);
    });
}

}  // namespace bapo::cuda
