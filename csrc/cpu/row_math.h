// The two passes over a row: the first reads its statistics from memory; the second writes its
// gradient and finds the row, or its exp, in the cache. On simd.h and tokens.h, no launch. Internal
// linkage, as in simd.h. The order of the sums is that of the tests' error budget.
#pragma once

#include <cmath>
#include <cstdlib>

#include "params.h"
#include "simd.h"
#include "tokens.h"

namespace {

using namespace bapo;

constexpr int64_t kBlock = 4096;         // elements that are read again if crowded; they fit in L1
constexpr int64_t kGroup = 16 * kLanes;  // elements summed in float32, where large terms hide small
constexpr double kCrowded = 16.0;        // sum of 2^t above which the maximum of a block is needed
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInf = __builtin_inff();

// y of x = scale*y, and d y/d z up to the slope. -inf stays -inf, with derivative 0.
template <bool kSoftcap>
inline VFloat transformed(VFloat z, const Transform& transform) {
    if constexpr (!kSoftcap) return z;
    const VFloat y = vtanh(z * (float)transform.logit_scale / (float)transform.softcap);
    return z == -kInf ? splat(-kInf) : y;
}
template <bool kSoftcap>
inline VFloat derivative(VFloat y) {
    const VFloat held = y < -1.0f ? splat(-1.0f) : y;
    return kSoftcap ? 1.0f - held * held : splat(1.0f);
}

// Everything is in base 2, which makes the exp three operations shorter: t = (y - origin)*scale and
// p = 2^t/sum. The origin need not be the maximum of y, only near enough to keep 2^t in range.
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

// The scale of t. Its rounding shifts a log-prob by less than the rounding of that log-prob does.
inline float base2_scale(const Transform& transform) { return (float)(transform.scale / kLn2); }

template <typename T>
inline VFloat exp2_for(VFloat t) {
    return vexp2<sizeof(T) == 4>(t);
}

// t as a factor of 2^t: not below the floor, so that the product is 0 at -inf.
inline VFloat factor_of(VFloat t) { return vmax(t, splat(kExp2Floor)); }

template <bool kSoftcap>
inline double log_prob(float z, const Transform& transform, float origin, double log_sum) {
    const float y = transformed<kSoftcap>(splat(z), transform)[0];
    return ((double)y - origin) * transform.scale - log_sum;
}

// Memory that a thread keeps.
struct Buffer {
    float* data = nullptr;
    int64_t capacity = 0;

    // At least so many; null if there is no memory.
    float* of(int64_t count) {
        if (count > capacity) {
            std::free(data);
            data = static_cast<float*>(std::aligned_alloc(64, 64 * (count / 16 + 1)));
            capacity = data ? count : 0;
        }
        return data;
    }
    ~Buffer() { std::free(data); }
};

// The exp of a row, kept by the first pass for the second: with 16-bit logits both fit into the
// cache, and computing the exp again would limit the speed.
struct KeptExp {
    Buffer e;        // 2^t of every element, with t relative to the origin of its block
    Buffer origins;  // one per block

    bool reserve(int64_t vocab) { return e.of(vocab + kLanes) && origins.of(vocab / kBlock + 1); }
};
thread_local KeptExp kept_exp;

// Calls f(vector, index) for every vector of row[begin, end); the last one is padded with -inf.
template <typename T, typename F>
inline void for_each_vector(const T* row, int64_t begin, int64_t end, F f) {
    for (; begin + kLanes <= end; begin += kLanes) f(load(row + begin), begin);
    if (begin < end) f(load_partial(row + begin, end - begin), begin);
}

template <bool kSoftcap, bool kKeep, typename T>
RowStats row_stats(const T* row, int64_t vocab, const Transform& transform) {
    const float scale = base2_scale(transform);
    float* const kept = kept_exp.e.data;
    RowStats stats{-kInf, 0.0, 0.0};
    double crowded = kCrowded;
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
        const auto block_max = [&] {
            VFloat z_max = splat(-kInf);
            for_each_vector(row, begin, end, [&](VFloat z, int64_t) { z_max = vmax(z_max, z); });
            return reduce_max(transformed<kSoftcap>(z_max, transform));
        };
        if (stats.origin == -kInf) stats.origin = block_max();

        double sum, weighted_sum;
        const auto add_up = [&] {
            // A block without a finite element has no origin yet; a NaN in it must reach the sum.
            const float origin = stats.origin == -kInf ? 0.0f : stats.origin;
            CompensatedSum sums;
            VFloat group_sums, weighted_sums = {};
            const auto add = [&](VFloat z, int64_t i) {
                const VFloat t = (transformed<kSoftcap>(z, transform) - origin) * scale;
                const VFloat e = exp2_for<T>(t);
                if constexpr (kKeep) store(kept + i, e);
                group_sums += e;
                weighted_sums += factor_of(t) * e;
            };
            int64_t at = begin;
            for (; at + kGroup <= end; at += kGroup) {
                group_sums = VFloat{};
                for (int64_t i = at; i < at + kGroup; i += kLanes) {
                    prefetch(row + i);
                    add(load(row + i), i);
                }
                sums.add(group_sums);
            }
            group_sums = VFloat{};
            for_each_vector(row, at, end, add);
            sums.add(group_sums);
            sum = sums.total();
            weighted_sum = reduce_add(weighted_sums);
        };
        add_up();
        // Crowded or infinite (then NaN): the entropy would lose digits, or 2^t leave its range.
        if (!(sum <= crowded)) {
            const float max = block_max();
            if (max > stats.origin) {
                stats.move_to(max, scale);
                add_up();
                crowded = kCrowded;
            } else {  // A flat block. Beside its sum, a term of twice that loses no digits.
                crowded = 2.0 * sum;
            }
        }
        if constexpr (kKeep) kept_exp.origins.data[begin / kBlock] = stats.origin;
        stats.sum += sum;
        stats.weighted_sum += weighted_sum;
    }
    // Corrects the rounding of the scale to first order.
    stats.sum += (transform.scale / scale - kLn2) * stats.weighted_sum;
    return stats;
}

// Writes vector_at(begin, count) over a row; past the cache if the row is not in it.
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

// d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + entropy)] * d x_j/d z_j
//           = 2^t_j*(a*t_j + b) * derivative_j; the label's entry is computed separately.
// Below the threshold of a sample, part*(a*t_j + b) + a*shift takes the place of the first factor.
template <bool kSoftcap, bool kKept, typename T, bool kSampled = false>
void row_gradient(const T* row, T* grad, int64_t vocab, const Transform& transform, int64_t label,
                  float origin, double sum, double entropy, RowCoefficients coefficients,
                  const Drawn& drawn) {
    const double log_sum = std::log(sum), bonus = coefficients.entropy_bonus;
    const float scale = base2_scale(transform);
    const float a = (float)(bonus * kLn2 / sum * transform.slope);
    const float b =
        (float)((bonus * (entropy - log_sum) - coefficients.dlog_prob) / sum * transform.slope);
    const auto gradient = [&](VFloat z) {
        const VFloat y = transformed<kSoftcap>(z, transform);
        const VFloat t = (y - origin) * scale;
        VFloat e = exp2_for<T>(t), shift = {};
        if constexpr (kSampled) {
            const VInt is_small = e < (float)drawn.threshold;
            e = is_small ? splat((float)drawn.part) : e;
            shift = is_small ? splat(a * (float)drawn.shift) : shift;
        }
        const VFloat dx = a == 0.0f ? e * b : e * (a * factor_of(t) + b) + shift;
        return dx * derivative<kSoftcap>(y);
    };

    T label_grad{};
    if (label >= 0 && label < vocab) {
        const float z = load_scalar(row + label);
        const double log_p = log_prob<kSoftcap>(z, transform, origin, log_sum);
        const double dz =
            label_gradient(z, log_p, entropy, label_slope(z, transform), coefficients);
        store_scalar(&label_grad, (float)dz);
    }

    const bool streamed = (const void*)row != (const void*)grad;
    if constexpr (kKept) {
        for (int64_t begin = 0; begin < vocab; begin += kBlock) {
            const float* const e = kept_exp.e.data + begin;
            const float block_origin = kept_exp.origins.data[begin / kBlock];
            const double shift = ((double)block_origin - origin) * scale;
            const float factor = (float)(b * std::exp2(shift));
            fill_row(grad + begin, begin + kBlock < vocab ? kBlock : vocab - begin, streamed,
                     [&](int64_t i, int64_t) { return load(e + i) * factor; });
        }
    } else {
        fill_row(grad, vocab, streamed, [&](int64_t begin, int64_t count) {
            prefetch(row + begin);
            return gradient(count == kLanes ? load(row + begin) : load_partial(row + begin, count));
        });
    }
    if (label >= 0 && label < vocab) grad[label] = label_grad;
}

}  // namespace
