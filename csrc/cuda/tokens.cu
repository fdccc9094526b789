// Kernels over tokens whose log-probs are known: contributions to the search, the search, the loss.
// Sums are of blocks of fixed size, then of the blocks in order: the same bits in every run.

#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kSolveThreads = 256;
constexpr int kBlockWarps = kTokensPerBlock / kWarp;

struct Grids {
    double lower[kMaxGridPoints];
    double upper[kMaxGridPoints];
    int lower_count;
    int upper_count;

    __device__ void fill(const Grid& lower_grid, const Grid& upper_grid) {
        lower_count = fill_grid(lower_grid, lower);
        upper_count = fill_grid(upper_grid, upper);
    }
};

// One thread per token, then one thread per grid point: the positive or negative mass there, over
// the tokens in order.
__global__ void __launch_bounds__(kTokensPerBlock)
    contributions_kernel(const __grid_constant__ ContributionParams params, int points,
                         double* partials) {
    __shared__ Grids grids;
    __shared__ Candidate tokens[kTokensPerBlock];
    const int64_t index = (int64_t)blockIdx.x * kTokensPerBlock + threadIdx.x;
    tokens[threadIdx.x] =
        index < params.count ? candidate(params, index) : Candidate{1.0, 0.0, 0.0};
    if (threadIdx.x == 0) grids.fill(params.lower, params.upper);
    __syncthreads();
    for (int point = threadIdx.x; point < points; point += kTokensPerBlock) {
        const bool is_upper = point >= grids.lower_count;
        const double bound = is_upper ? grids.upper[point - grids.lower_count] : grids.lower[point];
        const Bounds bounds{bound, bound};
        double sum = 0.0;
        for (int i = 0; i < kTokensPerBlock; ++i) {
            const auto [r, A, w] = tokens[i];
            if (is_upper ? A > 0.0 : A < 0.0)
                sum += w * contribution(r, A, bounds, params.gradient);
        }
        partials[(int64_t)blockIdx.x * points + point] = sum;
    }
}

__global__ void __launch_bounds__(kSolveThreads)
    add_partials_kernel(const double* partials, int64_t blocks, int points, double* table) {
    const int point = blockIdx.x * kSolveThreads + threadIdx.x;
    if (point >= points) return;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t block = 0; block < blocks; ++block) sum += partials[block * points + point];
    table[point] += sum;
}

__global__ void __launch_bounds__(kSolveThreads)
    solve_kernel(const double* table, Grid lower, Grid upper, TargetParams target, float* bounds,
                 double* masses) {
    __shared__ Grids grids;
    __shared__ double sums[2 * kMaxGridPoints];
    if (threadIdx.x == 0) grids.fill(lower, upper);
    __syncthreads();
    const int points = grids.lower_count + grids.upper_count;
    for (int i = threadIdx.x; i < points; i += kSolveThreads) sums[i] = table[i];
    __syncthreads();
    if (threadIdx.x != 0) return;
    search_table(sums, grids.lower, grids.lower_count, grids.upper, grids.upper_count, target,
                 bounds, masses);
}

__global__ void __launch_bounds__(kTokensPerBlock)
    policy_kernel(const __grid_constant__ PolicyParams params, double* partials) {
    __shared__ double warps[kBlockWarps][kPolicySums];
    const int64_t index = (int64_t)blockIdx.x * kTokensPerBlock + threadIdx.x;
    PolicySums sums{};
    if (index < params.count) add_token(params, index, sums);
    const double values[kPolicySums] = {
        sums.loss,      sums.pg_loss, sums.kl_loss, sums.count, sums.clipped,   sums.dual_clipped,
        sums.log_ratio, sums.entropy, sums.pos,     sums.neg,   sums.pos_start, sums.neg_start};
#pragma unroll
    for (int k = 0; k < kPolicySums; ++k) {
        double value = values[k];
#pragma unroll
        for (int step = kWarp / 2; step > 0; step /= 2) {
            value += __shfl_xor_sync(kAllLanes, value, step);
        }
        if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp][k] = value;
    }
    __syncthreads();
    if (threadIdx.x >= kPolicySums) return;
    double total = 0.0;
    for (int warp = 0; warp < kBlockWarps; ++warp) total += warps[warp][threadIdx.x];
    partials[(int64_t)blockIdx.x * kPolicySums + threadIdx.x] = total;
}

__global__ void report_kernel(const __grid_constant__ PolicyParams params, const double* partials,
                              int64_t blocks) {
    __shared__ double totals[kPolicySums];
    double total = 0.0;
#pragma unroll 8
    for (int64_t block = 0; block < blocks; ++block) {
        total += partials[block * kPolicySums + threadIdx.x];
    }
    totals[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x != 0) return;
    report(params, {totals[0], totals[1], totals[2], totals[3], totals[4], totals[5], totals[6],
                    totals[7], totals[8], totals[9], totals[10], totals[11]});
}

}  // namespace

const char* contributions(const ContributionParams& params, int points, double* partials,
                          void* stream) {
    const int64_t blocks = token_blocks(params.count);
    if (blocks == 0) return nullptr;
    const char* error =
        launch(contributions_kernel, blocks, kTokensPerBlock, stream, params, points, partials);
    if (error != nullptr) return error;
    const int groups = (points + kSolveThreads - 1) / kSolveThreads;
    return launch(add_partials_kernel, groups, kSolveThreads, stream, partials, blocks, points,
                  params.table);
}

const char* solve(const double* table, const Grid& lower, const Grid& upper,
                  const TargetParams& target, float* bounds, double* masses, void* stream) {
    return launch(solve_kernel, 1, kSolveThreads, stream, table, lower, upper, target, bounds,
                  masses);
}

const char* policy(const PolicyParams& params, double* partials, void* stream) {
    const int64_t blocks = token_blocks(params.count);
    const char* error = launch(policy_kernel, blocks, kTokensPerBlock, stream, params, partials);
    if (error != nullptr) return error;
    return launch(report_kernel, 1, kPolicySums, stream, params, partials, blocks);
}

}  // namespace bapo::cuda
