"""Thousands of off-policy updates with the fused loss and with plain PyTorch, side by side.

The task is that of the demo, with small batches. One learner draws the rollouts, and all learners
make eight updates on them, from the same warm policy. They differ in the loss alone:

    exact        the reference in float64 on the float32 logits; samples the rollouts
    nudged       the same, but after each update every weight moves to a random float32 neighbour
    plain        the reference in float32
    fused        the kernels
    fused again  the kernels, to compare bits

    python -m study long-run --out out
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor

from bapo_kernels import BAPOConfig, BAPOOutput, bapo_loss, reference
from benchmarks.timing import resident_MiB

from .board import MOVES, Walks, draw_prompts
from .policy import move_logits, walk_on, warm_policy
from .rollouts import GROUP, group_advantages

CONFIG = BAPOConfig.paper()
LR = 1e-5  # with steps ten times larger the learners diverge, however small their differences
PROMPTS = 4
UPDATES = 8  # per rollout
WARM_UP_STEPS = 60


def exact(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    """The reference in float64."""
    return reference.bapo_loss(logits.double(), *arguments, **options)


LOSSES = {
    "exact": exact,
    "nudged": exact,
    "plain": reference.bapo_loss,
    "fused": bapo_loss,
    "fused again": bapo_loss,
}


class Learner:
    """A copy of the model, trained with one of the losses."""

    def __init__(self, name: str, model: torch.nn.Module, lr: float) -> None:
        self.loss, self.model = LOSSES[name], copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.nudges = torch.Generator().manual_seed(0) if name == "nudged" else None

    def update(self, walks: Walks, advantages: Tensor) -> BAPOOutput:
        """One optimizer step; returns the output of the loss."""
        batch = walks.moves, walks.log_probs, advantages, walks.mask
        out = self.loss(move_logits(self.model, walks), *batch, config=CONFIG)
        self.optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.nudges is not None:
            self.nudge(self.nudges)
        return out

    @torch.no_grad()
    def nudge(self, generator: torch.Generator) -> None:
        """Moves each weight to one of its float32 neighbours."""
        for p in self.model.parameters():
            up = torch.rand(p.shape, generator=generator) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf)))

    def weights(self) -> Tensor:
        """All weights in one float64 vector."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().double()


def run(updates: int, lr: float = LR, seed: int = 0) -> Iterator[dict[str, float]]:
    """One row per update: losses, bounds, distances to the weights of ``exact``, memory."""
    warm = warm_policy(seed, WARM_UP_STEPS)
    learners = {name: Learner(name, warm, lr) for name in LOSSES}
    sampler, start = learners["exact"], learners["exact"].weights()
    generator = torch.Generator().manual_seed(1000 + seed)
    for update in range(updates):
        if update % UPDATES == 0:
            prompts = draw_prompts(PROMPTS, generator).repeat_interleave(GROUP, 0)
            walks = walk_on(sampler.model, Walks.begin(prompts), MOVES, generator)
            batch = walks, group_advantages(walks.rewards)
        outs = {name: learner.update(*batch) for name, learner in learners.items()}
        weights = {name: learner.weights() for name, learner in learners.items()}
        row = {"update": update + 1, "reward": walks.rewards.mean().item()}
        for name, out in outs.items():
            row[f"loss, {name}"] = out.loss.item()
            row[f"lower, {name}"], row[f"upper, {name}"] = (b.item() for b in out.bounds)
            row[f"distance, {name}"] = (weights[name] - weights["exact"]).norm().item()
        row["moved"] = (weights["exact"] - start).norm().item()
        row["same bits"] = float(
            torch.equal(weights["fused"], weights["fused again"])
            and torch.equal(outs["fused"].log_probs, outs["fused again"].log_probs)
        )
        row["MiB"] = resident_MiB()
        yield row


def write(out: Path, updates: int, lr: float, seed: int) -> None:
    """Trains all learners; writes a CSV, prints selected updates."""
    out.mkdir(parents=True, exist_ok=True)
    rows = pd.DataFrame(track(run(updates, lr, seed), "updates", total=updates)).set_index("update")
    rows.to_csv(out / "long_run.csv")
    shown = rows[rows.index.isin([1, 10, 100, 500, 1_000, updates])]
    print(shown.T.to_string(float_format="{:.4g}".format))
    print(f"the same bits in {rows['same bits'].mean():.0%} of the updates: {out / 'long_run.csv'}")
