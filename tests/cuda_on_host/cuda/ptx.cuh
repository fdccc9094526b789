// The functions of csrc/cuda/ptx.cuh on the host.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "memory.h"

namespace bapo::cuda {

inline float exp2_approx(float t) { return emulated::approximate_exp2(t); }
template <typename T>
uint32_t max_pairs(uint32_t a, uint32_t b) {
    const auto larger = [](uint16_t a, uint16_t b) {
        const T x{a}, y{b};
        return x != x || (float)y > (float)x ? b : a;
    };
    return (uint32_t)larger((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16 |
           larger((uint16_t)a, (uint16_t)b);
}
inline uint32_t max_bfloat16_pairs(uint32_t a, uint32_t b) {
    return max_pairs<__nv_bfloat16>(a, b);
}
inline uint32_t max_float16_pairs(uint32_t a, uint32_t b) { return max_pairs<__half>(a, b); }
inline uint8_t* dynamic_shared_memory() { return emulated::scheduler.block().shared; }

template <typename T>
T shared_load(const T* from) {
    emulated::access(from, sizeof(T));
    return *from;
}
template <typename T>
void shared_store(T* to, const T& value) {
    emulated::access(to, sizeof(T));
    *to = value;
}
inline void shared_settle(float* to, float value) { shared_store(to, value); }

inline void block_barrier(int number, int threads) {
    emulated::scheduler.arrive_and_wait(emulated::scheduler.block().barriers[number],
                                        (unsigned)threads, "a barrier of the block");
}

inline uint32_t shared_address(const void* pointer) {
    const emulated::Block& block = emulated::scheduler.block();
    const auto offset = static_cast<const uint8_t*>(pointer) - block.shared;
    if (offset < 0 || offset >= (ptrdiff_t)emulated::scheduler.shape.bytes) {
        emulated::scheduler.fail("takes an address outside shared memory");
    }
    return block.rank << emulated::kOffsetBits | (uint32_t)offset;
}

inline uint4 shared_vector(uint32_t address) {
    if (address >> emulated::kOffsetBits != emulated::scheduler.block().rank) {
        emulated::scheduler.fail("reads the shared memory of another block");
    }
    uint4 vector;
    const void* const from = emulated::at_address(address, sizeof vector);
    emulated::access(from, sizeof vector);
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    emulated::init_barrier(barrier, arrivals);
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
    emulated::scheduler.maybe_pause();
    emulated::MemoryBarrier::update(barrier, 1, 0);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    emulated::scheduler.maybe_pause();
    emulated::MemoryBarrier::update(barrier, 1, bytes);
}
enum class Scope { kBlock, kCluster };
template <Scope kScope = Scope::kBlock>
void barrier_wait(uint32_t barrier, uint32_t parity, const char* name) {
    emulated::wait_barrier(barrier, parity, kScope == Scope::kCluster, name);
}

inline bool elected() {
    __syncwarp();
    return emulated::thread_index() % emulated::kWarpSize == 0;
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
    emulated::bulk_copy(to, from, bytes, barrier);
}
inline uint64_t evict_first_policy() { return 0; }

inline uint32_t cluster_rank() { return emulated::scheduler.block().rank; }
inline uint32_t cluster_size() { return emulated::scheduler.shape.cluster; }
inline uint32_t address_in(uint32_t address, uint32_t rank) {
    const uint32_t offset = address & ((1u << emulated::kOffsetBits) - 1);
    return rank << emulated::kOffsetBits | offset;
}
inline void store_async(uint32_t to, uint64_t value, uint32_t barrier) {
    emulated::send(to, value, barrier);
}
inline void cluster_sync() {
    const emulated::Shape& shape = emulated::scheduler.shape;
    emulated::scheduler.arrive_and_wait(emulated::scheduler.cluster_barrier,
                                        shape.cluster * shape.threads, "the cluster");
}

}  // namespace bapo::cuda
