"""One run: a policy trained under one arm, in one scenario, from one seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bapo_kernels import bapo_loss, log_probs
from bapo_kernels.scopes import ClipBoundSearch

from ..arms import Arm, Scenario
from ..metrics import metrics_of
from .board import Walks
from .policy import held_out_prompts, move_logits, success
from .rollouts import GROUP, batches

LR = 2e-3
MAX_NORM = 1.0
EVALUATE_EVERY = 16
HELD_OUT, HELD_OUT_AT_THE_END = 256, 1024


def train(
    policy: PreTrainedModel,
    arm: Arm,
    scenario: Scenario,
    seed: int,
    updates: int,
) -> Iterator[dict[str, float]]:
    """One row of numbers per update, of a policy that has had its warm-up."""
    search = ClipBoundSearch(arm.config, scope=arm.scope)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    source = batches(policy, scenario, torch.Generator().manual_seed(1000 + seed))
    for update in range(updates):
        walks, advantages = next(source)
        optimizer.zero_grad()
        row = losses(policy, walks, advantages, arm, search)
        row["training_reward"] = walks.rewards.mean().item()
        row["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM).item()
        optimizer.step()
        end = update == updates - 1
        if update % EVALUATE_EVERY == EVALUATE_EVERY - 1 or end:
            row["held_out"] = held_out_reward(policy, HELD_OUT)
        if end:
            row["held_out_end"] = held_out_reward(policy, HELD_OUT_AT_THE_END)
            row["held_out_greedy"] = success(policy, held_out_prompts(HELD_OUT_AT_THE_END), None)
        yield row


def losses(
    policy: PreTrainedModel, walks: Walks, advantages: Tensor, arm: Arm, search: ClipBoundSearch
) -> dict[str, float]:
    """Adds the gradient of an update.

    Returns:
        The metrics of the update, as means over its micro-batches or as those of the decision that
        they share.
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
    for rows in micro_batches:
        part = walks[rows]
        tensors = part.moves, part.log_probs, advantages[rows], part.mask
        logits = move_logits(policy, part)
        out = bapo_loss(logits, *tensors, batch_num_tokens=tokens, **search.options)
        out.loss.backward()
        if search.scope == "lagged":
            search.update(out.log_probs.detach(), *tensors[1:])
        measured.append(metrics_of(out, arm, search.metrics))
        shares.append((part.mask.sum() / tokens).item())
    if search.scope == "lagged":
        search.step()
    return {
        name: sum(s * m[name] for s, m in zip(shares, measured, strict=True))
        for name in measured[0]
    }


def deal(count: int, parts: int) -> list[Tensor]:
    """The rows of each micro-batch: groups in turn, so that each has groups of every age."""
    groups = torch.arange(count).view(-1, GROUP)
    return [groups[part::parts].flatten() for part in range(parts)]


def held_out_reward(policy: PreTrainedModel, count: int) -> float:
    """Share of sampled walks that reach their goal, the same prompts and draws every time."""
    return success(policy, held_out_prompts(count), torch.Generator().manual_seed(7))
