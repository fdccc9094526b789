// Threads of a GPU as fibers of one thread of the operating system, in warps and blocks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emulated {

constexpr unsigned kWarpSize = 32;

// Its phase ends when the expected number of threads has arrived.
struct Barrier {
    unsigned arrived = 0, expected = 0;
    uint8_t phase = 0;
    const char* name = nullptr;
};

struct Block;

struct Warp {
    Block* block;
    unsigned index, size;
    uint64_t asleep_until = 0;
    bool listed = false;  // among the warps that may be able to run
    Barrier barrier;
    uint64_t exchanged[2][kWarpSize];  // by lane; exchanges alternate between the two
};

class Fiber {
  public:
    unsigned thread = 0;
    Warp* warp = nullptr;
    bool done = true;
    uint64_t asleep_until = 0;
    unsigned exchanges = 0;
    std::unordered_map<uint32_t, int> awaited;  // the phase of a barrier in memory, by its address
    // Waits until *phase differs from `before`.
    const uint8_t* phase = nullptr;
    uint8_t before = 0;
    const char* name = nullptr;

    bool waits() const { return phase != nullptr && *phase == before; }

    void begin(unsigned index, Warp& of) {
        thread = index;
        warp = &of;
        done = false;
        asleep_until = exchanges = 0;
        awaited.clear();
    }

    // A context is made once and then switched by setjmp, because swapcontext makes system calls.
    [[gnu::noinline]] void resume(jmp_buf& scheduler, void (*life)()) {
        if (_setjmp(scheduler) != 0) return;
        if (stack_ != nullptr) _longjmp(here_, 1);
        constexpr size_t kStack = 64 << 10;
        stack_ = std::make_unique_for_overwrite<char[]>(kStack);
        ucontext_t start;
        getcontext(&start);
        start.uc_stack.ss_sp = stack_.get();
        start.uc_stack.ss_size = kStack;
        start.uc_link = nullptr;
        makecontext(&start, life, 0);
        setcontext(&start);
    }
    [[gnu::noinline]] void leave(jmp_buf& scheduler) {
        if (_setjmp(here_) == 0) _longjmp(scheduler, 1);
    }

  private:
    std::unique_ptr<char[]> stack_;
    jmp_buf here_;
};

struct Block {
    unsigned index, rank;
    unsigned running;        // fibers
    unsigned in_flight = 0;  // stores and copies that have not arrived
    std::vector<uint8_t> memory;
    uint8_t* shared;
    std::vector<Warp> warps;
    Fiber* fibers;
    Barrier barriers[16];
    std::unordered_map<uint32_t, int> ended;  // phases of a barrier in memory, by its address
};

}  // namespace emulated
