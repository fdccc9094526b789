// The single pass over the logits: log-prob, entropy and gradient of one row after the other.
// A row is read from memory once; the second look, for the gradient, finds it in the cache.
// Compiled once per instruction set (BAPO_ISA).

#include <cmath>

#include "launch.h"
#include "simd.h"

namespace {

using namespace bapo;

constexpr int64_t kBlock = 4096;   // elements summed in float32 before they join a double; L1
constexpr double kCrowded = 16.0;  // sum of 2^t in a block from which its maximum is looked up
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInf = __builtin_inff();

// y of x = scale*y, and d y/d z up to the slope. -inf stays -inf, with derivative 0.
template <bool kSoftcap>
inline VFloat transformed(VFloat z, const Transform& transform) {
    if constexpr (!kSoftcap) return z;
    const VFloat y = vtanh(z * transform.logit_scale / transform.softcap);
    return z == -kInf ? splat(-kInf) : y;
}
template <bool kSoftcap>
inline VFloat derivative(VFloat y) {
    const VFloat held = y < -1.0f ? splat(-1.0f) : y;
    return kSoftcap ? 1.0f - held * held : splat(1.0f);
}

// Between logits and probabilities everything is in base 2, which saves the exp three operations:
// t = (y - origin)*scale, p = 2^t/sum. The origin is so near the maximum of y that 2^t stays in
// range; nothing needs the maximum itself.
struct RowStats {
    float origin;
    double sum;           // of 2^t
    double weighted_sum;  // of t*2^t

    double log_sum() const { return std::log(sum); }
    double entropy() const { return log_sum() - kLn2 * weighted_sum / sum; }
    void move_to(float new_origin, double scale) {
        const double shift = ((double)origin - new_origin) * scale, factor = std::exp2(shift);
        origin = new_origin;
        weighted_sum = factor > 0.0 ? factor * (weighted_sum + shift * sum) : 0.0;
        sum *= factor;
    }
};

// The scale of t, whose rounding shifts log-probs by less than the rounding of a log-prob.
inline float base2_scale(const Transform& transform) { return (float)(transform.scale / kLn2); }

template <typename T>
inline VFloat exp2_for(VFloat t) {
    return vexp2<sizeof(T) == 4>(t);
}

// t where it multiplies 2^t: held at the floor, so that the product is 0 at -inf.
inline VFloat factor_of(VFloat t) { return vmax(t, splat(kExp2Floor)); }

template <bool kSoftcap>
inline double log_prob(float z, const Transform& transform, float origin, double log_sum) {
    const float y = transformed<kSoftcap>(splat(z), transform)[0];
    return ((double)y - origin) * transform.scale - log_sum;
}

// Calls f with every vector of row[begin, end); the last one is filled up with -inf.
template <typename T, typename F>
inline void for_each_vector(const T* row, int64_t begin, int64_t end, F f) {
    for (; begin + kLanes <= end; begin += kLanes) f(load(row + begin));
    if (begin < end) f(load_partial(row + begin, end - begin));
}

template <bool kSoftcap, typename T>
RowStats row_stats(const T* row, int64_t vocab, const Transform& transform) {
    const float scale = base2_scale(transform);
    RowStats stats{-kInf, 0.0, 0.0};
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
        const auto block_max = [&] {
            VFloat z_max = splat(-kInf);
            for_each_vector(row, begin, end, [&](VFloat z) { z_max = vmax(z_max, z); });
            return reduce_max(transformed<kSoftcap>(z_max, transform));
        };
        if (stats.origin == -kInf) stats.origin = block_max();

        double sum, weighted_sum;
        const auto add_up = [&] {
            // A block of -inf alone has no origin yet; a NaN in it must still reach the sum.
            const float origin = stats.origin == -kInf ? 0.0f : stats.origin;
            VFloat sums = {}, weighted_sums = {};
            for_each_vector(row, begin, end, [&](VFloat z) {
                const VFloat t = (transformed<kSoftcap>(z, transform) - origin) * scale;
                const VFloat e = exp2_for<T>(t);
                sums += e;
                weighted_sums += factor_of(t) * e;
            });
            sum = reduce_add(sums);
            weighted_sum = reduce_add(weighted_sums);
        };
        add_up();
        if (sum > kCrowded) {  // some t may be above 0: entropy would lose digits, 2^t its range
            const float max = block_max();
            if (max > stats.origin) {
                stats.move_to(max, scale);
                add_up();
            }
        }
        stats.sum += sum;
        stats.weighted_sum += weighted_sum;
    }
    return stats;
}

// Writes vector_at(begin, count) over a row, past the cache if it is not there already.
template <typename T, typename F>
inline void fill_row(T* row, int64_t vocab, bool streamed, F vector_at) {
    constexpr uintptr_t kBytes = kStreamed<T> * sizeof(T);
    const uintptr_t offset = reinterpret_cast<uintptr_t>(row) % kBytes;
    int64_t begin = 0;
    if (streamed && offset % sizeof(T) == 0) {
        const int64_t misaligned = (int64_t)((kBytes - offset) % kBytes / sizeof(T));
        const int64_t head = misaligned < vocab ? misaligned : vocab;
        while (begin < head) {
            const int64_t count = head - begin < kLanes ? head - begin : kLanes;
            store_partial(row + begin, vector_at(begin, count), count);
            begin += count;
        }
        for (; begin + kStreamed<T> <= vocab; begin += kStreamed<T>) {
            stream(row + begin, [&](int64_t i) { return vector_at(begin + i, kLanes); });
        }
        stream_fence();
    }
    for (; begin + kLanes <= vocab; begin += kLanes) store(row + begin, vector_at(begin, kLanes));
    if (begin < vocab) store_partial(row + begin, vector_at(begin, vocab - begin), vocab - begin);
}

// Coefficients of a row: d loss / d logp and the weight of the entropy bonus.
struct RowCoefficients {
    double dlog_prob;
    double entropy_bonus;
    bool zero() const { return dlog_prob == 0.0 && entropy_bonus == 0.0; }
};

// d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + H)] * d x_j/d z_j
//           = 2^t_j*(a*t_j + b) * derivative_j, and the label's entry by itself: 1 - p_label
// is formed without cancellation.
template <bool kSoftcap, typename T>
void row_gradient(const T* row, T* grad, int64_t vocab, const Transform& transform, int64_t label,
                  float origin, double sum, double entropy, RowCoefficients coefficients) {
    const double log_sum = std::log(sum), bonus = coefficients.entropy_bonus;
    const float scale = base2_scale(transform);
    const float a = (float)(bonus * kLn2 / sum * transform.slope);
    const float b =
        (float)((bonus * (entropy - log_sum) - coefficients.dlog_prob) / sum * transform.slope);
    const auto gradient = [&](VFloat z) {
        const VFloat y = transformed<kSoftcap>(z, transform);
        const VFloat t = (y - origin) * scale;
        const VFloat dx = a == 0.0f ? exp2_for<T>(t) * b : exp2_for<T>(t) * (a * factor_of(t) + b);
        return dx * derivative<kSoftcap>(y);
    };

    T label_grad{};
    if (label >= 0 && label < vocab) {
        const float z = load_scalar(row + label);
        const VFloat y = transformed<kSoftcap>(splat(z), transform);
        const double log_p = log_prob<kSoftcap>(z, transform, origin, log_sum);
        const double dx = bonus * std::exp(log_p) * (log_p + entropy) -
                          coefficients.dlog_prob * std::expm1(log_p);
        const double dz = dx * transform.slope * derivative<kSoftcap>(y)[0];
        store_scalar(&label_grad, z == -kInf ? 0.0f : (float)dz);
    }

    fill_row(grad, vocab, (const void*)row != (const void*)grad, [&](int64_t begin, int64_t count) {
        return gradient(count == kLanes ? load(row + begin) : load_partial(row + begin, count));
    });
    if (label >= 0 && label < vocab) grad[label] = label_grad;
}

template <typename T>
struct Row {
    const T* logits;
    T* grad;

    Row(const LogitRows& rows, int64_t index) {
        const int64_t batch = index / rows.rows, row = index % rows.rows;
        logits =
            static_cast<const T*>(rows.logits) + batch * rows.batch_stride + row * rows.row_stride;
        grad = rows.grad == nullptr ? nullptr
                                    : static_cast<T*>(rows.grad) + batch * rows.grad_batch_stride +
                                          row * rows.grad_row_stride;
    }
    void zero_grad(int64_t vocab) const {
        if (grad == nullptr) return;
        const bool in_place = (const void*)logits == (const void*)grad;
        fill_row(grad, vocab, !in_place, [](int64_t, int64_t) { return VFloat{}; });
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
    double* stats_out = params.stats + 2 * index;
    if (params.undecided) params.undecided[index] = 0;
    if (!params.tokens.live[index]) {
        params.log_probs[index] = params.entropy[index] = stats_out[0] = 0.0;
        stats_out[1] = 1.0;
        return row.zero_grad(rows.vocab);
    }

    const RowStats stats = row_stats<kSoftcap>(row.logits, rows.vocab, rows.transform);
    const int64_t label = params.labels[index];
    double logp = NAN;
    if (label >= 0 && label < rows.vocab) {
        logp = log_prob<kSoftcap>(load_scalar(row.logits + label), rows.transform, stats.origin,
                                  stats.log_sum());
    }
    params.log_probs[index] = logp;
    params.entropy[index] = stats.entropy();
    stats_out[0] = stats.origin;
    stats_out[1] = stats.sum;

    if (row.grad == nullptr) return;
    const Demand wanted = demand(params, index, logp);
    if (wanted.undecided) {
        params.undecided[index] = 1;
    } else if (wanted.coefficients.zero()) {
        row.zero_grad(rows.vocab);
    } else {
        row_gradient<kSoftcap>(row.logits, row.grad, rows.vocab, rows.transform, label,
                               stats.origin, stats.sum, stats.entropy(), wanted.coefficients);
    }
}

template <typename T, bool kSoftcap>
void finish_row(const RowGradientParams& params, int64_t index) {
    if (params.only && !params.only[index]) return;
    const LogitRows& rows = params.rows;
    const Row<T> row(rows, index);
    const RowCoefficients coefficients{params.dlog_probs[index],
                                       params.dentropy ? -(double)params.dentropy[index] : 0.0};
    if (coefficients.zero()) return row.zero_grad(rows.vocab);
    row_gradient<kSoftcap>(row.logits, row.grad, rows.vocab, rows.transform, params.labels[index],
                           (float)params.stats[2 * index], params.stats[2 * index + 1],
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
void take_rows(const Params& params, cpu::RowQueue& queue, RowKernel kernel) {
    for (int64_t row; (row = queue.next.fetch_add(queue.grain)) < queue.count;) {
        const int64_t end = row + queue.grain < queue.count ? row + queue.grain : queue.count;
        for (; row < end; ++row) kernel(params, row);
    }
}

void row_pass(const RowPassParams& params, cpu::RowQueue& queue) {
    with_row_type(params.rows, [&]<typename T, bool kSoftcap>() {
        take_rows(params, queue, pass_row<T, kSoftcap>);
    });
}

void row_gradient(const RowGradientParams& params, cpu::RowQueue& queue) {
    with_row_type(params.rows, [&]<typename T, bool kSoftcap>() {
        take_rows(params, queue, finish_row<T, kSoftcap>);
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
