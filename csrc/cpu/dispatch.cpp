// Chooses the row kernels for this processor at run time; includes launch.h alone. Compiled for any
// processor: instructions of a newer one here would end the process before the choice.

#include <cstring>
#include <utility>

#include "launch.h"

namespace bapo::cpu {

extern const RowKernels kRowKernels_portable;
#if defined(BAPO_X86)
extern const RowKernels kRowKernels_avx2;
extern const RowKernels kRowKernels_avx512;
extern const RowKernels kRowKernels_avx512bf16;
#endif

namespace {

template <typename F>
const RowKernels* first_that(F wanted) {
#if defined(BAPO_X86)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    const std::pair<const RowKernels*, bool> candidates[] = {
#if defined(BAPO_X86)
        {&kRowKernels_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16")},
        {&kRowKernels_avx512, avx512},
        {&kRowKernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
        {&kRowKernels_portable, true},
    };
    for (const auto& [kernels, runs] : candidates) {
        if (runs && wanted(*kernels)) return kernels;
    }
    return nullptr;
}

}  // namespace

const RowKernels& row_kernels() {
    return *first_that([](const RowKernels&) { return true; });
}

const RowKernels* row_kernels(const char* isa) {
    return first_that([&](const RowKernels& kernels) { return !std::strcmp(kernels.isa, isa); });
}

}  // namespace bapo::cpu
