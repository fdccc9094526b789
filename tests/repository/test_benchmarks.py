"""Benchmarks: all methods compute the same, ours is timed only if correct, rates are of a model."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from unittest import mock

import pytest
import torch
from helpers import KERNELS, assert_within_budget, needs_native
from pages import ROOT

from bapo_kernels import reference
from bapo_kernels.core import autograd, rows, tokens
from bapo_kernels.core.arguments import prepare
from bapo_kernels.core.head import sets
from bapo_kernels.tools import timing
from bapo_kernels.tools.budget import in_some_orders
from benchmarks.cases import SAMPLING_MASK, TARGETS, Batch, Case
from benchmarks.checks import WrongAnswerError, log_probs
from benchmarks.floor import floor
from benchmarks.group import Group
from benchmarks.methods.method import Method
from benchmarks.methods.yardsticks import COPY
from benchmarks.targets import targets

LEVELS = "distillation", "hidden", "log_probs", "logits", "sampling_masks", "search", "step"
FILES = [import_module(f"benchmarks.test_{level}") for level in LEVELS]
SMALL = dict(N=24, V=1_003, H=128, dtype="float32")


def small(level, task="loss", **options):
    return Case(level, task, "any", **SMALL | options)


def all_methods():
    """By small case, those that run here and compile nothing."""
    found = {}
    for case, methods in itertools.chain(*(file.cases("cpu") for file in FILES)):
        names = found.setdefault(case.resized(**SMALL), {})
        names |= {m.name: m for m in methods if "compiled" not in m.name and not m.why_not("cpu")}
    return {case: list(methods.values()) for case, methods in found.items() if methods}


ALL = all_methods()


@needs_native
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.short_title)
def test_every_method_computes_the_same(case):
    """The compiled ones, which take minutes, are checked before they are timed."""
    group = Group(case, ALL[case], "cpu", timed=False)
    assert group.failures == {}
    for name, facts in group.facts.items():
        errors = [facts[key] for key in ("value_error", "gradient_error") if key in facts]
        assert max(errors, default=0.0) < 3e-5, name
    assert any("bapo" in name for name in group.facts) or case.task == "forward_kl"
    assert not case.frozen or group.batch.inputs[1].grad is None


def part(batch, of_loss=1.0, of_gradient=1.0):
    """Right but for these factors."""
    arguments = log_probs(batch), batch.old, batch.A, batch.mask
    loss = reference.bapo_loss_from_log_probs(*arguments, config=batch.case.config).loss
    gradients = torch.autograd.grad(loss, batch.inputs)
    return of_loss * loss.detach(), tuple(of_gradient * gradient for gradient in gradients)


def broken(batch):
    raise RuntimeError("out of order")


CPU, OURS = "bapo_kernels cpu", {"backend": "reference"}
MADE_UP = {
    "right": {"log_probs": log_probs} | OURS,
    "wrong gradient": {"train": partial(part, of_gradient=1.01)} | OURS,
    "wrong loss": {"train": partial(part, of_loss=1.01)} | OURS,
    "inexact baseline": {"train": partial(part, of_gradient=1.01)},
    "NaN": {"train": partial(part, of_gradient=torch.nan)},
    "broken": {"log_probs": broken},
}


def test_only_correct_methods_are_timed(monkeypatch):
    """What fails does not stop the others."""
    monkeypatch.setattr(timing.CPUClock, "SECONDS", 0.0)
    methods = [COPY, *(Method(name, **options) for name, options in MADE_UP.items())]
    case = small("logits", N=48)  # twice as many tokens as are checked
    group = Group(case, methods, "cpu", timed=True)
    assert group.samples.keys() == {"copy", "right", "inexact baseline"}
    assert {len(samples) for samples in group.samples.values()} == {timing.CPUClock.TURNS}
    wrong = {name for name, e in group.failures.items() if isinstance(e, WrongAnswerError)}
    assert wrong == {"wrong gradient", "wrong loss", "NaN"}
    assert str(group.failures["broken"]) == "out of order"
    mine, copy = group.facts["right"], group.facts["copy"]
    assert group.facts["inexact baseline"]["gradient_error"] == pytest.approx(0.01, rel=1e-3)
    assert mine["gradient_error"] < 1e-6
    assert mine["bytes"] == floor(case, mine["shares"]).bytes
    assert mine["share"] == pytest.approx(mine["GB_per_s"] / copy["GB_per_s"])
    assert copy["bytes"] == 2 * 4 * case.N * case.V
    ms = {name: sorted(samples) for name, samples in group.samples.items()}
    assert mine["multiple_min"] == ms["right"][0] / ms["copy"][0]
    assert mine["yardstick"] == "copy"


def test_methods_take_turns():
    told, clock = [], mock.Mock(TURNS=6)
    clock.samples = lambda timed: told.append(timed) or [timed.call()]
    seconds = {"fast": 1e-3, "slow": timing.ENOUGH / 2, "very slow": timing.LONG + 1}
    calls = {name: timing.Timed(partial(float, s)) for name, s in seconds.items()}
    calls["broken"] = timing.Timed(partial(broken, None))
    samples, failures = timing.in_turns(calls, clock)
    assert {name: len(of) for name, of in samples.items()} == {"fast": 6, "slow": 3, "very slow": 2}
    assert failures.keys() == {"broken"}
    assert told[:7] == [*calls.values(), *told[:3]]


@pytest.mark.slow
@needs_native
def test_the_suite_and_its_file(tmp_path):
    """As a user runs it; the file has no samples and no name of the machine."""
    file = tmp_path / "a.json"
    command = f"{sys.executable} -m pytest -q -p no:xdist --tokens=16 --vocab=500 --hidden=16 -k"
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, env=alone)
    once = ["bapo and bfloat16", "--benchmark-disable", "benchmarks"]
    timed = ["in-place and float32 and not real", f"--benchmark-json={file}"]
    for arguments in (once, [*timed, "benchmarks/test_logits.py"]):
        done = run([*command.split(), *arguments])
        assert done.returncode == 0, done.stdout
    assert "x copy" in done.stdout
    made = json.loads(file.read_text())
    (benchmark,) = made["benchmarks"]
    facts = benchmark["extra_info"]
    assert benchmark["stats"]["median"] > 0
    assert "data" not in benchmark["stats"]
    assert (facts["method"], facts["V"], facts["dtype"]) == (f"{CPU}, in place", 500, "float32")
    assert {"GB_per_s", "peak_bytes", "gradient_error", "shares", "yardstick"} <= facts.keys()
    assert facts["targets"]["x copy"]["ratio"] == facts["multiple"]
    assert {"processor", "threads", "torch"} <= made["machine_info"].keys()
    assert "node" not in made["machine_info"]


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
    batch = Batch(small("tokens", layout="mixed", data="on-policy", N=8_192), "cpu")
    shares, logp = batch.shares(), batch.logp.double().requires_grad_()
    arguments, config = (batch.old, batch.A, batch.mask), batch.case.config
    reference.bapo_loss_from_log_probs(logp, *arguments, config=config).loss.backward()
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
    """0.9 of a copy meets 0.93 and misses 0.79, and a log-prob is compared with half a copy."""
    case = small("logits", layout="mixed", sweep=TARGETS)
    facts = {"multiple": 0.9, "yardstick": "copy"}
    alone = {"bapo_kernels cuda, row pass alone": {"multiple": 0.855}}
    plain, live = Method("bapo_kernels cuda", backend="cuda"), "bapo_kernels cuda, live"
    got = targets(case, plain, {plain.name: facts} | alone)
    assert got["x copy"] == {"ratio": 0.9, "most": 0.93, "met": True}
    assert not got["beyond the row pass"]["met"]
    assert not targets(case, replace(plain, name=live), {live: facts})["x copy"]["met"]
    alone = small("logits", "log_probs", sweep=TARGETS)
    assert targets(alone, plain, {plain.name: facts})["x read"]["ratio"] == 1.8


def test_costs_are_those_of_the_call():
    def call():
        a = torch.empty(1_000_000)
        b = a.to(torch.bfloat16)
        del a
        return b, torch.empty(500_000)

    assert timing.CPUClock().peak_bytes(call) == 6_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__)
def test_on_a_gpu(file):
    """Each kind of case, ours and the yardsticks."""
    for case, methods in file.cases("cuda"):
        if case.sweep in ("N", "V"):
            continue
        case = case.resized(**SMALL | dict(N=64, dtype="bfloat16"))
        able = [m for m in methods if m.backend in KERNELS or m.yardstick is not None]
        assert Group(case, able, "cuda", timed=True).failures == {}
