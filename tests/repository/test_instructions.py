"""Executed instructions of the row pass, the model of its time, and the page that has both."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import needs_machine_code

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("typer")

import pandas as pd

from benchmarks.instructions import launch, model, page
from benchmarks.instructions.cuda import Row, kernels
from benchmarks.instructions.gpus import GPUS
from benchmarks.instructions.machine import Machine, to_double
from benchmarks.instructions.paths import executed_paths
from benchmarks.instructions.sass import cuobjdump, parse
from benchmarks.tables import markdown

# The most executed instructions per element on sm_90, with gradient and for log-probs alone.
BUDGET = {
    (151_936, "bfloat16"): (22.0, 13.6),
    (18_992, "bfloat16"): (22.5, 14.5),
    (4_096, "bfloat16"): (23.0, 13.8),
    (151_936, "float32"): (28.2, 19.0),
}
# In the loops of Triton's passes, in every dtype.
OF_TRITON = {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5}


def code(listing):
    """Instructions end with a semicolon or a line; a word with a colon labels the next one."""
    labels, instructions = {}, []
    for line in filter(None, map(str.strip, re.split("[;\n]", listing))):
        label, colon, instruction = line.rpartition(": ")
        if colon:
            labels[label] = f"0x{16 * len(instructions):x}"
        instructions.append(instruction)
    words = ([labels.get(word, word) for word in line.split(" ")] for line in instructions)
    return parse("\n".join(f"/*{16 * i:04x}*/  {' '.join(w)} ;" for i, w in enumerate(words)))


FULL_CHUNK = """
    S2R R0, SR_TID.X
    chunk: @P0 BRA narrow
    LDS.128 R4, [R0]; @!P1 BRA inside
    FSEL R4, R4, -INF, P2
    inside: MUFU.EX2 R4, R4; @P3 BRA store
    FSEL R4, R9, R4, P4
    store: STG.E.EF.128 [R2.64], R4; BRA next
    narrow: LDS.U16 R4, [R0]; MUFU.EX2 R4, R4; MUFU.EX2 R4, R4; @P5 BRA narrow
    next: @P6 BRA chunk
    EXIT
"""
PREDICATES = "loop: LDG.E.128 R4, [R2]; MUFU.EX2 R5, R4; @P0 FADD R1, R1, R5; @P1 BRA loop"
ROWS = """
    row: LDG.E.64 R8, [R2]
    chunk: LDS.128 R4, [R2]; MUFU.EX2 R5, R4; @P1 BRA chunk
    MUFU.RCP R5, R4; @P2 BRA row
    EXIT
"""
DIVERGED = """
    loop: LDS.128 R4, [R2]; BRA.DIV UR4, diverged
    FADD R1, R1, R5; FADD R1, R1, R5
    back: MUFU.EX2 R5, R4; @P1 BRA loop
    EXIT
    diverged: BRA back
"""


@pytest.mark.parametrize(
    ("listing", "executed"),
    [
        # Without the end of the row, the label's vector, and a way round the wide accesses.
        (FULL_CHUNK, "BRA LDS.128 BRA MUFU.EX2 BRA STG.E.EF.128 BRA BRA"),
        (PREDICATES, "LDG.E.128 MUFU.EX2 FADD BRA"),
        (ROWS, "LDS.128 MUFU.EX2 BRA"),
        (DIVERGED, "MUFU.EX2 BRA LDS.128 BRA.DIV FADD FADD"),
    ],
    ids=["full chunk", "false predicates", "rows", "diverged"],
)
def test_the_executed_path(listing, executed):
    (path,) = executed_paths(code(listing))
    assert [instruction.opcode for instruction in path.instructions] == executed.split()


PASSES = [
    ("LDG.E.128 R4, [R2]", 0x100000000, "READ", 512),
    ("BAR.SYNC 0", 0, "BARRIER", 0),
    ("LDG.E.128 R4, [R2]", 0x100000200, "READ", 512),  # reduced in every iteration
    ("BAR.SYNC 0", 0, "BARRIER", 0),
    ("LDG.E.U16 R4, [R2]", 0x100000016, "READ", 64),
    ("LDG.E.64 R4, [R2]", 0x700000000, "PLAIN", 0),  # a label
    ("LDG.E.128 R4, [R2]", 0x1000003F0, "REREAD", 512),  # the first lane at the other end
    ("@P0 LDG.E.128 R4, [R2]", 0x100000600, "PLAIN", 0),
    ("LDG.E.128 R4, [R2]", 0x100000400, "READ", 512),
    ("STG.E.64 [R2], R4", 0x200000000, "STORE", 256),
]


def test_what_moves_bytes():
    instructions = code("\n".join(one for one, *_ in PASSES))
    trace = [
        (one, not one.predicate, at) for one, (_, at, *_) in zip(instructions, PASSES, strict=True)
    ]
    expected = [(getattr(model, event), size) for *_, event, size in PASSES]
    assert model.steps(trace)[["event", "bytes"]].tolist() == expected
    # Another warp of the block loaded one of the lines before the last barrier.
    first = model.first_loads([trace]) | {model.line(trace[8][0], trace[8][2]): 1}
    assert model.steps(trace, first=first)["event"][8] == model.REREAD


def test_an_unknown_opcode_has_no_unit():
    (one,) = code("FNEW R1, R2")
    with pytest.raises(NotImplementedError, match="FNEW"):
        model.unit(one)


def test_spills_and_halves():
    """Local memory is of a lane; 2 - 0.5 and 1 - 0.5."""
    listing = code("""
        STL [R1], R2; LDL R3, [R1]
        FHADD.BF16 R5, R4.H1, -R2; FHADD.BF16 R6, R4, -R2; EXIT
    """)
    known = {"R1": 16, "R2": 0x3F000000, "R4": 0x40003F80}
    machine = Machine(listing, {}, {}, {0: 7}, registers=known)
    list(machine.run())
    assert [machine.registers[name] for name in ("R3", "R5", "R6")] == [
        *(0x3F000000, 0x3FC00000, 0x3F000000)
    ]
    assert not machine.memory


H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
WHOLE_ROW = launch.Plan(32_768, "bfloat16", 0, 0, 1, 32, 0)  # one block of 32 warps


def block(**executed):
    """Of 32 warps: as many accesses to 512 bytes, or instructions that wait for them."""
    kinds = {"arithmetic": (4, 1, 7, 7, 0, model.PLAIN, 0)}
    for name in ("READ", "REREAD", "STORE"):
        kinds[name] = (1, 0, 0, 7, list(model.UNITS).index("vector"), getattr(model, name), 512)
    return [np.array([kinds[k] for k, n in executed.items() for _ in range(n)], model.STEP)] * 32


def test_multiprocessors_share_bandwidth():
    """One that computes leaves its part to the others, but in the worst case."""
    row = block(READ=4, arithmetic=600, STORE=4)
    alone = model.predict(row, WHOLE_ROW, H100, model.Case(teams=1))
    assert model.predict(row, WHOLE_ROW, H100).cycles < 0.95 * alone.cycles
    assert model.predict(row, WHOLE_ROW, H100, model.PESSIMISTIC).cycles >= alone.cycles


def test_half_of_a_divided_l2_counts():
    """But for the optimistic end of the range, which has the higher clock too."""
    gpu = replace(H100, l2=8 << 20, l1=0)  # for 8.7 MB in flight
    row = block(READ=4, arithmetic=20, REREAD=4, STORE=4)
    found, best, worst = (model.predict(row, WHOLE_ROW, gpu, case) for case in model.CASES)
    assert [found.clock, best.clock, worst.clock] == [1.755e9, 1.98e9, 1.755e9]
    assert found.cycles / found.copy > 1.1 * best.cycles / best.copy
    undivided = model.predict(row, WHOLE_ROW, replace(gpu, name="undivided"))
    assert undivided.cycles < 0.95 * found.cycles


def test_packets_of_sums():
    """Those that a block receives per row, from the trace of one warp; its arrival is none."""
    plan = launch.Plan(151_936, "bfloat16", 8, 24, 4, 4, 2048)
    for sent in (0, 2, 3):
        what = np.array(([model.WAIT] + [model.SEND] * (1 + sent)) * 5)
        assert model.packets(what, plan) == 4 * 8 * sent
    assert model.packets(np.array([model.READ]), plan) == 0


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
    found = page.triton("sm_90")
    assert set(found.index) == {"bfloat16", "float16", "float32"}
    assert [of for of in found if found[of].max() > OF_TRITON.get(of, 9.5)] == []
    text = page.PAGE.read_text()
    if page.versions() in text:
        assert markdown(found.map("{:.2f}".format)) in text


@needs_kernels
@compiled
def test_page_has_the_predictions():
    """After a change of the kernels: ``python -m benchmarks.instructions --write``."""
    needs_machine_code("sm_90")
    text = page.PAGE.read_text()
    assert page.assumptions() in text
    if page.versions() not in text:
        pytest.skip("built by other compilers than the page's")
    cells = {cell.strip() for cell in text.split("|")}
    for line in page.of_length((4_096, "bfloat16")).values():
        assert set(line.values()) <= cells


def tables_of(begin):
    """Rows of cells in a block of the page, with the paragraph above each table."""
    paragraphs = page.PAGE.read_text().split(begin)[1].split(page.END)[0].strip().split("\n\n")
    for above, table in zip(["", *paragraphs], paragraphs, strict=False):
        if table.startswith("|"):
            rows = [row.split("|")[1:-1] for row in table.split("\n")]
            yield above, [[cell.strip() for cell in row] for row in rows]


RANGED = re.compile(r"([\d,.]+)(?: \w+| %)? \(([\d,.]+)-([\d,.]+)\)")


def numbers(cell):
    value, least, most = (float(each.replace(",", "")) for each in RANGED.fullmatch(cell).groups())
    assert least <= value <= most, cell
    return value


def test_every_prediction_has_its_range():
    found = 0
    for caption, (_, _, *rows) in tables_of(page.BEGIN):
        for name, *cells in rows if "Predicted" in caption else ():
            found += len([numbers(cell) for cell in cells if name != "copy"])
    assert found > 100


def test_page_has_the_published_times():
    """And how far the model is from them; the text has the extremes."""
    ((_, (header, _, *rows)),) = tables_of(page.PEERS)
    times = pd.read_csv(Path(page.__file__).with_name("peers.csv"))
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    assert len(rows) == len(times)
    deviations, inside = [], 0
    for peer, row in zip(times.itertuples(), rows, strict=True):
        assert row["published"].startswith(f"{peer.ms:.3f} ms")
        assert f"{peer.rows:,} x {peer.V:,} {peer.dtype}" == row["rows x V"]
        off = 100 * (numbers(row["predicted"]) / (peer.ms - peer.host) - 1)
        assert float(row["deviation"].removesuffix(" %")) == pytest.approx(off, abs=0.6)
        deviations.append(row["deviation"])
        ends = RANGED.fullmatch(row["predicted"]).groups()[1:]
        inside += float(ends[0]) <= peer.ms - peer.host <= float(ends[1])
    ends = [f(deviations, key=lambda d: int(d.split()[0])) for f in (min, max)]
    said = f"from {ends[0]} to {ends[1]}, and {inside} of {len(rows)} published times lie in"
    assert said in " ".join(page.PAGE.read_text().split())
