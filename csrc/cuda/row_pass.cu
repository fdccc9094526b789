// Kernels with one block per row, whose second pass reads from L2: the row pass for GPUs without
// clusters and for rows that no cluster holds, the gradient of rows whose statistics are known, and
// the scaling of a gradient.

#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

// Vectors that a thread loads at once: as many as fit into 64 registers beside the mathematics.
template <typename T, bool kSoftcap>
constexpr int kUnroll = kSoftcap && sizeof(T) == 2 ? 2 : 4;

// Elements [first, first + n) of a row, -inf beyond its end.
template <typename T, bool kAligned>
__device__ void load_elements(const T* row, int64_t first, int64_t vocab, float (&z)[kVec<T>]) {
    if (kAligned && first + kVec<T> <= vocab) {
        return unpack(*reinterpret_cast<const uint4*>(row + first), z, T{});
    }
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) z[i] = first + i < vocab ? to_float(row[first + i]) : -kInf;
}

template <typename T, bool kSoftcap, bool kAligned>
__device__ Lane first_pass(const T* row, int64_t vocab, Scales scales) {
    constexpr int n = kVec<T>, kSteps = kUnroll<T, kSoftcap>;
    constexpr int64_t kStride = kThreads * n;
    Lane lane;
    int64_t first = threadIdx.x * n;
    for (; first - threadIdx.x * n + kSteps * kStride <= vocab; first += kSteps * kStride) {
        float y[kSteps * n];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            float z[n];
            load_elements<T, kAligned>(row, first + step * kStride, vocab, z);
#pragma unroll
            for (int i = 0; i < n; ++i) y[step * n + i] = transformed<kSoftcap>(z[i], scales);
        }
        lane.add(y, scales.scale2);
    }
    for (; first < vocab; first += kStride) {
        float y[n];
        load_elements<T, kAligned>(row, first, vocab, y);
#pragma unroll
        for (int i = 0; i < n; ++i) y[i] = transformed<kSoftcap>(y[i], scales);
        lane.add(y, scales.scale2);
    }
    return lane;
}

// Backwards from the end of the row, which was read last and is still in the cache.
template <typename T, bool kSoftcap, bool kAligned, bool kBonus>
__device__ void write_gradient(const Row<T>& row, int64_t vocab, const SecondPass& pass,
                               Scales scales) {
    constexpr int n = kVec<T>;
    const int64_t vectors = kAligned ? vocab / n : 0;
    for (int64_t v = vectors * n + threadIdx.x; v < vocab; v += kThreads) {
        const float z = to_float(row.logits[v]);
        row.grad[v] = from_float<T>(gradient_of<kSoftcap, kBonus>(z, pass, scales));
    }
#pragma unroll 4
    for (int64_t v = vectors - 1 - threadIdx.x; v >= 0; v -= kThreads) {
        float z[n];
        unpack(*reinterpret_cast<const uint4*>(row.logits + v * n), z, T{});
#pragma unroll
        for (int i = 0; i < n; ++i) z[i] = gradient_of<kSoftcap, kBonus>(z[i], pass, scales);
        store_streaming(row.grad + v * n, pack(z, T{}));
    }
}

template <typename T, bool kAligned>
__device__ void write_zeros(const Row<T>& row, int64_t vocab) {
    constexpr int n = kVec<T>;
    const int64_t vectors = kAligned ? vocab / n : 0;
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
        store_streaming(row.grad + v * n, uint4{0, 0, 0, 0});
    }
    for (int64_t i = vectors * n + threadIdx.x; i < vocab; i += kThreads) {
        row.grad[i] = from_float<T>(0.0f);
    }
}

template <typename T, bool kSoftcap, bool kAligned>
__device__ void run_second_pass(const SecondPass& pass, const Row<T>& row, int64_t label,
                                int64_t vocab, Scales scales) {
    if (pass.action == SecondPass::kZeros) write_zeros<T, kAligned>(row, vocab);
    if (pass.action != SecondPass::kGradient) return;
    if (pass.a != 0.0f) {
        write_gradient<T, kSoftcap, kAligned, true>(row, vocab, pass, scales);
    } else {
        write_gradient<T, kSoftcap, kAligned, false>(row, vocab, pass, scales);
    }
    __syncthreads();  // after the thread that wrote the label's vector
    if (threadIdx.x == 0 && label >= 0 && label < vocab) {
        row.grad[label] = from_float<T>(pass.label_grad);
    }
}

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    row_pass_kernel(const __grid_constant__ RowPassParams params, Scales scales) {
    __shared__ RowSums partials[kWarps];
    __shared__ SecondPass shared_pass;
    const int64_t index = blockIdx.x, vocab = params.rows.vocab;
    const Row<T> row(params.rows, index);
    if (!params.tokens.counted[index]) {
        if (threadIdx.x == 0) finish_skipped(params, index);
        if (row.grad != nullptr) write_zeros<T, kAligned>(row, vocab);
        return;
    }
    const int64_t label = params.labels[index];
    const float z_label = row.label_logit(label, vocab);

    const Lane lane = first_pass<T, kSoftcap, kAligned>(row.logits, vocab, scales);
    const RowSums warp = warp_total(RowSums::of(lane), scales.scale2);
    if (threadIdx.x % kWarp == 0) partials[threadIdx.x / kWarp] = warp;
    __syncthreads();
    if (threadIdx.x < kWarp) {
        const RowSums total = total_of(partials, kWarps, scales.scale2);
        const bool first = threadIdx.x == 0;
        const SecondPass pass =
            finish_statistics<kSoftcap>(params, index, total, z_label, scales, first);
        if (first) shared_pass = pass;
    }
    __syncthreads();
    run_second_pass<T, kSoftcap, kAligned>(shared_pass, row, label, vocab, scales);
}

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    row_gradient_kernel(const __grid_constant__ RowGradientParams params, Scales scales) {
    __shared__ SecondPass shared_pass;
    const int64_t index = blockIdx.x, vocab = params.rows.vocab;
    if (params.only && !params.only[index]) return;
    const Row<T> row(params.rows, index);
    const int64_t label = params.labels[index];
    if (threadIdx.x == 0) {
        const RowCoefficients coefficients{params.dlog_probs[index],
                                           params.dentropy ? -params.dentropy[index] : 0.0};
        const float origin = (float)params.stats[2 * index];
        const double sum = params.stats[2 * index + 1];
        const float z = row.label_logit(label, vocab);
        const Transform& transform = params.rows.transform;
        const double log_prob = label_log_prob<kSoftcap>(z, origin, log(sum), transform, scales);
        shared_pass =
            gradient_pass(origin, sum, params.entropy[index], z, log_prob, transform, coefficients);
    }
    __syncthreads();
    run_second_pass<T, kSoftcap, kAligned>(shared_pass, row, label, vocab, scales);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ LogitRows rows, const float* factor) {
    const float by = *factor;
    if (by == 1.0f) return;
    constexpr int n = kVec<T>;
    T* const x = Row<T>(rows, blockIdx.x).grad;
    const int64_t vectors = kAligned ? rows.vocab / n : 0;
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
        float z[n];
        unpack(*reinterpret_cast<const uint4*>(x + v * n), z, T{});
#pragma unroll
        for (int i = 0; i < n; ++i) z[i] *= by;
        *reinterpret_cast<uint4*>(x + v * n) = pack(z, T{});
    }
    for (int64_t i = vectors * n + threadIdx.x; i < rows.vocab; i += kThreads) {
        x[i] = from_float<T>(to_float(x[i]) * by);
    }
}

}  // namespace

const char* row_pass(const RowPassParams& params, void* stream) {
    const char* error = nullptr;
    if (row_pass_cluster(params, stream, &error)) return error;
    return with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(row_pass_kernel<T, kSoftcap, kAligned>, params.rows.count(), kThreads, stream,
                      params, scales_of(params.rows.transform));
    });
}

const char* row_gradient(const RowGradientParams& params, void* stream) {
    return with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(row_gradient_kernel<T, kSoftcap, kAligned>, params.rows.count(), kThreads,
                      stream, params, scales_of(params.rows.transform));
    });
}

const char* scale(const LogitRows& rows, const float* factor, void* stream) {
    return with_row_type(rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch(scale_kernel<T, kAligned>, rows.count(), kThreads, stream, rows, factor);
    });
}

}  // namespace bapo::cuda
