"""One run: a policy trained under one arm, in one scenario, from one seed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bapo_kernels import bapo_loss, log_probs
from bapo_kernels.scopes import ClipBoundSearch

from .arms import PAPER, Arm, Scenario
from .board import Walks
from .policy import held_out_prompts, move_logits, success
from .rollouts import GROUP, batches

LR = 2e-3
MAX_NORM = 1.0
TARGET = PAPER.target  # the share of every arm at its own start is compared with it
EVALUATE_EVERY = 16
HELD_OUT, HELD_OUT_AT_THE_END = 256, 1024
METRICS = (
    "entropy",
    "ppo_kl",
    "bapo_clip_low",
    "bapo_clip_high",
    "bapo_pos_share",
    "bapo_pos_share_start",
    "bapo_pos_share_max",
    "bapo_saturated",
)


def train(
    policy: PreTrainedModel,
    arm: Arm,
    scenario: Scenario,
    seed: int,
    updates: int,
    measure_rule: bool = False,
) -> Iterator[dict[str, float]]:
    """One row of numbers per update, of a policy that has had its warm-up.

    Args:
        measure_rule: also the change of the entropy in each update, measured and predicted by the
            Entropy-Clip Rule of the paper.
    """
    search = ClipBoundSearch(arm.config, scope=arm.scope)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    source = batches(policy, scenario, torch.Generator().manual_seed(1000 + seed))
    for update in range(updates):
        walks, advantages = next(source)
        optimizer.zero_grad()
        row, per_token = losses(policy, walks, advantages, arm, search)
        row["training_reward"] = walks.rewards.mean().item()
        row["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM).item()
        optimizer.step()
        if measure_rule:
            bounds = row["bapo_clip_low"], row["bapo_clip_high"]
            row["rule"] = predicted_change(*per_token, walks, advantages, bounds)
            row["entropy_change"] = entropy(policy, walks) - row["entropy"]
        end = update == updates - 1
        if update % EVALUATE_EVERY == EVALUATE_EVERY - 1 or end:
            row["held_out"] = held_out_reward(policy, HELD_OUT)
        if end:
            row["held_out_end"] = held_out_reward(policy, HELD_OUT_AT_THE_END)
            row["held_out_greedy"] = success(policy, held_out_prompts(HELD_OUT_AT_THE_END), None)
        yield row


def losses(
    policy: PreTrainedModel, walks: Walks, advantages: Tensor, arm: Arm, search: ClipBoundSearch
) -> tuple[dict[str, float], Tensor]:
    """Adds the gradient of an update.

    Returns:
        The metrics of the update, as means over its micro-batches or as those of the decision that
        they share; ``[2, B, MOVES]``, log-probs of the moves and entropies before them.
    """
    tokens = walks.mask.sum()
    micro_batches = deal(len(advantages), arm.micro_batches)
    if search.scope == "step":
        for rows in micro_batches:
            part = walks[rows]
            with torch.no_grad():
                logp, _ = log_probs(move_logits(policy, part), part.moves)
            search.update(logp, part.log_probs, advantages[rows], part.mask)
        search.step()
    measured, shares = [], []
    per_token = torch.zeros(2, *walks.moves.shape)
    for rows in micro_batches:
        part = walks[rows]
        tensors = part.moves, part.log_probs, advantages[rows], part.mask
        logits = move_logits(policy, part)
        out = bapo_loss(logits, *tensors, batch_num_tokens=tokens, **search.options)
        out.loss.backward()
        logp = out.log_probs.detach()
        if search.scope == "lagged":
            search.update(logp, *tensors[1:])
        metrics = {name: out.metrics[name].item() for name in METRICS}
        # The call's own metrics, where a decision covers the call; else those of the decision.
        decision = {name: search.metrics[name].item() for name in METRICS if name in search.metrics}
        metrics |= {name: value for name, value in decision.items() if not math.isnan(value)}
        metrics |= place_on_grids(metrics, arm)
        for sign in ("positive", "negative"):
            metrics[f"clipped_{sign}"] = out.metrics[f"pg_clipfrac_{sign[:3]}"].item()
        measured.append(metrics)
        shares.append((part.mask.sum() / tokens).item())
        per_token[:, rows] = torch.stack([logp, out.entropy.detach()])
    if search.scope == "lagged":
        search.step()
    means = {
        name: sum(s * m[name] for s, m in zip(shares, measured, strict=True))
        for name in measured[0]
    }
    return means, per_token


def deal(count: int, parts: int) -> list[Tensor]:
    """The rows of each micro-batch: groups in turn, so that each has groups of every age."""
    groups = torch.arange(count).view(-1, GROUP)
    return [groups[part::parts].flatten() for part in range(parts)]


def place_on_grids(metrics: dict[str, float], arm: Arm) -> dict[str, float]:
    """Whether bounds left their start, and whether the upper one is strictly inside its range."""
    config = arm.config
    lower, upper = metrics["bapo_clip_low"], metrics["bapo_clip_high"]
    start, maximum = torch.tensor([config.options.start(), config.options.maximum()]).tolist()
    return {
        "moved": float([lower, upper] != start),
        "interior": float(start[1] < upper < maximum[1]),
        "below_target": float(metrics["bapo_pos_share_start"] < TARGET),
    }


def predicted_change(
    logp: Tensor, entropy: Tensor, walks: Walks, advantages: Tensor, bounds: tuple[float, float]
) -> float:
    """By the Entropy-Clip Rule, up to a factor: the mean over prefixes of ``-Cov[log pi, A*X]``.

    X is 1 where the move is not clipped; the paper's constant C does not change a covariance. The
    covariance is over the moves after a prefix, of which one was drawn, from an older policy: with
    ``E[log pi] = -entropy`` it is estimated by ``r*A*X*(log pi + entropy)``.
    """
    ratio = (logp - walks.log_probs).exp()
    A = advantages[:, None].expand_as(logp)
    lower, upper = bounds
    unclipped = torch.where(A > 0, ratio <= upper, ratio >= lower)
    covariance = ratio * torch.where(unclipped, A, 0.0) * (logp + entropy)
    return -covariance[walks.mask].mean().item()


@torch.no_grad()
def entropy(policy: PreTrainedModel, walks: Walks) -> float:
    """Mean over the moves, in nats."""
    _, values = log_probs(move_logits(policy, walks), walks.moves)
    return values[walks.mask].mean().item()


def held_out_reward(policy: PreTrainedModel, count: int) -> float:
    """Share of sampled walks that reach their goal, the same prompts and draws every time."""
    return success(policy, held_out_prompts(count), torch.Generator().manual_seed(7))
