"""The CUDA kernels as built: registers, spills, and instructions that the design relies on."""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from helpers import needs_machine_code

import bapo_kernels


def cuobjdump():
    """The one on the path, or the one in the package of Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None:
        return None
    brought = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(brought) if brought.exists() else None


LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
CUOBJDUMP = cuobjdump()
pytestmark = [
    pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump"),
    pytest.mark.xdist_group("disassembly"),  # one worker makes it
]
ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Registers per thread with which two blocks fit: of 9 warps (5 in a quarter), and of 16.
REGISTERS = {"row_pass_cluster_kernel": 96, "row_pass_kernel": 64, "row_gradient_kernel": 64}
REGISTERS["sequence_mean_kernel"] = 64
# With which four blocks of 4 warps fit, all that there are of the first on a large GPU.
REGISTERS |= {"token_loss_kernel": 128, "multiply_sets_kernel": 128}
# With which five fit.
REGISTERS |= {"sets_sum_kernel": 96, "sets_parts_kernel": 96}
ROW_KERNELS = {"__nv_bfloat16": "13__nv_bfloat16", "__half": "6__half", "float": "If"}


def dump(*options):
    command = [CUOBJDUMP, *options, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=ARCHITECTURES)
def usage(request):
    """(architecture, {mangled kernel: its resources})."""
    needs_machine_code(request.param)
    text = dump("-res-usage", "-arch", request.param)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return request.param, {name: tuple(map(int, numbers)) for name, *numbers in found}


def test_registers_are_as_planned_and_nothing_spills(usage):
    architecture, kernels = usage
    assert len(kernels) >= 60
    clusters = [name for name in kernels if "row_pass_cluster_kernel" in name]
    # Empty ones, if the build is for sm_80 alone.
    assert len(clusters) in ((0, 12) if architecture == "sm_80" else (12,))
    for name, (registers, stack, local) in kernels.items():
        assert stack == local == 0, f"{name} for {architecture}"
        for kernel, most in REGISTERS.items():
            planned = architecture != "sm_120" or "cluster" not in kernel
            assert f"{len(kernel)}{kernel}" not in name or not planned or registers <= most, name


@pytest.fixture(scope="module")
def sass():
    """{mangled kernel: its instructions} for sm_90."""
    needs_machine_code("sm_90")
    text = dump("-sass", "-arch", "sm_90")
    parts = re.split(r"Function : (\w+)", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def instructions(sass, kernel, *flags):
    """The instructions of the one kernel whose mangled name has these template arguments."""
    found = [n for n in sass if f"{len(kernel)}{kernel}" in n and all(f in n for f in flags)]
    assert len(found) == 1, found
    line = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)"
    return Counter(re.findall(line, sass[found[0]], re.M))


@pytest.mark.parametrize("dtype", ROW_KERNELS.values())
def test_cluster_kernel_has_bulk_copies_and_wide_stores(sass, dtype):
    got = instructions(sass, "row_pass_cluster_kernel", dtype, "Lb0ELb1E")
    assert any(i.startswith("UBLKCP") for i in got), "bulk copies"
    assert "LDS.128" in got
    assert any(re.match(r"STG?\.E\.EF\.128", i) for i in got), "16-byte streaming stores"
    assert any(i.startswith("SYNCS") for i in got), "barriers in shared memory"
    assert any(i.startswith(("ST.E.ASYNC", "STAS")) for i in got), "sums sent to other blocks"


@pytest.mark.parametrize("dtype", ROW_KERNELS.values())
@pytest.mark.parametrize("softcap", ["Lb0", "Lb1"])
def test_the_l1_cache_is_emptied_only_for_the_cluster(sass, dtype, softcap):
    """At both cluster barriers, and at the first and a later try of the three waits for sums."""
    for aligned in ("ELb1E", "ELb0E"):
        got = instructions(sass, "row_pass_cluster_kernel", dtype, softcap + aligned)
        assert got["CCTL.IVALL"] == 8


@pytest.mark.parametrize("dtype", ROW_KERNELS.values())
def test_unaligned_rows_are_read_and_written_by_vectors(sass, dtype):
    got = instructions(sass, "row_pass_cluster_kernel", dtype, "Lb0ELb0E")
    assert "LDS.128" in got
    assert not [i for i in got if re.match(r"LDS\.[US](8|16)", i)], "no element alone"
    assert any(re.match(r"STG?\.E\.EF\.128", i) for i in got)


@pytest.mark.parametrize("dtype", ["13__nv_bfloat16", "6__half"])
@pytest.mark.parametrize("kernel", ["row_pass_cluster_kernel", "row_pass_kernel"])
def test_the_maximum_is_taken_of_pairs(sass, kernel, dtype):
    got = instructions(sass, kernel, dtype, "Lb0ELb1E")
    assert any("HMNMX" in i for i in got)


@pytest.mark.parametrize("dtype", ROW_KERNELS.values())
@pytest.mark.parametrize("kernel", ["row_pass_kernel", "row_gradient_kernel"])
def test_generic_kernels_have_wide_loads_and_stores(sass, kernel, dtype):
    got = instructions(sass, kernel, dtype, "Lb0ELb1E")
    assert any(re.match(r"LDG?\.E\.128", i) for i in got)
    assert any(re.match(r"STG?\.E\.EF\.128", i) for i in got)


@pytest.mark.parametrize("dtype", ROW_KERNELS.values())
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
    (name,) = (n for n in sass if f"{len(kernel)}{kernel}" in n and f"{dtype}Lb1E" in n and of in n)
    operations = re.findall(r"\s(LDG\.E\.128|FFMA|FMUL)\b", sass[name])
    runs = [len(run) for run in re.findall(r"L+", "".join(i[0] for i in operations))]
    assert max(runs) >= least, runs
