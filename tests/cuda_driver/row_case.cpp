#include "row_case.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "row_inputs.h"

namespace driver {

using namespace bapo;

namespace {

template <typename T>
class Rows {
  public:
    Rows(const RowCase& of, Verdict& verdict);
    void run();

  private:
    // Everything that a launch writes, for all rows.
    struct Outputs {
        std::vector<double> log_probs, entropy, stats;
        std::vector<uint8_t> undecided;
        std::vector<T> grad;
    };

    bool has_grad() const { return case_.output != Output::kNone; }
    bool in_place() const { return case_.output == Output::kInPlace; }
    const Layout& grad_layout() const { return in_place() ? layout_ : separate_; }
    LogitRows rows(int64_t first, int64_t batches, int64_t count) const;
    Outputs pass(int64_t first, int64_t batches, int64_t count);
    void finish_undecided(const Outputs& before);
    void check_statistics(const Outputs& got);
    void check_gradient(const char* what, const std::vector<T>& got, bool finished);
    void check_between(const std::vector<T>& got);
    void check_bits(const char* what, const Outputs& one, const Outputs& two, int64_t first,
                    int64_t count);
    void check_scale(const std::vector<T>& before);

    const RowCase case_;
    Verdict& verdict_;
    const HostRows<T> host_;
    const RowInputs& in_;
    const Layout& layout_;
    const Layout separate_;

    Array<T> logits_;
    std::optional<Array<T>> grad_;
    Array<double> log_probs_, entropy_, stats_;
    Array<uint8_t> undecided_;
    Array<float> known_;
    struct Tokens {
        Array<int64_t> labels;
        Array<uint8_t> counted;
        Array<float> old_log_probs, advantages, rollout_is_weights, ref_log_probs, temperatures;
        Array<double> weights;
    };
    const Tokens tokens_;
};

template <typename T>
Rows<T>::Rows(const RowCase& of, Verdict& verdict)
    : case_(of),
      verdict_(verdict),
      host_(of),
      in_(host_.in),
      layout_(host_.layout),
      separate_(of, 3),
      logits_("logits", host_.image),
      log_probs_("log_probs", in_.count),
      entropy_("entropy", in_.count),
      stats_("stats", 2 * in_.count),
      undecided_("undecided", in_.count),
      known_("bounds", std::vector(std::begin(kKnown), std::end(kKnown))),
      tokens_{{"labels", in_.labels},
              {"counted", in_.counted},
              {"old_log_probs", in_.old_log_probs},
              {"advantages", in_.advantages},
              {"rollout_is_weights", in_.rollout_is_weights},
              {"ref_log_probs", in_.ref_log_probs},
              {"temperatures", in_.temperatures},
              {"weights", in_.weights}} {
    if (of.output == Output::kSeparate) grad_.emplace("grad", separate_.size(of.batches));
}

template <typename T>
LogitRows Rows<T>::rows(int64_t first, int64_t batches, int64_t count) const {
    const Layout& to = grad_layout();
    T* const grad = in_place() ? logits_.data() : grad_ ? grad_->data() : nullptr;
    Transform transform = in_.transform;
    if (case_.temperatures) transform.temperatures = tokens_.temperatures.data() + first;
    return {
        .dtype = Format<T>::dtype,
        .batches = batches,
        .rows = count,
        .vocab = case_.vocab,
        .logits = logits_.data() + layout_.start(first),
        .batch_stride = layout_.batch_stride,
        .row_stride = layout_.row_stride,
        .grad = grad == nullptr ? nullptr : grad + to.start(first),
        .grad_batch_stride = to.batch_stride,
        .grad_row_stride = to.row_stride,
        .transform = transform,
        .sets = {},
    };
}

// The row pass of batches*count rows, from the first on, into poisoned outputs.
template <typename T>
typename Rows<T>::Outputs Rows<T>::pass(int64_t first, int64_t batches, int64_t count) {
    logits_.upload(host_.image.data());
    if (grad_) grad_->poison();
    for (Memory* output :
         std::initializer_list<Memory*>{&log_probs_, &entropy_, &stats_, &undecided_}) {
        output->poison();
    }
    RowPassParams params{};
    params.rows = rows(first, batches, count);
    params.labels = tokens_.labels.data() + first;
    params.tokens.counted = (const bool*)tokens_.counted.data() + first;
    if (has_grad()) {
        params.tokens.old_log_probs = tokens_.old_log_probs.data() + first;
        params.tokens.advantages = tokens_.advantages.data() + first;
        params.tokens.weights = tokens_.weights.data() + first;
        params.tokens.rollout_is_weights = tokens_.rollout_is_weights.data() + first;
        params.tokens.ref_log_probs = tokens_.ref_log_probs.data() + first;
        params.undecided = undecided_.data() + first;
    }
    params.options = in_.options;
    params.bounds = case_.known_bounds ? known_.data() : nullptr;
    params.start = kStart;
    params.maximum = kMaximum;
    params.log_probs = log_probs_.data() + first;
    params.entropy = entropy_.data() + first;
    params.stats = stats_.data() + 2 * first;
    finish(cuda::row_pass(params, nullptr));
    if (!laid_out_over(case_.cluster)) verdict_.fail(-1, "rows lie in clusters of another size");
    return {log_probs_.values(), entropy_.values(), stats_.values(), undecided_.values(),
            has_grad() ? (grad_ ? *grad_ : logits_).values() : std::vector<T>{}};
}

template <typename T>
void Rows<T>::check_statistics(const Outputs& got) {
    for (int64_t i = 0; i < in_.count; ++i) {
        const Softmax& of = host_.softmax[i];
        const bool counted = in_.counted[i];
        const auto compare = [&](const char* what, double value, Value expected) {
            verdict_.compare(what, i, value, counted ? expected.value : 0.0,
                             counted ? expected.error + 0x1p-50 * std::fabs(expected.value) : 0.0);
        };
        compare("log-prob of row", got.log_probs[i], of.log_prob);
        compare("entropy of row", got.entropy[i], of.entropy);
        const Transform transform = in_.transform.of_row(i);
        const double origin = got.stats[2 * i] * transform.scale;
        const Float32Errors errors(transform, case_.vocab);
        compare("statistics of row", origin + std::log(got.stats[2 * i + 1]),
                {of.top + of.log_sum.value, of.log_sum.error + errors.tanh});
        if (!has_grad()) continue;
        const bool undecided = in_.undecided(i, of.log_prob.value, case_.known_bounds);
        verdict_.compare("undecided of row", i, got.undecided[i], undecided, 0.0);
    }
}

// Every element of every row's gradient. Undecided rows are unchanged until they are finished.
template <typename T>
void Rows<T>::check_gradient(const char* what, const std::vector<T>& got, bool finished) {
    const Bounds bounds = case_.known_bounds || finished ? Bounds{kKnown[0], kKnown[1]} : kStart;
    parallel(in_.count, [&](int64_t i) {
        const T* const row = got.data() + grad_layout().start(i);
        const T* const logits = host_.image.data() + layout_.start(i);
        const Softmax& of = host_.softmax[i];
        if (!finished && in_.undecided(i, of.log_prob.value, case_.known_bounds)) {
            const auto* const bytes = (const uint8_t*)row;
            const bool untouched = in_place()
                                       ? same_bits(row, logits, case_.vocab)
                                       : std::all_of(bytes, bytes + case_.vocab * sizeof(T),
                                                     [](uint8_t byte) { return byte == 0xff; });
            if (!untouched) verdict_.fail(i, "%s: undecided row %" PRId64 " was written", what, i);
            return;
        }
        gradient(logits, case_.vocab, in_.labels[i], in_.transform.of_row(i), of,
                 in_.wanted(i, of.log_prob, bounds),
                 [&](int64_t j, double expected, double tolerance) {
                     const double value = (float)row[j];
                     if (Verdict::near(value, expected, tolerance)) return;
                     verdict_.fail(i,
                                   "%s: row %" PRId64 " element %" PRId64
                                   "%s got %.9g expected %.9g (error %.2e, tolerance %.2e)",
                                   what, i, j, j == in_.labels[i] ? " (label)" : "", value,
                                   expected, std::fabs(value - expected), tolerance);
                 });
    });
}

// The bytes before, between and after the rows.
template <typename T>
void Rows<T>::check_between(const std::vector<T>& got) {
    int64_t from = 0;
    const auto poisoned = [&](int64_t row, int64_t to) {
        const auto* const bytes = (const uint8_t*)got.data();
        for (size_t i = from * sizeof(T); i < to * sizeof(T); ++i) {
            if (bytes[i] == 0xff) continue;
            return verdict_.fail(row, "bytes before row %" PRId64 " were written", row);
        }
        from = to + case_.vocab;
    };
    for (int64_t i = 0; i < in_.count; ++i) poisoned(i, grad_layout().start(i));
    poisoned(in_.count, (int64_t)got.size());
}

template <typename T>
void Rows<T>::check_bits(const char* what, const Outputs& one, const Outputs& two, int64_t first,
                         int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
        const int64_t at = has_grad() ? grad_layout().start(i) : 0;
        const bool same = same_bits(&one.log_probs[i], &two.log_probs[i], 1) &&
                          same_bits(&one.entropy[i], &two.entropy[i], 1) &&
                          same_bits(&one.stats[2 * i], &two.stats[2 * i], 2) &&
                          one.undecided[i] == two.undecided[i];
        if (!same) verdict_.fail(i, "%s: row %" PRId64 " has other statistics", what, i);
        if (!has_grad() || same_bits(&one.grad[at], &two.grad[at], case_.vocab)) continue;
        verdict_.fail(i, "%s: row %" PRId64 " has another gradient", what, i);
    }
}

// The gradient of undecided rows at known bounds.
template <typename T>
void Rows<T>::finish_undecided(const Outputs& before) {
    std::vector<double> dlog_probs(in_.count), dentropy(in_.count);
    for (int64_t i = 0; i < in_.count; ++i) {
        const Value log_prob = host_.softmax[i].log_prob;
        const Wanted wanted = in_.wanted(i, log_prob, {kKnown[0], kKnown[1]});
        dlog_probs[i] = wanted.dlog_prob.value;
        dentropy[i] = -wanted.bonus;
    }
    const Array<double> dlog_probs_on("dlog_probs", dlog_probs);
    const Array<double> dentropy_on("dentropy", dentropy);
    RowGradientParams params{};
    params.rows = rows(0, case_.batches, case_.rows);
    params.labels = tokens_.labels.data();
    params.stats = stats_.data();
    params.entropy = entropy_.data();
    params.dlog_probs = dlog_probs_on.data();
    params.dentropy = case_.entropy ? dentropy_on.data() : nullptr;
    params.only = undecided_.data();
    finish(cuda::row_gradient(params, nullptr));
    const std::vector<T> got = (grad_ ? *grad_ : logits_).values();
    check_gradient("finished gradient", got, true);
    check_between(got);
    for (int64_t i = 0; i < in_.count; ++i) {
        const int64_t at = grad_layout().start(i);
        if (before.undecided[i] || same_bits(&got[at], &before.grad[at], case_.vocab)) continue;
        verdict_.fail(i, "decided row %" PRId64 " was written again", i);
    }
    if (in_place()) return;
    params.only = nullptr;
    finish(cuda::row_gradient(params, nullptr));
    check_gradient("gradient of all rows", grad_->values(), true);
}

template <typename T>
void Rows<T>::check_scale(const std::vector<T>& before) {
    for (const float by : {1.0f, -0.375f}) {
        const Array<float> factor("factor", std::vector{by});
        finish(cuda::scale(rows(0, case_.batches, case_.rows), factor.data(), nullptr));
        const std::vector<T> got = (grad_ ? *grad_ : logits_).values();
        check_between(got);
        parallel(in_.count, [&](int64_t i) {
            for (int64_t j = 0; j < case_.vocab; ++j) {
                const int64_t at = grad_layout().start(i) + j;
                const double expected = (double)(float)before[at] * by;
                const double tolerance =
                    by == 1.0f ? 0.0 : Format<T>::eps * std::fabs(expected) + Format<T>::tiny;
                if (Verdict::near((float)got[at], expected, tolerance)) continue;
                verdict_.fail(
                    i, "scaled by %g: row %" PRId64 " element %" PRId64 " got %.9g expected %.9g",
                    by, i, j, (float)got[at], expected);
            }
        });
    }
}

template <typename T>
void Rows<T>::run() {
    const Outputs got = pass(0, case_.batches, case_.rows);
    check_statistics(got);
    if (has_grad()) {
        check_gradient("gradient", got.grad, false);
        check_between(got.grad);
    }
    if (!in_place() &&
        !same_bits(logits_.values().data(), host_.image.data(), host_.image.size())) {
        verdict_.fail(-1, "logits were written");
    }
    if (has_grad()) {
        finish_undecided(got);
        check_scale((grad_ ? *grad_ : logits_).values());
    }
    verdict_.guards();
    if (!verdict_.good()) return;
    check_bits("again", got, pass(0, case_.batches, case_.rows), 0, in_.count);
    const int64_t last = in_.count - 1;
    check_bits("alone", got, pass(last, 1, 1), last, 1);
    verdict_.guards();
}

}  // namespace

void run(const RowCase& row_case, Verdict& verdict) {
    switch (row_case.dtype) {
        case DType::kFloat32: return Rows<float>(row_case, verdict).run();
        case DType::kBFloat16: return Rows<BFloat16>(row_case, verdict).run();
        default: return Rows<Half>(row_case, verdict).run();
    }
}

}  // namespace driver
