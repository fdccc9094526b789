"""The Triton kernels, compiled for GPUs: registers, spills, width of loads and stores."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
)
ROW_KERNELS = ("_row_pass_kernel", "_row_gradient_kernel", "_scale_kernel")
WIDE = (".128", "dwordx4")  # 16 bytes, as NVIDIA and AMD write it
# With two programs per multiprocessor; all that there are.
REGISTERS = {"cuda": 96, "hip": 256}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(target, marks=pytest.mark.xdist_group(target))  # one worker compiles it
        for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
    ],
)
def compiled(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_triton.py"
    command = [sys.executable, str(script), request.param]
    output = subprocess.check_output(command, env=environment, text=True)
    return request.param, json.loads(output)


def test_kernels(compiled):
    target, report = compiled
    names = {kernel["kernel"] for kernel in report["kernels"]}
    assert names > set(ROW_KERNELS), "the launchers were not called"
    for kernel in report["kernels"]:
        what = f"{kernel['kernel']} for {kernel['variant']}"
        assert kernel["stack"] == 0, f"{what}: spills or stack"
        if kernel["kernel"] not in ROW_KERNELS:
            continue
        assert kernel["registers"] <= REGISTERS[target.split(":")[0]], what
        loads_and_stores = kernel["in_loops"]
        assert sum(loads_and_stores.values()) >= 2, f"{what}: no loop was found"
        narrow = [name for name in loads_and_stores if not any(w in name for w in WIDE)]
        assert narrow == [], f"{what}: narrow accesses in a loop"


def test_all_threads_have_the_label_before_a_gradient_in_place(compiled):
    target, report = compiled
    orders = [kernel.get("label_in_order") for kernel in report["kernels"]]
    assert False not in orders
    if target.startswith("cuda"):
        assert orders.count(True) >= 10, "the loads of labels were not found"


def test_registers_are_limited(compiled):
    """Without a limit some versions of ptxas spill to fit one more program."""
    assert all(kernel.get("limited", True) for kernel in compiled[1]["kernels"])


def test_other_values_do_not_compile_again(compiled):
    """Bounds, temperatures, coefficients, targets and the number of tokens are run-time values."""
    assert compiled[1]["compiled_again"] == []
