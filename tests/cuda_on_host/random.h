// Everything in which two emulated runs may differ; all of it follows from seeds.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace emulated {

// splitmix64
inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

class Random {
  public:
    explicit Random(uint64_t seed) : state_(mixed(seed)) {}

    uint64_t next() { return mixed(state_ += 0x9e3779b97f4a7c15); }
    uint64_t below(uint64_t n) { return next() % n; }
    bool one_in(uint64_t n) { return below(n) == 0; }
    // Below 2^most, with every order of magnitude equally likely.
    uint64_t span(unsigned most) { return below(uint64_t{1} << below(most + 1)); }

  private:
    uint64_t state_;
};

// The behaviour of the adversary in one launch. A rate of n is 1 in n; spans are powers of 2.
struct Temper {
    unsigned pause_rate, pause_span, nap_rate, nap_span, copy_span, store_span;

    explicit Temper(Random& random)
        : pause_rate(64u << random.below(8)),
          pause_span(4 + random.below(9)),
          nap_rate(256u << random.below(5)),
          nap_span(6 + random.below(9)),
          copy_span(random.below(14)),
          store_span(random.below(14)) {}
};

inline uint64_t rounding_seed = 0;

// 2^t with the error that ex2.approx.ftz may have: 2^-22, no subnormal results, exact at 0 and at
// infinities. Equal t give equal results.
inline float approximate_exp2(float t) {
    constexpr double kError = 0x1p-22 - 0x1p-24;  // the rest is the rounding to float
    if (t == 0.0f) return 1.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &t, sizeof bits);
    const auto random = (int32_t)mixed(bits + (rounding_seed << 32));
    const auto e = (float)(std::exp2((double)t) * (1.0 + 0x1p-31 * kError * random));
    return e < std::numeric_limits<float>::min() ? 0.0f : e;
}

}  // namespace emulated
