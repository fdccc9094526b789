"""The suite for a GPU machine: its stages with fake tools, and its commands on the CPU."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from commands import application, parse
from helpers import needs_native
from pages import ROOT
from typer.testing import CliRunner

from bapo_kernels.tools import timing, validate
from benchmarks import records, trl_trainer

SCRIPT = ROOT / "benchmarks/gpu_suite.sh"
MODULES = {f"benchmarks.{name}" for name in ("tune_triton", "launch_rows", "trl_trainer")}
MODULES |= {"bapo_kernels"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script for Linux")

# Logs its arguments, and does what `behave` says.
PYTHON = r"""#!/usr/bin/env bash
printf '%q ' "$@" >>"$FAKE/calls"
echo >>"$FAKE/calls"
if [[ $* == "-m bapo_kernels" ]]; then printf "backend %s available\n" $BACKENDS; exit; fi
. "$FAKE/behave"
echo "all is well"
"""
# Runs the program that it is asked to observe.
OBSERVER = """#!/usr/bin/env bash
echo '"0","1","row_pass"' >"$(grep -o '[^ ]*[.]csv' <<<"$* $FAKE/no.csv" | head -n 1)"
while (($#)) && [[ $1 != python3 ]]; do shift; done; "$@"
"""


class Suite:
    """The script in a tree of its own, with fake tools and a prebuilt library."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        files = dict.fromkeys(("bin/compute-sanitizer", "bin/ncu"), OBSERVER)
        empty = "prebuilt/_C.abi3.so", "prebuilt/_build.json", "tree/bapo_kernels/__init__.py"
        files |= dict.fromkeys(empty, "") | {"bin/python3": PYTHON}
        files["tree/benchmarks/gpu_suite.sh"] = SCRIPT.read_text()
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)

    def run(self, *arguments, behave=None, device="cuda"):
        """Status and result by stage; the fake python does something if a pattern matches."""
        cases = "\n".join(f"*{word}*) {does} ;;" for word, does in (behave or {}).items())
        (self.folder / "behave").write_text(f'case "$*" in\n{cases}\nesac\n')
        here = self.folder
        variables = dict(FAKE=here, TMPDIR=here, OUT=self.out, BAPO_PREBUILT=here / "prebuilt")
        variables |= dict(BAPO_SUITE_DEVICE=device, PATH=f"{here}/bin:/usr/bin:/bin")
        variables |= dict(BACKENDS="cuda triton cpu" if device == "cuda" else "cpu")
        command = ["bash", here / "tree/benchmarks/gpu_suite.sh", *arguments]
        done = subprocess.run(command, env=variables, timeout=60, stdout=subprocess.DEVNULL)
        lines = (self.out / "summary.txt").read_text().splitlines()
        return done.returncode, {
            line[:16].strip(): (line[17:26].strip(), line.partition(" s  ")[2]) for line in lines
        }

    def archive(self):
        """Texts by name."""
        with tarfile.open(self.out / "gpu_suite.tar.gz") as tar:
            files = [member for member in tar if member.isfile()]
            return {Path(f.name).name: tar.extractfile(f).read().decode() for f in files}

    def calls(self):
        """Arguments of the calls of the fake python."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [shlex.split(line) for line in lines if not line.startswith("-c")]


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path)


def test_all_stages_run_and_are_archived(suite):
    status, summary = suite.run("--budget", "5000")
    assert status == 0, summary
    listed = subprocess.check_output(["bash", SCRIPT, "--list"], text=True).splitlines()
    stages = [line.split()[0] for line in listed]
    assert len(stages) > 20
    assert [(name, word) for name, (word, _) in summary.items()] == [(s, "ok") for s in stages]
    assert {"summary.txt", *(f"{name}.log" for name in stages)} <= set(suite.archive())
    (suite.out / "now").mkdir()  # where each stage wrote
    ours = [call[1:] for call in suite.calls() if call[0] == "-m" and len(call) > 2]
    commands = [call for call in ours if call[0] in MODULES]
    assert {call[0] for call in commands} == MODULES
    for call in commands:
        parse(*call)
    words = list(itertools.chain(*ours))
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    assert all(run_pytest(*call, "--collect-only") for call in benchmarks_of(ours))


def test_all_files_with_tests_of_a_gpu_are_in_the_suite():
    """Of kernels, which have a backend, and of devices."""
    kernels = re.compile(r"def test_\w+\([^)]*\b(backend|device)\b|mark\.gpu\b|DEVICES\[")
    devices = re.compile(kernels.pattern.replace("backend|", ""))
    files = {path.name for path in ROOT.glob("tests/test_*.py") if kernels.search(path.read_text())}
    files |= {p.name for p in ROOT.glob("tests/*/test_*.py") if devices.search(p.read_text())}
    not_there = {"test_cuda_on_host.py", "test_sets_on_host.py", "test_fake_gpu.py"}
    assert files - set(re.findall(r"tests/(?:\w+/)?(\w+\.py)", SCRIPT.read_text())) == not_there


def test_a_wrong_backend_skips_only_the_stages_that_need_it(suite):
    """And a stage that reaches its limit keeps its results."""
    limit = 'echo {} >"$OUT/now/cuda_targets_triton_logits.json"; echo first of five; exit 124'
    wrong = "echo 60 checks, 3 failed; exit 1"
    behave = {"validate*backend*cuda*dtype": wrong, "targets*triton*test_logits": limit}
    status, summary = suite.run("--budget", "5000", behave=behave)
    assert status == 1
    assert summary["answers_cuda"] == ("failed", "60 checks, 3 failed")
    skipped = [name for name, (word, _) in summary.items() if word == "skipped"]
    assert skipped == ["graphs_cuda", "targets_cuda", "hidden_cuda", "training_step"]
    assert suite.archive()["cuda_targets_triton_logits.json"] == "{}\n"
    asked = [call[call.index("-k") + 1] for call in suite.calls() if "-n" in call]
    assert asked == 2 * ["(gpu or cuda or triton) and not cuda"]
    runs = benchmarks_of(call[1:] for call in suite.calls())
    assert len(runs) > 6
    assert all("not bapo_kernels-cuda" in run[run.index("-k") + 1] for run in runs)


def benchmarks_of(calls):
    """The arguments of pytest in those that run benchmarks."""
    return [call[1:] for call in calls if any(word.startswith("benchmarks") for word in call[1:])]


def run_pytest(*arguments):
    """In this process; whether there were tests, and all passed."""
    files = [str(ROOT / word) if word.startswith("benchmarks") else word for word in arguments]
    return pytest.main(["-q", "-p", "no:xdist", *files]) == 0


def invoke(module, *arguments):
    return CliRunner().invoke(application(module), arguments)


@pytest.mark.exhaustive
@needs_native
def test_the_commands_run_on_the_cpu(suite, monkeypatch):
    """Each command as the suite calls it, in small sizes and with few repetitions."""
    suite.run("--budget", "5000", device="cpu")
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    monkeypatch.setattr(timing.CPUClock, "TURNS", 1)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the plugin times nothing in a worker
    tasks = validate.tasks
    monkeypatch.setattr(validate, "VOCABULARY", 300)
    monkeypatch.setattr(validate, "tasks", lambda *names: itertools.islice(tasks(*names), 3))
    now = suite.out / "now"
    now.mkdir()
    called = [call[1:] for call in suite.calls() if call[0] == "-m" and len(call) > 2]
    for call in called:
        if call[0] == "bapo_kernels" or "--N" in call:
            done = invoke(*call)
            assert done.exit_code == 0, (call, done.output, done.exception)
    assert all(run_pytest(*call) for call in benchmarks_of(called))
    answers = json.loads((now / "answers_cpu.json").read_text())
    assert all(check["passed"] for check in answers["checks"])
    made = [json.loads(path.read_text()) for path in now.glob("cpu_*.json")]
    measured = {each["extra_info"]["method"] for file in made for each in file["benchmarks"]}
    assert len(made) == 8
    assert measured >= {"copy", "three matrix products", "bapo_kernels", "bapo_kernels cpu"}


@pytest.mark.exhaustive
@needs_native
def test_the_training_step_runs_on_the_cpu(suite, monkeypatch):
    """As the suite calls it, a small model of the form of a GPU's; a trainer that fails is told."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    suite.run("--only", "training_step", device="cpu")
    (suite.out / "now").mkdir()
    monkeypatch.setattr(trl_trainer, "TRAINERS", ["no trainer", "BAPO, fused, scope step"])
    sizes = {"H": 64, "layers": 2, "intermediate": 64, "head_dim": 16, "steps": 3}
    monkeypatch.setitem(trl_trainer.CASES, "cpu", replace(trl_trainer.CASES["cuda"], **sizes))
    done = invoke(*suite.calls()[-1][1:])
    assert done.exit_code == 1
    assert "KeyError: 'no trainer'" in done.output
    assert done.output.endswith("1 of 2 trainers measured\n")
    (record,) = records.load(suite.out / "now/training_step.jsonl")
    assert 0 < record["ms_20"] <= record["ms"] <= record["ms_80"] < record["step_ms"]
