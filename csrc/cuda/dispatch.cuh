// Turns the run-time properties of a launch into template arguments of a kernel, and launches it,
// on row_math.cuh. kAligned for a row that is not aligned would be a misaligned access.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "row_math.cuh"

namespace bapo::cuda {

inline Scales scales_of(const Transform& transform) {
    const double inner = transform.softcapped ? transform.logit_scale / transform.softcap : 1.0;
    return {(float)inner, scale2_of(transform)};
}

// Whether every row starts at a multiple of 16 bytes.
inline bool aligned(const void* data, DType dtype, int64_t rows, int64_t row_stride,
                    int64_t batches = 1, int64_t batch_stride = 0) {
    const int64_t steps = (rows > 1 ? row_stride : 0) | (batches > 1 ? batch_stride : 0);
    return (reinterpret_cast<uintptr_t>(data) | (uintptr_t)(steps * size_of(dtype))) % 16 == 0;
}
// A gradient that is absent has neither an address nor strides.
inline bool aligned(const LogitRows& rows) {
    return aligned(rows.logits, rows.dtype, rows.rows, rows.row_stride, rows.batches,
                   rows.batch_stride) &&
           aligned(rows.grad, rows.dtype, rows.rows, rows.grad_row_stride, rows.batches,
                   rows.grad_batch_stride);
}

// Calls f.operator()<T>().
template <typename F>
auto with_dtype(DType dtype, F f) {
    switch (dtype) {
        case DType::kBFloat16: return f.template operator()<__nv_bfloat16>();
        case DType::kFloat16: return f.template operator()<__half>();
        default: return f.template operator()<float>();
    }
}

// Calls f.operator()<T, kSoftcap, kAligned>().
template <typename F>
auto with_row_type(const LogitRows& rows, F f) {
    const auto with_flags = [&]<typename T>() {
        if (rows.transform.softcapped) {
            return aligned(rows) ? f.template operator()<T, true, true>()
                                 : f.template operator()<T, true, false>();
        }
        return aligned(rows) ? f.template operator()<T, false, true>()
                             : f.template operator()<T, false, false>();
    };
    return with_dtype(rows.dtype, with_flags);
}

inline const char* message_of(cudaError_t error) {
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // forgets it: torch's next launch would raise it again
    return cudaGetErrorString(error);
}
// Also names the launch; valid until the next message of this thread.
inline const char* message_of(cudaError_t error, const void* kernel,
                              const cudaLaunchConfig_t& config) {
    if (error == cudaSuccess) return nullptr;
    static thread_local char message[1024];
    const char* name = "its name is unknown";
    cudaFuncGetName(&name, kernel);
    std::snprintf(message, sizeof message,
                  "%s (%u blocks of %u threads with %zu bytes of shared memory each, of the kernel "
                  "%.600s)",
                  message_of(error), config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes,
                  name);
    return message;
}

// Dynamic shared memory that needs no attribute of the kernel, and the most that a launch takes.
constexpr int kUnaskedBytes = 8 << 10, kMostDynamicBytes = 64 << 10;

// Launches kernel(arguments...) with dynamic shared memory; without blocks, nothing.
template <typename... Parameters, typename... Arguments>
const char* launch_with_memory(void (*kernel)(Parameters...), int64_t blocks, int threads,
                               int bytes, void* stream, Arguments... arguments) {
    if (blocks == 0) return nullptr;
    if (bytes > kUnaskedBytes) {
        // Always the same, so that threads with other launches do not take it back.
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostDynamicBytes);
        if (error != cudaSuccess) return message_of(error);
    }
    cudaLaunchConfig_t config{};
    config.gridDim = (unsigned)blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    return message_of(error, reinterpret_cast<const void*>(kernel), config);
}
template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, void* stream,
                   Arguments... arguments) {
    return launch_with_memory(kernel, blocks, threads, 0, stream, arguments...);
}

// Launches kernel.operator()<T>(), a warp per row.
template <typename Kernel, typename... Arguments>
const char* over_rows(Kernel kernel, const LogitRows& rows, void* stream, Arguments... arguments) {
    const int64_t blocks = (rows.count() + kRowsPerBlock - 1) / kRowsPerBlock;
    return with_dtype(rows.dtype, [&]<typename T>() {
        return launch(kernel.template operator()<T>(), blocks, kRowsPerBlock * kWarp, stream,
                      arguments...);
    });
}

}  // namespace bapo::cuda
