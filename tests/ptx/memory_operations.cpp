// The instructions that access memory.
#include <functional>

#include "machine_state.h"
#include "numbers.h"

namespace ptx {
namespace {

void define(const std::string& name, Kind kind, Execute execute) {
    operations().push_back({name, kind, execute});
}

// Of lanes: their addresses.
struct Addresses {
    const uint64_t* base;
    int64_t offset;
    uint64_t operator[](int lane) const { return base[lane] + uint64_t(offset); }
};

Addresses addresses(Warp& warp, const Instruction& instruction, Mask lanes) {
    return {known(warp, instruction.from[0], lanes, "an address"), instruction.offset};
}

// The low bytes of a register, with the sign of a signed type.
uint64_t loaded(const uint8_t* bytes, const Instruction& instruction) {
    uint64_t value = 0;
    std::memcpy(&value, bytes, size_t(instruction.bytes));
    const int unused = 64 - 8 * instruction.bytes;
    if (instruction.flags & kSigned) value = uint64_t(int64_t(value << unused) >> unused);
    return value;
}

Access atomic_access(const Instruction& instruction) {
    return instruction.scope == kBlockScope ? kBlockAtomic : kAtomic;
}

void load(Machine& machine, Warp& warp, const Instruction& instruction, Mask lanes) {
    const Addresses at = addresses(warp, instruction, lanes);
    const auto bytes = uint32_t(instruction.bytes * instruction.vector);
    const Access kind = instruction.flags & kStrong ? kStrongRead : kRead;
    uint64_t* to[8];
    for (int i = 0; i < instruction.vector; ++i) {
        to[i] = instruction.to[i] < 0 ? nullptr : warp.lanes_of(instruction.to[i]);
    }
    for_lanes(lanes, [&](int lane) {
        const uint64_t address = at[lane];  // which may be in the register that is loaded
        const uint8_t* const place =
            machine.memory.access(warp, lane, instruction.space, address, bytes, kind);
        for (int i = 0; i < instruction.vector; ++i) {
            if (to[i]) to[i][lane] = loaded(place + i * instruction.bytes, instruction);
        }
        if (kind == kStrongRead) {
            machine.memory.synchronise(warp, address, instruction.flags, true, false);
        }
    });
    for (int i = 0; i < instruction.vector; ++i) {
        if (to[i]) warp.written[size_t(instruction.to[i])] |= lanes;
    }
}

void store(Machine& machine, Warp& warp, const Instruction& instruction, Mask lanes) {
    const Addresses at = addresses(warp, instruction, lanes);
    const auto bytes = uint32_t(instruction.bytes * instruction.vector);
    const Access kind = instruction.flags & kStrong ? atomic_access(instruction) : kWrite;
    const uint64_t* from[8];
    for (int i = 0; i < instruction.vector; ++i) {
        from[i] = known(warp, instruction.from[1 + i], lanes, "a value to store");
    }
    for_lanes(lanes, [&](int lane) {
        uint8_t data[32];
        for (int i = 0; i < instruction.vector; ++i) {
            std::memcpy(data + i * instruction.bytes, &from[i][lane], size_t(instruction.bytes));
        }
        if (kind != kWrite) {
            machine.memory.synchronise(warp, at[lane], instruction.flags, false, true);
        }
        machine.memory.store(warp, lane, instruction.space, at[lane], bytes, kind, data);
    });
}

// One lane after the other, in an order of its own.
template <typename T, typename F>
struct Atomic {
    static void execute(Machine& machine, Warp& warp, const Instruction& instruction, Mask lanes) {
        const Addresses at = addresses(warp, instruction, lanes);
        const uint64_t* from[2] = {};
        for (int i = 1; i < instruction.from_count; ++i) {
            from[i - 1] = known(warp, instruction.from[i], lanes, "an operand");
        }
        uint64_t* const to = instruction.to[0] < 0 ? nullptr : warp.lanes_of(instruction.to[0]);
        const int turn = int(machine.random() % kLanes);
        for_lanes(std::rotl(lanes, turn), [&](int turned) {
            const int lane = (turned - turn) & (kLanes - 1);
            const uint64_t address = at[lane];
            uint8_t* const place = machine.memory.access(warp, lane, instruction.space, address,
                                                         sizeof(T), atomic_access(instruction));
            machine.memory.synchronise(warp, address, instruction.flags, true, true);
            T old;
            std::memcpy(&old, place, sizeof old);
            const T second = from[1] ? of_bits<T>(from[1][lane]) : T{};
            const T value = F{}(old, of_bits<T>(from[0][lane]), second);
            std::memcpy(place, &value, sizeof value);
            if (to) to[lane] = bits_of(old);
        });
        if (to) warp.written[size_t(instruction.to[0])] |= lanes;
    }
};
template <typename T, typename F>
void atomic(const std::string& name, F) {
    define("atom." + name, Kind::kPlain, Atomic<T, F>::execute);
}

template <typename T>
void integer_atomics(const std::string& t) {
    atomic<T>("min." + t, [](T old, T a, T) { return std::min(old, a); });
    atomic<T>("max." + t, [](T old, T a, T) { return std::max(old, a); });
    using U = std::make_unsigned_t<T>;
    atomic<U>("add." + t, [](U old, U a, U) { return U(old + a); });
}
template <typename U>
void bit_atomics(const std::string& t) {
    atomic<U>("and." + t, [](U old, U a, U) { return old & a; });
    atomic<U>("or." + t, [](U old, U a, U) { return old | a; });
    atomic<U>("xor." + t, [](U old, U a, U) { return old ^ a; });
    atomic<U>("exch." + t, [](U, U a, U) { return a; });
    atomic<U>("cas." + t, [](U old, U expected, U value) { return old == expected ? value : old; });
}

// Matrices of 8 rows of 16 bytes. Lanes 8*i to 8*i + 7 give the addresses of the rows of matrix i,
// and lane 4*r + c holds columns 2*c and 2*c + 1 of row r, or of column r of the transposed one.
template <typename F>
void for_elements(const Addresses& at, int matrices, bool transposed, F f) {
    uint64_t rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rows[lane] = at[lane];
    for (int matrix = 0; matrix < matrices; ++matrix) {
        for (int lane = 0; lane < kLanes; ++lane) {
            for (int half = 0; half < 2; ++half) {
                int row = lane / 4, column = 2 * (lane % 4) + half;
                if (transposed) std::swap(row, column);
                f(matrix, lane, half, rows[8 * matrix + row] + uint64_t(2 * column));
            }
        }
    }
    for (int row = 0; row < 8 * matrices; ++row) {
        if (rows[row] % 16 != 0) fail("a row of a matrix is misaligned");
    }
}

void require_whole_warp(Mask lanes) {
    if (lanes != kAllLanes) fail("lanes of the warp are missing");
}

template <bool transposed>
void load_matrix(Machine& machine, Warp& warp, const Instruction& instruction, Mask lanes) {
    require_whole_warp(lanes);
    const Addresses at = addresses(warp, instruction, lanes);
    uint64_t results[4][kLanes] = {};
    const auto load_element = [&](int matrix, int lane, int half, uint64_t address) {
        uint16_t element;
        std::memcpy(&element, machine.memory.access(warp, lane, kShared, address, 2, kRead), 2);
        results[matrix][lane] |= uint64_t{element} << 16 * half;
    };
    for_elements(at, instruction.to_count, transposed, load_element);
    for (int i = 0; i < instruction.to_count; ++i) {
        std::copy_n(results[i], kLanes, warp.lanes_of(instruction.to[i]));
        warp.written[size_t(instruction.to[i])] = kAllLanes;
    }
}

template <bool transposed>
void store_matrix(Machine& machine, Warp& warp, const Instruction& instruction, Mask lanes) {
    require_whole_warp(lanes);
    const Addresses at = addresses(warp, instruction, lanes);
    const uint64_t* from[4];
    const int matrices = instruction.from_count - 1;
    for (int i = 0; i < matrices; ++i) {
        from[i] = known(warp, instruction.from[1 + i], lanes, "a value to store");
    }
    const auto store_element = [&](int matrix, int lane, int half, uint64_t address) {
        const auto element = uint16_t(from[matrix][lane] >> 16 * half);
        const auto* const bytes = reinterpret_cast<const uint8_t*>(&element);
        machine.memory.store(warp, lane, kShared, address, 2, kWrite, bytes);
    };
    for_elements(at, matrices, transposed, store_element);
}

void fence(Machine& machine, Warp& warp, const Instruction& instruction, Mask) {
    if (instruction.scope == kDeviceScope) machine.memory.fence(warp);
}

const bool defined = [] {
    define("ld", Kind::kPlain, load);
    define("st", Kind::kPlain, store);
    define("fence", Kind::kPlain, fence);
    integer_atomics<uint32_t>("u32"), integer_atomics<int32_t>("s32");
    integer_atomics<uint64_t>("u64"), integer_atomics<int64_t>("s64");
    bit_atomics<uint32_t>("b32"), bit_atomics<uint64_t>("b64");
    atomic<float>("add.f32", [](float old, float a, float) { return old + a; });
    atomic<double>("add.f64", [](double old, double a, double) { return old + a; });
    define("ldmatrix", Kind::kCollective, load_matrix<false>);
    define("ldmatrix.trans", Kind::kCollective, load_matrix<true>);
    define("stmatrix", Kind::kCollective, store_matrix<false>);
    define("stmatrix.trans", Kind::kCollective, store_matrix<true>);
    return true;
}();

}  // namespace
}  // namespace ptx
