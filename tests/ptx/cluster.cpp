// Instructions of blocks in a cluster: barriers in shared memory, copies and stores that complete
// on them, and the barrier of the cluster. An address in another block has its rank, plus 1, above
// the offset.
#include <utility>

#include "memory.h"

namespace ptx {
namespace {

constexpr int kOffsetBits = 24;
constexpr uint64_t kOffset = (1 << kOffsetBits) - 1;

// Of a source that is the same in all lanes.
uint64_t uniform(Warp& warp, int64_t index, Mask lanes, const char* use) {
    const uint64_t* const values = warp.known(index, lanes, use);
    const uint64_t value = values[std::countr_zero(lanes)];
    for_lanes(lanes, [&](int lane) {
        if (values[lane] != value) fail(std::string("lanes differ in ") + use);
    });
    return value;
}

PhaseBarrier& barrier_at(Block& block, uint64_t address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("no barrier was initialised there");
    return found->second;
}

// An access to the 8 bytes of a barrier, which others may access at the same time.
PhaseBarrier& touch(Memory& memory, Warp& warp, int lane, uint64_t address) {
    memory.access(warp, lane, kShared, address, 8, kAtomic);
    return barrier_at(*warp.block, address);
}

uint32_t thread(const Warp& warp, int lane) { return warp.number * kLanes + uint32_t(lane); }

void init(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const addresses = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const counts = warp.known(in.from[1], lanes, "a count");
    for_lanes(lanes, [&](int lane) {
        const uint64_t address = addresses[lane], nothing = 0;
        const auto count = uint32_t(counts[lane]);
        if (count == 0 || count >= 1 << 20) fail("a count out of range");
        const PhaseBarrier made{memory.warps + memory.slots++, count, count, 0, thread(warp, lane)};
        if (!warp.block->barriers.emplace(address, made).second) fail("initialised twice");
        memory.store(warp, lane, kShared, address, 8, kWrite, &nothing);
        for (int i = 0; i < 8; ++i) {
            warp.block->shared.cells[address + uint64_t(i)].write.of_barrier = true;
        }
    });
}

// Of the barriers that the same thread initialised.
void fence_init(Memory&, Warp& warp, const Instruction&, Mask lanes) {
    for (auto& [address, barrier] : warp.block->barriers) {
        for_lanes(lanes, [&](int lane) { barrier.fenced |= barrier.thread == thread(warp, lane); });
    }
}

// Where some lanes arrive, they release what the warp has done until its lanes last met.
template <bool kExpects>
void arrive(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const addresses = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const bytes = kExpects ? warp.known(in.from[1], lanes, "a size") : nullptr;
    Clock released = warp.clock;
    if (lanes != warp.alive) released[warp.number] = warp.synchronised;
    for_lanes(lanes, [&](int lane) {
        const int64_t expected = kExpects ? int64_t(uint32_t(bytes[lane])) : 0;
        touch(memory, warp, lane, addresses[lane]).update(1, expected, released, true);
    });
}

// Sometimes gives up although the phase has ended.
void try_wait(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t address = uniform(warp, in.from[0], lanes, "an address");
    const uint64_t parity = uniform(warp, in.from[1], lanes, "a parity");
    if (parity > 1) fail("a parity other than 0 and 1");
    PhaseBarrier& barrier = touch(memory, warp, std::countr_zero(lanes), address);
    const bool ended = (barrier.phase & 1) != parity;
    const bool gives_up = memory.delays_stores && memory.random() % 8 == 0;
    if (ended && !gives_up) {
        const Clock& known = in.flags & kCluster ? barrier.of_cluster : barrier.of_block;
        join(warp.clock, known);
        warp.synchronised = std::max(warp.synchronised, at(known, warp.number));
        // A wait for a phase two before may see the end of this one. Who has waited for each phase
        // should not miss any.
        auto& [seen, in_turn] = barrier.seen[warp.number];
        if (in_turn > 1 && barrier.phase > seen + 2) fail("waits for a phase long before");
        in_turn = barrier.phase <= seen + 1 ? in_turn + (barrier.phase - seen) : 0;
        seen = barrier.phase;
        barrier.awaited = true;
    } else if (!ended && lanes == warp.alive) {
        warp.wait = Wait::kPhase;
        warp.waits_at = address;
        warp.phases = &barrier;
        warp.phase = barrier.phase;
    }
    warp.write(in.to[0], lanes, kAllLanes, [&](int) { return ended && !gives_up; });
}

void send(Memory& memory, Warp& warp, uint64_t to, uint64_t barrier, Transfer transfer) {
    Block* target = warp.block;
    if (const uint64_t rank = to >> kOffsetBits) {
        if (rank > target->cluster->blocks.size()) fail("an address in no block");
        target = target->cluster->blocks[rank - 1].get();
    }
    if (!target->started) fail("its target may not have begun");
    if (to >> kOffsetBits != barrier >> kOffsetBits) fail("its barrier is in another block");
    const uint64_t size = transfer.copies ? 16 : transfer.bytes;
    if (to % size || barrier % 8 || (to & kOffset) + transfer.bytes > target->bytes.size()) {
        fail("misaligned or out of bounds");
    }
    transfer.as.block = target;
    transfer.as.clock = warp.clock;
    transfer.as.instruction = warp.instruction;
    transfer.sent_by = warp.number;
    transfer.from_block = target == warp.block;
    transfer.to = to & kOffset, transfer.barrier = barrier & kOffset;
    target->cluster->transfers.push_back(std::move(transfer));
    if (!memory.delays_stores) memory.complete_last(*target->cluster);
}

void store_later(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const to = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const barriers = warp.known(in.from[1 + in.vector], lanes, "an address");
    if (warp.block->cluster->blocks.size() == 1) fail("undefined in a cluster of one block");
    for_lanes(lanes, [&](int lane) {
        Transfer transfer{};
        for (int i = 0; i < in.vector; ++i) {
            const uint64_t value = warp.known(in.from[1 + i], lanes, "a value to store")[lane];
            std::memcpy(transfer.values + i * in.bytes, &value, size_t(in.bytes));
        }
        transfer.bytes = uint64_t(in.bytes * in.vector);
        send(memory, warp, to[lane], barriers[lane], std::move(transfer));
    });
}

void copy_later(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const to = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const from = warp.known(in.from[1], lanes, "an address");
    const uint64_t* const bytes = warp.known(in.from[2], lanes, "a size");
    const uint64_t* const barriers = warp.known(in.from[3], lanes, "an address");
    for_lanes(lanes, [&](int lane) {
        Transfer transfer{};
        transfer.copies = true;
        transfer.from = from[lane], transfer.bytes = uint32_t(bytes[lane]);
        const bool whole = (to[lane] | from[lane] | transfer.bytes) % 16 == 0;
        if (!whole || transfer.bytes == 0) fail("no multiple of 16 bytes");
        send(memory, warp, to[lane], barriers[lane], std::move(transfer));
    });
}

// In an address of the block itself the rank may be left out.
void map_address(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const addresses = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const ranks = warp.known(in.from[1], lanes, "a rank");
    for_lanes(lanes, [&](int lane) {
        if (ranks[lane] >= warp.block->cluster->blocks.size()) fail("a rank of no block");
    });
    warp.write(in.to[0], lanes, kAllLanes, [&](int lane) {
        return (ranks[lane] + 1) << kOffsetBits | (addresses[lane] & kOffset);
    });
}

void arrive_in_cluster(Memory& memory, Warp& warp, const Instruction&, Mask) {
    Cluster& cluster = *warp.block->cluster;
    if (std::exchange(warp.arrived, true)) fail("has arrived before");
    warp.cluster_phase = cluster.phase + 1;
    memory.settle(*warp.block, true);
    join(cluster.gathered, warp.clock);
    cluster.open();
}

void wait_in_cluster(Memory&, Warp& warp, const Instruction&, Mask) {
    if (!std::exchange(warp.arrived, false)) fail("has not arrived");
    warp.wait = Wait::kCluster;
}

}  // namespace

// Stricter than PTX says: a block stays until what it has sent has arrived, too.
void Cluster::leave(const Block& block) const {
    if (!block.returned()) return;
    for (const Transfer& each : transfers) {
        const uint32_t sender = each.sent_by / uint32_t(block.warps.size());
        if (each.as.block == &block || sender == block.warps[0].number / block.warps.size()) {
            fail("has returned while a copy or store is on its way");
        }
    }
}

// The last arrival, or the return of who has not arrived, ends a phase.
void Cluster::open() {
    bool arrived = false;
    for (const auto& block : blocks) {
        for (const Warp& warp : block->warps) {
            if (warp.alive && warp.cluster_phase == phase) return;
            arrived |= warp.cluster_phase > phase;
        }
    }
    if (!arrived) return;
    ++phase;
    known = std::move(gathered);
    gathered.clear();
}

// A transfer happens after what the warp that sent it had done before, but its completion releases
// its own bytes alone. All that complete in a phase of a barrier have one time in clocks, and lanes
// of their own.
void Memory::complete_last(Cluster& cluster) {
    Transfer transfer = std::move(cluster.transfers.back());
    cluster.transfers.pop_back();
    Warp& as = transfer.as;
    PhaseBarrier& barrier = barrier_at(*as.block, transfer.barrier);
    if (!barrier.fenced) fail("its barrier was initialised without a fence");
    if (as.block->returned()) fail("arrives in a block that has returned");
    as.number = barrier.slot;
    as.synchronised = at(as.clock, as.number);
    Clock now(as.number + 1);
    now[as.number] = barrier.phase + 1;
    if (!transfer.copies) {
        now.issued = as.clock.issued;
        join(now.issued, as.clock);
    }
    join(as.clock, now);
    const int lane = int(random() % kLanes);
    if (!transfer.copies) {
        store(as, lane, kShared, transfer.to, transfer.bytes, kWrite, transfer.values);
    }
    for (uint64_t i = 0; transfer.copies && i < transfer.bytes; i += 16) {
        uint8_t vector[16];
        read_vector(as, lane, transfer.from + i, vector);
        store(as, lane, kShared, transfer.to + i, 16, kWrite, vector);
    }
    touch(*this, as, lane, transfer.barrier);
    barrier.update(0, -int64_t(transfer.bytes), now, transfer.from_block);
}

void define_cluster_operations() {
    auto& all = operations();
    all["mbarrier.init"] = {Kind::kPlain, init};
    all["mbarrier.arrive"] = {Kind::kPlain, arrive<false>};
    all["mbarrier.arrive.expect_tx"] = {Kind::kPlain, arrive<true>};
    all["mbarrier.try_wait"] = {Kind::kPlain, try_wait};
    all["fence.mbarrier_init"] = {Kind::kPlain, fence_init};
    all["cp.async.bulk"] = {Kind::kPlain, copy_later};
    all["st.async"] = {Kind::kPlain, store_later};
    all["mapa"] = {Kind::kPlain, map_address};
    all["barrier.cluster.arrive"] = {Kind::kCollective, arrive_in_cluster};
    all["barrier.cluster.wait"] = {Kind::kCollective, wait_in_cluster};
}

}  // namespace ptx
