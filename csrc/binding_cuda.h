// The CUDA kernels as a backend of binding.h, on torch's current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "binding.h"
#include "cuda/launch_cuda.h"
#include "tokens.h"

// Defined by a torch with CUDA alone.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));

namespace bapo::binding {

// The device and stream on which the kernels of a call are launched.
class Launch {
  public:
    explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                        "this torch is built without CUDA");
        const int32_t device = tensor.get_device_index();
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream_) == 0,
                        "torch did not tell the current stream of CUDA device ", device);
    }
    void* stream() const { return stream_; }
    void check(const char* error) const {
        STD_TORCH_CHECK(error == nullptr, "a CUDA kernel was not launched: ", error);
    }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_ = nullptr;
};

inline Tensor doubles(const Tensor& like, int64_t count) {
    return torch::stable::new_empty(like, {count}, ScalarType::Double);
}

struct Cuda {
    static void row_pass(const RowPassParams& params, const Tensor& logits) {
        const Launch launch(logits);
        launch.check(cuda::row_pass(params, launch.stream()));
    }
    static void row_gradient(const RowGradientParams& params, const Tensor& logits) {
        const Launch launch(logits);
        launch.check(cuda::row_gradient(params, launch.stream()));
    }
    static void contributions(const ContributionParams& params, int64_t points,
                              const Tensor& log_probs) {
        const Launch launch(log_probs);
        const Tensor partials = doubles(log_probs, cuda::token_blocks(params.count) * points);
        auto* const data = static_cast<double*>(partials.data_ptr());
        launch.check(cuda::contributions(params, (int)points, data, launch.stream()));
    }
    static void solve(const double* table, const Grid& lower, const Grid& upper,
                      const TargetParams& target, float* bounds, double* masses,
                      const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::solve(table, lower, upper, target, bounds, masses, launch.stream()));
    }
    static void policy(const PolicyParams& params, const Tensor& log_probs) {
        const Launch launch(log_probs);
        const Tensor partials = doubles(log_probs, cuda::token_blocks(params.count) * kPolicySums);
        auto* const data = static_cast<double*>(partials.data_ptr());
        launch.check(cuda::policy(params, data, launch.stream()));
    }
};

inline void scale(Tensor x, Tensor factor) {
    const Launch launch(x);
    const Arguments args(x);
    const LogitRows rows = args.rows_of(x);
    launch.check(cuda::scale(rows, args.data<float>(factor, 1, "factor"), launch.stream()));
}

}  // namespace bapo::binding
