// The results of a row pass by plain loops in double, and how far a kernel may be off.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "params.h"
#include "verdict.h"

namespace driver {

using Half = _Float16;
struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    explicit BFloat16(float value) {  // of a finite value
        const auto wide = std::bit_cast<uint32_t>(value);
        bits = (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>((uint32_t)bits << 16); }
};

// Its roundings: relative, and of a subnormal number.
struct Format {
    bapo::DType dtype;
    double eps, tiny;
};
template <typename T>
constexpr Format kFormat =
    sizeof(T) == 4            ? Format{bapo::DType::kFloat32, 0x1p-24, 0x1p-150}
    : std::is_same_v<T, Half> ? Format{bapo::DType::kFloat16, 0x1p-11, 0x1p-25}
                              : Format{bapo::DType::kBFloat16, 0x1p-8, 0x1p-134};

// The errors of float32 arithmetic. A tolerance follows from these and from one rounding to the
// output's dtype.
struct Float32Errors {
    double tanh;  // absolute, of x = scale*tanh(...), and of an origin as well
    double sums;  // relative: sums of so many terms in a thread, whose roundings have either sign

    Float32Errors(const bapo::Transform& transform, int64_t vocab)
        : tanh(transform.softcapped ? 0x1p-21 * transform.scale : 0.0),
          sums(2.0 * std::sqrt((double)vocab / 256 + 16) * 0x1p-24) {}

    // Relative, of e^d: 2^-22 each for ex2.approx itself and three moves of a sum to a new maximum;
    // t = d/ln 2 is rounded three times.
    double of_exp(double d) const { return 0x1p-20 + 3 * 0x1p-24 * std::fabs(d) + tanh; }
};

// x of a logit z, and dx/dz.
struct Transformed {
    double x, slope;

    Transformed(double z, const bapo::Transform& transform)
        : x(transform.scale * z), slope(z == -INFINITY ? 0.0 : transform.slope) {
        if (!transform.softcapped || z == -INFINITY) return;
        const double y = std::tanh(transform.logit_scale * z / transform.softcap);
        x = transform.scale * y;
        slope *= 1.0 - y * y;
    }
};

// A row's softmax; d = x - top throughout.
struct Softmax {
    double top = -INFINITY;
    double spread = 0.0;  // sum of p*|d|
    Value log_sum{}, log_prob{}, entropy{};
};

template <typename T>
Softmax softmax(const T* row, int64_t vocab, int64_t label, const bapo::Transform& transform) {
    const Float32Errors errors(transform, vocab);
    Softmax of;
    std::vector<double> x(vocab);
    for (int64_t j = 0; j < vocab; ++j) {
        x[j] = Transformed((float)row[j], transform).x;
        of.top = std::fmax(of.top, x[j]);
    }
    double sum = 0.0, sum_error = 0.0, weighted = 0.0, weighted_error = 0.0;
    for (int64_t j = 0; j < vocab; ++j) {
        const double d = x[j] - of.top, e = std::exp(d), error = e * errors.of_exp(d);
        sum += e;
        if (e == 0.0) continue;
        weighted += e * -d;
        sum_error += error;
        weighted_error += error * -d;
    }
    of.spread = weighted / sum;
    of.log_sum = {std::log(sum), sum_error / sum + errors.sums};
    of.entropy = {of.log_sum.value + of.spread,
                  of.log_sum.error * (1.0 + of.spread) + weighted_error / sum};
    const double x_label = label >= 0 && label < vocab ? x[label] : NAN;
    of.log_prob = {x_label - of.top - of.log_sum.value, of.log_sum.error + errors.tanh};
    return of;
}

// d loss/d log_prob and the weight of the entropy bonus, the coefficients of a row's gradient.
struct Wanted {
    Value dlog_prob;
    double bonus;
};

// Calls check(j, expected) of every element of a row's gradient
//   [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + entropy)] * dx_j/dz_j.
template <typename T, typename F>
void gradient(const T* row, int64_t vocab, int64_t label, const bapo::Transform& transform,
              const Softmax& of, const Wanted& wanted, F check) {
    const Float32Errors errors(transform, vocab);
    const double g = wanted.dlog_prob.value, bonus = wanted.bonus;
    for (int64_t j = 0; j < vocab; ++j) {
        if (g == 0.0 && bonus == 0.0) {
            check(j, Value{});
            continue;
        }
        const auto [x, slope] = Transformed((float)row[j], transform);
        const double d = x - of.top, log_p = d - of.log_sum.value, p = std::exp(log_p);
        const double one = j == label ? 1.0 : 0.0;
        const double dx = g * (one - p) + (p == 0.0 ? 0.0 : bonus * p * (log_p + of.entropy.value));

        // Kernels compute p*(a*d + b) with b = bonus*(entropy - log sum) - g.
        const double size = std::fabs(g) + std::fabs(bonus) * ((p == 0.0 ? 0.0 : -d) + of.spread);
        double error = std::fabs(g) * of.log_prob.error * p * one +
                       std::fabs(bonus) * of.entropy.error * p + wanted.dlog_prob.error * (one + p);
        if (p > 0.0) error += size * p * (errors.of_exp(d) + of.log_sum.error);
        error *= slope;
        if (transform.softcapped) error += 0x1p-21 * transform.slope * std::fabs(dx);  // of 1 - y^2
        const double value = dx * slope;
        const double underflow = 0x1p-126 * size * transform.slope;  // ex2 has no subnormals
        check(j, Value{value, error + underflow + kFormat<T>.eps * (std::fabs(value) + error) +
                                  kFormat<T>.tiny});
    }
}

}  // namespace driver
