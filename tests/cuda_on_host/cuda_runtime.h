// A CPU in the place of a GPU: enough of CUDA to run the kernels of csrc/cuda as they are written.
// A thread is a fiber, a block is a thread of the operating system, the blocks of a cluster run at
// once, clusters one after the other. Slow and small: for tests of what a kernel computes and of
// its synchronisation, not of how fast it is.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};

namespace emulated {

struct Device {
    int major = 9;
    int bytes_per_multiprocessor = 228 << 10;
    int bytes_per_block = 227 << 10;
    int clusters = 3;  // that are active at once
};
inline Device device;
inline unsigned last_cluster = 0;  // blocks in a cluster of the last launch that asked for them

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};

struct Cluster;

// One block, on one thread of the operating system.
struct Block {
    dim3 grid, index, threads;
    unsigned rank = 0;
    Cluster* cluster = nullptr;
    std::vector<uint8_t> memory;
    std::vector<Fiber> fibers;
    ucontext_t scheduler;
    unsigned current = 0;
    std::vector<Barrier> barriers = std::vector<Barrier>(16);
    std::vector<Barrier> warps;
    std::vector<uint64_t> exchanged;

    uint8_t* shared() {
        return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 128 *
                                          128);
    }
    void yield() { swapcontext(&fibers[current].context, &scheduler); }
    void wait(Barrier& barrier, int count) {
        const unsigned generation = barrier.generation;
        if (++barrier.arrived == count) {
            barrier.arrived = 0;
            ++barrier.generation;
        }
        while (barrier.generation == generation) yield();
    }
    unsigned warp_size(unsigned warp) const { return std::min(32u, threads.x - 32 * warp); }
    void wait_warp() { wait(warps[current / 32], (int)warp_size(current / 32)); }

    template <typename T>
    T exchange(T value, unsigned from) {
        static_assert(sizeof(T) <= 8);
        uint64_t raw = 0;
        std::memcpy(&raw, &value, sizeof value);
        exchanged[current] = raw;
        wait_warp();
        raw = exchanged[current / 32 * 32 + from];
        wait_warp();
        std::memcpy(&value, &raw, sizeof value);
        return value;
    }
};
inline thread_local Block* block = nullptr;

struct Cluster {
    std::vector<Block> blocks;
    std::mutex mutex;  // of barriers in shared memory, which other blocks reach
    std::atomic<int> arrived{0};
    std::atomic<unsigned> generation{0};

    void sync() {
        const unsigned before = generation;
        if (++arrived == (int)(blocks.size() * blocks[0].threads.x)) {
            arrived = 0;
            ++generation;
        }
        while (generation == before) block->yield();
    }
};

inline std::function<void()>* entry = nullptr;

inline void start_fiber() {
    (*entry)();
    block->fibers[block->current].done = true;
    swapcontext(&block->fibers[block->current].context, &block->scheduler);
}

inline void run_block(Block& mine) {
    block = &mine;
    mine.fibers.resize(mine.threads.x);
    mine.warps.resize((mine.threads.x + 31) / 32);
    mine.exchanged.resize(mine.threads.x);
    constexpr size_t kStack = 64 << 10;
    for (Fiber& fiber : mine.fibers) {
        fiber.stack = std::make_unique<char[]>(kStack);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start_fiber, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (mine.current = 0; mine.current < mine.threads.x; ++mine.current) {
            Fiber& fiber = mine.fibers[mine.current];
            if (fiber.done) continue;
            any = true;
            swapcontext(&mine.scheduler, &fiber.context);
        }
        std::this_thread::yield();
    }
}

inline void launch(dim3 grid, dim3 threads, unsigned cluster_size, size_t bytes,
                   std::function<void()> kernel) {
    entry = &kernel;
    for (unsigned first = 0; first < grid.x; first += cluster_size) {
        Cluster cluster;
        cluster.blocks.resize(cluster_size);
        std::vector<std::thread> running;
        for (unsigned rank = 0; rank < cluster_size; ++rank) {
            Block& mine = cluster.blocks[rank];
            mine.grid = grid;
            mine.index = first + rank;
            mine.threads = threads;
            mine.rank = rank;
            mine.cluster = &cluster;
            mine.memory.assign(bytes + 128, 0xff);  // NaN, and no barrier
            running.emplace_back([&mine] { run_block(mine); });
        }
        for (std::thread& thread : running) thread.join();
    }
}

struct ThreadIndex {
    struct X {
        operator unsigned() const { return block->current; }
    } x;
};
struct BlockIndex {
    struct X {
        operator unsigned() const { return block->index.x; }
    } x;
};
struct GridSize {
    struct X {
        operator unsigned() const { return block->grid.x; }
    } x;
};

}  // namespace emulated

inline emulated::ThreadIndex threadIdx;
inline emulated::BlockIndex blockIdx;
inline emulated::GridSize gridDim;

inline void __syncthreads() {
    emulated::block->wait(emulated::block->barriers[0], (int)emulated::block->threads.x);
}
inline void __syncwarp() { emulated::block->wait_warp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated::block->exchange(value, (emulated::block->current % 32) ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool flag) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        ballot |= (unsigned)emulated::block->exchange((uint64_t)flag, lane) << lane;
    }
    return ballot;
}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
template <typename To, typename From>
To emulated_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline void __stcs(uint4* to, uint4 value) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) std::abort();
    *to = value;
}
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    const auto& [major, per_multiprocessor, per_block, clusters] = emulated::device;
    *value = which == cudaDevAttrComputeCapabilityMajor             ? major
             : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? per_multiprocessor
                                                                    : per_block;
    return cudaSuccess;
}
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
    return bytes > emulated::device.bytes_per_block;
}
constexpr int cudaLaunchAttributeClusterDimension = 0;
struct cudaLaunchAttribute {
    int id;
    struct {
        dim3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel, const cudaLaunchConfig_t*) {
    *count = emulated::device.clusters;
    return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    const unsigned cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
    if (config->numAttrs) emulated::last_cluster = cluster;
    emulated::launch(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes,
                     [=] { kernel(arguments...); });
    return cudaSuccess;
}
