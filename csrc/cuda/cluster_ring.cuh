// The ring of stages through which a block of a cluster loads the chunks of rows, and how a row is
// cut into them; on cluster_plan.h and row_math.cuh. A stage that is released too early is filled
// while it is read.
#pragma once

#include "cluster_plan.h"
#include "row_math.cuh"

namespace bapo::cuda {

static_assert(kComputeThreads == kComputeWarps * kWarp);

__device__ inline int log2_of(int power_of_two) { return __ffs(power_of_two) - 1; }

// The share of this block in the work: rows go to clusters in turn, and the chunks of a row to the
// blocks of its cluster.
struct Share {
    int64_t clusters;  // of the grid
    int rank, blocks;  // of this block in its cluster, and of the cluster
    int log_blocks;    // divisions by the blocks would take longer than shifts
    int64_t cluster;   // that of this block

    __device__ Share()
        : clusters(gridDim.x / cluster_size()),
          rank((int)cluster_rank()),
          blocks((int)cluster_size()),
          log_blocks(log2_of(blocks)),
          cluster(blockIdx.x / cluster_size()) {}

    // The number of this block's chunks among the first of a row.
    __device__ int among(int chunks) const { return (chunks - rank + blocks - 1) >> log_blocks; }
    // The index in the row of the i-th of them.
    __device__ int chunk(int i) const { return rank + i * blocks; }
    // Whether a vector is this thread's.
    __device__ bool has(int vector) const {
        return (vector / kComputeThreads & (blocks - 1)) == rank &&
               vector % kComputeThreads == threadIdx.x;
    }
};

// The stages, as addresses in shared memory.
struct Ring {
    uint32_t begin;
    uint32_t end;

    __device__ void init_barriers() const {
        for (uint32_t stage = begin; stage < end; stage += kStageBytes) {
            barrier_init(stage + kFull, 1);
            barrier_init(stage + kEmpty, kComputeWarps);
        }
    }
};

// The position of a chunk in the ring.
struct Place {
    uint32_t stage;
    uint32_t parity = 0;

    __device__ void advance(const Ring& ring) {
        stage += kStageBytes;
        if (stage == ring.end) {
            stage = ring.begin;
            parity ^= 1;
        }
    }
    // Advances by the chunks of a row, which are fewer than the stages.
    __device__ void advance(const Ring& ring, int chunks) {
        stage += chunks * kStageBytes;
        if (stage >= ring.end) {
            stage -= ring.end - ring.begin;
            parity ^= 1;
        }
    }
};

// Loads this block's chunks of a row. Where the row is not aligned, the first and the last copy
// have up to 14 bytes of the rows beside it, which others may be writing in place. PTX ISA
// 9.7.9.25.1 leaves a copy of changing bytes undefined; these are cut away before they are used.
template <typename T, bool kAligned>
__device__ void load_chunks(const Row<T, kAligned>& row, const Share& share, int chunks,
                            const Ring& ring, Place& place, uint64_t policy) {
    const auto up = [](uint32_t bytes) { return (bytes + 15) / 16 * 16; };
    // The gradient's last vector of a chunk takes as many elements from the next one as the head of
    // the row has.
    const uint32_t most = up(row.shift + kChunkBytes + row.head * sizeof(T));
    const uint32_t step = share.blocks * kChunkBytes, begin = share.rank * kChunkBytes;
    uint32_t left = up(row.shift + row.vocab * sizeof(T)) - begin;
    auto from = reinterpret_cast<uintptr_t>(row.logits) / 16 * 16 + begin;
    for (int i = chunks; i > 0; --i, place.advance(ring), from += step, left -= step) {
        const uint32_t bytes = min(most, left);
        barrier_wait(place.stage + kEmpty, place.parity ^ 1, "an empty stage");
        if (!elected()) continue;
        barrier_expect(place.stage + kFull, bytes);
        bulk_load(place.stage, reinterpret_cast<void*>(from), bytes, place.stage + kFull, policy);
    }
}

// The vectors of this thread in k chunks.
template <int k>
struct ChunkVectors {
    uint32_t stages[k];
    uint4 raw[k];

    // Lets the stages be filled again, once every warp has released them.
    __device__ void release() const {
        __syncwarp();
        if (threadIdx.x % kWarp != 0) return;
#pragma unroll
        for (int i = 0; i < k; ++i) barrier_arrive(stages[i] + kEmpty);
    }
};

// Reads the next chunks from `offset` bytes after the start of their stages.
template <typename T, bool kAligned, bool kWait, int k>
__device__ ChunkVectors<k> read_chunks(const Ring& ring, Place& place, uint32_t offset) {
    ChunkVectors<k> chunks;
    const uint32_t mine = threadIdx.x * 16 + offset / 16 * 16;
#pragma unroll
    for (int i = 0; i < k; ++i, place.advance(ring)) {
        if (kWait) barrier_wait(place.stage + kFull, place.parity, "a chunk");
        chunks.stages[i] = place.stage;
        chunks.raw[i] = shared_vector(place.stage + mine);
    }
    if (!kAligned && offset % 16 != 0) {
#pragma unroll
        for (int i = 0; i < k; ++i) {
            const uint4 next = shared_vector(chunks.stages[i] + mine + 16);
            chunks.raw[i] = shifted(chunks.raw[i], next, offset % 16, T{});
        }
    }
    return chunks;
}

}  // namespace bapo::cuda
