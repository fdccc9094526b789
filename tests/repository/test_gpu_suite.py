"""The suite for a GPU machine: its stages with fake tools, and its commands on the CPU."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from helpers import needs_native
from typer.testing import CliRunner

from bapo_kernels.tools import cli, validate
from benchmarks import __main__ as benchmarks
from benchmarks import launch_rows, records, run, targets, timing, trl_trainer, tune_triton
from benchmarks.cases import Case, gpu_suite

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/gpu_suite.sh"
LEVELS = ["logits", "hidden"]

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
STAGES = [
    *("library", "environment", "driver_debug", "driver"),
    *("answers_cuda", "answers_triton", "graphs_cuda", "graphs_triton"),
    *("targets_cuda", "targets_triton", "hidden_cuda", "hidden_triton"),
    *("tests", "training_step", "baselines_logits", "baselines_hidden"),
    *("memcheck", "synccheck", "racecheck", "memcheck_torch"),
    *("ncu", "ncu_sets", "other_tests"),
    *("profile_cuda", "profile_triton", "tune"),
    *("forms_of_head", "sampling_mask", "shapes", "validate"),
]


class Suite:
    """The script in a tree of its own, with fake tools and a folder with a prebuilt library."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        files = {"tree/csrc/kernel.cu": "a kernel\n", "tree/bapo_kernels/__init__.py": ""}
        files |= {f"prebuilt/{name}": "" for name in ("_C.abi3.so", "_build.json")}
        files |= {f"prebuilt/{name}": "" for name in ("cuda_driver", "cuda_driver_debug")}
        files |= {f"bin/{name}": OBSERVER for name in ("compute-sanitizer", "ncu")}
        files |= {"bin/python3": PYTHON, f"tree/{SCRIPT}": (ROOT / SCRIPT).read_text()}
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        sums = subprocess.check_output(["sha256sum", "csrc/kernel.cu"], cwd=folder / "tree")
        (folder / "prebuilt/SOURCES").write_bytes(sums)

    def run(self, *arguments, behave=None, device="cuda"):
        """Status and result by stage; the fake python does something if a pattern matches."""
        cases = "\n".join(f"*{word}*) {does} ;;" for word, does in (behave or {}).items())
        (self.folder / "behave").write_text(f'case "$*" in\n{cases}\nesac\n')
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "WHEELS")}
        variables |= {"FAKE": str(self.folder), "OUT": str(self.out), "TMPDIR": str(self.folder)}
        variables |= {"BAPO_PREBUILT": str(self.folder / "prebuilt"), "BAPO_SUITE_DEVICE": device}
        variables["BACKENDS"] = "cuda triton cpu" if device == "cuda" else "cpu"
        variables["PATH"] = f"{self.folder / 'bin'}:/usr/bin:/bin"
        command = ["bash", self.folder / "tree" / SCRIPT, *arguments]
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


def one_command(function):
    app = typer.Typer()
    app.command()(function)
    return app


COMMANDS = {
    "benchmarks": benchmarks.app,
    "bapo_kernels": cli.commands(),
    "benchmarks.tune_triton": one_command(tune_triton.main),
    "benchmarks.launch_rows": one_command(launch_rows.main),
    "benchmarks.trl_trainer": one_command(trl_trainer.main),
}


def parse(module, *arguments):
    """Raises if the command line is wrong."""
    command = typer.main.get_command(COMMANDS[module])
    if hasattr(command, "commands"):
        command, *arguments = command.commands[arguments[0]], *arguments[1:]
    command.make_context(module, list(arguments))


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path)


def test_all_stages_run_and_are_archived(suite):
    status, summary = suite.run("--budget", "5000")
    assert status == 0, summary
    assert [(name, word) for name, (word, _) in summary.items()] == [(n, "ok") for n in STAGES]
    assert summary["ncu"][1] == summary["ncu_sets"][1] == "1 launches measured"
    assert {"summary.txt", *(f"{name}.log" for name in STAGES)} <= set(suite.archive())
    (suite.out / "now").mkdir()  # where each stage wrote
    ours = [call[1:] for call in suite.calls() if call[0] == "-m" and len(call) > 2]
    commands = [call for call in ours if call[0] in COMMANDS]
    assert {call[0] for call in commands} == COMMANDS.keys()
    for call in commands:
        parse(*call)
    cases = [word[7:] for call in commands for word in call if word.startswith("--case=")]
    of_each = [sum(case in each.title for each in gpu_suite()) for case in cases]
    assert of_each == [1, 1, 1, 1, 1, 1, 5, 15]
    tests = [call for call in ours if call[0] == "pytest"]
    assert len(tests) == 4
    assert ["loadgroup" in call for call in tests] == ["-n" in call for call in tests]
    files = [word for call in tests for word in call if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files)
    sanitized = [call for call in ours if call[0] == "benchmarks.launch_rows" and "96" in call]
    assert ["--sets" in call for call in sanitized] == [False, True]


def test_all_files_with_tests_of_a_gpu_are_in_the_suite():
    of_devices = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.gpu\b|DEVICES\[")
    paths = (ROOT / "tests").rglob("test_*.py")
    files = {path.name for path in paths if of_devices.search(path.read_text())}
    not_there = {"test_cuda_driver.py", "test_cuda_on_host.py", "test_gpu_suite.py"}
    assert not_there < files
    script = (ROOT / SCRIPT).read_text()
    assert files - not_there <= set(re.findall(r"tests/(?:\w+/)?(\w+\.py)", script))


def test_a_wrong_backend_skips_only_the_stages_that_need_it(suite):
    """And a stage that reaches its limit keeps its results."""
    limit = 'echo {} >"$OUT/now/targets_triton_logits.jsonl"; echo first of five; exit 124'
    wrong = "echo 60 checks, 3 failed; exit 1"
    behave = {"validate*backend*cuda*dtype": wrong, "targets*triton*logits": limit}
    status, summary = suite.run("--budget", "5000", behave=behave)
    assert status == 1
    assert summary["answers_cuda"] == ("failed", "60 checks, 3 failed")
    skipped = [name for name, (word, _) in summary.items() if word == "skipped"]
    needed_it = ["graphs_cuda", "targets_cuda", "hidden_cuda", "training_step", "profile_cuda"]
    assert skipped == needed_it
    assert summary["targets_cuda"][1] == "answers_cuda: failed"
    assert summary["targets_triton"] == ("timed out", "first of five")
    assert suite.archive()["targets_triton_logits.jsonl"] == "{}\n"
    asked = [call[call.index("-k") + 1] for call in suite.calls() if "-n" in call]
    assert asked == 2 * ["(gpu or cuda or triton) and not cuda"]
    runs = [call for call in suite.calls() if call[2:3] == ["run"]]
    assert len(runs) == 5
    assert all(call[call.index("--without") + 1] == "bapo_kernels cuda" for call in runs)
    assert suite.calls()[-1][-4:-2] == ["--backend", "triton"]


@pytest.mark.parametrize("fault", ["other sources", "does not load", "missing"])
def test_an_unusable_prebuilt_library_is_built_again(suite, fault):
    """It is built from source; if there is no compiler that fails, and the other stages go on."""
    if fault == "other sources":
        (suite.folder / "tree/csrc/kernel.cu").write_text("another kernel\n")
    elif fault == "missing":
        shutil.rmtree(suite.folder / "prebuilt")
    loads = fault != "does not load"
    behave = {} if loads else {"native.why_no_cuda": "exit 1"}
    _, summary = suite.run("--only", "driver", behave=behave)
    assert summary["library"][0] == ("ok" if loads else "failed")
    built = [call[0] for call in suite.calls() if call[0].endswith(".py")]
    assert built == ["setup.py", *(["tests/cuda_driver/build.py"] if loads else [])]


def test_the_times_of_a_gpu_are_those_of_finished_work():
    """Synchronised at both ends; the peak is that of the step."""
    gpu = mock.Mock(**{"max_memory_allocated.return_value": 5 * 2**20})
    names = "synchronize", "reset_peak_memory_stats", "max_memory_allocated"
    watch = trl_trainer.Stopwatch("cuda")
    with mock.patch.multiple(torch.cuda, **{name: getattr(gpu, name) for name in names}):
        for _ in range(2):
            watch.begin()
            watch.end()
        watch.end_step()
        watch.begin()
    done = [call[0] for call in gpu.method_calls]
    assert done == [
        *("synchronize", "reset_peak_memory_stats", *["synchronize"] * 3),
        *("synchronize", "max_memory_allocated", "synchronize", "reset_peak_memory_stats"),
    ]
    assert watch.peaks == [5.0]
    assert sum(watch.micro_batches) <= watch.steps[0]


@needs_native
def test_the_commands_run_on_the_cpu(suite, monkeypatch, tmp_path):
    """Each command as the suite calls it, in small sizes and with few repetitions."""
    suite.run("--budget", "5000", device="cpu")
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    monkeypatch.setattr(run, "ROUNDS", 1)
    tasks = validate.tasks
    monkeypatch.setattr(validate, "VOCABULARY", 300)
    monkeypatch.setattr(validate, "tasks", lambda *names: itertools.islice(tasks(*names), 3))
    cases = [
        Case("logits", "loss", "any", 16, 300, 1),
        *(c for c in benchmarks.cpu_suite() if c.level == "tokens" and c.N == 8_192),
    ]
    monkeypatch.setattr(benchmarks, "cpu_suite", lambda: iter(cases))
    (suite.out / "now").mkdir()
    ran = []
    for call in suite.calls():
        if call[0] == "-m" and call[1] in ("benchmarks", "bapo_kernels") and len(call) > 2:
            done = CliRunner().invoke(COMMANDS[call[1]], call[2:])
            assert done.exit_code == 0, (call, done.output, done.exception)
            ran.append(call[2])
    assert ran == ["validate", *["targets"] * 2, *["run"] * 2, "profile", *["run"] * 3, "validate"]
    now = suite.out / "now"
    results = [r for level in LEVELS for r in records.load(now / f"targets_cpu_{level}.jsonl")]
    goals = [t.name for t in targets.targets("logits", 16, 500, 16, "bfloat16")]
    expected = [*goals, "beyond the row pass", "from hidden states", "extra memory"]
    assert [r["target"] for r in results] == expected
    assert {r["status"] for r in results} == {"measured"}
    assert results[4]["ratio"] < 1
    assert all(check["passed"] for check in records.load(now / "answers_cpu.jsonl"))
    measured = {r["method"] for r in records.load(suite.out / "cpu.jsonl")}
    assert measured >= {"copy", "three matrix products", "the paper's loop", "bapo_kernels cpu"}


@pytest.fixture
def trl():
    for name in ("trl", "datasets"):
        pytest.importorskip(name)


@needs_native
def test_the_training_step_runs_on_the_cpu(trl, suite, monkeypatch):
    """As the suite calls it, for two of the trainers, one of which fails."""
    suite.run("--only", "training_step", device="cpu")
    *_, call = suite.calls()
    assert call[:2] == ["-m", "benchmarks.trl_trainer"]
    (suite.out / "now").mkdir()
    names = ["no trainer", "BAPO, fused, scope step"]
    monkeypatch.setattr(trl_trainer, "TRAINERS", names)
    done = CliRunner().invoke(COMMANDS[call[1]], call[2:])
    assert done.exit_code == 1
    assert "KeyError: 'no trainer'" in done.output
    assert done.output.endswith("1 of 2 trainers measured\n")
    (record,) = records.load(suite.out / "now/training_step.jsonl")
    assert record["case"] == f"TRL micro-batch: {names[1]}"
    assert (record["device"], record["T"], record["V"]) == ("cpu", 16, 500)
    assert record["repetitions"] == 12


@pytest.mark.parametrize("sets", [False, True])
def test_the_launches_for_a_profiler(backend, device, interpreted, sets, capsys):
    N, V = (8, 40) if interpreted else (16, 300)
    launch_rows.main([backend], device, N, V, 16, "float32", sets)
    levels = LEVELS if sets else LEVELS[:1]
    lines = [rf"{backend}, {level}: loss -?\d\.\d+\n" for level in levels]
    assert re.fullmatch("".join(lines), capsys.readouterr().out)


@pytest.mark.parametrize("name", ["TRL's GRPO", "BAPO, fused", "BAPO, fused, scope lagged"])
def test_the_model_for_a_gpu_trains_in_a_small_size(trl, name):
    sizes = {"T": 16, "V": 500, "H": 64, "layers": 2, "intermediate": 64, "head_dim": 16}
    case = dataclasses.replace(trl_trainer.CASES["cuda"], steps=3, **sizes)
    seen = []
    rollout = trl_trainer.Case.rollout

    def spy(*arguments):
        made = rollout(*arguments)
        seen.append(made["completion_ids"])
        return made

    with mock.patch.object(trl_trainer.Case, "rollout", spy):
        record = trl_trainer.run(name, case, "cpu")
    assert record["repetitions"] == 8
    assert 0 < record["ms_20"] <= record["ms"] <= record["ms_80"]
    assert record["step_ms"] > 0
    assert record["peak_MiB"] > 0
    first, second = seen  # of the steps 1 and 2, and of step 3
    assert first != second
    lengths = [len(answer) for answer in first + second]
    assert len(first) == 16
    assert min(lengths) >= 8
    assert max(lengths) <= 16
    rewards = trl_trainer.reward(first)
    assert [sum(rewards[i : i + 4]) for i in range(0, 16, 4)] == [2, 0, 2, 0]
