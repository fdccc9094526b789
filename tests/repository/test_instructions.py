"""Executed instructions of the row pass, the model of its time, and the page that has both."""

import importlib.util
import re

import numpy as np
import pytest
from helpers import needs_machine_code

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("typer")

from benchmarks.instructions import launch, page
from benchmarks.instructions.cuda import Row, kernels
from benchmarks.instructions.machine import to_double
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
