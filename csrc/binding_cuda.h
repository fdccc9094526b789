// The CUDA kernels as a backend of binding.h, on torch's current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "binding_sets.h"
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

// Memory for the partial results of one launch.
template <typename T>
T* scratch(const Tensor& like, int64_t count, Tensor& memory) {
    const int64_t words = count * (int64_t)(sizeof(T) / sizeof(double));
    memory = torch::stable::new_empty(like, {words}, ScalarType::Double);
    return static_cast<T*>(memory.data_ptr());
}

struct Cuda {
    static void check_columns(const LogitRows& rows) {
        constexpr int64_t kMost = 1 << 30;  // an index of 32 bits, and a step beyond
        STD_TORCH_CHECK(rows.vocab <= kMost, "logits must have at most ", kMost, " columns, got ",
                        rows.vocab);
    }
    static void row_pass(const RowPassParams& params, const Tensor& logits) {
        check_columns(params.rows);
        const Launch launch(logits);
        launch.check(cuda::row_pass(params, launch.stream()));
    }
    static void row_gradient(const RowGradientParams& params, const Tensor& logits) {
        check_columns(params.rows);
        const Launch launch(logits);
        launch.check(cuda::row_gradient(params, launch.stream()));
    }
    static void prepare(const PrepareParams& params, const Tensor& tokens) {
        const Launch launch(tokens);
        Tensor memory;
        cuda::CountedTokens* counted = nullptr;
        if (needs_counts(params)) {
            const int64_t words = cuda::counted_words(params);
            counted =
                reinterpret_cast<cuda::CountedTokens*>(scratch<int64_t>(tokens, words, memory));
        }
        launch.check(cuda::prepare(params, counted, launch.stream()));
    }
    static void sequence_mean(const SequenceMeanParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::sequence_mean(params, launch.stream()));
    }
    static void contributions(const ContributionParams& params, const Tensor& like) {
        const Launch launch(like);
        Tensor memory;
        auto* const partials = scratch<Moments>(like, cuda::search_partials(params), memory);
        launch.check(cuda::contributions(params, partials, launch.stream()));
    }
    static void search(const ContributionParams& params, const TargetParams& target,
                       const SearchResult& result, const Tensor& like) {
        const Launch launch(like);
        Tensor memory;
        auto* const partials = scratch<Moments>(like, cuda::search_partials(params), memory);
        launch.check(cuda::search(params, target, result, partials, launch.stream()));
    }
    static void solve(const SolveParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::solve(params, launch.stream()));
    }
    static void policy(const PolicyParams& params, const Tensor& like) {
        const Launch launch(like);
        Tensor memory;
        auto* const partials = scratch<double>(like, cuda::policy_partials(params.count), memory);
        launch.check(cuda::policy(params, partials, launch.stream()));
    }
    static void find_labels(const FindLabelsParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::find_labels(params, launch.stream()));
    }
    static void gather_sets(const MoveSetsParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::gather_sets(params, launch.stream()));
    }
    static void scatter_sets(const MoveSetsParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::scatter_sets(params, launch.stream()));
    }
    static void sets_pass(const SetPassParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::sets_pass(params, launch.stream()));
    }
    static void sets_gradient(const SetGradientParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::sets_gradient(params, launch.stream()));
    }
    static void multiply_sets(const MultiplySetsParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::multiply_sets(params, launch.stream()));
    }
    static void head_sets_pass(const HeadSetPassParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::head_sets_pass(params, launch.stream()));
    }
    static void sets_dhidden(const SetHiddenGradientParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::sets_dhidden(params, launch.stream()));
    }
    static void sets_dweight(const SetWeightGradientParams& params, const Tensor& like) {
        const Launch launch(like);
        launch.check(cuda::sets_dweight(params, launch.stream()));
    }
};

inline void scale(Tensor x, Tensor factor) {
    const Launch launch(x);
    const Arguments args(x);
    const LogitRows rows = args.rows_of(x);
    launch.check(cuda::scale(rows, args.data<float>(factor, 1, "factor"), launch.stream()));
}

}  // namespace bapo::binding
