// The CUDA kernels as a backend of binding.h. May include torch's stable ABI and launch_cuda.h.
// All launches of a call are on torch's current stream: on another, they would race with torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "binding_sampling_sets.h"
#include "cuda/launch_cuda.h"
#include "tokens.h"

// Defined by a torch with CUDA alone.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));

[[gnu::used]] inline void bapo::cuda::warn_of_refusal(const char* message) {
    std::string text("bapo_kernels: the GPU refuses clusters; a slower row pass runs instead: ");
    aoti_torch_warn(__func__, __FILE__, __LINE__, (text + message).c_str());
}

namespace bapo::binding {

// Calls launch(stream) with torch's current stream on the device of a tensor.
template <typename F>
void launch_on(const Tensor& tensor, F launch) {
    const int32_t device = tensor.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "this torch is built without CUDA");
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                    "torch did not tell the current stream of CUDA device ", device);
    const char* const error = launch(stream);
    STD_TORCH_CHECK(error == nullptr, "a CUDA kernel was not launched: ", error);
}

// Memory for one launch.
template <typename T, typename Params>
T* scratch(const Params& params, const Tensor& like, Tensor& memory) {
    const int64_t words = cuda::scratch_words(params);
    if (words == 0) return nullptr;
    memory = torch::stable::new_empty(like, {words}, ScalarType::Double);
    return static_cast<T*>(memory.data_ptr());
}

template <typename Params>
void launch(const char* (*kernel)(const Params&, void*), const Params& params, const Tensor& like) {
    launch_on(like, [&](void* stream) { return kernel(params, stream); });
}
template <typename Params, typename T>
void launch(const char* (*kernel)(const Params&, T*, void*), const Params& params,
            const Tensor& like) {
    Tensor memory;
    launch_on(like, [&](void* stream) {
        return kernel(params, scratch<T>(params, like, memory), stream);
    });
}
template <typename Params, auto kernel>
void launched(const Params& params, const Tensor& like) {
    launch(kernel, params, like);
}

struct Cuda {
    static void check_columns(const LogitRows& rows) {
        constexpr int64_t kMost = 1 << 30;  // indices of 32 bits go a step beyond
        STD_TORCH_CHECK(rows.vocab <= kMost, "logits must have at most ", kMost, " columns, got ",
                        rows.vocab);
    }
    static void row_pass(const RowPassParams& params, const Tensor& like) {
        check_columns(params.rows);
        launch(cuda::pass_of_labels, params, like);
    }
    static void row_gradient(const RowGradientParams& params, const Tensor& like) {
        check_columns(params.rows);
        launch(cuda::gradient_of_labels, params, like);
    }
    static void sample_rows(const SampleParams& params, const Tensor& like) {
        check_columns(params.rows);
        launch(cuda::sample_rows, params, like);
    }
    static void scale(const LogitRows& rows, const float* factor, const Tensor& like) {
        launch_on(like, [&](void* stream) { return cuda::scale(rows, factor, stream); });
    }
    static void search(const ContributionParams& params, const Target& target,
                       const SearchResult& result, const Tensor& like) {
        Tensor memory;
        launch_on(like, [&](void* stream) {
            auto* const partials = scratch<Moments>(params, like, memory);
            return cuda::search(params, target, result, partials, stream);
        });
    }
    static constexpr auto prepare = launched<PrepareParams, cuda::prepare>;
    static constexpr auto contributions = launched<ContributionParams, cuda::contributions>;
    static constexpr auto token_loss = launched<TokenLossParams, cuda::token_loss>;
    static constexpr auto sequence_mean = launched<SequenceMeanParams, cuda::sequence_mean>;
    static constexpr auto solve = launched<SolveParams, cuda::solve>;
    static constexpr auto find_labels = launched<FindLabelsParams, cuda::find_labels>;
    static constexpr auto gather_sets = launched<MoveSetsParams, cuda::gather_sets>;
    static constexpr auto scatter_sets = launched<MoveSetsParams, cuda::scatter_sets>;
    static constexpr auto multiply_sets = launched<MultiplySetsParams, cuda::multiply_sets>;
    static constexpr auto head_sets_pass = launched<HeadSetPassParams, cuda::head_sets_pass>;
    static constexpr auto sets_dhidden = launched<SetHiddenGradientParams, cuda::sets_dhidden>;
    static constexpr auto sets_dweight = launched<SetWeightGradientParams, cuda::sets_dweight>;
};

}  // namespace bapo::binding
