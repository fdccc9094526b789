// The rest of the CUDA runtime that tests/cuda_driver needs: memory and the properties of the
// device. Device memory is uninitialised heap memory, and every call completes before it returns.
#pragma once

#include <cstdlib>

#include "cuda_runtime.h"

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

struct cudaDeviceProp {
    char name[256] = "a CPU instead of a GPU";
    int major = emulated::device.major, minor = 0;
    int multiProcessorCount = emulated::device.clusters;
    size_t sharedMemPerMultiprocessor = (size_t)emulated::device.bytes_per_multiprocessor;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    constexpr size_t kAlignment = 256;
    void* const memory =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    *pointer = static_cast<T*>(memory);
    return memory == nullptr;
}
inline cudaError_t cudaFree(void* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
namespace emulated {

// Rows of 18, 36, 72, 144 and 288 KB lie in clusters of up to 16 blocks, one cluster at a time.
inline const bool small_device = (device = {9, 144 << 10, 143 << 10, 1}, true);

}  // namespace emulated
