// GPUs that are not there: what the functions of runtime.cpp say of them, and what they are asked
// for.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <utility>

namespace emulated {

struct Device {
    int major = 9;
    int bytes_per_multiprocessor = 228 << 10;
    int bytes_per_block = 227 << 10;
    int clusters = 3;  // that are active at once
    int ptx_version = 90;
    int reserved = 0;  // bytes of static shared memory, besides a kernel's own
};
inline Device device;  // each of them

// The device that has the tensors, and the current one, which torch's guard sets.
constexpr int kNoDevice = 7;
inline int index_of_tensors = 0, current = kNoDevice;
inline void* stream = nullptr;  // torch's current one there

// What a launch of a kernel on a device may ask for, by the attributes of the kernel.
struct Allowed {
    int bytes = -1;   // of dynamic shared memory; -1: as much as leaves 48 KB with the static one
    int cluster = 8;  // blocks in a cluster
};
inline std::map<std::pair<int, const void*>, Allowed> allowed;

// What cudaGetLastError returns, and why that call was refused, for cudaGetErrorString.
inline cudaError_t last = cudaSuccess;
inline std::string reason;

// The launches since these values were last reset.
struct Launches {
    unsigned count = 0;
    unsigned cluster = 0;  // blocks in a cluster of the last launch that asked for them
};
inline Launches launches;

// Of the queries of occupancy and the launches, one fails: after so many others; -1: none does.
struct Failure {
    cudaError_t error = cudaSuccess;
    int after = -1;

    cudaError_t now() { return after >= 0 && after-- == 0 ? error : cudaSuccess; }
};
inline Failure failure;

}  // namespace emulated
