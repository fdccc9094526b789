// Denormal floats as zeros while a piece of work runs; includes nothing of the package. With them
// some processors compute ten times as slowly, and multiply a gradient that holds them so. The
// flags are not for halves, and other code on the thread must not find them set.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace bapo::cpu {

class FlushedDenormals {
  public:
    FlushedDenormals() { set(before_ | kFlush); }
    ~FlushedDenormals() { set(before_); }

  private:
#if defined(__SSE2__)
    static constexpr unsigned kFlush = 0x8040;  // results, and operands
    static void set(unsigned flags) { _mm_setcsr(flags); }
    const unsigned before_ = _mm_getcsr();
#elif defined(__aarch64__)
    static constexpr uint64_t kFlush = 1 << 24;
    static void set(uint64_t flags) { asm volatile("msr fpcr, %0" ::"r"(flags)); }
    const uint64_t before_ = [](uint64_t flags) {
        asm volatile("mrs %0, fpcr" : "=r"(flags));
        return flags;
    }(0);
#else
    static constexpr int kFlush = 0, before_ = 0;
    static void set(int) {}
#endif
};

}  // namespace bapo::cpu
