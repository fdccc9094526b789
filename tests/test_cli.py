"""The commands: validate finds wrong kernels, and the parts of a profile add up."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import needs_native
from torch.profiler import DeviceType
from typer.testing import CliRunner

import bapo_kernels
from bapo_kernels import available_backends
from bapo_kernels.core import autograd, hidden, rows, tokens
from bapo_kernels.tools import profile, validate
from bapo_kernels.tools.cli import commands

DTYPES = ["float32", "bfloat16", "float16"]


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def run(*arguments):
    return CliRunner().invoke(commands(), arguments)


def error_of(*arguments):
    done = run(*arguments)
    assert done.exit_code == 1
    return done.output


def checks_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def short(tasks):
    return [task for task in tasks if not task.case.endswith(f"V = {validate.VOCABULARY:,}")]


WITHOUT_TYPER = """
import runpy, sys
sys.modules["typer"] = None
sys.argv[0] = "bapo_kernels"
runpy.run_module("bapo_kernels", run_name="__main__")
"""


@pytest.mark.slow
def test_only_commands_need_typer():
    """Without it a command names the extra."""
    code = "import sys, bapo_kernels; assert not {'typer', 'rich'} & set(sys.modules)"
    assert python("-c", code).returncode == 0
    done = python("-c", WITHOUT_TYPER)
    assert done.returncode == 0
    assert "backend reference available" in done.stdout
    assert python("-c", WITHOUT_TYPER, "--version").stdout == f"{bapo_kernels.__version__}\n"
    done = python("-c", WITHOUT_TYPER, "validate")
    assert done.returncode == 1
    told = "the commands need typer and rich (extra 'cli'): pip install 'typer>=0.19' rich"
    assert done.stderr == f"bapo_kernels: {told}\n"


@pytest.mark.slow
def test_help_lists_the_commands():
    for option in ("-h", "--help"):
        done = python("-m", "bapo_kernels", option)
        assert done.returncode == 0
        assert "validate" in done.stdout
        assert "profile" in done.stdout


@pytest.mark.slow
@needs_native
def test_validate_finds_no_error(tmp_path):
    """As a user runs it; the file has one line per check."""
    file = tmp_path / "checks.jsonl"
    command = ("-m", "bapo_kernels", "validate", "--device", "cpu", "--backend", "cpu")
    done = python(*command, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = checks_in(file)
    assert done.stdout.splitlines()[-1] == f"{len(checks)} checks, 0 failed"
    assert all(check["passed"] and check["error"] <= check["budget"] for check in checks)
    assert {check["dtype"] for check in checks} == set(DTYPES)
    asked = {"bounds", "gradient", "weight gradient", "log_probs", "entropy", "loss"}
    assert asked | {"second run"} <= {check["quantity"] for check in checks}


@pytest.mark.slow
def test_cases_pass_on_every_backend(backend, device, interpreted):
    """On the CPU in one dtype; test_validate_finds_no_error has all of them."""
    dtypes = [torch.float16] if device == "cpu" else validate.DTYPES

    def some(tasks):
        return [t for t in tasks if t.dtype in dtypes or t.case.startswith("search")]

    checks = validate.run(device, [backend], some)
    assert len({check.case for check in checks}) >= 11
    assert [check for check in checks if not check.passed] == []


def test_the_linear_case_has_several_chunks_and_recomputed_rows(monkeypatch):
    seen = {"forward": [], "add_recomputed": []}

    def noted(method, name):
        return lambda self, rows, *others: (seen[name].append(rows), method(self, rows, *others))[1]

    for name in seen:
        method = getattr(hidden.Chunks, name)
        monkeypatch.setattr(hidden.Chunks, name, noted(method, name))
    backend = next(name for name in validate.CANDIDATES if available_backends()[name] is None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    list(validate._linear(backend, torch.float32, device))
    assert len(seen["forward"]) > 4  # in two runs
    assert any(rows.numel() > 0 for rows in seen["add_recomputed"])


def wrong_operators(monkeypatch, **faults):
    """Lets each of these operators do its work, and then its ``fault(*arguments)``."""

    class Wrong:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, asked):
            op = getattr(self.ops, asked)
            if asked not in faults:
                return op
            return lambda *arguments: (op(*arguments), faults[asked](*arguments))

    for module in (rows, tokens, autograd):
        ops_of = module.ops_of
        monkeypatch.setattr(module, "ops_of", lambda backend, ops_of=ops_of: Wrong(ops_of(backend)))


def times(by, index):
    """Multiplies an argument if it is given."""
    return lambda *arguments: None if arguments[index] is None else arguments[index].mul_(by)


def add_to_first(index, amount):
    return lambda *arguments: arguments[index].view(-1)[:1].add_(amount)


def nan_in_a_fresh_gradient(*arguments):
    arguments[-1][0, 0, 0] = torch.nan


SEARCHED = {"V = 257", "logits[:, :-1]", "all options", "statistics=live", "inplace", "packed"}
KNOWN = {"cispo, bounds per token", "sapo"}  # no row is undecided
SEQUENCES = {"ratio of sequences"}  # the row pass decides no row
LOSSES = SEARCHED | KNOWN | SEQUENCES
FRESH = LOSSES - {"inplace"}  # the gradient has its own tensor
HIDDEN, LOG_PROBS = {"bapo_linear_loss"}, {"log_probs"}
ALL = LOSSES | LOG_PROBS | HIDDEN
SEARCHES = {"search, paper", "search, recipe"}
FAULTS = {
    "gradient": (dict(row_pass=times(1.01, -1)), "gradient", FRESH - SEQUENCES, set()),
    "gradient in place": (dict(row_pass_=times(1.01, 0)), "gradient", {"inplace"} | HIDDEN, set()),
    "gradient of undecided rows": (dict(row_gradient_=times(1.1, 0)), "weight gradient", HIDDEN),
    "gradient of log_probs": (
        dict(row_gradient=times(1.02, -1)),
        *("gradient", (FRESH - KNOWN) | LOG_PROBS, FRESH | LOG_PROBS),
    ),
    "NaN": (dict(row_pass=nan_in_a_fresh_gradient), "gradient", FRESH - SEQUENCES, set()),
    "log_probs": (
        dict(row_pass=times(1 + 1e-5, -5), row_statistics=times(1 + 1e-5, -3)),
        *("log_probs", FRESH | LOG_PROBS, ALL),
    ),
    "entropy": (
        dict(row_pass=times(1 + 1e-5, -4), row_statistics=times(1 + 1e-5, -2)),
        *("entropy", FRESH | LOG_PROBS, ALL),
    ),
    "lower bound": (
        dict.fromkeys(("solve", "search"), add_to_first(-2, 0.02)),
        *("bounds", (LOSSES - KNOWN) | HIDDEN | SEARCHES),
    ),
    "loss": (dict(token_loss=add_to_first(-5, 1e-4)), "loss", LOSSES | HIDDEN),
    "metric": (
        dict(token_loss=lambda *arguments: arguments[-5][2].add_(1e-3)),
        *("metric pg_clipfrac", LOSSES | HIDDEN),
    ),
}


def test_profiles_know_every_kernel():
    """By its name in the sources, as a profiler shows it."""
    root = Path(profile.__file__).parents[2]
    sources = [*root.glob("csrc/cuda/*.cu"), *root.glob("bapo_kernels/backends/triton/*.py")]
    text = "\n".join(source.read_text() for source in sources)
    names = set(re.findall(r"^(?:def )?\s*(?:void )?(\w+_kernel)\(", text, re.M))
    assert len(names) > 10
    for name in names:
        shown = f"void bapo::cuda::{name}<float>(int)" if name[0] != "_" else name
        assert profile._OURS.search(shown), name


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_found(monkeypatch, name):
    faults, quantity, cases, *of_float16 = FAULTS[name]
    cases_of = dict.fromkeys(DTYPES, cases) | dict(zip(["float16"], of_float16, strict=False))
    wrong_operators(monkeypatch, **faults)
    checks = validate.run("cpu", ["cpu"], short)
    failed = [check for check in checks if not check.passed]
    shown = {(check.case, check.dtype) for check in failed if check.quantity == quantity}
    assert shown == {(c.case, c.dtype) for c in checks if c.case in cases_of[c.dtype]}


@pytest.mark.slow
@needs_native
def test_different_bits_in_a_second_run_are_found(monkeypatch):
    """The fault changes the last bit of the loss on every second call."""
    calls = itertools.count()

    def fault(*arguments):
        if next(calls) % 2:
            arguments[-5][0] *= 1 + 2.0**-23

    wrong_operators(monkeypatch, token_loss=fault)
    failed = [check for check in validate.run("cpu", ["cpu"], short) if not check.passed]
    assert {check.quantity for check in failed} == {"second run"}
    assert {check.case for check in failed} >= LOSSES


@pytest.mark.slow
@needs_native
def test_a_kernel_that_raises_fails_its_check_and_no_other(monkeypatch, tmp_path):
    def out_of_memory(*arguments):
        raise RuntimeError("out of [some] memory")

    wrong_operators(monkeypatch, row_pass=out_of_memory, row_statistics=out_of_memory)
    tasks = validate.tasks
    monkeypatch.setattr(validate, "tasks", lambda *names: short(tasks(*names)))
    file = tmp_path / "checks.jsonl"
    told = error_of("validate", "--device", "cpu", "--backend", "cpu", "--json", str(file))
    checks = checks_in(file)
    failed = [check for check in checks if not check["passed"]]
    for dtype, cases in (
        ("float32", ALL - {"inplace"}),
        ("bfloat16", ALL - {"inplace"}),
        ("float16", ALL),
    ):
        assert {check["case"] for check in failed if check["dtype"] == dtype} == cases
    for check in failed:
        assert check["note"] == "RuntimeError: out of [some] memory"
        assert check["quantity"] == "call"
        assert check["error"] == "nan"
    assert {check["case"] for check in checks if check["passed"]} == {"inplace"} | SEARCHES
    last = f"{len(checks)} checks, {len(failed)} failed on cpu"
    assert told.splitlines()[-1] == last
    assert "cpu, V = 257, float16: RuntimeError: out of [some] memory" in told


def test_checks_are_written_as_they_are_made(monkeypatch, tmp_path):
    """An interrupt, as by a time limit, loses none of them; --dtype selects a dtype."""

    def interrupted():
        raise KeyboardInterrupt

    def good():
        yield "loss", 0.0, 1.0

    made_up = [(torch.float32, interrupted), (torch.bfloat16, good), (torch.bfloat16, interrupted)]
    tasks = [validate.Task("cpu", "made up", *of) for of in made_up]
    monkeypatch.setattr(validate, "tasks", lambda *names: tasks)
    monkeypatch.setattr(validate, "runnable", lambda *names: ["cpu"])
    file = tmp_path / "checks.jsonl"
    done = run("validate", "--device", "cpu", "--dtype", "bfloat16", "--json", str(file))
    assert done.exit_code != 0
    (check,) = checks_in(file)
    assert check["passed"]
    assert check["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--tokens", "-5"), ("--vocab", "0"), ("--hidden", "0"), ("--masked", "2")),
        *(("--idle", "-0.1"), ("--trace", "absent/t.json"), ("--json", "absent/x")),
    ],
)
def test_values_of_options_are_checked_first(monkeypatch, tmp_path, option, value):
    for module, name in ((validate, "run"), (profile, "Workload")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("has begun to work"))
    monkeypatch.chdir(tmp_path)
    done = run("validate" if option == "--json" else "profile", option, value)
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}': " in done.output


@pytest.mark.parametrize("command", ["validate", "profile"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_named_backend_that_cannot_run_is_an_error(command, backend):
    reason = available_backends()[backend]
    if reason is None:
        reason = "must be on a cuda device, got cpu"
        if available_backends()["cuda"] is not None:
            pytest.skip("it runs on the CPU, in the interpreter")
    told = error_of(command, "--device", "cpu", "--backend", backend)
    assert f"backend '{backend}' cannot run: " in told
    assert reason in told


def test_options_that_are_refused():
    told = error_of("validate", "--backend", "reference")
    assert "backend must be one of ['cuda', 'triton', 'cpu'], got 'reference'" in told
    told = error_of("profile", "--hidden", "16", "--inplace")
    assert "inplace must be False for hidden states, got True" in told


def test_no_backend_to_check_is_an_error(monkeypatch):
    monkeypatch.setattr(validate, "why_not", lambda name, *_: f"no {name} here")
    reasons = "cuda: no cuda here; triton: no triton here; cpu: no cpu here"
    told = error_of("validate", "--device", "cpu")
    assert f"no backend can run on cpu: {reasons}" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["validate", "profile"])
def test_a_missing_gpu_is_an_error(command):
    told = error_of(command, "--device", "cuda")
    assert "device must be one that torch can use, got 'cuda'" in told


WORKLOADS = {
    "logits": dict(),
    "inplace": dict(inplace=True),
    "live": dict(statistics="live", masked=0.3, idle=0.4),
    "hidden": dict(hidden=16),
    "float32": dict(dtype=torch.float32, masked=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_parts_of_a_profile_add_up(backend, device, interpreted, name):
    N, V = (3, 50) if interpreted else (12, 300)
    sizes = dict(device=device, backend=backend, tokens=N, vocab=V, dtype=torch.bfloat16)
    workload = profile.Workload(**(sizes | WORKLOADS[name]))
    found = profile.run(workload)
    assert sum(part.ms for part in found.parts) == pytest.approx(found.profiled)
    assert all(part.ms >= 0 for part in found.parts), "self times are counted once"
    assert min(found.wall, found.copy, found.profiled) > 0
    assert (found.gemms is None) == (name != "hidden")
    names = {part.name.strip("_").removesuffix("_kernel") for part in found.parts}
    assert {"prepare", "search", "token_loss"} <= names
    assert (profile.PRODUCTS in names) == (name == "hidden")
    (row_pass,) = [part for part in found.parts if "row_pass" in part.name]
    assert 0 < row_pass.bytes <= 2 * N * V * workload.logits.element_size()


@needs_native
@pytest.mark.parametrize("statistics", ["all", "live"])
def test_bytes_are_those_of_the_rows_that_are_read_and_written(monkeypatch, statistics):
    undecided = []
    wrong_operators(monkeypatch, row_pass=lambda *arguments: undecided.append(arguments[-2]))
    N, V = 200, 50
    sizes = dict(device="cpu", tokens=N, vocab=V, dtype=torch.float32)
    workload = profile.Workload(**sizes, masked=0.3, idle=0.3, statistics=statistics)
    moved = workload.bytes_moved()
    counted = workload.mask if statistics == "all" else workload.mask & (workload.advantages != 0)
    count = int(undecided[-1].sum())
    assert count > 0
    assert moved["row_pass"] == 4 * V * (N + int(counted.sum()) - count)
    assert 4 * V * count <= moved["row_gradient"] <= 8 * V * count


def test_gpu_kernels_are_grouped_by_name():
    elementwise = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
    )
    row_pass = "void bapo::row_pass_cluster_kernel<__nv_bfloat16, 4, true>(bapo::RowPassParams)"
    milliseconds = {
        row_pass: (50, "row_pass_cluster_kernel"),
        "_row_gradient_kernel": (6, "_row_gradient_kernel"),
        "bapo::(anonymous namespace)::solve_kernel(double const*, bapo::Grid)": (3, "solve_kernel"),
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT": (20, profile.PRODUCTS),
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": (10, profile.PRODUCTS),
        elementwise: (2, elementwise),
        "Memset (Device)": (0.5, profile.OTHERS),
    }
    events = [
        SimpleNamespace(key=key, device_type=DeviceType.CUDA, self_device_time_total=1e3 * ms)
        for key, (ms, _) in milliseconds.items()
    ]
    events.append(SimpleNamespace(key="aten::mm", device_type=DeviceType.CPU))
    times = profile._times(SimpleNamespace(key_averages=lambda: events), 100.0, on_gpu=True)
    expected = {name: ms for ms, name in milliseconds.values()}
    expected[profile.PRODUCTS] = 30
    falling = sorted(expected, key=expected.get, reverse=True)
    assert times == pytest.approx(expected | {profile.OUTSIDE: 8.5})
    assert list(times) == [*falling, profile.OUTSIDE]


@pytest.mark.parametrize("hidden", [(), ("--hidden", "16")])
def test_profile_prints_its_parts(tmp_path, hidden):
    trace = tmp_path / "trace.json"
    sizes = ("--tokens", "8", "--vocab", "1000", "--device", "cpu")
    done = run("profile", *sizes, *hidden, "--masked", "0.25", "--trace", str(trace))
    assert done.exit_code == 0, done.output
    for line in ("token_loss", profile.OUTSIDE, "a call under the profiler", "100.0%"):
        assert line in done.output
    assert "copying a tensor of the logits' size" in done.output
    assert ("the three matrix products alone" in done.output) == bool(hidden)
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu memory")
def test_the_commands_run_on_a_gpu():
    assert run("validate", "--device", "cuda").exit_code == 0
    assert run("profile", "--tokens", "512").exit_code == 0
    assert run("profile", "--tokens", "512", "--hidden", "256").exit_code == 0
