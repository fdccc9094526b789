// Shared memory of the blocks of a cluster: checked accesses, the barriers in it, and stores and
// copies that are on their way to it. An address is the rank of a block and an offset.
#pragma once

#include "scheduler.h"

namespace emulated {

constexpr unsigned kOffsetBits = 24;

inline uint8_t* at_address(uint32_t address, size_t bytes) {
    const uint32_t rank = address >> kOffsetBits, offset = address & ((1u << kOffsetBits) - 1);
    if (rank >= scheduler.blocks.size()) scheduler.fail("uses the memory of no block");
    Block& block = scheduler.blocks[rank];
    if (block.running == 0) {
        scheduler.fail("block " + std::to_string(block.index) + " has left: its memory is used");
    }
    if (offset + bytes > scheduler.shape.bytes) {
        scheduler.fail("shared memory out of bounds: " + std::to_string(bytes) + " bytes at " +
                       std::to_string(offset));
    }
    return block.shared + offset;
}

// An access of a thread to the memory of its block, before which other threads may run.
inline void access(const void* pointer, size_t bytes) {
    scheduler.maybe_pause();
    const auto* const byte = static_cast<const uint8_t*>(pointer);
    const auto lies_in = [=](std::span<const uint8_t> memory) {
        return byte >= memory.data() && byte + bytes <= memory.data() + memory.size();
    };
    const uint8_t* const dynamic = scheduler.block().shared;
    if (!lies_in({dynamic, scheduler.shape.bytes}) && !lies_in(scheduler.declared)) {
        scheduler.fail("shared memory out of bounds: " + std::to_string(bytes) + " bytes at " +
                       std::to_string(byte - dynamic));
    }
    if (reinterpret_cast<uintptr_t>(byte) % (bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 1)) {
        scheduler.fail("shared memory misaligned");
    }
}

// The 8 bytes of a barrier.
struct MemoryBarrier {
    static constexpr uint8_t kValid = 1;  // not 0, and not poison

    int32_t bytes;  // expected and not yet complete
    uint8_t pending;
    uint8_t arrivals;
    uint8_t parity;  // of the phase that runs
    uint8_t valid;

    static MemoryBarrier& at(uint32_t address) {
        if (address % 8) scheduler.fail("barrier misaligned");
        auto& barrier = *reinterpret_cast<MemoryBarrier*>(at_address(address, 8));
        if (barrier.valid != kValid) scheduler.fail("barrier not initialised");
        return barrier;
    }
    // In one step, as the instruction does it: the phase must not end in between.
    static void update(uint32_t address, int arrived, int64_t change) {
        constexpr int64_t kMostBytes = (1 << 20) - 1;
        MemoryBarrier& barrier = at(address);
        if (arrived > barrier.pending) scheduler.fail("more arrivals at a barrier than it counts");
        const int64_t bytes = barrier.bytes + change;
        if (std::abs(bytes) > kMostBytes || std::abs(change) > kMostBytes) {
            scheduler.fail("more bytes on a barrier than it counts");
        }
        barrier.bytes = (int32_t)bytes;
        barrier.pending -= (uint8_t)arrived;
        if (barrier.pending > 0 || bytes != 0) return;
        barrier.pending = barrier.arrivals;
        barrier.parity ^= 1;
        Block& block = scheduler.blocks[address >> kOffsetBits];
        ++block.ended[address];
        scheduler.wake(block);
    }
};

inline void init_barrier(uint32_t address, uint32_t arrivals) {
    auto& barrier = *reinterpret_cast<MemoryBarrier*>(at_address(address, 8));
    if (address % 8 || arrivals < 1 || arrivals > 255) scheduler.fail("barrier out of range");
    if (barrier.valid == MemoryBarrier::kValid) scheduler.fail("barrier initialised twice");
    const auto count = (uint8_t)arrivals;
    barrier = {0, count, count, 0, MemoryBarrier::kValid};
}
// A parity distinguishes two phases only, so a thread must wait for each phase, and before the next
// one ends. The first may be the phase of parity 1 that precedes the initialisation. Where the
// warps of a block wait in turn, for one phase each, a thread may leave out those of the others.
inline void wait_barrier(uint32_t address, uint32_t parity, bool in_turn, const char* name) {
    scheduler.maybe_pause();
    const MemoryBarrier& barrier = MemoryBarrier::at(address);
    auto& awaited = scheduler.current->awaited;
    const auto last = awaited.find(address);
    int phase = last == awaited.end() ? -(int)parity : last->second + 1;
    if (in_turn) {
        const int ended = scheduler.block().ended[address];
        phase = std::max(phase, (ended & 1) == (int)parity ? ended : ended - 1);
    }
    if ((phase & 1) != (int)parity) {
        scheduler.fail(std::string("waits twice for one phase, or skips one: ") + name);
    }
    awaited[address] = phase;
    scheduler.wait_while(&barrier.parity, (uint8_t)parity, name);
    if (scheduler.block().ended[address] != phase + 1) {
        scheduler.fail(std::string("is overtaken by the barrier: ") + name);
    }
    scheduler.maybe_pause();
}

// Arrives late and in two parts, each of which completes its own bytes; the old contents are
// destroyed at once.
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || bytes == 0) {
        scheduler.fail("bulk copy of no multiple of 16 bytes");
    }
    scheduler.maybe_pause();
    std::memset(at_address(to, bytes), kPoison, bytes);
    const auto half = (uint32_t)scheduler.random.below(bytes / 16 + 1) * 16;
    const auto send = [&](uint32_t first, uint32_t count) {
        if (count == 0) return;
        const auto* const source = static_cast<const uint8_t*>(from) + first;
        scheduler.later(scheduler.temper.copy_span, [=] {
            std::memcpy(at_address(to + first, count), source, count);
            MemoryBarrier::update(barrier, 0, -(int64_t)count);
        });
    };
    send(0, half);
    send(half, bytes - half);
}

// A store to a block of the cluster, which arrives late and in any order.
inline void send(uint32_t to, uint64_t value, uint32_t barrier) {
    if (to >> kOffsetBits != barrier >> kOffsetBits) {
        scheduler.fail("stores to one block with the barrier of another");
    }
    if (to % 8) scheduler.fail("remote store misaligned");
    scheduler.maybe_pause();
    at_address(to, 8);
    scheduler.later(scheduler.temper.store_span, [=] {
        std::memcpy(at_address(to, 8), &value, 8);
        MemoryBarrier::update(barrier, 0, -8);
    });
}

}  // namespace emulated
