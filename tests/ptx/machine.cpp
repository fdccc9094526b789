// Runs a grid: which warp goes on, and which of its lanes, is drawn from a seed.
#include <memory>

#include "machine_state.h"
#include "numbers.h"

namespace ptx {

// As ctypes lays it out (executor.py).
struct Launch {
    const Instruction* code;
    int32_t instructions, registers, constants, first_special;
    const uint64_t* values;  // of the constants
    const uint8_t* parameters;
    const Range* ranges;
    int32_t parameter_bytes, range_count;
    uint32_t grid[3], threads, shared_bytes, resident;
    uint64_t seed, error_seed, most_instructions;
    int32_t finds_races, padding;
};

struct Outcome {
    uint64_t warp_instructions, lane_instructions;
    int32_t instruction, block, warp, padding;
    char message[400];
};

namespace {

// Registers of the kernel, then constants, then these, in the order of executor.SPECIAL.
constexpr int kSpecials = 10;

class Grid {
  public:
    Grid(const Launch& launch, Outcome& outcome) : launch_(launch), outcome_(outcome) {
        machine_.code = {launch.code, size_t(launch.instructions)};
        machine_.random.seed(launch.seed);
        machine_.memory.random.seed(launch.seed + 1);
        machine_.memory.finds_races = launch.finds_races;
        machine_.memory.delays_stores = launch.seed != 0;
        machine_.memory.parameters = {launch.parameters, size_t(launch.parameter_bytes)};
        warps_per_block_ = (launch.threads + kLanes - 1) / kLanes;
        machine_.memory.warps_per_block = warps_per_block_;
        machine_.memory.map({launch.ranges, size_t(launch.range_count)});
        errors.seed = launch.error_seed;
    }

    void run() {
        std::vector<uint32_t> order(launch_.grid[0] * launch_.grid[1] * launch_.grid[2]);
        for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
        if (launch_.seed) std::shuffle(order.begin(), order.end(), machine_.random);
        all_warps_ = uint32_t(order.size()) * warps_per_block_;
        size_t started = 0;
        while (started < order.size() || !resident_.empty()) {
            while (started < order.size() && resident_.size() < launch_.resident) {
                start(order[started++]);
            }
            const size_t chosen = draw(resident_.size());
            Block& block = *resident_[chosen];
            if (machine_.memory.delays_stores) machine_.memory.settle(block, false);
            if (Warp* const warp = runnable(block)) {
                step(*warp);
            } else if (!open_barrier(block)) {
                machine_.memory.settle(block, true);
                std::swap(resident_[chosen], resident_.back());
                resident_.pop_back();
            }
        }
    }

  private:
    size_t draw(size_t n) { return launch_.seed ? machine_.random() % n : 0; }

    void start(uint32_t index) {
        auto& block = *resident_.emplace_back(std::make_unique<Block>());
        block.x = index % launch_.grid[0];
        block.y = index / launch_.grid[0] % launch_.grid[1];
        block.z = index / launch_.grid[0] / launch_.grid[1];
        block.shared.resize(launch_.shared_bytes);
        for (size_t i = 0; i < block.shared.size(); ++i) block.shared[i] = kPoison[i % 8];
        block.shadow.resize(launch_.shared_bytes);
        block.warps.resize(warps_per_block_);
        for (uint32_t i = 0; i < warps_per_block_; ++i) {
            start(block.warps[i], block, index * warps_per_block_ + i, i * kLanes);
        }
    }

    void start(Warp& warp, Block& block, uint32_t number, uint32_t first_thread) {
        const uint32_t lanes = std::min<uint32_t>(kLanes, launch_.threads - first_thread);
        warp.block = &block;
        warp.number = number;
        warp.alive = lanes == kLanes ? kAllLanes : (Mask{1} << lanes) - 1;
        warp.groups = {{0, warp.alive}};
        warp.clock.assign(all_warps_, 0);
        warp.clock[number] = 1;
        const int known = launch_.first_special + kSpecials - launch_.registers;
        warp.values.resize(size_t(launch_.registers + known) * kLanes);
        warp.written.assign(size_t(launch_.registers), 0);
        warp.written.resize(size_t(launch_.registers + known), kAllLanes);
        for (int i = 0; i < launch_.constants; ++i) {
            std::fill_n(warp.lanes_of(launch_.registers + i), kLanes, launch_.values[i]);
        }
        const uint32_t* const grid = launch_.grid;
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint32_t special[kSpecials] = {first_thread + uint32_t(lane),
                                                 block.x,
                                                 block.y,
                                                 block.z,
                                                 grid[0],
                                                 grid[1],
                                                 grid[2],
                                                 launch_.threads,
                                                 uint32_t(lane),
                                                 first_thread / kLanes};
            for (int i = 0; i < kSpecials; ++i) {
                warp.lanes_of(launch_.first_special + i)[lane] = special[i];
            }
        }
    }

    Warp* runnable(Block& block) {
        const size_t first = draw(block.warps.size());
        for (size_t i = 0; i < block.warps.size(); ++i) {
            Warp& warp = block.warps[(first + i) % block.warps.size()];
            if (!warp.groups.empty() && !warp.at_barrier) return &warp;
        }
        return nullptr;
    }

    // No warp can go on: all are at the barrier, or have returned.
    bool open_barrier(Block& block) {
        Clock all;
        size_t waiting = 0;
        for (Warp& warp : block.warps) {
            if (!warp.at_barrier) continue;
            ++waiting;
            join(all, warp.clock);
        }
        if (waiting == 0) return false;
        for (Warp& warp : block.warps) {
            current_ = &warp;
            if (!warp.at_barrier) fail("has returned while other warps wait at a barrier");
            warp.at_barrier = false;
            warp.clock = all;
            warp.synchronised = warp.tick();
        }
        return true;
    }

    // Runs some instructions of a warp; a few, or many, so that warps overtake each other.
    void step(Warp& warp) {
        current_ = &warp;
        const size_t most = launch_.seed ? 1 + draw(draw(4) ? 16 : 400) : ~size_t{0};
        for (size_t i = 0; i < most && !warp.groups.empty() && !warp.at_barrier; ++i) {
            execute(warp, choose(warp));
        }
    }

    // Of the lanes that have diverged, mostly those that are furthest behind go on. Lanes at a
    // collective instruction wait for the others.
    size_t choose(Warp& warp) {
        auto& groups = warp.groups;
        if (groups.size() == 1) return 0;
        std::sort(groups.begin(), groups.end(),
                  [](const Group& a, const Group& b) { return a.pc < b.pc; });
        const size_t first = draw(8) ? 0 : draw(groups.size());
        for (size_t i = 0; i < groups.size(); ++i) {
            const size_t index = (first + i) % groups.size();
            if (missing(warp, groups[index]) == 0) return index;
        }
        const Group& group = groups[0];
        outcome_.instruction = group.pc;
        fail("waits for lanes that wait elsewhere, at instruction " + std::to_string(groups[1].pc));
    }

    // Lanes that an instruction needs and that are not there.
    Mask missing(Warp& warp, const Group& group) {
        const Instruction& instruction = at(group.pc);
        const Kind kind = operations()[size_t(instruction.operation)].kind;
        if (kind == Kind::kBarrier) return warp.alive & ~group.lanes;
        if (kind != Kind::kCollective) return 0;
        return participants(warp, instruction, group.lanes) & ~group.lanes;
    }

    static Mask participants(Warp& warp, const Instruction& instruction, Mask lanes) {
        if (instruction.space == kShared) return warp.alive;  // matrices
        const int32_t last = instruction.from[instruction.from_count - 1];
        return Mask(known(warp, last, lanes, "a mask of lanes")[std::countr_zero(lanes)]);
    }

    const Instruction& at(int pc) {
        if (size_t(pc) >= machine_.code.size()) fail("runs past the end");
        return machine_.code[size_t(pc)];
    }

    void execute(Warp& warp, size_t index) {
        const Group group = warp.groups[index];
        const Instruction& instruction = at(group.pc);
        outcome_.instruction = group.pc;
        Mask lanes = group.lanes;
        if (instruction.predicate >= 0) lanes &= predicated(warp, instruction, lanes);
        ++outcome_.warp_instructions;
        ++warp.executed;
        outcome_.lane_instructions += uint64_t(std::popcount(lanes));
        if (outcome_.warp_instructions > launch_.most_instructions) fail("does not end");
        ++warp.groups[index].pc;
        const Operation& operation = operations()[size_t(instruction.operation)];
        switch (operation.kind) {
            case Kind::kBranch: branch(warp, index, instruction.target, lanes); break;
            case Kind::kReturn:
                warp.alive &= ~lanes;
                warp.groups[index].lanes &= ~lanes;
                if (warp.groups[index].lanes == 0)
                    warp.groups.erase(warp.groups.begin() + long(index));
                break;
            case Kind::kBarrier:
                if (lanes == 0) break;  // skipped by the whole warp
                if (lanes != warp.alive) fail("some lanes of the warp do not reach the barrier");
                warp.at_barrier = true;
                break;
            case Kind::kCollective: collect(warp, operation, instruction, lanes); break;
            default:
                if (lanes != 0) operation.execute(machine_, warp, instruction, lanes);
        }
        if (warp.groups.size() > 1) merge(warp);
    }

    static Mask predicated(Warp& warp, const Instruction& instruction, Mask lanes) {
        const uint64_t* const values = known(warp, instruction.predicate, lanes, "a predicate");
        Mask mask = 0;
        for_lanes(lanes, [&](int lane) { mask |= Mask(values[lane] & 1) << lane; });
        return instruction.negated ? ~mask : mask;
    }

    // Lanes exchange registers, or meet (bar.warp.sync, which executes nothing).
    void collect(Warp& warp, const Operation& operation, const Instruction& instruction,
                 Mask lanes) {
        if (lanes == 0) return;
        const Mask wanted = participants(warp, instruction, lanes);
        if (lanes & ~wanted) fail("executed by lanes that its mask does not name");
        if (wanted & ~warp.alive) fail("its mask names lanes that have returned, or are none");
        if (wanted & ~lanes) fail("its mask names lanes that do not execute it");
        if (operation.execute) operation.execute(machine_, warp, instruction, lanes);
        if (lanes != warp.alive || instruction.space == kShared) return;
        warp.exchanged = warp.tick();
        if (!operation.execute) warp.synchronised = warp.exchanged;
    }

    static void branch(Warp& warp, size_t index, int target, Mask taken) {
        Group& group = warp.groups[index];
        if (taken == group.lanes) {
            group.pc = target;
        } else if (taken != 0) {
            group.lanes &= ~taken;
            warp.groups.push_back({target, taken});
        }
    }

    static void merge(Warp& warp) {
        auto& groups = warp.groups;
        for (size_t i = 0; i < groups.size(); ++i) {
            for (size_t j = groups.size() - 1; j > i; --j) {
                if (groups[j].pc != groups[i].pc) continue;
                groups[i].lanes |= groups[j].lanes;
                groups.erase(groups.begin() + long(j));
            }
        }
    }

  public:
    // For messages: the warp that ran last.
    void locate() {
        if (current_ == nullptr) return;
        outcome_.block = int32_t(current_->number / warps_per_block_);
        outcome_.warp = int32_t(current_->number % warps_per_block_);
    }

  private:
    const Launch& launch_;
    Outcome& outcome_;
    Machine machine_;
    uint32_t warps_per_block_ = 1, all_warps_ = 0;
    std::vector<std::unique_ptr<Block>> resident_;
    Warp* current_ = nullptr;
};

const bool defined = [] {
    operations().push_back({"bra", Kind::kBranch, nullptr});
    operations().push_back({"bar.sync", Kind::kBarrier, nullptr});
    operations().push_back({"bar.warp.sync", Kind::kCollective, nullptr});
    operations().push_back({"ret", Kind::kReturn, nullptr});
    return true;
}();

}  // namespace
}  // namespace ptx

extern "C" {

int ptx_operation(const char* name) { return ptx::find_operation(name); }

int ptx_run(const ptx::Launch* launch, ptx::Outcome* outcome) {
    ptx::Grid grid(*launch, *outcome);
    try {
        grid.run();
        return 0;
    } catch (const std::exception& failure) {
        grid.locate();
        std::snprintf(outcome->message, sizeof outcome->message, "%s", failure.what());
        return 1;
    }
}
}
