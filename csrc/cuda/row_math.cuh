// The mathematics of a row for threads, warps and blocks, on vectors.cuh and tokens.h. Everything
// is in base 2: t = (y - origin)*scale2 and p = 2^t/sum, with scale2 = scale/ln 2. Registers decide
// how many blocks fit; tests/repository/test_cuda_build.py has their limits.
#pragma once

#include "cuda/vectors.cuh"
#include "tokens.h"

namespace bapo::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRowsPerBlock = 8;       // where a warp takes a row
constexpr float kExp2Floor = -160.0f;  // t where it multiplies 2^t = 0
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInf = __builtin_inff();

struct Scales {
    float inner;   // y = tanh(inner*z) under softcap
    float scale2;  // t = (y - origin)*scale2
};
__host__ __device__ inline float scale2_of(const Transform& transform) {
    return (float)(transform.scale / kLn2);
}

// The scales of a row, which may have a temperature of its own.
__device__ inline Scales scales_at(const Transform& transform, Scales scales) {
    if (transform.temperatures != nullptr) scales.scale2 = scale2_of(transform);
    return scales;
}

// Within 1 ulp, by an odd polynomial below 1.3, else by 1 - 2q/(1 + q) with q = exp(-2|u|).
__device__ inline float tanh_approx(float u) {
    const float square = u * u;
    float tail = -1.54474019e-5f;
    tail = fmaf(tail, square, 1.66917860e-4f);
    tail = fmaf(tail, square, -8.66876682e-4f);
    tail = fmaf(tail, square, 3.02529195e-3f);
    tail = fmaf(tail, square, -8.50232877e-3f);
    tail = fmaf(tail, square, 2.17251200e-2f);
    tail = fmaf(tail, square, -5.39348312e-2f);
    tail = fmaf(tail, square, 1.33329496e-1f);
    tail = fmaf(tail, square, -3.33333194e-1f);
    const float near = fmaf(u, square * tail, u);
    const float q = exp2_approx(-2.88539008f * fminf(fabsf(u), 10.0f));
    const float far = copysignf(1.0f - __fdividef(2.0f * q, 1.0f + q), u);
    return fabsf(u) < 1.3f || u != u ? near : far;
}

// y of x = scale*y; -inf stays -inf.
template <bool kSoftcap>
__device__ inline float transformed(float z, Scales scales) {
    if constexpr (!kSoftcap) return z;
    return z == -kInf ? -kInf : tanh_approx(z * scales.inner);
}

// Sums of 2^t and t*2^t of the elements of one thread, with t relative to its own maximum. If t
// were one multiply-add, it would not be 0 for the largest element, whose exp would have an error.
template <typename T, bool kSoftcap>
struct Lane {
    uint32_t top = kLowest<T>;  // of the logits
    float origin = -kInf;
    float sum = 0.0f;
    float weighted = 0.0f;

    // Leaves out the label: an element of vector `at`, if there is such a vector.
    template <int k>
    __device__ void add(uint4 (&raw)[k], int at, int element, Scales scales) {
        if ((unsigned)at < (unsigned)k) {
#pragma unroll
            for (int i = 0; i < k; ++i) {
                if (i == at) raw[i] = without(raw[i], element, T{});
            }
        }
#pragma unroll
        for (int i = 0; i < k; ++i) top = larger(top, largest(raw[i], T{}), T{});
        const float new_origin = transformed<kSoftcap>(largest_of_word(top, T{}), scales);
        const float start = new_origin == -kInf ? 0.0f : new_origin;
        const float shift = (origin - start) * scales.scale2, factor = exp2_approx(shift);
        weighted = factor * fmaf(fmaxf(shift, kExp2Floor), sum, weighted);
        sum *= factor;
        origin = new_origin;
#pragma unroll
        for (int i = 0; i < k; ++i) {
            float z[kVec<T>];
            unpack(raw[i], z, T{});
#pragma unroll
            for (const float each : z) {
                const float t = (transformed<kSoftcap>(each, scales) - start) * scales.scale2;
                const float e = exp2_approx(t);
                sum += e;
                weighted = fmaf(e, fmaxf(t, kExp2Floor), weighted);
            }
        }
    }
};

// The same sums of the elements of many threads.
struct RowSums {
    float origin;
    double sum;
    double weighted;

    template <typename Lane>
    __device__ static RowSums of(const Lane& lane) {
        return {lane.origin, lane.sum, lane.weighted};
    }
    // The new origin must be at least as large.
    __device__ void move_to(float new_origin, float scale2) {
        const float start = new_origin == -kInf ? 0.0f : new_origin;
        const float shift = (origin - start) * scale2, factor = exp2_approx(shift);
        weighted = factor * (weighted + fmaxf(shift, kExp2Floor) * sum);
        sum *= factor;
        origin = new_origin;
    }
    __device__ void add(RowSums other, float scale2) {
        const float larger = fmaxf(origin, other.origin);
        move_to(larger, scale2);
        other.move_to(larger, scale2);
        sum += other.sum;
        weighted += other.weighted;
    }
    // Threads leave the label out: beside a likely one a float would lose the others, and so 1 - p.
    __device__ void add_label(float y, float scale2) {
        move_to(fmaxf(origin, y), scale2);
        const float t = (y - (origin == -kInf ? 0.0f : origin)) * scale2, e = exp2_approx(t);
        sum += e;
        weighted += e * fmaxf(t, kExp2Floor);
    }
};

// The largest value of all lanes, none of which is NaN, as integers of the same order.
__device__ inline float warp_max(float value) {
    const auto ordered = [](int bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
    const int most = __reduce_max_sync(kAllLanes, ordered((int)__float_as_uint(value)));
    return __uint_as_float((unsigned)ordered(most));
}

// Replaces each value by its sum over all lanes of the warp, always added in the same order.
template <typename... T>
__device__ inline void add_lanes(T&... values) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        ((values += __shfl_xor_sync(kAllLanes, values, step)), ...);
    }
}
__device__ inline RowSums warp_total(RowSums mine, float scale2) {
    mine.move_to(warp_max(mine.origin), scale2);
    add_lanes(mine.sum, mine.weighted);
    return mine;
}

// Sums of warps in shared memory: 20 bytes each, by accesses of 16 and 4 without bank conflicts.
template <int n>
struct PartialSums {
    double2 sums[n];  // and the weighted ones
    float origins[n];

    __device__ void store(int i, const RowSums& part) {
        sums[i] = {part.sum, part.weighted};
        origins[i] = part.origin;
    }
    __device__ RowSums load(int i) const {
        const double2 both = shared_load(&sums[i]);
        return {origins[i], both.x, both.y};
    }
};

// The total of the first partial sums, computed by one warp.
template <int n>
__device__ inline RowSums total_of(const PartialSums<n>& partials, int count, float scale2) {
    RowSums mine{-kInf, 0.0, 0.0};
    for (int i = threadIdx.x % kWarp; i < count; i += kWarp) mine.add(partials.load(i), scale2);
    return warp_total(mine, scale2);
}

// -1 if the label is outside the row.
__device__ inline int label_index(int64_t label, int vocab) {
    return label >= 0 && label < vocab ? (int)label : -1;
}

struct Label {
    int index;  // -1 outside the vocabulary, where the others are NaN
    float z;
    float y;
    double slope;  // d x/d z
};
template <bool kSoftcap>
__device__ inline Label label_of(int index, float z, const Transform& transform, Scales scales) {
    return {index, z, transformed<kSoftcap>(z, scales), label_slope(z, transform)};
}

// The decision on a row: what the second pass writes.
struct SecondPass {
    enum Action : int { kNothing, kZeros, kGradient };
    Action action;
    float origin;
    float a;  // d l/d z = 2^t*(a*t + b), times 1 - y^2 under softcap
    float b;
    float label_grad;

    __device__ static SecondPass without_gradient(Action action) {
        return {action, 0.0f, 0.0f, 0.0f, 0.0f};
    }
};

struct RowStatistics {
    float origin;
    double inverse_sum, log_sum, entropy;
    double log_prob;  // of the label
};

// d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + entropy)] * d x_j/d z_j
__device__ inline SecondPass gradient_pass(const RowStatistics& row, const Label& label,
                                           RowCoefficients coefficients, double slope) {
    if (coefficients.zero()) return SecondPass::without_gradient(SecondPass::kZeros);
    const double per_sum = slope * row.inverse_sum, bonus = coefficients.entropy_bonus;
    const double constant = bonus * (row.entropy - row.log_sum) - coefficients.dlog_prob;
    return {
        SecondPass::kGradient,
        row.origin,
        (float)(bonus * kLn2 * per_sum),
        (float)(constant * per_sum),
        (float)label_gradient(label.z, row.log_prob, row.entropy, label.slope, coefficients),
    };
}

__device__ inline double label_log_prob(const Label& label, float origin, double log_sum,
                                        const Transform& transform) {
    return ((double)label.y - origin) * transform.scale - log_sum;
}

// The statistics of a row whose first pass was another launch.
__device__ inline RowStatistics statistics_at(const RowGradientParams& params, int64_t index,
                                              const Label& label, const Transform& transform) {
    const auto origin = (float)params.stats[2 * index];
    const double sum = params.stats[2 * index + 1], log_sum = log(sum);
    return {origin, 1.0 / sum, log_sum, params.entropy[index],
            label_log_prob(label, origin, log_sum, transform)};
}
__device__ inline RowCoefficients coefficients_at(const RowGradientParams& params, int64_t index) {
    return {params.dlog_probs[index], params.dentropy ? -params.dentropy[index] : 0.0};
}

// The statistics of a row, from the sums without its label, by one warp; its `first` lane writes
// them.
__device__ inline RowStatistics row_statistics(const RowPassParams& params, int64_t index,
                                               RowSums total, const Label& label,
                                               const Transform& transform, Scales scales,
                                               bool first) {
    if (label.index >= 0) total.add_label(label.y, scales.scale2);
    const double log_sum = log(total.sum), inverse_sum = 1.0 / total.sum;
    const double entropy = log_sum - kLn2 * total.weighted * inverse_sum;
    const double log_prob = label_log_prob(label, total.origin, log_sum, transform);
    if (first) {
        params.log_probs[index] = log_prob;
        params.entropy[index] = entropy;
        params.stats[2 * index] = total.origin;
        params.stats[2 * index + 1] = total.sum;
    }
    return {total.origin, inverse_sum, log_sum, entropy, log_prob};
}

// The decision of one warp on a row; its `first` lane writes whether the row is undecided.
__device__ inline SecondPass decided_pass(const RowPassParams& params, int64_t index,
                                          const BoundsRange& range, const TokenFields& fields,
                                          const RowStatistics& row, const Label& label,
                                          const Transform& transform, bool first) {
    const Decision decision = decide(params, range, fields, row.log_prob);
    if (first) params.undecided[index] = decision.undecided;
    if (decision.undecided) return SecondPass::without_gradient(SecondPass::kNothing);
    return gradient_pass(row, label, decision.coefficients, transform.slope);
}

__device__ inline void finish_skipped(const RowPassParams& params, int64_t index) {
    params.log_probs[index] = params.entropy[index] = params.stats[2 * index] = 0.0;
    params.stats[2 * index + 1] = 1.0;
    if (params.undecided) params.undecided[index] = 0;
}

// Of a sample: where 2^t is below the threshold, `part` takes its place, and a shift is added.
struct SmallIds {
    float threshold, part, shift;

    __device__ static SmallIds of(const Drawn& drawn, float a) {
        return {(float)drawn.threshold, (float)drawn.part, a * (float)drawn.shift};
    }
};

template <bool kSoftcap, bool kBonus, bool kSampled = false>
__device__ inline float gradient_of(float z, const SecondPass& pass, Scales scales,
                                    const SmallIds& small = {}) {
    const float y = transformed<kSoftcap>(z, scales);
    const float t = (y - pass.origin) * scales.scale2;
    float e = exp2_approx(t);
    const bool is_small = kSampled && e < small.threshold;
    if (is_small) e = small.part;
    float dz = e * (kBonus ? fmaf(pass.a, fmaxf(t, kExp2Floor), pass.b) : pass.b);
    if (is_small) dz += small.shift;
    if constexpr (kSoftcap) {
        const float held = fmaxf(y, -1.0f);
        dz *= fmaf(-held, held, 1.0f);
    }
    return dz;
}

// A row of logits and its gradient, which is written in aligned vectors: after `head` elements and
// before the tail, both shorter than a vector.
template <typename T, bool kAligned>
struct Row {
    const T* logits;
    T* grad;
    int vocab;
    uint32_t shift;  // bytes from a multiple of 16 to the first logit
    int head;
    int vectors;

    __device__ Row(const LogitRows& rows, int64_t index)
        : logits(rows.logits_at<T>(index)),
          grad(rows.grad == nullptr ? nullptr : rows.grad_at<T>(index)),
          vocab((int)rows.vocab) {
        const auto past = [](const void* p) { return (uint32_t)(uintptr_t)p % 16; };
        shift = kAligned ? 0 : past(logits);
        head = kAligned ? 0 : min(vocab, (int)((16 - past(grad)) % 16 / sizeof(T)));
        vectors = (vocab - head) / kVec<T>;
    }
    __device__ int tail() const { return vocab - head - vectors * kVec<T>; }
    __device__ T* vector(int index) const { return grad + head + index * kVec<T>; }
    // The index of the vector with this element, or -1 in the head.
    __device__ int vector_of(int element) const {
        return element < head ? -1 : (element - head) / kVec<T>;
    }
    // Unconverted, since a conversion would wait for the load.
    __device__ T stored_label(int label) const { return label >= 0 ? logits[label] : T{}; }
};

template <typename T>
__device__ inline float label_logit(int label, T stored) {
    return label >= 0 ? to_float(stored) : NAN;
}

}  // namespace bapo::cuda
