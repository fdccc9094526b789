"""Instructions per element of the row passes, and the tool that counts them."""

import importlib.util
from dataclasses import replace
from textwrap import dedent

import pytest
from helpers import needs_machine_code

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("typer")

from benchmarks.instructions import page
from benchmarks.instructions.gpus import GPUS
from benchmarks.instructions.passes import (
    BYTES,
    ENTROPY,
    FIRST,
    LOG_PROBS,
    PASSES,
    SECOND,
    Variant,
    count,
)
from benchmarks.instructions.paths import Releases, executed_paths
from benchmarks.instructions.sass import cuobjdump, parse
from benchmarks.instructions.units import by_unit

# The most instructions per element, without a soft cap, on sm_90.
BUDGET = {
    ("CUDA cluster", "bfloat16"): {FIRST: 10.0, SECOND: 8.0, LOG_PROBS: 10.0},
    ("CUDA cluster", "float16"): {FIRST: 10.0, SECOND: 8.0, LOG_PROBS: 10.0},
    ("CUDA cluster", "float32"): {"both": 26.0, LOG_PROBS: 12.5},
    ("Triton", "bfloat16"): {FIRST: 10.5, SECOND: 7.0, LOG_PROBS: 10.5},
    ("Triton", "float16"): {FIRST: 10.5, SECOND: 7.0, LOG_PROBS: 10.5},
    ("Triton", "float32"): {FIRST: 10.5, SECOND: 7.0, LOG_PROBS: 10.5},
}
ENTROPY_GRADIENT = 2.1  # more instructions per element than without it, in every kernel

VARIANT = Variant("CUDA cluster", "sm_90", "float32", softcap=False)


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


def the_path(listing, releases=Releases.FEWEST):
    (path,) = executed_paths(code(listing), releases)
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


KEPT_OR_RELEASED = """
    loop:
    LDS.128 R4, [R2]
    @P0 BRA kept
    SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R9], RZ
    kept:
    MUFU.EX2 R4, R4
    MUFU.EX2 R5, R5
    MUFU.EX2 R6, R6
    MUFU.EX2 R7, R7
    @P1 BRA loop
"""


def test_stages_are_released_by_log_probs_alone():
    kept, released = (the_path(KEPT_OR_RELEASED, releases) for releases in Releases)
    assert len(released) == len(kept) + 1
    counts = {one.of: one.issued for one in count(VARIANT, code(KEPT_OR_RELEASED))}
    assert counts == {FIRST: 7 / 4, LOG_PROBS: 8 / 4}


def test_log_probs_alone_may_have_a_loop_of_their_own():
    loops = [KEPT_OR_RELEASED.replace("loop", name) for name in ("a", "b")]
    loops = [loop.replace("kept", f"{name}2") for loop, name in zip(loops, "ab", strict=True)]
    kept = loops[0].replace("    SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R9], RZ\n", "")
    released = loops[1].replace("    @P0 BRA b2\n", "")
    for listing in (kept + released, released + kept):
        found = {one.of: one.path.releases for one in count(VARIANT, code(listing))}
        assert found == {FIRST: 0, LOG_PROBS: 1}
    found = {one.of: one.path.releases for one in count(VARIANT, code(released))}
    assert found == {FIRST: 1, LOG_PROBS: 1}


def second_pass(name, vectors, arithmetic, integers=0):
    """A loop with four float32 exps per vector."""
    vector = ["LDS.128 R4, [R2]", *4 * ["MUFU.EX2 R4, R4"], *4 * arithmetic, "ST.E.128 [R2], R4"]
    return "\n".join([f"{name}:", *vectors * vector, *integers * ["IADD3"], f"@P0 BRA {name}", ""])


def test_second_passes_are_distinguished_by_their_arithmetic():
    """The longest loop of each counts, however many integers its shorter one computes."""
    plain, bonus = ["FADD", "FMUL"], ["FADD", "FMNMX", "FMUL"]
    listing = KEPT_OR_RELEASED + second_pass("a", 4, bonus) + second_pass("b", 1, plain, 50)
    listing += second_pass("c", 2, plain, 3) + second_pass("d", 1, bonus) + "EXIT"
    found = {one.of: (one.elements, one.issued) for one in count(VARIANT, code(listing))}
    assert found[SECOND] == (8, 2 * 14 / 8 + 4 / 8)
    assert found[ENTROPY] == (16, 4 * 18 / 16 + 1 / 16)


def test_elements_and_exps_have_to_agree():
    listing = code(KEPT_OR_RELEASED)
    with pytest.raises(ValueError, match="4 exps for 8 elements"):
        count(replace(VARIANT, dtype="bfloat16"), listing)
    with pytest.raises(ValueError, match="4 exps for 4 elements"):
        count(replace(VARIANT, softcap=True), listing)
    with pytest.raises(ValueError):
        count(VARIANT, code("FADD\nEXIT"))


def test_units():
    listing = """
        MUFU.EX2\nMUFU.RCP\nFFMA\nIMAD.U32\nHADD2.F32\nF2FP.BF16.F32.PACK_AB\nLDS.128\nSTG.E
        FMNMX\nPRMT\nVIADD\nULEA\nR2UR\nSYNCS.ARRIVE\n@P0 BRA 0x0
    """
    assert by_unit(code(listing)) == {
        "exp": 2,
        "FMA": 2,
        "conversion": 2,
        "shared": 1,
        "global": 1,
        "ALU": 3,
        "uniform": 2,
        "control": 2,
    }


def test_shares_of_a_copy():
    """8,192 rows of 151,936 bfloat16 logits by hand: 26.75 instructions and two exps each."""
    N, V = 8_192, 151_936
    for name, copy_ms in (("H100 SXM", 1.66), ("H200", 1.16)):
        (gpu,) = (gpu for gpu in GPUS if gpu.name == name)
        per_ms = 132 * 1.755e6
        issue_ms, exp_ms = N * V * 26.75 / 32 / 4 / per_ms, N * V * 2 / 16 / per_ms
        assert gpu.issue_share(26.75, 4) == pytest.approx(issue_ms / copy_ms, rel=0.01)
        assert gpu.exp_share(2, 4) == pytest.approx(exp_ms / copy_ms, rel=0.01)


needs_kernels = pytest.mark.skipif(
    cuobjdump() is None or importlib.util.find_spec("triton") is None,
    reason="needs cuobjdump and Triton",
)
compiled = pytest.mark.xdist_group("instructions")  # one worker disassembles


@pytest.fixture(scope="module")
def records():
    needs_machine_code("sm_90")
    return page.records("sm_90")


@needs_kernels
@compiled
def test_every_pass_of_every_kernel_is_counted(records):
    found = set(records[["kernel", "dtype", "softcap", "pass"]].itertuples(index=False, name=None))
    kernels = ("CUDA cluster", "CUDA generic", "Triton")
    assert len(records) == len(found) == len(kernels) * len(BYTES) * 2 * len(PASSES)


@needs_kernels
@compiled
@pytest.mark.parametrize(("kernel", "dtype"), BUDGET)
def test_budget(records, kernel, dtype):
    mine = records[(records.kernel == kernel) & (records["dtype"] == dtype) & ~records.softcap]
    issued = mine.set_index("pass").issued.to_dict()
    issued["both"] = issued[FIRST] + issued[SECOND]
    over = {of: issued[of] for of, most in BUDGET[kernel, dtype].items() if issued[of] > most}
    assert over == {}
    assert issued[ENTROPY] - issued[SECOND] <= ENTROPY_GRADIENT


@needs_kernels
@compiled
def test_page_is_what_the_tool_prints(records):
    """After a change of the kernels: ``python -m benchmarks.instructions --write``."""
    text = page.PAGE.read_text()
    assert page.assumptions() in text
    if page.versions() not in text:
        pytest.skip("built by other compilers than the page's")
    assert page.section(records) in text
