// The instructions of csrc/cuda/ptx.cuh in C++. A shared address is (rank of the block, offset).
#pragma once

#include "cuda_runtime.h"

namespace bapo::cuda {

inline float exp2_approx(float t) { return exp2f(t); }
inline uint8_t* dynamic_shared_memory() { return emulated::block->shared(); }
inline void block_barrier(int number, int threads) {
    emulated::block->wait(emulated::block->barriers[number], threads);
}

inline uint32_t shared_address(const void* pointer) {
    const auto offset = static_cast<const uint8_t*>(pointer) - emulated::block->shared();
    return emulated::block->rank << 24 | (uint32_t)offset;
}
inline uint8_t* at_address(uint32_t address) {
    return emulated::block->cluster->blocks[address >> 24].shared() + (address & 0xffffff);
}

// What a barrier holds in its 8 bytes.
struct MemoryBarrier {
    int32_t bytes;
    uint8_t pending;
    uint8_t arrivals;
    uint8_t phase;
    uint8_t valid;

    void update(int arrived, int change) {
        if (valid != 1 || (arrived && pending == 0)) std::abort();
        pending -= (uint8_t)arrived;
        bytes += change;
        if (pending == 0 && bytes == 0) {
            pending = arrivals;
            phase ^= 1;
        }
    }
};
inline void update_barrier(uint32_t address, int arrived, int change) {
    const std::lock_guard lock(emulated::block->cluster->mutex);
    reinterpret_cast<MemoryBarrier*>(at_address(address))->update(arrived, change);
}
inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    const auto count = (uint8_t)arrivals;
    *reinterpret_cast<MemoryBarrier*>(at_address(barrier)) = {0, count, count, 0, 1};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) { update_barrier(barrier, 1, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    // In one step, as the instruction: the phase must not end in between.
    const std::lock_guard lock(emulated::block->cluster->mutex);
    reinterpret_cast<MemoryBarrier*>(at_address(barrier))->update(1, (int)bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity, const char*) {
    for (;;) {
        {
            const std::lock_guard lock(emulated::block->cluster->mutex);
            const auto* state = reinterpret_cast<MemoryBarrier*>(at_address(barrier));
            if (state->valid != 1) std::abort();
            if (state->phase != parity) return;
        }
        emulated::block->yield();
    }
}

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || bytes == 0) std::abort();
    emulated::block->yield();  // others go on before the bytes are there
    std::memcpy(at_address(to), from, bytes);
    update_barrier(barrier, 0, -(int)bytes);
}
inline uint64_t evict_first_policy() { return 0; }

inline uint32_t cluster_rank() { return emulated::block->rank; }
inline uint32_t cluster_size() { return (uint32_t)emulated::block->cluster->blocks.size(); }
inline uint32_t address_in(uint32_t address, uint32_t rank) {
    return rank << 24 | (address & 0xffffff);
}
inline void store_async(uint32_t to, uint64_t value, uint32_t barrier) {
    if (to >> 24 != barrier >> 24 || to % 8) std::abort();
    // Late, and later from some warps than from others: nobody may go on without them.
    for (unsigned i = 0; i < 3 * (emulated::block->current / 32); ++i) emulated::block->yield();
    std::memcpy(at_address(to), &value, sizeof value);
    update_barrier(barrier, 0, -(int)sizeof value);
}
inline void cluster_sync() { emulated::block->cluster->sync(); }

}  // namespace bapo::cuda
