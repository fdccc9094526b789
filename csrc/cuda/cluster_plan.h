// How rows are distributed over the blocks of a cluster and over the stages of their shared memory.
// Host code on params.h. A plan with too few stages deadlocks the row pass.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "params.h"

namespace bapo::cuda {

constexpr int kComputeWarps = 4;
constexpr int kComputeThreads = kComputeWarps * 32;
constexpr int kChunkBytes = 16 * kComputeThreads;
// A row that is not aligned needs one vector more, a gradient with another alignment a second one.
constexpr int kMostBytes = kChunkBytes + 32;
constexpr int kFull = kMostBytes;  // offsets of the two barriers of a stage
constexpr int kEmpty = kFull + 8;
constexpr int kStageBytes = kChunkBytes + 128;
constexpr int kMaxCluster = 16;
constexpr int kPortableCluster = 8;  // what every GPU with clusters has

// Each gets its part of the registers. sm_120 has only 100 KB of shared memory.
constexpr int blocks_per_multiprocessor(int major) { return major >= 12 ? 2 : 4; }

struct ClusterPlan {
    int cluster = 0;  // blocks; 0: no cluster holds such a row
    int stages = 0;   // of every block
};

// Shorter rows take a small block each: with more rows in flight, the latency of decisions is
// hidden, which is worth a second read of the cache.
constexpr int kShortRowBytes = 16 << 10;

// The smallest cluster that holds a row and enough loads of later rows to hide the latency of
// memory, with most_blocks per multiprocessor if possible: some then decide while others move data.
// Stages do not get head_bytes of the shared memory of a block.
inline ClusterPlan plan_for(int64_t row_bytes, int most_blocks, int head_bytes,
                            int bytes_per_multiprocessor, int bytes_per_block, int most_cluster) {
    constexpr int kAhead = 5, kReserved = 1024;
    if (row_bytes <= kShortRowBytes) return {};
    const int64_t chunks = (row_bytes + kChunkBytes - 1) / kChunkBytes;
    for (int blocks = most_blocks; blocks >= 1; --blocks) {
        const int room = std::min(bytes_per_multiprocessor / blocks - kReserved, bytes_per_block);
        const int stages = (room - head_bytes) / kStageBytes;
        for (int cluster = 1; cluster <= most_cluster; cluster *= 2) {
            const int64_t mine = (chunks + cluster - 1) / cluster;
            if (mine + kAhead <= stages) return {cluster, stages};
        }
    }
    return {};
}

inline int device_attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

// BAPO_NO_CLUSTERS=1: every row takes the generic row pass.
inline bool clusters_are_off() {
    const char* const value = std::getenv("BAPO_NO_CLUSTERS");
    return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

inline ClusterPlan plan_on_this_device(const LogitRows& rows, int head_bytes) {
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    if (major < 9 || clusters_are_off()) return {};
    // Clusters of 16 blocks exist on sm_90 and sm_100 only.
    return plan_for(rows.vocab * size_of(rows.dtype), blocks_per_multiprocessor(major), head_bytes,
                    device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                    device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                    major >= 12 ? kPortableCluster : kMaxCluster);
}

}  // namespace bapo::cuda
