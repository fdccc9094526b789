"""Executed instructions of the row pass, the model of its time, and the tool that prints both."""

import importlib.util
from dataclasses import replace
from textwrap import dedent

import numpy as np
import pytest
from helpers import needs_machine_code

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("typer")

from benchmarks.instructions import launch, model, page
from benchmarks.instructions.cuda import Row, kernels
from benchmarks.instructions.gpus import GPUS
from benchmarks.instructions.machine import Machine, to_double
from benchmarks.instructions.paths import executed_paths
from benchmarks.instructions.sass import cuobjdump, parse
from benchmarks.instructions.triton_kernels import per_element

# The most executed instructions per element on sm_90, with gradient and for log-probs alone.
BUDGET = {
    (151_936, "bfloat16"): (22.0, 13.6),
    (18_992, "bfloat16"): (22.5, 14.5),
    (4_096, "bfloat16"): (23.0, 13.8),
    (151_936, "float32"): (28.2, 19.0),
}
# In the loops of Triton's passes.
OF_TRITON = {
    "bfloat16": {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5},
    "float16": {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5},
    "float32": {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5},
}
H100 = next(gpu for gpu in GPUS if gpu.name == "H100")


def code(listing):
    """One instruction per line; a line that ends with a colon labels the next one."""
    lines = dedent(listing).split("\n")
    labels, instructions = {}, []
    for line in filter(None, map(str.strip, lines)):
        if line.endswith(":"):
            labels[line[:-1]] = f"0x{16 * len(instructions):x}"
        else:
            instructions.append(line)
    words = ([labels.get(word, word) for word in line.split(" ")] for line in instructions)
    return parse("\n".join(f"/*{16 * i:04x}*/  {' '.join(w)} ;" for i, w in enumerate(words)))


def the_path(listing):
    (path,) = executed_paths(code(listing))
    return [str(instruction).split(maxsplit=1)[1] for instruction in path.instructions]


def test_parse():
    guarded, branch, load = code("@!P0 FADD R1, R2, R3\n@P1 BRA P2, 0x0\nLDS.128 R4, [R5+0x10]")
    assert (guarded.predicate, guarded.name, guarded.target) == ("!P0", "FADD", None)
    assert (branch.predicate, branch.target, branch.address) == ("P1", 0, 16)
    assert (load.opcode, load.name, load.operands) == ("LDS.128", "LDS", "R4, [R5+0x10]")
    assert str(guarded) == "0000  @!P0 FADD R1, R2, R3"


def test_what_a_full_chunk_does_not_need_is_not_on_the_path():
    """The end of the row, the label's vector, and a way round the wide accesses."""
    path = the_path("""
        S2R R0, SR_TID.X
        chunk:
        @P0 BRA narrow
        LDS.128 R4, [R0]
        @!P1 BRA inside
        FSEL R4, R4, -INF, P2
        inside:
        MUFU.EX2 R4, R4
        @P3 BRA store
        FSEL R4, R9, R4, P4
        store:
        STG.E.EF.128 [R2.64], R4
        BRA next
        narrow:
        LDS.U16 R4, [R0]
        MUFU.EX2 R4, R4
        MUFU.EX2 R4, R4
        @P5 BRA narrow
        next:
        @P6 BRA chunk
        EXIT
    """)
    words = [line.split()[0] if line[0] != "@" else line.split()[1] for line in path]
    assert words == ["BRA", "LDS.128", "BRA", "MUFU.EX2", "BRA", "STG.E.EF.128", "BRA", "BRA"]


def test_false_predicates_are_issued():
    path = the_path("loop:\nLDG.E.128 R4, [R2]\nMUFU.EX2 R5, R4\n@P0 FADD R1, R1, R5\n@P1 BRA loop")
    assert len(path) == 4
    assert "@P0 FADD R1, R1, R5" in path


def test_the_loop_over_rows_is_not_a_pass():
    path = the_path("""
        row:
        LDG.E.64 R8, [R2]
        chunk:
        LDS.128 R4, [R2]
        MUFU.EX2 R5, R4
        @P1 BRA chunk
        MUFU.RCP R5, R4
        @P2 BRA row
        EXIT
    """)
    assert len(path) == 3


@pytest.mark.parametrize("where", ["in line", "elsewhere"])
def test_a_wait_counts_one_try(where):
    in_line, elsewhere = ("@!P0 BRA wait", "") if where == "in line" else ("@!P0 BRA again", "yes")
    path = the_path(f"""
        loop:
        IADD3 R1, R1, 0x1, RZ
        wait:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9], R8
        {in_line}
        arrived:
        LDS.128 R4, [R2]
        MUFU.EX2 R5, R4
        @P1 BRA loop
        EXIT
        again:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9], R8
        @!P0 BRA again
        BRA {"arrived" if elsewhere else "again"}
    """)
    assert len(path) == 6
    assert sum("TRYWAIT" in line for line in path) == 1


def test_branches_of_diverged_warps_are_not_taken():
    path = the_path("""
        loop:
        LDS.128 R4, [R2]
        BRA.DIV UR4, diverged
        FADD R1, R1, R5
        FADD R1, R1, R5
        back:
        MUFU.EX2 R5, R4
        @P1 BRA loop
        EXIT
        diverged:
        BRA back
    """)
    assert len(path) == 6


def test_elements_and_exps_have_to_agree():
    (path,) = executed_paths(code("loop:\nLDS.128 R4, [R2]\nMUFU.EX2 R4, R4\n@P1 BRA loop\nEXIT"))
    with pytest.raises(ValueError, match="1 exps for 4 elements"):
        per_element(path, 4)


def execute(listing, **registers):
    """The registers after a listing."""
    machine = Machine(code(listing + "\nEXIT"), {0: {}}, {}, {0: 0}, registers=registers)
    steps = sum(1 for _ in machine.run())
    return machine.registers | {"steps": steps}


def test_the_machine_follows_branches():
    found = execute("""
        MOV R1, 0x3
        loop:
        IADD3 R2, R2, 0x5, RZ
        IADD3 R1, R1, -0x1, RZ
        ISETP.NE.AND P0, PT, R1, RZ, PT
        @P0 BRA loop
        @P0 IADD3 R2, R2, 0x64, RZ
    """)
    assert (found["R2"], found["steps"]) == (15, 1 + 3 * 4 + 2)


def test_the_machine_computes():
    found = execute(
        "FFMA R3, R1, R2, -1\nLOP3.LUT R4, R1, R2, RZ, 0xc0, !PT", R1=0x40400000, R2=0x40000000
    )
    assert found["R3"] == 0x40A00000  # 3 * 2 - 1
    assert found["R4"] == 0x40000000
    with pytest.raises(NotImplementedError):
        execute("HMMA.16816.F32 R4, R8, R12, R4")


def predicted(warps, **settings):
    """Of steps by hand: (stall, waits, writes, unit, event); a block of the generic kernel."""
    numbers = list(model.UNITS)
    code = [
        np.array(
            [(s, waits, writes, 7, numbers.index(u), e) for s, waits, writes, u, e in steps],
            model.STEP,
        )
        for steps in warps
    ]
    plan = launch.Plan(1_024, "bfloat16", 0, 0, settings.pop("blocks", 1), len(warps), 2_048)
    case = model.Case(model.Latencies(block_start=0, **settings))
    return model.predict(code, plan, replace(H100, copy=1e18, l2_speed=1e18), case)


def test_a_chain_of_dependent_instructions_takes_their_latencies():
    """An exp is used as soon as its scoreboard says; the last one ends the block when issued."""
    chain = [(1, 1, 0, "function", model.PLAIN)] * 101
    latency = model.UNITS["function"][1]
    assert predicted([chain]).cycles == pytest.approx(100 * latency, rel=0.01)
    stalled = [(7, 0, 7, "fma", model.PLAIN)] * 101
    assert predicted([stalled]).cycles == pytest.approx(700, rel=0.02)


def test_a_unit_bounds_the_throughput():
    """Warps that depend on nothing; four lie on each sub-partition."""
    exps = [(1, 0, 7, "function", model.PLAIN)] * 100
    assert predicted(16 * [exps]).cycles == pytest.approx(4 * 100 * 8, rel=0.02)
    adds = [(1, 0, 7, "fma", model.PLAIN)] * 100
    found = predicted(16 * [adds])
    assert found.cycles == pytest.approx(400, rel=0.03)
    assert min(found.issue) > 0.95


def test_memory_and_barriers_are_waited_for():
    load = [(1, 0, 0, "global", model.READ), (1, 1, 7, "fma", model.PLAIN)]
    assert predicted([load], memory=500).cycles == pytest.approx(500, abs=5)
    other = [(1, 0, 7, "control", model.BARRIER), (1, 0, 7, "fma", model.PLAIN)]
    slow = [(300, 0, 7, "fma", model.PLAIN), *other]
    assert predicted([slow, other], barrier=20).cycles == pytest.approx(320, abs=5)


needs_kernels = pytest.mark.skipif(
    cuobjdump() is None or importlib.util.find_spec("triton") is None,
    reason="needs cuobjdump and Triton",
)
compiled = pytest.mark.xdist_group("instructions")  # one worker disassembles


@needs_kernels
@compiled
@pytest.mark.parametrize(("vocabulary", "dtype"), BUDGET)
def test_budget(vocabulary, dtype):
    needs_machine_code("sm_90")
    rows = (Row("sm_90", vocabulary, dtype, gradient) for gradient in (True, False))
    found = [row.counts()["all"] for row in rows]
    assert all(f <= most for f, most in zip(found, BUDGET[vocabulary, dtype], strict=True)), found


@needs_kernels
@compiled
@pytest.mark.parametrize("arch", page.ARCHITECTURES)
def test_the_executed_log_prob(arch):
    """Of 4,096 equal logits, by one warp: all of its 32 lanes add the sums of the whole row."""
    needs_machine_code(arch)
    row = Row(arch, 4_096)
    plan, parameters = launch.launch(4_096, "bfloat16", arch)
    memory = {}
    launch.traces(kernels(row.library, arch)[False, "bfloat16"], arch, plan, parameters, memory)
    place = (launch.LOG_PROBS << 32) // 4
    assert to_double(memory[place] | memory[place + 1] << 32) == pytest.approx(-np.log(32 * 4_096))


@needs_kernels
@compiled
def test_triton_budget():
    needs_machine_code("sm_90")
    found = page.triton("sm_90").T
    for dtype, most in OF_TRITON.items():
        assert {of: n for of, n in found[dtype].items() if n > most.get(of, 9.5)} == {}


@needs_kernels
@compiled
def test_page_has_the_predictions():
    """After a change of the kernels: ``python -m benchmarks.instructions --write``."""
    needs_machine_code("sm_90")
    text = page.PAGE.read_text()
    assert page.assumptions() in text
    if page.versions() not in text:
        pytest.skip("built by other compilers than the page's")
    lines = page.of_length((4_096, "bfloat16"))
    for line in lines.values():
        cells = [cell.strip() for cell in text.split("|")]
        assert set(line.values()) <= set(cells)
