// Values of registers, and arithmetic as PTX defines it where C++ does not.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ptx {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// The low bits of a register as a value, and the other way round: a NaN that is computed has one
// pattern.
template <typename T>
T of_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T>
uint64_t bits_of(T value) {
    if constexpr (std::is_same_v<T, float>) {
        if (value != value) return 0x7fffffff;
    } else if constexpr (std::is_same_v<T, double>) {
        if (value != value) return 0x7fffffffffffffff;
    }
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <typename T>
T widened(T x) {
    return x;
}
inline float widened(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float widened(Float16 x) { return float(std::bit_cast<_Float16>(x.bits)); }

// To the nearest, ties to even.
template <typename Half>
Half narrowed(float x);
template <>
inline BFloat16 narrowed(float x) {
    if (x != x) return {0x7fff};
    const auto bits = std::bit_cast<uint32_t>(x);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline Float16 narrowed(float x) {
    if (x != x) return {0x7fff};
    return {std::bit_cast<uint16_t>(_Float16(x))};
}

// Subnormal numbers are zero.
inline float flushed(float x) {
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// Of two numbers, and the other one where one is NaN; -0 is less than +0.
template <typename T>
T smaller(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
}
template <typename T>
T larger(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
}

// Towards zero, held in the range of the integer; NaN is 0.
template <typename I, typename F>
I truncated(F x) {
    if (x != x) return 0;
    constexpr auto kEnd = F(uint64_t{1} << (std::numeric_limits<I>::digits - 1)) * 2;
    if (x >= kEnd) return std::numeric_limits<I>::max();
    if (x <= (std::is_signed_v<I> ? -kEnd : F(0))) return std::numeric_limits<I>::min();
    return I(x);
}

// Errors that the manual allows to approximate instructions; a seed of 0 is none. Equal arguments
// have equal errors.
struct Errors {
    uint64_t seed = 0;

    // In [-1, 1], of the bits of an argument.
    double draw(uint64_t bits) const {
        if (seed == 0) return 0.0;
        uint64_t x = bits * 0x9e3779b97f4a7c15 + seed;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return double(int64_t(x ^ x >> 31)) * 0x1p-63;
    }
    // The result of an instruction whose relative error may be `most`.
    float relative(double exact, double most, uint64_t bits) const {
        return float(exact * (1.0 + most * draw(bits)));
    }
};
inline Errors errors;

}  // namespace ptx
