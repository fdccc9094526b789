// Memory with a shadow that remembers who accessed what, and when by the clocks: every access is
// checked for its range, its alignment, whether somebody wrote there before, and for races.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <unordered_map>

#include "machine.h"

namespace ptx {

inline uint64_t error_seed = 0;  // of the errors of approximate instructions; 0 for none
inline uint64_t nans = 0;        // so far, whose signs alternate if there are errors

// As executor.Relied.
struct Relied {
    int64_t foreign = 0, beyond = 0, order = 0;
};

enum Access : uint8_t { kNone, kRead, kVectorRead, kStrongRead, kWrite, kBlockAtomic, kAtomic };

inline bool exclude(Access a, Access b) {
    const auto of = [=](Access kind) { return a == kind || b == kind; };
    const bool plain = of(kRead) || of(kVectorRead) || of(kWrite);
    return plain && (a >= kWrite || b >= kWrite);
}

// One access of one lane, or of several lanes of a warp.
struct Record {
    uint32_t warp = 0, time = 0, instruction = 0;
    uint8_t lane = 0, bytes = 0;
    Access access = kNone;
    bool of_barrier = false;  // of a place that only its instructions may access
};

// The last write of a place, and the list of what has happened since that does not exclude each
// other: reads, or atomics.
struct Cell {
    Record write;
    uint32_t list = 0;
};

// Storage of a tensor, shared memory of a block, or parameters.
struct Range {
    uint64_t begin = 0, bytes = 0,
             granule = 1;  // bytes of an element, of which every access covers whole ones
    uint8_t* data = nullptr;
    std::vector<Cell> cells{};
};

// A store to global memory that other blocks do not see yet.
struct Pending {
    uint64_t address, bytes;
    uint8_t data[16];
};

// Threads that meet at a barrier of a block.
struct Meeting {
    uint32_t arrived = 0, expected = 0;
};

// A barrier in shared memory: a phase ends when as many have arrived as it counts, and all bytes
// that they expect.
struct PhaseBarrier {
    uint32_t slot;  // in clocks, of what completes on it
    uint32_t count, pending;
    int64_t bytes = 0;
    uint32_t thread;  // that initialised it
    uint32_t phase = 0;
    bool fenced = false;  // visible to others than that thread
    bool awaited = true;  // somebody knows that the phase before has ended
    // Of each warp the phase that it last saw begin, and how many in turn it had seen by then.
    std::map<uint32_t, std::pair<uint32_t, uint32_t>> seen{};
    // What those who wait may know: from arrivals in the block, or from all of the cluster.
    Clock of_block{}, of_cluster{};
    Clock next_of_block{}, next_of_cluster{};

    void update(uint32_t arrived, int64_t change, const Clock& clock, bool from_block) {
        constexpr int64_t kMostBytes = (1 << 20) - 1;
        if (arrived > pending) fail("more arrivals at a barrier than it counts");
        if (arrived && !awaited) fail("arrives before anybody has seen the phase before end");
        pending -= arrived;
        bytes += change;
        if (std::abs(bytes) > kMostBytes) fail("more bytes on a barrier than it counts");
        join(next_of_cluster, clock);
        if (from_block) join(next_of_block, clock);
        if (pending > 0 || bytes != 0) return;
        ++phase;
        awaited = false;
        pending = count;
        join(of_block, next_of_block);
        join(of_cluster, next_of_cluster);
        next_of_block.clear(), next_of_cluster.clear();
    }
};

struct Cluster;

struct Block {
    uint32_t index[3];
    Cluster* cluster;
    uint32_t rank;
    std::vector<Warp> warps;
    std::map<uint64_t, Meeting> meetings;
    std::map<uint64_t, PhaseBarrier> barriers;

    bool started = false;  // one of its warps

    bool returned() const {
        return std::none_of(warps.begin(), warps.end(),
                            [](const Warp& each) { return each.alive; });
    }
    std::vector<uint8_t> bytes;
    Range shared;
    std::vector<Pending> pending;
};

// A copy or a store to shared memory that completes on a barrier there, later.
struct Transfer {
    Warp as;           // accesses memory, in the place of the warp
    uint32_t sent_by;  // that warp
    bool from_block;   // whether that is one of the block
    bool copies;       // or has the values
    uint8_t values[16];
    uint64_t from, to, bytes, barrier;
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Transfer> transfers;
    uint32_t phase = 0;  // of the barrier of the cluster
    Clock known{}, gathered{};

    void open();
    void leave(const Block& block) const;
};

class Memory {
  public:
    bool finds_races = true, delays_stores = false;
    bool poisons = false;    // parts of vectors that may not be read are NaN, and no fault
    bool unwritten = false;  // nor is any other read of memory that was never written
    Relied relied;
    uint32_t warps_per_block = 1;
    uint32_t warps = 0, warps_per_cluster = 1;
    uint32_t slots = 0;  // what else has a place in clocks
    std::mt19937_64 random;
    Range parameters;

    // By address modulo 8, twice: memory that holds this pattern was never written.
    const uint8_t* poison = nullptr;

    void map(uint64_t begin, uint64_t bytes, uint64_t granule) {
        auto* const data = reinterpret_cast<uint8_t*>(begin);
        std::vector<Cell> cells(bytes / granule);
        // Any byte may be a value: of bytes the whole word counts.
        const uint64_t step = granule == 1 ? 8 : granule;
        for (uint64_t i = 0; i < bytes; i += step) {
            const uint64_t end = std::min(i + step, bytes);
            if (!std::memcmp(data + i, poison + (begin + i) % 8, end - i)) continue;
            for (uint64_t j = i; j < end; j += granule) cells[j / granule].write.access = kWrite;
        }
        ranges_[begin] = {begin, bytes, granule, data, std::move(cells)};
    }

    // The bytes at an address, after all checks of one lane's access.
    uint8_t* access(Warp& warp, int lane, int64_t space, uint64_t address, uint64_t bytes,
                    Access kind, const void* stored = nullptr) {
        const auto fault = [&](const char* what) {
            const char* const names[] = {"global", "shared", "parameter"};
            fail("lane " + std::to_string(lane) + ": " + what + ": " + std::to_string(bytes) +
                 " bytes at " + names[space] + " address " + std::to_string(address));
        };
        if (address % bytes != 0) fault("misaligned");
        Range& range = space == kGlobal   ? range_of(address)
                       : space == kShared ? warp.block->shared
                                          : parameters;
        const uint64_t offset = address - range.begin;
        if (address < range.begin || offset + bytes > range.bytes) {
            fault(space == kGlobal ? "in no tensor" : "out of bounds");
        }
        uint8_t* const place = range.data + offset;
        if (space == kParameter) return place;
        if (bytes % range.granule != 0) fault("part of an element");
        if (!warp.block->pending.empty()) settle(*warp.block, address, bytes);
        bool beyond = false;
        for (uint64_t i = 0; i < bytes; i += range.granule) {
            Cell& cell = range.cells[(offset + i) / range.granule];
            const bool written = cell.write.access != kNone;
            if (cell.write.of_barrier && kind != kAtomic) fault("of a barrier");
            if (!stored && !written) {
                // In shared memory that may be the padding of a structure.
                const bool alone = space == kGlobal && kind != kVectorRead;
                if (!poisons || (alone && !unwritten)) fault("reads what was never written");
                beyond = space == kGlobal;
            }
            const Record now{warp.number,   warp.time(),    warp.instruction,
                             uint8_t(lane), uint8_t(bytes), kind};
            const bool same =
                stored &&
                !std::memcmp(place + i, static_cast<const uint8_t*>(stored) + i, range.granule);
            // Warps that hold copies of a value all store it to shared memory: the second of these
            // stores changes nothing, but has to come before what is stored next.
            const bool copies = same && written && space == kShared &&
                                cell.write.instruction == warp.instruction &&
                                !before(cell.write, warp, lane);
            check(cell, warp, now, same, copies);
        }
        relied.beyond += beyond;
        return place;
    }

    void store(Warp& warp, int lane, int64_t space, uint64_t address, uint64_t bytes, Access kind,
               const void* data) {
        uint8_t* const place = access(warp, lane, space, address, bytes, kind, data);
        if (space != kGlobal || !delays_stores || kind != kWrite) {
            std::memcpy(place, data, bytes);
            return;
        }
        auto& pending = warp.block->pending;
        std::memcpy(pending.emplace_back(Pending{address, bytes, {}}).data, data, bytes);
        if (pending.size() > 64) settle(*warp.block, random() % pending.size());
    }

    // Reads a vector of 16 bytes of global memory. With `poisons` a part of it may be in no tensor,
    // never written, or written by others, and is NaN. PTX has no such exception: it says that what
    // is copied lies in memory, that its source does not change meanwhile (9.7.9.25), and that
    // accesses of different size do not race (8.7.2). Rows that begin or end inside of 16 bytes
    // need it, and cut away what is not theirs before they use it.
    void read_vector(Warp& warp, int lane, uint64_t address, uint8_t* bytes) {
        bool all = true, none = true, others = false;
        settle(*warp.block, address, 16);
        for (uint64_t i = address; poisons && i < address + 16; ++i) {
            const Range& range = range_of(i);
            bytes[i - address] = poison[i % 8];
            if (i - range.begin < range.bytes) {
                const Record& written = range.cells[(i - range.begin) / range.granule].write;
                const bool ordered = written.time == 0 || before(written, warp, lane);
                if (written.access != kNone && (!finds_races || ordered)) {
                    bytes[i - address] = range.data[i - range.begin];
                    none = false;
                    continue;
                }
                others |= written.access != kNone;
            }
            all = false;
        }
        if (poisons && !all && !none && address % 16 == 0) {
            ++(others ? relied.foreign : relied.beyond);
            return;
        }
        std::memcpy(bytes, access(warp, lane, kGlobal, address, 16, kVectorRead), 16);
    }

    // Some stores of a block, or all, become visible to the others.
    void settle(Block& block, bool all) {
        while (!block.pending.empty() && (all || random() % 4 == 0)) {
            settle(block, random() % block.pending.size());
        }
    }

    // Orders a warp before or after others through the clock that a place carries.
    void synchronise(Warp& warp, uint64_t address, int64_t flags, bool reads, bool writes) {
        Clock& of_place = clocks_[address];
        if (reads) join(flags & kAcquire ? warp.clock : warp.observed, of_place);
        if (!writes) return;
        if (!reads) of_place.clear();  // a store begins a new sequence, an atomic continues one
        if (flags & kRelease) settle(*warp.block, true);
        join(of_place, flags & kRelease ? warp.clock : warp.published);
    }

    void complete_last(Cluster& cluster);

    void fence(Warp& warp) {
        settle(*warp.block, true);
        join(warp.clock, warp.observed);
        warp.observed.clear();
        warp.published = warp.clock;
    }

  private:
    // The one that begins last before an address.
    Range& range_of(uint64_t address) {
        if (address - last_->begin >= last_->bytes) {
            last_ = &std::prev(ranges_.upper_bound(address))->second;
        }
        return *last_;
    }

    // Before the block itself accesses these bytes; so pending stores never overlap.
    static void settle(Block& block, uint64_t address, uint64_t bytes) {
        for (size_t i = block.pending.size(); i-- > 0;) {
            const Pending& each = block.pending[i];
            if (each.address < address + bytes && address < each.address + each.bytes) {
                settle(block, i);
            }
        }
    }

    static void settle(Block& block, size_t index) {
        std::swap(block.pending[index], block.pending.back());
        const Pending& store = block.pending.back();
        std::memcpy(reinterpret_cast<void*>(store.address), store.data, store.bytes);
        block.pending.pop_back();
    }

    // Whether what is recorded happened before what a lane does now.
    static bool before(const Record& record, const Warp& warp, int lane) {
        if (record.warp != warp.number) return record.time <= at(warp.clock, record.warp);
        return record.lane == lane || record.time <= warp.synchronised;
    }

    void check(Cell& cell, Warp& warp, Record now, bool same_value, bool changes_nothing) {
        if (!finds_races) {
            if (now.access >= kWrite) cell.write.access = kWrite;
            return;
        }
        if (changes_nothing) {
            now.access = kRead;
            return add(cell, now, warp);
        }
        const auto require_before = [&](const Record& record) {
            if (record.access == kNone || before(record, warp, now.lane)) return;
            const bool together = record.warp == now.warp && record.time == now.time;
            if (together && same_value) return;  // lanes of one store
            const bool scoped = record.access == kBlockAtomic || now.access == kBlockAtomic;
            const bool other = record.warp / warps_per_block != now.warp / warps_per_block;
            if (!exclude(record.access, now.access) && !(scoped && other)) return;
            // As for read_vector: somebody else stores the first or last elements of the row
            // beside.
            const bool same_row = record.warp / warps_per_cluster == now.warp / warps_per_cluster;
            const bool foreign = record.access == kVectorRead && !same_row && now.bytes < 16;
            if (poisons && foreign) return void(++relied.foreign);
            // Of transfers also a store after a store, whose bytes the block that has them awaited.
            const bool transfers = record.warp >= warps && now.warp >= warps;
            const bool by_issue = record.access <= kStrongRead || transfers;
            if (!by_issue || record.time > at(warp.clock.issued, record.warp)) report(record, now);
            ++relied.order;
        };
        require_before(cell.write);
        // Atomics before one of its own come before what it does next.
        const auto& list = lists_[cell.list];
        size_t own = list.size();
        const auto is_own = [&](const Record& each) {
            return each.warp == now.warp && each.access >= kBlockAtomic;
        };
        while (own > 0 && !is_own(list[own - 1])) --own;
        for (size_t i = 0; i < list.size(); ++i) {
            if (i >= own || list[i].access < kBlockAtomic) require_before(list[i]);
        }
        if (cell.write.access == kNone) cell.write.access = kWrite;
        if (now.access != kWrite) return add(cell, now, warp);
        cell.write = now;
        lists_[cell.list].clear();
    }

    // Replaces what happened before it, and accesses of the same kind of other lanes.
    void add(Cell& cell, Record now, const Warp& warp) {
        constexpr uint8_t kSeveralLanes = kLanes;
        if (cell.list == 0) {
            cell.list = uint32_t(lists_.size());
            lists_.emplace_back();
        }
        auto& list = lists_[cell.list];
        const uint8_t lane = now.lane;
        std::erase_if(list, [&](const Record& each) {
            if (before(each, warp, lane)) return true;
            const bool same = each.warp == now.warp && each.access == now.access;
            if (same) now.lane = kSeveralLanes;
            return same;
        });
        list.push_back(now);
    }

    [[noreturn]] void report(const Record& record, const Record& now) const {
        const auto text = [&](const Record& each) {
            const char* const names[] = {
                "", "load", "load", "strong load", "store", "atomic of the block", "atomic"};
            if (each.warp >= warps) return std::string("copy or store that arrives later");
            const uint32_t block = each.warp / warps_per_block, warp = each.warp % warps_per_block;
            const std::string who = std::string(names[each.access]) + " of block " +
                                    std::to_string(block) + " warp " + std::to_string(warp);
            return each.lane < kLanes ? who + " lane " + std::to_string(each.lane) : who;
        };
        fail("race: " + text(now) + " with an earlier " + text(record));
    }

    std::map<uint64_t, Range> ranges_{{0, {}}};  // by where they begin; the first is empty
    Range* last_ = &ranges_[0];
    std::vector<std::vector<Record>> lists_{1};  // the first stays empty
    std::unordered_map<uint64_t, Clock> clocks_;
};

}  // namespace ptx
