"""Benchmarks: all methods compute the same, only correct ones are timed, rates are of a model."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import KERNELS, assert_within_budget, needs_native
from typer.testing import CliRunner

from bapo_kernels import reference
from bapo_kernels.core import autograd, rows, tokens
from bapo_kernels.core.arguments import prepare
from bapo_kernels.core.head import sets
from bapo_kernels.tools.budget import in_some_orders
from benchmarks import __main__ as benchmarks
from benchmarks import gate, records, run, targets, timing
from benchmarks.cases import DISTILLATION, HEAD, POLICIES, REAL, SAMPLING_MASK, Batch, Case
from benchmarks.floor import floor
from benchmarks.methods import Method, methods


def small(level, task="loss", dtype="float32", **options):
    case = Case.of(level, task, "Qwen3-0.6B", 24, dtype=dtype, **options)
    return replace(case, V=1_003, H=128)


TASKS = [dict(task=task) for task in ("loss", *POLICIES, "log_probs")]
LAYOUTS = [dict(layout=layout) for layout in ("padded", "packed", "zero advantage")]
LAYOUTS += [dict(profile=REAL), dict(profile=REAL, layout="packed")]
OF_PLAIN_CASES = {"search", "loss", "log_probs", *POLICIES}
ON_A_CPU = [method for method in methods() if "cpu" in method.devices]
PLAIN = [m for m in ON_A_CPU if {*m.tasks} & OF_PLAIN_CASES and m.sweep != SAMPLING_MASK]


@needs_native
@pytest.mark.parametrize("method", PLAIN, ids=lambda method: f"{method.name}, {method.level}")
def test_every_method_computes_the_same(method):
    """The compiled ones, which take minutes, are checked before they are timed."""
    method = replace(method, everywhere=True, sweep=None, dtypes=("float32",))
    cases = [small(method.level, data="very stale", **options) for options in TASKS + LAYOUTS]
    if method.level == "tokens":
        cases = [replace(cases[0], task="search", model="at the maximum bounds", V=1, H=1)]
    if method.why_not(cases[0], "cpu") or "compiled" in method.name:
        pytest.skip("not installed, or compiled")
    cases = [case for case in cases if method.takes(case)]
    assert cases
    for case in cases:
        assert max(gate.check(method, case, "cpu")) < 2e-5


HEADS = [("logits", False), ("hidden", False), ("hidden", True)]  # and whether it is frozen
of_teacher = partial(small, sweep=DISTILLATION)
VJP, TOP_K = of_teacher("logits", "vjp", K=5), of_teacher("hidden", "forward_kl_topk", K=5)
WITH_LOSS = replace(TOP_K, task="loss + forward_kl_topk")
# And some of the methods that every machine has.
OF_SWEEPS = {
    VJP: {"bapo_kernels cpu", "PyTorch log_softmax"},
    TOP_K: {"bapo_kernels cpu", "PyTorch log_softmax"},
    WITH_LOSS: {"bapo_kernels cpu", "bapo_kernels cpu, two passes"},
    of_teacher("hidden", "forward_kl", frozen=True): set(),  # packages alone
}
for level, frozen in HEADS:
    of_head = partial(small, level, data="very stale", frozen=frozen)
    OF_SWEEPS[of_head(sweep=SAMPLING_MASK)] = {"bapo_kernels cpu", "PyTorch gather"}
    if level == "hidden":
        OF_SWEEPS[of_head(sweep=HEAD)] = {"PyTorch cross_entropy", "bapo_kernels cpu"}
        live = {"bapo_kernels cpu, live", "bapo_kernels cpu, live, chunk_tokens = N/4"}
        OF_SWEEPS[of_head(sweep=HEAD, layout="zero advantage")] = live


@needs_native
@pytest.mark.parametrize("case", OF_SWEEPS, ids=lambda case: case.title)
def test_every_method_of_a_sweep_computes_the_same(case):
    checked = set()
    for method in run.selected(case, "cpu", without=["compiled"])[0]:
        assert max(gate.check(method, case, "cpu")) < 2e-5, method.name
        method.step(batch := Batch(case, "cpu"))
        assert not case.frozen or batch.inputs[1].grad is None
        checked.add(method.name)
    assert checked >= OF_SWEEPS[case]


def right(batch):
    function = reference.log_probs if batch.case.level == "logits" else reference.linear_log_probs
    return function(*batch.inputs, batch.columns)[0]


def wrong_in_part(batch, of_loss=1.0, of_gradient=1.0):
    arguments = right(batch), batch.old, batch.A, batch.mask
    loss = reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss
    gradient = torch.autograd.grad(loss, batch.inputs)[0]
    return of_loss * loss.detach(), (of_gradient * gradient,)


def broken(batch):
    raise RuntimeError("out of order")


TIMED = replace(small("logits"), N=48)  # twice as many tokens as are checked first
MADE_UP = {
    "right": {"log_probs": right},
    "wrong": {"log_probs": lambda batch: 1.1 * right(batch)},
    "wrong gradient": {"train": partial(wrong_in_part, of_gradient=1.5)},
    "wrong at full size": {"train": lambda b: wrong_in_part(b, 2.0 if b.case.N == TIMED.N else 1)},
    "broken": {"log_probs": broken},
    "not installed": {"log_probs": right, "package": "an-unknown-package"},
}


@needs_native
def test_only_correct_methods_are_timed(tmp_path, monkeypatch):
    """What cannot run has no record, and what fails does not stop the others."""
    made = [Method(name, "logits", **options) for name, options in MADE_UP.items()]
    monkeypatch.setattr(run, "methods", lambda: iter(made))
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    monkeypatch.setattr(benchmarks, "cpu_suite", lambda: iter([TIMED]))
    result = CliRunner().invoke(benchmarks.app, ["run", "--out", str(tmp_path / "cpu.jsonl")])
    assert result.exit_code == 0, result.output
    got = {record["method"]: record for record in records.load(tmp_path / "cpu.jsonl")}
    assert {method: record["status"] for method, record in got.items()} == {
        **dict.fromkeys(["copy", "right"], "measured"),
        **dict.fromkeys(["wrong", "wrong gradient", "wrong at full size"], "wrong"),
        "broken": "failed",
    }
    assert all("ms" not in r for r in got.values() if r["status"] != "measured")
    mine, copy = got["right"], got["copy"]
    assert {"machine", "torch", "commit", "date", "ms_20", "ms_80", "peak_bytes"} <= mine.keys()
    assert mine["bytes"] == floor(TIMED, mine["shares"]).bytes
    assert mine["GB_per_s"] == pytest.approx(mine["bytes"] / mine["ms"] / 1e6)
    assert mine["share"] == pytest.approx(mine["GB_per_s"] / copy["GB_per_s"])
    assert copy["bytes"] == 2 * 4 * TIMED.N * TIMED.V


def test_the_data_does_not_come_from_the_kernels_under_test(monkeypatch):
    """Kernels that are wrong, or hang, do not compute the data."""
    for module in (prepare, rows, sets, tokens, autograd):
        monkeypatch.setattr(module, "ops_of", None)
    for level, sweep in itertools.product(("logits", "hidden"), (None, SAMPLING_MASK)):
        batch = Batch(small(level, dtype="bfloat16", sweep=sweep), "cpu")
        truth = reference.log_probs if level == "logits" else reference.linear_log_probs
        given = dict(labels=batch.labels, sampling_mask=batch.sampling_mask)
        same = [x.detach() for x, _ in in_some_orders(partial(truth, *batch.inputs, **given))]
        exact = truth(*(x.detach().double() for x in batch.inputs), **given)[0]
        assert_within_budget("log_probs", batch.logp, same, exact)


def test_mixed_rows_have_the_shares_of_the_targets():
    case = replace(small("tokens", layout="mixed", data="on-policy"), N=8_192)
    batch = Batch(case, "cpu")
    shares, logp = batch.shares(), batch.logp.double().requires_grad_()
    arguments = batch.old, batch.A, batch.mask
    reference.bapo_loss_from_log_probs(logp, *arguments, **batch.options).loss.backward()
    assert shares["unmasked"] == pytest.approx(0.75, abs=0.006)
    assert shares["active"] == pytest.approx(0.75 * 0.6, abs=0.006)
    assert shares["undecided"] == pytest.approx(0.03, abs=1e-4)
    assert shares["gradient"] == (logp.grad != 0).double().mean()


def test_the_floor():
    """Of 32 rows 24 are read, 4 of them twice, and 16 have a gradient; then 10 ids of each."""
    case, size = Case("logits", "loss", "any", 32, 100, 8), 100 * 2
    shares = dict(unmasked=0.75, active=0.5, undecided=0.125, gradient=0.5, allowed=0.1)
    hidden, masked = replace(case, level="hidden"), replace(case, sweep=SAMPLING_MASK)
    assert floor(case, shares) == ((24 + 4 + 32) * size, 0)
    assert floor(case, shares, live=True) == ((16 + 4 + 32) * size, 0)
    assert floor(replace(case, task="log_probs"), shares) == (24 * size, 0)
    assert floor(hidden, shares).flops == (2 * 24 + 4 * 16) * 100 * 8
    assert floor(replace(hidden, frozen=True), shares).flops == (2 * 24 + 2 * 16) * 100 * 8
    assert floor(masked, shares) == (32 * size + 64 * (240 + 160), 0)


def test_targets():
    """0.9 of a copy meets 0.93 and misses 0.79."""
    _, mixed, live, probs = targets.targets("logits", 64, 100, 1, "bfloat16")
    copy = {"method": "copy", "ms": 2.0}
    ours = {"method": "bapo_kernels cuda", "ms": 1.8, "yardstick": "copy", "GB_per_s": 1.0}
    lines = [copy, ours, ours | {"method": "bapo_kernels cuda, live"}]
    assert mixed.result("cuda", lines, {})["met"]
    missed = live.result("cuda", lines, {})
    assert (missed["ratio"], missed["most"], missed["met"]) == (0.9, 0.79, False)
    assert probs.result("cuda", lines, {})["ratio"] == 1.8  # of a read, half of a copy


def test_costs_are_those_of_the_call():
    def call():
        a = torch.empty(1_000_000)
        b = a.to(torch.bfloat16)
        del a
        return b, torch.empty(500_000)

    assert timing.CPUClock().peak_bytes(call) == 6_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["logits", "hidden"])
@pytest.mark.parametrize("sweep", [None, SAMPLING_MASK])
def test_on_a_gpu(level, sweep):
    case = replace(small(level, dtype="bfloat16", sweep=sweep), N=64)
    got = {r["method"]: r for r in run.measure(case, "cuda", [])}
    for backend in {"cuda", "triton"} & set(KERNELS):
        assert got[f"bapo_kernels {backend}"]["status"] == "measured"
    baseline = "PyTorch gather" if sweep else "PyTorch cross_entropy"
    assert got[baseline]["status"] == "measured"
