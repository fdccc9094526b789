"""The command bench: checks, measures and names what it leaves out. No time is asserted."""

import json
import re
import sys

import pytest
import torch
from helpers import needs_native
from test_cli import add, run, times, wrong_operators

from bapo_kernels.tools import bench, timing, validate

pytestmark = needs_native
BEFORE, ENTROPY = "PyTorch, README's Before", "PyTorch cross_entropy"
OURS, INPLACE = "bapo_kernels cpu", "bapo_kernels cpu, in place"
LOGITS = ["copy of the logits", BEFORE, ENTROPY, f"{ENTROPY}, compiled", OURS, INPLACE]
HIDDEN = [BEFORE, OURS, f"{OURS}, linear_log_probs"]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """One short turn, nothing compiled, in an empty folder."""
    monkeypatch.setattr(timing.CPUClock, "TURNS", 1)
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.chdir(tmp_path)


def command(*options):
    sizes = "--tokens", "12", "--vocab", "257", "--device", "cpu", "--backend", "cpu"
    return run("bench", *sizes, *options)


def lines_of(done):
    """The title, the heads of the columns, the cells by method, and the reasons by method."""
    title, head, *lines = done.stdout.splitlines()
    cells = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines if ": " not in line)
    return title, head.split(), cells, dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("options", "methods", "unit"),
    [
        ((), LOGITS, "GB/s"),
        (("--hidden", "32"), ["three matrix products", *HIDDEN], "TFLOP/s"),
        (("--hidden", "32", "--frozen"), ["two matrix products", *HIDDEN], "TFLOP/s"),
        (("--hidden", "5"), ["three matrix products", *HIDDEN], "TFLOP/s"),  # less than the rows
    ],
)
def test_every_method_has_a_line(tmp_path, dtype, options, methods, unit):
    done = command("--dtype", dtype, *options)
    assert done.exit_code == 0, done.output
    title, head, cells, reasons = lines_of(done)
    assert f"N = 12, V = 257, {dtype}; " in re.sub(r", H = \d+|, frozen head", "", title)
    assert ("frozen" in title) == ("--frozen" in options)
    assert head == ["ms", "multiple", unit, "tokens/s", "peak", "MiB"]
    assert [*cells] == methods
    yardstick, *others = (len(of_method.split()) for of_method in cells.values())
    # It needs no memory, but products of half precision do on a processor with instructions for it.
    assert yardstick == 4 or (yardstick == 5 and options and dtype != "float32")
    assert {*others} == {5}
    assert reasons == {}
    assert done.stderr == ""  # no terminal
    assert [*tmp_path.iterdir()] == []


LOGITS_OF, FLOAT32 = ("row_pass_ row_gradient_", "logits"), ("--dtype", "float32")
WRONG = {  # operators, the argument that is changed, options of the command, and who is wrong
    "out of place": ("row_pass row_gradient", "dlogits", (), OURS),
    "in place": ("row_pass_", "logits", (), INPLACE),
    "undecided": ("row_gradient_", "logits", FLOAT32, INPLACE),
    "head": (*LOGITS_OF, ("--hidden", "32"), OURS),
    "frozen": (*LOGITS_OF, ("--hidden", "32", "--frozen"), OURS),
    "log_probs": (*LOGITS_OF, ("--hidden", "32", *FLOAT32), f"{OURS}, linear_log_probs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_named_and_not_timed(monkeypatch, tmp_path, name):
    operators, argument, options, wrong = WRONG[name]
    fault = argument, times(1.01)
    wrong_operators(monkeypatch, **dict.fromkeys(operators.split(), fault))
    done = command("--json", "report.json", *options)
    assert done.exit_code == 1
    _, _, cells, reasons = lines_of(done)
    assert re.match(r"not timed, gradient off by \S+e-\d+, budget \S+e-\d+", reasons[wrong])
    assert wrong not in cells
    assert BEFORE in cells
    rows = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)["rows"]
    (row,) = [row for row in rows if row["name"] == wrong]
    assert row["seconds"] is None
    (first, *_) = row["failed"]
    assert first["quantity"] == "gradient"
    assert first["error"] > first["budget"]


def test_nan_and_errors_of_ours_are_failures(monkeypatch, tmp_path):
    def out_of_memory(dlogits):
        if dlogits is not None:
            raise RuntimeError("out of [some] memory\nand more")

    wrong_operators(monkeypatch, row_pass=("dlogits", out_of_memory))
    done = command()
    assert done.exit_code == 1
    assert lines_of(done)[3] == {OURS: "not timed, RuntimeError: out of [some] memory"}
    wrong_operators(monkeypatch, row_pass_=("logits", add(torch.nan)))
    done = command("--json", "report.json")
    assert lines_of(done)[3][INPLACE].startswith("not timed, gradient off by nan, budget ")
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


def test_without_a_compiler_the_reason_is_one_line(monkeypatch):
    def compiled(*arguments):
        raise RuntimeError("No working C++ compiler found\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled)
    done = command()
    assert done.exit_code == 0, done.output
    _, _, cells, reasons = lines_of(done)
    assert [*cells] == [name for name in LOGITS if not name.endswith("compiled")]
    told = "not timed, RuntimeError: No working C++ compiler found"
    assert reasons == {f"{ENTROPY}, compiled": told}


def test_what_fails_while_it_is_timed_is_named(monkeypatch):
    def out_of_memory(logits, labels):
        out_of_memory.calls += 1
        if out_of_memory.calls > 2:  # the compiled one is called first
            raise torch.OutOfMemoryError
        return cross_entropy(logits, labels)

    out_of_memory.calls, cross_entropy = 0, bench._cross_entropy
    monkeypatch.setattr(bench, "_cross_entropy", out_of_memory)
    done = command()
    assert done.exit_code == 0, done.output
    _, _, cells, reasons = lines_of(done)
    assert {*LOGITS} - {*cells} == {*reasons} == {ENTROPY, f"{ENTROPY}, compiled"}
    assert {*reasons.values()} == {"not timed, OutOfMemoryError: "}


def test_the_report(tmp_path):
    assert command("--json", "report.json", "--hidden", "32", "--frozen").exit_code == 0
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    sizes = dict(tokens=12, vocab=257, hidden=32, dtype="bfloat16", device="cpu", frozen=True)
    assert report["sizes"] == sizes
    assert report["machine"]["torch"] == torch.__version__
    rows = {row["name"]: row for row in report["rows"]}
    assert [*rows] == ["two matrix products", *HIDDEN]
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["peak_bytes"] >= 0
        assert (row["why_not"], row["failed"]) == ("", [])
    assert rows[BEFORE]["peak_bytes"] >= 4 * 12 * 257


def test_the_figure(tmp_path):
    pytest.importorskip("matplotlib")
    assert command("--plot", "figure.png").exit_code == 0
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len([*tmp_path.iterdir()]) == 1


REFUSED = {
    "--plot figure.png": "'--plot': a figure needs matplotlib: pip install matplotlib",
    "--plot absent/figure.png": "'--plot': ",
    "--json absent/x": "'--json': no file can be made in absent",
    "--frozen": "'--frozen': needs --hidden: logits come without a head",
    "--tokens 0": "'--tokens': ",
    "--dtype float64": "'--dtype': ",
}


@pytest.mark.parametrize("options", REFUSED)
def test_values_of_options_are_checked_first(monkeypatch, tmp_path, options):
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("has begun to work"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("bench", *options.split())
    assert done.exit_code == 2, done.output
    told = " ".join(done.output.replace("│", " ").split())
    assert f"Invalid value for {REFUSED[options]}" in told
    assert [*tmp_path.iterdir()] == []


def test_other_formats_of_a_figure_are_refused(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("has begun to work"))
    done = run("bench", "--plot", "figure.txt")
    assert done.exit_code == 2
    assert "must end in one of" in done.output


def test_a_backend_that_cannot_run_is_an_error():
    done = run("bench", "--device", "cpu", "--backend", "reference")
    assert done.exit_code == 1
    assert "one of ['cuda', 'triton', 'cpu'], got 'reference'" in done.output


def test_every_backend_that_runs_is_measured(monkeypatch):
    monkeypatch.setattr(validate, "why_not_on", lambda device: dict.fromkeys(["cpu"]))
    sizes = bench.Sizes(tokens=4, vocab=100)
    told = []
    rows = bench.run(sizes, tell=told.append)
    assert [row.name for row in rows] == LOGITS
    assert f"{OURS}: check" in told
    assert f"{ENTROPY}, compiled: compilation" in told


@pytest.mark.slow
@pytest.mark.compile
def test_the_compiler_is_silent(monkeypatch, capfd):
    monkeypatch.undo()
    monkeypatch.setattr(timing.CPUClock, "TURNS", 1)
    done = command()
    assert [*lines_of(done)[2]] == LOGITS, done.output
    # torch itself may say that it finds no GPU.
    assert not re.search("dynamo|inductor|Warning", done.stderr + capfd.readouterr().err)
