"""The CUDA kernels as built: registers, spills, and instructions that the design relies on."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from helpers import needs_machine_code

import bapo_kernels
from benchmarks.instructions.sass import cuobjdump

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
CUOBJDUMP = cuobjdump()
pytestmark = [
    pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump"),
    pytest.mark.xdist_group("disassembly"),  # one worker makes it
]
# Registers per thread with which two blocks fit: of 9 warps (5 in a quarter), and of 16.
REGISTERS = {"row_pass_cluster_kernel": 96}
REGISTERS |= dict.fromkeys(["row_pass_kernel", "row_gradient_kernel", "sequence_mean_kernel"], 64)
# With which four blocks of 4 warps fit, all that there are of the first on a large GPU; and five.
REGISTERS |= {"token_loss_kernel": 128, "multiply_sets_kernel": 128}
REGISTERS |= {"sets_pass_kernel": 128, "sets_gradient_kernel": 128}  # two of 8 warps
REGISTERS |= {"sets_sum_kernel": 96, "sets_parts_kernel": 96}
DTYPES = pytest.mark.parametrize("dtype", ["13__nv_bfloat16", "6__half", "If"])


def dump(*options):
    command = [CUOBJDUMP, *options, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_registers_are_as_planned_and_nothing_spills(architecture):
    needs_machine_code(architecture)
    text = dump("-res-usage", "-arch", architecture)
    kernels = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert len(kernels) >= 60
    clusters = [name for name, *_ in kernels if "row_pass_cluster_kernel" in name]
    # Empty ones, if the build is for sm_80 alone.
    assert len(clusters) in ((0, 12) if architecture == "sm_80" else (12,))
    for name, registers, stack, local in kernels:
        assert stack == local == "0", name
        for kernel, most in REGISTERS.items():
            planned = architecture != "sm_120" or "cluster" not in kernel
            if planned and f"{len(kernel)}{kernel}" in name:
                assert int(registers) <= most, name


@pytest.fixture(scope="module")
def sass():
    """{mangled kernel: its instructions} for sm_90."""
    needs_machine_code("sm_90")
    text = dump("-sass", "-arch", "sm_90")
    parts = re.split(r"Function : (\w+)", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def listing(sass, kernel, *flags):
    """Of the one kernel whose mangled name has these template arguments."""
    (name,) = (n for n in sass if f"{len(kernel)}{kernel}" in n and all(f in n for f in flags))
    return sass[name]


def instructions(text):
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", text, re.M))


CLUSTER, ALIGNED, UNALIGNED = "row_pass_cluster_kernel", "Lb0ELb1E", "Lb0ELb0E"
WIDE, FROM_SHARED, STREAMING = r"LDG?\.E\.128", r"LDS\.128$", r"STG?\.E\.EF\.128"
# Bulk copies, barriers in shared memory, and sums sent to other blocks.
OF_A_CLUSTER = "UBLKCP", "SYNCS", r"ST\.E\.ASYNC|STAS"


@DTYPES
@pytest.mark.parametrize(
    ("kernel", "flags", "wanted"),
    [
        (CLUSTER, ALIGNED, [FROM_SHARED, STREAMING, *OF_A_CLUSTER]),
        (CLUSTER, UNALIGNED, [FROM_SHARED, STREAMING]),
        ("row_pass_kernel", ALIGNED, [WIDE, STREAMING]),
        ("row_gradient_kernel", ALIGNED, [WIDE, STREAMING]),
    ],
)
def test_rows_are_read_and_written_by_vectors(sass, kernel, flags, wanted, dtype):
    """The maximum is taken of pairs, and in shared memory no element is read alone."""
    got = instructions(listing(sass, kernel, flags, dtype))
    for pattern in wanted:
        assert any(re.match(pattern, i) for i in got), pattern
    if flags == UNALIGNED:
        assert not [i for i in got if re.match(r"LDS\.[US](8|16)", i)]
    elif kernel != "row_gradient_kernel" and dtype != "If":
        assert any("HMNMX" in i for i in got)


@DTYPES
@pytest.mark.parametrize("softcap", ["Lb0", "Lb1"])
def test_the_l1_cache_is_emptied_only_for_the_cluster(sass, dtype, softcap):
    """At both cluster barriers, and at five tries of the three waits for sums."""
    for aligned in ("ELb1E", "ELb0E"):
        got = instructions(listing(sass, CLUSTER, dtype, softcap + aligned))
        assert got["CCTL.IVALL"] == 7


@DTYPES
@pytest.mark.parametrize(
    ("kernel", "of", "least"),
    [
        ("multiply_sets_kernel", "", 20),
        ("sets_sum_kernel", "HiddenSums", 8),
        ("sets_sum_kernel", "WeightSums", 8),
    ],
)
def test_rows_of_the_head_are_read_by_vectors_of_which_many_are_in_flight(
    sass, kernel, of, least, dtype
):
    """None is waited for before the last is asked for."""
    text = listing(sass, kernel, f"{dtype}Lb1E", of)
    operations = re.findall(r"\s(LDG\.E\.128|FFMA|FMUL)\b", text)
    runs = [len(run) for run in re.findall(r"L+", "".join(i[0] for i in operations))]
    assert max(runs) >= least, runs
