"""``make demo``: what it imports, and what it does with a baseline or a kernel that is inexact."""

import importlib
import subprocess
import sys

import pytest
import torch
from helpers import EPS, needs_native
from pages import ROOT

for package in ("transformers", "matplotlib", "pandas", "rich", "typer"):
    pytest.importorskip(package)
EXAMPLES = ROOT / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples are in the repository only", allow_module_level=True)

# Packages that the environment for everything has, and that of the demo lacks.
ABSENT = "scipy tabulate triton trl verl megatron liger_kernel accelerate datasets pytest"
IMPORTS = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()}))  # importing them raises
sys.path[:0] = {[str(ROOT), str(EXAMPLES)]}
import before_after, study.__main__, study.demo
"""


def test_the_demo_imports_no_more_than_its_environment_has():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["before", "after", "inplace"])
def test_a_kernel_is_timed_if_it_is_exact_and_a_baseline_with_its_error(monkeypatch, way, dtype):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("before_after")
    monkeypatch.setattr(example, "VOCABULARY", 1_003)
    gradient, off_by = example.gradient, 0.1 if way == "before" else 0.0
    exact = example.checked_error(way, example.DTYPES[dtype])

    def inexact(which, logits, *arguments):
        got = gradient(which, logits, *arguments)
        wrong = which == way and logits.dtype != torch.float64
        return got + off_by * got.abs().max() if wrong else got

    monkeypatch.setattr(example, "gradient", inexact)
    got = example.measure(way, dtype, tokens=8)
    assert got["milliseconds"] > 0
    rounded = exact + EPS[example.DTYPES[dtype]]  # also of what is added
    assert abs(got["largest_error"] - off_by) <= (1 + 2 * off_by) * rounded
    if way != "before":
        off_by = 0.02
        with pytest.raises(SystemExit, match=f"{way} torch.{dtype}: gradient is off by"):
            example.measure(way, dtype, tokens=8)
