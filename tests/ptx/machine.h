// What executes: blocks of warps of 32 lanes, their registers and clocks, and decoded instructions.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kReturned = ~uint32_t{0};  // the target of `ret`
using Mask = uint32_t;                        // of lanes
constexpr Mask kAllLanes = ~Mask{0};

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// Calls f(lane) for the lanes of a mask.
template <typename F>
inline void for_lanes(Mask lanes, F f) {
    if (lanes == kAllLanes) {
        for (int lane = 0; lane < kLanes; ++lane) f(lane);
        return;
    }
    for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

class Memory;
struct Warp;
struct Instruction;

enum class Kind { kPlain, kCollective, kBranch };  // the second is executed by lanes together

// What the name of an instruction, with its types, stands for.
struct Operation {
    Kind kind;
    void (*execute)(Memory&, Warp&, const Instruction&, Mask lanes);
    int64_t sources = -1;  // how many it takes; -1: any
};
std::map<std::string, Operation>& operations();
void define_arithmetic();
void define_memory_operations();
void define_cluster_operations();

enum Space : int64_t { kGlobal, kShared, kParameter };
enum Flags : int64_t { kStrong = 1, kAcquire = 2, kRelease = 4, kDevice = 8, kCluster = 16 };

// As parser.Instruction. Operands are numbers of registers, -1 for none; constants and %tid.x are
// registers too. Of memory instructions the first source is the address.
struct Instruction {
    const Operation* operation;
    int64_t predicate, negated, target, participants, space, bytes, vector, flags, offset;
    int64_t to[8], from[8];
};

// How many instructions each warp had executed, as far as somebody knows (a vector clock).
using Times = std::vector<uint32_t>;
struct Clock : Times {
    using Times::Times;
    // What would be known too if a store to another block came after all that its warp has issued
    // before. PTX does not say so; hardware has at least read by then.
    Times issued;
    void clear() { Times::clear(), issued.clear(); }
};

inline void join(Times& into, const Times& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}
inline void join(Clock& into, const Clock& other) {
    join(static_cast<Times&>(into), static_cast<const Times&>(other));
    join(into.issued, other.issued);
}

inline uint32_t at(const Times& clock, uint32_t who) { return who < clock.size() ? clock[who] : 0; }

struct Block;
struct PhaseBarrier;

enum class Wait : uint8_t { kNothing, kBlock, kCluster, kPhase };

struct Warp {
    Block* block;
    uint32_t number;        // in the grid
    uint32_t next[kLanes];  // the instruction of each lane
    Mask alive = 0;
    Wait wait = Wait::kNothing;
    uint64_t waits_at = 0;                 // the number or the address of the barrier
    const PhaseBarrier* phases = nullptr;  // for the end of a phase of it
    uint32_t phase = 0;
    uint32_t cluster_phase = 0;  // that it has arrived for
    bool arrived = false;        // and has not waited for

    // Lane by lane; which lanes of a register have been written.
    std::vector<uint64_t> values;
    std::vector<Mask> written;

    Clock clock;      // what happened before whatever this warp does now
    Clock published;  // the clock at the last fence: what its relaxed stores and atomics pass on
    Clock observed;   // from relaxed loads and atomics: what the next fence adds to the clock
    uint32_t synchronised = 0;  // when its lanes last met in a barrier
    uint32_t instruction = 0;   // that it executes

    uint64_t* lanes_of(int64_t index) { return &values[size_t(index) * kLanes]; }
    uint32_t time() const { return clock[number]; }
    // Values of lanes, f(lane); those that are not known count as never written.
    template <typename F>
    void write(int64_t index, Mask lanes, Mask known, F f) {
        uint64_t* const to = lanes_of(index);
        for_lanes(lanes, [&](int lane) { to[lane] = f(lane); });
        mark(index, lanes, known);
    }
    void mark(int64_t index, Mask lanes, Mask known) {
        Mask& mask = written[size_t(index)];
        mask = (mask & ~lanes) | (known & lanes);
    }
    // Of a source whose lanes must all have been written.
    const uint64_t* known(int64_t index, Mask lanes, const char* use) {
        if (const Mask missing = lanes & ~written[size_t(index)]) {
            fail("lane " + std::to_string(std::countr_zero(missing)) + " uses as " + use +
                 " a register that was never written");
        }
        return lanes_of(index);
    }
};

}  // namespace ptx
