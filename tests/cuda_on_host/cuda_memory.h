// The rest of the CUDA runtime that tests/cuda_driver needs: memory, events, the properties of the
// device. Device memory is uninitialised heap memory, and every call completes before it returns.
#pragma once

#include <chrono>
#include <cstdlib>

#include "cuda_runtime.h"

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

struct cudaDeviceProp {
    char name[256] = "a CPU instead of a GPU";
    int major = emulated::device.major, minor = 0;
    int multiProcessorCount = emulated::device.clusters;
    size_t sharedMemPerMultiprocessor = (size_t)emulated::device.bytes_per_multiprocessor;
    size_t sharedMemPerBlockOptin = (size_t)emulated::device.bytes_per_block;
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
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t = nullptr) {
    return cudaMemcpy(to, from, bytes, kind);
}

using cudaEvent_t = std::chrono::steady_clock::time_point*;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new std::chrono::steady_clock::time_point;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
    *event = std::chrono::steady_clock::now();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = std::chrono::duration<float, std::milli>(*end - *start).count();
    return cudaSuccess;
}

namespace emulated {

// Rows of 18, 36, 72, 144 and 288 KB lie in clusters of up to 16 blocks, one cluster at a time.
inline const bool small_device = (device = {9, 144 << 10, 143 << 10, 1}, true);

}  // namespace emulated
