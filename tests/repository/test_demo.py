"""``make demo``: what it imports, what it refuses to time, and that it runs."""

import importlib
import subprocess
import sys

import pytest
import torch
from helpers import needs_native
from pages import ROOT
from typer.testing import CliRunner

for package in ("transformers", "matplotlib", "pandas", "rich"):
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
@pytest.mark.parametrize("way", ["before", "after", "inplace"])
def test_an_inexact_kernel_is_not_timed(monkeypatch, way):
    """But a baseline is, which may be inexact."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("before_after")
    monkeypatch.setattr(example, "VOCABULARY", 1_003)
    assert example.measure(way, "bfloat16", tokens=8)["milliseconds"] > 0
    gradient = example.gradient

    def inexact(which, logits, *arguments):
        got = gradient(which, logits, *arguments)
        wrong = which == way and logits.dtype != torch.float64
        return got + 0.02 * got.abs().max() if wrong else got

    monkeypatch.setattr(example, "gradient", inexact)
    if way == "before":
        assert example.measure(way, "bfloat16", tokens=8)["largest_error"] > 0.01
    else:
        with pytest.raises(SystemExit, match=f"{way} torch.bfloat16: gradient is off by"):
            example.measure(way, "bfloat16", tokens=8)


@needs_native
def test_the_demo_runs_and_its_search_acts(monkeypatch, tmp_path):
    from study import compare, demo, policy, training
    from study.__main__ import app

    monkeypatch.setattr(policy, "WARM_UP_STEPS", 20)
    for name in ("HELD_OUT", "HELD_OUT_AT_THE_END"):
        monkeypatch.setattr(training, name, 16)
    (tmp_path / "before_after.png").touch()
    command = ["demo", "--out", str(tmp_path), "--seeds", "1", "--updates", "8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = compare.pd.read_csv(tmp_path / "offpolicy_rlvr.csv")
    assert set(rows.arm) == set(demo.DEMO)
    searched = rows[rows.arm == "BAPO"]
    below = searched.bapo_pos_share_start < training.TARGET
    assert below.any()
    assert (below == (searched.bapo_clip_high > 1.21)).all()
    assert (tmp_path / "offpolicy_rlvr.png").stat().st_size > 10_000
