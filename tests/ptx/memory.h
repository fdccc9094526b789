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

enum Access : uint8_t { kNone, kRead, kStrongRead, kWrite, kBlockAtomic, kAtomic };

inline bool exclude(Access a, Access b) {
    const bool plain = a == kRead || b == kRead || a == kWrite || b == kWrite;
    return plain && (a >= kWrite || b >= kWrite);
}

// One access of one lane, or of several lanes of a warp.
struct Record {
    uint32_t warp = 0, time = 0, instruction = 0;
    uint8_t lane = 0;
    Access access = kNone;
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

struct Block {
    uint32_t index[3];
    std::vector<Warp> warps;
    std::vector<uint8_t> bytes;
    Range shared;
    std::vector<Pending> pending;
};

class Memory {
  public:
    bool finds_races = true, delays_stores = false;
    uint32_t warps_per_block = 1;
    std::mt19937_64 random;
    Range parameters;

    // Memory that holds the pattern of 8 bytes at `poison`, given twice, was never written.
    void map(uint64_t begin, uint64_t bytes, uint64_t granule, const uint8_t* poison) {
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
        for (uint64_t i = 0; i < bytes; i += range.granule) {
            Cell& cell = range.cells[(offset + i) / range.granule];
            const bool written = cell.write.access != kNone;
            if (!stored && !written) fault("reads what was never written");
            const Record now{warp.number, warp.time(), warp.instruction, uint8_t(lane), kind};
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
        if (record.warp != warp.number) return record.time <= warp.clock[record.warp];
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
            if (exclude(record.access, now.access) || (scoped && other)) report(record, now);
        };
        require_before(cell.write);
        for (const Record& record : lists_[cell.list]) require_before(record);
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
                "", "load", "strong load", "store", "atomic of the block", "atomic"};
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
