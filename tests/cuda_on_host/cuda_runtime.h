// A CPU instead of a GPU: enough of CUDA to run the source of the kernels in csrc/cuda under an
// adversary (scheduler.h). It tests what a kernel computes and how it synchronises, not how fast it
// is.
#pragma once

#include <cstdint>
#include <cstring>

#include "scheduler.h"

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
    int ptx_version = 90;
};
inline Device device;

// The launches since these values were last reset.
struct Launches {
    unsigned count = 0;
    unsigned cluster = 0;    // blocks in a cluster of the last launch that asked for them
    void* stream = nullptr;  // of the last launch
    bool on_one_stream = true;

    void add(void* on) {
        if (count++ && stream != on) on_one_stream = false;
        stream = on;
    }
};
inline Launches launches;

// An index of one dimension.
template <unsigned (*value)()>
struct Index {
    struct X {
        operator unsigned() const { return value(); }
    } x;
};
inline unsigned thread_index() { return scheduler.current->thread; }
inline unsigned block_index() { return scheduler.block().index; }
inline unsigned grid_size() { return scheduler.shape.grid; }

inline void wait_warp(const char* name) {
    Warp& warp = *scheduler.current->warp;
    scheduler.arrive_and_wait(warp.barrier, warp.size, name);
}
// The values of all lanes, valid until the lane's next exchange.
template <typename T>
const uint64_t* exchange(T value, const char* name) {
    static_assert(sizeof(T) <= 8);
    Fiber& fiber = *scheduler.current;
    uint64_t* const values = fiber.warp->exchanged[fiber.exchanges++ % 2];
    std::memcpy(&values[fiber.thread % kWarpSize], &value, sizeof value);
    wait_warp(name);
    return values;
}

}  // namespace emulated

inline emulated::Index<emulated::thread_index> threadIdx;
inline emulated::Index<emulated::block_index> blockIdx;
inline emulated::Index<emulated::grid_size> gridDim;

inline void __syncthreads() {
    emulated::scheduler.arrive_and_wait(emulated::scheduler.block().barriers[0],
                                        emulated::scheduler.shape.threads, "__syncthreads");
}
inline void __syncwarp() { emulated::wait_warp("__syncwarp"); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    const unsigned from = (threadIdx.x % emulated::kWarpSize) ^ (unsigned)mask;
    std::memcpy(&value, &emulated::exchange(value, "a shuffle")[from], sizeof value);
    return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    std::memcpy(&value, &emulated::exchange(value, "a shuffle")[from], sizeof value);
    return value;
}
inline int __reduce_max_sync(unsigned, int value) {
    const uint64_t* const values = emulated::exchange(value, "a maximum");
    for (unsigned lane = 0; lane < emulated::scheduler.current->warp->size; ++lane) {
        value = std::max(value, (int)values[lane]);
    }
    return value;
}
inline unsigned __ballot_sync(unsigned, bool flag) {
    const uint64_t* const flags = emulated::exchange((uint64_t)flag, "a ballot");
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < emulated::scheduler.current->warp->size; ++lane) {
        ballot |= (unsigned)flags[lane] << lane;
    }
    return ballot;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// Atomic because threads change only where they pause.
template <typename T>
T atomicAdd(T* to, T value) {
    emulated::scheduler.maybe_pause();
    const T before = *to;
    *to += value;
    return before;
}
inline int atomicMin(int* to, int value) {
    emulated::scheduler.maybe_pause();
    const int before = *to;
    *to = before < value ? before : value;
    return before;
}
inline void __threadfence() { emulated::scheduler.maybe_pause(); }
template <typename T>
T __ldcg(const T* from) {
    emulated::scheduler.maybe_pause();
    return *from;
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
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return (unsigned)(((uint64_t)high << 32 | low) >> bits % 32);
}
inline float __fdividef(float a, float b) { return a / b; }
inline void __stcs(uint4* to, uint4 value) {
    emulated::scheduler.maybe_pause();
    if (reinterpret_cast<uintptr_t>(to) % 16) emulated::scheduler.fail("store misaligned");
    *to = value;
}
template <typename T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
    return a > b ? a : b;
}

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidClusterSize = 912;
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidClusterSize ? "cluster misconfiguration"
           : error == cudaErrorInvalidValue     ? "invalid argument"
                                                : "no error";
}
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMultiProcessorCount,
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    const auto& [major, per_multiprocessor, per_block, clusters, ptx_version] = emulated::device;
    *value = which == cudaDevAttrComputeCapabilityMajor             ? major
             : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? per_multiprocessor
             : which == cudaDevAttrMultiProcessorCount              ? 1
                                                                    : per_block;
    return cudaSuccess;
}
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
constexpr int cudaFuncAttributePreferredSharedMemoryCarveout = 1,
              cudaFuncAttributeNonPortableClusterSizeAllowed = 2,
              cudaSharedmemCarveoutMaxShared = 100;
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int which, int value) {
    const bool fits = which != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                      value <= emulated::device.bytes_per_block;
    return fits ? cudaSuccess : cudaErrorInvalidValue;
}
struct cudaFuncAttributes {
    int ptxVersion;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
    attributes->ptxVersion = emulated::device.ptx_version;
    return cudaSuccess;
}
constexpr int cudaLaunchAttributeClusterDimension = 0,
              cudaLaunchAttributeClusterSchedulingPolicyPreference = 1,
              cudaClusterSchedulingPolicySpread = 1;
struct cudaLaunchAttribute {
    int id;
    struct {
        dim3 clusterDim;
        int clusterSchedulingPolicyPreference;
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
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    emulated::launches.add(stream);
    std::memset(to, value, bytes);
    return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    const unsigned cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
    const unsigned blocks = config->gridDim.x;
    if (blocks == 0 || blocks % cluster) return cudaErrorInvalidValue;
    if (config->numAttrs && emulated::device.clusters == 0) return cudaErrorInvalidClusterSize;
    emulated::Launches& launches = emulated::launches;
    if (config->numAttrs) launches.cluster = cluster;
    launches.add(config->stream);
    emulated::scheduler.launch({blocks, config->blockDim.x, cluster, config->dynamicSmemBytes},
                               [=] { kernel(arguments...); });
    return cudaSuccess;
}
