"""The commands: validate finds wrong kernels. ``test_bench.py`` has bench."""

import ctypes
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from helpers import exhaustive_unless, needs_native
from operands import names_of
from typer.testing import CliRunner

import bapo_kernels
from bapo_kernels import available_backends
from bapo_kernels.backends import native, triton
from bapo_kernels.core import autograd, rows, tokens
from bapo_kernels.core.head import sets
from bapo_kernels.tools import processes, validate
from bapo_kernels.tools.cli import commands

DTYPES = ["float32", "bfloat16", "float16"]


def run(*arguments):
    return CliRunner().invoke(commands(), arguments)


def error_of(*arguments):
    done = run(*arguments)
    assert done.exit_code == 1
    return done.output


def validate_cpu(folder, *options):
    """The command, and the report that it has written."""
    file = folder / "report.json"
    done = run("validate", "--device", "cpu", "--backend", "cpu", "--json", str(file), *options)
    return done, json.loads(file.read_text(), parse_constant=pytest.fail)


def short(tasks):
    return [task for task in tasks if not task.case.endswith(f"V = {validate.VOCABULARY:,}")]


# Shows what each command prints, and how it ends.
WITHOUT_TYPER = """
import contextlib, io, json, runpy, sys
import bapo_kernels
assert not {"typer", "rich"} & set(sys.modules)
sys.modules["typer"] = None
for command in ([], ["--version"], ["validate"], ["bench"]):
    sys.argv[:] = ["bapo_kernels", *command]
    told, error = io.StringIO(), None
    with contextlib.redirect_stdout(told):
        try:
            runpy.run_module("bapo_kernels", run_name="__main__")
        except SystemExit as end:
            error = end.code
    print(json.dumps([told.getvalue(), error]))
"""


@pytest.mark.slow
def test_only_commands_need_typer():
    """Without it a command names the extra."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TYPER], capture_output=True, text=True)
    report, version, *commands = map(json.loads, done.stdout.splitlines())
    assert "backend reference available" in report[0]
    assert version == [f"{bapo_kernels.__version__}\n", None]
    needed = "the commands need typer and rich (extra 'cli'): pip install 'typer>=0.19' rich"
    assert commands == [["", f"bapo_kernels: {needed}"]] * 2


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["bapo_kernels", option])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("bapo_kernels", run_name="__main__")
    told = capsys.readouterr().out
    assert "validate" in told
    assert "bench" in told


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_native
def test_validate_finds_no_error(tmp_path):
    done, report = validate_cpu(tmp_path)
    assert done.exit_code == 0, done.output
    checks = report["checks"]
    told, left = done.stdout.splitlines()[-2:]
    assert told == f"{len(checks)} checks, 0 failed"
    assert left.startswith("not checked: cuda (")
    assert all(check["passed"] and check["error"] <= check["budget"] for check in checks)
    assert {check["dtype"] for check in checks} == set(DTYPES)
    asked = {"bounds", "gradient", "weight gradient", "log_probs", "entropy", "loss"}
    assert asked | {"second run"} <= {check["quantity"] for check in checks}
    run_here = dict.fromkeys("{backend}, {case}, {dtype}".format(**check) for check in checks)
    assert report["plan"]["cases"] == [*run_here]
    assert report["lost"] == []
    assert report["machine"]["bapo_kernels"] == bapo_kernels.__version__


@pytest.mark.exhaustive
@pytest.mark.slow
def test_cases_pass_on_every_backend(backend, device, interpreted):
    """In one dtype; test_validate_finds_no_error has all of them on a CPU."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16

    def some(tasks):
        return [t for t in tasks if t.dtype == dtype or t.case.startswith("search")]

    checks = validate.run(device, [backend], some)
    assert len({check.case for check in checks}) >= 11
    assert [check for check in checks if not check.passed] == []


def wrong_operators(monkeypatch, **faults):
    """Lets each of these operators do its work, and then changes the argument of this name."""

    class Wrong:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, asked):
            op = getattr(self.ops, asked)
            if asked not in faults:
                return op
            name, change = faults[asked]
            place = names_of(asked).index(name)
            return lambda *arguments: (op(*arguments), change(arguments[place]))

    for module in (rows, sets, tokens, autograd):
        ops_of = module.ops_of
        monkeypatch.setattr(module, "ops_of", lambda backend, ops_of=ops_of: Wrong(ops_of(backend)))


def times(by):
    return lambda x: None if x is None else x.mul_(by)


def add(amount, at=0):
    return lambda x: x.view(-1)[at].add_(amount)


HIDDEN = {"bapo_linear_loss", "bapo_linear_loss, sets"}
BOTH = {"V = 257", "packed", "sets", "log_probs", "log_probs, sets"}
LOSSES = {"V = 257", "real rows", "cispo, bounds per token", *HIDDEN}
SEARCHES = {"search, paper", "search, recipe"}
# Operators, the argument that is changed, the quantity that is wrong, and cases that must tell.
FAULTS = {
    "gradient": ("row_pass", "dlogits", times(1.01), "gradient", {"V = 257", "packed", "sapo"}),
    "in place": ("row_pass_", "logits", times(1.01), "gradient", {"inplace", "sets", *HIDDEN}),
    "undecided rows": ("row_gradient_", "logits", times(1.1), "weight gradient", HIDDEN),
    "gradient of log_probs": (
        *("row_gradient", "dlogits", times(1.02), "gradient"),
        {"log_probs", "log_probs, 64 labels per row", "ratio of sequences"},
    ),
    "gradient of sets": ("scatter_sets", "dlogits", times(1.02), "gradient", {"sets"}),
    "weight gradient of sets": (
        *("sets_dweight", "dweight", times(1.02), "weight gradient"),
        {"bapo_linear_loss, sets"},
    ),
    "NaN": ("row_pass", "dlogits", add(torch.nan), "gradient", {"V = 257"}),
    "log_probs": ("row_pass row_statistics", "log_probs", times(1 + 1e-5), "log_probs", BOTH),
    "entropy": ("row_pass row_statistics", "entropy", times(1 + 1e-5), "entropy", BOTH),
    "lower bound": (
        *("solve search", "bounds", add(0.02), "bounds"),
        {"V = 257", *HIDDEN, *SEARCHES},
    ),
    "loss": ("token_loss", "report", add(1e-4), "loss", LOSSES),
    "metric": ("token_loss", "report", add(1e-3, at=2), "metric pg_clipfrac", LOSSES),
}


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    "name", exhaustive_unless({"gradient", "loss", "lower bound"}.__contains__, FAULTS)
)
def test_a_wrong_kernel_is_found(monkeypatch, name):
    operators, argument, change, quantity, cases = FAULTS[name]
    wrong_operators(monkeypatch, **dict.fromkeys(operators.split(), (argument, change)))
    checks = validate.run("cpu", ["cpu"], short)
    failed = [c for c in checks if not c.passed and c.dtype != "float16"]  # made in backward
    assert {check.case for check in failed if check.quantity == quantity} >= cases


@pytest.mark.slow
@needs_native
def test_different_bits_in_a_second_run_are_found(monkeypatch):
    """The fault changes the last bit of the loss on every second call."""
    factors = itertools.cycle([1, 1 + 2.0**-23])
    wrong_operators(monkeypatch, token_loss=("report", lambda x: x[:1].mul_(next(factors))))
    failed = [check for check in validate.run("cpu", ["cpu"], short) if not check.passed]
    assert {check.quantity for check in failed} == {"second run"}
    assert {check.case for check in failed} >= LOSSES - HIDDEN


@pytest.mark.slow
@needs_native
def test_a_kernel_that_raises_fails_its_check_and_no_other(monkeypatch, tmp_path):
    def out_of_memory(entropy):
        raise RuntimeError("out of [some] memory")

    fault = "entropy", out_of_memory
    wrong_operators(monkeypatch, row_pass=fault, row_statistics=fault)
    tasks = short(validate.tasks("cpu", "cpu"))
    monkeypatch.setattr(validate, "tasks", lambda *_: tasks)
    done, report = validate_cpu(tmp_path, "--limit", "0")
    assert done.exit_code == 1
    checks = report["checks"]
    failed = [check for check in checks if not check["passed"]]
    expected = dict(note="RuntimeError: out of [some] memory", quantity="call", error="nan")
    assert all(check | expected == check for check in failed)
    assert {check["case"] for check in failed} >= {"V = 257", "log_probs", "bapo_linear_loss"}
    assert {check["case"] for check in checks if check["passed"]} >= {"inplace"} | SEARCHES
    assert f"{len(checks)} checks, {len(failed)} failed on cpu" in done.output.splitlines()
    assert "cpu, V = 257, float16: RuntimeError: out of [some] memory" in done.output


def made_up(monkeypatch, **calls):
    """Cases of these names on the CPU, in bfloat16."""
    tasks = [validate.Task("cpu", name, torch.bfloat16, call) for name, call in calls.items()]
    tasks.append(validate.Task("cpu", "other dtype", torch.float32, os.abort))
    monkeypatch.setattr(validate, "tasks", lambda *names: tasks)
    monkeypatch.setattr(validate, "runnable", lambda *names: ["cpu"])


GOOD = partial(list, [("loss", 0.0, 1.0)])


def test_an_interrupt_leaves_the_report_of_what_was_done(monkeypatch, tmp_path):
    """And --dtype selects a dtype."""

    def interrupted():
        yield "gradient", 0.0, 1.0
        raise KeyboardInterrupt

    made_up(monkeypatch, first=GOOD, second=interrupted, third=GOOD)
    done, report = validate_cpu(tmp_path, "--dtype", "bfloat16", "--limit", "0")
    assert done.exit_code != 0
    assert [check["quantity"] for check in report["checks"]] == ["loss", "gradient"]
    assert report["running"] == "cpu, second, bfloat16"
    assert report["plan"]["cases"] == [f"cpu, {n}, bfloat16" for n in ("first", "second", "third")]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_kernel_that_hangs_or_dies_is_named_and_the_others_run(monkeypatch, tmp_path):
    calls = dict(hangs=partial(time.sleep, 10**6), aborts=os.abort, raises=partial(int, "x"))
    calls |= dict(faults=partial(ctypes.string_at, 0), exits=partial(os._exit, 3))
    made_up(monkeypatch, first=GOOD, **calls, last=GOOD)
    monkeypatch.setenv("TRITON_MADE_UP", "1")
    done, report = validate_cpu(tmp_path, "--dtype", "bfloat16", "--limit", "5")
    assert done.exit_code == 1
    how = dict(hangs="did not end within 5 s", aborts="the process died: SIGABRT")
    how |= dict(faults="the process died: SIGSEGV", exits="the process died: exit status 3")
    lost = [f"cpu, {name}, bfloat16: {note}" for name, note in how.items()]
    assert report["lost"] == lost
    raised = "cpu, raises, bfloat16: ValueError: invalid literal for int() with base 10: 'x'"
    assert {*lost, raised, "7 checks, 5 failed on cpu"} <= {*done.stdout.splitlines()}
    checks = {check["case"]: check for check in report["checks"]}
    assert [*checks] == ["first", *calls, "last"]
    assert [name for name, check in checks.items() if check["passed"]] == ["first", "last"]
    assert checks["hangs"]["quantity"] == "process"
    assert checks["hangs"]["error"] == "nan"
    assert report["machine"]["variables"]["TRITON_MADE_UP"] == "1"


@pytest.mark.slow
def test_no_process_is_left():
    """And in it wrong kernels are not replaced by others."""
    worker = processes.Worker(60)
    assert list(worker.results(partial(os.getenv, "BAPO_SELF_CHECK"))) == ["0"]
    child = worker._child
    assert child.poll() is None
    worker.close()
    assert child.returncode == -signal.SIGKILL


def test_processes_that_do_not_start_end_the_command(monkeypatch, tmp_path):
    made_up(monkeypatch, first=GOOD)
    monkeypatch.setattr(processes, "_CHILD", "raise SystemExit(7)")
    done, report = validate_cpu(tmp_path)
    assert done.exit_code == 1
    stopped = "3 processes in succession failed at their start: the process died: exit status 7"
    assert report["stopped"] == stopped
    assert stopped in done.output


def test_all_sizes_of_clusters_have_cases():
    """On a GPU, for every kind of kernel that reads rows."""
    cases = {(task.case, task.dtype) for task in validate.tasks("cuda", "cuda")}
    sizes = [f"V = {V:,}" for V in (10_000, 30_000, 60_000, 151_936)]
    kinds = "", "inplace, ", "log_probs, ", "sets, ", "side stream, "
    assert {(k + V, dtype) for k in kinds for V in sizes for dtype in validate.DTYPES} < cases


@pytest.mark.parametrize(("required", "status"), [("cpu", 0), ("cuda", 1)])
def test_backends_that_are_not_checked_are_named(monkeypatch, required, status):
    made_up(monkeypatch, first=GOOD)
    for asked in (native, "why_no_cuda"), (triton, "why_not"):
        monkeypatch.setattr(*asked, lambda: None)  # a driver has counted a GPU
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = f"(CUDA of torch {torch.__version__} does not start)"
    assert reason in error_of("validate", "--device", "cuda")
    options = "--dtype", "bfloat16", "--limit", "0", "--require", required
    done = run("validate", "--device", "cpu", *options)
    told = [line for line in done.stdout.splitlines() if "closest" not in line]
    left = f"not checked: cuda {reason}, triton {reason}"
    plan = ["1 cases of cpu on cpu, without a limit", left]
    required = ["required, but not checked: cuda"] * status
    assert told == [*plan, "1 checks, 0 failed", left, *required]
    assert done.exit_code == status


@pytest.mark.parametrize(("option", "value"), [("json", "absent/x"), ("dtype", "float64")])
def test_values_of_options_are_checked_first(monkeypatch, tmp_path, option, value):
    monkeypatch.setattr(validate, "run", lambda *_, **__: pytest.fail("has begun to work"))
    monkeypatch.chdir(tmp_path)
    done = run("validate", f"--{option}", value)
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '--{option}': " in done.output


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_named_backend_that_cannot_run_is_an_error(backend):
    reason = available_backends()[backend]
    if reason is None:
        reason = "must be on a cuda device, got cpu"
        if available_backends()["cuda"] is not None:
            pytest.skip("it runs on the CPU, in the interpreter")
    told = error_of("validate", "--device", "cpu", "--backend", backend)
    assert f"backend '{backend}' cannot run: " in told
    assert reason in told


REFUSED = {
    "validate --backend reference": "one of ['cuda', 'triton', 'cpu'], got 'reference'",
    "validate --device cuda": "device must be one that torch can use, got 'cuda'",
}


@pytest.mark.parametrize("command", REFUSED)
def test_options_that_are_refused(command):
    if torch.cuda.is_available() and command.endswith("cuda"):
        pytest.skip("needs a machine without a GPU")
    assert REFUSED[command] in error_of(*command.split())


def test_no_backend_to_check_is_an_error(monkeypatch):
    monkeypatch.setattr(validate, "why_not", lambda name, *_: f"no {name} here")
    monkeypatch.setattr(validate, "available_backends", dict)
    reasons = "cuda: no cuda here; triton: no triton here; cpu: no cpu here"
    told = error_of("validate", "--device", "cpu")
    assert f"no backend can run on cpu: {reasons}" in told


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu memory")
def test_the_commands_run_on_a_gpu():
    assert run("validate", "--device", "cuda", "--dtype", "float32").exit_code == 0
