"""What the executor of PTX (tests/ptx) must notice, and what not, each in a small kernel."""

import shutil
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ptx"),  # one worker builds the machine
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="builds as on Linux"),
]

from ptx import executor  # noqa: E402
from ptx.assemble import run  # noqa: E402

SEEDS = range(1, 9)
HERE = "mad.wide.u32 %rd10, %r0, 4, %rd0;"  # the element of the thread
SHARED = "shl.b32 %r1, %r0, 2;"  # its place in shared memory


def faults(statements, *tensors, match, **options):
    """Every schedule shows it."""
    for seed in SEEDS:
        with pytest.raises(executor.ExecutionError, match=match):
            run(statements, *tensors, seed=seed, **options)


def passes(statements, *tensors, **options):
    for seed in SEEDS:
        run(statements, *tensors, seed=seed, **options)


def numbers(n=64, dtype=torch.int32):
    return torch.arange(n, dtype=dtype)


@pytest.mark.parametrize(
    ("access", "match"),
    [
        ("ld.global.b32 %r2, [%rd10+128];", r"lane 0: in no tensor: 4 bytes"),
        ("ld.global.b32 %r2, [%rd10+-4];", r"lane 0: in no tensor"),
        ("st.global.b32 [%rd10+4], %r0;", r"lane 31: in no tensor"),
        (
            "mov.b64 %rd9, 0; ld.global.b32 %r2, [%rd9];",
            "in no tensor: 4 bytes at global address 0x0",
        ),
        ("ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd0+4];", "misaligned: 16 bytes"),
        ("ld.global.b16 %rs2, [%rd10];", "part of an element"),
        ("ld.shared.b32 %r2, [%r0];", "lane 1: misaligned"),
        ("st.shared.b32 [%r1+4], %r0;", "lane 31: out of bounds: 4 bytes at shared address 0x80"),
        ("ld.param.b64 %rd2, [p0+8];", "out of bounds: 8 bytes at parameter address 0x8"),
        ("ld.shared.b32 %r2, [%r1];", "lane 0: reads what was never written"),
    ],
)
def test_addresses(access, match):
    needed = "" if "shared" in access and "never" in match else "st.shared.b32 [%r1], %r0;"
    if "[%r1+4]" in access:
        needed = ""
    faults(f"{HERE} {SHARED} {needed} {access}", numbers(32), match=match, shared_bytes=128)


def test_the_fault_names_the_statement():
    with pytest.raises(
        executor.ExecutionError,
        match=r"at instruction \d+ `ld.global.b32 %r2, \[%rd10\]` of test, block 0, warp 1",
    ):
        run(f"{HERE} ld.global.b32 %r2, [%rd10];", numbers(32), threads=64, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_memory_that_was_never_written(dtype):
    given = executor.poison(torch.empty(64, dtype=dtype))
    size = given.element_size()
    load = f"mad.wide.u32 %rd10, %r0, {size}, %rd0; ld.global.b{8 * size} %rd2, [%rd10];"
    faults(load, given, match="reads what was never written")
    run(f"setp.ge.u32 %p1, %r0, 32; @%p1 bra $end; {load} $end:", given.zero_(), threads=64)
    part = executor.poison(torch.empty(64, dtype=torch.float32))
    part[:32] = torch.nan
    passes(f"{HERE} ld.global.b32 %r2, [%rd10];", part)


@pytest.mark.parametrize(
    ("use", "match"),
    [
        ("st.global.b32 [%rd10], %r5;", "lane 0 uses as a value to store"),
        ("ld.global.b32 %r3, [%rd5];", "lane 0 uses as an address"),
        ("@%p5 st.global.b32 [%rd10], %r0;", "as a predicate"),
        ("selp.b32 %r6, %r0, %r0, %p5;", "as condition"),
        ("add.s32 %r6, %r5, 1; st.global.b32 [%rd10], %r6;", "as a value to store"),
        ("and.pred %p6, %p5, %p1; @%p6 bra $end;", "lane 16 uses as a predicate"),
        ("@%p1 mov.b32 %r5, 1; st.global.b32 [%rd10], %r5;", "lane 0 uses as a value"),
        ("@%p1 mov.b32 %r5, 1; shfl.sync.bfly.b32 %r6, %r5, 16, 31, -1; "
         "st.global.b32 [%rd10], %r6;", "lane 16 uses as a value"),
    ],
)  # fmt: skip
def test_registers_that_were_never_written(use, match):
    """They may be computed with, but what follows from them must not matter."""
    begin = f"{HERE} setp.ge.s32 %p1, %r0, 16;"
    faults(f"{begin} {use} $end:", numbers(), match=match)
    harmless = "selp.b32 %r7, %r5, %r0, 0; and.pred %p6, %p5, %p0; @%p6 bra $end;"
    passes(
        f"{begin} setp.lt.s32 %p0, %r0, 0; {harmless.replace(', 0;', ', %p0;')} $end:", numbers()
    )


NEIGHBOUR = "xor.b32 %r2, %r0, {bit}; shl.b32 %r2, %r2, 2;"


@pytest.mark.parametrize(
    "between", ["", "bar.warp.sync -1;", "shfl.sync.idx.b32 %r4, %r0, 0, 31, -1;"]
)
@pytest.mark.parametrize("bit", [1, 32])
def test_barriers_order_stores_before_loads(bit, between):
    """Between lanes of a warp (bit 1) those of the warp do, an exchange of registers does not."""
    exchange = "st.shared.b32 [%r1], %r0; {} ld.shared.b32 %r3, [%r2];"
    begin, options = SHARED + NEIGHBOUR.format(bit=bit), dict(threads=64, shared_bytes=256)
    passes(begin + exchange.format("bar.sync 0;"), **options)
    if bit == 1 and between.startswith("bar"):
        passes(begin + exchange.format(between), **options)
    else:
        faults(begin + exchange.format(between), match="race: |never written", **options)


@pytest.mark.parametrize("bit", [1, 32])
def test_barriers_order_loads_before_stores(bit):
    """Lanes that have exchanged registers have finished their loads; warps have not."""
    begin = f"{SHARED} {NEIGHBOUR.format(bit=bit)} st.shared.b32 [%r1], %r0; bar.sync 0;"
    code = begin + "ld.shared.b32 %r3, [%r2]; {} st.shared.b32 [%r1], %r3;"
    exchange = "shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;"
    options = dict(threads=64, shared_bytes=256)
    passes(code.format("bar.sync 0;"), **options)
    faults(code.format(""), match="race: ", **options)
    if bit == 1:
        passes(code.format(exchange), **options)
    else:
        faults(code.format(exchange), match="race: ", **options)


def test_lanes_of_one_store():
    """One place may get one value from several lanes; which of two values it gets, nobody says."""
    passes("st.global.b32 [%rd0], 7;", numbers())
    faults("st.global.b32 [%rd0], %r0;", numbers(), match="race: store of block 0 warp 0 lane 1")
    faults("st.global.b32 [%rd0], 7;", numbers(), match="race: ", threads=64)
    faults("st.global.b32 [%rd0], 7;", numbers(), match="race: ", blocks=2)


def test_copies_of_a_value_in_shared_memory():
    """Warps may store the same, once; a different value has to wait for all of them."""
    store = "mov.b32 %r1, 0; st.shared.b32 [%r1], {};"
    options = dict(threads=64, shared_bytes=4)
    passes(store.format(7) + "bar.sync 0; ld.shared.b32 %r2, [%r1];", **options)
    faults(
        store.format("%r5").replace("mov", "shr.u32 %r5, %r0, 5; mov"), match="race: ", **options
    )
    second = "setp.lt.s32 %p1, %r0, 1; @%p1 st.shared.b32 [%r1], 8;"
    faults(store.format(7) + second, match="race: ", **options)
    passes(store.format(7) + "bar.sync 0;" + second, **options)


# Block 0 writes data and raises a flag; the others wait for it and read the data.
PASSING = """
    mov.u32 %r2, %ctaid.x;  setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $wait;
    st.global.b32 [%rd0], 7;
    {before}
    {raise} [%rd1], 1;
    bra $end;
$wait:
    {look} %r3, [%rd1];
    setp.eq.s32 %p2, %r3, 0;
    @%p2 bra $wait;
    {after}
    ld.global.b32 %r4, [%rd0];
    mad.wide.u32 %rd10, %r2, 4, %rd2;
    st.global.b32 [%rd10], %r4;
$end:
"""
RELAXED = dict(before="", after="")
RELAXED |= {"raise": "st.relaxed.gpu.global.b32", "look": "ld.relaxed.gpu.global.b32"}
FENCES = dict(before="fence.acq_rel.gpu;", after="membar.gl;")
RIGHT = {
    "fences": RELAXED | FENCES,
    "release and acquire": RELAXED
    | {"raise": "st.release.gpu.global.b32", "look": "ld.acquire.gpu.global.b32"},
    "an atomic": RELAXED | FENCES | {"raise": "red.relaxed.gpu.global.add.u32"},
    "a fence and acquire": RELAXED | FENCES | dict(after="", look="ld.acquire.gpu.global.b32"),
}
WRONG = {
    "no fences": RELAXED,
    "no fence before": RELAXED | FENCES | dict(before=""),
    "no fence after": RELAXED | FENCES | dict(after=""),
    "a fence of the block": RELAXED | FENCES | dict(before="fence.acq_rel.cta;"),
    "a flag of the block": RELAXED | FENCES | {"raise": "st.relaxed.cta.global.b32"},
    "a flag like any value": RELAXED | FENCES | {"look": "ld.global.b32", "raise": "st.global.b32"},
}


def passed(parts, seed, **options):
    data, flag, got = (
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        numbers(),
    )
    run(PASSING.format(**parts), data, flag, got, threads=1, blocks=3, seed=seed, **options)
    return got[1:3].tolist() == [7, 7]


@pytest.mark.parametrize("name", RIGHT)
def test_passing_a_message(name):
    assert all(passed(RIGHT[name], seed) for seed in SEEDS)


@pytest.mark.parametrize("name", WRONG)
def test_passing_a_message_without_order(name):
    for seed in SEEDS:
        with pytest.raises(executor.ExecutionError, match="race: "):
            passed(WRONG[name], seed)


def test_stores_that_are_late():
    """Without a search for races, a missing fence gives wrong numbers in some schedule."""
    late = WRONG["no fence before"]
    assert not all(passed(late, seed, races=False) for seed in range(1, 200))
    assert all(passed(RIGHT["fences"], seed, races=False) for seed in range(1, 200))


def test_atomics_and_other_accesses():
    add = "atom.global.gpu.relaxed.add.u32 %r2, [%rd0], 1;"
    counter = torch.zeros(1, dtype=torch.int32)
    passes(add, counter, threads=64, blocks=3)
    assert counter.item() == 64 * 3 * len(SEEDS)
    faults(add + "ld.global.b32 %r3, [%rd0];", counter, match="race: ", threads=64)
    faults(add + "bar.sync 0; ld.global.b32 %r3, [%rd0];", counter, match="race: ", blocks=2)
    passes(add + "bar.sync 0; ld.global.b32 %r3, [%rd0];", counter, threads=64)
    faults(add.replace("gpu", "cta"), counter, match="race: atomic of the block", blocks=2)


# The last block to finish adds up what each has written.
TICKET = """
    mov.u32 %r2, %ctaid.x;  mad.wide.u32 %rd10, %r2, 4, %rd0;
    setp.eq.s32 %p1, %r0, 0;  setp.eq.s32 %p3, %r0, 40;
    add.s32 %r3, %r2, 10;
    @%p3 st.global.b32 [%rd10], %r3;
    bar.sync 0;
    mov.b32 %r4, 0;
    @%p1 atom.global.gpu.{order}.add.u32 %r4, [%rd1], 1;
    @%p1 st.shared.b32 [memory], %r4;
    bar.sync 0;
    ld.shared.b32 %r5, [memory];
    setp.ne.s32 %p2, %r5, 3;
    @%p2 bra $end;
    and.b32 %r6, %r0, 3;  mad.wide.u32 %rd11, %r6, 4, %rd0;
    ld.global.b32 %r7, [%rd11];
    redux.sync.max.s32 %r8, %r7, -1;
    @%p1 st.global.b32 [%rd1+4], %r8;
$end:
"""


def test_the_last_block_sees_what_all_have_written():
    for seed in SEEDS:
        options = dict(threads=64, blocks=4, shared_bytes=4, seed=seed)
        partial, ticket = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        run(TICKET.format(order="acq_rel"), partial, ticket, **options)
        assert ticket.tolist() == [4, 13]
        for order in ("relaxed", "release", "acquire"):
            with pytest.raises(executor.ExecutionError, match="race: load"):
                run(TICKET.format(order=order), partial, ticket.zero_(), **options)
        for barrier in (0, 1):
            broken = TICKET.format(order="acq_rel").split("bar.sync 0;")
            broken[barrier] += broken.pop(barrier + 1)
            with pytest.raises(executor.ExecutionError, match="race: |never written"):
                run("bar.sync 0;".join(broken), partial, ticket.zero_(), **options)


@pytest.mark.parametrize(
    ("statements", "match"),
    [
        ("setp.lt.s32 %p1, %r0, 8; @%p1 bar.sync 0;", "some lanes of the warp do not reach"),
        ("setp.lt.s32 %p1, %r0, 8; @%p1 bra $end; bar.sync 0; $end: bar.warp.sync -1;",
         "waits for lanes that wait elsewhere"),
        ("setp.lt.s32 %p1, %r0, 32; @%p1 bar.sync 0;", "has returned while other warps wait"),
        ("setp.lt.s32 %p1, %r0, 8; @%p1 ret; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
         "names lanes that have returned"),
        ("setp.lt.s32 %p1, %r0, 8; @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
         "names lanes that do not execute it"),
        ("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 255;", "by lanes that its mask does not name"),
        ("$again: bra $again;", "does not end"),
    ],
)  # fmt: skip
def test_lanes_and_warps_that_miss_each_other(statements, match):
    faults(statements, match=match, threads=64, most_instructions=10_000)


def test_lanes_that_diverge_meet_again():
    """Every lane counts its number of steps, and the warp its maximum, in any schedule."""
    got, most = numbers(64), numbers(64)
    statements = """
        mad.wide.u32 %rd10, %r0, 4, %rd0;  mad.wide.u32 %rd11, %r0, 4, %rd1;
        mov.b32 %r1, 0;  mul.lo.s32 %r2, %r0, 7;  and.b32 %r2, %r2, 31;
    $next:
        setp.ge.s32 %p1, %r1, %r2;
        @%p1 bra $done;
        and.b32 %r3, %r1, 1;  setp.eq.s32 %p2, %r3, 0;
        @%p2 bra $even;
        add.s32 %r1, %r1, 1;
        bra $next;
    $even:
        add.s32 %r1, %r1, 1;
        bra.uni $next;
    $done:
        redux.sync.max.s32 %r4, %r1, -1;
        st.global.b32 [%rd10], %r1;  st.global.b32 [%rd11], %r4;
    """
    for seed in range(0, 9):
        run(statements, got, most, threads=64, seed=seed)
        assert torch.equal(got, numbers(64) * 7 % 32)
        assert (most == 31).all()


def test_a_seed_fixes_the_schedule():
    order = torch.empty(128, dtype=torch.int32)

    def found(seed):
        counter = torch.zeros(1, dtype=torch.int32)
        add = "atom.global.gpu.relaxed.add.u32 %r2, [%rd1], 1;"
        run(f"{HERE} {add} st.global.b32 [%rd10], %r2;", order, counter, threads=128, seed=seed)
        return order.tolist()

    assert found(1) == found(1)
    assert len({tuple(found(seed)) for seed in SEEDS}) > 1
