// The operators of csrc/binding_cuda.h for CPU tensors, as bapo_kernels_cuda_on_host, and operators
// with which a test controls the GPU that is not there.

#include <dlfcn.h>

#include "binding_cuda.h"
#include "runtime.h"

namespace {

using namespace bapo;

constexpr int32_t kOfTensors = -1;  // the index of the device of CPU tensors
AOTITorchError stream_status = 0;

void device(int64_t major, int64_t bytes_per_multiprocessor, int64_t clusters, int64_t ptx_version,
            int64_t reserved) {
    emulated::device = {(int)major,
                        (int)bytes_per_multiprocessor,
                        (int)bytes_per_multiprocessor - 1024,
                        (int)clusters,
                        (int)ptx_version,
                        (int)reserved};
    emulated::launches = {};
    emulated::index_of_tensors = 0;
    emulated::allowed.clear();
    emulated::last = cudaSuccess;
    emulated::reason.clear();
    emulated::failure = {};
    cuda::clear_occupancy_cache();
}

void fail_launch(int64_t error, int64_t after) {
    emulated::failure = {(cudaError_t)error, (int)after};
}

// Sets the device that has the tensors, its stream that torch reports, and the status of that call.
void stream(int64_t handle, int64_t status, int64_t device) {
    emulated::stream = reinterpret_cast<void*>(handle);
    emulated::index_of_tensors = (int)device;
    stream_status = (AOTITorchError)status;
    emulated::launches = {};
}

// Blocks in a cluster of the last row pass; 0: it was the generic one.
int64_t last_cluster() { return emulated::launches.cluster; }
// Of float32 rows; 0: no cluster holds them.
int64_t planned_cluster(int64_t vocab) {
    const torch::stable::accelerator::DeviceGuard guard(kOfTensors);
    LogitRows rows{};
    rows.dtype = DType::kFloat32;
    rows.vocab = vocab;
    return cuda::planned_cluster(rows);
}
// Launches and memsets since the device or the stream was set.
int64_t launches() { return emulated::launches.count; }

}  // namespace

// Instead of torch's functions.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
    if (device != kOfTensors) return 1;  // the stream of another device
    if (stream_status == 0) *stream = emulated::stream;
    return stream_status;
}
AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
    *guard = nullptr;
    emulated::current = device == kOfTensors ? emulated::index_of_tensors : device;
    return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
    emulated::current = emulated::kNoDevice;
    return 0;
}

// The address and the elements of float64 memory that an operator allocates.
__attribute__((visibility("default"))) void (*allocated)(void* address, int64_t count) = nullptr;

AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                     uint64_t version) {
    static const auto call = reinterpret_cast<decltype(&torch_call_dispatcher)>(
        dlsym(RTLD_NEXT, "torch_call_dispatcher"));
    const AOTITorchError error = call(name, overload, stack, version);
    if (error == 0 && std::string_view(name) == "aten::new_empty") {
        const auto memory = reinterpret_cast<AtenTensorHandle>(stack[0]);
        void* address = nullptr;
        int64_t count = 0;
        aoti_torch_get_data_ptr(memory, &address), aoti_torch_get_numel(memory, &count);
        allocated(address, count);
    }
    return error;
}
}

STABLE_TORCH_LIBRARY_IMPL(bapo_kernels_cuda_on_host, CPU, m) {
    binding::register_operators<binding::Cuda>(m);
}
STABLE_TORCH_LIBRARY_IMPL(bapo_kernels_cuda_on_host, CompositeExplicitAutograd, m) {
    m.impl("device", TORCH_BOX(&device));
    m.impl("fail_launch", TORCH_BOX(&fail_launch));
    m.impl("stream", TORCH_BOX(&stream));
    m.impl("last_cluster", TORCH_BOX(&last_cluster));
    m.impl("planned_cluster", TORCH_BOX(&planned_cluster));
    m.impl("launches", TORCH_BOX(&launches));
}
