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
#include <vector>

#include "device.h"

namespace driver {

class Verdict {
  public:
    // Every error counts; the first one of the lowest row is reported.
    __attribute__((format(printf, 3, 4))) void fail(int64_t row, const char* format, ...) {
        const std::lock_guard lock(mutex_);
        ++wrong_;
        if (row >= row_) return;
        row_ = row;
        char text[300];
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        first_ = text;
    }
    bool good() const { return wrong_ == 0; }
    std::string summary() const {
        return good() ? "" : "  first wrong: " + first_ + "; " + std::to_string(wrong_) + " in all";
    }

    // One value of a row or token.
    void compare(const char* what, int64_t row, double got, double expected, double tolerance) {
        if (near(got, expected, tolerance)) return;
        fail(row, "%s %" PRId64 ": got %.9g expected %.9g (error %.2e, tolerance %.2e)", what, row,
             got, expected, std::fabs(got - expected), tolerance);
    }
    // One element of a row.
    void element(const char* what, int64_t row, int64_t j, double got, double expected,
                 double tolerance, const char* note = "") {
        if (near(got, expected, tolerance)) return;
        fail(row,
             "%s: row %" PRId64 " element %" PRId64
             "%s got %.9g expected %.9g (error %.2e, "
             "tolerance %.2e)",
             what, row, j, note, got, expected, std::fabs(got - expected), tolerance);
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
    std::string first_;
};

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count) {
    return std::memcmp(a, b, count * sizeof(T)) == 0;
}

}  // namespace driver
