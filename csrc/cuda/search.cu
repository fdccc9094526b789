// The search for the clip bounds: tokens into bins of the ratio, bins into the masses at every grid
// point, and the point at which Algorithm 1 stops. Everything is added in a fixed order: atomic
// additions could end the search one step apart on two ranks.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kMostWarps = 32;  // of a block that fills bins
constexpr int kMostBlocks = 128;
constexpr int kTableThreads = 512;
constexpr int kLoads = 16;  // in flight, of a thread that adds up
constexpr int kBinBytes = kMostDynamicBytes;

// Tokens are distributed by their number and that of the bins: sums have the same bits in every
// run.
struct BinPlan {
    int bins;
    int warps;  // each with bins of its own
    int blocks;
    int groups;  // of blocks whose partial sums are added side by side

    explicit BinPlan(const ContributionParams& params) : bins(params.grids.bins()) {
        const int64_t all_warps = (params.count + kWarp - 1) / kWarp;
        const int most = std::min(kBinBytes / bin_bytes(1), kMostWarps);  // at least one
        warps = (int)std::clamp<int64_t>(all_warps / kMostBlocks, 1, most);
        blocks = (int)std::min<int64_t>((all_warps + warps - 1) / warps, kMostBlocks);
        groups = std::max(1, kTableThreads / bins);
    }
    int bin_bytes(int copies) const { return copies * bins * (int)sizeof(Moments); }
};
static_assert(2 * (kMaxGridPoints + 1) * sizeof(Moments) <= kBinBytes);

__device__ Moments* dynamic_bins() { return reinterpret_cast<Moments*>(dynamic_shared_memory()); }

// Every thread adds up points of its own.
__device__ void fill_grid(double* points, const Grid& grid, int threads) {
    for (int k = threadIdx.x; k < grid.count; k += threads) {
        double sum = grid.start;
        for (int i = 0; i < k; ++i) sum += grid.step;
        points[k] = grid.point(k, sum);
    }
}
__device__ void fill(GridPoints& points, const Grids& grids, int threads) {
    fill_grid(points.lower, grids.lower, threads);
    fill_grid(points.upper, grids.upper, threads);
    if (threadIdx.x == 0) {
        points.lower_count = grids.lower.count;
        points.upper_count = grids.upper.count;
    }
    __syncthreads();
}

// The sum of values[first], values[first + step], ..., in this order.
template <typename T>
__device__ T sum_of(const T* values, int first, int step, int end) {
    T sum{};
    for (; first < end; first += kLoads * step) {
        T some[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int k = first + i * step;
            some[i] = k < end ? values[k] : T{};
        }
#pragma unroll
        for (const T& each : some) sum += each;
    }
    return sum;
}

// Most tokens are between the grids, and their lanes add them to registers. The others of a warp
// are added to its bins in the order of their lanes. A token that is not counted adds 0.
__global__ void __launch_bounds__(kMostWarps* kWarp)
    search_bins_kernel(const __grid_constant__ ContributionParams params, int warps,
                       Moments* partials) {
    __shared__ GridPoints grids;
    Moments* const bins = dynamic_bins();
    const int threads = warps * kWarp, count = params.grids.bins();
    fill(grids, params.grids, threads);
    for (int i = threadIdx.x; i < warps * count; i += threads) bins[i] = {0.0, 0.0};
    __syncthreads();
    Moments* const mine = bins + threadIdx.x / kWarp * count;
    const unsigned my_bit = 1u << threadIdx.x % kWarp;
    const int above_lower = params.grids.lower.count, below_upper = above_lower + 1;
    Moments negative{}, positive{};  // between the grids
    const int64_t step = (int64_t)gridDim.x * threads;
    for (int64_t first = (int64_t)blockIdx.x * threads; first < params.count; first += step) {
        const int64_t i = first + threadIdx.x;
        Candidate token{1.0, 0.0, 0.0};
        if (i < params.count) token = candidate(params, i);
        const Moments moments = moments_of(token);
        const int bin = bin_of(grids, params.grids, token);
        if (bin == above_lower) negative += moments;
        if (bin == below_upper) positive += moments;
        const bool between = bin == above_lower || bin == below_upper;
        for (unsigned turns = __ballot_sync(kAllLanes, !between); turns != 0; turns &= turns - 1) {
            if ((turns & -turns) == my_bit) mine[bin] += moments;
            __syncwarp();
        }
    }
    add_lanes(negative.ratio_mass, negative.mass);
    add_lanes(positive.ratio_mass, positive.mass);
    if (my_bit == 1) {
        mine[above_lower] += negative;
        mine[below_upper] += positive;
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < count; bin += threads) {
        partials[(int64_t)blockIdx.x * count + bin] = sum_of(bins, bin, count, warps * count);
    }
}

// Ends the search on a table in shared memory, of which each thread may just have written a part.
__device__ void solve_in_block(const double* table, const GridPoints& grids, const Target& target,
                               const SearchResult& result) {
    __shared__ int stop;
    const int last = grids.lower_count + grids.upper_count - 2;
    if (threadIdx.x == 0) stop = last;
    __syncthreads();
    for (int k = threadIdx.x; k < last; k += kTableThreads) {
        const GridStep step = step_of_search(grids, target.upper_first, k);
        if (!is_below_target(table, grids, target, step)) atomicMin(&stop, k);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    write_result(table, grids, step_of_search(grids, target.upper_first, stop), result);
}

// Turns the bins of all blocks into masses at the grid points, and into bounds if result has a
// place.
__global__ void __launch_bounds__(kTableThreads, 1)  // or ptxas saves registers, not round trips
    search_table_kernel(const __grid_constant__ ContributionParams params, const Moments* partials,
                        int blocks, int groups, Target target, SearchResult result) {
    __shared__ GridPoints grids;
    __shared__ double table[2 * kMaxGridPoints];
    Moments* const sums = dynamic_bins();  // [groups, bins]
    const int bins = params.grids.bins(), points = params.grids.points();
    for (int slot = threadIdx.x; slot < groups * bins; slot += kTableThreads) {
        sums[slot] = sum_of(partials, slot, groups * bins, blocks * bins);
    }
    fill(grids, params.grids, kTableThreads);
    for (int bin = threadIdx.x; bin < bins; bin += kTableThreads) {
        sums[bin] = sum_of(sums, bin, bins, groups * bins);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < points; k += kTableThreads) {
        table[k] = mass_at(grids, sums, k, params.unclipped_only);
        if (params.table == nullptr) continue;
        for (int64_t rank = 0; rank < params.ranks; ++rank) {
            params.table[rank * points + k] = rank == params.rank ? table[k] : 0.0;
        }
    }
    if (result.bounds != nullptr) solve_in_block(table, grids, target, result);
}

__global__ void __launch_bounds__(kTableThreads, 1)
    solve_kernel(const __grid_constant__ SolveParams params) {
    __shared__ GridPoints grids;
    __shared__ double table[2 * kMaxGridPoints];
    fill(grids, params.grids, kTableThreads);
    const int points = params.grids.points();
    for (int i = threadIdx.x; i < points; i += kTableThreads) {
        table[i] = sum_of(params.table, i, points, (int)params.ranks * points);
    }
    solve_in_block(table, grids, params.target, params.result);
}

const char* run(const ContributionParams& params, const Target& target, const SearchResult& result,
                Moments* partials, void* stream) {
    const BinPlan plan(params);
    const char* error =
        launch_with_memory(search_bins_kernel, plan.blocks, plan.warps * kWarp,
                           plan.bin_bytes(plan.warps), stream, params, plan.warps, partials);
    if (error != nullptr) return error;
    return launch_with_memory(search_table_kernel, 1, kTableThreads, plan.bin_bytes(plan.groups),
                              stream, params, static_cast<const Moments*>(partials), plan.blocks,
                              plan.groups, target, result);
}

}  // namespace

int64_t scratch_words(const ContributionParams& params) {
    const BinPlan plan(params);
    return (int64_t)plan.blocks * plan.bins * (int64_t)(sizeof(Moments) / sizeof(double));
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
