// The operators of bapo_kernels over the CUDA kernels on CPU tensors, as bapo_kernels_cuda_on_host.

#include "binding.h"

#include <vector>

#include "cuda/launch_cuda.h"
#include "cuda_runtime.h"
#include "tokens.h"

namespace {

using namespace bapo;
using torch::stable::Tensor;

void check(const char* error) { STD_TORCH_CHECK(error == nullptr, error); }

struct CudaOnHost {
    static void row_pass(const RowPassParams& params, const Tensor&) {
        check(cuda::row_pass(params, nullptr));
    }
    static void row_gradient(const RowGradientParams& params, const Tensor&) {
        check(cuda::row_gradient(params, nullptr));
    }
    static void contributions(const ContributionParams& params, int64_t points, const Tensor&) {
        std::vector<double> partials(cuda::token_blocks(params.count) * points);
        check(cuda::contributions(params, (int)points, partials.data(), nullptr));
    }
    static void solve(const double* table, const Grid& lower, const Grid& upper,
                      const TargetParams& target, float* bounds, double* shares, const Tensor&) {
        check(cuda::solve(table, lower, upper, target, bounds, shares, nullptr));
    }
    static void policy(const PolicyParams& params, const Tensor&) {
        std::vector<double> partials(cuda::token_blocks(params.count) * kPolicySums);
        check(cuda::policy(params, partials.data(), nullptr));
    }
};

void scale(Tensor x, Tensor factor) {
    const binding::Arguments on(x);
    const LogitRows rows = on.rows_of(x);
    check(cuda::scale(rows, on.data<float>(factor, 1, "factor"), nullptr));
}

void device(int64_t major, int64_t bytes_per_multiprocessor, int64_t clusters) {
    emulated::device = {(int)major, (int)bytes_per_multiprocessor,
                        (int)bytes_per_multiprocessor - 1024, (int)clusters};
    emulated::last_cluster = 0;
}

// Blocks in a cluster of the last row pass; 0: it was the generic one.
int64_t last_cluster() { return emulated::last_cluster; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bapo_kernels_cuda_on_host, CPU, m) {
    binding::register_operators<CudaOnHost>(m);
    m.impl("scale_", TORCH_BOX(&scale));
}
STABLE_TORCH_LIBRARY_IMPL(bapo_kernels_cuda_on_host, CompositeExplicitAutograd, m) {
    m.impl("device", TORCH_BOX(&device));
    m.impl("last_cluster", TORCH_BOX(&last_cluster));
}
