// The exchange of the sums of a row between the warps of a cluster, on cluster_ring.cuh. A wait
// that is lost shows in tests/cuda_on_host.
#pragma once

#include "cluster_ring.cuh"

namespace bapo::cuda {

// Rows take two buffers in turn; the parity is that of their barriers.
struct Turn {
    int buffer = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        parity ^= buffer;
        buffer ^= 1;
    }
};

// The sums of all warps of the cluster, in the shared memory of every block.
struct Exchange {
    uint64_t arrived[2];
    PartialSums<kMaxCluster * kComputeWarps> sums[2];

    __device__ void init_barriers() {
        for (uint64_t& each : arrived) barrier_init(shared_address(&each), kComputeWarps);
    }
    // Sends the sums of this warp to every block, where this warp's barrier expects those of all
    // blocks. A block alone stores them: st.async needs a cluster of two or more.
    __device__ void send(const RowSums& row, const Share& share, Turn turn) {
        constexpr int kBytes = sizeof(double2) + sizeof(float);
        const int to = threadIdx.x % kWarp;
        const int slot = share.rank * kComputeWarps + threadIdx.x / kWarp;
        const uint32_t barrier = shared_address(&arrived[turn.buffer]);
        auto& all = sums[turn.buffer];
        if (share.blocks == 1) {
            if (to == 0) all.store(slot, row);
            __syncwarp();
            if (to == 0) barrier_arrive(barrier);
            return;
        }
        if (to == 0) barrier_expect(barrier, share.blocks * kBytes);
        if (to >= share.blocks) return;
        const auto there = [&](const void* here) { return address_in(shared_address(here), to); };
        const uint32_t barrier_there = address_in(barrier, to);
        store_async(there(&all.sums[slot]), double2{row.sum, row.weighted}, barrier_there);
        store_async(there(&all.origins[slot]), row.origin, barrier_there);
    }
    __device__ RowSums wait_for_total(const Share& share, Turn turn, float scale2) const {
        barrier_wait<Scope::kCluster>(shared_address(&arrived[turn.buffer]), turn.parity,
                                      "the sums of the cluster");
        return total_of(sums[turn.buffer], share.blocks * kComputeWarps, scale2);
    }
    __device__ void wait_for_row_before(Turn turn) const {
        barrier_wait<Scope::kCluster>(shared_address(&arrived[turn.buffer ^ 1]),
                                      turn.parity ^ turn.buffer ^ 1, "the sums of the row before");
    }
};

}  // namespace bapo::cuda
