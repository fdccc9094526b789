// The search for the clip bounds: tokens into bins of the ratio, bins into the masses at every grid
// point, and the point at which Algorithm 1 stops. Everything is added in a fixed order: atomic
// additions could end the search one step apart on two ranks.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kMostWarps = 4;  // of a block that fills bins
constexpr int kMostBlocks = 256;
constexpr int kTableThreads = 512;
constexpr int kTableLoads = 16;      // in flight
constexpr int kBinBytes = 32 << 10;  // of a block, unless one warp needs more
static_assert(2 * (kMaxGridPoints + 1) * sizeof(Moments) <= kMostDynamicBytes);

// How tokens are distributed over blocks: by their number and by that of the bins, so that sums
// have the same bits in every run.
struct BinPlan {
    int bins;
    int warps;
    int blocks;
    int groups;  // of blocks whose partial sums are added side by side

    explicit BinPlan(const ContributionParams& params) {
        GridPoints grids;
        grids.fill(params.grids);
        bins = grids.bins();
        warps = std::clamp(kBinBytes / (int)(bins * sizeof(Moments)), 1, kMostWarps);
        const int64_t threads = warps * kWarp, full = (params.count + threads - 1) / threads;
        blocks = (int)std::min<int64_t>(full, kMostBlocks);
        groups = std::max(1, kTableThreads / bins);
    }
    int bin_bytes() const { return warps * bins * (int)sizeof(Moments); }
    int group_bytes() const { return groups * bins * (int)sizeof(Moments); }
};

__device__ Moments* dynamic_bins() { return reinterpret_cast<Moments*>(dynamic_shared_memory()); }

// The first thread fills one grid and the last the other, in another warp if there are two.
__device__ void fill(GridPoints& points, const Grids& grids, int threads) {
    if (threadIdx.x == 0) points.lower_count = fill_grid(grids.lower, points.lower);
    if (threadIdx.x == threads - 1) points.upper_count = fill_grid(grids.upper, points.upper);
    __syncthreads();
}

// Every warp has bins of its own, to which its lanes add in their order.
__global__ void __launch_bounds__(kMostWarps* kWarp)
    search_bins_kernel(const __grid_constant__ ContributionParams params, int warps,
                       Moments* partials) {
    __shared__ GridPoints grids;
    Moments* const bins = dynamic_bins();
    const int threads = warps * kWarp;
    fill(grids, params.grids, threads);
    const int count = grids.bins();
    for (int i = threadIdx.x; i < warps * count; i += threads) bins[i] = {0.0, 0.0};
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    Moments* const of_warp = bins + threadIdx.x / kWarp * count;
    const int64_t step = (int64_t)gridDim.x * threads;
    for (int64_t first = (int64_t)blockIdx.x * threads; first < params.count; first += step) {
        const int64_t i = first + threadIdx.x;
        Candidate token{1.0, 0.0, 0.0};
        if (i < params.count) token = candidate(params, i);
        const bool counts = token.advantage != 0.0;
        const int bin = counts ? bin_of(grids, token) : 0;
        for (unsigned lanes = __ballot_sync(kAllLanes, counts); lanes; lanes &= lanes - 1) {
            if (lane == __ffs(lanes) - 1) add_to_bin(token, of_warp[bin]);
            __syncwarp();
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < count; bin += threads) {
        Moments sum{0.0, 0.0};
        for (int warp = 0; warp < warps; ++warp) sum.add(bins[warp * count + bin]);
        partials[(int64_t)blockIdx.x * count + bin] = sum;
    }
}

// The end of the search on a table in shared memory; every thread of the block takes part. It may
// have written its part of the table just before.
__device__ void solve_in_block(const double* table, const GridPoints& grids, const Target& target,
                               const SearchResult& result) {
    __shared__ int stop;
    const int last = grids.points() - 2;
    if (threadIdx.x == 0) stop = last;
    __syncthreads();
    for (int k = threadIdx.x; k < last; k += kTableThreads) {
        const GridStep step = step_of_search(grids, target.upper_first, k);
        if (!goes_on(table, grids, target, step)) atomicMin(&stop, k);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    write_result(table, grids, step_of_search(grids, target.upper_first, stop), result);
}

// From the bins of all blocks to the masses at the grid points, and to the bounds where these are
// asked for.
__global__ void __launch_bounds__(kTableThreads, 1)  // or ptxas saves registers, not round trips
    search_table_kernel(const __grid_constant__ ContributionParams params, const Moments* partials,
                        int blocks, int groups, Target target, SearchResult result) {
    __shared__ GridPoints grids;
    __shared__ double table[2 * kMaxGridPoints];
    Moments* const sums = dynamic_bins();  // [groups, bins]
    fill(grids, params.grids, kTableThreads);
    const int bins = grids.bins(), points = grids.points(), lower_bins = grids.lower_count + 1;
    for (int slot = threadIdx.x; slot < groups * bins; slot += kTableThreads) {
        const int group = slot / bins, bin = slot % bins;
        Moments sum{0.0, 0.0};
        for (int first = group; first < blocks; first += kTableLoads * groups) {
            Moments some[kTableLoads];
#pragma unroll
            for (int i = 0; i < kTableLoads; ++i) {
                const int block = first + i * groups;
                some[i] = block < blocks ? partials[block * bins + bin] : Moments{0.0, 0.0};
            }
#pragma unroll
            for (const Moments& each : some) sum.add(each);
        }
        sums[slot] = sum;
    }
    for (int i = threadIdx.x; i < points; i += kTableThreads) table[i] = 0.0;
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += kTableThreads) {
        for (int group = 1; group < groups; ++group) sums[bin].add(sums[group * bins + bin]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        add_negative(sums, grids.lower, grids.lower_count, params.unclipped_only, table);
    } else if (threadIdx.x == kWarp) {
        add_positive(sums + lower_bins, grids.upper, grids.upper_count, params.unclipped_only,
                     table + grids.lower_count);
    }
    __syncthreads();
    if (params.table != nullptr) {
        for (int64_t i = threadIdx.x; i < params.ranks * points; i += kTableThreads) {
            params.table[i] = i / points == params.rank ? table[i % points] : 0.0;
        }
    }
    if (result.bounds != nullptr) solve_in_block(table, grids, target, result);
}

__global__ void __launch_bounds__(kTableThreads)
    solve_kernel(const __grid_constant__ SolveParams params) {
    __shared__ GridPoints grids;
    __shared__ double table[2 * kMaxGridPoints];
    fill(grids, params.grids, kTableThreads);
    const int points = grids.points();
    for (int i = threadIdx.x; i < points; i += kTableThreads) {
        double sum = 0.0;
#pragma unroll 8
        for (int64_t rank = 0; rank < params.ranks; ++rank) {
            sum += params.table[rank * points + i];
        }
        table[i] = sum;
    }
    solve_in_block(table, grids, params.target, params.result);
}

const char* run(const ContributionParams& params, const Target& target, const SearchResult& result,
                Moments* partials, void* stream) {
    const BinPlan plan(params);
    const char* error = launch_with_memory(search_bins_kernel, plan.blocks, plan.warps * kWarp,
                                           plan.bin_bytes(), stream, params, plan.warps, partials);
    if (error != nullptr) return error;
    return launch_with_memory(search_table_kernel, 1, kTableThreads, plan.group_bytes(), stream,
                              params, static_cast<const Moments*>(partials), plan.blocks,
                              plan.groups, target, result);
}

}  // namespace

int64_t search_partials(const ContributionParams& params) {
    const BinPlan plan(params);
    return (int64_t)plan.blocks * plan.bins;
}

const char* contributions(const ContributionParams& params, Moments* partials, void* stream) {
    return run(params, {}, {nullptr, nullptr}, partials, stream);
}

const char* search(const ContributionParams& params, const Target& target,
                   const SearchResult& result, Moments* partials, void* stream) {
    return run(params, target, result, partials, stream);
}

const char* solve(const SolveParams& params, void* stream) {
    return launch(solve_kernel, 1, kTableThreads, stream, params);
}

}  // namespace bapo::cuda
