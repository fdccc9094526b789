#include <algorithm>

#include "cases.h"
#include "cuda/launch_cuda.h"
#include "reference.h"

namespace driver {

using namespace bapo;

namespace {

// Where rows lie in a buffer: elements from its start, which is a multiple of 256 bytes.
struct Layout {
    int64_t offset, rows, row_stride, batch_stride;

    Layout(const RowCase& of, int64_t size, int64_t shift) : rows(of.rows) {
        const int64_t unit = of.unaligned ? 1 : 16 / size;
        offset = unit * shift;
        row_stride = of.vocab + unit * (of.unaligned ? 2 : 1);
        row_stride = (row_stride + unit - 1) / unit * unit;
        batch_stride = rows * row_stride + 3 * unit;
    }
    int64_t start(int64_t row) const {
        return offset + row / rows * batch_stride + row % rows * row_stride;
    }
    int64_t size(int64_t batches) const { return offset + batches * batch_stride; }
};

// The rows in turn: ratio and advantage, which determine the gradient of a row.
constexpr struct Kind {
    double ratio, advantage;
    bool counted = true;
} kKinds[] = {
    {1.0, 1.5},         // kept
    {1.0, 1.0, false},  // skipped
    {2.0, 0.7},         // undecided
    {1.1, 0.0},         // idle
    {5.0, 1.0},         // clipped, whatever the bounds
    {1.05, -0.8},       // kept
    {0.75, -1.2},       // undecided
    {12.0, -0.5},       // beyond the dual clip
    {0.3, -1.0},        // clipped
};

constexpr Bounds kStart{0.6f, 1.2f}, kMaximum{0.9f, 3.0f}, kKnown{0.7f, 2.5f};
constexpr double kTemperature = 0.8, kLogitScale = 1.1, kSoftcap = 30.0, kDualClip = 10.0;

template <typename T>
void fill_row(T* row, int64_t i, int64_t vocab, int64_t label) {
    const auto sequence = (uint64_t)i + 1;
    for (int64_t j = 0; j < vocab; ++j) {
        const uint64_t bits = random_bits(sequence, j);
        int sum = 0;  // of four, near enough to normal
        for (int part = 0; part < 64; part += 16) sum += (int)(bits >> part & 0xffff) - 0x8000;
        row[j] = T((float)sum * 8e-5f);
    }
    if (i % 4 == 1) row[label] = T(24.0f);  // a probability near 1
}

// A bad value in a row or its label, different for each kind.
template <typename T>
void spoil_row(T* row, int64_t i, int64_t vocab, int64_t* label) {
    const T minus_inf(-INFINITY), nan(NAN);
    switch (i % std::size(kKinds)) {
        case 0: row[vocab / 2] = nan; break;
        case 1: std::fill(row, row + vocab, nan); break;
        case 2: *label = vocab; break;
        case 3: row[vocab - 1] = nan; break;
        case 4: std::fill(row + vocab / 3, row + vocab, minus_inf); break;
        case 5: row[*label] = minus_inf; break;
        case 6: *label = -7; break;
        case 7:
            for (int64_t j = 0; j < vocab; ++j) row[j] = j % 3 && j != *label ? minus_inf : row[j];
            break;
    }
}

template <typename T>
bool all_ones(const T* from, int64_t count) {
    const auto* const bytes = (const uint8_t*)from;
    return std::all_of(bytes, bytes + count * sizeof(T), [](uint8_t byte) { return byte == 0xff; });
}

template <typename T>
class Rows {
  public:
    Rows(const RowCase& of, Verdict& verdict) : case_(of), verdict_(verdict) {
        options_.clip_ratio_c = kDualClip;
        options_.kl_loss_coef = of.kl ? 0.1 : 0.0;
        options_.kl_loss_type = kK3;
        options_.entropy_coef = of.entropy ? 0.01 : 0.0;
    }

    void run() {
        const Outputs got = pass(0, case_.batches, case_.rows);
        check_statistics(got);
        if (has_grad()) {
            check_gradient("gradient", got.grad, false);
            check_between(got.grad);
        }
        if (!in_place() &&
            !same_bits(logits_.values().data(), logits_.host.data(), logits_.host.size())) {
            verdict_.fail(-1, "logits were written");
        }
        if (has_grad()) {
            finish_undecided(got);
            check_scale(written_.values());
        }
        verdict_.guards();
        if (!verdict_.good()) return;
        check_bits("again", got, pass(0, case_.batches, case_.rows), 0, count_);
        const int64_t last = count_ - 1;
        check_bits("alone", got, pass(last, 1, 1), last, 1);
        verdict_.guards();
    }

    std::string times() const {
        const RowPassParams params = params_of(0, case_.batches, case_.rows);
        const size_t bytes = logits_.host.size() * sizeof(T);
        const Memory copied("copy", bytes);
        float pass = INFINITY, copy = INFINITY;
        for (int repetition = 0; repetition < 5; ++repetition) {
            const char* error = nullptr;
            pass = std::min(pass, milliseconds([&] { error = cuda::row_pass(params, nullptr); }));
            finish(error);
            copy = std::min(copy, milliseconds([&] {
                                check(cudaMemcpyAsync(copied.data(), logits_.data(), bytes,
                                                      cudaMemcpyDeviceToDevice));
                            }));
        }
        const double gigabytes = 1e-9 * (double)count_ * case_.vocab * sizeof(T);
        const double moved = has_grad() ? 2 * gigabytes : gigabytes;
        char text[200];
        std::snprintf(text, sizeof text, "%7.3f ms, %4.0f GB/s (copy %.3f ms, %4.0f GB/s)  %s",
                      pass, 1e3 * moved / pass, copy, 2e3 * gigabytes / copy, case_.name().c_str());
        return text;
    }

  private:
    // Everything that a launch writes, for all rows.
    struct Outputs {
        std::vector<double> log_probs, entropy, stats;
        std::vector<uint8_t> undecided;
        std::vector<T> grad;
    };

    bool has_grad() const { return case_.output != Output::kNone; }
    bool in_place() const { return case_.output == Output::kInPlace; }

    // Fills rows and labels. The memory between the rows is NaN.
    std::vector<Softmax> softmax_of_filled_rows() {
        std::vector<Softmax> of(count_);
        std::memset((void*)logits_.host.data(), 0xff, logits_.host.size() * sizeof(T));
        parallel(count_, [&](int64_t i) {
            T* const row = logits_.host.data() + layout_.start(i);
            int64_t& label = labels_.host[i];
            fill_row(row, i, case_.vocab, label);
            if (case_.bad_values) spoil_row(row, i, case_.vocab, &label);
            of[i] = softmax(row, case_.vocab, label, transform_.of_row(i));
        });
        labels_.upload();
        logits_.upload();
        return of;
    }
    const Kind& kind(int64_t i) const {
        return kKinds[case_.on_policy ? 0 : i % std::size(kKinds)];
    }
    double poison(int64_t i) const { return kind(i).counted ? 0.0 : NAN; }  // of skipped tokens
    auto drawn(int64_t which, double low, double high) const {
        return [=, this](int64_t i) { return uniform(0, 4 * i + which, low, high) + poison(i); };
    }
    double near(int64_t i) const {
        const double log_prob = softmax_[i].log_prob.value;
        return std::isfinite(log_prob) ? log_prob : -1.0;
    }

    double dlog_prob(int64_t i, double log_prob, Bounds bounds) const {
        const Token of{log_prob, old_log_probs_[i], ref_log_probs_[i], advantages_[i],
                       rollout_is_weights_[i]};
        const Ratio ratio = policy_ratio(log_prob, of.old_log_prob);
        return weights_[i] *
               (policy_term(of, ratio, bounds, options_).grad + kl_grad(of, options_));
    }
    // The gradient at these bounds, and how far an error of the log-prob moves it.
    Wanted wanted(int64_t i, Bounds bounds) const {
        if (!counted_[i]) return {};
        const auto [value, error] = softmax_[i].log_prob;
        const double g = dlog_prob(i, value, bounds);
        const double up = dlog_prob(i, value + error, bounds) - g;
        const double down = dlog_prob(i, value - error, bounds) - g;
        return {{g, std::fmax(std::fabs(up), std::fabs(down))},
                weights_[i] * options_.entropy_coef};
    }
    bool undecided(int64_t i) const {
        if (!counted_[i] || case_.known_bounds) return false;
        const double first = dlog_prob(i, softmax_[i].log_prob.value, kStart);
        return first == first && first != dlog_prob(i, softmax_[i].log_prob.value, kMaximum);
    }

    LogitRows rows(int64_t first, int64_t batches, int64_t count) const {
        Transform transform = transform_;
        if (case_.temperatures) transform.temperatures = temperatures_.data() + first;
        return {
            .dtype = Format<T>::dtype,
            .batches = batches,
            .rows = count,
            .vocab = case_.vocab,
            .logits = logits_.data() + layout_.start(first),
            .batch_stride = layout_.batch_stride,
            .row_stride = layout_.row_stride,
            .grad = has_grad() ? written_.data() + to_.start(first) : nullptr,
            .grad_batch_stride = to_.batch_stride,
            .grad_row_stride = to_.row_stride,
            .transform = transform,
            .sets = {},
        };
    }

    // Of the row pass of batches*count rows, from the first on.
    RowPassParams params_of(int64_t first, int64_t batches, int64_t count) const {
        RowPassParams params{};
        params.rows = rows(first, batches, count);
        params.labels = labels_.data() + first;
        params.tokens.counted = (const bool*)counted_.data() + first;
        if (has_grad()) {
            if (!case_.on_policy) params.tokens.old_log_probs = old_log_probs_.data() + first;
            params.tokens.advantages = advantages_.data() + first;
            params.tokens.weights = weights_.data() + first;
            params.tokens.rollout_is_weights = rollout_is_weights_.data() + first;
            params.tokens.ref_log_probs = ref_log_probs_.data() + first;
            params.undecided = undecided_.data() + first;
        }
        params.options = options_;
        params.bounds = case_.known_bounds ? known_.data() : nullptr;
        params.start = kStart;
        params.maximum = kMaximum;
        params.log_probs = log_probs_.data() + first;
        params.entropy = entropy_.data() + first;
        params.stats = stats_.data() + 2 * first;
        return params;
    }

    Outputs pass(int64_t first, int64_t batches, int64_t count) {
        logits_.upload();
        for (const Memory* output :
             std::initializer_list<Memory*>{&log_probs_, &entropy_, &stats_, &undecided_, &grad_}) {
            output->poison();
        }
        finish(cuda::row_pass(params_of(first, batches, count), nullptr));
        if (!laid_out_over(case_.cluster)) {
            verdict_.fail(-1, "rows lie in clusters of another size");
        }
        return {log_probs_.values(), entropy_.values(), stats_.values(), undecided_.values(),
                has_grad() ? written_.values() : std::vector<T>{}};
    }

    void check_statistics(const Outputs& got) {
        for (int64_t i = 0; i < count_; ++i) {
            const Softmax& of = softmax_[i];
            const auto compare = [&](const char* what, double value, Value expected) {
                if (!counted_[i]) expected = {0.0, 0.0};
                verdict_.compare(what, i, value, expected.value,
                                 expected.error + 0x1p-50 * std::fabs(expected.value));
            };
            compare("log-prob of row", got.log_probs[i], of.log_prob);
            compare("entropy of row", got.entropy[i], of.entropy);
            const Transform transform = transform_.of_row(i);
            const double origin = got.stats[2 * i] * transform.scale;
            compare("statistics of row", origin + std::log(got.stats[2 * i + 1]),
                    {of.top + of.log_sum.value,
                     of.log_sum.error + Float32Errors(transform, case_.vocab).tanh});
            if (!has_grad()) continue;
            verdict_.compare("undecided of row", i, got.undecided[i], undecided(i), 0.0);
        }
    }

    // Every element of every row's gradient. Undecided rows are unchanged until they are finished.
    void check_gradient(const char* what, const std::vector<T>& got, bool finished) {
        const Bounds bounds = case_.known_bounds || finished ? kKnown : kStart;
        parallel(count_, [&](int64_t i) {
            const T* const row = got.data() + to_.start(i);
            const T* const logits = logits_.host.data() + layout_.start(i);
            if (!finished && undecided(i)) {
                const bool untouched =
                    in_place() ? same_bits(row, logits, case_.vocab) : all_ones(row, case_.vocab);
                if (untouched) return;
                return verdict_.fail(i, "%s: undecided row %" PRId64 " was written", what, i);
            }
            gradient(logits, case_.vocab, labels_[i], transform_.of_row(i), softmax_[i],
                     wanted(i, bounds), [&](int64_t j, double expected, double tolerance) {
                         verdict_.element(what, i, j, (float)row[j], expected, tolerance,
                                          j == labels_[i] ? " (label)" : "");
                     });
        });
    }

    // The bytes before, between and after the rows.
    void check_between(const std::vector<T>& got) {
        int64_t from = 0;
        for (int64_t i = 0; i <= count_; ++i) {
            const int64_t to = i < count_ ? to_.start(i) : (int64_t)got.size();
            if (!all_ones(got.data() + from, to - from)) {
                verdict_.fail(i, "bytes before row %" PRId64 " were written", i);
            }
            from = to + case_.vocab;
        }
    }

    void check_bits(const char* what, const Outputs& one, const Outputs& two, int64_t first,
                    int64_t count) {
        for (int64_t i = first; i < first + count; ++i) {
            const bool same = same_bits(&one.log_probs[i], &two.log_probs[i], 1) &&
                              same_bits(&one.entropy[i], &two.entropy[i], 1) &&
                              same_bits(&one.stats[2 * i], &two.stats[2 * i], 2) &&
                              one.undecided[i] == two.undecided[i];
            if (!same) verdict_.fail(i, "%s: row %" PRId64 " has other statistics", what, i);
            if (!has_grad() || same_gradient(one.grad, two.grad, i)) continue;
            verdict_.fail(i, "%s: row %" PRId64 " has another gradient", what, i);
        }
    }
    bool same_gradient(const std::vector<T>& one, const std::vector<T>& two, int64_t i) const {
        return same_bits(&one[to_.start(i)], &two[to_.start(i)], case_.vocab);
    }

    // The gradient of undecided rows at known bounds.
    void finish_undecided(const Outputs& before) {
        const Input<double> dlog_probs(
            "dlog_probs", count_, [&](int64_t i) { return wanted(i, kKnown).dlog_prob.value; });
        const Input<double> dentropy("dentropy", count_,
                                     [&](int64_t i) { return -wanted(i, kKnown).bonus; });
        RowGradientParams params{};
        params.rows = rows(0, case_.batches, case_.rows);
        params.labels = labels_.data();
        params.stats = stats_.data();
        params.entropy = entropy_.data();
        params.dlog_probs = dlog_probs.data();
        params.dentropy = case_.entropy ? dentropy.data() : nullptr;
        params.only = undecided_.data();
        finish(cuda::row_gradient(params, nullptr));
        const std::vector<T> got = written_.values();
        check_gradient("finished gradient", got, true);
        check_between(got);
        for (int64_t i = 0; i < count_; ++i) {
            if (before.undecided[i] || same_gradient(got, before.grad, i)) continue;
            verdict_.fail(i, "decided row %" PRId64 " was written again", i);
        }
        if (in_place()) return;
        params.only = nullptr;
        finish(cuda::row_gradient(params, nullptr));
        check_gradient("gradient of all rows", written_.values(), true);
    }

    void check_scale(const std::vector<T>& before) {
        for (const float by : {1.0f, -0.375f}) {
            const Input<float> factor("factor", std::vector{by});
            finish(cuda::scale(rows(0, case_.batches, case_.rows), factor.data(), nullptr));
            const std::vector<T> got = written_.values();
            check_between(got);
            parallel(count_, [&](int64_t i) {
                for (int64_t j = 0; j < case_.vocab; ++j) {
                    const int64_t at = to_.start(i) + j;
                    const double expected = (double)(float)before[at] * by;
                    const double tolerance =
                        by == 1.0f ? 0.0 : Format<T>::eps * std::fabs(expected) + Format<T>::tiny;
                    verdict_.element(by == 1.0f ? "scaled by 1" : "scaled by -0.375", i, j,
                                     (float)got[at], expected, tolerance);
                }
            });
        }
    }

    const RowCase case_;
    Verdict& verdict_;
    const int64_t count_ = case_.batches * case_.rows;
    const Layout layout_{case_, sizeof(T), 1}, separate_{case_, sizeof(T), 3};
    const Layout& to_ = in_place() ? layout_ : separate_;
    PolicyOptions options_;

    const Input<float> temperatures_{"temperatures", case_.temperatures ? count_ : 0,
                                     drawn(0, 0.5, 2.0)};
    const double by_ = case_.temperatures ? 1.0 : kTemperature;
    const Transform transform_{
        case_.softcap,     kLogitScale,
        kSoftcap,          (case_.softcap ? kSoftcap : kLogitScale) / by_,
        kLogitScale / by_, case_.temperatures ? temperatures_.host.data() : nullptr};
    Input<int64_t> labels_{"labels", count_,
                           [&](int64_t i) { return random_bits(0, i) % (uint64_t)case_.vocab; }};
    Input<T> logits_{"logits", std::vector<T>(layout_.size(case_.batches))};
    const std::vector<Softmax> softmax_ = softmax_of_filled_rows();

    const Input<uint8_t> counted_{"counted", count_, [&](int64_t i) { return kind(i).counted; }};
    const Input<float> old_log_probs_{"old_log_probs", count_, [&](int64_t i) {
                                          return near(i) - std::log(kind(i).ratio) + poison(i);
                                      }};
    const Input<float> advantages_{"advantages", count_,
                                   [&](int64_t i) { return kind(i).advantage + poison(i); }};
    const Input<float> rollout_is_weights_{"rollout_is_weights", count_, drawn(1, 0.5, 2.0)};
    const Input<float> ref_log_probs_{"ref_log_probs", count_,
                                      [&](int64_t i) { return near(i) + drawn(2, -1.0, 1.0)(i); }};
    const Input<double> weights_{"weights", count_, drawn(3, 8.0, 24.0)};
    const Input<float> known_{"bounds", {(float)kKnown.lower, (float)kKnown.upper}};

    Array<T> grad_{"grad", case_.output == Output::kSeparate ? separate_.size(case_.batches) : 0};
    const Array<T>& written_ = in_place() ? logits_ : grad_;
    Array<double> log_probs_{"log_probs", count_}, entropy_{"entropy", count_},
        stats_{"stats", 2 * count_};
    Array<uint8_t> undecided_{"undecided", count_};
};

template <typename F>
auto with_type(DType dtype, F f) {
    switch (dtype) {
        case DType::kFloat32: return f(float{});
        case DType::kBFloat16: return f(BFloat16{});
        default: return f(Half{});
    }
}

}  // namespace

void run(const RowCase& of, Verdict& verdict) {
    with_type(of.dtype, [&]<typename T>(T) { Rows<T>(of, verdict).run(); });
}

std::string times(const RowCase& of) {
    Verdict none;
    return with_type(of.dtype, [&]<typename T>(T) { return Rows<T>(of, none).times(); });
}

}  // namespace driver
