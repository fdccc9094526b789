// The errors that a case found.
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>

#include "device.h"

namespace driver {

// For sums in double in another order, whose terms may differ in the last bits of the exp.
constexpr double kDouble = 1e-13;

// A number, and how far another may be off.
struct Value {
    double value = 0.0, error = 0.0;
};

class Verdict {
  public:
    // Every error counts; the first one of the lowest row is reported.
    __attribute__((format(printf, 3, 4))) void fail(int64_t row, const char* format, ...) {
        const std::lock_guard lock(mutex_);
        ++wrong_;
        if (row >= row_) return;
        row_ = row;
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(first_, sizeof first_, format, arguments);
        va_end(arguments);
    }
    bool good() const { return wrong_ == 0; }
    std::string summary() const {
        if (good()) return "";
        return std::string("  first wrong: ") + first_ + "; " + std::to_string(wrong_) + " in all";
    }

    // One value of a row or token, or an element of a row.
    void compare(const char* what, int64_t row, double got, Value expected, int64_t element = -1,
                 const char* note = "") {
        const auto [value, error] = expected;
        if (near(got, value, error)) return;
        std::string where = " " + std::to_string(row);
        if (element >= 0) where = ": row" + where + " element " + std::to_string(element) + note;
        fail(row, "%s%s: got %.9g expected %.9g (error %.2e, tolerance %.2e)", what, where.c_str(),
             got, value, std::fabs(got - value), error);
    }
    // Those of an array, which were rounded in addition.
    template <typename T, typename Expected>
    void compare(const char* what, const Array<T>& of, const std::vector<Expected>& expected,
                 double rounding = 0.0) {
        const std::vector<T> got = of.values();
        for (size_t i = 0; i < expected.size(); ++i) {
            const auto [value, error] = (Value)expected[i];
            compare(what, (int64_t)i, got[i], {value, error + rounding * std::fabs(value)});
        }
    }
    // A launch leaves what it left before.
    template <typename F>
    void again(F launch) {
        const auto contents = Memory::contents();
        launch();
        if (Memory::contents() != contents) fail(0, "other bits in a second run");
    }
    void guards() {
        if (const std::string where = Memory::overrun(); !where.empty()) {
            fail(-1, "guard bytes were written: %s", where.c_str());
        }
    }

    // NaN exactly where NaN is expected.
    static bool near(double got, double expected, double tolerance) {
        if (std::isnan(expected)) return std::isnan(got);
        return got == expected ||
               (std::isfinite(expected) && std::fabs(got - expected) <= tolerance);
    }

  private:
    std::mutex mutex_;
    int64_t row_ = std::numeric_limits<int64_t>::max();
    int64_t wrong_ = 0;
    char first_[300];
};

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count = 1) {
    return std::memcmp(a, b, count * sizeof(T)) == 0;
}

}  // namespace driver
