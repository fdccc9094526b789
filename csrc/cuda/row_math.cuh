// The mathematics of a row for threads, warps and blocks. Everything is in base 2:
// t = (y - origin)*scale2 and p = 2^t/sum, with scale2 = scale/ln 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx.cuh"
#include "tokens.h"

namespace bapo::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kExp2Floor = -160.0f;  // t where it multiplies 2^t = 0
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInf = __builtin_inff();

// Elements in 16 bytes.
template <typename T>
constexpr int kVec = 16 / sizeof(T);

struct Scales {
    float inner;   // y = tanh(inner*z) under softcap
    float scale2;  // t = (y - origin)*scale2
};

template <typename T>
__device__ inline float to_float(T value) {
    return static_cast<float>(value);
}
template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float(float value) {
    return value;
}
template <>
__device__ inline __nv_bfloat16 from_float(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float(float value) {
    return __float2half_rn(value);
}

__device__ inline void unpack(uint4 raw, float (&z)[4], float) {
    z[0] = __uint_as_float(raw.x), z[1] = __uint_as_float(raw.y);
    z[2] = __uint_as_float(raw.z), z[3] = __uint_as_float(raw.w);
}
__device__ inline void unpack(uint4 raw, float (&z)[8], __nv_bfloat16) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        z[2 * i] = __uint_as_float(words[i] << 16);
        z[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ inline void unpack(uint4 raw, float (&z)[8], __half) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2_raw half{(uint16_t)words[i], (uint16_t)(words[i] >> 16)};
        const float2 pair = __half22float2(half);
        z[2 * i] = pair.x, z[2 * i + 1] = pair.y;
    }
}

__device__ inline uint32_t pack_pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint32_t pack_pair(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint4 pack(const float (&z)[4], float) {
    return {__float_as_uint(z[0]), __float_as_uint(z[1]), __float_as_uint(z[2]),
            __float_as_uint(z[3])};
}
template <typename T>
__device__ inline uint4 pack(const float (&z)[8], T type) {
    return {pack_pair(z[0], z[1], type), pack_pair(z[2], z[3], type), pack_pair(z[4], z[5], type),
            pack_pair(z[6], z[7], type)};
}

// Gradients are not read again soon, and should not evict rows from L2.
__device__ inline void store_streaming(void* to, uint4 value) {
    __stcs(static_cast<uint4*>(to), value);
}

// Within 1 ulp: odd polynomial below 1.3, else 1 - 2q/(1 + q) with q = exp(-2|u|).
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

// Sums of 2^t and t*2^t of the elements of one thread, with t relative to its own maximum.
struct Lane {
    float top = -kInf;
    float sum = 0.0f;
    float weighted = 0.0f;

    template <int n>
    __device__ void add(const float (&y)[n], float scale2) {
        float new_top = top;
#pragma unroll
        for (int i = 0; i < n; ++i) new_top = fmaxf(new_top, y[i]);
        const float start = new_top == -kInf ? 0.0f : new_top;
        const float shift = (top - start) * scale2, factor = exp2_approx(shift);
        weighted = factor * fmaf(fmaxf(shift, kExp2Floor), sum, weighted);
        sum *= factor;
        top = new_top;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float t = (y[i] - start) * scale2, e = exp2_approx(t);
            sum += e;
            weighted = fmaf(e, fmaxf(t, kExp2Floor), weighted);
        }
    }
};

// The same sums of the elements of many threads.
struct RowSums {
    float origin;
    double sum;
    double weighted;

    __device__ static RowSums of(const Lane& lane) { return {lane.top, lane.sum, lane.weighted}; }
    // Relative to another origin, at least as large.
    __device__ void move_to(float new_origin, float scale2) {
        const float start = new_origin == -kInf ? 0.0f : new_origin;
        const float shift = (origin - start) * scale2, factor = exp2_approx(shift);
        weighted = factor * (weighted + fmaxf(shift, kExp2Floor) * sum);
        sum *= factor;
        origin = new_origin;
    }
    __device__ void add(const RowSums& other) {
        sum += other.sum;
        weighted += other.weighted;
    }
};

// The sums of all lanes, in every lane, always added in the same order.
__device__ inline RowSums warp_total(RowSums mine, float scale2) {
    float origin = mine.origin;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        origin = fmaxf(origin, __shfl_xor_sync(kAllLanes, origin, step));
    }
    mine.move_to(origin, scale2);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        mine.sum += __shfl_xor_sync(kAllLanes, mine.sum, step);
        mine.weighted += __shfl_xor_sync(kAllLanes, mine.weighted, step);
    }
    return mine;
}

// The total of count partial sums in shared memory, computed by one warp.
__device__ inline RowSums total_of(const RowSums* partials, int count, float scale2) {
    const int lane = threadIdx.x % kWarp;
    RowSums mine{-kInf, 0.0, 0.0};
    for (int i = lane; i < count; i += kWarp) {
        mine.origin = fmaxf(mine.origin, shared_load(&partials[i].origin));
    }
    for (int i = lane; i < count; i += kWarp) {
        RowSums part = shared_load(&partials[i]);
        part.move_to(mine.origin, scale2);
        mine.add(part);
    }
    return warp_total(mine, scale2);
}

// What the second pass over a row whose statistics are known writes.
struct SecondPass {
    enum Action : int { kNothing, kZeros, kGradient };
    Action action;
    float origin;
    float a;  // d l/d z = 2^t*(a*t + b), times 1 - y^2 under softcap
    float b;
    float label_grad;
};

// d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + entropy)] * d x_j/d z_j
__device__ inline SecondPass gradient_pass(float origin, double sum, double entropy, float z_label,
                                           double log_prob, const Transform& transform,
                                           RowCoefficients coefficients) {
    if (coefficients.zero()) return {SecondPass::kZeros, 0.0f, 0.0f, 0.0f, 0.0f};
    const double per_sum = transform.slope / sum, bonus = coefficients.entropy_bonus;
    return {
        SecondPass::kGradient,
        origin,
        (float)(bonus * kLn2 * per_sum),
        (float)((bonus * (entropy - log(sum)) - coefficients.dlog_prob) * per_sum),
        (float)label_gradient(z_label, log_prob, entropy, transform, coefficients),
    };
}

// The log-prob of a label; its logit is NaN where the label is outside the vocabulary.
template <bool kSoftcap>
__device__ inline double label_log_prob(float z, float origin, double log_sum,
                                        const Transform& transform, Scales scales) {
    const float y = transformed<kSoftcap>(z, scales);
    return ((double)y - origin) * transform.scale - log_sum;
}

// Statistics of a row and what its second pass writes, computed by one warp; the lane with `first`
// writes the outputs of the token.
template <bool kSoftcap>
__device__ inline SecondPass finish_statistics(const RowPassParams& params, int64_t index,
                                               const RowSums& total, float z_label, Scales scales,
                                               bool first) {
    const Transform& transform = params.rows.transform;
    const double log_sum = log(total.sum);
    const double entropy = log_sum - kLn2 * total.weighted / total.sum;
    const double log_prob =
        label_log_prob<kSoftcap>(z_label, total.origin, log_sum, transform, scales);
    if (first) {
        params.log_probs[index] = log_prob;
        params.entropy[index] = entropy;
        params.stats[2 * index] = total.origin;
        params.stats[2 * index + 1] = total.sum;
    }
    if (params.rows.grad == nullptr) return {SecondPass::kNothing, 0.0f, 0.0f, 0.0f, 0.0f};
    const Decision decision = decide(params, index, log_prob);
    if (first) params.undecided[index] = decision.undecided;
    if (decision.undecided) return {SecondPass::kNothing, 0.0f, 0.0f, 0.0f, 0.0f};
    return gradient_pass(total.origin, total.sum, entropy, z_label, log_prob, transform,
                         decision.coefficients);
}

// The outputs of a skipped row.
__device__ inline void finish_skipped(const RowPassParams& params, int64_t index) {
    params.log_probs[index] = params.entropy[index] = params.stats[2 * index] = 0.0;
    params.stats[2 * index + 1] = 1.0;
    if (params.undecided) params.undecided[index] = 0;
}

template <bool kSoftcap, bool kBonus>
__device__ inline float gradient_of(float z, const SecondPass& pass, Scales scales) {
    const float y = transformed<kSoftcap>(z, scales);
    const float t = (y - pass.origin) * scales.scale2, e = exp2_approx(t);
    float dz = e * (kBonus ? fmaf(pass.a, fmaxf(t, kExp2Floor), pass.b) : pass.b);
    if constexpr (kSoftcap) {
        const float held = fmaxf(y, -1.0f);
        dz *= fmaf(-held, held, 1.0f);
    }
    return dz;
}

// A row of logits and its gradient.
template <typename T>
struct Row {
    const T* logits;
    T* grad;

    __device__ Row(const LogitRows& rows, int64_t index) {
        const int64_t batch = index / rows.rows, row = index % rows.rows;
        logits =
            static_cast<const T*>(rows.logits) + batch * rows.batch_stride + row * rows.row_stride;
        grad = rows.grad == nullptr ? nullptr
                                    : static_cast<T*>(rows.grad) + batch * rows.grad_batch_stride +
                                          row * rows.grad_row_stride;
    }
    __device__ float label_logit(int64_t label, int64_t vocab) const {
        return label >= 0 && label < vocab ? to_float(logits[label]) : NAN;
    }
};

}  // namespace bapo::cuda
