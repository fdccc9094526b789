// Registers the CUDA kernels. Of CUDA it needs a stream alone, so that any compiler builds it; it
// loads on a torch without CUDA, where nothing calls it. A symbol of CUDA here would end that.

#include "binding_cuda.h"

STABLE_TORCH_LIBRARY_IMPL(BAPO_NAMESPACE, CUDA, m) {
    bapo::binding::register_operators<bapo::binding::Cuda>(m);
}
