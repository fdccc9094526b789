// Instructions that access memory.
#include "memory.h"

namespace ptx {
namespace {

Access atomic_access(const Instruction& in) { return in.flags & kDevice ? kAtomic : kBlockAtomic; }

// Of signed values, which are extended, T is the type.
template <typename T = uint64_t>
void load(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const base = warp.known(in.from[0], lanes, "an address");
    const auto bytes = size_t(in.bytes), vector = size_t(in.vector);
    const Access kind = in.flags & kStrong ? kStrongRead : kRead;
    for_lanes(lanes, [&](int lane) {
        const uint64_t address = base[lane] + uint64_t(in.offset);  // before base is overwritten
        uint8_t whole[16];
        const uint8_t* place = whole;
        if (in.space == kGlobal && bytes * vector == 16 && kind == kRead) {
            memory.read_vector(warp, lane, address, whole);
        } else {
            place = memory.access(warp, lane, in.space, address, bytes * vector, kind);
        }
        for (size_t i = 0; i < vector; ++i) {
            if (in.to[i] < 0) continue;
            T value = 0;
            std::memcpy(&value, place + i * bytes, bytes);
            warp.lanes_of(in.to[i])[lane] = uint64_t(value);
        }
        if (kind == kStrongRead) memory.synchronise(warp, address, in.flags, true, false);
    });
    for (size_t i = 0; i < vector; ++i) {
        if (in.to[i] >= 0) warp.mark(in.to[i], lanes, kAllLanes);
    }
}

void store(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const base = warp.known(in.from[0], lanes, "an address");
    const auto bytes = size_t(in.bytes), vector = size_t(in.vector);
    const Access kind = in.flags & kStrong ? atomic_access(in) : kWrite;
    uint8_t data[kLanes][16];
    for (size_t i = 0; i < vector; ++i) {
        const uint64_t* const from = warp.known(in.from[1 + i], lanes, "a value to store");
        for_lanes(lanes,
                  [&](int lane) { std::memcpy(data[lane] + i * bytes, &from[lane], bytes); });
    }
    for_lanes(lanes, [&](int lane) {
        const uint64_t address = base[lane] + uint64_t(in.offset);
        if (kind != kWrite) memory.synchronise(warp, address, in.flags, false, true);
        memory.store(warp, lane, in.space, address, bytes * vector, kind, data[lane]);
    });
}

void fence(Memory& memory, Warp& warp, const Instruction& in, Mask) {
    if (in.flags & kDevice) memory.fence(warp);
}

// One lane after the other, in an order of its own.
template <typename T, bool kMinimum = false>
void atomic(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const base = warp.known(in.from[0], lanes, "an address");
    const uint64_t* const added = warp.known(in.from[1], lanes, "a value to store");
    const int turn = int(memory.random() % kLanes);
    uint64_t found[kLanes] = {};
    for_lanes(std::rotl(lanes, turn), [&](int turned) {
        const int lane = (turned - turn) & (kLanes - 1);
        const uint64_t address = base[lane] + uint64_t(in.offset);
        uint8_t* const place =
            memory.access(warp, lane, in.space, address, sizeof(T), atomic_access(in));
        memory.synchronise(warp, address, in.flags, true, true);
        std::memcpy(&found[lane], place, sizeof(T));
        const auto before = T(found[lane]), operand = T(added[lane]);
        const T after = kMinimum ? std::min(before, operand) : T(before + operand);
        std::memcpy(place, &after, sizeof after);
    });
    if (in.to[0] < 0) return;
    warp.write(in.to[0], lanes, kAllLanes, [&](int lane) { return found[lane]; });
}

// Matrices of 8 rows of 16 bytes. Lanes 8*i to 8*i + 7 give the addresses of the rows of matrix i,
// and lane 4*r + c holds columns 2*c and 2*c + 1 of row r, or of column r of the transposed one.
template <bool kStores, bool kTransposed>
void move_matrices(Memory& memory, Warp& warp, const Instruction& in, Mask lanes) {
    if (lanes != kAllLanes) fail("lanes of the warp are missing");
    const uint64_t* const rows = warp.known(in.from[0], lanes, "an address");
    uint64_t values[4][kLanes] = {};
    for (int i = 0; kStores && i < in.vector; ++i) {
        std::copy_n(warp.known(in.from[1 + i], lanes, "a value to store"), kLanes, values[i]);
    }
    for (int i = 0; i < in.vector * 64; ++i) {
        const int matrix = i / 64, lane = i / 2 % kLanes, half = i % 2;
        int row = lane / 4, column = 2 * (lane % 4) + half;
        if (kTransposed) std::swap(row, column);
        const uint64_t begin = rows[8 * matrix + row] + uint64_t(in.offset);
        if (begin % 16 != 0) fail("a row of a matrix is misaligned");
        const uint64_t address = begin + uint64_t(2 * column);
        if (kStores) {
            const uint64_t value = values[matrix][lane] >> 16 * half;
            memory.store(warp, lane, kShared, address, 2, kWrite, &value);
        } else {
            uint64_t value = 0;
            std::memcpy(&value, memory.access(warp, lane, kShared, address, 2, kRead), 2);
            values[matrix][lane] |= value << 16 * half;
        }
    }
    for (int i = 0; !kStores && i < in.vector; ++i) {
        warp.write(in.to[i], lanes, kAllLanes, [&](int lane) { return values[i][lane]; });
    }
}

}  // namespace

void define_memory_operations() {
    operations()["ld"] = {Kind::kPlain, load<>};
    operations()["ld.s8"] = {Kind::kPlain, load<int8_t>};
    operations()["ld.s16"] = {Kind::kPlain, load<int16_t>};
    operations()["ld.s32"] = {Kind::kPlain, load<int32_t>};
    operations()["st"] = {Kind::kPlain, store};
    operations()["fence"] = {Kind::kPlain, fence};
    operations()["atom.add.u32"] = {Kind::kPlain, atomic<uint32_t>};
    operations()["atom.add.u64"] = {Kind::kPlain, atomic<uint64_t>};
    operations()["atom.min.s32"] = {Kind::kPlain, atomic<int32_t, true>};
    operations()["ldmatrix"] = {Kind::kCollective, move_matrices<false, false>};
    operations()["ldmatrix.trans"] = {Kind::kCollective, move_matrices<false, true>};
    operations()["stmatrix"] = {Kind::kCollective, move_matrices<true, false>};
    operations()["stmatrix.trans"] = {Kind::kCollective, move_matrices<true, true>};
}

}  // namespace ptx
