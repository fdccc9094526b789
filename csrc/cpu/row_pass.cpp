// The row pass: log-prob, entropy and, where it is decided, the gradient of one row after the
// other, by row_pass.h. Compiled once per instruction set (BAPO_ISA), with internal linkage, as in
// simd.h.

#include "row_pass.h"

namespace {

void row_pass(const RowPassParams& params, cpu::RowQueue& queue) {
    const auto absent = [](int64_t) -> double { return NAN; };
    with_dtype(params.rows.dtype, [&]<typename T>(T) {
        with_softcap(params.rows.transform, [&]<bool kSoftcap>() {
            take_rows(params, queue, [=](const RowPassParams& params, int64_t index) {
                pass_row<T, kSoftcap>(params, index, absent);
            });
        });
    });
}

void row_gradient(const RowGradientParams& params, cpu::RowQueue& queue) {
    with_dtype(params.rows.dtype, [&]<typename T>(T) {
        with_softcap(params.rows.transform,
                     [&]<bool kSoftcap>() { take_rows(params, queue, finish_row<T, kSoftcap>); });
    });
}

void scale(const cpu::ScaleParams& params, cpu::RowQueue& queue) {
    with_dtype(params.rows.dtype, [&]<typename T>(T) {
        take_rows(params, queue, [](const cpu::ScaleParams& params, int64_t index) {
            T* const x = params.rows.grad_at<T>(index);
            fill_row(x, params.rows.vocab, false, [&](int64_t begin, int64_t count) {
                const bool whole = count == kLanes;
                return (whole ? load(x + begin) : load_partial(x + begin, count)) * params.factor;
            });
        });
    });
}

}  // namespace

namespace bapo::cpu {
extern const SetKernels BAPO_CONCAT(kSetKernels_, BAPO_ISA);
void BAPO_CONCAT(sample_rows_, BAPO_ISA)(const SampleParams&, RowQueue&);
extern const RowKernels BAPO_CONCAT(kRowKernels_, BAPO_ISA);
const RowKernels BAPO_CONCAT(kRowKernels_, BAPO_ISA){BAPO_STRING(BAPO_ISA),
                                                     ::row_pass,
                                                     ::row_gradient,
                                                     ::scale,
                                                     BAPO_CONCAT(sample_rows_, BAPO_ISA),
                                                     BAPO_CONCAT(kSetKernels_, BAPO_ISA)};
}  // namespace bapo::cpu
