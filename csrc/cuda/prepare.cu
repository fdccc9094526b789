// Makes the flat inputs of the other kernels: unmasked tokens are counted if weights depend on
// their number, then everything is written. Counts are integers, which atomic additions sum to the
// same number in any order.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "prepare.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 1024;
constexpr int kThreadsAlone = 1024;  // one block prepares few tokens in one launch
constexpr int64_t kMostTokensAlone = 2048;

__device__ int64_t add(int64_t* to, int64_t value) {
    return (int64_t)atomicAdd(reinterpret_cast<unsigned long long*>(to), (unsigned long long)value);
}
// The sum over the lanes of a warp, added once.
__device__ void add_of_warp(int64_t* to, int mine) {
    add_lanes(mine);
    if (threadIdx.x % kWarp == 0 && mine != 0) add(to, mine);
}

// Counts the tokens first, first + step, ...; all lanes of a warp take part.
__device__ void count_tokens(const PrepareParams& params, CountedTokens* counted, int64_t first,
                             int64_t step) {
    int tokens = 0, sequences = 0, bad_offsets = 0;
    for (int64_t k = first; params.offsets.data && k <= params.sequences; k += step) {
        bad_offsets += offset_is_bad(params, k);
    }
    const int lane = threadIdx.x % kWarp;
    for (int64_t i = first; i - lane < params.count(); i += step) {
        Position at{0, 0, params.sequences};
        if (i < params.count()) at = position_of(params, i);
        const bool unmasked = at.sequence < params.sequences && is_unmasked(params, at);
        tokens += unmasked;
        if (!counts_sequences(params)) continue;
        const unsigned lanes = __ballot_sync(kAllLanes, unmasked);
        if (lanes == 0) continue;
        // Neighbours mostly belong to one sequence, and are added to it at once.
        const int leader = __ffs(lanes) - 1;
        const int64_t sequence = __shfl_sync(kAllLanes, at.sequence, leader);
        const bool alike = unmasked && at.sequence == sequence;
        const unsigned alike_lanes = __ballot_sync(kAllLanes, alike);
        int64_t* const its_count = &counted->sequence_counts[at.sequence];
        if (lane == leader) sequences += add(its_count, __popc(alike_lanes)) == 0;
        if (unmasked && !alike) sequences += add(its_count, 1) == 0;
    }
    add_of_warp(&counted->all.tokens, tokens);
    add_of_warp(&counted->all.sequences, sequences);
    add_of_warp(&counted->all.bad_offsets, bad_offsets);
}

// Writes the tokens first, first + step, ...; counted is null if nothing was counted.
__device__ void write_tokens(const PrepareParams& params, const CountedTokens* counted,
                             int64_t first, int64_t step) {
    TokenCounts counts{};
    if (counted) counts = counted->all;
    const int64_t* const sequence_counts = counted ? counted->sequence_counts : nullptr;
    const double weight = shared_weight(params, counts);
    for (int64_t i = first; i < params.count(); i += step) {
        prepare_token(params, i, counts, sequence_counts, weight);
    }
    if (first == 0 && params.ticket) *params.ticket = 0;
}

__global__ void __launch_bounds__(kThreads, 1)
    prepare_count_kernel(const __grid_constant__ PrepareParams params, CountedTokens* counted) {
    count_tokens(params, counted, (int64_t)blockIdx.x * kThreads + threadIdx.x,
                 (int64_t)gridDim.x * kThreads);
}

__global__ void __launch_bounds__(kThreads, 1)
    prepare_write_kernel(const __grid_constant__ PrepareParams params,
                         const CountedTokens* counted) {
    write_tokens(params, counted, (int64_t)blockIdx.x * kThreads + threadIdx.x,
                 (int64_t)gridDim.x * kThreads);
}

__global__ void __launch_bounds__(kThreadsAlone, 1)
    prepare_alone_kernel(const __grid_constant__ PrepareParams params, CountedTokens* counted,
                         int64_t words) {
    auto* const zeros = reinterpret_cast<int64_t*>(counted);
    for (int64_t k = threadIdx.x; k < words; k += kThreadsAlone) zeros[k] = 0;
    __syncthreads();
    count_tokens(params, counted, threadIdx.x, kThreadsAlone);
    __syncthreads();
    write_tokens(params, counted, threadIdx.x, kThreadsAlone);
}

}  // namespace

int64_t scratch_words(const PrepareParams& params) {
    if (!needs_counts(params)) return 0;
    const int64_t sequences = counts_sequences(params) ? params.sequences : 0;
    return (int64_t)(sizeof(TokenCounts) / sizeof(int64_t)) + sequences;
}

const char* prepare(const PrepareParams& params, CountedTokens* counted, void* stream) {
    const int64_t tokens = params.count();
    const int64_t items = params.offsets.data ? std::max(tokens, params.sequences + 1) : tokens;
    const int64_t blocks = std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMostBlocks);
    if (counted != nullptr && items <= kMostTokensAlone) {
        return launch(prepare_alone_kernel, 1, kThreadsAlone, stream, params, counted,
                      scratch_words(params));
    }
    if (counted != nullptr) {
        const cudaError_t error = cudaMemsetAsync(
            counted, 0, scratch_words(params) * sizeof(int64_t), static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess) return message_of(error);
        const char* message =
            launch(prepare_count_kernel, blocks, kThreads, stream, params, counted);
        if (message != nullptr) return message;
    }
    return launch(prepare_write_kernel, blocks, kThreads, stream, params,
                  static_cast<const CountedTokens*>(counted));
}

}  // namespace bapo::cuda
