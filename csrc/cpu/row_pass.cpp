// The single pass over the logits: log-prob, entropy and gradient of one row after the other.
// A row is read from memory once; the second look, for the gradient, finds it in the cache.
// Compiled once per instruction set (BAPO_ISA).

#include <cmath>

#include "launch.h"
#include "simd.h"

namespace {

using namespace bapo;

constexpr int64_t kBlock = 4096;  // elements whose maximum is taken before their exp, within L1
constexpr float kInf = __builtin_inff();

// y of x = scale*y, and d y/d z up to the slope. -inf stays -inf, with derivative 0.
template <bool kSoftcap>
inline VFloat transformed(VFloat z, const Transform& transform) {
    if constexpr (!kSoftcap) return z;
    const VFloat y = vtanh(z * (float)transform.inner);
    return z == -kInf ? splat(-kInf) : y;
}
template <bool kSoftcap>
inline VFloat derivative(VFloat y) {
    const VFloat held = y < -1.0f ? splat(-1.0f) : y;
    return kSoftcap ? 1.0f - held * held : splat(1.0f);
}

struct RowStats {
    float max;             // of y
    double sum;            // of exp(t), t = scale*(y - max)
    double weighted_sum;   // of t*exp(t)
    double log_sum() const { return std::log(sum); }
    double entropy() const { return log_sum() - weighted_sum / sum; }
};

struct Exp {
    VFloat t;  // held at kExpFloor, where exp counts as 0, so that t*exp(t) is 0 at -inf
    VFloat e;
};
inline Exp shifted_exp(VFloat y, float max, float scale) {
    const VFloat t = (y - max) * scale;
    const VFloat held = t < kExpFloor ? splat(kExpFloor) : t;
    return {held, t < kExpFloor ? VFloat{} : exp_above_floor(held)};
}

template <bool kSoftcap, typename T>
RowStats row_stats(const T* row, int64_t vocab, const Transform& transform) {
    const float scale = (float)transform.scale;
    RowStats stats{-kInf, 0.0, 0.0};
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
        const int64_t whole = begin + (end - begin) / kLanes * kLanes;

        VFloat block_max = splat(-kInf);
        for (int64_t i = begin; i < whole; i += kLanes) block_max = vmax(block_max, load(row + i));
        if (whole < end) block_max = vmax(block_max, load_partial(row + whole, end - whole));
        const float max = reduce_max(transformed<kSoftcap>(block_max, transform));
        if (max > stats.max) {
            const double shift = ((double)stats.max - max) * transform.scale;
            const double factor = std::exp(shift);
            const double moved = factor > 0.0 ? stats.weighted_sum + shift * stats.sum : stats.sum;
            stats = {max, factor * stats.sum, factor * moved};
        }
        // A block of -inf alone has no maximum yet; a NaN in it must still reach the sum.
        const float origin = stats.max == -kInf ? 0.0f : stats.max;

        VFloat sum = {}, weighted_sum = {};
        const auto add = [&](VFloat z) {
            const Exp exp = shifted_exp(transformed<kSoftcap>(z, transform), origin, scale);
            sum += exp.e;
            weighted_sum += exp.t * exp.e;
        };
        for (int64_t i = begin; i < whole; i += kLanes) add(load(row + i));
        if (whole < end) add(load_partial(row + whole, end - whole));
        stats.sum += reduce_add(sum);
        stats.weighted_sum += reduce_add(weighted_sum);
    }
    if (stats.sum == 0.0) stats.sum = NAN;  // no token can be drawn: there is no distribution
    return stats;
}

// Coefficients of a row: d loss / d logp and the weight of the entropy bonus.
struct RowCoefficients {
    double dlog_prob;
    double entropy_bonus;
    bool zero() const { return dlog_prob == 0.0 && entropy_bonus == 0.0; }
};

// d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + H)] * d x_j/d z_j
//           = exp(t_j)*(a*t_j + b) * derivative_j, and the label's entry by itself: 1 - p_label
// is formed without cancellation.
template <bool kSoftcap, typename T>
void row_gradient(const T* row, T* grad, int64_t vocab, const Transform& transform, int64_t label,
                  float max, double sum, double entropy, RowCoefficients coefficients) {
    const double log_sum = std::log(sum), bonus = coefficients.entropy_bonus;
    const float scale = (float)transform.scale;
    const float a = (float)(bonus / sum * transform.slope);
    const float b = (float)((bonus * (entropy - log_sum) - coefficients.dlog_prob) / sum *
                            transform.slope);
    const auto gradient = [&](VFloat z) {
        const VFloat y = transformed<kSoftcap>(z, transform);
        const Exp exp = shifted_exp(y, max, scale);
        return exp.e * (a * exp.t + b) * derivative<kSoftcap>(y);
    };

    T label_grad{};
    if (label >= 0 && label < vocab) {
        const float z = load_scalar(row + label);
        const VFloat y = transformed<kSoftcap>(splat(z), transform);
        const double log_p = ((double)y[0] - max) * transform.scale - log_sum;
        const double dx = bonus * std::exp(log_p) * (log_p + entropy) -
                          coefficients.dlog_prob * std::expm1(log_p);
        const double dz = dx * transform.slope * derivative<kSoftcap>(y)[0];
        store_scalar(&label_grad, z == -kInf ? 0.0f : (float)dz);
    }

    const bool in_place = (const void*)row == (const void*)grad;
    const auto address = reinterpret_cast<uintptr_t>(grad);
    constexpr uintptr_t kBytes = kLanes * sizeof(T);
    int64_t begin = 0;
    if (!in_place && address % sizeof(T) == 0) {
        const int64_t head = (int64_t)((kBytes - address % kBytes) % kBytes / sizeof(T));
        begin = head < vocab ? head : vocab;
        if (begin > 0) store_partial(grad, gradient(load_partial(row, begin)), begin);
        for (; begin + kLanes <= vocab; begin += kLanes) {
            stream(grad + begin, gradient(load(row + begin)));
        }
        stream_fence();
    }
    for (; begin + kLanes <= vocab; begin += kLanes) {
        store(grad + begin, gradient(load(row + begin)));
    }
    const int64_t tail = vocab - begin;
    if (tail > 0) store_partial(grad + begin, gradient(load_partial(row + begin, tail)), tail);
    if (label >= 0 && label < vocab) grad[label] = label_grad;
}

template <typename T>
struct Row {
    const T* logits;
    T* grad;

    Row(const LogitRows& rows, int64_t index) {
        const int64_t batch = index / rows.rows, row = index % rows.rows;
        logits = static_cast<const T*>(rows.logits) + batch * rows.batch_stride +
                 row * rows.row_stride;
        grad = rows.grad == nullptr ? nullptr
                                    : static_cast<T*>(rows.grad) + batch * rows.grad_batch_stride +
                                          row * rows.grad_row_stride;
    }
    void zero_grad(int64_t vocab) const {
        if (grad != nullptr) std::memset(static_cast<void*>(grad), 0, vocab * sizeof(T));
    }
};

// What the loss of a token asks of its row, for bounds that are known or still to be found.
struct Demand {
    RowCoefficients coefficients;
    bool undecided;
};
Demand demand(const RowPassParams& params, int64_t index, double log_prob) {
    const TokenInputs& tokens = params.tokens;
    const double old = tokens.old_log_probs ? tokens.old_log_probs[index] : on_policy_old(log_prob);
    const Token token{
        log_prob,
        old,
        tokens.ref_log_probs ? tokens.ref_log_probs[index] : log_prob,
        tokens.advantages[index],
        tokens.is_weights ? tokens.is_weights[index] : 1.0,
    };
    const Ratio ratio = policy_ratio(log_prob, old);
    Bounds first = params.first, last = params.last;
    if (params.bounds) first = last = {params.bounds[0], params.bounds[1]};
    const double grad = token_grad(token, ratio, first, params.options);
    const double grad_last = token_grad(token, ratio, last, params.options);
    const double weight = tokens.weights[index];
    return {{weight * grad, weight * params.options.entropy_coef},
            grad != grad_last && grad == grad};
}

template <typename T, bool kSoftcap>
void pass_row(const RowPassParams& params, int64_t index) {
    const LogitRows& rows = params.rows;
    const Row<T> row(rows, index);
    float* stats_out = params.stats + 2 * index;
    if (params.undecided) params.undecided[index] = 0;
    if (!params.tokens.live[index]) {
        params.log_probs[index] = params.entropy[index] = stats_out[0] = 0.0f;
        stats_out[1] = 1.0f;
        return row.zero_grad(rows.vocab);
    }

    const RowStats stats = row_stats<kSoftcap>(row.logits, rows.vocab, rows.transform);
    const int64_t label = params.labels[index];
    double log_prob = NAN;
    if (label >= 0 && label < rows.vocab) {
        const VFloat z = splat(load_scalar(row.logits + label));
        const double y = transformed<kSoftcap>(z, rows.transform)[0];
        log_prob = (y - stats.max) * rows.transform.scale - stats.log_sum();
    }
    params.log_probs[index] = (float)log_prob;
    params.entropy[index] = (float)stats.entropy();
    stats_out[0] = stats.max;
    stats_out[1] = (float)stats.sum;

    if (row.grad == nullptr) return;
    // Decided on the float32 log-prob, as the token kernels see it.
    const Demand wanted = demand(params, index, params.log_probs[index]);
    if (wanted.undecided) {
        params.undecided[index] = 1;
    } else if (wanted.coefficients.zero()) {
        row.zero_grad(rows.vocab);
    } else {
        row_gradient<kSoftcap>(row.logits, row.grad, rows.vocab, rows.transform, label, stats.max,
                               stats.sum, stats.entropy(), wanted.coefficients);
    }
}

template <typename T, bool kSoftcap>
void finish_row(const RowGradientParams& params, int64_t index) {
    if (params.only && !params.only[index]) return;
    const LogitRows& rows = params.rows;
    const Row<T> row(rows, index);
    const RowCoefficients coefficients{
        params.dlog_probs[index], params.dentropy ? -(double)params.dentropy[index] : 0.0};
    if (coefficients.zero()) return row.zero_grad(rows.vocab);
    row_gradient<kSoftcap>(row.logits, row.grad, rows.vocab, rows.transform, params.labels[index],
                           params.stats[2 * index], params.stats[2 * index + 1],
                           params.entropy[index], coefficients);
}

template <typename F>
void with_row_type(const LogitRows& rows, F f) {
    const auto with_softcap = [&]<typename T>(T) {
        rows.transform.softcapped ? f.template operator()<T, true>()
                                  : f.template operator()<T, false>();
    };
    switch (rows.dtype) {
        case DType::kFloat32: return with_softcap(float{});
        case DType::kBFloat16: return with_softcap(BFloat16{});
        case DType::kFloat16: return with_softcap(Float16{});
    }
}

template <typename Params, typename RowKernel>
void take_rows(const Params& params, std::atomic<int64_t>& next_row, RowKernel kernel) {
    const int64_t count = params.rows.batches * params.rows.rows;
    for (int64_t row; (row = next_row.fetch_add(1, std::memory_order_relaxed)) < count;) {
        kernel(params, row);
    }
}

void row_pass(const RowPassParams& params, std::atomic<int64_t>& next_row) {
    with_row_type(params.rows, [&]<typename T, bool kSoftcap>() {
        take_rows(params, next_row, pass_row<T, kSoftcap>);
    });
}

void row_gradient(const RowGradientParams& params, std::atomic<int64_t>& next_row) {
    with_row_type(params.rows, [&]<typename T, bool kSoftcap>() {
        take_rows(params, next_row, finish_row<T, kSoftcap>);
    });
}

}  // namespace

#define BAPO_CONCAT_(a, b) a##b
#define BAPO_CONCAT(a, b) BAPO_CONCAT_(a, b)
#define BAPO_STRING_(a) #a
#define BAPO_STRING(a) BAPO_STRING_(a)

namespace bapo::cpu {
extern const RowKernels BAPO_CONCAT(kRowKernels_, BAPO_ISA);
const RowKernels BAPO_CONCAT(kRowKernels_, BAPO_ISA){BAPO_STRING(BAPO_ISA), ::row_pass,
                                                     ::row_gradient};
}  // namespace bapo::cpu
