// Thin wrappers of PTX instructions, and nothing else that is not C++. Barriers in shared memory,
// bulk copies and writes to other blocks of a cluster need sm_90 or later. A change of a qualifier
// may lose a wait on a GPU where the emulation passes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>

namespace bapo::cuda {

__device__ inline float exp2_approx(float t) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
}

// The larger of both halves of two words.
__device__ inline uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
    uint32_t most;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
__device__ inline uint32_t larger(uint32_t a, uint32_t b, __half) {
    uint32_t most;
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

__device__ inline uint8_t* dynamic_shared_memory() {
    extern __shared__ __align__(128) uint8_t memory[];
    return memory;
}
// Through a reference the compiler would load the fields in use one by one, and more often.
template <typename T>
__device__ inline T shared_load(const T* from) {
    return *from;
}
template <typename T>
__device__ inline void shared_store(T* to, const T& value) {
    *to = value;
}
// Completes the load of a value, by a store that the compiler cannot remove.
__device__ inline void shared_settle(float* to, float value) {
    *static_cast<volatile float*>(to) = value;
}
// Waits for this number of threads of the block. Unlike bar.sync, which is aligned, it lets the
// lanes of a warp come apart. Barrier 0 is that of __syncthreads.
__device__ inline void block_barrier(int number, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline uint4 shared_vector(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// Makes initialised barriers visible to bulk copies and to the other blocks.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits for the end of the phase of this parity, and acquires what was written before it by this
// block and its bulk copies, or by the whole cluster, which empties the L1 cache. In a build with
// BAPO_TRAP_WAITS, a wait that does not end prints its name and traps.
enum class Scope { kBlock, kCluster };
template <Scope kScope = Scope::kBlock>
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity,
                                    [[maybe_unused]] const char* name) {
    uint32_t done = 0;
#ifdef BAPO_TRAP_WAITS
    constexpr uint32_t kMostTries = 1u << 24;
    for (uint32_t tries = 0; !done; ++tries) {
        if (tries == kMostTries) {
            printf("block %u, thread %u: the wait for %s (parity %u) does not end\n", blockIdx.x,
                   threadIdx.x, name, parity);
            __trap();
        }
#else
    while (!done) {
#endif
#define BAPO_TRY_WAIT(scope)                      \
    asm volatile(                                 \
        "{\n"                                     \
        ".reg .pred done;\n"                      \
        "mbarrier.try_wait.parity.acquire." scope \
        ".shared::cta.b64 done, [%1], %2;\n"      \
        "selp.u32 %0, 1, 0, done;\n"              \
        "}\n"                                     \
        : "=r"(done)                              \
        : "r"(barrier), "r"(parity)               \
        : "memory")
        if constexpr (kScope == Scope::kBlock) BAPO_TRY_WAIT("cta");
        if constexpr (kScope == Scope::kCluster) BAPO_TRY_WAIT("cluster");
#undef BAPO_TRY_WAIT
    }
}

// True for one lane of a warp, all of which must call it. With a lane chosen by its number, the
// compiler would need ten instructions more for a bulk copy.
__device__ inline bool elected() {
    uint32_t mine;
    asm volatile(
        "{\n"
        ".reg .pred mine;\n"
        "elect.sync _|mine, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, mine;\n"
        "}\n"
        : "=r"(mine));
    return mine;
}

// bytes and both addresses are multiples of 16. Completes on the barrier.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                 uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// For data that is read once.
__device__ inline uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
// The same place in the shared memory of another block of the cluster.
__device__ inline uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Writes 4 or 16 bytes to that block, which complete on a barrier of the same block, in a cluster
// of two or more. The completion orders these bytes alone, not what the sender did before them (PTX
// ISA 8.9.1.1, of bulk copies).
__device__ inline void store_async(uint32_t to, float value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
        "f"(value), "r"(barrier)
        : "memory");
}
__device__ inline void store_async(uint32_t to, double2 value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "d"(value.x), "d"(value.y), "r"(barrier)
        : "memory");
}
__device__ inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

}  // namespace bapo::cuda
