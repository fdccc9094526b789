"""The Triton kernels, compiled for GPUs: registers, spills, width of loads and stores."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's compiler"),
]
ROW_KERNELS = ("_row_pass_kernel", "_row_gradient_kernel", "_scale_kernel")
HEAD_KERNELS = ("_multiply_sets_kernel", "_sets_dhidden_kernel", "_sets_dweight_kernel")
WIDE = (".128", "dwordx4")  # 16 bytes, as NVIDIA and AMD write it
# With two programs per multiprocessor; all that there are.
REGISTERS = {"cuda": 96, "hip": 256}
# Bytes, outside of innermost loops: once per row, and where a float64 division is not ordinary.
STACK = {("cuda", "locked"): 8, ("cuda", "3.9"): 24, ("hip", "locked"): 0}
# The environment's version for all variants of one target of each vendor, and of the others for the
# extremes. A newer one, which `make` installs, has another ptxas.
FOLDERS = {"locked": None, "3.9": Path(__file__).parent.parent / "build/triton_3.9"}
COMPILED = [("locked", f"cuda:{capability}") for capability in (80, 90, 100, 120)]
COMPILED += [("locked", "hip:gfx942"), ("3.9", "cuda:90")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(of, id=f"{of[1]}-{of[0]}", marks=pytest.mark.xdist_group(f"{of[1]}-{of[0]}"))
        for of in COMPILED  # one worker compiles it
    ],
)
def compiled(request):
    version, target = request.param
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if folder := FOLDERS[version]:
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is not in {folder}")
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    script = Path(__file__).parent / "compile_triton.py"
    is_full = version == "locked" and target in ("cuda:90", "hip:gfx942")
    command = [sys.executable, str(script), target, *([] if is_full else ["extremes"])]
    begin = time.perf_counter()
    output = subprocess.check_output(command, env=environment, text=True)
    report = json.loads(output)
    seconds = time.perf_counter() - begin
    print(f"{target}, {version}: {len(report['kernels'])} kernels in {seconds:.0f} s")
    return report | {"vendor": target.split(":")[0], "version": version}


def test_kernels(compiled):
    vendor = compiled["vendor"]
    names = {kernel["kernel"] for kernel in compiled["kernels"]}
    assert names > {*ROW_KERNELS, *HEAD_KERNELS}, "the launchers were not called"
    for kernel in compiled["kernels"]:
        what = f"{kernel['kernel']} for {kernel['variant']}"
        in_loops = kernel["in_loops"]

        def found(*prefixes, names=in_loops):
            return [name for name in names if name.startswith(prefixes)]

        assert kernel["stack"] <= STACK[vendor, compiled["version"]], f"{what}: spills or stack"
        assert found("LDL", "STL") == [], f"{what}: spills in a loop"
        narrow = [name for name in in_loops if not any(w in name for w in WIDE)]
        if kernel["kernel"] in HEAD_KERNELS:
            wide = in_loops.keys() - narrow
            assert any("load" in name or "LDG" in name for name in wide), f"{what}: no wide load"
        if kernel["kernel"] not in ROW_KERNELS:
            continue
        exchanged = found("LDS", "STS", "SHFL", "BAR")
        assert exchanged == [], f"{what}: lanes are exchanged in a loop"
        # Sets begin anywhere, and labels are: narrow accesses.
        if kernel["variant"].startswith(("sets", "several labels", "sample")):
            continue
        assert kernel["registers"] <= REGISTERS[vendor], what
        assert sum(in_loops.values()) >= 2, f"{what}: no loop was found"
        assert narrow == [], f"{what}: narrow accesses in a loop"


def test_other_values_do_not_compile_again(compiled):
    """Options, numbers of tokens, addresses of their fields."""
    assert compiled["compiled_again"] == []
