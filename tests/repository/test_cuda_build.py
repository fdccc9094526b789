"""The CUDA kernels as built: registers and spills."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers import needs_machine_code

import bapo_kernels
from benchmarks.instructions.sass import cuobjdump

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
CUOBJDUMP = cuobjdump()
pytestmark = pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
# Registers per thread with which two blocks fit: of 9 warps (5 in a quarter), and of 16.
REGISTERS = {"row_pass_cluster_kernel": 96}
REGISTERS |= dict.fromkeys(["row_pass_kernel", "row_gradient_kernel", "sequence_mean_kernel"], 64)
# With which four blocks of 4 warps fit, all that there are of the first on a large GPU; and five.
REGISTERS |= {"token_loss_kernel": 128, "multiply_sets_kernel": 128}
REGISTERS |= {"sets_pass_kernel": 128, "sets_gradient_kernel": 128}  # two of 8 warps
REGISTERS |= {"sets_sum_kernel": 96, "sets_parts_kernel": 96}
REGISTERS |= {"sample_rows_kernel": 64}  # four of 8 warps


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_registers_are_as_planned_and_nothing_spills(architecture):
    needs_machine_code(architecture)
    command = [CUOBJDUMP, "-res-usage", "-arch", architecture, str(LIBRARY)]
    text = subprocess.check_output(command, text=True)
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
