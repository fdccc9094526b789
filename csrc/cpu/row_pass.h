// Both passes over one row, whole or a set, on row_math.h. Internal linkage, as in simd.h.
// The decision is that of tokens.h: with another here, the search and the gradient would disagree.
#pragma once

#include "launch.h"
#include "row_math.h"

namespace {

template <typename T>
struct Row {
    const T* logits;
    T* grad;

    Row(const LogitRows& rows, int64_t index)
        : logits(rows.logits_at<T>(index)),
          grad(rows.grad == nullptr ? nullptr : rows.grad_at<T>(index)) {}
    // just_read: the row is in the cache, and so is a gradient in place.
    void zero_grad(int64_t vocab, bool just_read) const {
        if (grad == nullptr) return;
        const bool cached = just_read && (const void*)logits == (const void*)grad;
        fill_row(grad, vocab, !cached, [](int64_t, int64_t) { return VFloat{}; });
    }
};

// Whether the gradient of a row can only be 2^t times a constant, so that keeping 2^t pays.
template <typename T, bool kSoftcap>
bool keeps_exp(const RowPassParams& params, int64_t index) {
    if (kSoftcap || sizeof(T) == 4 || params.rows.grad == nullptr) return false;
    const PolicyOptions& options = params.options;
    if (options.entropy_coef != 0.0) return false;
    if (options.kl_loss_coef == 0.0 && params.tokens.advantages[index] == 0.0f) return false;
    return kept_exp.reserve(params.rows.vocab);
}

// absent(label) is the log-prob of a label without a column.
template <typename T, bool kSoftcap>
void pass_row(const RowPassParams& params, int64_t index, double (*absent)(int64_t)) {
    const LogitRows& rows = params.rows;
    const Row<T> row(rows, index);
    const int64_t K = params.labels_per_row;
    const int64_t* const labels = params.labels + index * K;
    double *const log_probs = params.log_probs + index * K, *stats_out = params.stats + 2 * index;
    if (params.undecided) params.undecided[index] = 0;
    if (!params.tokens.counted[index]) {
        for (int64_t k = 0; k < K; ++k) log_probs[k] = 0.0;
        params.entropy[index] = stats_out[0] = 0.0;
        stats_out[1] = 1.0;
        return row.zero_grad(rows.vocab, false);
    }

    const bool keep = keeps_exp<T, kSoftcap>(params, index);
    const Transform transform = rows.transform.at_row(index);
    const RowStats stats =
        (keep ? row_stats<kSoftcap, true, T>
              : row_stats<kSoftcap, false, T>)(row.logits, rows.vocab, transform);
    const double log_sum = stats.log_sum();
    for (int64_t k = 0; k < K; ++k) {
        const int64_t label = labels[k];
        if (label >= 0 && label < rows.vocab) {
            log_probs[k] = log_prob<kSoftcap>(load_scalar(row.logits + label), transform,
                                              stats.origin, log_sum);
        } else {
            log_probs[k] = label == kIgnoredLabel ? 0.0 : absent(label) - log_sum;
        }
    }
    params.entropy[index] = stats.entropy();
    stats_out[0] = stats.origin;
    stats_out[1] = stats.sum;

    if (row.grad == nullptr) return;
    const Decision decision =
        decide(params, bounds_range(params), fields_at(params.tokens, index), log_probs[0]);
    if (decision.undecided) {
        params.undecided[index] = 1;
    } else if (decision.coefficients.zero()) {
        row.zero_grad(rows.vocab, true);
    } else {
        (keep ? row_gradient<kSoftcap, true, T>
              : row_gradient<kSoftcap, false, T>)(row.logits, row.grad, rows.vocab, transform,
                                                  labels[0], stats.origin, stats.sum,
                                                  stats.entropy(), decision.coefficients, {});
    }
}

// Writes the gradient of a row, then those of its labels. In place the latter are computed before
// the logits are overwritten, otherwise afterwards, when the row is in the cache.
template <typename T, bool kSoftcap, bool kSampled = false>
void finish_row(const RowGradientParams& params, int64_t index) {
    if (params.only && !params.only[index]) return;
    const LogitRows& rows = params.rows;
    const Row<T> row(rows, index);
    const int64_t K = params.labels_per_row;
    const int64_t* const labels = params.labels + index * K;
    const double* const given = params.dlog_probs + index * K;
    const auto for_columns = [&](auto f) {
        for (int64_t k = 0; k < K; ++k) {
            if (labels[k] >= 0 && labels[k] < rows.vocab) f(k, labels[k]);
        }
    };
    RowCoefficients all{0.0, params.dentropy ? -(double)params.dentropy[index] : 0.0};
    bool none = all.zero();
    for (int64_t k = 0; k < K; ++k) {
        all.dlog_prob += given[k];
        none = none && given[k] == 0.0;
    }
    if (none) return row.zero_grad(rows.vocab, false);
    const double sum = params.stats[2 * index + 1], log_sum = std::log(sum);
    const auto origin = (float)params.stats[2 * index];
    const double entropy = params.entropy[index];
    const Transform transform = rows.transform.at_row(index);
    double* const sums = cpu::sums_of_equal(labels, given, K);
    const auto to_gradients = [&](int64_t k, int64_t label) {
        const float z = load_scalar(row.logits + label);
        const double log_p = log_prob<kSoftcap>(z, transform, origin, log_sum);
        sums[k] = label_gradient(z, log_p, entropy, label_slope(z, transform),
                                 {sums[k], all.entropy_bonus}, all.dlog_prob - sums[k]);
    };
    const bool in_place = row.logits == row.grad;
    if (in_place) for_columns(to_gradients);
    const Drawn drawn = kSampled ? params.drawn[index] : Drawn{};
    row_gradient<kSoftcap, false, T, kSampled>(row.logits, row.grad, rows.vocab, transform,
                                               kIgnoredLabel, origin, sum, entropy, all, drawn);
    if (!in_place) for_columns(to_gradients);
    for_columns([&](int64_t k, int64_t label) { store_scalar(row.grad + label, (float)sums[k]); });
}

template <typename F>
void with_dtype(DType dtype, F f) {
    switch (dtype) {
        case DType::kBFloat16: return f(BFloat16{});
        case DType::kFloat16: return f(Float16{});
        default: return f(float{});
    }
}
template <typename F>
void with_softcap(const Transform& transform, F f) {
    transform.softcapped ? f.template operator()<true>() : f.template operator()<false>();
}

template <typename Params, typename RowKernel>
void take_rows(const Params& params, cpu::RowQueue& queue, RowKernel kernel) {
    for (int64_t row; (row = queue.next.fetch_add(queue.grain)) < queue.count;) {
        const int64_t end = row + queue.grain < queue.count ? row + queue.grain : queue.count;
        for (; row < end; ++row) kernel(params, row);
    }
}

}  // namespace

#define BAPO_CONCAT_(a, b) a##b
#define BAPO_CONCAT(a, b) BAPO_CONCAT_(a, b)
#define BAPO_STRING_(a) #a
#define BAPO_STRING(a) BAPO_STRING_(a)
