// Loss, metrics and gradients of tokens whose log-probs are known, in one launch. Sums are of
// threads, warps, blocks and all fourth blocks, each in a fixed order that depends on the number
// of tokens alone: the same bits in every run.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 512;
// The last block adds up the sums of the others, a lane for each sum.
static_assert(kTokenLossSums <= kWarp);

int blocks_of(int64_t count) {
    return (int)std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks);
}

// Writes the sums over the threads of this block.
__device__ void write_partial(const SumsOfTokens<int>& sums, double* partial) {
    __shared__ double warps[kWarps][kTokenLossSums];
    const auto add = [&](int k, double value) {
        add_lanes(value);
        if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp][k] = value;
    };
    constexpr int kReal = offsetof(TokenLossSums, tokens) / sizeof(double);
#pragma unroll
    for (int k = 0; k < kReal; ++k) add(k, reinterpret_cast<const double*>(&sums)[k]);
#pragma unroll
    for (int k = kReal; k < kTokenLossSums; ++k) add(k, (&sums.tokens)[k - kReal]);
    __syncthreads();
    if (threadIdx.x >= kTokenLossSums) return;
    double total = 0.0;
    for (int warp = 0; warp < kWarps; ++warp) total += warps[warp][threadIdx.x];
    partial[threadIdx.x] = total;
}

// Whether all other blocks have finished; what they wrote before is then visible to this one.
__device__ bool is_last_block(int32_t* ticket) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // after the stores of all threads, which the barrier orders before it
        last = atomicAdd(ticket, 1) == (int)gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

__global__ void __launch_bounds__(kThreads)
    token_loss_kernel(const __grid_constant__ TokenLossParams params, double* partials) {
    __shared__ double warps[kWarps][kTokenLossSums];
    SumsOfTokens<int> sums{};
    const int64_t step = (int64_t)gridDim.x * kThreads;
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < params.count; i += step) {
        add_token(params, i, sums);
    }
    write_partial(sums, partials + (int64_t)blockIdx.x * kTokenLossSums);
    if (!is_last_block(params.ticket)) return;

    const int warp = threadIdx.x / kWarp, k = threadIdx.x % kWarp;
    if (k < kTokenLossSums) {
        double sum = 0.0;
#pragma unroll 16
        for (int block = warp; block < (int)gridDim.x; block += kWarps) {
            sum += __ldcg(&partials[block * kTokenLossSums + k]);
        }
        warps[warp][k] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    TokenLossSums total{};
    auto* const totals = reinterpret_cast<double*>(&total);
    for (int each = 0; each < kWarps; ++each) {
        for (int i = 0; i < kTokenLossSums; ++i) totals[i] += warps[each][i];
    }
    report(params, total);
    *params.ticket = 0;
}

}  // namespace

int64_t scratch_words(const TokenLossParams& params) {
    return (int64_t)blocks_of(params.count) * kTokenLossSums;
}

const char* token_loss(const TokenLossParams& params, double* partials, void* stream) {
    return launch(token_loss_kernel, blocks_of(params.count), kThreads, stream, params, partials);
}

}  // namespace bapo::cuda
