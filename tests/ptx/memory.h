// Memory with a shadow that remembers who accessed what, and when by the clocks: every access is
// checked for its range, its alignment, whether somebody wrote there before, and for races.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_map>

#include "machine.h"

namespace ptx {

// Of memory that nobody wrote: NaN in every format, and nothing that arithmetic returns. By address
// modulo 8.
constexpr uint8_t kPoison[16] = {0xad, 0x7f, 0xa5, 0xff, 0xbe, 0x7f, 0xf5, 0xff,
                                 0xad, 0x7f, 0xa5, 0xff, 0xbe, 0x7f, 0xf5, 0xff};

enum Access : uint8_t { kNone, kRead, kStrongRead, kWrite, kBlockAtomic, kAtomic };

// One access of one lane. Equal serials, of 16 bits, tell lanes of one instruction.
struct Record {
    static constexpr uint8_t kSeveralLanes = kLanes;
    uint32_t warp = 0, time = 0;
    uint16_t serial = 0;
    uint8_t lane = 0;
    Access access = kNone;
};

// The last write of a place, and what has happened since that does not exclude each other: reads,
// or atomics. One of them is here, the others are in a list.
struct Cell {
    Record write, last;
    uint32_t list = 0;
};

struct Range {
    uint64_t begin, bytes;
    uint32_t granule;  // bytes of an element, of which every access covers whole ones
    uint32_t padding;
    std::vector<Cell>* shadow;
};

inline bool exclude(Access a, Access b) {
    const bool reads_a = a <= kStrongRead, reads_b = b <= kStrongRead;
    if (reads_a && reads_b) return false;
    return a == kRead || b == kRead || a == kWrite || b == kWrite;
}

class Memory {
  public:
    bool finds_races = true;
    bool delays_stores = false;
    std::mt19937_64 random;
    std::span<const uint8_t> parameters;
    uint32_t warps_per_block = 1;

    void map(std::span<const Range> ranges) {
        shadows_.resize(ranges.size());
        ranges_.assign(ranges.begin(), ranges.end());
        for (size_t i = 0; i < ranges_.size(); ++i) {
            shadows_[i].resize(ranges_[i].bytes / ranges_[i].granule);
            ranges_[i].shadow = &shadows_[i];
        }
        std::sort(ranges_.begin(), ranges_.end(),
                  [](const Range& a, const Range& b) { return a.begin < b.begin; });
    }

    // The bytes at an address, after all checks of one lane's access.
    uint8_t* access(Warp& warp, int lane, int32_t space, uint64_t address, uint32_t bytes,
                    Access kind, const uint8_t* stored = nullptr) {
        if (address % bytes != 0) fail_at(lane, "misaligned", space, address, bytes);
        if (space == kParameter) {
            if (address + bytes > parameters.size()) {
                fail_at(lane, "out of bounds", space, address, bytes);
            }
            return const_cast<uint8_t*>(&parameters[address]);
        }
        if (space == kShared) {
            Block& block = *warp.block;
            if (address + bytes > block.shared.size()) {
                fail_at(lane, "out of bounds", space, address, bytes);
            }
            uint8_t* const place = &block.shared[address];
            for (uint32_t i = 0; i < bytes; ++i) {
                Cell& cell = block.shadow[address + i];
                if (kind != kWrite && cell.write.access == kNone) {
                    fail_at(lane, "reads what was never written", space, address, bytes);
                }
                // Where warps hold copies of a value they all store it: to store what is there
                // changes nothing, but has to come before what is stored next.
                const bool same = stored && cell.write.access != kNone && stored[i] == place[i];
                check(cell, warp, lane, kind, same, same);
            }
            return place;
        }
        const Range& range = range_of(lane, address, bytes);
        auto* const place = reinterpret_cast<uint8_t*>(address);
        if (bytes % range.granule != 0) fail_at(lane, "part of an element", space, address, bytes);
        if (!warp.block->pending.empty()) settle(*warp.block, address, bytes);
        const uint64_t first = (address - range.begin) / range.granule;
        const auto equal = [&](uint32_t i, const uint8_t* other) {
            return std::memcmp(place + i, other, range.granule) == 0;
        };
        for (uint32_t i = 0; i < bytes; i += range.granule) {
            Cell& cell = (*range.shadow)[first + i / range.granule];
            check(cell, warp, lane, kind, stored && equal(i, stored + i));
            if (kind != kWrite && never_written(range, address + i)) {
                fail_at(lane, "reads what was never written", space, address, bytes);
            }
        }
        return place;
    }

    void store(Warp& warp, int lane, int32_t space, uint64_t address, uint32_t bytes, Access kind,
               const uint8_t* data) {
        uint8_t* const place = access(warp, lane, space, address, bytes, kind, data);
        if (space == kGlobal && delays_stores && kind == kWrite) {
            Pending& pending = warp.block->pending.emplace_back(Pending{address, bytes, {}});
            std::memcpy(pending.data, data, bytes);
        } else {
            std::memcpy(place, data, bytes);
        }
    }

    // Some stores of a block, or all, become visible to the others.
    void settle(Block& block, bool all) {
        while (!block.pending.empty() && (all || random() % 4 == 0)) {
            settle_one(block, random() % block.pending.size());
        }
    }

    // Orders a warp before or after others through the clock that a place carries.
    void synchronise(Warp& warp, uint64_t address, int32_t flags, bool reads, bool writes) {
        Clock& of_place = clocks_[address];
        if (reads) join(flags & kAcquire ? warp.clock : warp.observed, of_place);
        if (!writes) return;
        if (!reads) of_place.clear();  // a store begins a new sequence, an atomic continues one
        if (flags & kRelease) {
            settle(*warp.block, true);
            join(of_place, warp.clock);
            warp.tick();
        } else {
            join(of_place, warp.published);
        }
    }

    void fence(Warp& warp) {
        settle(*warp.block, true);
        join(warp.clock, warp.observed);
        warp.observed.clear();
        warp.published = warp.clock;
        warp.tick();
    }

  private:
    [[noreturn]] static void fail_at(int lane, const char* what, int32_t space, uint64_t address,
                                     uint32_t bytes) {
        const char* const names[] = {"global", "shared", "parameter"};
        char text[200];
        std::snprintf(text, sizeof text, "lane %d: %s: %u bytes at %s address 0x%llx", lane, what,
                      bytes, names[space], (unsigned long long)address);
        fail(text);
    }

    const Range& range_of(int lane, uint64_t address, uint32_t bytes) {
        const auto holds = [=](const Range& range) {
            return address >= range.begin && address + bytes <= range.begin + range.bytes;
        };
        if (last_ < ranges_.size() && holds(ranges_[last_])) return ranges_[last_];
        const auto after = std::upper_bound(
            ranges_.begin(), ranges_.end(), address,
            [](uint64_t value, const Range& range) { return value < range.begin; });
        if (after == ranges_.begin() || !holds(*(after - 1))) {
            fail_at(lane, "in no tensor", kGlobal, address, bytes);
        }
        last_ = size_t(after - ranges_.begin()) - 1;
        return ranges_[last_];
    }

    // Of bytes also those around them, because any of them may be a value.
    static bool never_written(const Range& range, uint64_t address) {
        uint64_t begin = address, bytes = range.granule;
        if (bytes == 1) {
            begin = std::max(address & ~uint64_t{7}, range.begin);
            bytes = std::min(begin + 8, range.begin + range.bytes) - begin;
        }
        return !std::memcmp(reinterpret_cast<const void*>(begin), kPoison + begin % 8, bytes);
    }

    // Before the block itself accesses these bytes; so pending stores never overlap.
    static void settle(Block& block, uint64_t address, uint32_t bytes) {
        for (size_t i = block.pending.size(); i-- > 0;) {
            const Pending& each = block.pending[i];
            if (each.address < address + bytes && address < each.address + each.bytes) {
                settle_one(block, i);
            }
        }
    }

    static void settle_one(Block& block, size_t index) {
        std::swap(block.pending[index], block.pending.back());
        const Pending& store = block.pending.back();
        std::memcpy(reinterpret_cast<void*>(store.address), store.data, store.bytes);
        block.pending.pop_back();
    }

    // Whether what is recorded happened before what a lane does now.
    static bool before(const Record& record, const Warp& warp, int lane) {
        if (record.warp != warp.number) return record.time <= warp.clock[record.warp];
        if (record.lane == lane || record.time < warp.synchronised) return true;
        // A load is complete before the warp exchanges registers, as lanes that diverged meet there
        // and accesses of a warp are issued in order.
        return record.access == kRead && record.time < warp.exchanged;
    }

    void check(Cell& cell, Warp& warp, int lane, Access kind, bool same_value,
               bool changes_nothing = false) {
        if (!finds_races) {
            cell.write.access = std::max(cell.write.access, kind >= kWrite ? kWrite : kNone);
            return;
        }
        const Record now{warp.number, warp.time(), uint16_t(warp.executed), uint8_t(lane), kind};
        const auto require_before = [&](const Record& record) {
            if (record.access == kNone || before(record, warp, lane)) return;
            const bool together = record.warp == now.warp && record.serial == now.serial;
            if (together && same_value) return;  // lanes of one store
            const bool scoped = record.access == kBlockAtomic || kind == kBlockAtomic;
            const bool other = record.warp / warps_per_block != now.warp / warps_per_block;
            if (exclude(record.access, kind) || (scoped && other)) report(record, now);
        };
        if (changes_nothing) {
            add(cell, {now.warp, now.time, now.serial, now.lane, kRead}, warp);
            return;
        }
        require_before(cell.write);
        require_before(cell.last);
        if (cell.list != 0) {
            for (const Record& record : lists_[cell.list]) require_before(record);
        }
        if (kind == kWrite) {
            cell.write = now;
            cell.last.access = kNone;
            if (cell.list != 0) lists_[cell.list].clear();
            return;
        }
        if (kind >= kBlockAtomic && cell.write.access == kNone) cell.write.access = kWrite;
        add(cell, now, warp);
    }

    // Replaces what happened before it, or another lane's access of the same kind.
    void add(Cell& cell, const Record& now, const Warp& warp) {
        Record& last = cell.last;
        if (last.access == now.access && last.warp == now.warp) {
            const uint8_t lane = last.lane == now.lane || before(last, warp, now.lane)
                                     ? now.lane
                                     : Record::kSeveralLanes;
            last = now;
            last.lane = lane;
            return;
        }
        if (last.access != kNone && !before(last, warp, now.lane)) {
            if (cell.list == 0) {
                cell.list = uint32_t(lists_.size());
                lists_.emplace_back();
            }
            auto& list = lists_[cell.list];
            std::erase_if(list, [&](const Record& record) {
                return record.warp == last.warp && record.access == last.access;
            });
            list.push_back(last);
        }
        last = now;
    }

    [[noreturn]] void report(const Record& record, const Record& now) const {
        const auto text = [&](const Record& each) {
            const char* const names[] = {
                "", "load", "strong load", "store", "atomic of the block", "atomic"};
            const uint32_t block = each.warp / warps_per_block, warp = each.warp % warps_per_block;
            std::string who = "block " + std::to_string(block) + " warp " + std::to_string(warp);
            if (each.lane < kLanes) who += " lane " + std::to_string(each.lane);
            return std::string(names[each.access]) + " of " + who;
        };
        fail("race: " + text(now) + " with an earlier " + text(record));
    }

    std::vector<Range> ranges_;
    std::vector<std::vector<Cell>> shadows_;
    std::vector<std::vector<Record>> lists_{1};
    std::unordered_map<uint64_t, Clock> clocks_;
    size_t last_ = 0;
};

}  // namespace ptx
