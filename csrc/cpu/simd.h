// A vector of floats in the width of the instruction set this file is compiled for, on the vector
// extensions of GCC and Clang. Everything has internal linkage: the including file is compiled once
// per instruction set, and the linker must not replace one copy of a function by another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// GCC 12 warns of the undefined operand inside unmasked AVX-512 intrinsics; masks of ones are free.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VFloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t VInt __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VUint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VHalf __attribute__((vector_size(kLanes * 2)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline VFloat splat(float x) { return x - VFloat{}; }

// The larger, and the smaller, of two; where either is NaN it is a.
inline VFloat vmax(VFloat a, VFloat b) {
#if defined(__AVX512F__)
    return (VFloat)_mm512_maskz_max_ps(0xffff, (__m512)b, (__m512)a);
#elif defined(__AVX2__)
    return (VFloat)_mm256_max_ps((__m256)b, (__m256)a);
#else
    return b > a ? b : a;
#endif
}

inline VFloat vmin(VFloat a, VFloat b) {
#if defined(__AVX512F__)
    return (VFloat)_mm512_maskz_min_ps(0xffff, (__m512)b, (__m512)a);
#elif defined(__AVX2__)
    return (VFloat)_mm256_min_ps((__m256)b, (__m256)a);
#else
    return b < a ? b : a;
#endif
}

// Whether a lane is not 0, of lanes that are 0 or -1.
inline bool any(VInt v) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)v) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)v) != 0;
#else
    int32_t lanes = 0;
    for (int i = 0; i < kLanes; ++i) lanes |= v[i];
    return lanes != 0;
#endif
}

inline float reduce_max(VFloat v) {
    float result = v[0];
    for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
    return result;
}

inline double reduce_add(VFloat v) {
    double result = 0.0;
    for (int i = 0; i < kLanes; ++i) result += v[i];
    return result;
}

// A sum with the rounding errors of its additions (Knuth's TwoSum).
struct CompensatedSum {
    VFloat sum = {}, lost = {};

    void add(VFloat x) {
        const VFloat s = sum + x, kept = s - sum;
        lost += (sum - (s - kept)) + (x - kept);
        sum = s;
    }
    double total() const { return reduce_add(sum) + reduce_add(lost); }
};

// ---- 16-bit floats -------------------------------------------------------------------------

inline VFloat widen(VHalf h, BFloat16) {
#if defined(__AVX512F__)
    return (VFloat)((VUint)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);
#elif defined(__AVX2__)
    return (VFloat)((VUint)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#elif defined(__aarch64__)
    return (VFloat)vshll_n_u16((uint16x4_t)h, 16);
#else
    return (VFloat)(__builtin_convertvector(h, VUint) << 16);
#endif
}

inline VHalf narrow(VFloat x, BFloat16) {
#if defined(__AVX512BF16__)
    return (VHalf)_mm512_cvtneps_pbh((__m512)x);
#endif
    const VUint u = (VUint)x;
    // A NaN becomes the one of all ones, because rounding could carry it to infinity or zero.
    const VUint rounded = ((u + 0x7fff + ((u >> 16) & 1)) | (VUint)(x != x)) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i words = (__m256i)rounded;
    return (VHalf)_mm_packus_epi32(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1));
#endif
    return __builtin_convertvector(rounded, VHalf);
}

#if defined(__AVX512F__)
inline VFloat widen(VHalf h, Float16) { return (VFloat)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
inline VHalf narrow(VFloat x, Float16) {
    return (VHalf)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__AVX2__)
inline VFloat widen(VHalf h, Float16) { return (VFloat)_mm256_cvtph_ps((__m128i)h); }
inline VHalf narrow(VFloat x, Float16) {
    return (VHalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
inline VFloat widen(VHalf h, Float16) { return (VFloat)vcvt_f32_f16((float16x4_t)h); }
inline VHalf narrow(VFloat x, Float16) { return (VHalf)vcvt_f16_f32((float32x4_t)x); }
#else
inline VFloat widen(VHalf h, Float16) {
    const VUint u = __builtin_convertvector(h, VUint);
    const VUint magnitude = u & 0x7fff;
    VFloat x = (VFloat)((magnitude << 13) + 0x38000000);
    x = magnitude < 0x0400 ? __builtin_convertvector(magnitude, VFloat) * 0x1p-24f : x;
    x = magnitude >= 0x7c00 ? (VFloat)((magnitude << 13) | 0x7f800000) : x;
    return (VFloat)((VUint)x | ((u & 0x8000) << 16));
}
inline VHalf narrow(VFloat x, Float16) {
    const VUint u = (VUint)x, magnitude = u & 0x7fffffff;
    // Adding 0.5 aligns a float's last bit with that of a subnormal half.
    const VUint subnormal = (VUint)((VFloat)magnitude + 0.5f) - 0x3f000000;
    const VUint normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    VUint h = magnitude < 0x38800000 ? subnormal : normal;
    h = magnitude >= 0x477ff000 ? VUint{} + 0x7c00 : h;
    h = magnitude > 0x7f800000 ? VUint{} + 0x7e00 : h;
    return __builtin_convertvector(h | ((u >> 16) & 0x8000), VHalf);
}
#endif

// ---- memory --------------------------------------------------------------------------------

inline VFloat load(const float* p) {
    VFloat v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, VFloat v) { std::memcpy(p, &v, sizeof v); }

template <typename T>
inline VFloat load(const T* p) {
    VHalf h;
    std::memcpy(&h, p, sizeof h);
    return widen(h, T{});
}
template <typename T>
inline void store(T* p, VFloat v) {
    const VHalf h = narrow(v, T{});
    std::memcpy(p, &h, sizeof h);
}

// Elements of one store past the cache, which saves reading the line first. p is aligned to it.
template <typename T>
constexpr int kStreamed = kLanes * 4 / sizeof(T);

template <typename F>
inline void stream(float* p, F vector_at) {
    const VFloat v = vector_at(0);
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}
template <typename T, typename F>
inline void stream(T* p, F vector_at) {  // The halves are joined in registers, not in memory.
    const VHalf low = narrow(vector_at(0), T{}), high = narrow(vector_at(kLanes), T{});
#if defined(__AVX512F__)
    __m512i line = _mm512_maskz_inserti64x4(0xff, __m512i{}, (__m256i)low, 0);
    line = _mm512_maskz_inserti64x4(0xff, line, (__m256i)high, 1);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line);
#elif defined(__AVX2__)
    const __m256i line = _mm256_set_m128i((__m128i)high, (__m128i)low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), line);
#else
    std::memcpy(p, &low, sizeof low);
    std::memcpy(p + kLanes, &high, sizeof high);
#endif
}

// The processor itself fetches less far ahead, and not beyond a page. Measured on x86 alone.
template <typename T>
inline void prefetch([[maybe_unused]] const T* p) {
#if defined(__AVX2__)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + 8192, 0, 2);
#endif
}

// Orders streamed stores before the ordinary ones that follow.
inline void stream_fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// The first count < kLanes elements; the other lanes are -inf, whose probability is 0.
template <typename T>
inline VFloat load_partial(const T* p, int64_t count) {
    T buffer[kLanes] = {};
    std::memcpy(buffer, p, count * sizeof(T));
    VFloat v = load(buffer);
    for (int64_t i = count; i < kLanes; ++i) v[i] = -__builtin_inff();
    return v;
}
template <typename T>
inline void store_partial(T* p, VFloat v, int64_t count) {
    T buffer[kLanes];
    store(buffer, v);
    std::memcpy(p, buffer, count * sizeof(T));
}

template <typename T>
inline float load_scalar(const T* p) {
    return load_partial(p, 1)[0];
}
template <typename T>
inline void store_scalar(T* p, float x) {
    store_partial(p, splat(x), 1);
}

// ---- functions -----------------------------------------------------------------------------

// 2^x within 1 ulp, or 2 for results that become 16-bit floats: x = n + r, |r| <= 1/2. At and below
// the floor it is 0, from 2^127 on something at least as large. NaN stays NaN.
#if defined(__AVX512F__)
constexpr float kExp2Floor = -151.0f;
#else
constexpr float kExp2Floor = -127.0f;
#endif

template <bool kPrecise = true>
inline VFloat vexp2(VFloat x) {
#if defined(__AVX512F__)
    const VFloat r = (VFloat)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 0);  // 0 where x is infinite
    const VFloat n = x - r;
#else
    constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer in the low bits
    x = vmin(vmax(x, splat(kExp2Floor)), splat(127.0f));
    const VFloat shifted = x + kRound;
    const VFloat r = x - (shifted - kRound);
#endif
    VFloat e;
    if constexpr (kPrecise) {
        e = r * 1.53532586e-4f + 1.33990042e-3f;
        e = e * r + 9.61843878e-3f;
        e = e * r + 5.55033199e-2f;
        e = e * r + 2.40226477e-1f;
        e = e * r + 6.93147182e-1f;
    } else {
        e = r * 1.32645911e-3f + 9.67161916e-3f;
        e = e * r + 5.55073507e-2f;
        e = e * r + 2.40222409e-1f;
        e = e * r + 6.93147004e-1f;
    }
    e = e * r + 1.0f;
#if defined(__AVX512F__)
    return (VFloat)_mm512_maskz_scalef_ps(0xffff, (__m512)e, (__m512)n);
#else
    return e * (VFloat)(((VUint)shifted << 23) + 0x3f800000);  // 2^n, and 0 at the floor
#endif
}

// tanh(x) within 1 ulp: odd polynomial below 1.3, else 1 - 2q/(1 + q) with q = exp(-2|x|).
inline VFloat vtanh(VFloat x) {
    constexpr float kTail[] = {1.66917860e-4f, -8.66876682e-4f, 3.02529195e-3f, -8.50232877e-3f,
                               2.17251200e-2f, -5.39348312e-2f, 1.33329496e-1f, -3.33333194e-1f};
    const VFloat z = x * x;
    VFloat tail = splat(-1.54474019e-5f);
    for (const float c : kTail) tail = tail * z + c;
    const VFloat small = x + x * (z * tail);

    const VFloat magnitude = (VFloat)((VUint)x & 0x7fffffff);
    const VFloat held = vmin(magnitude, splat(10.0f));
    const VFloat q = vexp2<>(-2.88539008f * held);
    const VFloat large = (VFloat)((VUint)(1.0f - 2.0f * q / (1.0f + q)) | ((VUint)x & 0x80000000));
    return magnitude < 1.3f ? small : large;
}

}  // namespace
