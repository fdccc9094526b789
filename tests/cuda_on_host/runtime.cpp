// The functions of the CUDA runtime that csrc/cuda calls, in the place of libcudart. Kernels are
// handed to `execute`, by the names that they have in PTX.
#include "runtime.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <map>

#define VISIBLE __attribute__((visibility("default")))  // for tests

// Grid, threads, blocks in a cluster, bytes of dynamic shared memory and compute capability;
// addresses of the arguments. Returns whether it failed.
using Execute = int (*)(const char* kernel, const unsigned* launch, void** arguments);
// Bytes of static shared memory of a kernel on a device of this compute capability.
using StaticBytes = int (*)(const char* kernel, int major);

extern "C" {
VISIBLE Execute execute = nullptr;
VISIBLE StaticBytes static_bytes = nullptr;
}

namespace {

std::map<const void*, const char*>& kernels() {
    static std::map<const void*, const char*> all;
    return all;
}

constexpr int kUnaskedBytes = 48 << 10;  // of shared memory, without an attribute

cudaError_t refuse(cudaError_t error, const std::string& reason = {}) {
    emulated::reason = reason;
    return emulated::last = error;
}
// Without a device guard, or on another stream than torch's current one.
cudaError_t misplaced(const std::string& function, const void* stream = emulated::stream) {
    if (emulated::current == emulated::kNoDevice) {
        return refuse(cudaErrorInvalidDevice, function + " without a device guard");
    }
    if (stream == emulated::stream) return cudaSuccess;
    return refuse(cudaErrorInvalidResourceHandle, function + " on a stream that is not torch's");
}

int bytes_of(const char* kernel) {  // of static shared memory
    return static_bytes(kernel, emulated::device.major) + emulated::device.reserved;
}

}  // namespace

extern "C" {

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
    static thread_local std::string text;
    if (!emulated::reason.empty()) {
        text = std::exchange(emulated::reason, {});
        return text.c_str();
    }
    return error == cudaErrorInvalidClusterSize     ? "cluster misconfiguration"
           : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
           : error == cudaErrorInvalidValue         ? "invalid argument"
           : error == cudaErrorLaunchFailure        ? "unspecified launch failure"
                                                    : "unknown error";
}
cudaError_t cudaGetDevice(int* device) {
    *device = emulated::current;
    return misplaced("cudaGetDevice");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    if (const cudaError_t error = misplaced("cudaDeviceGetAttribute")) return error;
    const emulated::Device& device = emulated::device;
    *value = which == cudaDevAttrComputeCapabilityMajor ? device.major
             : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor
                 ? device.bytes_per_multiprocessor
             : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? device.bytes_per_block
             : which == cudaDevAttrMultiProcessorCount          ? 1
                                                                : -1;
    return *value < 0 ? cudaErrorInvalidValue : cudaSuccess;
}
VISIBLE cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
    const std::string name = kernels().at(function);
    if (const cudaError_t error = misplaced("cudaFuncSetAttribute of " + name)) return error;
    emulated::Allowed& most = emulated::allowed[{emulated::current, function}];
    if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) {
        most.cluster = value && emulated::device.major < 12 ? 16 : 8;
    } else if (which == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value + bytes_of(name.c_str()) > emulated::device.bytes_per_block) {
            return refuse(cudaErrorInvalidValue,
                          "no room for static memory beside the dynamic memory of " + name);
        }
        if (value < most.bytes) {
            return refuse(cudaErrorInvalidValue,
                          "another thread may be about to launch with more memory " + name);
        }
        most.bytes = value;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    attributes->ptxVersion = emulated::device.ptx_version;
    attributes->sharedSizeBytes = bytes_of(kernels().at(function));
    return misplaced("cudaFuncGetAttributes");
}
cudaError_t cudaFuncGetName(const char** name, const void* function) {
    *name = kernels().at(function);
    return cudaSuccess;
}
VISIBLE cudaError_t cudaGetLastError() { return std::exchange(emulated::last, cudaSuccess); }
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
    if (const cudaError_t error = emulated::failure.now()) return refuse(error);
    *count = emulated::device.clusters;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    if (const cudaError_t error = misplaced("cudaMemsetAsync", stream)) return error;
    ++emulated::launches.count;
    std::memset(to, value, bytes);
    return cudaSuccess;
}
VISIBLE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                        void** arguments) {
    const unsigned cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
    const dim3 grid = config->gridDim, block = config->blockDim;
    const char* const name = kernels().at(function);
    if (const cudaError_t error = misplaced("a launch", config->stream)) return error;
    const emulated::Allowed& most = emulated::allowed[{emulated::current, function}];
    const int unasked = kUnaskedBytes - bytes_of(name);
    if (grid.x == 0 || grid.x > INT_MAX || grid.x % cluster) {
        return refuse(cudaErrorInvalidConfiguration);
    }
    if ((int)config->dynamicSmemBytes > std::max(most.bytes, unasked)) {
        return refuse(cudaErrorInvalidValue,
                      "more shared memory than the kernel's attribute allows");
    }
    if (config->numAttrs && (emulated::device.clusters == 0 || cluster > (unsigned)most.cluster)) {
        return refuse(cudaErrorInvalidClusterSize);
    }
    if (const cudaError_t error = emulated::failure.now()) return refuse(error);
    if (config->numAttrs) emulated::launches.cluster = cluster;
    ++emulated::launches.count;
    const auto bytes = (unsigned)config->dynamicSmemBytes, major = (unsigned)emulated::device.major;
    const unsigned launch[] = {grid.x, grid.y, grid.z, block.x, cluster, bytes, major};
    const bool failed = execute(name, launch, arguments);
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}
}
