// Instructions that access registers alone, as PTX defines them where C++ does not. Compiled with
// -fwrapv: integers wrap.
#include <array>
#include <cmath>
#include <limits>

#include "memory.h"

namespace ptx {

std::map<std::string, Operation>& operations() {
    static std::map<std::string, Operation> all;
    return all;
}

namespace {

using Wide = __int128;  // holds every integer
struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    // To the nearest, ties to even.
    explicit BFloat16(float x) {
        const auto wide = std::bit_cast<uint32_t>(x);
        bits = x != x ? 0x7fff : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// For instructions whose result need not depend on all of their sources.
struct Value {
    uint64_t bits;
    bool known;
};

// The low bits of a register as a value, and back. A NaN that is computed has one pattern, but any
// sign.
template <typename T>
T of_bits(uint64_t bits, bool known = true) {
    if constexpr (std::is_same_v<T, Value>) return {bits, known};
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T>
uint64_t bits_of(T value) {
    if (value != value) {
        const bool negative = error_seed && ++nans % 2;
        return ~uint64_t{0} >> (64 - 8 * sizeof value) >> !negative;
    }
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

// Of each lane one value of type R, or an array of two, made of as many sources as there are
// arguments.
template <typename F, typename Signature>
struct Elementwise;
template <typename F, typename R, typename... Arguments>
struct Elementwise<F, R(Arguments...)> {
    static constexpr int64_t kSources = sizeof...(Arguments);
    static void execute(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
        [&]<size_t... I>(std::index_sequence<I...>) {
            const uint64_t* const from[] = {warp.lanes_of(in.from[I])..., nullptr};
            const Mask masks[] = {warp.written[size_t(in.from[I])]..., kAllLanes};
            uint64_t* to[2];
            for (int i = 0; i < 2; ++i) to[i] = in.to[i] < 0 ? nullptr : warp.lanes_of(in.to[i]);
            Mask known = 0;
            for_lanes(lanes, [&](int lane) {
                const auto result =
                    R(F{}(of_bits<Arguments>(from[I][lane], masks[I] >> lane & 1)...));
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
        }(std::index_sequence_for<Arguments...>{});
    }
};

template <typename Signature, typename F>
void define(const std::string& name, F) {
    using Of = Elementwise<F, Signature>;
    operations()[name] = {Kind::kPlain, Of::execute, Of::kSources};
}

// Types of an instruction, by which its name ends; kind is that of all where they are bare bits.
template <typename... T>
struct Types {
    const char* kind = nullptr;
};
template <typename T>
std::string type(const char* kind = nullptr) {
    if (std::is_same_v<T, BFloat16>) return ".bf16";
    if (kind == nullptr) kind = T(0.5f) != T(0) ? ".f" : std::is_signed_v<T> ? ".s" : ".u";
    return kind + std::to_string(8 * sizeof(T));
}

constexpr Types<uint16_t, uint32_t, uint64_t> kBits{".b"};
constexpr Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t> kIntegers;
constexpr Types<float, double> kFloats;
constexpr Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double> kNumbers;
constexpr Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double, _Float16,
                BFloat16>
    kCompared;

// What each instruction makes of its type.
template <typename T>
using Unary = T(T);
template <typename T>
using Binary = T(T, T);
template <typename T>
using Ternary = T(T, T, T);
template <typename T>
using Shift = T(T, uint32_t);
template <typename T>
using Comparison = bool(T, T);
template <typename T>
using Field = T(T, uint32_t, uint32_t);
template <template <typename> typename Signature, typename F, typename... T>
void define(const std::string& name, Types<T...> types, F function) {
    (define<Signature<T>>(name + type<T>(types.kind), function), ...);
}

// And the unordered one, which is true where one is NaN.
template <typename F>
void compare(const std::string& name, F) {
    define<Comparison>("setp." + name, kCompared,
                       [](auto a, auto b) { return F{}(a, b) && a == a && b == b; });
    define<Comparison>("setp." + name + "u", kCompared,
                       [](auto a, auto b) { return F{}(a, b) || a != a || b != b; });
}

// Of a number and NaN, the number; -0 is less than +0.
template <typename T>
T extreme(T a, T b, bool least) {
    if (a != a || b != b) return a != a ? b : a;
    const bool less = a < b || (a == b && std::signbit(double(a)));
    return less == least ? a : b;
}

// PTX does not say what a division by zero makes.
Wide divisor(Wide b) {
    if (b == 0) fail("divides by zero");
    return b;
}

constexpr auto kConvert = [](auto a) { return a; };

template <typename Integer, typename... To>
void conversions(Types<To...>) {
    const std::string t = type<Integer>();
    (define<To(Integer)>("cvt" + type<To>() + t, kConvert), ...);
    define<float(Integer)>("cvt.rn.f32" + t, kConvert);
    define<double(Integer)>("cvt.rn.f64" + t, kConvert);
    // Towards zero, held in the range of the integer; NaN is its highest bit, or 0 if neither has
    // 64 bits. A long double holds every integer.
    const auto truncate = []<typename Float>(Float a) {
        using Limits = std::numeric_limits<Integer>;
        constexpr bool kWide = sizeof(Integer) == 8 || sizeof(Float) == 8;
        if (a != a) return kWide ? Integer(Wide{1} << (8 * sizeof(Integer) - 1)) : Integer(0);
        return Integer(std::clamp<long double>(a, Limits::min(), Limits::max()));
    };
    define<Integer(float)>("cvt.rzi" + t + ".f32", truncate);
    define<Integer(double)>("cvt.rzi" + t + ".f64", truncate);
}

template <typename Half>
void halves() {
    const std::string t = type<Half>();
    define<float(Half)>("cvt.f32" + t, kConvert);
    define<double(Half)>("cvt.f64" + t, kConvert);
    define<float(Half, float)>("sub.rn.f32" + t, [](Half a, float b) { return float(a) - b; });
    define<Half(float)>("cvt.rn" + t + ".f32", kConvert);
    define<uint32_t(float, float)>("cvt.rn" + t + "x2.f32", [](float high, float low) {
        return bits_of(Half(high)) << 16 | bits_of(Half(low));
    });
    using Pair = std::array<Half, 2>;
    define<uint32_t(Pair, Pair)>("max" + t + "x2", [](Pair a, Pair b) {
        const auto larger = [&](int i) { return bits_of(Half(extreme<float>(a[i], b[i], false))); };
        return larger(1) << 16 | larger(0);
    });
    define<std::array<bool, 2>(Pair, Pair)>("setp.eq" + t + "x2", [](Pair a, Pair b) {
        return std::array{a[0] == b[0], a[1] == b[1]};
    });
}

// Two values in a register of 64 bits.
using Pair = std::array<float, 2>;
template <typename Signature, typename F>
void pairs(const std::string& name, F) {
    define<Signature>(name + ".f32x2", [](auto... x) {
        return bits_of(F{}(x[1]...)) << 32 | bits_of(F{}(x[0]...));
    });
}

// Subnormal numbers are zero.
float flushed(float x) {
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// Exact where error_seed is 0. Otherwise the relative error may be `most`, as the manual states it;
// it is the same whenever the exact result is.
double inexact(double exact, double most) {
    if (error_seed == 0) return exact;
    uint64_t x = bits_of(exact) * 0x9e3779b97f4a7c15 + error_seed;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return exact * (1.0 + most * double(int64_t(x ^ x >> 31)) * 0x1p-63);
}
template <typename F>
void approximate(const std::string& name, F) {
    define<float(float)>(name + ".approx.ftz.f32",
                         [](float a) { return flushed(float(F{}(double(flushed(a))))); });
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
template <typename T, typename F>
void reduce(const std::string& name, F) {
    const auto execute = [](Memory&, Warp& warp, const Instruction& in, Mask lanes) {
        const uint64_t* const from = warp.lanes_of(in.from[0]);
        auto result = of_bits<T>(from[std::countr_zero(lanes)]);
        for_lanes(lanes & (lanes - 1),
                  [&](int lane) { result = F{}(result, of_bits<T>(from[lane])); });
        const bool known = !(lanes & ~warp.written[size_t(in.from[0])]);
        warp.write(in.to[0], lanes, known ? kAllLanes : 0, [&](int) { return bits_of(result); });
    };
    operations()["redux.sync." + name + type<T>()] = {Kind::kCollective, execute};
}

// Of each lane that takes part whether its predicate holds.
void ballot(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
    const uint64_t* const votes = warp.known(in.from[0], lanes, "a predicate");
    Mask result = 0;
    for_lanes(lanes, [&](int lane) { result |= Mask(votes[lane] & 1) << lane; });
    warp.write(in.to[0], lanes, kAllLanes, [&](int) { return result; });
}

// One of the lanes, whichever it is: here the last one.
void elect(Memory&, Warp& warp, const Instruction& in, Mask lanes) {
    const int elected = kLanes - 1 - std::countl_zero(lanes);
    if (in.to[0] >= 0) {
        warp.write(in.to[0], lanes, kAllLanes, [&](int) { return uint64_t(elected); });
    }
    warp.write(in.to[1], lanes, kAllLanes, [&](int lane) { return lane == elected; });
}

}  // namespace

void define_arithmetic() {
    const auto add = [](auto a, auto b) { return a + b; };
    const auto subtract = [](auto a, auto b) { return a - b; };
    const auto multiply = [](auto a, auto b) { return a * b; };
    const auto minimum = [](auto a, auto b) { return extreme(a, b, true); };
    const auto maximum = [](auto a, auto b) { return extreme(a, b, false); };
    define<Binary>("add", kNumbers, add), define<Binary>("add.rn", kFloats, add);
    define<Binary>("sub", kNumbers, subtract), define<Binary>("sub.rn", kFloats, subtract);
    define<Binary>("mul", kFloats, multiply), define<Binary>("mul.rn", kFloats, multiply);
    define<Binary>("mul.lo", kIntegers, multiply);
    define<Binary>("min", kNumbers, minimum), define<Binary>("max", kNumbers, maximum);
    const auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
    using TwoPairs = uint64_t(Pair, Pair);
    for (const std::string rounding : {"", ".rn"}) {
        pairs<TwoPairs>("add" + rounding, add), pairs<TwoPairs>("sub" + rounding, subtract);
        pairs<TwoPairs>("mul" + rounding, multiply);
    }
    pairs<uint64_t(Pair, Pair, Pair)>("fma.rn", fused);
    define<Ternary>("min3", Types<float>{},
                    [](auto a, auto b, auto c) { return extreme(extreme(a, b, true), c, true); });
    define<Ternary>("max3", Types<float>{},
                    [](auto a, auto b, auto c) { return extreme(extreme(a, b, false), c, false); });
    define<Binary>("div.rn", kFloats, [](auto a, auto b) { return a / b; });
    define<Ternary>("mad.lo", kIntegers, [](auto a, auto b, auto c) { return a * b + c; });
    define<Ternary>("fma.rn", kFloats, fused);
    define<double(double)>("rcp.rn.f64", [](double a) { return 1 / a; });
    define<Binary>("copysign", kFloats, [](auto a, auto b) { return std::copysign(b, a); });
    define<float(float)>("cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });
    define<Unary>("neg", kNumbers, [](auto a) { return -a; });
    define<Unary>("abs", kFloats, [](auto a) { return std::abs(a); });
    define<Unary>("abs.ftz", Types<float>{}, [](float a) { return flushed(std::abs(a)); });
    define<Binary>("div", kIntegers, [](Wide a, Wide b) { return a / divisor(b); });
    define<Binary>("rem", kIntegers, [](Wide a, Wide b) { return a % divisor(b); });

    compare("lt", [](auto a, auto b) { return a < b; });
    compare("le", [](auto a, auto b) { return a <= b; });
    compare("gt", [](auto a, auto b) { return a > b; });
    compare("ge", [](auto a, auto b) { return a >= b; });
    compare("eq", [](auto a, auto b) { return a == b; });
    compare("ne", [](auto a, auto b) { return a != b; });
    define<Comparison>("setp.eq", kBits, [](auto a, auto b) { return a == b; });
    define<Comparison>("setp.ne", kBits, [](auto a, auto b) { return a != b; });
    define<Comparison>("setp.num", kFloats, [](auto a, auto b) { return a == a && b == b; });
    define<Comparison>("setp.nan", kFloats, [](auto a, auto b) { return a != a || b != b; });

    define<Binary>("and", kBits, [](auto a, auto b) { return a & b; });
    define<Binary>("or", kBits, [](auto a, auto b) { return a | b; });
    define<Binary>("xor", kBits, [](auto a, auto b) { return a ^ b; });
    define<Unary>("not", kBits, [](auto a) { return ~a; });
    // A shift by the width or more leaves nothing, or the sign.
    const auto right = [](Wide a, uint32_t b) { return a >> std::min(b, 64u); };
    define<Shift>("shl", kBits, [](Wide a, uint32_t b) { return a << std::min(b, 64u); });
    define<Shift>("shr", kBits, right), define<Shift>("shr", kIntegers, right);
    for (const std::string t : {"b16", "b32", "b64", "u16", "u32", "u64", "f32", "f64", "pred"}) {
        define<Value(Value)>("mov." + t, kConvert);
        define<Value(Value, Value, Value)>("selp." + t, [](Value a, Value b, Value choice) {
            const Value chosen = choice.bits & 1 ? a : b;
            return Value{chosen.bits, chosen.known && choice.known};
        });
    }
    const auto product = [](int64_t a, int64_t b) { return a * b; };
    const auto sum = [](int64_t a, int64_t b, int64_t c) { return a * b + c; };
    define<uint32_t(uint16_t, uint16_t)>("mul.wide.u16", product);
    define<int64_t(int32_t, int32_t)>("mul.wide.s32", product);
    define<int64_t(uint32_t, uint32_t)>("mul.wide.u32", product);
    define<int64_t(int32_t, int32_t, int64_t)>("mad.wide.s32", sum);
    define<int64_t(uint32_t, uint32_t, int64_t)>("mad.wide.u32", sum);
    conversions<uint8_t>(kIntegers), conversions<int8_t>(kIntegers);
    conversions<uint16_t>(kIntegers), conversions<int16_t>(kIntegers);
    conversions<uint32_t>(kIntegers), conversions<int32_t>(kIntegers);
    conversions<uint64_t>(kIntegers), conversions<int64_t>(kIntegers);
    halves<_Float16>(), halves<BFloat16>();
    define<double(float)>("cvt.f64.f32", kConvert);
    define<float(double)>("cvt.rn.f32.f64", kConvert);
    define<uint32_t(uint32_t)>("popc.b32", [](uint32_t a) { return std::popcount(a); });
    // By how much to shift the highest bit to the top; of 0, -1.
    define<uint32_t(uint32_t)>("bfind.shiftamt.u32",
                               [](uint32_t a) { return a ? std::countl_zero(a) : -1; });
    define<uint32_t(uint32_t)>("brev.b32", [](uint32_t a) {
        uint32_t result = 0;
        for (int i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
        return result;
    });
    define<uint32_t(uint32_t, uint32_t, uint32_t)>(
        "shf.r.wrap.b32",
        [](uint64_t low, uint64_t high, uint32_t n) { return (high << 32 | low) >> (n & 31); });
    // A field of bits, of which the upper ones repeat the sign.
    define<Field>("bfe", Types<uint32_t, int32_t>{}, [](auto a, uint32_t from, uint32_t length) {
        const Wide mask = (Wide{1} << std::min(length & 255, 64u)) - 1;
        const Wide sign = std::is_signed_v<decltype(a)> ? (mask >> 1) + 1 : 0;
        return ((Wide{a} >> std::min(from & 255, 64u) & mask) ^ sign) - sign;
    });
    // Bytes of two registers, or their signs.
    define<uint32_t(uint32_t, uint32_t, uint32_t)>("prmt.b32", [](Wide a, Wide b, Wide choice) {
        uint32_t result = 0;
        for (int i = 4; i-- > 0;) {
            const auto byte = int8_t((b << 32 | a) >> 8 * int(choice >> 4 * i & 7));
            result = result << 8 | uint8_t(choice >> 4 * i & 8 ? byte >> 7 : byte);
        }
        return result;
    });
    using Halves = std::array<uint16_t, 2>;
    using Words = std::array<uint32_t, 2>;
    define<uint32_t(uint16_t, uint16_t)>("pack.b32", [](Wide a, Wide b) { return b << 16 | a; });
    define<uint64_t(uint32_t, uint32_t)>("pack.b64", [](Wide a, Wide b) { return b << 32 | a; });
    define<Halves(uint32_t)>("unpack.b32", [](auto a) { return std::bit_cast<Halves>(a); });
    define<Words(uint64_t)>("unpack.b64", [](auto a) { return std::bit_cast<Words>(a); });

    define<uint8_t(uint8_t)>("not.pred", [](uint8_t a) { return ~a & 1; });
    // Where one source decides, the other need not be known.
    define<Value(Value, Value)>("and.pred", [](Value a, Value b) {
        const bool zero = (a.known && !a.bits) || (b.known && !b.bits);
        return Value{a.bits & b.bits, zero || (a.known && b.known)};
    });
    define<uint8_t(uint8_t, uint8_t)>("xor.pred", [](uint8_t a, uint8_t b) { return a ^ b; });
    define<Value(Value, Value)>("or.pred", [](Value a, Value b) {
        const bool one = (a.known && a.bits) || (b.known && b.bits);
        return Value{a.bits | b.bits, one || (a.known && b.known)};
    });

    approximate("ex2", [](double a) { return a == 0 ? 1 : inexact(std::exp2(a), 0x1p-22); });
    approximate("rcp", [](double a) { return inexact(1 / a, 0x1p-23); });
    approximate("sqrt", [](double a) { return inexact(std::sqrt(a), 0x1p-23); });
    define<float(float)>("tanh.approx.f32",
                         [](double a) { return inexact(std::tanh(a), 0x1p-11); });
    // Of larger divisors than 2^126 it makes 0; of smaller ones than 2^-126 PTX says nothing.
    define<float(float, float)>("div.approx.f32", [](double a, double b) {
        if (std::abs(b) < 0x1p-126) fail("divides approximately by less than 2^-126");
        return std::isfinite(b) && std::abs(b) > 0x1p126 ? a * 0.0 : inexact(a / b, 0x1p-22);
    });
    define<float(float, float)>("div.full.f32",
                                [](double a, double b) { return inexact(a / b, 0x1p-22); });
    define<double(double)>("rcp.approx.ftz.f64", [](double a) {
        constexpr uint64_t kUpper = 0xffffffff00000000;  // halves of argument and result
        const double exact = 1 / of_bits<double>(bits_of(a) & kUpper);
        // PTX states no bound; the mathematical library refines the result.
        return of_bits<double>(bits_of(inexact(exact, 0x1p-18)) & kUpper);
    });

    shuffle<true>("up", [](int lane, int b, int) { return lane - b; });
    shuffle<false>("down", [](int lane, int b, int) { return lane + b; });
    shuffle<false>("bfly", [](int lane, int b, int) { return lane ^ b; });
    shuffle<false>("idx",
                   [](int lane, int b, int segment) { return (lane & segment) | (b & ~segment); });
    operations()["vote.sync.ballot.b32"] = {Kind::kCollective, ballot};
    operations()["elect.sync"] = {Kind::kCollective, elect};
    reduce<int32_t>("add", add), reduce<int32_t>("min", minimum), reduce<int32_t>("max", maximum);
    reduce<float>("min", minimum), reduce<float>("max", maximum);
}

}  // namespace ptx
