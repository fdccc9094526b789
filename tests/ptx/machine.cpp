// Runs a grid: which warp goes on, and which of its lanes, is drawn from a seed.
#include <set>

#include "memory.h"

namespace ptx {

// As executor.launch fills it; of ranges there are begin, bytes and granule of each.
struct Launch {
    const Instruction* code;
    const int64_t *initial, *ranges, *blocks;
    uint8_t* parameters;
    const uint8_t* poison;
    char* message;
    int64_t registers, range_count, block_count, parameter_bytes, grid[3], threads, cluster,
        shared_bytes;
    int64_t seed, error_seed, most_instructions, finds_races, poisons, unwritten;
    int64_t executed, at, warp;  // instructions of threads so far, and where
    Relied relied;
};

namespace {

// What a register holds at first, by parser.Kernel.initial: nothing, a constant or one of these.
enum Initial : int64_t { kNothing, kConstant, kThread, kBlockIndex, kGrid = 6, kRank = 9, kSize };

class Grid {
  public:
    explicit Grid(Launch& launch)
        : launch_(launch), warps_per_block_(uint32_t((launch.threads + kLanes - 1) / kLanes)) {
        error_seed = uint64_t(launch.error_seed), nans = 0;
        memory_.random.seed(uint64_t(launch.seed));
        memory_.warps_per_block = warps_per_block_;
        memory_.finds_races = launch.finds_races;
        memory_.poisons = launch.poisons, memory_.unwritten = launch.unwritten;
        memory_.delays_stores = launch.seed != 0;
        memory_.parameters = {0, uint64_t(launch.parameter_bytes), 1, launch.parameters, {}};
        memory_.poison = launch.poison;
        for (int64_t i = 0; i < launch.range_count; ++i) {
            const int64_t* const range = launch.ranges + 3 * i;
            memory_.map(uint64_t(range[0]), uint64_t(range[1]), uint64_t(range[2]));
        }
    }

    void run() {
        const auto size = uint32_t(launch_.cluster);
        const auto blocks = uint32_t(launch_.block_count);
        std::vector<uint32_t> order(blocks / size);
        for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
        if (launch_.seed) std::shuffle(order.begin(), order.end(), memory_.random);
        memory_.warps = blocks * warps_per_block_;
        memory_.warps_per_cluster = size * warps_per_block_;
        for (size_t started = 0; started < order.size() || !resident_.empty();) {
            while (started < order.size() && resident_.size() < kResident) {
                start(order[started++]);
            }
            auto& chosen = resident_[draw(resident_.size())];
            arrive(*chosen, false);
            if (Warp* const warp = runnable(*chosen)) {
                run_for_a_while(*warp);
            } else if (!chosen->transfers.empty()) {
                complete_one(*chosen);
            } else {
                require_end(*chosen);
                arrive(*chosen, true);
                std::swap(chosen, resident_.back());
                resident_.pop_back();
            }
        }
        launch_.relied = memory_.relied;
    }

  private:
    size_t draw(size_t n) { return launch_.seed ? memory_.random() % n : 0; }

    // Stores become visible, and transfers complete: some, or all stores.
    void arrive(Cluster& cluster, bool all) {
        if (!memory_.delays_stores) return;
        for (auto& block : cluster.blocks) memory_.settle(*block, all);
        while (!cluster.transfers.empty() && draw(4) == 0) complete_one(cluster);
    }

    void complete_one(Cluster& cluster) {
        Transfer& last = cluster.transfers.back();
        std::swap(cluster.transfers[draw(cluster.transfers.size())], last);
        launch_.at = last.as.instruction, launch_.warp = last.sent_by;
        memory_.complete_last(cluster);
    }

    void start(uint32_t index) {
        Cluster& cluster = *resident_.emplace_back(std::make_unique<Cluster>());
        for (uint32_t rank = 0; rank < uint32_t(launch_.cluster); ++rank) {
            Block& block = *cluster.blocks.emplace_back(std::make_unique<Block>());
            block.cluster = &cluster, block.rank = rank;
            start(block, index * uint32_t(launch_.cluster) + rank);
        }
    }

    void start(Block& block, uint32_t index) {
        const auto x = uint32_t(launch_.grid[0]), y = uint32_t(launch_.grid[1]);
        const auto place = uint32_t(launch_.blocks[index]);
        block.index[0] = place % x, block.index[1] = place / x % y, block.index[2] = place / x / y;
        const auto bytes = size_t(launch_.shared_bytes);
        block.bytes.resize(bytes);
        for (size_t i = 0; i < bytes; ++i) block.bytes[i] = launch_.poison[i % 8];
        block.shared = {0, bytes, 1, block.bytes.data(), std::vector<Cell>(bytes)};
        block.warps.resize(warps_per_block_);
        for (uint32_t i = 0; i < warps_per_block_; ++i) {
            block.warps[i].number = index * warps_per_block_ + i;
            start(block, block.warps[i], i * kLanes);
        }
    }

    void start(Block& block, Warp& warp, int64_t first) {
        warp.block = &block;
        warp.clock.assign(memory_.warps, 0);
        for (int lane = 0; lane < kLanes; ++lane) {
            const bool exists = first + lane < launch_.threads;
            warp.next[lane] = exists ? 0 : kReturned;
            warp.alive |= Mask(exists) << lane;
        }
        warp.values.resize(size_t(launch_.registers) * kLanes);
        warp.written.assign(size_t(launch_.registers), kAllLanes);
        for (int64_t i = 0; i < launch_.registers; ++i) {
            const int64_t kind = launch_.initial[2 * i];
            int64_t value = launch_.initial[2 * i + 1];
            if (kind == kNothing) warp.written[size_t(i)] = 0;
            if (kind >= kBlockIndex) value = block.index[(kind - kBlockIndex) % 3];
            if (kind >= kGrid) value = launch_.grid[(kind - kGrid) % 3];
            if (kind == kRank) value = block.rank;
            if (kind == kSize) value = launch_.cluster;
            for (int lane = 0; lane < kLanes; ++lane) {
                warp.lanes_of(i)[lane] = uint64_t(kind == kThread ? first + lane : value);
            }
        }
    }

    Warp* runnable(Cluster& cluster) {
        const size_t first = draw(cluster.blocks.size() * warps_per_block_);
        for (size_t i = 0; i < cluster.blocks.size() * warps_per_block_; ++i) {
            const size_t each = (first + i) % (cluster.blocks.size() * warps_per_block_);
            Warp& warp = cluster.blocks[each / warps_per_block_]->warps[each % warps_per_block_];
            if (!warp.alive || !goes_on(cluster, warp)) continue;
            warp.block->started = true;
            return &warp;
        }
        return nullptr;
    }

    static bool goes_on(const Cluster& cluster, Warp& warp) {
        if (warp.wait == Wait::kBlock) return false;
        if (warp.wait == Wait::kPhase && warp.phases->phase == warp.phase) return false;
        if (warp.wait == Wait::kCluster) {
            if (cluster.phase < warp.cluster_phase) return false;
            join(warp.clock, cluster.known);
            warp.synchronised = warp.time();
        }
        warp.wait = Wait::kNothing;
        return true;
    }

    // No warp can go on: all must have returned.
    void require_end(const Cluster& cluster) {
        const char* const names[] = {"", "at barrier ", "at the barrier of the cluster",
                                     "for a phase of the barrier at "};
        std::string waiting;
        for (const auto& block : cluster.blocks) {
            for (const Warp& warp : block->warps) {
                if (!warp.alive) continue;
                launch_.warp = warp.number, launch_.at = warp.instruction;
                if (waiting.size() > 200) continue;
                waiting += "; warp " + std::to_string(warp.number) + " " + names[int(warp.wait)];
                if (warp.wait != Wait::kCluster) waiting += std::to_string(warp.waits_at);
            }
            const auto of_block = [](const Warp& each) { return each.wait == Wait::kBlock; };
            const auto returned = [](const Warp& each) { return !each.alive; };
            const auto& warps = block->warps;
            const auto missing = std::find_if(warps.begin(), warps.end(), returned);
            if (missing != warps.end() && std::any_of(warps.begin(), warps.end(), of_block)) {
                launch_.warp = missing->number;
                fail("has returned while other warps wait at a barrier");
            }
        }
        if (!waiting.empty()) fail("deadlock" + waiting);
    }

    // A few instructions of a warp, or many, so that warps overtake each other.
    void run_for_a_while(Warp& warp) {
        launch_.warp = warp.number;
        const size_t most = launch_.seed ? 1 + draw(draw(4) ? 16 : 400) : ~size_t{0};
        for (size_t i = 0; i < most && warp.alive && warp.wait == Wait::kNothing; ++i) {
            execute(warp, choose(warp));
        }
    }

    static Mask lanes_at(const Warp& warp, uint32_t place) {
        Mask lanes = 0;
        for_lanes(kAllLanes, [&](int i) { lanes |= Mask(warp.next[i] == place) << i; });
        return lanes;
    }

    // Of lanes that have diverged, mostly those that are furthest behind go on. Lanes at a
    // collective instruction wait for the others.
    Mask choose(Warp& warp) {
        const uint32_t behind = *std::min_element(warp.next, warp.next + kLanes);
        if (const Mask lanes = lanes_at(warp, behind); lanes == warp.alive) return lanes;
        std::set<uint32_t> set(warp.next, warp.next + kLanes);
        set.erase(kReturned);
        const std::vector<uint32_t> places(set.begin(), set.end());
        const size_t first = draw(8) ? 0 : draw(places.size());
        for (size_t i = 0; i < places.size(); ++i) {
            const uint32_t place = places[(first + i) % places.size()];
            const Mask lanes = lanes_at(warp, place);
            if ((needed(warp, launch_.code[place], lanes) & ~lanes) == 0) return lanes;
        }
        launch_.at = places[0];
        fail("waits for lanes that wait elsewhere, at instruction " + std::to_string(places[1]));
    }

    // Lanes without which an instruction does not begin.
    static Mask needed(Warp& warp, const Instruction& in, Mask lanes) {
        if (in.operation->kind != Kind::kCollective) return 0;
        if (in.participants < 0) return warp.alive;
        return Mask(warp.known(in.participants, lanes, "a mask of lanes")[std::countr_zero(lanes)]);
    }

    void execute(Warp& warp, Mask lanes) {
        const uint32_t place = warp.next[std::countr_zero(lanes)];
        const Instruction& in = launch_.code[place];
        launch_.at = warp.instruction = place;
        for_lanes(lanes, [&](int lane) { warp.next[lane] = place + 1; });
        if (in.predicate >= 0) {
            const uint64_t* const values = warp.known(in.predicate, lanes, "a predicate");
            Mask mask = 0;
            for_lanes(lanes, [&](int lane) { mask |= Mask(values[lane] & 1) << lane; });
            lanes &= in.negated ? ~mask : mask;
        }
        ++warp.clock[warp.number];
        launch_.executed += std::popcount(lanes);
        if (launch_.executed > launch_.most_instructions) fail("does not end");
        if (lanes == 0) return;
        if (in.operation->kind == Kind::kBranch) {
            for_lanes(lanes, [&](int lane) { warp.next[lane] = uint32_t(in.target); });
            if (uint32_t(in.target) != kReturned) return;
            warp.alive &= ~lanes;
            if (warp.alive) return;
            warp.block->cluster->open();
            warp.block->cluster->leave(*warp.block);
            return;
        }
        const Mask named = needed(warp, in, lanes);
        if (named & ~warp.alive) fail("its mask names lanes that have returned, or are none");
        if (named & ~lanes) fail("lanes that take part do not execute it");
        if (named && lanes & ~named) fail("executed by lanes that its mask does not name");
        in.operation->execute(memory_, warp, in, lanes);
    }

    static constexpr size_t kResident = 3;  // clusters at once
    Launch& launch_;
    Memory memory_;
    uint32_t warps_per_block_;
    std::vector<std::unique_ptr<Cluster>> resident_;
};

// All warps of the block wait for each other, or as many threads as the second source says: those
// that are aligned (bar.sync) come here together with all others of the block.
template <bool kAligned>
void meet_block(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
    const auto source = [&](int i, uint64_t otherwise) {
        if (in.from[i] < 0) return otherwise;
        return warp.known(in.from[i], lanes, "a barrier")[std::countr_zero(lanes)];
    };
    auto& warps = warp.block->warps;
    const uint64_t number = source(0, 0);
    const auto expected = uint32_t(source(1, kLanes * warps.size()));
    Meeting& meeting = warp.block->meetings[number];
    if (meeting.arrived && meeting.expected != expected) fail("others expect another number");
    if (number > 15 || expected % kLanes || expected == 0) fail("no such barrier");
    if (kAligned && expected != kLanes * warps.size()) fail("aligned, but not for all threads");
    meeting.expected = expected;
    meeting.arrived += kLanes;
    warp.wait = Wait::kBlock;
    warp.waits_at = number;
    if (meeting.arrived < expected) return;
    meeting = {};
    const auto waits = [&](Warp& each) {
        return each.alive && each.wait == Wait::kBlock && each.waits_at == number;
    };
    Clock all;
    for (Warp& each : warps) {
        if (waits(each)) join(all, each.clock);
    }
    for (Warp& each : warps) {
        if (!waits(each)) continue;
        each.wait = Wait::kNothing;
        each.clock = all;
        each.synchronised = each.time();
    }
}

void meet_warp(Memory&, Warp& warp, const Instruction&, Mask lanes) {
    if (lanes == warp.alive) warp.synchronised = warp.time();
}

}  // namespace
}  // namespace ptx

extern "C" {

// The address of an operation on as many sources, 0 for an unknown one.
const void* ptx_operation(const char* name, int64_t sources) {
    auto& all = ptx::operations();
    if (all.empty()) {
        ptx::define_arithmetic(), ptx::define_memory_operations();
        ptx::define_cluster_operations();
        all["bra"] = {ptx::Kind::kBranch, nullptr};
        all["bar.sync"] = {ptx::Kind::kCollective, ptx::meet_block<true>};
        all["barrier.sync"] = {ptx::Kind::kCollective, ptx::meet_block<false>};
        all["bar.warp.sync"] = {ptx::Kind::kCollective, ptx::meet_warp};
    }
    const auto found = all.find(name);
    if (found == all.end()) return nullptr;
    const int64_t takes = found->second.sources;
    return takes < 0 || takes == sources ? &found->second : nullptr;
}

// Returns whether the message says what went wrong.
int ptx_run(ptx::Launch* launch) {
    try {
        ptx::Grid(*launch).run();
        return 0;
    } catch (const std::exception& failure) {
        std::snprintf(launch->message, 400, "%s", failure.what());
        return 1;
    }
}
}
