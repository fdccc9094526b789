"""The executor of PTX (tests/ptx): its own rules, and what it must notice."""

import math
import re
import shutil
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ptx"),  # one worker builds the machine
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++"),
]

from ptx import executor, parser  # noqa: E402
from ptx.assemble import check, evaluate, run  # noqa: E402

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
S16, S32, S64, PRED = torch.int16, torch.int32, torch.int64, torch.bool
U32, U64 = torch.uint32, torch.uint64
NAN, INF, TOP = math.nan, math.inf, 2**31
# Where PTX has a rule of its own, or C++ has none: types of operands and of the result, examples.
# What is ordinary, the kernels' results tell.
EXAMPLES = [
    ("add.s32", [S32, S32, S32], {(TOP - 1, 1): -TOP}),
    ("mul.lo.s32", [S32, S32, S32], {(TOP - 1, 4): -4}),
    ("mul.wide.s32", [S32, S32, S64], {(-TOP, TOP - 1): -TOP * (TOP - 1)}),
    ("mul.wide.u32", [U32, U32, U64], {(TOP, TOP): TOP**2}),
    ("mad.wide.s32", [S32, S32, S64, S64], {(-TOP, 2, 1): 1 - 2 * TOP}),
    ("div.s32", [S32, S32, S32], {(-7, 2): -3, (-TOP, -1): -TOP}),
    ("rem.s32", [S32, S32, S32], {(-7, 2): -1, (7, -2): 1, (-TOP, -1): 0}),
    ("div.u64", [U64, U64, U64], {(2**64 - 1, 2): 2**63 - 1}),
    ("shl.b32", [U32, U32, U32], {(3, 31): TOP, (1, 32): 0, (1, 2**32 - 1): 0}),
    ("shr.s32", [S32, U32, S32], {(-8, 1): -4, (-8, 40): -1, (8, 64): 0}),
    ("shr.u64", [U64, U32, U64], {(2**63, 63): 1, (2**63, 64): 0}),
    ("bfe.u32", [U32, U32, U32, U32], {(0xABCDE, 4, 8): 0xCD, (5, 0, 0): 0, (5, 40, 8): 0}),
    ("bfe.u32", [U32, U32, U32, U32], {(0xABCDE, 260, 264): 0xCD, (TOP, 31, 9): 1}),
    ("bfe.s32", [S32, U32, U32, S32], {(0xF0, 4, 4): -1, (0x70, 4, 4): 7, (-1, 31, 5): -1}),
    ("brev.b32", [U32, U32], {(1,): TOP, (6,): 3 << 29}),
    ("bfind.shiftamt.u32", [U32, U32], {(0,): 2**32 - 1, (1,): 31, (TOP,): 0}),
    ("popc.b32", [U32, U32], {(0xF0F,): 8}),
    ("shf.r.wrap.b32", [U32, U32, U32, U32], {(2, 5, 1): TOP + 1, (2, 5, 33): TOP + 1}),
    ("prmt.b32", [U32] * 4, {(0x33221180, 0x77665544, 0x7450): 0x77445580}),
    ("not.pred", [PRED, PRED], {(True,): False}),
    ("min.f32", [F32, F32, F32], {(NAN, 1.0): 1.0, (0.0, -0.0): -0.0, (NAN, NAN): NAN}),
    ("max.f32", [F32, F32, F32], {(-1.0, NAN): -1.0, (-0.0, 0.0): 0.0, (-INF, 3.0): 3.0}),
    ("max.f32", [F32, F32, F32, F32], {(NAN, -1.0, NAN): -1.0, (1.0, 3.0, 2.0): 3.0}),
    ("fma.rn.f32", [F32] * 4, {(1 + 2.0**-12, 1 - 2.0**-12, -1.0): -(2.0**-24)}),
    ("abs.ftz.f32", [F32, F32], {(-1e-40,): 0.0, (-2.0,): 2.0}),
    ("copysign.f32", [F32, F32, F32], {(-1.0, 2.0): -2.0, (0.0, -3.0): 3.0}),
    ("setp.lt.f32", [F32, F32, PRED], {(NAN, 1.0): False, (1.0, 2.0): True}),
    ("setp.ltu.f32", [F32, F32, PRED], {(NAN, 1.0): True, (2.0, 1.0): False}),
    ("setp.ne.f32", [F32, F32, PRED], {(NAN, NAN): False, (1.0, 2.0): True}),
    ("setp.neu.bf16", [BF16, BF16, PRED], {(NAN, NAN): True, (0.0, -0.0): False}),
    ("setp.num.f64", [F64, F64, PRED], {(NAN, 1.0): False, (1.0, 1.0): True}),
    ("setp.nan.f64", [F64, F64, PRED], {(NAN, 1.0): True, (1.0, 1.0): False}),
    ("setp.lt.u32", [U32, U32, PRED], {(1, TOP): True}),
    ("setp.lt.s32", [S32, S32, PRED], {(1, -TOP): False}),
    ("cvt.rzi.s32.f32", [F32, S32], {(NAN,): 0, (3e38,): TOP - 1, (-1.9,): -1}),
    ("cvt.rzi.u32.f32", [F32, U32], {(-1.5,): 0, (INF,): 2**32 - 1}),
    ("cvt.rzi.s64.f32", [F32, S64], {(NAN,): -(2**63), (1e20,): 2**63 - 1}),
    ("cvt.rzi.s32.f64", [F64, S32], {(NAN,): -TOP, (-1e10,): -TOP}),
    ("cvt.rni.f32.f32", [F32, F32], {(2.5,): 2.0, (-0.4,): -0.0}),
    # Ties to even, and an integer that must not be rounded twice.
    ("cvt.rn.bf16.f32", [F32, BF16], {(1 + 2.0**-8,): 1.0, (1 + 3 * 2.0**-8,): 1 + 2.0**-6}),
    ("cvt.rn.f16.f32", [F32, F16], {(65_519.0,): 65_504.0, (65_520.0,): INF, (2.0**-25,): 0.0}),
    ("cvt.rn.f32.s64", [S64, F32], {(2**60 + 2**36 + 1,): 2.0**60 + 2.0**37}),
    ("sub.rn.f32.f16", [F16, F32, F32], {(1.0, 2.0**-20): 1 - 2.0**-20, (INF, 1.0): INF}),
    ("cvt.s64.s32", [S32, S64], {(-3,): -3}),
    ("cvt.s64.s8", [S16, S64], {(0x1FF,): -1, (0x17F,): 127}),  # of the low byte
    ("cvt.u16.u32", [U32, torch.uint16], {(0x12345,): 0x2345}),
]


@pytest.mark.parametrize(("name", "types", "examples"), EXAMPLES)
def test_instructions(name, types, examples):
    *types, to = types
    columns = zip(*examples, strict=True)
    operands = [torch.tensor(x, dtype=t) for x, t in zip(columns, types, strict=True)]
    got = torch.zeros(len(examples), dtype=to)
    evaluate(name, [got], operands)
    assert repr(got.tolist()) == repr(torch.tensor([*examples.values()], dtype=to).tolist())


# The errors that the manual states, and exact results; subnormal numbers are zero. PTX says of
# rcp.approx.ftz.f64 only that it computes with the upper half of its argument.
APPROXIMATE = {
    "ex2.approx.ftz.f32": (2.0**-22, torch.exp2),
    "rcp.approx.ftz.f32": (2.0**-23, torch.reciprocal),
    "sqrt.approx.ftz.f32": (2.0**-23, torch.sqrt),
    "tanh.approx.f32": (2.0**-11, torch.tanh),
    "div.full.f32": (2.0**-22, torch.divide),
    "div.approx.f32": (2.0**-22, torch.divide),
    "rcp.approx.ftz.f64": (2.0**-17, torch.reciprocal),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_instructions(name):
    """Errors are as large as they may be, or with the seed 0 none."""
    error, function = APPROXIMATE[name]
    dtype = F64 if name.endswith("f64") else F32
    operands = torch.rand(1 + name.startswith("div"), 1024, dtype=dtype).mul(9).add(0.1).unbind()
    expected, got = function(*(x.double() for x in operands)), torch.zeros(1024, dtype=dtype)
    for seed in (0, 1):
        evaluate(name, [got], [*operands], error_seed=seed)
        off = ((got.double() - expected) / expected).abs().max()
        most = error if seed or dtype == F64 else 0.0
        assert off <= most + torch.finfo(dtype).eps / 2
        assert seed == 0 or off > error / 4, "makes use of it"
    if "ftz.f32" in name:
        evaluate(name, [got[:1]], [torch.tensor([1e-40])])
        assert got[0] == {"ex2": 1.0, "rcp": INF, "sqrt": 0.0}[name.split(".")[0]]


def test_signs_of_nan():
    """A NaN that is computed may have any sign and payload."""
    zeros, got = torch.zeros(32), torch.zeros(32)
    for error_seed, signs in (0, {0}), (1, {0, 1}):
        evaluate("div.rn.f32", [got], [zeros, zeros], error_seed=error_seed)
        assert got.isnan().all()
        assert set(got.signbit().long().tolist()) == signs


SHUFFLE, STORE = "shfl.sync.bfly.b32 %r6, %r60, 16, 31", "st.shared.b32 [memory],"
LOAD, FIRST = "ld.shared.b32 %r2, [memory]", "setp.lt.u32 %p3, %r0,"
WARP, BLOCK = "bar.warp.sync -1;", "bar.sync 0;"
# Threads and blocks, statements, and the fault in them. %r1 is the thread's place in shared memory,
# %p1 true in lanes from 16 up, %p0 nowhere; registers 60 are never written.
FAULTS = r"""32 1 ld.global.b32 %r2, [%rd20+256]; -> lane 0: in no tensor: 4 bytes
32 1 ld.global.b32 %r2, [%rd20+-4]; -> lane 0: in no tensor
96 1 ld.global.b32 %r2, [%rd20]; -> `ld.global.b32 %r2, \[%rd20\]` of test, block 0, warp 2
32 1 ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd0+4]; -> misaligned: 16 bytes
32 1 ld.global.b16 %rs2, [%rd20]; -> part of an element
32 1 st.shared.b32 [%r1], %r0; ld.shared.b32 %r2, [%r0]; -> lane 1: misaligned
32 1 st.shared.b32 [%r1+132], %r0; -> lane 31: out of bounds: 4 bytes at shared address 256
32 1 ld.param.b64 %rd2, [p0+8]; -> out of bounds: 8 bytes at parameter address 8
32 1 ld.shared.b32 %r2, [%r1]; -> lane 0: reads what was never written
32 1 st.relaxed.cta.shared.b32 [%r1], 7; ld.shared.b32 %r2, [%r1]; ->
32 1 st.global.b32 [%rd20], %r60; -> lane 0 uses as a value
32 1 ld.global.b32 %r3, [%rd60]; -> lane 0 uses as an address
32 1 @%p60 st.global.b32 [%rd20], 0; -> lane 0 uses as a predicate
32 1 bar.warp.sync %r60; -> lane 0 uses as a mask of lanes
32 1 add.s32 %r6, %r60, 1; st.global.b32 [%rd20], %r6; -> lane 0 uses as a value
32 1 selp.b32 %r6, %r0, %r0, %p60; st.global.b32 [%rd20], %r6; -> lane 0 uses as a value
32 1 @%p1 mov.b32 %r60, 1; SHUFFLE, -1; st.global.b32 [%rd20], %r6; -> lane 16 uses as a value
32 1 redux.sync.max.s32 %r6, %r60, -1; st.global.b32 [%rd20], %r6; -> uses as a value
32 1 and.pred %p6, %p60, %p1; @%p6 bra $end; -> lane 16 uses as a predicate
32 1 or.pred %p6, %p1, %p60; @%p6 bra $end; -> lane 0 uses as a predicate
32 1 and.pred %p6, %p60, %p0; not.pred %p6, %p6; or.pred %p6, %p60, %p6; @%p6 bra $end; ->
32 1 selp.b32 %r6, %r60, %r0, %p0; st.global.b32 [%rd20], %r6; selp.b32 %r6, %r0, %r0, %p60; ->
32 1 st.global.b32 [%rd0], 7; ->
32 1 st.global.b32 [%rd0], %r0; -> race: store of block 0 warp 0 lane 1
64 1 st.global.b32 [%rd0], 7; -> race:
32 2 st.global.b32 [%rd0], 7; -> race:
64 1 STORE 7; bar.sync 0; @!%p1 STORE 8; ->
64 1 STORE 7; bar.sync 0; STORE 7; @!%p1 STORE 8; -> race:
64 1 shr.u32 %r5, %r0, 5; STORE %r5; -> race:
64 1 setp.lt.u32 %p3, %r0, 32; @%p3 STORE 7; bar.sync 0; @!%p3 STORE 7; @%p3 LOAD; -> race:
64 1 setp.lt.u32 %p3, %r0, 32; @%p3 STORE 7; bar.sync 0; @!%p3 STORE 7; bar.sync 0; @%p3 LOAD; ->
64 3 red.global.gpu.relaxed.add.u32 [%rd0], 1; ->
64 1 red.global.gpu.relaxed.add.u32 [%rd0], 1; bar.sync 0; ld.global.b32 %r3, [%rd0]; ->
64 1 red.global.gpu.relaxed.add.u32 [%rd0], 1; ld.global.b32 %r3, [%rd0]; -> race:
32 2 red.global.cta.relaxed.add.u32 [%rd0], 1; -> race: atomic of the block
32 1 @%p1 bar.sync 0; -> lanes that take part do not execute it
32 1 @%p1 bra $on; bar.sync 0; $on: bar.warp.sync -1; -> waits for lanes that wait elsewhere
64 1 setp.lt.s32 %p3, %r0, 32; @%p3 bar.sync 0; -> has returned while other warps wait
96 1 FIRST 64; @%p3 barrier.sync 1, 64; bar.sync 0; ->
96 1 FIRST 64; @%p3 barrier.sync 1, 64; @!%p3 bar.sync 0; -> has returned while other warps wait
96 1 FIRST 32; @%p3 STORE 7; FIRST 64; @%p3 barrier.sync 1, 64; @%p3 LOAD; ->
96 1 FIRST 32; @%p3 STORE 7; FIRST 64; @%p3 barrier.sync 1, 64; @!%p3 LOAD; -> race: |never written
64 1 FIRST 32; @%p3 STORE 7; @%p3 barrier.sync 1, 32; @!%p3 barrier.sync 1, 32; LOAD; -> race|never
64 1 FIRST 32; @%p3 barrier.sync 1, 64; @!%p3 barrier.sync 1, 96; -> others expect another number
64 1 FIRST 32; @%p3 barrier.sync 1, 64; @!%p3 barrier.sync 2, 64; -> deadlock; warp 0 at barrier 1
64 1 FIRST 32; @%p3 barrier.sync 1, 64; -> has returned while other warps wait
32 1 barrier.sync 1, 48; -> no such barrier
96 1 FIRST 64; @%p3 bar.sync 1, 64; -> aligned, but not for all threads
32 1 @%p1 ret; bar.warp.sync -1; -> names lanes that have returned
32 1 @%p1 SHUFFLE, -1; -> lanes that take part do not execute it
32 1 SHUFFLE, 255; -> by lanes that its mask does not name
32 1 @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1]; -> lanes
32 1 $again: bra $again; -> does not end
32 1 tan.approx.f32 %r2, %r0; -> tan.approx.f32
32 1 mov.u32 %r2, %clock; -> %clock
32 1 add.s32 %r6, %r0, %r0, %r0; -> add.s32
32 1 div.s32 %r6, %r0, %r0; -> divides by zero
32 1 rem.u32 %r6, %r0, %r0; -> divides by zero
32 1 cvt.rn.f32.u32 %r6, %r0; div.approx.f32 %r6, %r6, %r6; -> divides approximately by less
64 1 FIRST 32; @%p3 STORE 0; @!%p3 st.shared.b64 [memory], 0; -> race:
32 1 ld.global.v2.b32 {%r2, %r2}, [%rd0]; -> one register takes two results
32 1 ld.global.nc.b32 %r2, [%rd20]; -> ld.global.nc.b32
32 1 createpolicy.fractional.L2::evict_first.b64 %rd9, 0.0; -> the fraction is not in
32 1 createpolicy.fractional.L2::evict_first.b64 %rd9, 1.5; -> the fraction is not in"""


@pytest.mark.parametrize("row", FAULTS.split("\n"))
def test_faults(row):
    for name in ("SHUFFLE", "STORE", "LOAD", "FIRST"):
        row = row.replace(name, globals()[name])
    text, match = row.split("->")
    threads, blocks, statements = text.split(maxsplit=2)
    begin = "shl.b32 %r1, %r0, 2; setp.ge.s32 %p1, %r0, 16; setp.lt.s32 %p0, %r0, 0;"
    options = dict(threads=int(threads), grid=(int(blocks), 1, 1), most_instructions=10_000)
    check(match.strip(), f"{begin} {statements} $end:", torch.arange(64, dtype=S32), **options)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F64, torch.uint8])
def test_memory_that_was_never_written(dtype):
    given = executor.poison(torch.empty(64, dtype=dtype))
    load = f"ld.global.b{8 * given.element_size()} %rd30, [%rd20];"
    check("reads what was never written", load, given)
    given[:32] = 1
    check("", load, given)


@pytest.mark.parametrize("between", ["", f"{SHUFFLE}, -1;", WARP, BLOCK])
@pytest.mark.parametrize("bit", [1, 32])
def test_barriers(between, bit):
    """Between lanes (bit 1) that of the warp suffices; shuffles order no accesses."""
    begin = f"shl.b32 %r1, %r0, 2; xor.b32 %r2, %r1, {4 * bit}; st.shared.b32 [%r1], %r0;"
    load, store = "ld.shared.b32 %r3, [%r2];", "st.shared.b32 [%r1], %r3;"
    ordered = between == BLOCK or (bit == 1 and between == WARP)
    check("" if ordered else "race: |never written", f"{begin} {between} {load}", threads=64)
    check("" if ordered else "race: ", f"{begin} {BLOCK} {load} {between} {store}", threads=64)


# Block 0 writes data and raises a flag; the others wait for it and read the data.
PASSING = """
    mov.u32 %r2, %ctaid.x;  setp.ne.s32 %p1, %r2, 0;  @%p1 bra $wait;
    st.global.b32 [%rd0], 7;  {} {} [%rd1], 1;  bra $end;
    $wait: {} %r3, [%rd1];  setp.eq.s32 %p2, %r3, 0;  @%p2 bra $wait;
    {} ld.global.b32 %r4, [%rd0];  mad.wide.u32 %rd30, %r2, 4, %rd2;  st.global.b32 [%rd30], %r4;
    $end:"""
FENCE, RAISE, LOOK = "fence.acq_rel.gpu;", "st.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.b32"
RELEASE, ACQUIRE = "st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"
RIGHT = [(FENCE, RAISE, LOOK, "membar.gl;"), ("", RELEASE, ACQUIRE, "")]
RIGHT += [(FENCE, "red.relaxed.gpu.global.add.u32", LOOK, FENCE), (FENCE, RAISE, ACQUIRE, "")]
NEAR_FENCE, NEAR_RAISE = (text.replace("gpu", "cta") for text in (FENCE, RAISE))
WRONG = [("", RAISE, LOOK, FENCE), (FENCE, RAISE, LOOK, ""), (NEAR_FENCE, RAISE, LOOK, FENCE)]
WRONG += [(FENCE, NEAR_RAISE, LOOK, FENCE), (FENCE, "st.global.b32", "ld.global.b32", FENCE)]


@pytest.mark.parametrize("parts", RIGHT + WRONG)
def test_messages(parts):
    right, given = parts in RIGHT, [torch.zeros(n, dtype=S32) for n in (1, 1, 3)]
    text, options = PASSING.format(*parts), dict(threads=1, grid=(3, 1, 1))
    left = check("" if right else "race: ", text, *given, **options)
    assert not right or all(got.tolist() == [0, 7, 7] for *_, got in left)
    if parts in (RIGHT[0], WRONG[0]):  # a missing fence gives wrong numbers in some schedule
        left = check("", text, *given, races=False, seeds=range(1, 200), **options)
        assert right == all(got.tolist() == [0, 7, 7] for *_, got in left)


# The last block to finish takes the maximum of what each has written.
TICKET = """
    mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ctaid.y;  mov.u32 %r3, %nctaid.x;
    mad.lo.s32 %r2, %r2, %r3, %r1;  mad.wide.u32 %rd30, %r2, 4, %rd0;  add.s32 %r3, %r2, 10;
    setp.eq.s32 %p1, %r0, 0;  setp.eq.s32 %p3, %r0, 40;
    @%p3 st.global.b32 [%rd30], %r3;  {}
    @%p1 atom.global.gpu.{}.add.u32 %r4, [%rd1], 1;  @%p1 st.shared.b32 [memory], %r4;  {}
    ld.shared.b32 %r5, [memory];  setp.ne.s32 %p2, %r5, 3;  @%p2 bra $end;
    and.b32 %r6, %r0, 3;  mad.wide.u32 %rd31, %r6, 4, %rd0;  ld.global.b32 %r7, [%rd31];
    redux.sync.max.s32 %r8, %r7, -1;  @%p1 st.global.b32 [%rd1+4], %r8;
    $end:"""


@pytest.mark.parametrize("order", ["acq_rel", "relaxed", "release", "acquire"])
@pytest.mark.parametrize(("first", "second"), [(BLOCK, BLOCK), ("", BLOCK), (BLOCK, "")])
def test_the_last_block_sees_what_all_have_written(first, order, second):
    right, given = order == "acq_rel" and first == second, torch.zeros(4, dtype=S32)
    match, text = "" if right else "race: |never written", TICKET.format(first, order, second)
    for _, ticket in check(match, text, given, given[:2], threads=64, grid=(2, 2, 1)):
        assert not right or ticket.tolist() == [4, 13]


# The last block to finish adds up what each has written, and resets the ticket.
RESET = """
    mov.u32 %r1, %ctaid.x;  mad.wide.u32 %rd30, %r1, 4, %rd0;  add.s32 %r2, %r1, 10;
    {} atom.global.add.u32 %r3, [%rd1], 1;  setp.ne.s32 %p1, %r3, 2;  @%p1 bra $end;
    {} ld.global.b32 %r4, [%rd0];  ld.global.b32 %r5, [%rd0+4];  ld.global.b32 %r6, [%rd0+8];
    add.s32 %r4, %r4, %r5;  add.s32 %r4, %r4, %r6;  st.global.b32 [%rd1+4], %r4;
    st.global.b32 [%rd1], 0;  $end:"""
OWN, BARRIER = "st.global.b32 [%rd30], %r2;", "membar.gl;"
RESETS = [(OWN + BARRIER, BARRIER), (BARRIER + OWN, BARRIER), (OWN, BARRIER), (OWN + BARRIER, "")]


@pytest.mark.parametrize(("first", "second"), RESETS)
def test_the_last_block_resets_the_ticket(first, second):
    right = (first, second) == RESETS[0]
    given = torch.zeros(3, dtype=S32), torch.zeros(2, dtype=S32)
    text, options = RESET.format(first, second), dict(threads=1, grid=(3, 1, 1))
    for _, ticket in check("" if right else "race: ", text, *given, **options):
        assert not right or ticket.tolist() == [0, 33]


INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;"
INIT_FENCE = "@%p1 fence.mbarrier_init.release.cluster;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;"
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];"
COPY = "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
COPY += " [%r1], [%rd0], 128, [%r2], %rd9;"
WAIT = "$wait{0}: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], {0};"
FIRST_WAIT, SECOND_WAIT = (f"{WAIT} @!%p2 bra $wait{{0}};".format(i) for i in range(2))
AGAIN, EARLY = "bar.sync 1;", "race: |never written"
# Two copies into one place, each read by two warps.
COPIES = f"""
    mov.u32 %r1, memory;  add.u32 %r2, %r1, 128;  setp.eq.s32 %p1, %r0, 0;
    and.b32 %r3, %r0, 31;  shl.b32 %r3, %r3, 2;  add.u32 %r3, %r3, %r1;
    createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
    {INIT} {INIT_FENCE} {BLOCK} {EXPECT} {COPY} {FIRST_WAIT}
    ld.shared.b32 %r4, [%r3];  {AGAIN} add.s64 %rd0, %rd0, 128;
    {EXPECT} {COPY} {SECOND_WAIT} ld.shared.b32 %r5, [%r3];
    st.global.v2.b32 [%rd21], {{%r4, %r5}};"""


# Statements, what takes their place, and the fault then.
WRONG_COPIES = [(FIRST_WAIT, "", EARLY), ("[%r2], 0;", "[%r2], 1;", EARLY), (BLOCK, "", EARLY)]
WRONG_COPIES += [(SECOND_WAIT, "", "race: |has returned")]
WRONG_COPIES += [("%p2, [%r2], 1;", "%p2, [%r2], 0;", "race: |has returned")]
WRONG_COPIES += [(EXPECT, ARRIVE, EARLY), (EXPECT, EXPECT + ARRIVE, "more arrivals at a barrier")]
WRONG_COPIES += [("_, [%r2], 128", "_, [%r2], 144", "deadlock; warp 0 for a phase of the barrier")]
WRONG_COPIES += [(AGAIN, "", "race: |deadlock")]  # a warp may miss a whole phase
WRONG_COPIES += [(INIT_FENCE, "", "without a fence"), (INIT, 2 * INIT, "initialised twice")]
WRONG_COPIES += [(INIT, "@%p1 st.shared.b64 [%r2], 0;", "no barrier was initialised there")]
WRONG_COPIES += [(INIT, "", "never written"), ("[%rd0], 128", "[%rd0], 120", "no multiple of 16")]
WRONG_COPIES += [(COPY, f"add.s32 %r1, %r1, 8; {COPY}", "no multiple of 16")]
WRONG_COPIES += [(COPY, f"add.s64 %rd0, %rd0, 8; {COPY}", "no multiple of 16")]
WRONG_COPIES += [(COPY, f"add.s64 %rd0, %rd0, 256; {COPY}", "in no tensor")]
WRONG_COPIES += [(COPY, f"add.s32 %r1, %r1, 160; {COPY}", "out of bounds")]
WRONG_COPIES += [("[%r2], 0;", "[%r2], 2;", "a parity other than 0 and 1")]
WRONG_COPIES += [(AGAIN, f"ld.shared.b32 %r5, [%r2+4]; {AGAIN}", "of a barrier")]
WRONG_COPIES += [(AGAIN, f"{AGAIN} @%p1 st.shared.b64 [%r2], 0;", "of a barrier")]
WRONG_COPIES += [(INIT_FENCE, INIT_FENCE.replace("%p1", "!%p1"), "without a fence")]


@pytest.mark.parametrize(("old", "new", "match"), [("", "", ""), *WRONG_COPIES])
def test_bulk_copies(old, new, match):
    assert old in COPIES
    x, got = torch.arange(64, dtype=S32), torch.zeros(64, 2, dtype=S32)
    text, options = COPIES.replace(old, new, 1), dict(threads=64, most_instructions=100_000)
    for _, left in check(match, text, x, got, seeds=range(9), **options):
        assert match or torch.equal(left, x.view(2, 32).T.repeat(2, 1))


PHASES = "mov.u32 %r2, memory;  setp.eq.s32 %p1, %r0, 0;  setp.lt.s32 %p4, %r0, 32;"
PHASES += f"{INIT} {BLOCK}"


@pytest.mark.parametrize("misses", [False, True])
def test_phases_that_a_warp_misses(misses):
    """The end of phase 4 is not that of phase 2, though both have one parity."""
    text = PHASES
    for i in range(5):
        wait = FIRST_WAIT.replace("wait0", f"wait{i}").replace("[%r2], 0;", f"[%r2], {i % 2};")
        skip = f"@%p4 bra $on{i};" if misses and i > 1 else ""
        text += f"{ARRIVE} {skip} {wait} $on{i}: {BLOCK}"
    text += FIRST_WAIT.replace("wait0", "wait5")
    check("waits for a phase long before" if misses else "", text, threads=64)


@pytest.mark.parametrize(("between", "match"), [(FIRST_WAIT, ""), ("", "arrives before anybody")])
def test_phases_that_nobody_awaits(between, match):
    check(match, f"{PHASES} {ARRIVE} {between} {ARRIVE}")


MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# Each block stores to the other one, which waits.
SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r6], %rd9, [%r7];"
WORDS = SEND.replace("b64 [%r6], %rd9", "v2.b32 [%r6], {%r10, %r11}")
HALF = SEND.replace("b64 [%r6], %rd9", "f32 [%r6], %r10")
HALVES = f"{HALF} add.u32 %r6, %r6, 4; {HALF.replace('%r10', '%r11')}"
RECEIVE = FIRST_WAIT.replace("acquire.cta", "acquire.cluster")
RECEIVE += "ld.shared.b64 %rd10, [%r5];  st.global.b64 [%rd30], %rd10;"
SENT = f"""
    mov.u32 %r1, memory;  add.u32 %r2, %r1, 128;  setp.eq.s32 %p1, %r0, 0;
    {INIT} {INIT_FENCE} {EXPECT} {MEET} mov.u32 %r3, %cluster_ctarank;  xor.b32 %r4, %r3, 1;
    shl.b32 %r5, %r0, 3;  add.u32 %r5, %r5, %r1;  mapa.shared::cluster.u32 %r6, %r5, %r4;
    mapa.shared::cluster.u32 %r7, %r2, %r4;  mad.lo.u32 %r8, %r3, 100, %r0;
    cvt.u64.u32 %rd9, %r8;  mad.wide.u32 %rd30, %r3, 8, %rd20;
    setp.eq.s32 %p4, %r3, 0;  {SEND} {RECEIVE} {MEET}"""
CLUSTER = dict(cluster=2, grid=(2, 1, 1))
INTO, FROM = "st.global.b32 [%rd1], 7;", "ld.global.b32 %r9, [%rd1];"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("", "", ""),
        ("acquire.cluster", "acquire.cta", "race: .* copy or store that arrives later"),
        (f"{RECEIVE} {MEET}", "", "has returned"),
        (INIT_FENCE, "", "its barrier was initialised without a fence"),
        (MEET, "", "race: |was initialised|never written|has returned|may not have begun"),
        (SEND, f"add.u32 %r6, %r6, 4; {SEND}", "misaligned or out of bounds"),
        (SEND, f"add.u32 %r6, %r6, 256; {SEND}", "misaligned or out of bounds"),
        (SEND, f"mov.b64 {{%r10, %r11}}, %rd9; {WORDS}", ""),
        (SEND, f"mov.b64 {{%r10, %r11}}, %rd9; {HALVES}", ""),
        (SEND, f"mov.b64 {{%r10, %r11}}, %rd9; {HALF}", "deadlock"),
        (SEND, f"add.u32 %r6, %r6, 2; mov.b64 {{%r10, %r11}}, %rd9; {HALVES}", "misaligned"),
        # Before and after the exchange one block reads and the other one writes, or the reverse.
        (
            f"{SEND} {RECEIVE}",
            f"@%p4 {INTO} {SEND} {RECEIVE} @!%p4 {FROM}",
            "race: load of .* store",
        ),
        (f"{SEND} {RECEIVE}", f"@%p4 {FROM} {SEND} {RECEIVE} @!%p4 {INTO}", ""),
    ],
)
def test_stores_to_the_other_block(old, new, match):
    assert old in SENT
    text, given = SENT.replace(old, new), torch.zeros(16, 2, dtype=torch.int64)
    tensors = given, torch.zeros(1, dtype=S32)
    for left, _ in check(match, text, *tensors, seeds=range(9), threads=16, **CLUSTER):
        assert match or left.tolist() == [[100 + i, i] for i in range(16)]
    if not match:
        relied = run(text, *tensors, threads=16, shared_bytes=256, **CLUSTER)
        assert (relied.order > 0) == (FROM in text)
        assert relied == executor.Relied(order=relied.order)


def test_stores_to_other_blocks_need_one():
    text = SENT.replace("xor.b32 %r4, %r3, 1", "mov.b32 %r4, %r3")
    given = torch.zeros(16, 2, dtype=torch.int64)
    check("undefined in a cluster of one block", text, given, threads=16)


# Of the first block a store, of the second a load.
WRITES, READS = "@%p2 st.global.b32 [%rd0], 7;", " @!%p2 ld.global.b32 %r5, [%rd0];"


@pytest.mark.parametrize(
    ("statements", "match"),
    [
        (MEET + WRITES + MEET + READS, ""),
        (MEET + WRITES + READS, "race: "),
        (WRITES + MEET.replace(" ", READS), "race: "),  # between arrival and wait
        (f"@!%p2 bra $end; {WRITES} {MEET}", ""),  # who has returned counts as arrived
        (
            f"@!%p2 barrier.sync 1, 64; {MEET}",
            "deadlock; warp 0 at the barrier of the cluster; warp 1",
        ),
    ],
)
def test_barriers_of_clusters(statements, match):
    begin = "mov.u32 %r2, %cluster_ctarank;  setp.eq.s32 %p2, %r2, 0;"
    check(match, f"{begin} {statements} $end:", torch.zeros(1, dtype=S32), threads=32, **CLUSTER)


def test_unknown_modifiers():
    """No part of an opcode is left out of account."""
    text = f"{COPIES} {SENT} {TICKET.format(BLOCK, 'relaxed', WARP)} bra.uni $end; ret; {BARRIER}"
    begin = (
        ".entry test(.param .u64 p0) { .shared .align 8 .b8 memory[256]; $end:; $wait0:; $wait1:;"
    )
    known = {}  # of each opcode a statement
    for statement in " ".join(text.split()).split(";")[:-1]:
        found = re.fullmatch(r"\s*(?:\$\w+: )?(?:@!?%p\d )?(([a-z][\w.:]*).*)", statement)
        known[found[2]] = found[1]
    for opcode, statement in known.items():
        executor.load(f"{begin} {statement}; }}")
        for place in [found.end() for found in re.finditer(r"\w+(?=\.|$)", opcode)]:
            changed = statement.replace(opcode, f"{opcode[:place]}.mystery{opcode[place:]}")
            with pytest.raises(parser.UnknownError, match="mystery"):
                executor.load(f"{begin} {changed}; }}")


LIMITS = [(".maxntid 64, 1, 1", 65, 1), (".reqntid 64", 32, 1), ("", 1_025, 1), ("", 32, 2**31)]


@pytest.mark.parametrize(("directive", "threads", "blocks"), LIMITS)
def test_limits_of_launches(directive, threads, blocks):
    kernel = executor.load(f".entry test() {directive} {{ ret; }}")
    with pytest.raises(executor.ExecutionError, match=f"{threads} threads|a grid of"):
        executor.launch(kernel, (blocks, 1, 1), threads, [])
    executor.launch(kernel, (2, 1, 1), 64, [])
    with pytest.raises(parser.UnknownError, match="mystery"):
        executor.load(".entry test() .maxntid 32 .mystery 2 { ret; }")


@pytest.mark.parametrize("poisons", [False, True])
def test_vectors_of_which_a_part_is_elsewhere(poisons):
    """What lies in no tensor is NaN, and so may be what another block writes."""
    numbers, options = "{%r4, %r5, %r6, %r7}", dict(poisons=poisons, threads=1)
    load = f"ld.global.v4.b32 {numbers}, [%rd0+"
    x, got = torch.arange(6, dtype=F32), torch.zeros(4)
    text = f"{load}16]; st.global.v4.b32 [%rd1], {numbers};"
    for _, left in check("" if poisons else "in no tensor", text, x, got, **options):
        assert not poisons or (left[:2].tolist() == [4, 5] and left[2:].isnan().all())
    assert not poisons or run(text, x, got, **options) == executor.Relied(beyond=1)
    for place, match in ((32, "in no tensor"), (-16, "in no tensor"), (8, "misaligned")):
        check(match, f"{load}{place}];", x, got, **options)
    text = f"""
        mov.u32 %r1, %ctaid.x;  mad.wide.u32 %rd8, %r1, 8, %rd0;  mad.wide.u32 %rd9, %r1, 16, %rd1;
        {load}0];  st.global.v4.b32 [%rd9], {numbers};  st.global.v2.b32 [%rd8], {{0, 0}};
    """
    options |= dict(grid=(2, 1, 1))
    for _, left in check("" if poisons else "race: ", text, x, got.repeat(2, 1), **options):
        assert not poisons or (left.isnan() | (left == x[:4])).all()
        assert not left.view(8)[[0, 1, 6, 7]].isnan().any()  # what each block writes itself
    assert not poisons or run(text, x, got.repeat(2, 1), **options).foreign > 0
