"""Rollouts, and how old they are when they are used."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..arms import Scenario
from .board import MOVES, Walks, draw_prompts
from .policy import walk_on

GROUP = 8  # walks from the same prompt
PROMPTS = 16  # per update
REPLAY_ROLLOUTS = 16  # how many rollouts the buffer holds


def batches(
    policy: PreTrainedModel, scenario: Scenario, generator: torch.Generator
) -> Iterator[tuple[Walks, Tensor]]:
    """Finished walks with their advantages, one batch per update, without an end.

    Every draw takes the weights that ``policy`` has at that moment, and the walks keep the
    log-probs of these weights.
    """
    fresh = round(PROMPTS * (1 - scenario.replayed)) * scenario.staleness
    under_way: list[Walks] = []
    buffer: list[tuple[Walks, Tensor]] = []
    while True:
        prompts = draw_prompts(fresh, generator).repeat_interleave(GROUP, 0)
        under_way.append(Walks.begin(prompts))
        for walks in under_way:
            walk_on(policy, walks, MOVES // scenario.segments, generator)
        if not under_way[0].finished:
            continue  # the first rollouts of a partial rollout only begin walks
        walks = under_way.pop(0)
        rollout = walks, group_advantages(walks.rewards)
        if not scenario.replayed:
            yield from split(*rollout, scenario.staleness)
            continue
        replayed = [pick(buffer or [rollout], generator) for _ in range(PROMPTS - fresh)]
        parts = [rollout, *replayed]
        yield Walks.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        buffer = [*buffer, rollout][-REPLAY_ROLLOUTS:]


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards relative to the other walks from the same prompt (GRPO)."""
    grouped = rewards.view(-1, GROUP)
    spread = grouped.std(-1, keepdim=True)
    return ((grouped - grouped.mean(-1, keepdim=True)) / (spread + 1e-4)).flatten()


def split(walks: Walks, advantages: Tensor, parts: int) -> Iterator[tuple[Walks, Tensor]]:
    size = len(advantages) // parts
    for begin in range(0, len(advantages), size):
        yield walks[begin : begin + size], advantages[begin : begin + size]


def pick(buffer: list[tuple[Walks, Tensor]], generator: torch.Generator) -> tuple[Walks, Tensor]:
    """A random group of a random rollout."""
    walks, advantages = buffer[int(torch.randint(len(buffer), (), generator=generator))]
    begin = GROUP * int(torch.randint(len(advantages) // GROUP, (), generator=generator))
    return walks[begin : begin + GROUP], advantages[begin : begin + GROUP]
