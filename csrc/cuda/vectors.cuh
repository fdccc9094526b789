// 16-byte vectors of logits in the three dtypes, aligned or not; on ptx.cuh alone. An access beyond
// a row would meet what others write.
#pragma once

#include "cuda/ptx.cuh"

namespace bapo::cuda {

// Elements in 16 bytes.
template <typename T>
constexpr int kVec = 16 / sizeof(T);

template <typename T>
__device__ inline float to_float(T value) {
    return static_cast<float>(value);
}
template <typename T>
__device__ inline T from_float(float value) {  // to nearest even
    return static_cast<T>(value);
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
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
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

// A word of -inf: one float or a pair of 16-bit values.
template <typename T>
constexpr uint32_t kLowest = 0xff800000;
template <>
constexpr uint32_t kLowest<__nv_bfloat16> = 0xff80ff80;
template <>
constexpr uint32_t kLowest<__half> = 0xfc00fc00;

// The larger elements of two words, of pairs in ptx.cuh. NaN loses against a number; the sums do
// not forget it.
__device__ inline uint32_t larger(uint32_t a, uint32_t b, float) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
template <typename T>
__device__ inline uint32_t largest(uint4 raw, T type) {
    return larger(larger(raw.x, raw.y, type), larger(raw.z, raw.w, type), type);
}
template <typename T>
__device__ inline float largest_of_word(uint32_t word, T type) {
    float z[kVec<T>];
    unpack({word, word, word, word}, z, type);
    return fmaxf(z[0], z[1]);
}

// A vector with -inf from its element `count` on.
template <typename T>
__device__ inline uint4 cut(uint4 raw, int count, T) {
    constexpr int kPerWord = 4 / sizeof(T);
    uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int here = count - i * kPerWord;
        if (here <= 0) words[i] = kLowest<T>;
        if (kPerWord == 2 && here == 1) {
            words[i] = (words[i] & 0xffffu) | (kLowest<T> & 0xffff0000u);
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// A vector with -inf in one place.
template <typename T>
__device__ inline uint4 without(uint4 raw, int element, T) {
    constexpr int kPerWord = 4 / sizeof(T);
    const uint32_t half = element % kPerWord == 0 ? 0xffffu : 0xffff0000u;
    const uint32_t there = kPerWord == 1 ? 0xffffffffu : half;
    const auto replaced = [&](uint32_t word, int index) {
        const uint32_t mask = element / kPerWord == index ? there : 0;
        return (word & ~mask) | (kLowest<T> & mask);
    };
    return {replaced(raw.x, 0), replaced(raw.y, 1), replaced(raw.z, 2), replaced(raw.w, 3)};
}

// The 16 bytes that start `shift` bytes after the start of two neighbouring vectors.
template <typename T>
__device__ inline uint4 shifted(uint4 low, uint4 high, uint32_t shift, T) {
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    if constexpr (sizeof(T) == 2) {
        const uint32_t bits = shift % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bits);
    }
    return {words[0], words[1], words[2], words[3]};
}

// The 16 bytes from this element on, which need not be aligned.
template <typename T, bool kAligned>
__device__ inline uint4 load_vector(const T* from) {
    if (kAligned) return *reinterpret_cast<const uint4*>(from);
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* const vectors = reinterpret_cast<const uint4*>(address / 16 * 16);
    const auto shift = (uint32_t)(address % 16);
    return shift == 0 ? vectors[0] : shifted(vectors[0], vectors[1], shift, T{});
}
// Elements [first, first + n) of a row of this size, and a value for those beyond its end. Reads no
// vector that is partly outside of the row, where others may be writing.
template <typename T, bool kAligned>
__device__ inline uint4 load_elements(const T* row, int first, int size, float beyond) {
    const int margin = kAligned ? 0 : kVec<T>;
    if (first >= margin && first + kVec<T> + margin <= size) {
        return load_vector<T, kAligned>(row + first);
    }
    float z[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) z[i] = first + i < size ? to_float(row[first + i]) : beyond;
    return pack(z, T{});
}

// Gradients are not read again soon, and should not evict rows from L2.
__device__ inline void store_streaming(void* to, uint4 value) {
    __stcs(static_cast<uint4*>(to), value);
}

// Writes the first `count` elements one by one.
template <typename T>
__device__ inline void store_elements(T* to, const float (&values)[kVec<T>], int count) {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
        if (i < count) to[i] = from_float<T>(values[i]);
    }
}

}  // namespace bapo::cuda
