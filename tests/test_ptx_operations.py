"""Every instruction of the executor of PTX (tests/ptx) against NumPy and PyTorch, to the bit."""

import math
import shutil
import sys

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ptx"),  # one worker builds the machine
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="builds as on Linux"),
]

from ptx import executor, parser  # noqa: E402
from ptx.assemble import evaluate, kernel, run  # noqa: E402

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
S16, S32, S64, B = torch.int16, torch.int32, torch.int64, torch.bool
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, math.inf, -math.inf, math.nan]
SPECIAL += [3e38, -3e38, 1e-45, -1e-40, 1e300, 2.0**31, 2.0**63, -(2.0**63), 65_520.0, 1e-7]


def values(dtype, seed=0, n=256):
    """Random ones, and those at which rules change."""
    g = torch.Generator().manual_seed(seed)
    if dtype == B:
        return torch.rand(n, generator=g) < 0.5
    if dtype.is_floating_point:
        drawn = torch.randn(n, generator=g, dtype=F64) * 10.0 ** torch.randint(
            -6, 6, (n,), generator=g
        )
        drawn[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=F64)
        return drawn[torch.randperm(n, generator=g)].to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    drawn = torch.randint(low, high, (n,), generator=g, dtype=dtype)
    drawn[: n // 2] = torch.randint(-3, 70, (n // 2,), generator=g, dtype=dtype)
    drawn[:4] = torch.tensor([low, high, -1, 0], dtype=dtype)
    return drawn[torch.randperm(n, generator=g)]


def same(got, expected):
    """Equal bits, NaNs aside, which have a pattern of their own."""
    if got.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        bits = {2: S16, 4: S32, 8: S64}[got.element_size()]
        got, expected = got[~nan].view(bits), expected[~nan].view(bits)
    assert torch.equal(got, expected)


def check(name, to, dtypes, expected):
    """``expected`` takes NumPy arrays, where there is no bfloat16."""
    sources = [values(dtype, seed) for seed, dtype in enumerate(dtypes)]
    (got,) = evaluate(name, [to], *sources)
    with np.errstate(all="ignore"):
        true = expected(*(source.numpy() for source in sources))
    same(got, torch.from_numpy(np.ascontiguousarray(true)).view(to))


def unsigned(x):
    return x.view(f"u{x.dtype.itemsize}")


def wide(x):
    """Python's integers, which have no width."""
    return x.astype(object)


def cut(x, dtype):
    """The low bits."""
    bits = 8 * np.dtype(dtype).itemsize
    return (x & ((1 << bits) - 1)).astype(f"u{bits // 8}").view(dtype)


INTEGERS = {"s16": (S16, np.int16), "s32": (S32, np.int32), "s64": (S64, np.int64)}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers(kind):
    t, n = INTEGERS[kind]
    u = "u" + kind[1:]
    for name, f in {
        f"add.{kind}": lambda a, b: a + b,
        f"sub.{kind}": lambda a, b: a - b,
        f"mul.lo.{kind}": lambda a, b: cut(wide(a) * wide(b), n),
        f"min.{kind}": np.minimum,
        f"max.{kind}": np.maximum,
        f"min.{u}": lambda a, b: np.minimum(unsigned(a), unsigned(b)),
        f"max.{u}": lambda a, b: np.maximum(unsigned(a), unsigned(b)),
        f"and.b{kind[1:]}": np.bitwise_and,
        f"or.b{kind[1:]}": np.bitwise_or,
        f"xor.b{kind[1:]}": np.bitwise_xor,
    }.items():
        check(name, t, [t, t], f)
    check(f"mad.lo.{kind}", t, [t, t, t], lambda a, b, c: cut(wide(a) * wide(b) + wide(c), n))
    check(f"neg.{kind}", t, [t], np.negative)
    check(f"abs.{kind}", t, [t], np.abs)
    check(f"not.b{kind[1:]}", t, [t], np.invert)
    check(f"mov.b{kind[1:]}", t, [t], lambda a: a)
    check(f"selp.b{kind[1:]}", t, [t, t, B], lambda a, b, c: np.where(c, a, b))
    for name, f in {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }.items():
        check(f"setp.{name}.{kind}", B, [t, t], f)
        check(f"setp.{name}.{u}", B, [t, t], lambda a, b, f=f: f(unsigned(a), unsigned(b)))
    for name, f in {"eq": np.equal, "ne": np.not_equal}.items():
        check(f"setp.{name}.{kind}", B, [t, t], f)
        check(f"setp.{name}.b{kind[1:]}", B, [t, t], f)


@pytest.mark.parametrize("kind", INTEGERS)
def test_division(kind):
    """Towards zero; by zero as GPUs do it: all ones, and the dividend remains."""
    t, n = INTEGERS[kind]

    def quotient(a, b):
        a, b = wide(a), wide(b)
        q = np.array([-1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
                      for x, y in zip(a, b, strict=True)], dtype=object)  # fmt: skip
        return q, np.array(
            [x if y == 0 else x - y * z for x, y, z in zip(a, b, q, strict=True)], object
        )

    check(f"div.{kind}", t, [t, t], lambda a, b: cut(quotient(a, b)[0], n))
    check(f"rem.{kind}", t, [t, t], lambda a, b: cut(quotient(a, b)[1], n))
    of = "u" + kind[1:]
    check(f"div.{of}", t, [t, t], lambda a, b: cut(quotient(unsigned(a), unsigned(b))[0], n))
    check(f"rem.{of}", t, [t, t], lambda a, b: cut(quotient(unsigned(a), unsigned(b))[1], n))


@pytest.mark.parametrize("kind", INTEGERS)
def test_shifts(kind):
    """Also by the width and more, which leaves nothing or the sign."""
    t, n = INTEGERS[kind]
    width = int(kind[1:])

    def clamped(b):
        return np.minimum(unsigned(b).astype(object), width)

    def left(a, b):
        return cut(np.array([x << y for x, y in zip(wide(a), clamped(b), strict=True)], object), n)

    def right(a, b):
        return cut(np.array([x >> y for x, y in zip(wide(a), clamped(b), strict=True)], object), n)

    check(f"shl.b{width}", t, [t, S32], left)
    check(f"shr.s{width}", t, [t, S32], right)
    for type_ in ("b", "u"):
        check(f"shr.{type_}{width}", t, [t, S32], lambda a, b: right(unsigned(a), b))


def test_widening_and_bits():
    for kind, (to, of) in {"s16": (S32, S16), "s32": (S64, S32)}.items():
        n = INTEGERS[f"s{2 * int(kind[1:])}"][1]
        check(f"mul.wide.{kind}", to, [of, of], lambda a, b, n=n: cut(wide(a) * wide(b), n))
        check(
            f"mad.wide.{kind}",
            to,
            [of, of, to],
            lambda a, b, c, n=n: cut(wide(a) * wide(b) + wide(c), n),
        )
        u = "u" + kind[1:]
        product = lambda a, b, n=n: cut(wide(unsigned(a)) * wide(unsigned(b)), n)  # noqa: E731
        check(f"mul.wide.{u}", to, [of, of], product)
    check("mul.hi.s32", S32, [S32, S32], lambda a, b: cut(wide(a) * wide(b) >> 32, np.int32))
    check(
        "mul.hi.u32",
        S32,
        [S32, S32],
        lambda a, b: cut(wide(unsigned(a)) * wide(unsigned(b)) >> 32, np.int32),
    )
    check("popc.b32", S32, [S32], lambda a: np.bitwise_count(unsigned(a)).astype(np.int32))
    count = np.vectorize(lambda x: 32 - int(x).bit_length(), otypes=[np.int32])
    check("clz.b32", S32, [S32], lambda a: count(unsigned(a)))

    def field(a, position, length):
        p, n = position & 255, length & 255
        extract = np.vectorize(lambda x, p, n: x >> p & ((1 << n) - 1), otypes=[object])
        return cut(extract(wide(unsigned(a)), wide(p), wide(n)), np.int32)

    check("bfe.u32", S32, [S32, S32, S32], field)
    for name, f in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items():
        check(f"{name}.pred", B, [B, B], f)
    check("not.pred", B, [B], np.logical_not)
    check("mov.pred", B, [B], lambda a: a)


@pytest.mark.parametrize(("kind", "t"), [("f32", F32), ("f64", F64)])
def test_floats(kind, t):
    """Rounded to nearest, subnormal numbers kept; -0 is the smaller zero."""

    def smaller(a, b):
        return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))

    def larger(a, b):
        return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))

    def nan(a, b):
        return np.isnan(a) | np.isnan(b)

    for name, f in {
        f"add.{kind}": np.add,
        f"sub.{kind}": np.subtract,
        f"mul.{kind}": np.multiply,
        f"add.rn.{kind}": np.add,
        f"div.rn.{kind}": np.divide,
        f"min.{kind}": smaller,
        f"max.{kind}": larger,
    }.items():
        check(name, t, [t, t], f)
    check(f"neg.{kind}", t, [t], np.negative)
    check(f"abs.{kind}", t, [t], np.abs)
    check(f"sqrt.rn.{kind}", t, [t], np.sqrt)
    check(f"rcp.rn.{kind}", t, [t], lambda a: (1 / a).astype(a.dtype))
    ordered = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, f in (ordered | {"eq": np.equal, "ne": np.not_equal}).items():
        check(f"setp.{name}.{kind}", B, [t, t], lambda a, b, f=f: f(a, b) & ~nan(a, b))
        check(f"setp.{name}u.{kind}", B, [t, t], lambda a, b, f=f: f(a, b) | nan(a, b))
    check(f"setp.nan.{kind}", B, [t, t], nan)
    check(f"setp.num.{kind}", B, [t, t], lambda a, b: ~nan(a, b))


def test_fused_multiply_add_rounds_once():
    """A float64 product of float32 numbers is exact; the sum is then rounded twice, seldom off."""
    a, b, c = (values(F32, seed) for seed in range(3))
    (got,) = evaluate("fma.rn.f32", [F32], a, b, c)
    exact = [
        math.fma(*xyz) if hasattr(math, "fma") else xyz[0] * xyz[1] + xyz[2]
        for xyz in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    same(got, torch.tensor(exact, dtype=F64).float())
    x = torch.full((32,), 1 + 2.0**-30, dtype=F64)
    (got,) = evaluate("fma.rn.f64", [F64], x, x, -(x * x))
    assert got[0] == 2.0**-60


@pytest.mark.parametrize(("kind", "half"), [("bf16", BF16), ("f16", F16)])
def test_half_precision(kind, half):
    x, y = values(F32), values(F32, 1)
    same(evaluate(f"cvt.rn.{kind}.f32", [half], x)[0], x.to(half))
    (pair,) = evaluate(f"cvt.rn.{kind}x2.f32", [S32], x, y)
    low, high = pair.view(half).view(-1, 2).unbind(1)
    same(high, x.to(half)), same(low, y.to(half))
    h = values(half)
    same(evaluate(f"cvt.f32.{kind}", [F32], h)[0], h.float())
    same(evaluate(f"cvt.f64.{kind}", [F64], h)[0], h.double())
    other = torch.where(torch.arange(256) % 2 == 0, h, values(half, 1))
    for name in ("lt", "le", "gt", "ge", "eq", "neu"):
        expected = getattr(torch, name.removesuffix("u"))(h, other)
        same(evaluate(f"setp.{name}.{kind}", [B], h, other)[0], expected)
    ones, zeros = torch.ones_like(pair), pair
    low_equal, high_equal = evaluate(f"setp.eq.{kind}x2", [B, B], zeros, zeros ^ ones)
    assert torch.equal(high_equal, ~high.isnan())
    assert not low_equal.any()


def test_conversions():
    n = {name: np.dtype(f"{name[0].replace('s', 'i')}{int(name[1:]) // 8}") for name in
         ("u16", "s16", "u32", "s32", "u64", "s64")}  # fmt: skip
    torch_of = {2: S16, 4: S32, 8: S64}
    for of, n_of in n.items():
        source = torch_of[n_of.itemsize]
        for to, n_to in n.items():
            expected = lambda a, n_of=n_of, n_to=n_to: a.view(n_of).astype(n_to)  # noqa: E731
            check(f"cvt.{to}.{of}", torch_of[n_to.itemsize], [source], expected)
        if n_of.itemsize < 4:
            continue
        for to, float_, n_float in (("f32", F32, np.float32), ("f64", F64, np.float64)):
            number = lambda a, n_of=n_of, f=n_float: a.view(n_of).astype(f)  # noqa: E731
            check(f"cvt.rn.{to}.{of}", float_, [source], number)

            def held(a, n_of=n_of):
                limits = np.iinfo(n_of)
                held = [0 if x != x else limits.max if x == math.inf else limits.min if
                        x == -math.inf else max(limits.min, min(limits.max, int(x)))
                        for x in a.tolist()]  # fmt: skip
                return np.array(held, dtype=n_of)

            check(f"cvt.rzi.{of}.{to}", source, [float_], held)
    check("cvt.f64.f32", F64, [F32], lambda a: a.astype(np.float64))
    check("cvt.rn.f32.f64", F32, [F64], lambda a: a.astype(np.float32))
    check("cvt.rni.f32.f32", F32, [F32], np.rint)
    check("cvt.rmi.f32.f32", F32, [F32], np.floor)
    check("cvt.rmi.f64.f64", F64, [F64], np.floor)


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


APPROXIMATE = {  # the function, its arguments, and the error that the manual states
    "ex2.approx.ftz.f32": (lambda a: np.exp2(flushed(a).astype(float)), F32, 2.0**-22),
    "rcp.approx.ftz.f32": (lambda a: 1 / flushed(a).astype(float), F32, 2.0**-23),
    "sqrt.approx.ftz.f32": (lambda a: np.sqrt(flushed(a).astype(float)), F32, 2.0**-23),
    "tanh.approx.f32": (lambda a: np.tanh(a.astype(float)), F32, 2.0**-11),
    "lg2.approx.ftz.f32": (lambda a: np.log2(flushed(a).astype(float)), F32, 2.0**-22),
    "rcp.approx.ftz.f64": (lambda a: 1 / a, F64, 2.0**-19),  # of the upper half of its argument
}


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("seed", [0, 1])
def test_approximations(name, seed, monkeypatch):
    """Within their stated errors; with a seed they make use of them."""
    function, dtype, error = APPROXIMATE[name]
    launch = executor.launch
    monkeypatch.setattr(
        executor, "launch", lambda *a, **k: launch(*a, **(k | {"error_seed": seed}))
    )
    x = values(dtype)
    (got,) = evaluate(name, [dtype], x)
    with np.errstate(all="ignore"):
        true = torch.from_numpy(function(x.numpy()))
    tiny = torch.finfo(dtype).tiny
    usual = true.isfinite() & (true.abs() >= tiny) & (true.abs() < torch.finfo(dtype).max / 2)
    off = ((got.double() - true) / true)[usual].abs()
    absolute = (got.double() - true)[usual].abs()
    rounding = torch.finfo(dtype).eps
    assert (
        torch.minimum(off, absolute) if name.startswith("lg2") else off
    ).max() < error + rounding
    assert torch.equal(got.isnan(), true.isnan())
    if seed == 0 and dtype == F32:
        assert off.max() <= rounding / 2
    if seed:
        assert off.max() > error / 4


def test_division_in_full_range():
    a, b = values(F32), values(F32, 1)
    (got,) = evaluate("div.full.f32", [F32], a, b)
    same(got, (a.double() / b.double()).float())
    assert evaluate("abs.ftz.f32", [F32], torch.full((32,), -1e-40))[0].tolist() == [0.0] * 32


def test_halves_of_registers():
    x = values(S64)
    low, high = torch.empty(256, dtype=S32), torch.empty(256, dtype=S32)
    packed = torch.empty_like(x)
    statements = """
        mad.wide.u32 %rd10, %r0, 8, %rd0;  mad.wide.u32 %rd11, %r0, 4, %rd1;
        mad.wide.u32 %rd12, %r0, 4, %rd2;  mad.wide.u32 %rd13, %r0, 8, %rd3;
        ld.global.b64 %rd20, [%rd10];
        mov.b64 {%r1, %r2}, %rd20;
        { .reg .b32 tmp; mov.b64 {tmp, %r3}, %rd20; }
        st.global.b32 [%rd11], %r1;  st.global.b32 [%rd12], %r3;
        mov.b64 %rd21, {%r2, %r1};
        st.global.b64 [%rd13], %rd21;
    """
    run(statements, x, low, high, packed, threads=256)
    halves = x.view(S32).view(-1, 2)
    assert torch.equal(low, halves[:, 0])
    assert torch.equal(high, halves[:, 1])
    assert torch.equal(packed.view(S32).view(-1, 2), halves.flip(1))


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(("b", "c"), [(1, 31), (5, 31), (1, 0), (3, 0x1807), (2, 0x1F), (16, 0x0F)])
def test_shuffles(mode, b, c):
    x = torch.arange(100, 132, dtype=S32)
    got, inside = torch.empty(32, dtype=S32), torch.empty(32, dtype=S32)
    run(
        f"""
        mad.wide.u32 %rd10, %r0, 4, %rd0;  mad.wide.u32 %rd11, %r0, 4, %rd1;
        mad.wide.u32 %rd12, %r0, 4, %rd2;  ld.global.b32 %r1, [%rd10];
        shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;
        selp.b32 %r3, 1, 0, %p1;
        st.global.b32 [%rd11], %r2;  st.global.b32 [%rd12], %r3;
        """,
        *(x, got, inside),
    )
    segment, clamp = c >> 8 & 31, c & 31
    for lane in range(32):
        last = lane & segment | clamp & ~segment
        source = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": lane & segment | b & ~segment,
        }[mode]
        valid = source >= last if mode == "up" else source <= last
        assert inside[lane] == valid
        assert got[lane] == x[source if valid else lane]


@pytest.mark.parametrize(
    "name", ["add.s32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32"]
)
def test_reductions(name):
    x = values(S32, n=32)
    (got,) = evaluate(f"redux.sync.{name}", [S32], x, suffix=", -1")
    numbers = x.numpy().view(np.uint32) if name.endswith("u32") else x.numpy()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                "or": np.bitwise_or}[name[:3].rstrip(".")]  # fmt: skip
    assert (got.numpy().view(numbers.dtype) == function.reduce(numbers, dtype=numbers.dtype)).all()


@pytest.mark.parametrize("name", ["add.u32", "add.u64", "add.f32", "add.f64", "min.s32", "max.u32",
                                  "and.b32", "or.b64", "exch.b32", "cas.b32"])  # fmt: skip
def test_atomics(name):
    """32 lanes on one place: the values that they found, in some order, lead from first to last."""
    operation, _, kind = name.partition(".")
    dtype = {"f32": F32, "f64": F64}.get(kind, S64 if kind.endswith("64") else S32)
    size = torch.empty(0, dtype=dtype).element_size()
    first = 77 if operation == "exch" else 3  # with exch each value once
    place, x = torch.tensor([first], dtype=dtype), torch.arange(32).to(dtype)
    found = torch.empty(32, dtype=dtype)
    register = "%rd" if size == 8 else "%r"
    second = f", {register}51" if operation == "cas" else ""
    run(
        f"""
        mad.wide.u32 %rd10, %r0, {size}, %rd1;  mad.wide.u32 %rd11, %r0, {size}, %rd2;
        ld.global.b{8 * size} {register}50, [%rd10];  mov.b{8 * size} {register}51, 77;
        atom.global.gpu.relaxed.{name} {register}52, [%rd0], {register}50{second};
        st.global.b{8 * size} [%rd11], {register}52;
        """,
        *(place, x, found),
    )
    step = {
        "add": lambda old, a: old + a,
        "min": min,
        "max": max,
        "and": lambda old, a: old & a,
        "or": lambda old, a: old | a,
        "exch": lambda old, a: a,
        "cas": lambda old, a: 77 if old == a else old,
    }[operation]
    edges = {}
    for old, a in zip(found.tolist(), x.tolist(), strict=True):
        edges.setdefault(old, []).append(step(old, a))
    at = first
    for _ in range(32):  # a path that takes every edge: loops first
        ways = edges[at]
        ways.sort(key=lambda to, at=at: to != at)
        at = ways.pop(0)
    assert place.item() == at


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_matrices(transposed, matrices):
    """Stored from registers, read by rows."""
    x = torch.randint(-(2**15), 2**15, (matrices, 32, 2), dtype=S16)
    got = torch.empty(matrices, 8, 8, dtype=S16)
    registers = ", ".join(f"%r{50 + i}" for i in range(matrices))
    loads = "".join(f"ld.global.b32 %r{50 + i}, [%rd10+{128 * i}];\n" for i in range(matrices))
    copies = "".join(
        f"ld.shared.b32 %r60, [%r2+{128 * i}]; st.global.b32 [%rd11+{128 * i}], %r60;\n"
        for i in range(matrices)
    )
    trans = ".trans" if transposed else ""
    statements = f"""
        mad.wide.u32 %rd10, %r0, 4, %rd0;  mad.wide.u32 %rd11, %r0, 4, %rd1;
        {loads}
        and.b32 %r1, %r0, {8 * matrices - 1};  shl.b32 %r1, %r1, 4;  shl.b32 %r2, %r0, 2;
        mov.b32 %r3, memory;  add.s32 %r1, %r1, %r3;
        stmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 [%r1], {{{registers}}};
        bar.sync 0;
        {copies}
    """
    run(statements, x, got, shared_bytes=512)
    expected = x.view(matrices, 8, 8)
    assert torch.equal(got, expected.mT if transposed else expected)
    back = torch.empty_like(x)
    stores = "".join(f"st.global.b32 [%rd11+{128 * i}], %r{50 + i};\n" for i in range(matrices))
    fill = "".join(
        f"ld.global.b32 %r60, [%rd10+{128 * i}]; st.shared.b32 [%r2+{128 * i}], %r60;\n"
        for i in range(matrices)
    )
    statements = f"""
        mad.wide.u32 %rd10, %r0, 4, %rd0;  mad.wide.u32 %rd11, %r0, 4, %rd1;  shl.b32 %r2, %r0, 2;
        {fill}
        bar.sync 0;
        and.b32 %r1, %r0, {8 * matrices - 1};  shl.b32 %r1, %r1, 4;
        ldmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 {{{registers}}}, [%r1];
        {stores}
    """
    run(statements, got, back, shared_bytes=512)
    assert torch.equal(back, x)


def test_vectors_signs_and_offsets():
    x = torch.randint(-128, 128, (32, 8), dtype=torch.int8)
    got, wide = torch.zeros(32, 8, dtype=torch.int8), torch.zeros(32, dtype=S64)
    run(
        """
        mad.wide.u32 %rd10, %r0, 8, %rd0;  mad.wide.u32 %rd11, %r0, 8, %rd1;
        mad.wide.u32 %rd12, %r0, 8, %rd2;
        ld.global.nc.v2.b32 { %r1, %r2 }, [ %rd10 + 0 ];
        ld.global.v2.b32 {_, %r3}, [%rd10];
        st.global.v2.b32 [%rd11], {%r3, %r1};
        ld.global.s8 %rd20, [%rd10+3];
        st.global.b64 [%rd12+-0], %rd20;
        """,
        *(x, got, wide),
    )
    assert torch.equal(got, x.roll(4, 1))
    assert torch.equal(wide, x[:, 3].long())


def test_special_registers_and_parameters():
    out = torch.full((2, 3, 4, 64), -1, dtype=S32)
    text = kernel(
        """
        mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ctaid.y;  mov.u32 %r3, %ctaid.z;
        mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y; mov.u32 %r6, %ntid.x;
        mad.lo.s32 %r7, %r3, %r5, %r2;  mad.lo.s32 %r7, %r7, %r4, %r1;
        mad.lo.s32 %r8, %r7, %r6, %r0;  mad.wide.u32 %rd10, %r8, 4, %rd0;
        st.global.b32 [%rd10], %r8;
        """,
        1,
    )
    executor.launch(executor.load(text), (4, 3, 2), 64, [out])
    assert torch.equal(out.flatten(), torch.arange(out.numel(), dtype=S32))
    with pytest.raises(parser.UnknownError, match="tan.approx.f32"):
        executor.load(kernel("tan.approx.f32 %r1, %r0;", 0))
    for statement in (
        "mov.u32 %r1, %clock;",
        "bar.sync 1, 64;",
        "ld.global.mystery.b32 %r1, [%rd0];",
    ):
        with pytest.raises(parser.UnknownError, match=statement.split()[0].replace(".", r"\.")):
            executor.load(kernel(statement, 1))
