"""Benchmarks: all methods compute the same, only correct ones are timed, pages match records."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICES, INTERPRETED, KERNELS, needs_native
from typer.testing import CliRunner

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from matplotlib.text import Text

from bapo_kernels import bapo_loss, empty_cache, reference
from bapo_kernels.backends.triton import row_pass
from bapo_kernels.core import autograd, memory, prepare, rows, tokens
from benchmarks import (
    frames,
    gate,
    plot,
    records,
    report,
    run,
    scaling,
    tables,
    targets,
    timing,
    tune_triton,
)
from benchmarks.__main__ import app
from benchmarks.cases import (
    HEAD,
    POLICIES,
    SAMPLING_MASK,
    WHOLE_VOCABULARY,
    Batch,
    Case,
    cpu_suite,
    gpu_suite,
)
from benchmarks.floor import floor
from benchmarks.methods import Method, methods
from benchmarks.sets import LONG, ZIPF, sampling_mask

METHODS = {f"{method.name}, {method.level}": method for method in methods()}
TASKS = ["loss", *POLICIES, "log_probs"]
LAYOUTS = ["dense", "padded", "packed", "zero advantage"]


LOGITS_TARGETS = targets.targets("logits", 64, 100, 1, "bfloat16")


def small(level, task="loss", **options):
    return replace(Case.of(level, task, "Qwen3-0.6B", 24, **options), V=1_003, H=128)


def installed(method):
    return method.package is None or method.version is not None


def runs_on_a_cpu(method):
    """Even if it is measured on a GPU alone."""
    return "cpu" in method.devices or method.name == "PyTorch linear_cross_entropy"


@needs_native
@pytest.mark.parametrize(
    "name", [n for n, p in METHODS.items() if runs_on_a_cpu(p) and p.sweep != SAMPLING_MASK]
)
def test_every_method_computes_the_same(name):
    every_case = {"everywhere": True, "sweep": None, "dtypes": ("float32",), "devices": ("cpu",)}
    method = replace(METHODS[name], **every_case, float32_logits=False)
    if not installed(method):
        pytest.skip(f"{method.package} is not installed")
    if "compiled" in name:
        pytest.skip("compiles for minutes; it is checked before it is timed")
    if method.level == "tokens":
        case = Case(
            "tokens", "search", "at the maximum bounds", 512, 1, 1, "float32", data="very stale"
        )
        assert gate.check(method, case, "cpu") == (0.0, 0.0)
        return
    checked = 0
    for task in TASKS:
        for layout in LAYOUTS:
            case = small(method.level, task, layout=layout, dtype="float32", data="very stale")
            if method.takes(case) and method.why_not(case, "cpu") is None:
                value, gradient = gate.check(method, case, "cpu")
                assert max(value, gradient) < 2e-5
                checked += 1
    assert checked


def of_head(**options):
    return small("hidden", sweep=HEAD, **options)


@needs_native
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_of_the_head_computes_the_same(dtype, frozen):
    checked = set()
    for layout in ("dense", "zero advantage"):
        case = of_head(dtype=dtype, frozen=frozen, layout=layout)
        for method in run.selected(case, "cpu", without=["compiled"])[0]:
            gate.check(method, case, "cpu")
            grads = method.step(batch := Batch(case, "cpu"))[1]
            assert [grad is None for grad in grads] == [False, frozen], method.name
            assert not frozen or batch.inputs[1].grad is None
            checked.add(method.name.removeprefix("bapo_kernels cpu"))
    ours = {
        "",
        ", live",
        ", chunk_tokens = N/4",
        ", live, chunk_tokens = N/4",
        ", log-probs, then loss",
    }
    assert checked >= ours | ({", float32 logits"} if dtype == "bfloat16" else set())
    assert "PyTorch cross_entropy" in checked


def with_mask(level, **options):
    return small(level, sweep=SAMPLING_MASK, **options)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("level", "frozen"), [("logits", False), ("hidden", False), ("hidden", True)]
)
def test_every_method_with_a_sampling_mask_computes_the_same(level, frozen, dtype):
    """Ours and those of PyTorch; without a mask, in the same sweep, ours only."""
    ours = {"bapo_kernels cpu", *(["bapo_kernels cpu, in place"] if level == "logits" else [])}
    baselines = {"PyTorch masked_fill", "PyTorch gather"}
    if level == "hidden" and dtype == "float32":
        baselines.add("PyTorch sampled_addmm")
    for sweep, expected in ((SAMPLING_MASK, ours | baselines), (WHOLE_VOCABULARY, ours)):
        case = small(level, sweep=sweep, dtype=dtype, frozen=frozen, data="very stale")
        chosen = run.selected(case, "cpu", without=["compiled"])[0]
        assert {method.name for method in chosen} == expected
        for method in chosen:
            errors = gate.check(method, case, "cpu")
            assert dtype == "bfloat16" or max(errors) < 2e-5
            grads = method.step(Batch(case, "cpu"))[1]
            assert [grad is None for grad in grads] == [False, frozen][: len(grads)]


@needs_native
@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_a_method_that_ignores_the_mask_is_wrong(level):
    def ignores(batch):
        function = reference.log_probs if level == "logits" else reference.linear_log_probs
        return function(*batch.inputs, batch.labels)[0]

    with pytest.raises(gate.WrongAnswerError, match="value off by"):
        gate.check(Method("ignores", level, log_probs=ignores), with_mask(level), "cpu")


@pytest.mark.parametrize(("N", "V"), [(512, 151_936), (24, 1_003)])
def test_the_sets_that_are_measured(N, V):
    """Of 64 ids on average and 512 at most, distinct and ascending, with the label."""
    batch = Batch(replace(with_mask("tokens"), N=N, V=V), "cpu")
    mask, labels = batch.sampling_mask, batch.labels.flatten()
    sizes = mask.offsets.diff()
    assert sizes.double().mean().item() == pytest.approx(64, abs=2 if N == 512 else 6)
    assert 1 <= sizes.min() < 10
    assert sizes.max() == 512 if N == 512 else sizes.max() > 256
    assert sizes.double().log().std().item() == pytest.approx(1.0, abs=0.1)
    for n, (first, end) in enumerate(zip(mask.offsets[:-1], mask.offsets[1:], strict=True)):
        ids = mask.token_ids[first:end]
        assert (ids.diff() > 0).all()
        assert 0 <= ids[0] <= ids[-1] < V
        assert labels[n] in ids
    assert batch.shares()["allowed"] == sizes.sum().item() / (N * V)
    places = batch.places()
    assert torch.equal(places.ids[mask.offsets[:-1] + places.labels], labels)
    again = Batch(batch.case, "cpu").sampling_mask
    assert torch.equal(again.token_ids, mask.token_ids)


@needs_native
@pytest.mark.parametrize(("level", "frozen"), [("logits", False), ("hidden", True)])
def test_the_yardsticks_of_a_sampling_mask(quick, level, frozen):
    """A copy of the logits or of the head, and zeros, in memory that exists."""
    case = with_mask(level, frozen=frozen)
    rows = case.N if level == "logits" else case.H
    yardsticks = run._yardsticks(Batch(case, "cpu"))
    needs = {name: need for name, (need, _) in yardsticks.items()}
    assert needs["copy"] == (2 * rows * case.V * 2, 0)
    assert set(needs) == {"copy", *(["zeros"] if level == "logits" else [])}
    assert level == "hidden" or needs["zeros"] == (rows * case.V * 2, 0)
    for _, call in yardsticks.values():
        assert timing.CPUClock().costs(call).peak_bytes == 0
    got = run.measure(case, "cpu", [])
    assert {r["yardstick"] for r in got if r["status"] == "measured"} == {"copy"}


@needs_native
def test_records_have_the_bytes_of_the_gradients():
    """In place there is none beside the logits, and a frozen head has none."""
    found = {}
    for case in (with_mask("logits"), with_mask("hidden"), with_mask("hidden", frozen=True)):
        batch = Batch(case, "cpu")
        for method in run.selected(case, "cpu", only=["bapo"])[0]:
            facts = run._ready(
                method, batch, partial(gate.value_at_full_size, batch), timing.CPUClock()
            )[1]
            name = method.name.removeprefix("bapo_kernels cpu")
            found[case.level, case.frozen, name] = facts["gradient_bytes"]
    N, V, H = case.N, case.V, case.H
    assert found == {
        ("logits", False, ""): 2 * N * V,
        ("logits", False, ", in place"): 0,
        ("hidden", False, ""): 2 * (N + V) * H,
        ("hidden", True, ""): 2 * N * H,
    }


@needs_native
def test_float32_logits_have_a_tolerance_of_their_own():
    """A method that says so and rounds its logits to bfloat16 is wrong, small and at full size."""
    case = of_head(dtype="bfloat16")
    narrow, wide = (METHODS[f"bapo_kernels cpu{form}, hidden"] for form in ("", ", float32 logits"))
    assert gate.check(wide, case, "cpu")[0] < 1e-4 < gate.check(narrow, case, "cpu")[0]
    lying = replace(narrow, float32_logits=True)
    with pytest.raises(gate.WrongAnswerError, match="value off by"):
        gate.check(lying, case, "cpu")
    batch, dtype = Batch(case, "cpu"), torch.float32
    expected = gate.value_at_full_size(batch, dtype)
    assert gate.check_value(wide.step(batch)[0], expected, batch, dtype) < 1e-5
    with pytest.raises(gate.WrongAnswerError, match="value off by"):
        gate.check_value(narrow.step(batch)[0], expected, batch, dtype)


@needs_native
@pytest.mark.parametrize("form", ["", ", live"])
def test_four_chunks_are_four(form):
    case = of_head(layout="zero advantage", data="on-policy", dtype="float32")
    method = METHODS[f"bapo_kernels cpu{form}, chunk_tokens = N/4, hidden"]
    batch = Batch(case, "cpu")
    products = [e for e in timing.profiled(partial(method.step, batch)) if e.name() == "aten::mm"]
    rows = batch.active if form else batch.unmasked
    forward = [e.shapes()[0][0] for e in products if e.shapes()[1] == [case.H, case.V]]
    assert len(forward) == 4
    assert sum(forward) == rows


@needs_native
@pytest.mark.parametrize(
    ("name", "trained", "frozen"),
    [
        ("bapo_kernels cpu", 6, 4),
        ("bapo_kernels cpu, chunk_tokens = N/4", 6, 4),
        ("bapo_kernels cpu, float32 logits", 6, 4),
        ("bapo_kernels cpu, log-probs, then loss", 8, 4),
        ("PyTorch cross_entropy", 6, 4),
    ],
)
def test_flops_of_the_products_are_counted(name, trained, frozen):
    """On-policy every row has a gradient and none is undecided."""
    for kind, expected in (("trained", trained), ("frozen", frozen)):
        case = of_head(data="on-policy", frozen=kind == "frozen")
        call = partial(METHODS[f"{name}, hidden"].step, Batch(case, "cpu"))
        assert timing.CPUClock().costs(call).product_flops == expected * case.N * case.V * case.H


def test_a_call_without_products_has_no_flops():
    assert timing.CPUClock().costs(lambda: torch.ones(3) + 1).product_flops is None


@needs_native
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_yardsticks_of_the_head(quick, frozen):
    """Products in one chunk and in four, in memory that exists; rates are relative to the first."""
    case = of_head(dtype="float32", frozen=frozen)
    batch = Batch(case, "cpu")
    name = "two matrix products" if frozen else "three matrix products"
    yardsticks = run._yardsticks(batch)
    assert list(yardsticks) == [name, f"{name}, four chunks"]
    for need, call in yardsticks.values():
        costs = timing.CPUClock().costs(call)
        assert need.flops == costs.product_flops == (4 if frozen else 6) * case.N * case.V * case.H
        assert costs.peak_bytes == 0
    got = {r["method"]: r for r in run.measure(case, "cpu", [])}
    assert got[name]["share"] == 1.0
    assert {r["yardstick"] for r in got.values()} == {name}
    assert {r["frozen"] for r in got.values()} == {frozen}


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU they are checked before they are timed")
@pytest.mark.parametrize("name", ["TRL Triton", "Liger cross entropy", "Liger GRPO"])
def test_adapters_of_triton_kernels_are_correct_in_the_interpreter(name):
    method = METHODS[f"{name}, logits"]
    if not installed(method):
        pytest.skip(f"{method.package} is not installed")
    for layout in method.layouts:
        case = small("logits", "clip", layout=layout, dtype="float32")
        assert max(gate.check(method, case, "cpu")) < 2e-5


def right(batch):
    return reference.log_probs(*batch.inputs, batch.labels)[0]


def wrong(batch):
    return 1.1 * right(batch)


def broken(batch):
    raise RuntimeError("out of order")


def overwriting(batch):
    logp = right(batch)
    loss = reference.bapo_loss_from_log_probs(
        logp, batch.old, batch.A, batch.mask, **batch.options
    ).loss
    (gradient,) = torch.autograd.grad(loss, batch.inputs)
    batch.inputs[0].detach().copy_(gradient)
    return loss.detach(), (batch.inputs[0].detach(),)


MADE_UP = [
    Method("overwriting", "logits", train=overwriting, overwrites=True),
    Method("right", "logits", log_probs=right),
    Method("wrong", "logits", log_probs=wrong),
    Method("broken", "logits", log_probs=broken),
    Method("not installed", "logits", log_probs=right, package="an-unknown-package"),
    Method("GPU only", "logits", log_probs=right, devices=("cuda",)),
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run, "methods", lambda: iter(MADE_UP))
    monkeypatch.setattr(run.clock_of("cpu").__class__, "SECONDS", 0.0)


@needs_native
def test_only_correct_methods_are_timed(quick):
    got = {r["method"]: r for r in run.measure(small("logits", dtype="float32"), "cpu", [])}
    status = {method: record["status"] for method, record in got.items()}
    assert status == {
        "copy": "measured",
        "right": "measured",
        "overwriting": "measured",
        "wrong": "wrong",
        "broken": "failed",
    }
    assert "value off by" in got["wrong"]["why"]
    assert got["broken"]["why"] == "RuntimeError: out of order"
    assert all("ms" not in r for r in got.values() if r["status"] != "measured")
    table = run.table(small("logits"), list(got.values()))
    assert "wrong: wrong, value off by" in table.caption
    assert table.row_count == 3


@needs_native
def test_methods_that_cannot_run_are_printed_once_and_have_no_record(quick):
    console = run.wide_console()
    cases = [small("logits", dtype="float32")] * 2
    with console.capture() as capture:
        made = list(run.run(cases, "cpu", ["not installed", "GPU only"], 60.0, console))
    assert [[r["method"] for r in of_case] for of_case in made] == [["copy"], ["copy"]]
    lines = capture.get().splitlines()
    assert lines.count("not installed is not measured: an-unknown-package is not installed") == 1
    assert lines.count("GPU only is not measured: does not run on cpu") == 1


@needs_native
@pytest.mark.parametrize(
    ("scale", "at_full_size"), [(1.5, 1.0), (1.0, 2.0)], ids=["gradient", "loss at full size"]
)
def test_every_part_of_a_result_is_checked(quick, monkeypatch, scale, at_full_size):
    def train(batch):
        logp = right(batch)
        loss = reference.bapo_loss_from_log_probs(logp, *batch.rest[1:], **batch.options).loss
        loss.backward()
        large = batch.case.N > small("logits").shrunk().N
        return loss.detach() * (at_full_size if large else 1.0), (batch.inputs[0].grad * scale,)

    monkeypatch.setattr(run, "methods", lambda: iter([Method("one", "logits", train=train)]))
    case = replace(small("logits", dtype="float32"), N=48)
    status = {r["method"]: r["status"] for r in run.measure(case, "cpu", [])}
    assert status == {"one": "wrong", "copy": "measured"}


@needs_native
def test_a_method_that_fails_while_it_is_timed_does_not_stop_the_others(quick, monkeypatch):
    calls = []

    def fails_later(batch):
        calls.append(1)
        return right(batch) if len(calls) < 5 else broken(batch)

    chosen = [
        Method("fails later", "logits", log_probs=fails_later),
        Method("right", "logits", log_probs=right),
    ]
    monkeypatch.setattr(run, "methods", lambda: iter(chosen))
    got = {r["method"]: r for r in run.measure(small("logits", dtype="float32"), "cpu", [])}
    assert got["fails later"]["status"] == "failed"
    assert got["fails later"]["why"] == "RuntimeError: out of order"
    assert got["right"]["repetitions"] == run.ROUNDS


@needs_native
@pytest.mark.parametrize("turns", [0, 1])
def test_an_interrupt_keeps_the_records(quick, tmp_path, monkeypatch, turns):
    """Methods that are ready have one turn; later, the turns that are complete count."""
    calls = []

    def stops(batch):
        calls.append(1)
        if turns == 0 or len(calls) == 5:  # small check, full size, peak memory, first turn
            raise KeyboardInterrupt
        return right(batch)

    chosen = [
        Method("right", "logits", log_probs=right),
        Method("stops", "logits", log_probs=stops),
    ]
    monkeypatch.setattr(run, "methods", lambda: iter(chosen))
    monkeypatch.setattr("benchmarks.__main__.cpu_suite", lambda: iter([small("logits")] * 2))
    path = tmp_path / "cpu.jsonl"
    result = CliRunner().invoke(app, ["run", "--out", str(path)])
    assert result.exit_code != 0
    got = {r["method"]: r for r in records.load(path)}
    assert got["right"]["status"] == got["copy"]["status"] == "measured"
    assert got["right"]["repetitions"] == turns + 1
    assert ("stops" in got) == (turns > 0)


@needs_native
def test_a_lost_device_keeps_the_records(quick, monkeypatch):
    def release(batch):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(Batch, "release", release)
    with pytest.raises(run.Interrupted) as caught:
        run.measure(small("logits", dtype="float32"), "cpu", [], ["overwr"])
    assert [(r["method"], r["status"]) for r in caught.value.records] == [("right", "failed")]


@needs_native
def test_methods_can_be_left_out(quick):
    case = small("logits", dtype="float32")
    got = run.measure(case, "cpu", [], without=["overwr", "wrong", "broken"])
    assert [r["method"] for r in got] == ["copy", "right"]


def test_the_data_does_not_come_from_the_kernels_under_test(monkeypatch):
    """Kernels that are wrong, or hang, do not compute the data."""
    for module in (prepare, rows, tokens, autograd):
        monkeypatch.setattr(module, "ops_of", None)
    for level, sweep in itertools.product(("logits", "hidden"), (None, SAMPLING_MASK)):
        batch = Batch(small(level, sweep=sweep), "cpu")
        truth = reference.log_probs if level == "logits" else reference.linear_log_probs
        expected = truth(*batch.inputs, batch.labels, sampling_mask=batch.sampling_mask)[0]
        assert (batch.sampling_mask is None) == (sweep is None)
        torch.testing.assert_close(batch.logp, expected, atol=1e-2, rtol=1e-3)
        assert batch.shares()["unmasked"] == 1


@pytest.mark.parametrize("N", [64, 8_192])
def test_mixed_rows_have_the_shares_of_the_targets(N):
    shares = Batch(replace(small("tokens", layout="mixed", data="on-policy"), N=N), "cpu").shares()
    error = {"abs": 2 / N**0.5 / 4}
    assert shares["unmasked"] == pytest.approx(0.75, **error)
    assert shares["active"] == pytest.approx(0.75 * 0.6, **error)
    assert shares["undecided"] == pytest.approx(0.03, abs=0.5 / N)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("command", ["run", "targets"])
def test_a_missing_gpu_is_an_error(command):
    done = CliRunner().invoke(app, [command, "--device", "cuda"])
    assert done.exit_code == 2
    assert "must be cpu" in done.output


class TestTargets:
    def test_results(self):
        """0.9 of a copy meets 0.93 and misses 0.79; a method without a record says why."""
        _, mixed, live, probs = LOGITS_TARGETS
        copy = {"method": "copy", "ms": 2.0}
        ours = {"method": "bapo_kernels cuda", "ms": 1.8, "yardstick": "copy", "GB_per_s": 1.0}
        lines = [copy, ours, ours | {"method": "bapo_kernels cuda, live"}]
        assert mixed.result("cuda", lines, {})["met"]
        missed = live.result("cuda", lines, {})
        assert (missed["ratio"], missed["most"], missed["met"]) == (0.9, 0.79, False)
        assert probs.result("cuda", lines, {})["ratio"] == 1.8  # of a read, half of a copy
        result = mixed.result("triton", [copy], {"bapo_kernels triton": "no GPU"})
        assert (result["status"], result["why"]) == ("not measured", "no GPU")
        words = targets.verdict([mixed.result("cuda", lines, {}), missed, result])
        assert "missed: mixed rows, live; failed: mixed rows" in words
        assert "no GPU" in targets.in_words(result)
        assert "0.900 x copy; target 0.79, missed" in targets.in_words(missed)

    def test_an_interrupt_keeps_the_results(self, monkeypatch):
        copy = {"method": "copy", "ms": 1.0}
        ours = {"method": "bapo_kernels cpu", "ms": 2.0, "yardstick": "copy", "status": "measured"}

        def interrupted(*arguments):
            raise run.Interrupted([copy, ours])

        monkeypatch.setattr(targets, "measure", interrupted)
        monkeypatch.setattr(targets, "table", lambda *arguments: "")
        going = targets.run("logits", "cpu", "cpu", 8, 8, 1, "float32", run.wide_console())
        _, (result,) = next(going)
        assert result["ratio"] == 2.0
        with pytest.raises(KeyboardInterrupt):
            next(going)

    def test_limits_are_those_of_the_targets(self):
        limits = {t.name: tuple(t.most.values()) for t in LOGITS_TARGETS}
        assert limits == {
            "all rows active": (1.05, 1.25),
            "mixed rows": (0.93, 1.10),
            "mixed rows, live": (0.79, 0.95),
            "log-probs": (1.10, 1.15),
        }


class ClockOfVariants:
    """Runs a call and notes its launch parameters; the second variant does not fit."""

    def __init__(self):
        self.cuts = []

    def samples(self, timed):
        timed.call()
        self.cuts.append(row_pass.row_shape(None, True, threads=1))
        if len(self.cuts) == 2:
            raise RuntimeError("out of [registers]\nat length")
        return [2.0 / len(self.cuts)]


@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton's interpreter or a GPU")
def test_the_tuner_of_triton_times_every_variant(tmp_path, monkeypatch, capsys):
    clock, own = ClockOfVariants(), row_pass.row_shape
    chosen = tune_triton.variants(160, 132)[::12]
    monkeypatch.setattr(tune_triton, "clock_of", lambda device: clock)
    monkeypatch.setattr(tune_triton, "variants", lambda *sizes: chosen)
    monkeypatch.setattr(tune_triton, "cache_and_multiprocessors", lambda device: (10_560, 132))
    file = tmp_path / "tune.jsonl"
    tune_triton.main(8, 40, "float32", DEVICES["triton"], file)
    assert [(cut.num_warps, cut.UNROLL) for cut in clock.cuts] == [v[:2] for v in chosen]
    assert [(v.warps, v.registers) for v in chosen] == [(32, 64), (16, 64), (8, 64)]
    assert row_pass.row_shape is own
    first, second, third, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{chosen[0]}, 0 MB resident (2.00 x L2): 2.000 ms"
    assert second == f"{chosen[1]}, 0 MB resident (4.00 x L2): RuntimeError: out of [registers]"
    assert third == f"{chosen[2]}, 0 MB resident (8.00 x L2): 0.667 ms"
    assert last == f"0.667 ms at best: {chosen[2]}"
    lines = records.load(file)
    assert [(line["ms"], line["warps"]) for line in lines] == [(2.0, 32), (2.0 / 3, 8)]


def test_the_tuner_starts_with_the_fewest_bytes_in_the_cache():
    """Rows of 151,936 bfloat16 logits on the 132 multiprocessors of an H100 or H200."""
    row_bytes, one_row_each = 2 * 151_936, 40_111_104
    resident = [
        tune_triton.resident_bytes(variant, row_bytes, 132)
        for variant in tune_triton.variants(row_bytes, 132)
    ]
    assert sorted(set(resident)) == [one_row_each, 2 * one_row_each, 4 * one_row_each]
    assert resident == sorted(resident)
    first = tune_triton.variants(row_bytes, 132)[0]
    assert first == tune_triton.Variant(warps=32, unroll=4, registers=64)
    by_registers = [tune_triton.Variant(16, 4, registers) for registers in (64, 96, 128)]
    assert [
        tune_triton.resident_bytes(v, row_bytes, 132) // one_row_each for v in by_registers
    ] == [*(2, 1, 1)]


@pytest.mark.parametrize("git", ["installed", "not installed", "no repository"])
def test_where_the_commit_comes_from(git, tmp_path, monkeypatch):
    def described(command, **options):
        if git == "not installed":
            raise FileNotFoundError("git")
        return SimpleNamespace(stdout="0b3d337b-dirty\n" if git == "installed" else "")

    monkeypatch.setattr(records.subprocess, "run", described)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.delenv("BAPO_COMMIT", raising=False)
    assert records.commit() == ("0b3d337b-dirty" if git == "installed" else "unknown")
    (tmp_path / "COMMIT").write_text("5eed5eed\n")
    assert records.commit() == ("0b3d337b-dirty" if git == "installed" else "5eed5eed")
    monkeypatch.setenv("BAPO_COMMIT", "asked")
    assert records.commit() == "asked"


def test_peak_memory_is_that_of_the_call():
    def call():
        a = torch.empty(1_000_000)
        b = a.to(torch.bfloat16)
        del a
        return b, torch.empty(500_000)

    assert timing.CPUClock().costs(call).peak_bytes == 6_000_000


@needs_native
def test_peak_memory_of_a_later_call():
    """Memory that the call before has left for the gradient counts as well."""
    logits = torch.zeros(1, memory.KEPT_FROM_BYTES // 4)
    labels, advantages = torch.zeros(1, dtype=torch.int64), torch.ones(1)

    def call():
        leaf = logits.detach().requires_grad_()
        bapo_loss(leaf, labels, None, advantages, backend="cpu").loss.backward()

    call()
    assert memory.LOGITS.last
    assert timing.CPUClock().costs(call).peak_bytes >= logits.nbytes
    empty_cache()


@needs_native
def test_a_record_has_all_fields(quick, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.cpu_suite", lambda: iter([small("logits")]))
    path = tmp_path / "cpu.jsonl"
    result = CliRunner().invoke(app, ["run", "--out", str(path)])
    assert result.exit_code == 0, result.output
    mine = next(r for r in records.load(path) if r["method"] == "right")
    assert {"machine", "torch", "commit", "date", "ms", "ms_20", "ms_80", "repetitions"} <= set(
        mine
    )
    assert mine["bytes"] == floor(small("logits"), mine["shares"]).bytes
    assert mine["GB_per_s"] == pytest.approx(mine["bytes"] / mine["ms"] / 1e6)
    copy = next(r for r in records.load(path) if r["method"] == "copy")
    assert mine["share"] == pytest.approx(mine["GB_per_s"] / copy["GB_per_s"])
    of_a_first_call = partial(MADE_UP[1].step, Batch(small("logits"), "cpu"))
    assert mine["peak_bytes"] == timing.CPUClock().costs(of_a_first_call).peak_bytes
    assert result.output.count("right") == 1


def test_an_unknown_title_lists_the_titles():
    result = CliRunner().invoke(app, ["run", "--case", "Gwen"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Qwen3" in result.output


@needs_native
def test_no_case_is_started_when_the_time_is_up(quick, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.cpu_suite", lambda: iter([small("logits")]))
    path = tmp_path / "cpu.jsonl"
    result = CliRunner().invoke(app, ["run", "--out", str(path), "--minutes", "0"])
    assert "1 cases are left" in result.output
    assert not path.exists()


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", ["on-policy", "stale", "very stale"])
def test_the_floor_counts_rows(layout, data):
    """Against the definition of the classes of rows, token by token."""
    batch = Batch(replace(small("logits", layout=layout, data=data), N=256, V=50), "cpu")
    config = batch.case.config
    found = reference.find_clip_bounds(batch.logp, batch.old, batch.A, batch.mask, config=config)
    unmasked = active = undecided = gradient = 0
    for i in range(256):
        A, r = batch.A.flatten()[i].item(), (batch.logp - batch.old).flatten()[i].exp().item()
        if batch.mask is not None and not batch.mask.flatten()[i]:
            continue
        unmasked += 1
        active += A != 0
        upper, lower = A > 0, A < 0
        clipped = upper and r > config.ratio_upper_max
        clipped = clipped or (lower and r < config.ratio_lower_start)
        kept = upper and r <= config.ratio_upper_start
        kept = kept or (lower and r >= config.ratio_lower_max)
        undecided += A != 0 and not clipped and not kept
        gradient += (upper and r <= found[1]) or (lower and r >= found[0])
    expected = dict(unmasked=unmasked, active=active, undecided=undecided, gradient=gradient)
    shares = batch.shares()
    assert shares == {name: rows / 256 for name, rows in expected.items()}
    size = 256 * 50 * 2
    assert floor(batch.case, shares).bytes == (unmasked + undecided + 256) / 256 * size
    assert floor(batch.case, shares, live=True).bytes == (active + undecided + 256) / 256 * size
    hidden = replace(batch.case, level="hidden")
    assert floor(hidden, shares).flops == (2 * unmasked + 4 * gradient) * 50 * hidden.H
    frozen = replace(hidden, frozen=True)
    assert floor(frozen, shares).flops == (2 * unmasked + 2 * gradient) * 50 * hidden.H
    probs = replace(batch.case, task="log_probs")
    assert floor(probs, shares).bytes == unmasked / 256 * size


def test_the_floor_of_sampling_masks():
    """24 rows of 10 ids on average: 18 of them are read, 12 have a gradient."""
    case = replace(with_mask("logits"), N=24, V=100, H=8)
    shares = dict(unmasked=0.75, gradient=0.5, undecided=0.1, allowed=0.1)
    assert floor(case, shares) == (24 * 100 * 2 + 64 * (180 + 120), 0)
    assert floor(replace(case, task="log_probs"), shares) == (64 * 180, 0)
    hidden = replace(case, level="hidden")
    trained = (180 + 120 + 100) * 8 * 2, (2 * 180 + 4 * 120) * 8
    assert floor(hidden, shares) == trained
    assert floor(replace(hidden, frozen=True), shares) == (180 * 8 * 2, (2 * 180 + 2 * 120) * 8)
    assert floor(replace(hidden, task="log_probs"), shares) == (180 * 8 * 2, 2 * 180 * 8)


def test_the_suites_cover_all_kinds_of_cases():
    for suite in (list(cpu_suite()), list(gpu_suite())):
        assert len(suite) == len(set(suite))
        assert {c.task for c in suite} == {"loss", "log_probs", "search", *POLICIES}
        assert {c.data for c in suite} == {"on-policy", "stale", "very stale"}
        assert {c.layout for c in suite if c.sweep != SAMPLING_MASK} == set(LAYOUTS)
        families = {c.model.split("-")[0] for c in suite}
        assert families >= {"Qwen3", "Llama", "Gemma", "DeepSeek", "gpt"}
        forms = [c for c in suite if "head" in c.title]
        assert forms == [c for c in suite if c.sweep == HEAD], "--case head selects the sweep"
        kinds = {(c.dtype, c.frozen) for c in forms}
        assert kinds == {(d, f) for d in ("bfloat16", "float32") for f in (False, True)}
        masks = [c for c in suite if "sampling mask" in c.title]
        assert masks == [c for c in suite if c.sweep in (SAMPLING_MASK, WHOLE_VOCABULARY)]
        kinds = {(c.sweep, c.level, c.dtype, c.frozen) for c in masks}
        levels = [("logits", False), ("hidden", False), ("hidden", True)]
        assert kinds == {
            (sweep, level, dtype, frozen)
            for sweep in (SAMPLING_MASK, WHOLE_VOCABULARY)
            for level, frozen in levels
            for dtype in ("bfloat16", "float32")
        }
    assert {8_192, 24_576} <= {c.N for c in gpu_suite() if c.level == "logits"}
    assert {128_256, 151_936, 262_208} <= {c.V for c in gpu_suite()}
    of_sets = {c.layout for c in gpu_suite() if c.sweep == SAMPLING_MASK}
    assert of_sets == {"dense", *LONG, ZIPF}
    zipf = with_mask("hidden", layout=ZIPF)
    assert run.selected(zipf, "cpu")[0] == run.selected(with_mask("hidden"), "cpu")[0]


@pytest.mark.parametrize("V", [10, 2_048])
@pytest.mark.parametrize("layout", ["dense", *LONG, ZIPF])
def test_ids_ascend_in_every_layout_of_sets(layout, V):
    mask = sampling_mask(512, V, torch.Generator().manual_seed(0), layout)
    for ids in mask.token_ids.split(mask.offsets.diff().tolist()):
        assert (ids.diff() > 0).all()
        assert 0 <= ids[0] <= ids[-1] < V
    occurrences = mask.token_ids.long().bincount().max()
    assert (occurrences > 400) == (layout == ZIPF or V == 10)


@pytest.mark.parametrize(
    ("device", "capability", "name"),
    [("cpu", "AVX512", "cpu"), ("cpu", "AVX2", "cpu_avx2"), ("cuda", "AVX2", "cuda")],
)
def test_a_processor_without_avx512_has_records_of_its_own(monkeypatch, device, capability, name):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert records.file_of(device) == records.RESULTS / f"{name}.jsonl"
    assert capability in records.processor()


@pytest.fixture
def made_up_records(tmp_path):
    """Random times of every method on every case of the CPU suite, and a failure per case."""
    records.append(tmp_path / "cpu.jsonl", made_up("cpu", cpu_suite()))
    return tmp_path


def made_up(device, cases):
    random.seed(0)
    lines, machine = [], records.environment()
    for case in cases:
        work = case.N * case.V * (case.H if case.level == "hidden" else 100)
        yardstick = plot.YARDSTICKS.get(case.level)
        names = [yardstick, *(p.name for p in methods() if p.takes(case) and device in p.devices)]
        if case.sweep == HEAD:
            names.append(f"{yardstick}, four chunks")
        if case.sweep == SAMPLING_MASK:
            names[0] = "copy"
            names += ["zeros"] if case.level == "logits" else []
        for name in filter(None, names):
            times = work * 1e-8 * random.uniform(1, 20)
            rates = {"GB_per_s": 1.0, "TFLOP_per_s": 1.0, "share": random.random()}
            errors = {"value_error": 1e-6, "gradient_error": 1e-3}
            line = {"method": name, "status": "measured", "ms": times, "peak_bytes": 2**24}
            line["version"] = None if "bapo" in name else "1.0"
            line |= {
                "product_flops": 6 * work,
                "gradient_bytes": 2**22,
                "shares": {"allowed": 1e-3},
            }
            line |= {"bytes": 1e6 * random.randint(1, 99), "flops": 1e9 * random.randint(1, 99)}
            lines.append(machine | case.fields() | line | rates | errors)
        failed = {"method": "QuACK cross entropy", "status": "failed", "why": "no kernel"}
        lines.append(machine | case.fields() | failed)
    return lines


@pytest.fixture
def from_made_up_records(made_up_records, monkeypatch):
    def latest(device):
        return frames.latest(device, made_up_records)

    for module in (plot, report, scaling):
        monkeypatch.setattr(module, "latest", latest)
    forms = partial(frames.forms_of_the_head, folder=made_up_records)
    monkeypatch.setattr(report, "forms_of_the_head", forms)
    masks = partial(frames.sampling_masks, folder=made_up_records)
    monkeypatch.setattr(report, "sampling_masks", masks)
    return made_up_records


def of_baselines(record):
    """The stages of the GPU suite with baselines from logits and from hidden states."""
    models = ("Qwen3-8B", "Llama-3-8B", "Gemma-3-12B")
    kind = record["task"], record["dtype"], record["layout"], record["data"]
    plain = kind == ("loss", "bfloat16", "dense", "stale") and record["sweep"] is None
    return plain and record["model"] in models and record["level"] != "tokens"


@pytest.mark.parametrize(
    ("kept", "figures"),
    [
        (lambda r: r["data"] == "on-policy" and "QuACK" not in r["method"], 0),
        (lambda r: of_baselines(r) and r["level"] == "logits", 0),
        (of_baselines, 5),
        (lambda r: r["task"] == "search", 0),
        (lambda r: "bapo" in r["method"] or r["method"] in plot.YARDSTICKS.values(), 0),
        (lambda r: True, 5),
    ],
    ids=["on-policy", "logits", "baselines", "search", "ours", "all"],
)
def test_pages_and_figures_take_any_part_of_the_records(
    from_made_up_records, tmp_path, kept, figures
):
    """As a GPU suite leaves them that could not measure all."""
    made = [record for record in made_up("cuda", gpu_suite()) if kept(record)]
    records.append(from_made_up_records / "cuda.jsonl", made)
    assert len(plot.plot("cuda", tmp_path / "figures")) == figures
    on_gpu = report.blocks()["gpu"]
    assert on_gpu
    shown = [r for r in made if of_baselines(r) and "bapo_kernels cuda" in r["method"]]
    in_table = [r for r in shown if not r["model"].startswith("Llama")]
    assert all(tables.number(record["ms"]) in on_gpu for record in in_table)
    readme = report.readme_block()
    assert readme.count("Loss and gradients from") == 2 + len({r["level"] for r in shown})


def test_figures_are_drawn_from_records_alone(from_made_up_records, tmp_path):
    first = plot.plot("cpu", tmp_path / "a")
    assert len(first) == 5
    assert all(path.stat().st_size > 5_000 for path in first)
    second = plot.plot("cpu", tmp_path / "b")
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert plot.plot("cuda", tmp_path / "c") == []
    for _, figure in plot.figures(frames.latest("cpu", from_made_up_records)):
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert any("bapo_kernels cpu" in text for text in texts)


def test_wheels_of_the_baselines_have_the_versions_of_the_cpu():
    """Those of `make baselines`, which has neither QuACK nor flash-attn."""
    pins = re.compile(r"^([\w.-]+)==([^ ;\\\n]+)", re.MULTILINE)
    wheels, locked = (
        dict(pins.findall((report.ROOT / f"requirements/{name}.txt").read_text()))
        for name in ("baselines", "all")
    )
    packages = {method.package for method in methods()} - {None, "quack-kernels", "flash-attn"}
    assert len(packages) == 4
    assert {name: wheels[name] for name in packages} == {name: locked[name] for name in packages}


WITHOUT_RAY = """
import sys, importlib.util

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
sys.meta_path.insert(0, NoRay())
from benchmarks.cases import Batch, Case
from benchmarks.methods import verl
case = Case("logits", "log_probs", "any", 64, 40, 1, "float32")
print(verl.logits(Batch(case, "cpu")).shape, "ray" in sys.modules)
"""


def test_verl_is_measured_without_ray():
    pytest.importorskip("verl")
    environment = os.environ | {"PYTHONPATH": str(report.ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_RAY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "torch.Size([8, 8]) False", done.stderr


def test_every_method_has_a_style():
    assert {method.name for method in methods() if method.level != "tokens"} <= set(plot.STYLES) | {
        f"bapo_kernels {backend}, {form}" for backend in ("cuda", "triton") for form in ("live",)
    } | {method.name for method in methods() if method.sweep}  # in no figure


def cells(text):
    """Those of every line of a table."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def test_the_losses_have_times_and_memory_of_three_models(from_made_up_records):
    """The first model, the largest vocabulary and the widest head; failures are listed."""
    frame = frames.latest("cpu", from_made_up_records)
    text = "\n".join(report.losses("cpu"))
    measured = frames.plain_losses(frame[frame.sweep.isna()])
    measured = measured[~measured.method.str.startswith("PyTorch reference")]
    shown = measured[measured.model.isin(["Qwen3-0.6B", "Gemma-3-1B", "DeepSeek-V3"])]
    assert len(shown) > 50
    for milliseconds in shown.ms:
        assert f" {tables.number(milliseconds)} |" in text
    head = next(line for line in cells(text) if "hidden states" in line[0])
    assert head[1] == "Qwen3-0.6B (151,936 x 1,024)"
    assert head[4:] == ["Qwen3-0.6B, float32", *(f"MiB, {m}" for m in shown.model.unique())]
    kinds = frame[(frame.task == "clip") & (frame.level == "logits")]
    assert all(f" {tables.number(ms)} |" in text for ms in kinds[kinds.method == "copy"].ms)
    assert "| QuACK cross entropy" in text
    assert "no kernel" in text


def test_the_forms_of_the_head_have_a_table_of_their_own(from_made_up_records):
    """Of every record measured in bfloat16; the other sections have none of them."""
    forms = frames.forms_of_the_head("cpu", from_made_up_records)
    forms = forms[forms["dtype"] == "bfloat16"]
    assert len(forms) > 20
    blocks = report.blocks()
    assert "four chunks" not in blocks["losses"]
    for milliseconds in forms.ms:
        assert f"{tables.number(milliseconds)} |" in blocks["head"]
    assert "QuACK" not in blocks["head"]
    frozen = forms[forms.frozen & (forms.method == "bapo_kernels cpu, chunk_tokens = N/4")]
    head, _, *lines = cells(blocks["head"])
    (row,) = (line for line in lines if line[0] == "**bapo_kernels cpu, chunk_tokens = N/4**")
    row = dict(zip(head, row, strict=True))
    assert row["frozen"] == tables.number(frozen.ms.iloc[0])
    assert row["MiB, frozen"] == "16.0"
    (products,) = (line for line in lines if line[0] == "matrix products")
    assert "" not in products[:4], "two with a frozen head, or three"


def test_sampling_masks_have_tables_of_their_own(from_made_up_records):
    """One per level, of every measured record."""
    masks = frames.sampling_masks("cpu", from_made_up_records)
    blocks = report.blocks()
    assert "masked_fill" not in blocks["losses"]
    for milliseconds in masks[masks.sweep == SAMPLING_MASK].ms:
        assert f" {tables.number(milliseconds)} |" in blocks["masks"]
    assert blocks["masks"].count("Loss and gradients") == 2
    head, *lines = cells(blocks["masks"].split("\n\n")[2])
    column, peak = head.index("bfloat16, frozen"), head.index("MiB, bfloat16, frozen")
    case = masks.level.eq("hidden") & masks["dtype"].eq("bfloat16") & masks.frozen
    own, whole = (
        masks[case & (masks.method == "bapo_kernels cpu") & (masks.sweep == sweep)].iloc[0]
        for sweep in (SAMPLING_MASK, WHOLE_VOCABULARY)
    )
    shown = {line[0]: (line[column], line[peak]) for line in lines}
    assert shown["**bapo_kernels cpu**"] == (tables.number(own.ms), "12.0")
    assert shown["**bapo_kernels cpu, whole vocabulary**"][0] == tables.number(whole.ms)
    assert shown["floor"] == (tables.number(own.share * own.ms), "")


def test_without_records_no_table_is_shown(from_made_up_records, monkeypatch):
    none = frames.sampling_masks("cpu", from_made_up_records).iloc[:0]
    monkeypatch.setattr(report, "sampling_masks", lambda device: none)
    assert report.blocks()["masks"] == ""


def test_records_older_than_frozen_heads_are_of_trained_ones(tmp_path):
    case = small("logits").fields()
    old = {key: value for key, value in case.items() if key != "frozen"}
    for fields, ms in ((old, 1.0), (case, 2.0)):
        records.append(
            tmp_path / "cpu.jsonl", [{"method": "x", "status": "measured", "ms": ms, **fields}]
        )
    assert list(frames.latest("cpu", tmp_path).ms) == [2.0]


def test_a_later_record_replaces_an_earlier_one(tmp_path):
    case = small("logits").fields()
    first = {"method": "x", "status": "failed", "why": "?", **case}
    second = {"method": "x", "status": "measured", "ms": 2.0, **case}
    records.append(tmp_path / "cpu.jsonl", [first])
    records.append(tmp_path / "cpu.jsonl", [second])
    frame = frames.latest("cpu", tmp_path)
    assert list(frame.status) == ["measured"]
    assert frames.latest("cuda", tmp_path).empty


def training_step(name, device, **others):
    sizes = {"B": 4, "T": 2_048, "V": 151_936, "H": 1_024, "layers": 28, "dtype": "bfloat16"}
    versions = {"trl": "1.16.0", "transformers": "5.17.0", "torch": "2.11.0", "commit": "5eed5eed"}
    times = {"ms": 151.0, "ms_mean": 152.0, "step_ms": 653.0, "peak_MiB": 7_654.0}
    own = {"case": f"TRL micro-batch: {name}", "device": device, "machine": f"some {device}"}
    return sizes | versions | times | own | others


def test_training_steps_of_both_devices_have_a_table_each(tmp_path, monkeypatch):
    made = [
        training_step("TRL's GRPO", "cpu", ms=9_876.0, dtype="float32"),
        training_step("TRL's GRPO", "cuda", ms=1.0),
        training_step("BAPO, fused", "cuda", step_ms=321.0),
        training_step("TRL's GRPO", "cuda"),  # measured again
    ]
    records.append(tmp_path / "trl.jsonl", made)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    gpu, cpu = ("\n".join(report.training(device)) for device in ("cuda", "cpu"))
    assert "some cuda, commit 5eed5eed" in gpu
    assert "4 answers of 1,024 to 2,048 tokens" in gpu
    rows = cells(gpu)
    assert ["TRL's GRPO", "653", "151", "7,654"] in rows
    assert ["BAPO, fused", "321", "151", "7,654"] in rows
    assert len(rows) == 4
    assert "float32" in cpu
    assert "9,876" in cpu


def test_the_readme_matches_the_committed_records():
    text = report.README.read_text()
    assert text == tables.filled(text, {"records": report.readme_block()})
    assert "<!-- records -->" in text


@pytest.mark.parametrize("module", [report, scaling])
def test_pages_match_the_committed_records(module):
    text, blocks = module.PAGE.read_text(), module.blocks()
    assert text == tables.filled(text, blocks)
    assert all(f"<!-- {name} -->" in text for name in blocks)


def test_pages_say_that_no_gpu_has_been_measured():
    measured = not frames.latest("cuda").empty
    for page, words in ((report.PAGE, "No GPU has been"), (scaling.PAGE, "No kernel has run")):
        assert (words in " ".join(page.read_text().split())) != measured


def test_the_scaling_page_has_the_numbers_of_the_model():
    text, job = " ".join(scaling.PAGE.read_text().split()), scaling.Job()
    for words in (
        f"{job.tokens:,} active tokens, with V = {job.V:,} and H = {job.H:,}",
        f"micro-batch of {job.micro_batch:,} tokens",
        f"the {job.tensor_parallel} ranks of a node",
        f"{scaling.GRID_POINTS} float64 values per data-parallel rank",
        f"tests {scaling.PROBES} pairs of bounds",
    ):
        assert words in text


def test_pages_name_the_commit_of_every_measurement():
    commits = set(frames.latest("cpu")["commit"])
    assert len(commits) > 1, "the search was measured later"
    for text in (report.README.read_text(), report.PAGE.read_text()):
        assert all(f"commit {commit}" in text for commit in commits)


def test_a_page_is_filled_between_its_marks():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb"
    assert tables.filled(text, {"x": "new \\1"}) == "a\n<!-- x -->\nnew \\1\n\n<!-- /x -->\nb"


class TestScaling:
    job, machine = scaling.Job(), scaling.Machine()
    ours = scaling.Approach("ours", 4, 0, 4, 8_192, 0.5, 1)
    loop = replace(ours, probes=54)

    def test_rows(self):
        """8,192 rows of an eighth of 151,936 columns, 4 bytes each, at half of 3,000 GB/s."""
        seconds = scaling.rows_time(self.ours, self.job, self.machine)
        assert seconds == pytest.approx(8_192 * 18_992 * 4 / 1.5e12)
        products = replace(self.ours, bytes_per_logit=0, products=3)
        seconds = scaling.rows_time(products, self.job, self.machine)
        assert seconds == pytest.approx(6 * 8_192 * 18_992 * 4_096 / 350e12)

    def test_without_tensor_parallelism_it_takes_no_time(self):
        alone = replace(self.job, tensor_parallel=1)
        assert scaling.tensor_parallel_time(self.ours, alone, self.machine) == 0
        seconds = scaling.tensor_parallel_time(self.ours, self.job, self.machine)
        assert seconds == pytest.approx(15e-6 + 32 * 8_192 * 7 / 450e9)

    def test_every_probe_of_the_loop_takes_time(self):
        one = scaling.search_time(replace(self.loop, probes=2), self.job, self.machine, 1_024)
        all_ = scaling.search_time(self.loop, self.job, self.machine, 1_024)
        assert all_ == pytest.approx(27 * one)
        assert scaling.search_time(self.ours, self.job, self.machine, 1_024) < all_ / 50

    def test_more_gpus_take_less_time_and_as_much_memory(self):
        rows = list(scaling.predictions(self.job, self.machine, {}))
        ours = [r for r in rows if r["approach"] == "bapo_loss"]
        assert [r["gpus"] for r in ours] == list(scaling.GPUS)
        assert ours[0]["rows"] == pytest.approx(128 * ours[-1]["rows"])
        assert len({r["MiB"] for r in ours}) == 1

    def test_measured_shares_replace_stated_ones(self):
        shares = {"from logits": {"bapo_kernels cuda": 0.25}}
        stated, measured = (
            next(iter(scaling.predictions(self.job, self.machine, s))) for s in ({}, shares)
        )
        assert measured["rows"] == pytest.approx(stated["rows"] * 4 / 1.05)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["logits", "hidden"])
@pytest.mark.parametrize("sweep", [None, SAMPLING_MASK])
def test_on_a_gpu(level, sweep):
    case = replace(small(level, sweep=sweep), N=64)
    got = {r["method"]: r for r in run.measure(case, "cuda", [])}
    for backend in {"cuda", "triton"} & set(KERNELS):
        assert got[f"bapo_kernels {backend}"]["status"] == "measured"
    baseline = "PyTorch gather" if sweep else "PyTorch cross_entropy"
    assert got[baseline]["status"] == "measured"
    assert json.dumps(list(got.values()))


def test_measuring_does_not_import_pandas():
    """A GPU machine needs torch, rich and typer to measure; pages may be written elsewhere."""
    program = "import sys, benchmarks.run, benchmarks.__main__; print('pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
