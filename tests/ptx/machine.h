// What executes: warps of 32 lanes in blocks, their registers and clocks, and decoded instructions.
#pragma once

#include <bit>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
using Mask = uint32_t;  // of lanes
constexpr Mask kAllLanes = ~Mask{0};

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

enum Space : int32_t { kGlobal, kShared, kParameter };
enum Scope : int32_t { kBlockScope, kDeviceScope };
enum Flags : int32_t { kStrong = 1, kAcquire = 2, kRelease = 4, kSigned = 8 };

// Operands are numbers of registers; -1 is none. Constants and %tid.x are registers too. Of memory
// instructions the first source is the address.
struct Instruction {
    int32_t operation, predicate, negated, target;
    int32_t to[8], from[8], to_count, from_count;
    int32_t space, bytes, vector, flags, scope, padding;
    int64_t offset;
};

// How often each warp had passed on what it did, as far as somebody knows (a vector clock).
using Clock = std::vector<uint32_t>;

inline void join(Clock& into, const Clock& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// Lanes of a warp that are at the same instruction.
struct Group {
    int pc;
    Mask lanes;
};

struct Block;

struct Warp {
    Block* block;
    uint32_t number;  // in the grid
    uint32_t first_thread;
    Mask alive;
    bool at_barrier = false;
    std::vector<Group> groups;
    uint64_t executed = 0;

    // Lane by lane; which lanes of a register have been written.
    std::vector<uint64_t> values;
    std::vector<Mask> written;

    Clock clock;      // what happened before whatever this warp does now
    Clock published;  // the clock at the last fence: what its relaxed stores and atomics pass on
    Clock observed;   // from relaxed loads and atomics: what the next fence adds to the clock
    // Since these times of its own clock its lanes have met in a barrier, or exchanged registers.
    uint32_t synchronised = 1, exchanged = 1;

    uint64_t* lanes_of(int32_t index) { return &values[size_t(index) * kLanes]; }
    uint32_t time() const { return clock[number]; }
    uint32_t tick() { return ++clock[number]; }
};

// A store to global memory that other blocks do not see yet.
struct Pending {
    uint64_t address;
    uint32_t bytes;
    uint8_t data[16];
};

struct Cell;  // of shadow memory

struct Block {
    uint32_t x, y, z;
    std::vector<Warp> warps;
    std::vector<uint8_t> shared;
    std::vector<Cell> shadow;
    std::vector<Pending> pending;
};

struct Machine;
using Execute = void (*)(Machine&, Warp&, const Instruction&, Mask);

enum class Kind { kPlain, kCollective, kBranch, kBarrier, kReturn };

// What the name of an instruction, with its types, stands for.
struct Operation {
    std::string name;
    Kind kind;
    Execute execute;
};

std::vector<Operation>& operations();
int find_operation(const std::string& name);  // -1 if unknown

// Calls f(lane) for the lanes of a mask.
template <typename F>
inline void for_lanes(Mask lanes, F f) {
    if (lanes == kAllLanes) {
        for (int lane = 0; lane < kLanes; ++lane) f(lane);
        return;
    }
    for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

// Of a source whose lanes must all have been written.
inline const uint64_t* known(Warp& warp, int32_t index, Mask lanes, const char* use) {
    if (const Mask missing = lanes & ~warp.written[size_t(index)]) {
        fail("lane " + std::to_string(std::countr_zero(missing)) + " uses as " + use +
             " a register that was never written");
    }
    return warp.lanes_of(index);
}

}  // namespace ptx
