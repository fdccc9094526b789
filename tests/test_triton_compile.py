"""The Triton kernels, compiled for GPUs: registers, spills, width of loads and stores."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
    ),
]
ROW_KERNELS = ("_row_pass_kernel", "_row_gradient_kernel", "_scale_kernel")
HEAD_KERNELS = ("_multiply_sets_kernel", "_sets_dhidden_kernel", "_sets_dweight_kernel")
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
    assert names > {*ROW_KERNELS, *HEAD_KERNELS}, "the launchers were not called"
    for kernel in report["kernels"]:
        what = f"{kernel['kernel']} for {kernel['variant']}"
        # A temperature per row makes a float64 scale, which is held over the sums: where it does
        # not fit beside them, it is stored and loaded once per row.
        most = 16 if "per row" in kernel["variant"] and kernel["kernel"] in ROW_KERNELS else 0
        assert kernel["stack"] <= most, f"{what}: spills or stack"
        # Sets begin anywhere, so that accesses to their values are narrow.
        if kernel["kernel"] not in ROW_KERNELS or kernel["variant"].startswith("sets"):
            continue
        assert kernel["registers"] <= REGISTERS[target.split(":")[0]], what
        loads_and_stores = kernel["in_loops"]
        assert sum(loads_and_stores.values()) >= 2, f"{what}: no loop was found"
        narrow = [name for name in loads_and_stores if not any(w in name for w in WIDE)]
        assert narrow == [], f"{what}: narrow accesses in a loop"


def test_rows_of_a_matrix_are_read_in_wide_loads(compiled):
    of_head = [k for k in compiled[1]["kernels"] if k["kernel"] in HEAD_KERNELS]
    for kernel in of_head:
        what = f"{kernel['kernel']} for {kernel['variant']}"
        wide = [name for name in kernel["in_loops"] if any(w in name for w in WIDE)]
        assert any("load" in name or "LDG" in name for name in wide), what


def test_registers_are_limited(compiled):
    """Without a limit some versions of ptxas spill to fit one more program."""
    assert all(kernel.get("limited", True) for kernel in compiled[1]["kernels"])


def test_only_rows_that_are_read_again_stay_in_the_cache(compiled):
    target, report = compiled
    if not target.startswith("cuda"):
        pytest.skip("the hint is read from NVIDIA's disassembly")
    row_passes = [
        k for k in report["kernels"] if k["kernel"] == "_row_pass_kernel" and k["in_loops"]
    ]
    hints = {
        kernel["variant"]: {name.split(".")[2] for name in kernel["in_loops"] if "LDG" in name}
        for kernel in row_passes
    }
    assert hints["torch.bfloat16"] == {"EF"}, "log-probs without a gradient"
    assert hints["torch.bfloat16, softcap None, everything False"] == {"EL", "EF"}


def test_other_values_do_not_compile_again(compiled):
    """Bounds, temperatures, coefficients, targets, numbers of tokens, addresses of their values."""
    assert compiled[1]["compiled_again"] == []
