"""The study, at toy size: its arms, the Entropy-Clip Rule and its statistics."""

import math
from functools import partial

import pytest
import torch
from helpers import assert_within_budget, needs_native

for package in ("transformers", "matplotlib", "pandas"):
    pytest.importorskip(package)
pytest.importorskip("study")
from bapo_kernels.tools.budget import in_some_orders  # noqa: E402
from study import board, compare, policy, training  # noqa: E402
from study.arms import ARMS, SCOPES, Scenario  # noqa: E402
from study.entropy_rule import predicted_change  # noqa: E402


@needs_native
def test_on_policy_the_arms_are_the_same(monkeypatch):
    """And so are micro-batches, which are summed in another order."""
    monkeypatch.setattr(policy, "WARM_UP_STEPS", 20)
    monkeypatch.setattr(training, "HELD_OUT", 16)
    monkeypatch.setattr(training, "HELD_OUT_AT_THE_END", 16)

    def rows_of(arm):
        rows = training.train(policy.warm_policy(0), arm, Scenario(), 0, updates=2)
        return torch.tensor([[row["entropy"], row["grad_norm"]] for row in rows]).T

    first, *others = (ARMS | SCOPES).values()
    same = in_some_orders(partial(rows_of, first))
    operands = dict(entropy=math.log(board.VOCABULARY), grad_norm=0.0)  # the first: of log-probs
    for arm in others:
        for name, got, *of_orders in zip(operands, rows_of(arm), *same, strict=True):
            assert_within_budget(name, got, of_orders, of_orders[0], operands[name])


def test_the_entropy_clip_rule_on_softmaxes():
    """Logits that move by eta*A*X (natural gradient), from which the paper derives the rule.

    Two prefixes of different entropy and mean advantage: the rule is a covariance per prefix.
    """
    logits = torch.tensor([[0.3, -0.5, 1.0, 0.1], [2.0, 0.1, -3.0, 0.4]], dtype=torch.float64)
    old = torch.tensor([[0.1, -0.2, 0.6, 0.4], [1.8, 0.5, -2.0, 0.4]], dtype=torch.float64)
    A = torch.tensor([[1.0, -2.0, 0.5, -0.7], [1.5, 0.2, 1.0, -0.1]], dtype=torch.float64)
    logp, old, bounds, eta = logits.log_softmax(-1), old.log_softmax(-1), (0.9, 1.1), 1e-6
    ratio = (logp - old).exp()
    unclipped = torch.where(A > 0, ratio <= bounds[1], ratio >= bounds[0])
    assert 0 < unclipped.sum() < unclipped.numel()
    before, after = (
        torch.distributions.Categorical(logits=z).entropy()
        for z in (logits, logits + eta * A * unclipped)
    )
    # As many draws of each token as its old probability says; the prefixes are as many walks each.
    state = torch.arange(2).repeat_interleave(20_000)
    index = torch.arange(20_000).repeat(2) / 20_000
    token = (index[:, None] >= old.exp().cumsum(-1)[state]).sum(-1).clamp(max=3)
    walks = board.Walks.begin(torch.zeros(len(token), 4, dtype=torch.long))
    walks.mask[:, 0] = True
    columns = torch.zeros(3, *walks.moves.shape, dtype=torch.float64)
    columns[:, :, 0] = torch.stack([old[state, token], logp[state, token], before[state]])
    walks.log_probs = columns[0]
    predicted = predicted_change(columns[1], columns[2], walks, A[state, token], bounds)
    assert eta * predicted == pytest.approx((after - before).mean().item(), rel=2e-3)


def test_paired_differences():
    """Against a paired t interval computed by hand: t(2; 0.975) = 4.3027."""
    pytest.importorskip("scipy")
    held_out = {"fixed 0.8/1.2": [0.1, 0.2, 0.6], "BAPO": [0.2, 0.4, 0.9]}
    records = [
        dict(scenario="staleness 8", arm=arm, seed=seed, held_out=value, curves={"entropy": [1.0]})
        for arm, values in held_out.items()
        for seed, value in reversed(list(enumerate(values)))
    ]
    difference = compare.paired(compare.frame(records), "staleness 8", "BAPO")
    half = 4.3027 * 0.1 / 3**0.5
    assert difference == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-4)
