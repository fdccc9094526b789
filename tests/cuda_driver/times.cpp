// A rough measure of speed: the times of the row pass and of a copy of the same tensor.

#include <algorithm>

#include "reference.h"
#include "row_inputs.h"

namespace driver {

using namespace bapo;

namespace {

template <typename T>
std::string times_of(RowCase of) {
    const int64_t elements = of.rows * of.vocab, distinct = std::min<int64_t>(of.rows, 64);
    std::vector<T> rows(distinct * of.vocab);
    parallel(distinct, [&](int64_t i) { fill_row(rows.data() + i * of.vocab, i, of.vocab, 0); });
    const Array<T> logits("logits", elements), grad("grad", elements);
    for (int64_t row = 0; row < of.rows; row += distinct) {
        const int64_t bytes = std::min(distinct, of.rows - row) * of.vocab * sizeof(T);
        check(
            cudaMemcpy(logits.data() + row * of.vocab, rows.data(), bytes, cudaMemcpyHostToDevice));
    }
    // On-policy with A > 0: every row is decided and has a gradient.
    const Array<int64_t> labels("labels", std::vector<int64_t>(of.rows, 0));
    const Array<uint8_t> counted("counted", std::vector<uint8_t>(of.rows, 1));
    const Array<float> advantages("advantages", std::vector(of.rows, 1.0f));
    const Array<double> weights("weights", std::vector(of.rows, 1.0));
    const Array<double> log_probs("log_probs", of.rows), entropy("entropy", of.rows),
        stats("stats", 2 * of.rows);
    const Array<uint8_t> undecided("undecided", of.rows);

    RowPassParams params{};
    params.rows = {Format<T>::dtype,
                   1,
                   of.rows,
                   of.vocab,
                   logits.data(),
                   0,
                   of.vocab,
                   nullptr,
                   0,
                   of.vocab,
                   {false, 1.0, 1.0, 1.0, 1.0, nullptr},
                   {}};
    if (of.output != Output::kNone) {
        params.rows.grad = of.output == Output::kInPlace ? logits.data() : grad.data();
        params.tokens.advantages = advantages.data();
        params.tokens.weights = weights.data();
        params.undecided = undecided.data();
    }
    params.labels = labels.data();
    params.tokens.counted = (const bool*)counted.data();
    params.options.clip_ratio_c = INFINITY;
    params.start = kStart;
    params.maximum = kMaximum;
    params.log_probs = log_probs.data();
    params.entropy = entropy.data();
    params.stats = stats.data();

    float pass = INFINITY, copy = INFINITY;
    for (int repetition = 0; repetition < 5; ++repetition) {
        const char* error = nullptr;
        pass = std::min(pass, milliseconds([&] { error = cuda::row_pass(params, nullptr); }));
        finish(error);
        copy = std::min(copy, milliseconds([&] {
                            check(cudaMemcpyAsync(grad.data(), logits.data(), elements * sizeof(T),
                                                  cudaMemcpyDeviceToDevice));
                        }));
    }
    const double gigabytes = (double)elements * sizeof(T) * 1e-9;
    const double moved = of.output == Output::kNone ? gigabytes : 2 * gigabytes;
    char text[200];
    std::snprintf(text, sizeof text, "%7.3f ms, %4.0f GB/s (copy %.3f ms, %4.0f GB/s)  %s", pass,
                  1e3 * moved / pass, copy, 2e3 * gigabytes / copy, of.name().c_str());
    return text;
}

}  // namespace

std::string times(const RowCase& of) {
    switch (of.dtype) {
        case DType::kFloat32: return times_of<float>(of);
        case DType::kBFloat16: return times_of<BFloat16>(of);
        default: return times_of<Half>(of);
    }
}

}  // namespace driver
