"""The suite for a GPU machine: its stages with fake tools, and its commands on the CPU."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from helpers import needs_native
from typer.testing import CliRunner

from bapo_kernels.tools import cli as bapo_cli
from bapo_kernels.tools import validate
from benchmarks import __main__ as bench_cli
from benchmarks import launch_rows, records, run, targets, timing, trl_trainer, tune_triton
from benchmarks.cases import Case, gpu_suite

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/gpu_suite.sh"
LEVELS = ["logits", "hidden"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script for Linux")

BACKENDS = ["cuda", "triton", "cpu"]
# Takes the place of python3: logs its arguments, and does what `behave` says.
PYTHON = """#!/usr/bin/env bash
printf '%q ' "$@" >>"$FAKE/calls"
echo >>"$FAKE/calls"
if [[ $* == "-m bapo_kernels" ]]; then cat "$FAKE/environment"; exit; fi
if [[ $* == *commit* ]]; then echo "commit ${BAPO_COMMIT-unknown}"; exit; fi
. "$FAKE/behave"
echo "all is well"
"""
BEFORE = ["library", "environment"]
STAGES = [
    *BEFORE,
    *("driver_debug", "driver"),
    *("answers_cuda", "answers_triton", "graphs_cuda", "graphs_triton"),
    *("targets_cuda", "targets_triton", "hidden_cuda", "hidden_triton"),
    *("tests", "training_step", "baselines_logits", "baselines_hidden"),
    *("memcheck", "synccheck", "racecheck", "memcheck_torch"),
    *("ncu", "ncu_sets", "other_tests"),
    *("profile_cuda", "profile_triton", "tune"),
    *("forms_of_head", "sampling_mask", "shapes", "validate"),
]


class Suite:
    """A tree without history, fake tools, and a folder with a prebuilt library."""

    def __init__(self, folder):
        self.tree, self.fake, self.out = (folder / name for name in ("tree", "fake", "out"))
        self.prebuilt = folder / "prebuilt"
        for path in ("benchmarks", "bapo_kernels", "csrc", "tests"):
            (self.tree / path).mkdir(parents=True)
        shutil.copy(ROOT / SCRIPT, self.tree / SCRIPT)
        (self.tree / "csrc/kernel.cu").write_text("a kernel\n")
        self.prebuilt.mkdir()
        for name in ("_C.abi3.so", "_build.json"):
            (self.prebuilt / name).write_text(name)
        (self.prebuilt / "COMMIT").write_text("5eed5eed\n")
        sums = subprocess.check_output(["sha256sum", "csrc/kernel.cu"], cwd=self.tree)
        (self.prebuilt / "SOURCES").write_bytes(sums)
        for name in ("cuda_driver", "cuda_driver_debug"):
            self.tool(self.prebuilt / name, "echo kernels are right")
        self.tool(self.fake / "bin/python3", PYTHON)
        summary = "echo ========= ERROR SUMMARY: 0 errors"
        its_program = """while (($#)) && [[ $1 != python3 ]]; do shift; done; "$@" """
        self.tool(self.fake / "bin/compute-sanitizer", f"{its_program}\n{summary}")
        ncu = """echo '"0","1","row_pass"' >"$(grep -o '[^ ]*[.]csv' <<<"$*")" """
        self.tool(self.fake / "bin/ncu", f"{ncu}\n{its_program}")
        self.behaves()
        self.runs_here(*BACKENDS)

    def tool(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def behaves(self, **cases):
        """What the fake python does if a word is among its arguments."""
        text = "\n".join(f"*{word}*) {does} ;;" for word, does in cases.items())
        (self.fake / "behave").write_text(f'case "$*" in\n{text}\nesac\n')

    def runs_here(self, *names):
        lines = [f"backend {n} {'available' if n in names else 'absent: none'}" for n in BACKENDS]
        (self.fake / "environment").write_text("\n".join(lines) + "\n")

    def start(self, *arguments, **env):
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "WHEELS")}
        variables |= {"FAKE": str(self.fake), "OUT": str(self.out), "TMPDIR": str(self.fake)}
        variables |= env
        variables["PATH"] = f"{self.fake / 'bin'}:/usr/bin:/bin"
        variables.setdefault("BAPO_PREBUILT", str(self.prebuilt))
        return subprocess.Popen(
            ["bash", self.tree / SCRIPT, *map(str, arguments)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments, **env):
        """The exit status and the output."""
        process = self.start(*arguments, **env)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output

    def summary(self):
        """Status and result by stage, in order."""
        lines = (self.out / "summary.txt").read_text().splitlines()
        return {
            line[:16].strip(): (line[17:26].strip(), line.partition(" s  ")[2]) for line in lines
        }

    def archive(self):
        """Texts by name."""
        with tarfile.open(self.out / "gpu_suite.tar.gz") as tar:
            files = [member for member in tar if member.isfile()]
            return {Path(f.name).name: tar.extractfile(f).read().decode() for f in files}

    def calls(self):
        """Arguments of the calls of the fake python."""
        lines = (self.fake / "calls").read_text().splitlines()
        return [shlex.split(line) for line in lines if not line.startswith("-c")]

    def called(self, *words):
        return any(all(word in call for word in words) for call in self.calls())


def one_command(function):
    app = typer.Typer()
    app.command()(function)
    return app


COMMANDS = {
    "benchmarks": bench_cli.app,
    "bapo_kernels": bapo_cli.commands(),
    "benchmarks.tune_triton": one_command(tune_triton.main),
    "benchmarks.launch_rows": one_command(launch_rows.main),
    "benchmarks.trl_trainer": one_command(trl_trainer.main),
}


def parsed(call):
    """Whether a call is one of our commands; parsing it raises if the command line is wrong."""
    _, module, *arguments = call
    if module not in COMMANDS:
        return False
    command = typer.main.get_command(COMMANDS[module])
    if hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(module, arguments)
    return True


@pytest.fixture
def suite(tmp_path):
    return Suite(tmp_path)


def test_list_names_the_stages(suite):
    status, output = suite.run("--list")
    rows = [line.split() for line in output.splitlines()]
    assert status == 0
    assert [row[0] for row in rows] == STAGES
    limits = {row[0]: int(row[1]) for row in rows}
    assert sum(limits[name] for name in STAGES[1:10]) <= 560
    assert not suite.out.exists()


def test_all_stages_run_and_are_archived(suite):
    status, output = suite.run("--budget", 5000)
    summary = suite.summary()
    assert status == 0, output
    assert list(summary) == STAGES
    assert {word for word, _ in summary.values()} == {"ok"}
    assert output == (suite.out / "summary.txt").read_text()
    assert summary["library"][1] == "prebuilt, 5eed5eed"
    assert summary["memcheck"][1] == "ERROR SUMMARY: 0 errors"
    assert summary["ncu"][1] == summary["ncu_sets"][1] == "1 launches measured"
    archive = suite.archive()
    assert {f"{name}.log" for name in STAGES} <= set(archive)
    assert "commit 5eed5eed" in archive["environment.log"]  # there is no git in the tree
    assert archive["summary.txt"] == output
    assert {path.name for path in suite.out.iterdir()} == {"summary.txt", "gpu_suite.tar.gz"}
    ours = [call for call in suite.calls() if call[0] == "-m" and len(call) > 2]
    cases = [word[7:] for call in ours for word in call if word.startswith("--case=")]
    titles = [case.title for case in gpu_suite()]
    of_each = [[title for title in titles if case in title] for case in cases]
    assert [len(found) for found in of_each] == [1, 1, 1, 1, 1, 1, 5, 15]
    assert len({re.search("V = [0-9,]+", title)[0] for (title,) in of_each[:6]}) == 3
    tests = [call for call in ours if call[1] == "pytest"]
    (suite.out / "now").mkdir()  # where each stage wrote
    assert {call[1] for call in ours if parsed(call)} == COMMANDS.keys()
    files = [word for call in tests for word in call if word.startswith("tests/")]
    assert len(tests) == 4
    assert ["loadgroup" in call for call in tests] == ["-n" in call for call in tests]
    assert all((ROOT / file).exists() for file in files)
    sanitized = [call for call in ours if call[1] == "benchmarks.launch_rows" and "96" in call]
    assert ["--sets" in call for call in sanitized] == [False, True]


def test_all_files_with_tests_of_a_gpu_are_in_the_suite():
    of_devices = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.gpu\b|DEVICES\[")
    files = {
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if of_devices.search(path.read_text())
    }
    not_there = {"test_cuda_driver.py", "test_cuda_on_host.py", "test_gpu_suite.py"}
    assert not_there < files
    assert files - not_there <= set(
        re.findall(r"tests/(?:\w+/)?(\w+\.py)", (ROOT / SCRIPT).read_text())
    )


def test_stages_beyond_the_budget_are_skipped(suite):
    """Stages that do not fit are skipped, except those that all others need."""
    suite.run("--budget", 110, "--only", "driver,tests,tune,shapes")
    summary = suite.summary()
    assert {summary[name][0] for name in (*BEFORE, "driver", "tune")} == {"ok"}
    assert summary["tests"][0] == summary["shapes"][0] == "skipped"
    assert summary["tests"][1].startswith("takes up to 120 s, and ")


def test_only_and_from_choose_stages(suite):
    suite.run("--only", "tune,driver")
    assert list(suite.summary()) == [*BEFORE, "driver", "tune"]
    suite.run("--from", "tune")
    last = ["tune", "forms_of_head", "sampling_mask", "shapes", "validate"]
    assert list(suite.summary()) == [*BEFORE, *last]
    for arguments in (["--only", "tune,tuna"], ["--from", "tuna"], ["--frm", "tune"]):
        status, output = suite.run(*arguments)
        assert status == 2
        assert "no stage is called 'tuna'" in output or "--only STAGE" in output


def test_a_wrong_backend_skips_only_the_stages_that_need_it(suite):
    suite.behaves(**{"validate*backend*cuda*dtype": "echo 60 checks, 3 failed; exit 1"})
    status, _ = suite.run("--budget", 5000)
    summary = suite.summary()
    assert status == 1
    assert summary["answers_cuda"] == ("failed", "60 checks, 3 failed")
    skipped = [name for name, (word, _) in summary.items() if word == "skipped"]
    needed_it = ["graphs_cuda", "targets_cuda", "hidden_cuda", "training_step", "profile_cuda"]
    assert skipped == needed_it
    assert summary["targets_cuda"][1] == "answers_cuda: failed"
    assert suite.called("-k", "(gpu or cuda or triton) and not cuda")
    runs = [call for call in suite.calls() if call[2:3] == ["run"]]
    assert len(runs) == 5
    assert all(call[call.index("--without") + 1] == "bapo_kernels cuda" for call in runs)
    assert suite.calls()[-1][-4:-2] == ["--backend", "triton"]


def test_without_cuda_the_other_stages_run(suite):
    suite.runs_here("triton", "cpu")
    shutil.rmtree(suite.fake / "bin", ignore_errors=True)
    suite.tool(suite.fake / "bin/python3", PYTHON)
    (suite.prebuilt / "cuda_driver").unlink()
    status, _ = suite.run("--budget", 5000)
    summary = suite.summary()
    assert status == 1
    assert summary["environment"] == ("failed", "backend cuda absent: none")
    assert summary["answers_cuda"] == ("skipped", "cuda is absent: none")
    assert summary["targets_cuda"] == ("skipped", "cuda is absent: none")
    assert summary["targets_triton"][0] == summary["tests"][0] == "ok"
    assert summary["driver"] == ("skipped", "the driver was not built")
    assert summary["ncu"] == ("skipped", "no ncu on the path")


def test_wheels_are_installed_for_the_stages_that_need_them(suite, tmp_path):
    """Once, into a folder of their own; without TRL no training is started."""
    suite.behaves(version="exit 1")
    chosen, wheels = ("--only", "training_step,baselines_logits"), tmp_path / "wheels"
    suite.run(*chosen, WHEELS=wheels)
    assert suite.summary()["training_step"] == (
        "skipped",
        f"TRL is neither installed nor in {wheels}",
    )
    assert suite.summary()["baselines_logits"][0] == "ok"
    assert not suite.called("pip")
    wheels.mkdir()
    (wheels / "trl-1.16.0-py3-none-any.whl").touch()
    suite.behaves(pip=f"mkdir -p {suite.tree}/build/baselines", version="exit 1")
    suite.run(*chosen, WHEELS=wheels)
    assert {word for word, _ in suite.summary().values()} == {"ok"}
    assert [call[1] for call in suite.calls()].count("pip") == 1
    assert suite.called(
        "pip", "--no-index", "--no-deps", str(wheels / "trl-1.16.0-py3-none-any.whl")
    )


def test_a_hanging_stage_ends_at_its_limit_and_keeps_its_results(suite):
    hang = 'echo {} >>"$OUT/now/targets_triton_logits.jsonl"; echo first of five; sleep 9; exit'
    suite.behaves(**{"targets*triton*logits": hang, "targets*cuda*logits": "exit 3"})
    chosen = "targets_cuda,targets_triton,hidden_triton"
    status, _ = suite.run("--only", chosen, "--limit", 3)
    summary = suite.summary()
    assert status == 1
    assert summary["targets_cuda"][0] == "failed"
    assert summary["targets_triton"] == ("timed out", "first of five")
    assert summary["hidden_triton"][0] == "ok"
    assert suite.archive()["targets_triton_logits.jsonl"] == "{}\n"


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_suite_keeps_its_results(suite, by):
    suite.behaves(tune='echo one variant; echo {} >"$OUT/now/tune.jsonl"; exec sleep 9')
    process = suite.start("--only", "driver,tune,validate")
    running = suite.out / "now/tune.jsonl"
    until(running.exists)
    process.send_signal(by)
    assert process.wait(10) == (143 if by == signal.SIGTERM else -9)
    summary = suite.summary()
    assert summary["driver"] == ("ok", "kernels are right")
    assert "validate" not in summary
    if by == signal.SIGTERM:
        assert summary["tune"] == ("stopped", "one variant")
        assert suite.archive()["tune.jsonl"] == "{}\n"
        assert not running.exists()
    else:
        assert "driver.log" in suite.archive()
        assert running.read_text() == "{}\n"


@pytest.mark.parametrize("fault", ["other sources", "does not load", "missing"])
def test_an_unusable_prebuilt_library_is_built_again(suite, fault):
    """It is built from source; if there is no compiler that fails, and the other stages go on."""
    if fault == "other sources":
        (suite.tree / "csrc/kernel.cu").write_text("another kernel\n")
    elif fault == "does not load":
        suite.behaves(**{"native.why_no_cuda": "exit 1"})
    else:
        shutil.rmtree(suite.prebuilt)
    suite.run("--only", "driver")
    log = suite.archive()["library.log"]
    assert ("was built from other sources" in log) == (fault == "other sources")
    assert suite.called("setup.py", "build_ext", "--inplace")
    if fault == "does not load":
        assert suite.summary()["library"][0] == "failed"
    else:
        assert suite.called("tests/cuda_driver/build.py", "build/driver")
        assert suite.summary()["library"] == ("ok", "built here")


def test_the_driver_of_a_library_in_place_is_built(suite):
    """Once, and again where its sources have changed."""

    def builds():
        suite.run("--only", "driver", BAPO_PREBUILT="")
        assert suite.summary()["library"] == ("ok", "in place, newer than its sources")
        return len([call for call in suite.calls() if "tests/cuda_driver/build.py" in call])

    (suite.tree / "bapo_kernels/_C.abi3.so").touch()
    (suite.tree / "tests/cuda_driver").mkdir()
    driver = suite.tree / "build/driver/cuda_driver"
    suite.behaves(
        **{"cuda_driver/build.py": f"install -D -m 755 /bin/true {driver}; touch {driver}"}
    )
    assert [builds(), builds()] == [1, 1]
    assert suite.summary()["driver"][0] == "ok"
    os.utime(driver, (0, 0))
    assert builds() == 2


def test_without_nvcc_the_library_has_the_kernels_for_the_cpu(suite):
    """The stage fails and says why; the build is not one that removes the library."""
    suite.behaves(
        **{
            "setup.py": "[[ -z ${BAPO_REQUIRE_CUDA-} ]] && touch bapo_kernels/_C.abi3.so",
            "native.why_no_cuda": "echo no CUDA compiler found; exit 1",
        }
    )
    suite.run("--only", "tests", BAPO_PREBUILT="")
    assert suite.summary()["library"] == ("failed", "no CUDA compiler found")
    assert (suite.tree / "bapo_kernels/_C.abi3.so").exists()


@needs_native
def test_the_commands_run_on_the_cpu(suite, monkeypatch, tmp_path):
    """Each command as the suite calls it, in small sizes and with few repetitions."""
    suite.runs_here("cpu")
    suite.run("--budget", 5000, BAPO_SUITE_DEVICE="cpu")
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    monkeypatch.setattr(run, "ROUNDS", 1)
    tasks = validate.tasks
    monkeypatch.setattr(validate, "VOCABULARY", 300)
    monkeypatch.setattr(validate, "tasks", lambda *names: itertools.islice(tasks(*names), 3))
    cases = [
        Case("logits", "loss", "any", 16, 300, 1),
        *(c for c in bench_cli.cpu_suite() if c.level == "tokens" and c.N == 8_192),
    ]
    monkeypatch.setattr(bench_cli, "cpu_suite", lambda: iter(cases))
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


@pytest.mark.parametrize("sets", [False, True])
def test_the_launches_for_a_profiler(backend, device, interpreted, sets, capsys):
    N, V = (8, 40) if interpreted else (16, 300)
    launch_rows.main([backend], device, N, V, 16, "float32", sets)
    levels = LEVELS if sets else LEVELS[:1]
    lines = [rf"{backend}, {level}: loss -?\d\.\d+\n" for level in levels]
    assert re.fullmatch("".join(lines), capsys.readouterr().out)


@pytest.fixture
def trl():
    for name in ("trl", "datasets"):
        pytest.importorskip(name)


@needs_native
def test_the_training_step_runs_on_the_cpu(trl, suite, monkeypatch):
    """As the suite calls it, for two of the trainers, one of which fails."""
    suite.runs_here("cpu")
    suite.run("--only", "training_step", BAPO_SUITE_DEVICE="cpu")
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


def test_the_script_passes_shellcheck():
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, ROOT / SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
