// Instructions that access registers alone, as PTX defines them where C++ does not. Compiled with
// -fwrapv: integers wrap.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "machine.h"
#include "memory.h"

namespace ptx {

std::map<std::string, Operation>& operations() {
    static std::map<std::string, Operation> all;
    return all;
}

namespace {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <typename T>
T widened(T x) {
    return x;
}
float widened(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
float widened(Float16 x) { return float(std::bit_cast<_Float16>(x.bits)); }

// To the nearest, ties to even.
template <typename Half>
Half narrowed(float x) {
    if (x != x) return {0x7fff};
    if constexpr (std::is_same_v<Half, Float16>) return {std::bit_cast<uint16_t>(_Float16(x))};
    const auto bits = std::bit_cast<uint32_t>(x);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Subnormal numbers are zero.
float flushed(float x) {
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// Of a number and NaN, the number; -0 is less than +0.
template <typename T>
T least(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        if (a != a || b != b) return a != a ? b : a;
        if (a == b) return std::signbit(a) ? a : b;
    }
    return a < b ? a : b;
}
template <typename T>
T greatest(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return -least(-a, -b);
    return a < b ? b : a;
}

// Towards zero, held in the range of the integer; NaN is 0.
template <typename I, typename F>
I truncated(F x) {
    constexpr auto kEnd = F(uint64_t{1} << (std::numeric_limits<I>::digits - 1)) * 2;
    if (x != x) return 0;
    if (x >= kEnd) return std::numeric_limits<I>::max();
    if (x <= (std::is_signed_v<I> ? -kEnd : F(0))) return std::numeric_limits<I>::min();
    return I(x);
}

// The low bits of a register as a value, and back. A NaN that is computed has one pattern.
template <typename T>
T of_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T>
uint64_t bits_of(T value) {
    if constexpr (std::is_floating_point_v<T>) {
        if (value != value) return sizeof value == 4 ? 0x7fffffff : 0x7fffffffffffffff;
    }
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

// For instructions whose result need not depend on all of their sources.
struct Value {
    uint64_t bits;
    bool known;
};

template <typename T>
T argument(uint64_t bits, bool known) {
    if constexpr (std::is_same_v<T, Value>) return {bits, known};
    return of_bits<T>(bits);
}

// One value per lane, of as many sources as the function has arguments; an array is two results.
template <typename F, typename Member = decltype(&F::operator())>
struct Elementwise;
template <typename F, typename R, typename... Arguments>
struct Elementwise<F, R (F::*)(Arguments...) const> {
    template <size_t... I>
    static void run(Warp& warp, const Instruction& in, Mask lanes, std::index_sequence<I...>) {
        const uint64_t* const from[] = {warp.lanes_of(in.from[I])..., nullptr};
        const Mask masks[] = {warp.written[size_t(in.from[I])]..., kAllLanes};
        uint64_t* to[2];
        for (int i = 0; i < 2; ++i) to[i] = in.to[i] < 0 ? nullptr : warp.lanes_of(in.to[i]);
        Mask known = 0;
        for_lanes(lanes, [&](int lane) {
            const R result = F{}(argument<Arguments>(from[I][lane], masks[I] >> lane & 1)...);
            if constexpr (std::is_same_v<R, Value>) {
                to[0][lane] = result.bits;
                known |= Mask(result.known) << lane;
            } else if constexpr (requires { result[1]; }) {
                if (to[0]) to[0][lane] = bits_of(result[0]);
                if (to[1]) to[1][lane] = bits_of(result[1]);
            } else {
                to[0][lane] = bits_of(result);
            }
        });
        if constexpr (!std::is_same_v<R, Value>) known = (masks[I] & ... & kAllLanes);
        for (int i = 0; i < 2; ++i) {
            if (to[i]) warp.mark(in.to[i], lanes, known);
        }
    }
    static void execute(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
        run(warp, in, lanes, std::index_sequence_for<Arguments...>{});
    }
};

template <typename F>
void define(const std::string& name, F) {
    operations()[name] = {Kind::kPlain, Elementwise<F>::execute};
}

// Types of an instruction, by which its name ends; kind is that of all where they are bare bits.
template <typename... T>
struct Types {
    const char* kind = nullptr;
};
template <typename T>
std::string type(const char* kind = nullptr) {
    if (std::is_same_v<T, BFloat16>) return ".bf16";
    const bool floats = std::is_floating_point_v<T> || std::is_class_v<T>;
    if (kind == nullptr) kind = floats ? ".f" : std::is_signed_v<T> ? ".s" : ".u";
    return kind + std::to_string(8 * sizeof(T));
}

constexpr Types<uint16_t, uint32_t, uint64_t> kBits{".b"};
constexpr Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t> kIntegers;
constexpr Types<float, double> kFloats;
constexpr Types<uint32_t, int32_t, uint64_t, int64_t, float, double> kNumbers;
constexpr Types<uint32_t, int32_t, uint64_t, int64_t, float, double, Float16, BFloat16> kCompared;

template <typename F, typename... T>
void unary(const std::string& name, Types<T...> types, F) {
    (define(name + type<T>(types.kind), [](T a) -> T { return T(F{}(a)); }), ...);
}
template <typename F, typename... T>
void binary(const std::string& name, Types<T...> types, F) {
    (define(name + type<T>(types.kind), [](T a, T b) -> T { return T(F{}(a, b)); }), ...);
}
template <typename F, typename... T>
void ternary(const std::string& name, Types<T...> types, F) {
    (define(name + type<T>(types.kind), [](T a, T b, T c) -> T { return T(F{}(a, b, c)); }), ...);
}
template <typename F, typename... T>
void shift(const std::string& name, Types<T...> types, F) {
    (define(name + type<T>(types.kind), [](T a, uint32_t b) -> T { return T(F{}(a, b)); }), ...);
}
template <typename F, typename... T>
void compare(const std::string& name, Types<T...> types, F) {
    (define("setp." + name + type<T>(types.kind),
            [](T a, T b) -> bool { return F{}(widened(a), widened(b)); }),
     ...);
}
// And the unordered one, which is true where one is NaN.
template <typename F, typename... T>
void compare_both(const std::string& name, Types<T...> types, F) {
    compare(name, types, [](auto a, auto b) { return F{}(a, b) && a == a && b == b; });
    compare(name + "u", types, [](auto a, auto b) { return F{}(a, b) || a != a || b != b; });
}

template <typename Wide, typename Narrow>
void widening() {
    define("mul.wide" + type<Narrow>(), [](Narrow a, Narrow b) { return Wide(Wide(a) * Wide(b)); });
    define("mad.wide" + type<Narrow>(),
           [](Narrow a, Narrow b, Wide c) { return Wide(Wide(a) * Wide(b) + c); });
}

template <typename From, typename... To>
void conversions(Types<To...>) {
    (define("cvt" + type<To>() + type<From>(), [](From a) { return To(a); }), ...);
    define("cvt.rn.f32" + type<From>(), [](From a) { return float(a); });
    define("cvt.rn.f64" + type<From>(), [](From a) { return double(a); });
    define("cvt.rzi" + type<From>() + ".f32", [](float a) { return truncated<From>(a); });
    define("cvt.rzi" + type<From>() + ".f64", [](double a) { return truncated<From>(a); });
}

template <typename Half>
void halves() {
    const std::string t = type<Half>();
    define("cvt.f32" + t, [](Half a) { return widened(a); });
    define("cvt.f64" + t, [](Half a) { return double(widened(a)); });
    define("cvt.rn" + t + ".f32", [](float a) { return narrowed<Half>(a); });
    define("cvt.rn" + t + "x2.f32", [](float high, float low) {
        return std::bit_cast<uint32_t>(std::array{narrowed<Half>(low), narrowed<Half>(high)});
    });
    define("setp.eq" + t + "x2", [](std::array<Half, 2> a, std::array<Half, 2> b) {
        return std::array{widened(a[0]) == widened(b[0]), widened(a[1]) == widened(b[1])};
    });
}

// Exact where errors.seed is 0. Otherwise a relative error may be `most`, as the manual states it;
// equal arguments have equal errors.
double error(double most, uint64_t argument) {
    if (error_seed == 0) return 0.0;
    uint64_t x = argument * 0x9e3779b97f4a7c15 + error_seed;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return most * double(int64_t(x ^ x >> 31)) * 0x1p-63;
}
template <typename F>
void approximate(const std::string& name, F) {
    define(name, [](float a) {
        a = flushed(a);
        return flushed(float(F{}(double(a), bits_of(a))));
    });
}
void approximations() {
    approximate("ex2.approx.ftz.f32", [](double a, uint64_t bits) {
        return a == 0.0 ? 1.0 : std::exp2(a) * (1.0 + error(0x1p-22, bits));
    });
    approximate("rcp.approx.ftz.f32",
                [](double a, uint64_t bits) { return (1.0 + error(0x1p-23, bits)) / a; });
    approximate("sqrt.approx.ftz.f32", [](double a, uint64_t bits) {
        return std::sqrt(a) * (1.0 + error(0x1p-23, bits));
    });
    define("tanh.approx.f32", [](float a) {
        return float(std::tanh(double(a)) * (1.0 + error(0x1p-11, bits_of(a))));
    });
    define("div.full.f32", [](float a, float b) {
        const double off = error(0x1p-22, bits_of(a) ^ bits_of(b) << 32);
        return float(double(a) / double(b) * (1.0 + off));
    });
    constexpr uint64_t kUpper = 0xffffffff00000000;  // halves of argument and result
    define("rcp.approx.ftz.f64", [](double a) {
        const double exact = 1.0 / of_bits<double>(bits_of(a) & kUpper);
        return of_bits<double>(bits_of(exact * (1.0 + error(0x1p-21, bits_of(a)))) & kUpper);
    });
}

// A field of bits, of which the upper ones repeat the sign.
template <typename T>
T field(T a, uint32_t position, uint32_t length) {
    position &= 255, length &= 255;
    if (length == 0) return 0;
    const int64_t shifted = int64_t{a} >> std::min(position, 63u);
    const int unused = 64 - int(std::min(length, 64u));
    if constexpr (std::is_signed_v<T>) return T(int64_t(uint64_t(shifted) << unused) >> unused);
    return T(uint64_t(shifted) << unused >> unused);
}

// Lanes read the register of another lane, or their own where that is outside of the segment.
template <bool kUp, typename F>
void shuffle(const std::string& mode, F) {
    const auto execute = [](Memory&, Warp& warp, const Instruction& in, Mask lanes) {
        const uint64_t* const distances = warp.known(in.from[1], lanes, "a distance");
        const uint64_t* const limits = warp.known(in.from[2], lanes, "a limit");
        uint64_t results[kLanes];
        Mask known = 0, inside = 0;
        for_lanes(lanes, [&](int lane) {
            const int segment = int(limits[lane]) >> 8 & 31;
            const int last = (lane & segment) | (int(limits[lane]) & 31 & ~segment);
            const int other = F{}(lane, int(distances[lane] & 31), segment);
            const bool valid = kUp ? other >= last : other <= last;
            const int source = valid ? other : lane;
            if (~lanes >> source & 1) fail("reads the register of a lane that does not take part");
            results[lane] = uint32_t(warp.lanes_of(in.from[0])[source]);
            known |= (warp.written[size_t(in.from[0])] >> source & 1) << lane;
            inside |= Mask(valid) << lane;
        });
        warp.write(in.to[0], lanes, known, [&](int lane) { return results[lane]; });
        if (in.to[1] < 0) return;
        warp.write(in.to[1], lanes, kAllLanes, [&](int lane) { return inside >> lane & 1; });
    };
    operations()["shfl.sync." + mode + ".b32"] = {Kind::kCollective, execute};
}

// Of all lanes that take part.
template <typename F>
void reduce(const std::string& name, F) {
    const auto execute = [](Memory&, Warp& warp, const Instruction& in, Mask lanes) {
        const uint64_t* const from = warp.lanes_of(in.from[0]);
        auto result = int32_t(from[std::countr_zero(lanes)]);
        for_lanes(lanes & (lanes - 1),
                  [&](int lane) { result = F{}(result, int32_t(from[lane])); });
        const bool known = !(lanes & ~warp.written[size_t(in.from[0])]);
        warp.write(in.to[0], lanes, known ? kAllLanes : 0, [&](int) { return bits_of(result); });
    };
    operations()["redux.sync." + name + ".s32"] = {Kind::kCollective, execute};
}

}  // namespace

void define_arithmetic() {
    const auto add = [](auto a, auto b) { return a + b; };
    const auto subtract = [](auto a, auto b) { return a - b; };
    const auto multiply = [](auto a, auto b) { return a * b; };
    const auto minimum = [](auto a, auto b) { return least(a, b); };
    const auto maximum = [](auto a, auto b) { return greatest(a, b); };
    binary("add", kNumbers, add), binary("add.rn", kFloats, add);
    binary("sub", kNumbers, subtract), binary("sub.rn", kFloats, subtract);
    binary("mul", kFloats, multiply), binary("mul.rn", kFloats, multiply);
    binary("mul.lo", kIntegers, multiply);
    binary("min", kNumbers, minimum);
    binary("max", kNumbers, maximum);
    ternary("mad.lo", kIntegers, [](auto a, auto b, auto c) { return a * b + c; });
    ternary("fma.rn", kFloats, [](auto a, auto b, auto c) { return std::fma(a, b, c); });
    unary("neg", kNumbers, [](auto a) { return -a; });
    unary("abs", Types<int32_t, int64_t, float, double>{}, [](auto a) { return std::abs(a); });
    // By zero, and of the least number by -1, as GPUs do it: PTX does not say.
    binary("div", kIntegers, [](auto a, auto b) {
        if (b == 0) return decltype(a)(-1);
        return decltype(a)(std::is_signed_v<decltype(a)> && b == decltype(b)(-1) ? -a : a / b);
    });
    binary("rem", kIntegers, [](auto a, auto b) {
        if (b == 0) return a;
        return decltype(a)(std::is_signed_v<decltype(a)> && b == decltype(b)(-1) ? 0 : a % b);
    });
    binary("div.rn", kFloats, [](auto a, auto b) { return a / b; });
    define("abs.ftz.f32", [](float a) { return flushed(std::abs(a)); });

    compare_both("lt", kCompared, [](auto a, auto b) { return a < b; });
    compare_both("le", kCompared, [](auto a, auto b) { return a <= b; });
    compare_both("gt", kCompared, [](auto a, auto b) { return a > b; });
    compare_both("ge", kCompared, [](auto a, auto b) { return a >= b; });
    compare_both("eq", kCompared, [](auto a, auto b) { return a == b; });
    compare_both("ne", kCompared, [](auto a, auto b) { return a != b; });
    compare("eq", kBits, [](auto a, auto b) { return a == b; });
    compare("ne", kBits, [](auto a, auto b) { return a != b; });
    compare("num", kFloats, [](auto a, auto b) { return a == a && b == b; });
    compare("nan", kFloats, [](auto a, auto b) { return a != a || b != b; });

    binary("and", kBits, [](auto a, auto b) { return a & b; });
    binary("or", kBits, [](auto a, auto b) { return a | b; });
    binary("xor", kBits, [](auto a, auto b) { return a ^ b; });
    unary("not", kBits, [](auto a) { return ~a; });
    // A shift by the width or more leaves nothing, or the sign.
    const auto left = [](auto a, uint32_t b) { return b < 8 * sizeof a ? a << b : 0; };
    const auto right = [](auto a, uint32_t b) {
        const uint32_t end = 8 * sizeof a;
        return b < end || std::is_signed_v<decltype(a)> ? a >> std::min(b, end - 1) : 0;
    };
    shift("shl", kBits, left);
    shift("shr", kBits, right), shift("shr", kIntegers, right);
    for (const std::string t : {"b16", "b32", "b64", "u16", "u32", "u64", "f32", "f64", "pred"}) {
        define("mov." + t, [](Value a) { return a; });
        define("selp." + t, [](Value a, Value b, Value choice) {
            const Value chosen = choice.bits & 1 ? a : b;
            return Value{chosen.bits, chosen.known && choice.known};
        });
    }
    widening<uint64_t, uint32_t>(), widening<int64_t, int32_t>();
    conversions<uint8_t>(kIntegers), conversions<int8_t>(kIntegers);
    conversions<uint16_t>(kIntegers), conversions<int16_t>(kIntegers);
    conversions<uint32_t>(kIntegers), conversions<int32_t>(kIntegers);
    conversions<uint64_t>(kIntegers), conversions<int64_t>(kIntegers);
    halves<Float16>(), halves<BFloat16>();
    approximations();
    define("cvt.f64.f32", [](float a) { return double(a); });
    define("cvt.rn.f32.f64", [](double a) { return float(a); });
    define("popc.b32", [](uint32_t a) { return uint32_t(std::popcount(a)); });
    define("bfe.u32", [](uint32_t a, uint32_t b, uint32_t c) { return field(a, b, c); });
    define("bfe.s32", [](int32_t a, uint32_t b, uint32_t c) { return field(a, b, c); });
    define("createpolicy", [] { return uint64_t{0}; });
    define("pack.b32", [](uint16_t low, uint16_t high) { return uint32_t{high} << 16 | low; });
    define("pack.b64", [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; });
    define("unpack.b32", [](uint32_t a) { return std::array{uint16_t(a), uint16_t(a >> 16)}; });
    define("unpack.b64", [](uint64_t a) { return std::array{uint32_t(a), uint32_t(a >> 32)}; });

    define("not.pred", [](uint8_t a) { return uint8_t(~a & 1); });
    define("xor.pred", [](uint8_t a, uint8_t b) { return uint8_t(a ^ b); });
    // Where one source decides, the other need not be known.
    define("and.pred", [](Value a, Value b) {
        const bool zero = (a.known && !a.bits) || (b.known && !b.bits);
        return Value{a.bits & b.bits, zero || (a.known && b.known)};
    });
    define("or.pred", [](Value a, Value b) {
        const bool one = (a.known && a.bits) || (b.known && b.bits);
        return Value{a.bits | b.bits, one || (a.known && b.known)};
    });

    shuffle<true>("up", [](int lane, int b, int) { return lane - b; });
    shuffle<false>("down", [](int lane, int b, int) { return lane + b; });
    shuffle<false>("bfly", [](int lane, int b, int) { return lane ^ b; });
    shuffle<false>("idx", [](int lane, int b, int same) { return (lane & same) | (b & ~same); });
    reduce("add", add), reduce("min", minimum), reduce("max", maximum);
}

}  // namespace ptx
