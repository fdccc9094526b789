// The instructions by their names. Those of memory are in memory_operations.cpp, and control is in
// machine.cpp.
#include <map>

#include "machine.h"
#include "numbers.h"

namespace ptx {

std::vector<Operation>& operations() {
    static std::vector<Operation> all;
    return all;
}

int find_operation(const std::string& name) {
    static const auto* const numbers = [] {
        auto* const made = new std::map<std::string, int>;
        for (const Operation& each : operations()) made->emplace(each.name, int(made->size()));
        return made;
    }();
    const auto found = numbers->find(name);
    return found == numbers->end() ? -1 : found->second;
}

namespace {

// One value per lane, of as many sources as the function F has arguments.
template <typename F, typename Member = decltype(&F::operator())>
struct Elementwise;

template <typename F, typename R, typename... Arguments>
struct Elementwise<F, R (F::*)(Arguments...) const> {
    static void execute(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
        run(warp, instruction, lanes, std::index_sequence_for<Arguments...>{});
    }

  private:
    template <size_t... I>
    static void run(Warp& warp, const Instruction& instruction, Mask lanes,
                    std::index_sequence<I...>) {
        uint64_t* const to = warp.lanes_of(instruction.to[0]);
        const uint64_t* const from[] = {warp.lanes_of(instruction.from[I])...};
        const Mask known = (warp.written[size_t(instruction.from[I])] & ...);
        for_lanes(lanes, [&](int lane) {
            to[lane] = bits_of<R>(F{}(of_bits<Arguments>(from[I][lane])...));
        });
        Mask& written = warp.written[size_t(instruction.to[0])];
        written = (written & ~lanes) | (known & lanes);
    }
};

template <typename F>
void define(const std::string& name, F) {
    operations().push_back({name, Kind::kPlain, Elementwise<F>::execute});
}

void define(const std::string& name, Kind kind, Execute execute) {
    operations().push_back({name, kind, execute});
}

// Where one source decides the result, the other need not be known.
template <bool kAnd>
void combine_predicates(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
    const int32_t a = instruction.from[0], b = instruction.from[1], to = instruction.to[0];
    const auto decides = [&](int32_t source) {
        const uint64_t* const values = warp.lanes_of(source);
        Mask mask = 0;
        for_lanes(kAllLanes, [&](int lane) { mask |= Mask((values[lane] & 1) != kAnd) << lane; });
        return mask & warp.written[size_t(source)];
    };
    const Mask known =
        (warp.written[size_t(a)] & warp.written[size_t(b)]) | decides(a) | decides(b);
    const uint64_t *const of_a = warp.lanes_of(a), *const of_b = warp.lanes_of(b);
    uint64_t* const result = warp.lanes_of(to);
    for_lanes(lanes, [&](int lane) {
        result[lane] = (kAnd ? of_a[lane] & of_b[lane] : of_a[lane] | of_b[lane]) & 1;
    });
    Mask& written = warp.written[size_t(to)];
    written = (written & ~lanes) | (known & lanes);
}

void select(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
    const int32_t a = instruction.from[0], b = instruction.from[1];
    const uint64_t* const condition = known(warp, instruction.from[2], lanes, "condition");
    const uint64_t *const of_a = warp.lanes_of(a), *const of_b = warp.lanes_of(b);
    const Mask known_a = warp.written[size_t(a)], known_b = warp.written[size_t(b)];
    uint64_t* const to = warp.lanes_of(instruction.to[0]);
    Mask known = 0;
    for_lanes(lanes, [&](int lane) {
        const bool first = condition[lane] & 1;
        to[lane] = first ? of_a[lane] : of_b[lane];
        known |= ((first ? known_a : known_b) >> lane & 1) << lane;
    });
    Mask& written = warp.written[size_t(instruction.to[0])];
    written = (written & ~lanes) | known;
}

// Two halves of a register, either of which may go nowhere.
void unpack(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
    const int32_t from = instruction.from[0];
    const int half = instruction.bytes * 4;
    const uint64_t low = (uint64_t{1} << half) - 1;
    uint64_t values[kLanes];
    std::copy_n(warp.lanes_of(from), kLanes, values);
    const Mask known = warp.written[size_t(from)];
    for (int part = 0; part < 2; ++part) {
        if (instruction.to[part] < 0) continue;
        uint64_t* const to = warp.lanes_of(instruction.to[part]);
        for_lanes(lanes, [&](int lane) { to[lane] = values[lane] >> (part * half) & low; });
        Mask& written = warp.written[size_t(instruction.to[part])];
        written = (written & ~lanes) | (known & lanes);
    }
}

template <typename T>
void integers(const std::string& t) {
    using U = std::make_unsigned_t<T>;
    define("add." + t, [](U a, U b) -> U { return U(a + b); });
    define("sub." + t, [](U a, U b) -> U { return U(a - b); });
    define("mul.lo." + t, [](U a, U b) -> U { return U(uint64_t{a} * b); });
    define("mad.lo." + t, [](U a, U b, U c) -> U { return U(uint64_t{a} * b + c); });
    define("neg." + t, [](U a) -> U { return U(-a); });
    define("abs." + t, [](T a) -> U { return a < 0 ? U(-U(a)) : U(a); });
    define("min." + t, [](T a, T b) -> T { return std::min(a, b); });
    define("max." + t, [](T a, T b) -> T { return std::max(a, b); });
    // Of zero, and of the least number by -1, as GPUs do it: PTX does not say.
    define("div." + t, [](T a, T b) -> T {
        if (b == 0) return T(-1);
        return std::is_signed_v<T> && b == T(-1) ? T(U(-U(a))) : T(a / b);
    });
    define("rem." + t, [](T a, T b) -> T {
        if (b == 0) return a;
        return std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
    });
    define("setp.lt." + t, [](T a, T b) { return a < b; });
    define("setp.le." + t, [](T a, T b) { return a <= b; });
    define("setp.gt." + t, [](T a, T b) { return a > b; });
    define("setp.ge." + t, [](T a, T b) { return a >= b; });
    define("setp.eq." + t, [](T a, T b) { return a == b; });
    define("setp.ne." + t, [](T a, T b) { return a != b; });
}

// A shift by the width or more leaves nothing, or the sign.
template <typename U>
void bits(const std::string& width) {
    using S = std::make_signed_t<U>;
    constexpr uint32_t kBits = sizeof(U) * 8;
    define("and.b" + width, [](U a, U b) -> U { return a & b; });
    define("or.b" + width, [](U a, U b) -> U { return a | b; });
    define("xor.b" + width, [](U a, U b) -> U { return a ^ b; });
    define("not.b" + width, [](U a) -> U { return U(~a); });
    define("shl.b" + width, [](U a, uint32_t b) -> U { return b < kBits ? U(a << b) : U(0); });
    for (const char* const type : {"b", "u"}) {
        define("shr." + (type + width),
               [](U a, uint32_t b) -> U { return b < kBits ? U(a >> b) : U(0); });
    }
    define("shr.s" + width, [](S a, uint32_t b) -> S { return S(a >> std::min(b, kBits - 1)); });
    define("setp.eq.b" + width, [](U a, U b) { return a == b; });
    define("setp.ne.b" + width, [](U a, U b) { return a != b; });
    for (const char* const type : {"b", "u", "s", "f"}) {
        define("mov." + (type + width), [](U a) { return a; });
        define("selp." + (type + width), Kind::kPlain, select);
    }
}

template <typename F>
void comparisons(const std::string& t) {
    const auto compare = [&](const std::string& name, auto f) {
        define("setp." + name + "." + t,
               [](F a, F b) { return decltype(f){}(widened(a), widened(b)); });
    };
    compare("lt", [](auto a, auto b) { return a < b; });
    compare("le", [](auto a, auto b) { return a <= b; });
    compare("gt", [](auto a, auto b) { return a > b; });
    compare("ge", [](auto a, auto b) { return a >= b; });
    compare("eq", [](auto a, auto b) { return a == b; });
    compare("ne", [](auto a, auto b) { return a < b || a > b; });
    // Unordered: true where one is NaN.
    compare("ltu", [](auto a, auto b) { return !(a >= b); });
    compare("leu", [](auto a, auto b) { return !(a > b); });
    compare("gtu", [](auto a, auto b) { return !(a <= b); });
    compare("geu", [](auto a, auto b) { return !(a < b); });
    compare("equ", [](auto a, auto b) { return !(a < b || a > b); });
    compare("neu", [](auto a, auto b) { return a != b; });
    compare("num", [](auto a, auto b) { return a == a && b == b; });
    compare("nan", [](auto a, auto b) { return a != a || b != b; });
}

template <typename F>
void floats(const std::string& t) {
    for (const std::string rounding : {".", ".rn."}) {
        define("add" + rounding + t, [](F a, F b) { return a + b; });
        define("sub" + rounding + t, [](F a, F b) { return a - b; });
        define("mul" + rounding + t, [](F a, F b) { return a * b; });
    }
    define("fma.rn." + t, [](F a, F b, F c) { return std::fma(a, b, c); });
    define("div.rn." + t, [](F a, F b) { return a / b; });
    define("rcp.rn." + t, [](F a) { return F(1) / a; });
    define("sqrt.rn." + t, [](F a) { return std::sqrt(a); });
    define("neg." + t, [](F a) { return -a; });
    define("abs." + t, [](F a) { return std::abs(a); });
    define("min." + t, [](F a, F b) { return smaller(a, b); });
    define("max." + t, [](F a, F b) { return larger(a, b); });
    comparisons<F>(t);
}

template <typename Half>
void halves(const std::string& t) {
    define("cvt.f32." + t, [](Half a) { return widened(a); });
    define("cvt.f64." + t, [](Half a) { return double(widened(a)); });
    define("cvt.rn." + t + ".f32", [](float a) { return narrowed<Half>(a); });
    define("cvt.rn." + t + "x2.f32", [](float high, float low) -> uint32_t {
        return uint32_t{narrowed<Half>(high).bits} << 16 | narrowed<Half>(low).bits;
    });
    comparisons<Half>(t);
    define("setp.eq." + t + "x2", Kind::kPlain,
           [](Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
               const uint64_t* const a = known(warp, instruction.from[0], lanes, "source");
               const uint64_t* const b = known(warp, instruction.from[1], lanes, "source");
               for (int part = 0; part < 2; ++part) {
                   uint64_t* const to = warp.lanes_of(instruction.to[part]);
                   for_lanes(lanes, [&](int lane) {
                       const Half x{uint16_t(a[lane] >> 16 * part)};
                       const Half y{uint16_t(b[lane] >> 16 * part)};
                       to[lane] = widened(x) == widened(y);
                   });
                   warp.written[size_t(instruction.to[part])] |= lanes;
               }
           });
}

template <typename Wide, typename Narrow>
void widening(const std::string& t) {
    define("mul.wide." + t, [](Narrow a, Narrow b) -> Wide { return Wide(Wide(a) * Wide(b)); });
    define("mad.wide." + t, [](Narrow a, Narrow b, std::make_unsigned_t<Wide> c) {
        return std::make_unsigned_t<Wide>(std::make_unsigned_t<Wide>(Wide(a) * Wide(b)) + c);
    });
}

// Between integers of any width: cvt.<to>.<from>.
template <typename To, typename From>
void conversion(const std::string& to, const std::string& from) {
    define("cvt." + to + "." + from, [](From a) { return To(a); });
}
template <typename From>
void conversions_of_integers(const std::string& from) {
    conversion<uint16_t, From>("u16", from);
    conversion<int16_t, From>("s16", from);
    conversion<uint32_t, From>("u32", from);
    conversion<int32_t, From>("s32", from);
    conversion<uint64_t, From>("u64", from);
    conversion<int64_t, From>("s64", from);
}
template <typename I>
void conversions_of_floats(const std::string& t) {
    define("cvt.rn.f32." + t, [](I a) { return float(a); });
    define("cvt.rn.f64." + t, [](I a) { return double(a); });
    define("cvt.rzi." + t + ".f32", [](float a) { return truncated<I>(a); });
    define("cvt.rzi." + t + ".f64", [](double a) { return truncated<I>(a); });
}

// Exact where no errors are asked for; otherwise as inexact as the manual allows.
void approximations() {
    define("ex2.approx.ftz.f32", [](float a) {
        a = flushed(a);
        if (a == 0.0f) return 1.0f;
        return flushed(errors.relative(std::exp2(double(a)), 0x1p-22, bits_of(a)));
    });
    define("lg2.approx.ftz.f32", [](float a) {
        a = flushed(a);
        const double exact = std::log2(double(a)), error = 0x1p-22 * errors.draw(bits_of(a));
        return flushed(float(a > 0.5f && a < 2.0f ? exact + error : exact * (1.0 + error)));
    });
    define("rcp.approx.ftz.f32", [](float a) {
        return flushed(errors.relative(1.0 / double(flushed(a)), 0x1p-23, bits_of(a)));
    });
    define("sqrt.approx.ftz.f32", [](float a) {
        return flushed(errors.relative(std::sqrt(double(flushed(a))), 0x1p-23, bits_of(a)));
    });
    define("tanh.approx.f32",
           [](float a) { return errors.relative(std::tanh(double(a)), 0x1p-11, bits_of(a)); });
    define("div.full.f32", [](float a, float b) {
        return errors.relative(double(a) / double(b), 0x1p-22, bits_of(a) ^ bits_of(b) << 32);
    });
    define("rcp.approx.ftz.f64", [](double a) {  // of the upper half alone
        const double exact = 1.0 / of_bits<double>(bits_of(a) & 0xffffffff00000000);
        const double result = exact * (1.0 + 0x1p-21 * errors.draw(bits_of(a)));
        return of_bits<double>(bits_of(result) & 0xffffffff00000000);
    });
}

void all_elementwise() {
    integers<uint16_t>("u16"), integers<int16_t>("s16");
    integers<uint32_t>("u32"), integers<int32_t>("s32");
    integers<uint64_t>("u64"), integers<int64_t>("s64");
    bits<uint16_t>("16"), bits<uint32_t>("32"), bits<uint64_t>("64");
    floats<float>("f32"), floats<double>("f64");
    halves<Float16>("f16"), halves<BFloat16>("bf16");
    widening<uint32_t, uint16_t>("u16"), widening<int32_t, int16_t>("s16");
    widening<uint64_t, uint32_t>("u32"), widening<int64_t, int32_t>("s32");
    conversions_of_integers<uint8_t>("u8"), conversions_of_integers<int8_t>("s8");
    conversions_of_integers<uint16_t>("u16"), conversions_of_integers<int16_t>("s16");
    conversions_of_integers<uint32_t>("u32"), conversions_of_integers<int32_t>("s32");
    conversions_of_integers<uint64_t>("u64"), conversions_of_integers<int64_t>("s64");
    conversions_of_floats<uint32_t>("u32"), conversions_of_floats<int32_t>("s32");
    conversions_of_floats<uint64_t>("u64"), conversions_of_floats<int64_t>("s64");
    approximations();
    define("cvt.f64.f32", [](float a) { return double(a); });
    define("cvt.rn.f32.f64", [](double a) { return float(a); });
    define("cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });
    define("cvt.rmi.f32.f32", [](float a) { return std::floor(a); });
    define("cvt.rmi.f64.f64", [](double a) { return std::floor(a); });
    define("abs.ftz.f32", [](float a) { return flushed(std::abs(a)); });
    define("mul.hi.u32", [](uint32_t a, uint32_t b) { return uint32_t(uint64_t{a} * b >> 32); });
    define("mul.hi.s32", [](int32_t a, int32_t b) { return int32_t(int64_t{a} * b >> 32); });
    define("popc.b32", [](uint32_t a) { return uint32_t(std::popcount(a)); });
    define("clz.b32", [](uint32_t a) { return uint32_t(std::countl_zero(a)); });
    define("bfe.u32", [](uint32_t a, uint32_t position, uint32_t length) -> uint32_t {
        position &= 255, length &= 255;
        const uint32_t shifted = position < 32 ? a >> position : 0;
        return length < 32 ? shifted & ((1u << length) - 1) : shifted;
    });
    define("mov.pred", [](uint8_t a) { return a; });
    define("not.pred", [](uint8_t a) { return uint8_t(~a & 1); });
    define("xor.pred", [](uint8_t a, uint8_t b) { return uint8_t(a ^ b); });
    define("and.pred", Kind::kPlain, combine_predicates<true>);
    define("or.pred", Kind::kPlain, combine_predicates<false>);
    define("unpack", Kind::kPlain, unpack);
    define("pack.b32", [](uint16_t low, uint16_t high) { return uint32_t{high} << 16 | low; });
    define("pack.b64", [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; });
    define("createpolicy", [](uint32_t) { return uint64_t{0}; });
}

// A source lane outside of the segment leaves a lane its own value.
enum class Shuffle { kUp, kDown, kButterfly, kIndex };
template <Shuffle kind>
void shuffle(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
    const Mask known_values = warp.written[size_t(instruction.from[0])];
    uint64_t values[kLanes];
    std::copy_n(warp.lanes_of(instruction.from[0]), kLanes, values);
    const uint64_t* const distance = known(warp, instruction.from[1], lanes, "distance");
    const uint64_t* const limits = known(warp, instruction.from[2], lanes, "limit");
    uint64_t* const to = warp.lanes_of(instruction.to[0]);
    Mask known_results = 0, inside = 0;
    for_lanes(lanes, [&](int lane) {
        const int b = int(distance[lane] & 31), c = int(limits[lane]);
        const int segment = c >> 8 & 31, last = (lane & segment) | (c & 31 & ~segment);
        const int first = lane & segment;
        int source = lane;
        bool valid = false;
        if constexpr (kind == Shuffle::kUp) {
            source = lane - b, valid = source >= last;
        } else if constexpr (kind == Shuffle::kDown) {
            source = lane + b, valid = source <= last;
        } else if constexpr (kind == Shuffle::kButterfly) {
            source = lane ^ b, valid = source <= last;
        } else {
            source = first | (b & ~segment), valid = source <= last;
        }
        if (!valid) source = lane;
        if (!(lanes >> source & 1)) fail("reads the register of a lane that does not take part");
        to[lane] = uint32_t(values[source]);
        known_results |= (known_values >> source & 1) << lane;
        inside |= Mask(valid) << lane;
    });
    Mask& written = warp.written[size_t(instruction.to[0])];
    written = (written & ~lanes) | known_results;
    if (instruction.to_count > 1) {
        uint64_t* const valid = warp.lanes_of(instruction.to[1]);
        for_lanes(lanes, [&](int lane) { valid[lane] = inside >> lane & 1; });
        warp.written[size_t(instruction.to[1])] |= lanes;
    }
}

// Of all lanes that take part.
template <typename T, typename F>
struct Reduction {
    static void execute(Machine&, Warp& warp, const Instruction& instruction, Mask lanes) {
        const uint64_t* const values = known(warp, instruction.from[0], lanes, "operand");
        T result = of_bits<T>(values[std::countr_zero(lanes)]);
        for_lanes(lanes & (lanes - 1),
                  [&](int lane) { result = F{}(result, of_bits<T>(values[lane])); });
        uint64_t* const to = warp.lanes_of(instruction.to[0]);
        for_lanes(lanes, [&](int lane) { to[lane] = bits_of(result); });
        warp.written[size_t(instruction.to[0])] |= lanes;
    }
};
template <typename T, typename F>
void reduction(const std::string& name, F) {
    define("redux.sync." + name, Kind::kCollective, Reduction<T, F>::execute);
}

void all_exchanges() {
    define("shfl.sync.up.b32", Kind::kCollective, shuffle<Shuffle::kUp>);
    define("shfl.sync.down.b32", Kind::kCollective, shuffle<Shuffle::kDown>);
    define("shfl.sync.bfly.b32", Kind::kCollective, shuffle<Shuffle::kButterfly>);
    define("shfl.sync.idx.b32", Kind::kCollective, shuffle<Shuffle::kIndex>);
    for (const char* const type : {"add.s32", "add.u32"}) {
        reduction<uint32_t>(type, [](uint32_t a, uint32_t b) { return a + b; });
    }
    reduction<int32_t>("min.s32", [](int32_t a, int32_t b) { return std::min(a, b); });
    reduction<int32_t>("max.s32", [](int32_t a, int32_t b) { return std::max(a, b); });
    reduction<uint32_t>("min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
    reduction<uint32_t>("max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
    reduction<uint32_t>("and.b32", [](uint32_t a, uint32_t b) { return a & b; });
    reduction<uint32_t>("or.b32", [](uint32_t a, uint32_t b) { return a | b; });
    reduction<uint32_t>("xor.b32", [](uint32_t a, uint32_t b) { return a ^ b; });
}

const bool defined = (all_elementwise(), all_exchanges(), true);

}  // namespace
}  // namespace ptx
