// float16 as CUDA names it.
#pragma once

#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
    operator float() const { return (float)emulated_bits<_Float16>(bits); }
};
struct __half2 {
    __half x, y;
};
inline __half __float2half_rn(float value) { return {emulated_bits<uint16_t>((_Float16)value)}; }
inline __half2 __floats2half2_rn(float low, float high) {
    return {__float2half_rn(low), __float2half_rn(high)};
}
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
