#include "sequence_case.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/launch_cuda.h"

namespace driver {

using namespace bapo;

std::string SequenceCase::name() const {
    return "means over sequences, tokens=" + std::to_string(tokens) +
           (packed ? " packed" : " padded");
}

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

class Sequences {
  public:
    Sequences(const SequenceCase& of, Verdict& verdict);
    void run(bool forward);

  private:
    std::vector<double> launch(bool forward) const;

    const SequenceCase case_;
    Verdict& verdict_;
    std::vector<int64_t> offsets_;
    std::vector<uint8_t> counted_;
    std::vector<double> values_, before_;
    std::vector<float> old_;
};

Sequences::Sequences(const SequenceCase& of, Verdict& verdict)
    : case_(of), verdict_(verdict), offsets_(offsets_of(of)) {
    for (int64_t i = 0; i < of.tokens; ++i) {
        counted_.push_back(i % 5 != 3);
        const double poison = counted_.back() ? 0.0 : NAN;
        values_.push_back(uniform(8, 3 * i, -6.0, -0.1) + poison);
        old_.push_back((float)(uniform(8, 3 * i + 1, -6.0, -0.1) + poison));
        before_.push_back(uniform(8, 3 * i + 2, -1.0, 1.0));
    }
}

std::vector<double> Sequences::launch(bool forward) const {
    const Array<int64_t> offsets("offsets", offsets_);
    const Array<uint8_t> counted("counted", counted_);
    const Array<double> values("values", values_), out("out", before_);
    const Array<float> old("old_log_probs", old_);
    SequenceMeanParams params{};
    params.sequences = {case_.tokens, offsets_[1], {}, (int64_t)offsets_.size() - 1};
    if (case_.packed) params.sequences.offsets = {offsets.data(), DType::kInt64, 0, 1};
    params.counted = (const bool*)counted.data();
    params.in = values.data();
    params.old_log_probs = forward ? old.data() : nullptr;
    params.forward = forward;
    params.out = out.data();
    finish(cuda::sequence_mean(params, nullptr));
    verdict_.guards();
    return out.values();
}

void Sequences::run(bool forward) {
    std::vector<double> sums(offsets_.size()), sizes(offsets_.size()), counts(offsets_.size());
    const auto sequence = [&](int64_t i) {
        return std::upper_bound(offsets_.begin(), offsets_.end(), i) - offsets_.begin() - 1;
    };
    for (int64_t i = 0; i < case_.tokens; ++i) {
        if (!counted_[i]) continue;
        const double value = forward ? values_[i] - old_[i] : values_[i];
        sums[sequence(i)] += value;
        sizes[sequence(i)] += std::fabs(value);
        counts[sequence(i)] += 1.0;
    }
    const std::vector<double> got = launch(forward);
    for (int64_t i = 0; i < case_.tokens; ++i) {
        const int64_t k = sequence(i);
        const double before = forward ? 0.0 : before_[i];
        const double mean = counted_[i] ? sums[k] / counts[k] : 0.0;
        const double size = counted_[i] ? sizes[k] / counts[k] : 0.0;
        verdict_.compare(forward ? "log-ratio of token" : "gradient of token", i, got[i],
                         before + mean, kDouble * (size + std::fabs(before)));
    }
    const std::vector<double> again = launch(forward);
    if (!same_bits(got.data(), again.data(), case_.tokens)) {
        verdict_.fail(0, "other bits in a second run");
    }
}

}  // namespace

void run(const SequenceCase& sequence_case, Verdict& verdict) {
    Sequences of(sequence_case, verdict);
    for (const bool forward : {true, false}) of.run(forward);
}

}  // namespace driver
