// Registers the CUDA kernels. Knows nothing of CUDA but a stream, so that any compiler builds it,
// and loads on a torch without CUDA, where nothing calls it.

#include <torch/csrc/stable/accelerator.h>

#include "binding.h"
#include "cuda/launch_cuda.h"
#include "tokens.h"

// Only a torch with CUDA has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));

namespace {

using namespace bapo;
using torch::stable::Tensor;

// The device and stream that a call's kernels go to.
class Launch {
  public:
    explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                        "this torch is built without CUDA");
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_);
    }
    void* stream() const { return stream_; }
    void check(const char* error) const {
        STD_TORCH_CHECK(error == nullptr, "a CUDA kernel was not launched: ", error);
    }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_ = nullptr;
};

Tensor doubles(const Tensor& like, int64_t count) {
    return torch::stable::new_empty(like, {count}, torch::headeronly::ScalarType::Double);
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
                      const TargetParams& target, float* bounds, double* shares,
                      const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::solve(table, lower, upper, target, bounds, shares, launch.stream()));
    }
    static void policy(const PolicyParams& params, const Tensor& log_probs) {
        const Launch launch(log_probs);
        const Tensor partials = doubles(log_probs, cuda::token_blocks(params.count) * kPolicySums);
        auto* const data = static_cast<double*>(partials.data_ptr());
        launch.check(cuda::policy(params, data, launch.stream()));
    }
};

void scale(Tensor x, Tensor factor) {
    const Launch launch(x);
    const binding::Arguments on(x);
    const LogitRows rows = on.rows_of(x);
    launch.check(cuda::scale(rows, on.data<float>(factor, 1, "factor"), launch.stream()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bapo_kernels, CUDA, m) {
    binding::register_operators<Cuda>(m);
    m.impl("scale_", TORCH_BOX(&scale));
}
