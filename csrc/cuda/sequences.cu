// Means over sequences, of log-ratios and of their gradients: a block for each sequence, which
// reads its tokens once and writes them once. The order of a sum depends on the sequence alone.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sequences.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kMostBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
    sequence_mean_kernel(const __grid_constant__ SequenceMeanParams params, int64_t spans) {
    __shared__ double sums[kWarps], counts[kWarps];
    for (int64_t k = blockIdx.x; k < spans; k += gridDim.x) {
        const Span span = span_of(params.sequences, k);
        SequenceSum mine{};
#pragma unroll 4
        for (int64_t i = span.begin + threadIdx.x; i < span.end; i += kThreads) mine.add(params, i);
        add_lanes(mine.sum, mine.count);
        if (threadIdx.x % kWarp == 0) {
            sums[threadIdx.x / kWarp] = mine.sum;
            counts[threadIdx.x / kWarp] = mine.count;
        }
        __syncthreads();
        SequenceSum total{};
        for (int warp = 0; warp < kWarps; ++warp) {
            total.sum += sums[warp];
            total.count += counts[warp];
        }
        const double mean = total.mean();
        for (int64_t i = span.begin + threadIdx.x; i < span.end; i += kThreads) {
            write_mean(params, i, mean);
        }
        __syncthreads();  // before the sums of the next sequence
    }
}

}  // namespace

const char* sequence_mean(const SequenceMeanParams& params, void* stream) {
    const int64_t spans = span_count(params.sequences);
    return launch(sequence_mean_kernel, std::min(spans, kMostBlocks), kThreads, stream, params,
                  spans);
}

}  // namespace bapo::cuda
