#include <algorithm>

#include "cases.h"
#include "cuda/launch_cuda.h"

namespace driver {

using namespace bapo;

namespace {

constexpr double kDouble = 1e-13;  // for sums in double in another order

// Rows of one token, more than there are blocks, or two long ones; or packed sequences of 0, 1, 2,
// 700, 0, ... tokens, the last of which is cut short, and tokens behind them.
std::vector<int64_t> offsets_of(const SequenceCase& of) {
    const int64_t lengths[] = {0, 1, 2, 700}, row = of.tokens > 2'000 ? of.tokens / 2 : 1;
    const int64_t end = of.packed ? (9 * of.tokens + 9) / 10 : of.tokens;
    std::vector<int64_t> offsets{0};
    while (offsets.back() < end) {
        const int64_t length = of.packed ? lengths[(offsets.size() - 1) % 4] : row;
        offsets.push_back(std::min(offsets.back() + length, end));
    }
    return offsets;
}

struct Sequence {
    double sum = 0.0, size = 0.0, count = 0.0;
};

}  // namespace

void run(const SequenceCase& of, Verdict& verdict) {
    const auto draw = [](int64_t i, double low, double high) { return uniform(8, i, low, high); };
    const auto poison = [](int64_t i) { return i % 5 == 3 ? NAN : 0.0; };
    const Input<uint8_t> counted("counted", of.tokens, [](int64_t i) { return i % 5 != 3; });
    const Input<double> values("values", of.tokens,
                               [&](int64_t i) { return draw(3 * i, -6.0, -0.1) + poison(i); });
    const Input<float> old("old_log_probs", of.tokens,
                           [&](int64_t i) { return draw(3 * i + 1, -6.0, -0.1) + poison(i); });
    const Input<int64_t> offsets("offsets", offsets_of(of));
    Input<double> out("out", of.tokens, [&](int64_t i) { return draw(3 * i + 2, -1.0, 1.0); });
    std::vector<int64_t> sequence(of.tokens);
    for (int64_t i = 0; i < of.tokens; ++i) {
        sequence[i] = std::ranges::upper_bound(offsets.host, i) - offsets.host.begin() - 1;
    }
    for (const bool forward : {true, false}) {
        const auto launch = [&] {
            out.upload();
            SequenceMeanParams params{};
            params.sequences = {of.tokens, offsets[1], {}, (int64_t)offsets.host.size() - 1};
            if (of.packed) params.sequences.offsets = {offsets.data(), DType::kInt64, 0, 1};
            params.counted = (const bool*)counted.data();
            params.in = values.data();
            params.old_log_probs = forward ? old.data() : nullptr;
            params.forward = forward;
            params.out = out.data();
            finish(cuda::sequence_mean(params, nullptr));
            verdict.guards();
            return out.values();
        };
        std::vector<Sequence> sums(offsets.host.size());
        for (int64_t i = 0; i < of.tokens; ++i) {
            if (!counted[i]) continue;
            const double value = forward ? values[i] - old[i] : values[i];
            Sequence& to = sums[sequence[i]];
            to = {to.sum + value, to.size + std::fabs(value), to.count + 1.0};
        }
        const std::vector<double> got = launch();
        for (int64_t i = 0; i < of.tokens; ++i) {
            const auto [sum, size, count] =
                counted[i] ? sums[sequence[i]] : Sequence{0.0, 0.0, 1.0};
            const double before = forward ? 0.0 : out[i];
            verdict.compare(forward ? "log-ratio of token" : "gradient of token", i, got[i],
                            before + sum / count, kDouble * (size / count + std::fabs(before)));
        }
        if (!same_bits(got.data(), launch().data(), of.tokens)) {
            verdict.fail(0, "other bits in a second run");
        }
    }
}

}  // namespace driver
