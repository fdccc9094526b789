// libFuzzer target of the CPU kernels. Bytes become shapes, strides, options and values of a loss,
// which runs twice through all entry points of launch.h: with one thread and with two, and with
// different garbage around its arrays. Arrays end with the last element that a kernel may touch,
// and the results are compared with the formulas in double.

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "cpu/simd.h"
#include "launch.h"
#include "sequences.h"

namespace {

using namespace bapo;
using Bytes = FuzzedDataProvider;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Flags = std::vector<uint8_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

void require(bool ok, const char* rule) {
    if (ok) return;
    std::fprintf(stderr, "broken: %s\n", rule);
    std::abort();
}

template <typename T, size_t n>
T pick(Bytes& bytes, const T (&values)[n]) {
    return bytes.PickValueInArray(values);
}

// ---- a tensor with strides ------------------------------------------------------------------

// Where the rows of [batches, rows, vocab] lie; counts elements.
struct Layout {
    int64_t rows;
    int64_t shift;
    int64_t row_stride;
    int64_t batch_stride;
    int64_t extent;

    Layout(Bytes& bytes, int64_t batches, int64_t rows, int64_t vocab, bool may_overlap)
        : rows(rows) {
        const auto gap = [&] { return bytes.ConsumeIntegralInRange<int64_t>(0, 9); };
        shift = gap();
        row_stride = batch_stride = vocab + gap();
        const bool batches_inside = bytes.ConsumeBool();
        (batches_inside ? row_stride : batch_stride) *= batches_inside ? batches : rows;
        if (may_overlap && bytes.ConsumeBool()) row_stride = 0;
        extent = shift;
        if (batches * rows == 0) return;
        extent += (batches - 1) * batch_stride + (rows - 1) * row_stride + vocab;
    }
    int64_t row(int64_t i) const { return shift + i / rows * batch_stride + i % rows * row_stride; }
};

template <typename F>
auto with_type(DType dtype, F f) {
    if (dtype == DType::kFloat32) return f(float{});
    if (dtype == DType::kBFloat16) return f(BFloat16{});
    return f(Float16{});
}

struct Memory {
    DType dtype;
    Layout layout;
    Flags bytes;

    Memory(DType dtype, const Layout& layout, uint8_t garbage)
        : dtype(dtype), layout(layout), bytes(layout.extent * element(), garbage) {}

    int64_t element() const { return dtype == DType::kFloat32 ? 4 : 2; }
    void* data() { return bytes.data() + layout.shift * element(); }
    float get(int64_t i, int64_t j) const {
        return with_type(dtype, [&]<typename T>(T) {
            return load_scalar(reinterpret_cast<const T*>(bytes.data()) + layout.row(i) + j);
        });
    }
    void set(int64_t i, int64_t j, float x) {
        with_type(dtype, [&]<typename T>(T) {
            store_scalar(reinterpret_cast<T*>(bytes.data()) + layout.row(i) + j, x);
        });
    }
};

float rounded(DType dtype, float x) {
    return with_type(dtype, [&]<typename T>(T) {
        T stored;
        store_scalar(&stored, x);
        return load_scalar(&stored);
    });
}

// ---- a problem ------------------------------------------------------------------------------

// Noise around an offset, with a few values chosen by the fuzzer.
Floats numbers(Bytes& bytes, std::minstd_rand& noise, int64_t count) {
    const float spread = pick(bytes, {3.0f, 0.0f, 0.3f, 80.0f, 1e4f});
    const float offset = pick(bytes, {0.0f, 1.0f, -1.0f, -5.0f, 80.0f, -80.0f, 1e4f, -kInf});
    std::normal_distribution<float> normal;
    Floats values(count);
    for (float& value : values) value = offset + spread * normal(noise);
    if (count == 0) return values;
    const auto index = [&] { return bytes.ConsumeIntegralInRange<int64_t>(0, count - 1); };
    for (int chosen = bytes.ConsumeIntegralInRange(0, 3); chosen > 0; --chosen) {
        const float value = bytes.ConsumeBool()
                                ? bytes.ConsumeFloatingPoint<float>()
                                : pick(bytes, {0.0f, -0.0f, 1.0f, -1.0f, 80.0f, -80.0f, 900.0f,
                                               3e38f, -3e38f, 1e-40f, kInf, -kInf, kNaN});
        int64_t begin = index(), end = bytes.ConsumeBool() ? index() : begin;
        if (end < begin) std::swap(begin, end);
        std::fill(values.begin() + begin, values.begin() + end + 1, value);
    }
    return values;
}

std::optional<Floats> maybe_numbers(Bytes& bytes, std::minstd_rand& noise, int64_t count) {
    if (bytes.ConsumeBool()) return std::nullopt;
    return numbers(bytes, noise, count);
}

// log p and entropy of a row in double; NaN where they are not defined.
struct Truth {
    Doubles x, derivative;                     // of the softmax's input by the logit
    double max, log_sum = 0.0, entropy = 0.0;  // log_sum is relative to max

    Truth(const float* z, int64_t vocab, const Transform& transform) {
        for (int64_t j = 0; j < vocab; ++j) {
            double y = z[j], slope = transform.slope;
            if (transform.softcapped) {
                y = std::tanh(y * transform.logit_scale / transform.softcap);
                slope *= 1.0 - y * y;
            }
            const bool forbidden = z[j] == -kInf;
            x.push_back(forbidden ? -kInf : y * transform.scale);
            derivative.push_back(forbidden ? 0.0 : slope);
        }
        max = x[0];
        for (const double x_j : x) max = x_j > max || x_j != x_j ? x_j : max;
        for (const double x_j : x) log_sum += std::exp(x_j - max);
        log_sum = std::isfinite(max) ? std::log(log_sum) : kNaN;
        for (int64_t j = 0; j < vocab; ++j) {
            if (x[j] != -kInf) entropy -= std::exp(log_p(j)) * log_p(j);
        }
        if (!std::isfinite(max)) entropy = kNaN;
    }
    // Relative to the maximum: added to 1e37, the log of the sum would be lost.
    double log_p(int64_t j) const { return (x[j] - max) - log_sum; }
};

struct Problem {
    const cpu::RowKernels* kernels;
    DType dtype;
    int64_t batches, rows, vocab, count;
    bool inplace, two_passes;
    std::optional<Layout> logits_layout, grad_layout;
    Floats logits;  // [count, vocab], in the values of the dtype
    std::vector<int64_t> labels;
    Flags counted;
    std::optional<Floats> old_log_probs, rollout_is_weights, ref_log_probs, rollout_log_probs,
        temperatures;
    Floats advantages;
    Doubles weights;
    std::optional<Floats> bounds;
    std::optional<Floats> own_bounds;  // lower, then upper
    bool by_sequence;                  // the ratio
    int64_t row_length;                // of a sequence, unless it is packed
    std::optional<std::vector<int64_t>> offsets;
    Transform transform;
    PolicyOptions options;
    Grids grids;
    bool uniform_weight, unclipped_only;
    Target target;

    explicit Problem(Bytes& bytes) {
        std::minstd_rand noise(1 + bytes.ConsumeIntegral<uint8_t>());
        constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512bf16"};
        kernels = cpu::row_kernels(bytes.PickValueInArray(kNames));
        if (kernels == nullptr) kernels = &cpu::row_kernels();
        dtype = pick(bytes, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
        shape(bytes);
        choose_options(bytes);
        choose_policy(bytes, noise);
        inplace = bytes.ConsumeBool();
        two_passes = bytes.ConsumeBool();
        logits_layout.emplace(bytes, batches, rows, vocab, !inplace);
        grad_layout.emplace(bytes, batches, rows, vocab, false);
        fill(bytes, noise);
    }

    void choose_policy(Bytes& bytes, std::minstd_rand& noise) {
        options.surrogate =
            pick(bytes, {(int64_t)kClip, (int64_t)kCispo, (int64_t)kSapo, (int64_t)kMask});
        options.sapo_tau_pos = pick(bytes, {1.0, 0.1, 7.0});
        options.sapo_tau_neg = pick(bytes, {1.05, 0.2, 50.0});
        if (bytes.ConsumeBool()) {
            own_bounds = Floats(2 * count);
            for (int64_t i = 0; i < count; ++i) {
                (*own_bounds)[i] = (float)(noise() % 5) / 4.0f;
                (*own_bounds)[count + i] = 1.0f + (float)(noise() % 5) / 2.0f;
            }
        }
        by_sequence = bytes.ConsumeBool();
        row_length = rows;
        if (!bytes.ConsumeBool()) return;
        offsets.emplace(1, 0);
        for (int more = bytes.ConsumeIntegralInRange(1, 5); more > 0; --more) {
            offsets->push_back(bytes.ConsumeBool() ? bytes.ConsumeIntegralInRange<int64_t>(0, count)
                                                   : bytes.ConsumeIntegral<int64_t>());
        }
    }

    void shape(Bytes& bytes) {
        constexpr int64_t kElements = 9000;
        constexpr int64_t kEdges[] = {1,  2,  3,  4,  7,    8,    9,    15,   16,   17,
                                      31, 32, 33, 65, 4095, 4096, 4097, 8191, 8192, 8193};
        vocab = bytes.ConsumeBool() ? bytes.PickValueInArray(kEdges)
                                    : bytes.ConsumeIntegralInRange<int64_t>(1, 70);
        batches = bytes.ConsumeIntegralInRange<int64_t>(0, 3);
        const int64_t most = kElements / (vocab * std::max<int64_t>(batches, 1));
        const int64_t few = std::min<int64_t>(most, 5);
        rows = bytes.ConsumeIntegralInRange<int64_t>(0, bytes.ConsumeBool() ? most : few);
        count = batches * rows;
    }

    void choose_options(Bytes& bytes) {
        const double temperature = pick(bytes, {1.0, 0.7, 0.1, 10.0});
        const double logit_scale = pick(bytes, {1.0, 0.5, 1.7});
        const double softcap = pick(bytes, {0.0, 0.5, 5.0, 30.0});
        const double slope = logit_scale / temperature;
        transform = {softcap > 0.0, logit_scale,
                     softcap,       softcap > 0.0 ? softcap / temperature : slope,
                     slope,         nullptr};
        options.clip_ratio_c = pick(bytes, {(double)kInf, 1.5, 3.0});
        options.kl_loss_coef = pick(bytes, {0.0, 0.1, 1e3});
        options.kl_loss_type = pick(bytes, {(int64_t)kK1, (int64_t)kK2, (int64_t)kK3});
        options.entropy_coef = pick(bytes, {0.0, 0.01, -0.5});
        grids.lower =
            Grid::of(0.6, pick(bytes, {0.9, 0.6, 0.8}), pick(bytes, {0.02, 0.0, 1e-4, 5.0}));
        grids.upper =
            Grid::of(1.2, pick(bytes, {3.0, 1.2, 2.0}), pick(bytes, {0.05, 0.0, 1e-4, 5.0}));
        uniform_weight = bytes.ConsumeBool();
        unclipped_only = bytes.ConsumeBool();
        target = {pick(bytes, {0.4, 0.0, 0.9, 1.0}), bytes.ConsumeBool(), bytes.ConsumeBool()};
        if (bytes.ConsumeBool()) bounds = Floats{0.8f, 1.3f};
    }

    void fill(Bytes& bytes, std::minstd_rand& noise) {
        for (int64_t i = 0; i < count; ++i) {
            const Floats row = numbers(bytes, noise, vocab);
            for (const float z : row) logits.push_back(rounded(dtype, z));
            labels.push_back(noise() % vocab);
            counted.push_back(noise() % 4 != 0);
        }
        if (logits_layout->row_stride == 0) {
            for (int64_t i = 0; i < count; ++i) {
                const int64_t source = i / rows * rows * vocab;
                std::copy_n(logits.begin() + source, vocab, logits.begin() + i * vocab);
            }
        }
        if (count > 0 && bytes.ConsumeBool()) {
            const int64_t i = bytes.ConsumeIntegralInRange<int64_t>(0, count - 1);
            labels[i] = bytes.ConsumeBool() ? bytes.ConsumeIntegralInRange<int64_t>(0, vocab)
                                            : bytes.ConsumeIntegral<int64_t>();
        }
        if (bytes.ConsumeBool()) std::fill(counted.begin(), counted.end(), bytes.ConsumeBool());
        advantages = numbers(bytes, noise, count);
        old_log_probs = maybe_numbers(bytes, noise, count);
        if (old_log_probs && bytes.ConsumeBool()) near_the_policy();
        rollout_is_weights = maybe_numbers(bytes, noise, count);
        ref_log_probs = maybe_numbers(bytes, noise, count);
        rollout_log_probs = maybe_numbers(bytes, noise, count);
        const Floats weight = numbers(bytes, noise, count);
        for (int64_t i = 0; i < count; ++i) weights.push_back(counted[i] ? weight[i] : 0.0);
        if (bytes.ConsumeBool()) choose_temperatures(bytes, noise);
    }

    // One per row, of which one may be bad.
    void choose_temperatures(Bytes& bytes, std::minstd_rand& noise) {
        std::uniform_real_distribution<float> power(-3.0f, 3.0f);
        temperatures = Floats(count);
        for (float& T : *temperatures) T = std::exp2(power(noise));
        if (count > 0 && bytes.ConsumeBool()) {
            const int64_t i = bytes.ConsumeIntegralInRange<int64_t>(0, count - 1);
            (*temperatures)[i] = pick(bytes, {0.0f, -1.0f, kInf, -kInf, kNaN});
        }
        transform.scale = transform.softcapped ? transform.softcap : transform.logit_scale;
        transform.slope = transform.logit_scale;
        transform.temperatures = temperatures->data();
    }

    const float* row(int64_t i) const { return logits.data() + i * vocab; }
    bool rows_decide() const { return !two_passes && !by_sequence; }
    // Whether no offset falls, so that every token is in one sequence.
    bool sequences_are_apart() const {
        int64_t before = 0;
        for (size_t k = 1; offsets && k < offsets->size(); ++k) {
            const int64_t offset = std::clamp<int64_t>((*offsets)[k], 0, count);
            if (offset < before) return false;
            before = offset;
        }
        return true;
    }
    // Tokens behind the last sequence are one more.
    int64_t sequence_of(int64_t i) const {
        if (!offsets) return i / row_length;
        int64_t k = 0;
        for (size_t at = 1; at < offsets->size(); ++at) k += (*offsets)[at] <= i;
        return k;
    }
    bool known(int64_t i) const { return labels[i] >= 0 && labels[i] < vocab; }

    // Ratios near the bounds instead of far outside.
    void near_the_policy() {
        for (int64_t i = 0; i < count; ++i) {
            const double log_p = known(i) ? Truth(row(i), vocab, transform).log_p(labels[i]) : 0.0;
            (*old_log_probs)[i] = (float)log_p + 0.1f * (*old_log_probs)[i];
        }
    }
};

// ---- a run ----------------------------------------------------------------------------------

struct Outcome {
    Doubles log_probs, entropy, dlog_probs, dentropy, gradient, table, others;
    Doubles log_ratios, dlog_ratios, of_kl;  // of sequences
    float bounds[2];
};

// In fresh threads, whose buffers are then exactly as large as these rows need.
template <typename Params>
void run_rows(void (*kernel)(const Params&, cpu::RowQueue&), const Params& params, int threads) {
    cpu::RowQueue queue{params.rows.count(), 1};
    std::vector<std::thread> pool;
    for (int k = 0; k < threads; ++k) pool.emplace_back([&] { kernel(params, queue); });
    for (std::thread& thread : pool) thread.join();
}

// Runs the chunks forwards or backwards; the order must not matter.
template <typename Partial, typename Chunk>
std::vector<Partial> run_chunks(int64_t count, int64_t width, bool backwards, Chunk chunk) {
    const int64_t chunks = (count + cpu::kTokensPerChunk - 1) / cpu::kTokensPerChunk;
    std::vector<Partial> partials(chunks * width);
    for (int64_t k = 0; k < chunks; ++k) {
        const int64_t at = backwards ? chunks - 1 - k : k;
        chunk(at, partials.data() + at * width);
    }
    return partials;
}

// The arguments of one run: masked entries and outputs are full of garbage.
class Run {
  public:
    Run(const Problem& problem, int threads, uint8_t garbage)
        : p(problem),
          threads(threads),
          garbage(garbage),
          logits(p.dtype, *p.logits_layout, garbage),
          grad(p.dtype, p.inplace ? *p.logits_layout : *p.grad_layout, garbage),
          labels(masked(p.labels)),
          advantages(masked(p.advantages)),
          old_log_probs(masked(p.old_log_probs)),
          rollout_is_weights(masked(p.rollout_is_weights)),
          ref_log_probs(masked(p.ref_log_probs)),
          rollout_log_probs(masked(p.rollout_log_probs)),
          temperatures(masked(p.temperatures)),
          lower(masked_bounds(0)),
          upper(masked_bounds(1)) {
        for (int64_t i = 0; i < p.count; ++i) {
            for (int64_t j = 0; p.counted[i] && j < p.vocab; ++j) logits.set(i, j, p.row(i)[j]);
        }
    }

    Outcome operator()() {
        const Flags before = logits.bytes;
        tokens = {.counted = reinterpret_cast<const bool*>(p.counted.data()),
                  .weights = p.weights.data(),
                  .log_ratios = nullptr,
                  .advantages = advantages.data(),
                  .old_log_probs = data(old_log_probs),
                  .rollout_log_probs = data(rollout_log_probs),
                  .rollout_is_weights = data(rollout_is_weights),
                  .ref_log_probs = data(ref_log_probs),
                  .lower = data(lower),
                  .upper = data(upper)};
        row_pass();
        if (p.by_sequence) sequence_log_ratios();
        contributions();
        solve();
        token_loss();
        if (p.by_sequence) add_sequence_means();
        if (!p.rows_decide() || !(p.bounds || p.own_bounds)) row_gradient();
        read_gradient();
        require(p.inplace || logits.bytes == before, "logits are not written");
        return out;
    }

  private:
    template <typename T>
    std::vector<T> poisoned(int64_t count) const {
        std::vector<T> values(count);
        if (count > 0) std::memset(values.data(), garbage, count * sizeof(T));
        return values;
    }
    template <typename T>
    std::vector<T> masked(std::vector<T> values) const {
        for (int64_t i = 0; i < p.count; ++i) {
            if (!p.counted[i]) std::memset(&values[i], garbage, sizeof(T));
        }
        return values;
    }
    std::optional<Floats> masked(const std::optional<Floats>& values) const {
        return values ? std::optional(masked(*values)) : std::nullopt;
    }
    static const float* data(const std::optional<Floats>& values) {
        return values ? values->data() : nullptr;
    }

    std::optional<Floats> masked_bounds(int which) const {
        if (!p.own_bounds) return std::nullopt;
        const auto begin = p.own_bounds->begin() + which * p.count;
        return masked(Floats(begin, begin + p.count));
    }

    LogitRows rows(bool with_grad) {
        Memory& target = p.inplace ? logits : grad;
        Transform transform = p.transform;
        transform.temperatures = data(temperatures);
        return {p.dtype,
                p.batches,
                p.rows,
                p.vocab,
                logits.data(),
                logits.layout.batch_stride,
                logits.layout.row_stride,
                with_grad ? target.data() : nullptr,
                target.layout.batch_stride,
                target.layout.row_stride,
                transform,
                {}};
    }

    void row_pass() {
        out.log_probs = poisoned<double>(p.count);
        out.entropy = poisoned<double>(p.count);
        stats = poisoned<double>(2 * p.count);
        undecided = poisoned<uint8_t>(p.count);
        RowPassParams params{};
        params.rows = rows(p.rows_decide());
        params.labels = labels.data();
        params.tokens = tokens;
        params.options = p.options;
        params.bounds = p.own_bounds ? nullptr : data(p.bounds);
        params.start = p.grids.start();
        params.maximum = p.grids.maximum();
        params.log_probs = out.log_probs.data();
        params.entropy = out.entropy.data();
        params.stats = stats.data();
        params.undecided = p.rows_decide() ? undecided.data() : nullptr;
        if (!p.rows_decide()) (params.tokens = {}).counted = tokens.counted;
        run_rows(p.kernels->row_pass, params, threads);
    }

    // Means over the sequences, forwards or backwards.
    void sequence_means(const double* in, bool forward, double* out) {
        SequenceMeanParams params{};
        params.sequences = {p.count, p.row_length, {}, p.batches};
        if (p.offsets) {
            const int64_t count = (int64_t)p.offsets->size() - 1;
            params.sequences.offsets = {p.offsets->data(), DType::kInt64, 0, 1};
            params.sequences.count = count;
        }
        params.counted = tokens.counted;
        params.forward = forward;
        params.in = in;
        params.old_log_probs = forward ? tokens.old_log_probs : nullptr;
        params.out = out;
        const int64_t spans = span_count(params.sequences);
        const bool backwards = threads > 1 && p.sequences_are_apart();
        for (int64_t k = 0; k < spans; ++k) {
            cpu::sequence_mean(params, backwards ? spans - 1 - k : k);
        }
    }
    void sequence_log_ratios() {
        out.log_ratios = poisoned<double>(p.count);
        sequence_means(out.log_probs.data(), true, out.log_ratios.data());
        tokens.log_ratios = out.log_ratios.data();
    }
    void add_sequence_means() {
        out.of_kl = out.dlog_probs;
        sequence_means(out.dlog_ratios.data(), false, out.dlog_probs.data());
    }

    void contributions() {
        ContributionParams params{};
        params.count = p.count;
        params.log_probs = out.log_probs.data();
        params.tokens = tokens;
        params.grids = p.grids;
        params.uniform_weight = p.uniform_weight;
        params.unclipped_only = p.unclipped_only;
        const int64_t bins = params.grids.bins();
        out.table = poisoned<double>(bins - 2);
        params.table = out.table.data();
        params.ranks = 1;
        const auto partials = run_chunks<Moments>(
            p.count, bins, threads > 1,
            [&](int64_t k, Moments* of_chunk) { cpu::contributions_chunk(params, k, of_chunk); });
        cpu::contributions_reduce(params, partials.data(), (int64_t)partials.size() / bins);
        check_table(params);
    }

    // Compares every entry of the table with the sum over the tokens.
    void check_table(const ContributionParams& params) const {
        const int points_checked = std::min<int64_t>(out.table.size(), 20'000 / (p.count + 1));
        double steps = 0.0;
        for (int k = 0; k < points_checked; ++k) {
            const bool positive = k >= p.grids.lower.count;
            const Grid& grid = positive ? p.grids.upper : p.grids.lower;
            const int place = positive ? k - p.grids.lower.count : k;
            steps = place == 0 ? grid.start : steps + grid.step;
            const double bound = grid.point(place, steps);
            double sum = 0.0;
            for (int64_t i = 0; i < p.count; ++i) {
                const auto [r, A, w] = candidate(params, i);
                if (positive ? A > 0.0 : A < 0.0) {
                    sum += w * contribution(r, A, {bound, bound}, p.unclipped_only);
                }
            }
            if (!std::isfinite(sum) || sum > 1e300) continue;
            require(std::fabs(out.table[k] - sum) <= 1e-9 * sum + 1e-300, "table of P and N");
        }
    }

    void solve() {
        cpu::solve({out.table.data(), 1, p.grids, p.target, {bounds, masses}});
        require(bounds[0] >= (float)p.grids.lower.start &&
                    bounds[0] <= (float)p.grids.lower.maximum &&
                    bounds[1] >= (float)p.grids.upper.start &&
                    bounds[1] <= (float)p.grids.upper.maximum,
                "bounds are on their grids");
        out.others = {bounds[0], bounds[1]};
        out.others.insert(out.others.end(), masses, masses + kMasses);
        if (p.bounds) std::copy_n(p.bounds->data(), 2, bounds);
        std::copy_n(bounds, 2, out.bounds);
    }

    void token_loss() {
        out.dlog_probs = poisoned<double>(p.count);
        out.dentropy = poisoned<double>(p.count);
        Floats report = poisoned<float>(kReportSize);
        TokenLossParams params{};
        params.count = p.count;
        params.log_probs = out.log_probs.data();
        params.entropy = out.entropy.data();
        params.tokens = tokens;
        params.options = p.options;
        params.uniform_weight = p.uniform_weight;
        params.unclipped_only = p.unclipped_only;
        params.start = p.grids.start();
        params.last = p.grids.last();
        params.target = p.target;
        params.bounds = p.own_bounds ? nullptr : bounds;
        params.masses = p.bounds || p.own_bounds ? nullptr : masses;
        params.report = reinterpret_cast<Report*>(report.data());
        params.dlog_probs = out.dlog_probs.data();
        params.dentropy = out.dentropy.data();
        if (p.by_sequence) {
            out.dlog_ratios = poisoned<double>(p.count);
            params.dlog_ratios = out.dlog_ratios.data();
        }
        Floats outputs = poisoned<float>(2 * p.count);
        params.outputs = outputs.data();
        const auto partials = run_chunks<TokenLossSums>(
            p.count, 1, threads > 1,
            [&](int64_t k, TokenLossSums* sums) { cpu::token_loss_chunk(params, k, *sums); });
        cpu::token_loss_reduce(params, partials.data(), (int64_t)partials.size());
        out.others.insert(out.others.end(), report.begin(), report.end());
        out.others.insert(out.others.end(), outputs.begin(), outputs.end());
    }

    void row_gradient() {
        RowGradientParams params{};
        params.rows = rows(true);
        params.labels = labels.data();
        params.stats = stats.data();
        params.entropy = out.entropy.data();
        params.dlog_probs = out.dlog_probs.data();
        params.dentropy = p.options.entropy_coef == 0.0 ? nullptr : out.dentropy.data();
        params.only = p.rows_decide() ? undecided.data() : nullptr;
        run_rows(p.kernels->row_gradient, params, threads);
        out.others.insert(out.others.end(), stats.begin(), stats.end());
    }

    // Reads the rows, and requires everything around them to be garbage still.
    void read_gradient() {
        Memory& target = p.inplace ? logits : grad;
        for (int64_t i = 0; i < p.count; ++i) {
            for (int64_t j = 0; j < p.vocab; ++j) out.gradient.push_back(target.get(i, j));
            uint8_t* const row = target.bytes.data() + target.layout.row(i) * target.element();
            std::fill_n(row, p.vocab * target.element(), garbage);
        }
        const auto touched = [&](uint8_t byte) { return byte != garbage; };
        require(std::none_of(target.bytes.begin(), target.bytes.end(), touched),
                "nothing is written between rows");
    }

    const Problem& p;
    const int threads;
    const uint8_t garbage;
    Memory logits, grad;
    std::vector<int64_t> labels;
    Floats advantages;
    std::optional<Floats> old_log_probs, rollout_is_weights, ref_log_probs, rollout_log_probs,
        temperatures, lower, upper;
    TokenInputs tokens{};
    Doubles stats;
    Flags undecided;
    float bounds[2];
    double masses[kMasses];
    Outcome out;
};

// ---- what must hold -------------------------------------------------------------------------

bool same_bits(const Doubles& a, const Doubles& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
        return (x != x && y != y) || std::memcmp(&x, &y, sizeof x) == 0;
    });
}

bool same_bits(const Outcome& a, const Outcome& b) {
    return same_bits(a.log_probs, b.log_probs) && same_bits(a.entropy, b.entropy) &&
           same_bits(a.dlog_probs, b.dlog_probs) && same_bits(a.dentropy, b.dentropy) &&
           same_bits(a.gradient, b.gradient) && same_bits(a.table, b.table) &&
           same_bits(a.others, b.others) && same_bits(a.log_ratios, b.log_ratios) &&
           same_bits(a.dlog_ratios, b.dlog_ratios);
}

bool near(double got, double want, double slack) {
    if (want != want) return got != got;
    return got == want || (std::isfinite(want) && std::fabs(got - want) <= slack);
}

constexpr double kSlack = 0x1p-9;  // a block is 4,096 float32 terms, 2^-12 if all round one way

// d l/d z_j of a row with finite coefficients, each entry and their sum.
void check_gradient(const Problem& p, const Outcome& got, int64_t i, const Truth& truth) {
    const double* const dz = got.gradient.data() + i * p.vocab;
    const double g = got.dlog_probs[i], bonus = p.weights[i] * p.options.entropy_coef;
    const double size = std::fabs(g) + 16.0 * std::fabs(bonus);
    const bool half = p.dtype == DType::kFloat16;
    const double slope = p.transform.of_row(i).slope;
    if (!(size * slope < (half ? 6e4 : 1e37))) return;  // beyond the dtype's range
    const double tiny =
        half ? 0x1p-24 : 256.0 * (p.dtype == DType::kBFloat16 ? 0x1p-133 : 0x1p-149);
    const double relative = kSlack + (p.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11);
    double sum = 0.0, magnitude = 0.0;
    for (int64_t j = 0; j < p.vocab; ++j) {
        const double log_p = truth.log_p(j), prob = std::exp(log_p);
        const bool is_label = j == p.labels[i];
        double want = 0.0, slack = tiny;
        if (truth.x[j] != -kInf) {
            const double of_entropy = bonus * prob * (log_p + truth.entropy);
            want = is_label ? of_entropy - g * std::expm1(log_p) : of_entropy - g * prob;
            want *= truth.derivative[j];
            const double operands =
                std::fabs(g) * prob + std::fabs(bonus) * prob * (truth.entropy - log_p);
            // 1 - y^2 of a soft cap cancels, and so does 1 - p of the label.
            slack += relative * std::fabs(want) + operands * kSlack * truth.derivative[j];
            slack += (operands * 0x1p-20 + size * (is_label ? kSlack : 0x1p-100)) * slope;
        }
        require(near(dz[j], want, slack), "gradient of a logit");
        sum += dz[j];
        magnitude += std::fabs(dz[j]);
    }
    const bool forbidden_label = p.known(i) && truth.x[p.labels[i]] == -kInf;
    if (p.transform.softcapped || forbidden_label) return;
    const double slack = relative * (magnitude + size * slope) + tiny * p.vocab;
    require(near(sum, 0.0, slack), "the gradient of a row sums to zero");
}

// On-policy that of the policy itself, but finite.
long double old_log_prob_of(const Problem& p, int64_t i, long double log_prob) {
    constexpr long double kLowest = std::numeric_limits<float>::lowest();
    return p.old_log_probs ? (*p.old_log_probs)[i] : log_prob < kLowest ? kLowest : log_prob;
}

// The policy term's derivative by the log-ratio, from the papers' formulas.
long double policy_gradient(const Problem& p, long double log_ratio, long double A,
                            long double lower, long double upper) {
    const PolicyOptions& options = p.options;
    const long double held = std::fmin(std::fmax(log_ratio, -20.0L), 20.0L), r = std::exp(held);
    if (options.surrogate == kCispo) return -A * std::fmin(std::fmax(r, lower), upper);
    if (A != A) return A;
    if (A == 0.0L || std::fabs(log_ratio) > 20.0L) return 0.0L;
    if (options.surrogate == kSapo) {  // sigmoid'(x) = 1/(2 + 2*cosh(x))
        const long double tau = A > 0.0L ? options.sapo_tau_pos : options.sapo_tau_neg;
        return -4.0L * A * r / (2.0L + 2.0L * std::cosh(tau * (r - 1.0L)));
    }
    if (options.surrogate == kMask) return r < lower || r > upper ? 0.0L : -A * r;
    const bool stops = A > 0.0L ? r > upper : r < lower || r > (long double)options.clip_ratio_c;
    return stops ? 0.0L : -A * r;
}
long double kl_gradient(const Problem& p, int64_t i, long double log_prob) {
    const PolicyOptions& options = p.options;
    if (options.kl_loss_coef == 0.0) return 0.0L;
    const long double ref = p.ref_log_probs ? (*p.ref_log_probs)[i] : log_prob;
    const long double d = ref - log_prob;
    if (options.kl_loss_type == kK1) return options.kl_loss_coef;
    if (options.kl_loss_type == kK2) return options.kl_loss_coef * -d;
    const bool inside = std::fabs(d) <= 20.0L && std::expm1(d) - d <= 10.0L;
    return inside ? options.kl_loss_coef * -std::expm1(d) : 0.0L;
}

bool close(double got, long double want, long double size) {
    return std::fabs(got - want) <= 1e-9L * size + 1e-290L;
}

// The gradients of tokens at the log-probs found; of a sequence, of its log-ratio and of its
// tokens.
void check_tokens(const Problem& p, const Outcome& got) {
    for (int64_t i = 0; i < p.count; ++i) {
        if (!p.counted[i]) continue;
        const long double log_prob = got.log_probs[i], A = p.advantages[i];
        const long double old = old_log_prob_of(p, i, log_prob);
        const long double log_ratio = p.by_sequence ? got.log_ratios[i] : log_prob - old;
        const long double rollout_is_weight =
            p.rollout_is_weights ? (*p.rollout_is_weights)[i] : 1.0L;
        const long double lower = p.own_bounds ? (*p.own_bounds)[i] : got.bounds[0];
        const long double upper = p.own_bounds ? (*p.own_bounds)[p.count + i] : got.bounds[1];
        const long double r = std::exp(std::fmin(std::fmax(log_ratio, -20.0L), 20.0L));
        const long double of_policy =
            p.weights[i] * rollout_is_weight * policy_gradient(p, log_ratio, A, lower, upper);
        const long double of_kl = p.weights[i] * kl_gradient(p, i, log_prob);
        // 1 - sigmoid cancels.
        const long double operand =
            p.options.surrogate == kSapo
                ? std::fabs(p.weights[i] * rollout_is_weight * A * r) * 1e-6L
                : 0.0L;
        const long double size = std::fabs(of_policy) + std::fabs(of_kl) + operand;
        if (!(size < 1e290L)) continue;
        const bool has_ref = !p.ref_log_probs || std::isfinite((*p.ref_log_probs)[i]);
        if (!std::isfinite(old + log_ratio + A) || !has_ref) continue;
        // At a bound the last bit of the exp decides.
        const auto at = [&](long double bound) { return std::fabs(r / bound - 1.0L) <= 1e-12L; };
        if (at(lower) || at(upper) || at(p.options.clip_ratio_c)) continue;
        if (!p.by_sequence) {
            require(close(got.dlog_probs[i], of_policy + of_kl, size), "gradient of a log-prob");
        } else {
            require(close(got.dlog_ratios[i], of_policy, size), "gradient of a log-ratio");
            require(close(got.of_kl[i], of_kl, size), "gradient of a KL term");
        }
    }
}

// The log-ratios of sequences, and what each token gets of the gradients of its sequence.
void check_sequences(const Problem& p, const Outcome& got) {
    const int64_t count = p.offsets ? (int64_t)p.offsets->size() : p.batches;
    struct Sum {
        long double tokens = 0.0L, log_ratio = 0.0L, size = 0.0L, gradient = 0.0L, steepness = 0.0L;
    };
    std::vector<Sum> sums(count);
    for (int64_t i = 0; i < p.count; ++i) {
        if (!p.counted[i]) {
            require(got.log_ratios[i] == 0.0 && got.dlog_ratios[i] == 0.0, "masked tokens are 0");
            continue;
        }
        const long double log_prob = got.log_probs[i];
        const long double old = old_log_prob_of(p, i, log_prob);
        Sum& sum = sums[p.sequence_of(i)];
        sum.tokens += 1.0L;
        sum.log_ratio += std::isfinite(old) ? log_prob - old : (long double)kNaN;
        sum.size += std::fabs(log_prob - old);
        sum.gradient += got.dlog_ratios[i];
        sum.steepness += std::fabs(got.dlog_ratios[i]);
    }
    for (int64_t i = 0; i < p.count; ++i) {
        if (!p.counted[i]) continue;
        const Sum& sum = sums[p.sequence_of(i)];
        const long double mean = sum.log_ratio / sum.tokens, gradient = sum.gradient / sum.tokens;
        if (std::isfinite(mean) && sum.size < 1e290L) {
            require(close(got.log_ratios[i], mean, sum.size), "log-ratio of a sequence");
        } else if (p.old_log_probs && mean != mean) {
            require(!std::isfinite(got.log_ratios[i]), "a bad log-prob in a sequence");
        }
        if (!(sum.steepness + std::fabs(got.of_kl[i]) < 1e290L)) continue;
        require(close(got.dlog_probs[i], got.of_kl[i] + gradient,
                      sum.steepness + std::fabs(got.of_kl[i])),
                "gradient of a token in a sequence");
    }
}

void check(const Problem& p, const Outcome& got) {
    if (!p.by_sequence || p.sequences_are_apart()) check_tokens(p, got);
    if (p.by_sequence && p.sequences_are_apart()) check_sequences(p, got);
    for (int64_t i = 0; i < p.count; ++i) {
        const double* const dz = got.gradient.data() + i * p.vocab;
        const bool zero = std::all_of(dz, dz + p.vocab, [](double x) { return x == 0.0; });
        if (!p.counted[i]) {
            require(got.log_probs[i] == 0.0 && got.entropy[i] == 0.0 && zero, "masked rows are 0");
            require(got.dlog_probs[i] == 0.0 && got.dentropy[i] == 0.0, "masked tokens are 0");
            continue;
        }
        const Truth truth(p.row(i), p.vocab, p.transform.of_row(i));
        const double log_p = p.known(i) ? truth.log_p(p.labels[i]) : kNaN;
        require(near(got.log_probs[i], log_p, kSlack * (1.0 + std::fabs(log_p))), "log-prob");
        require(near(got.entropy[i], truth.entropy, kSlack * (1.0 + 16.0)), "entropy");
        const double bonus = p.weights[i] * p.options.entropy_coef;
        if (got.dlog_probs[i] == 0.0 && bonus == 0.0) require(zero, "rows without gradient are 0");
        const bool defined = log_p == log_p && truth.entropy == truth.entropy;
        if (defined && std::isfinite(got.dlog_probs[i])) check_gradient(p, got, i, truth);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Bytes bytes(data, size);
    const Problem problem(bytes);
    const Outcome one = Run(problem, 1, 0xff)(), two = Run(problem, 2, 0x41)();
    require(same_bits(one, two), "the same bits every run and for any threads");
    check(problem, one);
    return 0;
}
