#include <algorithm>

#include "cases.h"
#include "cuda/launch_cuda.h"
#include "reference.h"
#include "tokens.h"

namespace driver {

using namespace bapo;

namespace {

// Where rows lie in a buffer: elements from its start, which is a multiple of 256 bytes.
struct Layout {
    int64_t offset, rows, row_stride, batch_stride;

    Layout(const RowCase& of, int64_t size, int64_t shift) : rows(of.rows) {
        const int64_t unit = of.has(kUnaligned) ? 1 : 16 / size;
        offset = unit * shift;
        row_stride = of.vocab + unit * (of.has(kUnaligned) ? 2 : 1);
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

const Kind& kind(int64_t i) { return kKinds[i % std::size(kKinds)]; }
double poison(int64_t i) { return kind(i).counted ? 0.0 : NAN; }  // of skipped tokens
auto drawn(int64_t which, double low, double high) {
    return [=](int64_t i) { return uniform(0, 4 * i + which, low, high) + poison(i); };
}

constexpr Bounds kStart{0.6f, 1.2f}, kMaximum{0.9f, 3.0f};
const BoundsRange kAtKnown = BoundsRange::at(0.7f, 2.5f);
constexpr double kTemperature = 0.8, kLogitScale = 1.1, kCap = 30.0, kDualClip = 10.0;

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
void spoil_row(T* row, int64_t i, int64_t vocab, int64_t& label) {
    const T minus_inf(-INFINITY), nan(NAN);
    switch (i % std::size(kKinds)) {
        case 0: row[vocab / 2] = nan; break;
        case 1: std::fill(row, row + vocab, nan); break;
        case 2: label = vocab; break;
        case 3: row[vocab - 1] = nan; break;
        case 4: std::fill(row + vocab / 3, row + vocab, minus_inf); break;
        case 5: row[label] = minus_inf; break;
        case 6: label = -7; break;
        case 7:
            for (int64_t j = 0; j < vocab; ++j) row[j] = j % 3 && j != label ? minus_inf : row[j];
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
    Rows(const RowCase& of, Verdict& verdict) : case_(of), verdict_(verdict) {}

    void run() {
        const Outputs got = pass(0, case_.batches, case_.rows);
        check_statistics(got);
        if (has_grad()) check_gradient("gradient", got.grad, false);
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
        check_bits("again", got, pass(0, case_.batches, case_.rows), 0);
        check_bits("alone", got, pass(count_ - 1, 1, 1), count_ - 1);
        verdict_.guards();
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
            if (case_.has(kBadValues)) spoil_row(row, i, case_.vocab, label);
            of[i] = softmax(row, case_.vocab, label, transform_.of_row(i));
        });
        labels_.reset();
        logits_.reset();
        return of;
    }
    double near(int64_t i) const {
        const double log_prob = softmax_[i].log_prob.value;
        return std::isfinite(log_prob) ? log_prob : -1.0;
    }

    LogitRows rows(int64_t first, int64_t batches, int64_t count) const {
        Transform transform = transform_;
        if (case_.has(kTemperatures)) transform.temperatures = temperatures_.data(first);
        return LogitRows(kFormat<T>.dtype, batches, count, case_.vocab,
                         logits_.data(layout_.start(first)), layout_.batch_stride,
                         layout_.row_stride, has_grad() ? written_.data(to_.start(first)) : nullptr,
                         to_.batch_stride, to_.row_stride, transform, Sets{});
    }
    // Without outputs; on the device from the first row on, or on the host.
    RowPassParams inputs(bool on_host, int64_t first = 0) const {
        const auto at = [=](const auto& of, bool given) {
            return !given ? nullptr : on_host ? of.host.data() : of.data(first);
        };
        const bool all = has_grad();
        RowPassParams params{};
        params.tokens =
            TokenInputs((const bool*)at(counted_, true), at(weights_, all), /*log_ratios=*/nullptr,
                        at(advantages_, all), at(old_log_probs_, all),
                        /*rollout_log_probs=*/nullptr, at(rollout_is_weights_, all),
                        at(ref_log_probs_, all), /*lower=*/nullptr, /*upper=*/nullptr);
        params.options = options_;
        if (case_.has(kKnownBounds)) params.bounds = on_host ? known_.host.data() : known_.data();
        params.start = kStart;
        params.maximum = kMaximum;
        return params;
    }
    // The gradient at these bounds, and how far an error of the log-prob moves it.
    Wanted wanted(int64_t i, const BoundsRange& bounds) const {
        if (!counted_[i]) return {};
        const auto [value, error] = softmax_[i].log_prob;
        const auto at = [&](double log_prob) {
            return decide(host_, bounds, fields_at(host_.tokens, i), log_prob).coefficients;
        };
        const auto [g, bonus] = at(value);
        const double up = at(value + error).dlog_prob - g, down = at(value - error).dlog_prob - g;
        return {{g, std::fmax(std::fabs(up), std::fabs(down))}, bonus};
    }
    bool undecided(int64_t i) const {
        return counted_[i] && decide(host_, i, softmax_[i].log_prob.value).undecided;
    }

    // Of batches*count rows, from the first on.
    Outputs pass(int64_t first, int64_t batches, int64_t count) {
        Memory::reset_all();
        RowPassParams params = inputs(false, first);
        params.rows = rows(first, batches, count);
        params.labels = labels_.data(first);
        if (has_grad()) params.undecided = undecided_.data(first);
        params.log_probs = log_probs_.data(first);
        params.entropy = entropy_.data(first);
        params.stats = stats_.data(2 * first);
        finish(cuda::row_pass(params, nullptr));
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
                if (!counted_[i]) expected = {};
                expected.error += 0x1p-50 * std::fabs(expected.value);
                verdict_.compare(what, i, value, expected);
            };
            compare("log-prob of row", got.log_probs[i], of.log_prob);
            compare("entropy of row", got.entropy[i], of.entropy);
            const Transform transform = transform_.of_row(i);
            // A skipped row has an origin of 0, and no temperature.
            const double origin =
                counted_[i] ? got.stats[2 * i] * transform.scale : got.stats[2 * i];
            compare("statistics of row", origin + std::log(got.stats[2 * i + 1]),
                    {of.top + of.log_sum.value,
                     of.log_sum.error + Float32Errors(transform, case_.vocab).tanh});
            if (!has_grad()) continue;
            verdict_.compare("undecided of row", i, got.undecided[i], {(double)undecided(i)});
        }
    }

    // Every element of every row's gradient. Undecided rows are unchanged until they are finished.
    void check_gradient(const char* what, const std::vector<T>& got, bool finished) {
        const BoundsRange bounds = finished ? kAtKnown : bounds_range(host_);
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
                     wanted(i, bounds), [&](int64_t j, Value expected) {
                         verdict_.compare(what, i, (float)row[j], expected, j,
                                          j == labels_[i] ? " (label)" : "");
                     });
        });
        check_between(got);
    }

    // No bytes before, between and after the rows were written.
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

    // Of rows from the first on.
    void check_bits(const char* what, const Outputs& one, const Outputs& two, int64_t first) {
        for (int64_t i = first; i < count_; ++i) {
            if (same_bits(&one.log_probs[i], &two.log_probs[i]) &&
                same_bits(&one.entropy[i], &two.entropy[i]) &&
                same_bits(&one.stats[2 * i], &two.stats[2 * i], 2) &&
                one.undecided[i] == two.undecided[i] && same_gradient(one.grad, two.grad, i)) {
                continue;
            }
            verdict_.fail(i, "%s: row %" PRId64 " has other bits", what, i);
        }
    }
    bool same_gradient(const std::vector<T>& one, const std::vector<T>& two, int64_t i) const {
        const int64_t at = to_.start(i);
        return !has_grad() || same_bits(&one[at], &two[at], case_.vocab);
    }

    // The gradient of undecided rows at known bounds.
    void finish_undecided(const Outputs& before) {
        const Array<double> dlog_probs(
            "dlog_probs", count_, [&](int64_t i) { return wanted(i, kAtKnown).dlog_prob.value; });
        const Array<double> dentropy("dentropy", count_,
                                     [&](int64_t i) { return -wanted(i, kAtKnown).bonus; });
        RowGradientParams params(rows(0, case_.batches, case_.rows), labels_.data(), stats_.data(),
                                 entropy_.data(), dlog_probs.data(),
                                 dentropy.data_if(case_.has(kEntropy)), undecided_.data());
        finish(cuda::row_gradient(params, nullptr));
        const std::vector<T> got = written_.values();
        check_gradient("finished gradient", got, true);
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
            const Array<float> factor("factor", std::vector{by});
            finish(cuda::scale(rows(0, case_.batches, case_.rows), factor.data(), nullptr));
            const std::vector<T> got = written_.values();
            check_between(got);
            parallel(count_, [&](int64_t i) {
                for (int64_t j = 0; j < case_.vocab; ++j) {
                    const int64_t at = to_.start(i) + j;
                    const double expected = (double)(float)before[at] * by;
                    const double error = kFormat<T>.eps * std::fabs(expected) + kFormat<T>.tiny;
                    verdict_.compare("scaled row", i, (float)got[at],
                                     {expected, by == 1.0f ? 0.0 : error}, j);
                }
            });
        }
    }

    const RowCase case_;
    Verdict& verdict_;
    const int64_t count_ = case_.batches * case_.rows;
    const Layout layout_{case_, sizeof(T), 1}, separate_{case_, sizeof(T), 3};
    const Layout& to_ = in_place() ? layout_ : separate_;
    const PolicyOptions options_ =
        PolicyOptions(kClip, kDualClip, 1.0, 1.0, case_.has(kKl) ? 0.1 : 0.0, kK3,
                      case_.has(kEntropy) ? 0.01 : 0.0);
    const Array<float> temperatures_{"temperatures", case_.has(kTemperatures) ? count_ : 0,
                                     drawn(0, 0.5, 2.0)};
    const double by_ = case_.has(kTemperatures) ? 1.0 : kTemperature;
    const Transform transform_ = Transform(
        case_.has(kSoftcap), kLogitScale, kCap, (case_.has(kSoftcap) ? kCap : kLogitScale) / by_,
        kLogitScale / by_, case_.has(kTemperatures) ? temperatures_.host.data() : nullptr);
    Array<int64_t> labels_{"labels", count_,
                           [&](int64_t i) { return random_bits(0, i) % (uint64_t)case_.vocab; }};
    Array<T> logits_{"logits", std::vector<T>(layout_.size(case_.batches))};
    const std::vector<Softmax> softmax_ = softmax_of_filled_rows();

    const Array<uint8_t> counted_{"counted", count_, [&](int64_t i) { return kind(i).counted; }};
    const Array<float> old_log_probs_{"old_log_probs", count_, [&](int64_t i) {
                                          return near(i) - std::log(kind(i).ratio) + poison(i);
                                      }};
    const Array<float> advantages_{"advantages", count_,
                                   [&](int64_t i) { return kind(i).advantage + poison(i); }};
    const Array<float> rollout_is_weights_{"rollout_is_weights", count_, drawn(1, 0.5, 2.0)};
    const Array<float> ref_log_probs_{"ref_log_probs", count_,
                                      [&](int64_t i) { return near(i) + drawn(2, -1.0, 1.0)(i); }};
    const Array<double> weights_{"weights", count_, drawn(3, 8.0, 24.0)};
    const Array<float> known_{"bounds", {kAtKnown.lower, kAtKnown.upper}};
    const RowPassParams host_ = inputs(true);

    Array<T> grad_{"grad", case_.output == Output::kSeparate ? separate_.size(case_.batches) : 0};
    const Array<T>& written_ = in_place() ? logits_ : grad_;
    Array<double> log_probs_{"log_probs", count_}, entropy_{"entropy", count_},
        stats_{"stats", 2 * count_};
    Array<uint8_t> undecided_{"undecided", count_};
};

}  // namespace

void run(const RowCase& of, Verdict& verdict) {
    switch (of.dtype) {
        case DType::kFloat32: return Rows<float>(of, verdict).run();
        case DType::kBFloat16: return Rows<BFloat16>(of, verdict).run();
        default: return Rows<Half>(of, verdict).run();
    }
}

}  // namespace driver
