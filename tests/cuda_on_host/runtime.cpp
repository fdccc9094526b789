// The functions of the CUDA runtime that csrc/cuda calls, in the place of libcudart. Kernels are
// handed to `execute`, by the names that they have in PTX.
#include "runtime.h"

#include <climits>
#include <cstring>
#include <map>

#define VISIBLE __attribute__((visibility("default")))  // for tests

namespace {

// Grid, threads, blocks in a cluster, bytes of dynamic shared memory and compute capability;
// addresses of the arguments. Returns whether it failed.
using Execute = int (*)(const char* kernel, const unsigned* launch, void** arguments);

std::map<const void*, const char*>& kernels() {
    static std::map<const void*, const char*> all;
    return all;
}

}  // namespace

extern "C" {

VISIBLE Execute execute = nullptr;

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
    kernels()[function] = name;
}
// Calls of kernels as functions, of which there are none.
char __cudaInitModule(void**) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorUnknown; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorUnknown; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    return cudaErrorUnknown;
}

const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidClusterSize     ? "cluster misconfiguration"
           : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
           : error == cudaErrorInvalidValue         ? "invalid argument"
           : error == cudaErrorLaunchFailure        ? "unspecified launch failure"
                                                    : "unknown error";
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    const auto& [major, per_multiprocessor, per_block, clusters, ptx_version] = emulated::device;
    *value = which == cudaDevAttrComputeCapabilityMajor             ? major
             : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? per_multiprocessor
             : which == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? per_block
             : which == cudaDevAttrMultiProcessorCount              ? 1
                                                                    : -1;
    return *value < 0 ? cudaErrorInvalidValue : cudaSuccess;
}
VISIBLE cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
    if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) {
        emulated::allowed[function].cluster = value && emulated::device.major < 12 ? 16 : 8;
    } else if (which == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > emulated::device.bytes_per_block) return cudaErrorInvalidValue;
        emulated::allowed[function].bytes = value;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    attributes->ptxVersion = emulated::device.ptx_version;
    return cudaSuccess;
}
cudaError_t cudaFuncGetName(const char** name, const void* function) {
    *name = kernels().at(function);
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
    if (const cudaError_t error = emulated::failure.now()) return error;
    *count = emulated::device.clusters;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    emulated::launches.add(stream);
    std::memset(to, value, bytes);
    return cudaSuccess;
}
VISIBLE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                        void** arguments) {
    const unsigned cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
    const dim3 grid = config->gridDim, block = config->blockDim;
    const emulated::Allowed& most = emulated::allowed[function];
    if (grid.x == 0 || grid.x > INT_MAX || grid.x % cluster) return cudaErrorInvalidConfiguration;
    if (config->dynamicSmemBytes > (size_t)most.bytes) return cudaErrorInvalidValue;
    if (config->numAttrs && (emulated::device.clusters == 0 || cluster > (unsigned)most.cluster)) {
        return cudaErrorInvalidClusterSize;
    }
    if (const cudaError_t error = emulated::failure.now()) return error;
    if (config->numAttrs) emulated::launches.cluster = cluster;
    emulated::launches.add(config->stream);
    const auto bytes = (unsigned)config->dynamicSmemBytes, major = (unsigned)emulated::device.major;
    const unsigned launch[] = {grid.x, grid.y, grid.z, block.x, cluster, bytes, major};
    const bool failed = execute(kernels().at(function), launch, arguments);
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}
}
