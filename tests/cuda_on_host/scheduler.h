// Runs the threads of a cluster as fibers on one thread of the operating system. An adversary
// chooses which one continues: lanes, warps and blocks in any order, with pauses of up to thousands
// of steps; stores and copies arrive as late. A seed fixes the schedule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "declared_shared.h"
#include "fibers.h"
#include "random.h"

namespace emulated {

// The shape of a launch.
struct Shape {
    unsigned grid, threads, cluster;
    size_t bytes;  // dynamic shared memory of a block
};

constexpr uint8_t kPoison = 0xff;  // NaN in every format

class Scheduler {
  public:
    Fiber* current = nullptr;
    Shape shape{};
    std::span<uint8_t> declared;  // shared memory that is not dynamic
    std::vector<Block> blocks;    // of the present cluster
    Random random{0};
    Temper temper{random};

    void seed(uint64_t value) {
        seed_ = value;
        random = Random(value);
    }

    void launch(Shape of, std::function<void()> kernel) {
        shape = of;
        kernel_ = std::move(kernel);
        temper = Temper(random);
        declared = declared_shared();
        std::vector<unsigned> clusters(of.grid / of.cluster);
        for (unsigned i = 0; i < clusters.size(); ++i) clusters[i] = i;
        for (size_t i = clusters.size(); i > 1; --i) {
            std::swap(clusters[i - 1], clusters[random.below(i)]);
        }
        for (const unsigned cluster : clusters) {
            start(cluster);
            run();
        }
    }

    Block& block() { return *current->warp->block; }

    // Sometimes lets other threads run first.
    void maybe_pause() {
        if (random.one_in(temper.pause_rate)) pause();
    }
    void arrive_and_wait(Barrier& barrier, unsigned expected, const char* name) {
        maybe_pause();
        if (barrier.arrived == 0) {
            barrier.expected = expected;
            barrier.name = name;
        } else if (barrier.expected != expected || std::strcmp(barrier.name, name) != 0) {
            fail(std::string("meets ") + barrier.name + " in " + name);
        }
        const uint8_t before = barrier.phase;
        if (++barrier.arrived == expected) {
            barrier.arrived = 0;
            ++barrier.phase;
            if (&barrier == &cluster_barrier) {
                for (Block& each : blocks) wake(each);
            } else {
                wake(block());
            }
        }
        wait_while(&barrier.phase, before, name);
    }
    void wait_while(const uint8_t* phase, uint8_t before, const char* name) {
        if (*phase != before) return;
        current->phase = phase;
        current->before = before;
        current->name = name;
        leave();
        current->phase = nullptr;
    }
    // The warps of a block may be able to run again.
    void wake(Block& block) {
        for (Warp& warp : block.warps) list(warp);
    }
    // Schedules the arrival of a store or copy of the current thread.
    void later(unsigned span, std::function<void()> event) {
        Block& from = block();
        ++from.in_flight;
        events_.push({now_ + random.span(span), sent_++, &from, std::move(event)});
    }

    // Ends the launch with an exception, which names the thread if there is one.
    [[noreturn]] void fail(std::string message) {
        if (current != nullptr) {
            message = "block " + std::to_string(block().index) + ", thread " +
                      std::to_string(current->thread) + " " + message;
        }
        failure_ = message + " (schedule " + std::to_string(seed_) + ")";
        if (current != nullptr) leave();
        abandon();
    }

    Barrier cluster_barrier;

  private:
    struct Event {
        uint64_t due, order;
        Block* from;
        std::function<void()> happens;
        bool operator<(const Event& other) const {
            return std::pair(due, order) > std::pair(other.due, other.order);
        }
    };

    void start(unsigned cluster) {
        blocks = std::vector<Block>(shape.cluster);
        cluster_barrier = {};
        runnable_.clear();
        unfinished_ = shape.cluster;
        const unsigned threads = shape.threads;
        if (fibers_.size() < shape.cluster * threads) fibers_.resize(shape.cluster * threads);
        std::fill(declared.begin(), declared.end(), kPoison);
        for (unsigned rank = 0; rank < shape.cluster; ++rank) {
            Block& block = blocks[rank];
            block.index = cluster * shape.cluster + rank;
            block.rank = rank;
            block.running = threads;
            block.memory.assign(shape.bytes + 128, kPoison);
            const auto address = reinterpret_cast<uintptr_t>(block.memory.data());
            block.shared = block.memory.data() + (128 - address % 128) % 128;
            block.fibers = &fibers_[rank * threads];
            block.warps.resize((threads + kWarpSize - 1) / kWarpSize);
            for (unsigned i = 0; i < block.warps.size(); ++i) {
                Warp& warp = block.warps[i];
                warp.block = &block;
                warp.index = i;
                warp.size = std::min(kWarpSize, threads - i * kWarpSize);
                list(warp);
            }
            for (unsigned i = 0; i < threads; ++i) {
                block.fibers[i].begin(i, block.warps[i / kWarpSize]);
            }
        }
    }

    void run() {
        unsigned in_vain = 0;
        while (unfinished_ > 0) {
            ++now_;
            deliver();
            if (runnable_.empty()) {
                if (events_.empty()) fail("deadlock:" + who_waits());
                now_ = events_.top().due;
                continue;
            }
            if (random.one_in(temper.nap_rate)) nap();
            Warp& warp = *runnable_[random.below(runnable_.size())];
            if (warp.asleep_until <= now_) {
                in_vain = 0;
                step(warp);
            } else if (++in_vain > 4 * runnable_.size()) {
                skip_to_next();
            }
        }
    }

    void deliver() {
        while (!events_.empty() && events_.top().due <= now_) {
            const Event event = events_.top();
            events_.pop();
            --event.from->in_flight;
            event.happens();
        }
    }

    // Every lane that can run continues to its next stop.
    void step(Warp& warp) {
        Fiber* const lanes = warp.block->fibers + warp.index * kWarpSize;
        const auto order = random.next();
        const unsigned first = order % kWarpSize, stride = order / kWarpSize % kWarpSize | 1;
        bool any = false, left = false;
        uint64_t next = ~uint64_t{0};
        for (unsigned i = 0; i < kWarpSize; ++i) {
            const unsigned lane = (first + i * stride) % kWarpSize;
            if (lane >= warp.size) continue;
            Fiber& fiber = lanes[lane];
            if (fiber.done || fiber.waits()) continue;
            left = true;
            if (fiber.asleep_until > now_) {
                next = std::min(next, fiber.asleep_until);
            } else {
                any = true;
                resume(fiber);
            }
        }
        if (any) return;
        if (left) {
            warp.asleep_until = next;
        } else {
            warp.listed = false;
            std::erase(runnable_, &warp);
        }
    }

    // Suspends a warp, a block, or all others, for a while.
    void nap() {
        const uint64_t until = now_ + random.span(temper.nap_span);
        const Block& block = blocks[random.below(blocks.size())];
        const Warp* const warp = &block.warps[random.below(block.warps.size())];
        const bool whole = random.one_in(2), others = random.one_in(2);
        for (Block& each : blocks) {
            for (Warp& other : each.warps) {
                const bool chosen = whole ? &each == &block : &other == warp;
                if (chosen != others) other.asleep_until = std::max(other.asleep_until, until);
            }
        }
    }

    void skip_to_next() {
        uint64_t next = events_.empty() ? ~uint64_t{0} : events_.top().due;
        for (const Warp* warp : runnable_) next = std::min(next, warp->asleep_until);
        now_ = std::max(now_, next);
    }

    void list(Warp& warp) {
        if (warp.listed) return;
        warp.listed = true;
        runnable_.push_back(&warp);
    }

    void finish(Fiber& fiber) {
        fiber.done = true;
        Block& block = *fiber.warp->block;
        if (--block.running > 0) return;
        --unfinished_;
        if (block.in_flight > 0) {
            fail("leaves, the last of its block, with " + std::to_string(block.in_flight) +
                 " stores or copies on their way");
        }
    }

    std::string who_waits() const {
        std::map<std::string, std::string> waits;  // by what for
        for (const Block& block : blocks) {
            for (unsigned i = 0; i < shape.threads; ++i) {
                const Fiber& fiber = block.fibers[i];
                if (fiber.done) continue;
                const std::string who =
                    " " + std::to_string(block.index) + ":" + std::to_string(fiber.warp->index);
                std::string& all = waits[fiber.name];
                if (!all.ends_with(who)) all += who;
            }
        }
        std::string text;
        for (const auto& [name, who] : waits) text += " warps" + who + " wait for " + name + ";";
        return text.substr(0, 1000);
    }

    void resume(Fiber& fiber) {
        current = &fiber;
        fiber.resume(here_, run_threads);
        current = nullptr;
        if (!failure_.empty()) abandon();
    }
    void leave() { current->leave(here_); }
    void pause() {
        current->asleep_until = now_ + random.span(temper.pause_span);
        leave();
    }
    static void run_threads();

    // Fibers in the middle of a kernel cannot be reused.
    [[noreturn]] void abandon() {
        fibers_.clear();
        events_ = {};
        throw std::runtime_error(std::exchange(failure_, {}));
    }

    std::function<void()> kernel_;
    std::vector<Fiber> fibers_;
    std::vector<Warp*> runnable_;
    std::priority_queue<Event> events_;
    jmp_buf here_;
    std::string failure_;
    uint64_t seed_ = 0, now_ = 0, sent_ = 0;
    unsigned unfinished_ = 0;
};
inline Scheduler scheduler;

// The body of a fiber, which runs one thread after the other.
inline void Scheduler::run_threads() {
    for (;;) {
        scheduler.kernel_();
        scheduler.finish(*scheduler.current);
        scheduler.leave();
    }
}

}  // namespace emulated
