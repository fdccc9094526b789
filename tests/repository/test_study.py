"""The study: its task, its scenarios, the Entropy-Clip Rule, and its page; all at toy size."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from helpers import assert_within_budget, needs_native
from typer.testing import CliRunner

for package in ("transformers", "matplotlib", "pandas", "scipy"):
    pytest.importorskip(package)
study = pytest.importorskip("study")
from bapo_kernels import BAPOConfig, bapo_loss_from_log_probs, log_probs, reference  # noqa: E402
from bapo_kernels.tools.budget import in_some_orders, largest  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402
from study import board, compare, demo, policy, rollouts, runs, training  # noqa: E402
from study.__main__ import DOCS, RESULTS, app  # noqa: E402
from study.arms import ARMS, SCENARIOS, SCOPES, Scenario  # noqa: E402
from study.training import predicted_change, train  # noqa: E402

pytestmark = [needs_native, pytest.mark.xdist_group("study")]
RIGHT, LEFT, UP, DOWN = range(board.COORDINATES, board.VOCABULARY)


@pytest.fixture(autouse=True)
def toy_size(monkeypatch):
    """A policy that walks at random, and so seldom arrives; little work, on one thread."""
    monkeypatch.setattr(policy, "WARM_UP_STEPS", 20)
    for name in ("HELD_OUT", "HELD_OUT_AT_THE_END"):
        monkeypatch.setattr(training, name, 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_a_walk_ends_at_its_goal_and_walls_hold():
    walks = board.Walks.begin(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [9, 9, 5, 5]]))
    moves = torch.tensor([[RIGHT, UP, UP], [LEFT, DOWN, RIGHT], [0, UP, DOWN]])
    for tokens in moves.T:
        walks.move(tokens, torch.zeros(3))
    assert walks.mask[:, :4].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert walks.places.tolist() == [[1, 1], [1, 0], [9, 8]]  # a coordinate is no move
    assert walks.rewards.tolist() == [1, 0, 0]


def test_held_out_prompts_are_never_trained_on(generator):
    drawn = [board.draw_prompts(5_000, generator, held_out) for held_out in (False, True)]
    trained, held_out = ({tuple(p) for p in prompts.tolist()} for prompts in drawn)
    assert not trained & held_out
    assert 0.15 < len(held_out) / len(trained | held_out) < 0.45  # 5,000 draws from a fifth
    a, b, c, d = torch.cat(drawn).T
    assert ((a - c).abs() + (b - d).abs()).min() == board.LEAST_DISTANCE


@torch.no_grad()
def log_probs_of(model, walks):
    return log_probs(policy.move_logits(model, walks), walks.moves)[0]


def assert_drawn_by(model, walks, where):
    """These moves have the log-probs of the policy."""
    same = [x[where] for x in in_some_orders(partial(log_probs_of, model, walks))]
    truth = log_probs_of(copy.deepcopy(model).double(), walks)[where]
    assert_within_budget("log_probs", walks.log_probs[where], same, truth)


def test_the_share_of_a_fresh_rollout_follows_from_lengths_and_probabilities(generator):
    """The formula of docs/choosing.md."""
    starts = board.draw_prompts(64, generator).repeat_interleave(rollouts.GROUP, 0)
    walks = board.Walks.begin(starts)
    policy.walk_on(policy.warm_policy(0), walks, board.MOVES, generator)
    advantages = rollouts.group_advantages(walks.rewards)
    tokens = walks.log_probs, walks.log_probs, advantages, walks.mask
    lengths, magnitudes = walks.mask.sum(-1).double(), advantages.double().abs()
    probs = (walks.log_probs.double().exp() * walks.mask).sum(-1) / lengths
    for weight, probs_of in (("uniform", torch.ones_like(probs)), ("rollout_prob", probs)):
        signs = advantages > 0, advantages < 0
        products = magnitudes * lengths * probs_of
        pos, neg = (products[sign].sum() / magnitudes[sign].sum() for sign in signs)
        share = pos / (pos + neg)
        assert share < 0.4

        def start(loss, config):
            return loss(*tokens, config=config).metrics["bapo_pos_share_start"]

        config = BAPOConfig(token_weight=weight)
        same = in_some_orders(partial(start, reference.bapo_loss_from_log_probs, config))
        got = start(bapo_loss_from_log_probs, config)
        assert_within_budget("share", got, same, share, operand=largest(walks.log_probs))


def test_the_search_acts():
    start = policy.warm_policy(0)
    rows = list(train(start, ARMS["BAPO"], SCENARIOS["staleness 8"], seed=0, updates=8))
    below = [row["bapo_pos_share_start"] < training.TARGET for row in rows]
    raised = [row["bapo_clip_high"] > 1.21 for row in rows]
    assert any(below)
    assert raised == below
    assert abs(rows[0]["ppo_kl"]) < 1e-6 < rows[-1]["ppo_kl"]
    assert rows[0]["clipped_positive"] == rows[0]["clipped_negative"] == 0
    assert any(row["clipped_negative"] > 0 for row in rows)


def test_on_policy_the_arms_are_the_same():
    """And so are micro-batches, which are summed in another order."""

    def rows_of(arm):
        rows = train(policy.warm_policy(0), arm, Scenario(), 0, updates=2)
        return torch.tensor([[row["entropy"], row["grad_norm"]] for row in rows]).T

    first, *others = (ARMS | SCOPES).values()
    same = in_some_orders(partial(rows_of, first))
    operands = dict(entropy=math.log(board.VOCABULARY), grad_norm=0.0)  # the first: of log-probs
    for arm in others:
        for name, got, *of_orders in zip(operands, rows_of(arm), *same, strict=True):
            assert_within_budget(name, got, of_orders, of_orders[0], operands[name])


def test_replay_mixes_in_groups_of_older_rollouts(generator):
    model = policy.warm_policy(0)
    source = rollouts.batches(model, SCENARIOS["sample replay"], generator)
    old, _ = next(source)
    model.lm_head.weight.data.mul_(3.0)
    walks, advantages = next(source)
    half = len(advantages) // 2
    fresh = torch.arange(len(advantages))[:, None] < half
    assert_drawn_by(model, walks, walks.mask & fresh)
    change = (log_probs_of(model, walks) - walks.log_probs).abs().where(walks.mask, 0.0).amax(-1)
    assert change[half:].min() > 1e-2
    before = {tuple(row) for row in old.moves.tolist()}
    assert all(tuple(row) in before for row in walks.moves[half:].tolist())
    assert torch.equal(advantages, rollouts.group_advantages(walks.rewards))


def test_a_partial_rollout_has_a_policy_for_each_part(generator):
    """The head is scaled between batches; each part keeps the log-probs of its policy."""
    model = policy.warm_policy(0)
    weight = model.lm_head.weight.data
    source = rollouts.batches(model, Scenario(segments=3), generator)
    for _ in range(3):
        walks, _ = next(source)
        weight.mul_(1.5)
    assert walks.finished
    parts = [slice(n, n + board.MOVES // 3) for n in range(0, board.MOVES, board.MOVES // 3)]
    for part in reversed(parts):  # drawn for the last batch, for the one before, and for the first
        weight.div_(1.5)
        of_part = torch.zeros_like(walks.mask)
        of_part[:, part] = walks.mask[:, part]
        assert_drawn_by(model, walks, of_part)


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
    change = (after - before).mean()
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
    assert eta * predicted == pytest.approx(change.item(), rel=2e-3)


def test_paired_differences():
    """Against a paired t interval computed by hand: t(2; 0.975) = 4.3027."""
    held_out = {"fixed 0.8/1.2": [0.1, 0.2, 0.6], "BAPO": [0.2, 0.4, 0.9]}
    records = [
        dict(scenario="staleness 8", arm=arm, seed=seed, held_out=value, curves={"entropy": [1.0]})
        for arm, values in held_out.items()
        for seed, value in reversed(list(enumerate(values)))
    ]
    difference = compare.paired(compare.frame(records), "staleness 8", "BAPO")
    half = 4.3027 * 0.1 / 3**0.5
    assert difference == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-4)
    assert not difference.separated


def test_a_study_makes_the_runs_that_its_records_lack(tmp_path):
    """Each from a policy of its own."""
    path, scenario = tmp_path / "records.jsonl", "staleness 8"
    plan = [runs.Run(scenario, arm, 0, 2) for arm in ("BAPO", "no clip")]
    for planned in (plan[:1], plan):
        assert set(runs.complete(path, planned)) == set(planned)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for run, record in zip(plan, records, strict=True):
        start, arm = policy.warm_policy(run.seed), ARMS[run.arm]
        rows = list(train(start, arm, SCENARIOS[scenario], run.seed, run.updates, True))
        assert runs.record(run, rows).items() <= record.items()
    searched, other = records
    assert searched["moved"] == searched["below_target"] > 0
    assert searched["interior"] <= searched["moved"]
    assert len(searched["rule"]) == 2
    assert "bounds" not in other


def test_the_demo(tmp_path):
    (tmp_path / "before_after.png").touch()
    command = ["demo", "--out", str(tmp_path), "--seeds", "1", "--updates", "8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = compare.pd.read_csv(tmp_path / "offpolicy_rlvr.csv")
    assert set(rows.arm) == set(demo.DEMO)
    searched = rows[rows.arm == "BAPO"]
    assert (searched.bapo_pos_share_start < training.TARGET).any()
    assert searched.bapo_clip_high.nunique() > 1
    figures = [tmp_path / name for name in ("before_after.png", "offpolicy_rlvr.png")]
    assert result.output.splitlines()[-2:] == list(map(str, figures))
    assert figures[1].stat().st_size > 10_000


def test_the_page_has_the_rewards_of_the_records():
    table = compare.frame(RESULTS)
    assert markdown(compare.end_points(table)) in (DOCS / "internals" / "study.md").read_text()
    keys = table[["scenario", "arm", "seed", "updates"]].values.tolist()
    planned = runs.planned(seeds=5, updates=160)
    assert sorted(keys) == sorted([r.scenario, r.arm, r.seed, r.updates] for r in planned)
