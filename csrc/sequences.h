// The ratio of a sequence: the mean of the log-ratios of its counted tokens. Its gradient is spread
// over them in the same way. For CPU and CUDA, on prepare.h, whose offsets both must cut alike.
#pragma once

#include "prepare.h"
#include "tokens.h"

namespace bapo {

// The tokens of sequence k. The last one, behind all sequences, are those that belong to none.
struct Span {
    int64_t begin, end;
};
BAPO_HD Span span_of(const Sequences& sequences, int64_t k) {
    if (sequences.offsets.data == nullptr)
        return {k * sequences.length, (k + 1) * sequences.length};
    const auto offset = [&](int64_t at) {
        return offset_at(sequences.offsets, at, sequences.tokens);
    };
    return {k == 0 ? 0 : offset(k), k == sequences.count ? sequences.tokens : offset(k + 1)};
}
BAPO_HD int64_t span_count(const Sequences& sequences) {
    return sequences.count + (sequences.offsets.data != nullptr);
}

struct SequenceSum {
    double sum;
    double count;

    BAPO_HD void add(const SequenceMeanParams& params, int64_t i) {
        if (!params.counted[i]) return;
        count += 1.0;
        double value = params.in[i];
        if (params.forward) {
            const double old =
                params.old_log_probs ? params.old_log_probs[i] : on_policy_old(value);
            value = old - old == 0.0 ? value - old : NAN;
        }
        sum += value;
    }
    BAPO_HD double mean() const { return sum / (count > 0.0 ? count : 1.0); }
};

BAPO_HD void write_mean(const SequenceMeanParams& params, int64_t i, double mean) {
    const double mine = params.counted[i] ? mean : 0.0;
    params.out[i] = params.forward ? mine : params.out[i] + mine;
}

}  // namespace bapo
