// A GPU that is not there: what the functions of runtime.cpp say of it, and what they are asked
// for.
#pragma once

#include <cuda_runtime_api.h>

#include <map>

namespace emulated {

struct Device {
    int major = 9;
    int bytes_per_multiprocessor = 228 << 10;
    int bytes_per_block = 227 << 10;
    int clusters = 3;  // that are active at once
    int ptx_version = 90;
};
inline Device device;

// What a launch of a kernel may ask for, by the attributes of the kernel.
struct Allowed {
    int bytes = 48 << 10;  // of dynamic shared memory
    int cluster = 8;       // blocks in a cluster
};
inline std::map<const void*, Allowed> allowed;

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

// Of the queries of occupancy and the launches, one fails: after so many others; -1: none does.
struct Failure {
    cudaError_t error = cudaSuccess;
    int after = -1;

    cudaError_t now() { return after >= 0 && after-- == 0 ? error : cudaSuccess; }
};
inline Failure failure;

}  // namespace emulated
