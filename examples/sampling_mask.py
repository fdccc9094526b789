"""Rollouts sampled with top-p, and the loss with and without the sets they were drawn from.

A small random Qwen3 decoder learns to write rising ids from a reward for every rising pair. The
sampler keeps the most likely tokens up to a mass of ``top_p`` and draws from these. As an inference
engine does, it returns the log-probs under the distribution that it drew from, which the loss takes
as the old ones, and the sets of ids that it kept.

At the first update after a rollout the policy has not changed, so every ratio has to be 1. It is
with the sets. Without them it is the mass that the sampler kept::

    python examples/sampling_mask.py
"""

from __future__ import annotations

import copy
import statistics
from typing import NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_kernels import BAPOConfig, LMHead, SamplingMask, bapo_linear_loss

VOCABULARY, PROMPT, ANSWER = 1_000, 4, 12
GROUP, UPDATES = 8, 4  # answers to a prompt, updates for a rollout
ARMS = {"with the sets": True, "without": False}


class Rollout(NamedTuple):
    """Prompts with answers ``[B, PROMPT + ANSWER]``; log-prob and set of each answer token."""

    tokens: Tensor
    log_probs: Tensor
    sets: SamplingMask


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that some tokens are likely
    return model


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, prompts: Tensor, top_p: float, generator: torch.Generator
) -> Rollout:
    """Answers drawn from the fewest tokens whose probabilities add up to ``top_p``."""
    tokens, log_probs, allowed = prompts, [], []
    for _ in range(ANSWER):
        p = model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1].softmax(-1)
        likely, ids = p.sort(descending=True)
        kept = torch.empty_like(p, dtype=torch.bool)
        kept.scatter_(1, ids, likely.cumsum(-1) - likely < top_p)
        p = torch.where(kept, p, 0.0)
        p /= p.sum(-1, keepdim=True)
        token = torch.multinomial(p, 1, generator=generator)
        tokens = torch.cat([tokens, token], -1)
        log_probs.append(p.gather(1, token).log())
        allowed.append(kept)
    sets = SamplingMask.from_bool(torch.stack(allowed, 1))
    return Rollout(tokens, torch.cat(log_probs, -1), sets)


def rising_pairs(tokens: Tensor) -> Tensor:
    """Share of the answer's neighbours that rise."""
    answers = tokens[:, PROMPT:]
    return (answers[:, 1:] > answers[:, :-1]).float().mean(-1)


def train(
    model: Qwen3ForCausalLM, use_sets: bool, top_p: float, rollouts: int
) -> list[dict[str, float]]:
    """One arm: of each rollout its reward, the first ratios, and the clipped share of tokens."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    head = LMHead.of(model)
    history = []
    for _ in range(rollouts):
        prompts = torch.randint(VOCABULARY, (16, PROMPT), generator=generator)
        rollout = sample(model, prompts.repeat_interleave(GROUP, 0), top_p, generator)
        rewards = rising_pairs(rollout.tokens)
        groups = rewards.view(-1, GROUP)
        spread = groups.std(-1, keepdim=True)
        advantages = ((groups - groups.mean(-1, keepdim=True)) / (spread + 1e-4)).flatten()
        clipped = 0.0
        for update in range(UPDATES):
            states = head.decoder(rollout.tokens, use_cache=False).last_hidden_state
            out = bapo_linear_loss(
                states[:, PROMPT - 1 : -1],
                head.weight,
                rollout.tokens[:, PROMPT:],
                rollout.log_probs,
                advantages,
                config=BAPOConfig.fixed(0.8, 1.2),
                sampling_mask=rollout.sets if use_sets else None,
            )
            ratios = (out.log_probs - rollout.log_probs).detach().exp()
            clipped += out.metrics["pg_clipfrac"].item() / UPDATES
            if update == 0:
                seen = {"mean ratio": ratios.mean().item(), "smallest ratio": ratios.min().item()}
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ids = len(rollout.sets.token_ids) / len(rollout.sets)
        history.append(seen | {"reward": rewards.mean().item(), "clipped": clipped, "ids": ids})
    return history


def summary(runs: dict[str, list[list[dict[str, float]]]], top_p: float) -> Table:
    """Of all rollouts of an arm, and the rewards of its seeds."""
    table = Table(title=f"Rollouts with top_p = {top_p}")
    for column in ("", *runs):
        table.add_column(column, justify="right" if column else "left")

    def of(key: str, rollouts: slice = slice(None)) -> list[list[float]]:
        return [[x[key] for run in seeds for x in run[rollouts]] for seeds in runs.values()]

    def spread(values: list[float]) -> str:
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.mean(values):.3f} ± {deviation:.3f}"

    def mean(key: str, digits: int) -> list[str]:
        return [f"{statistics.mean(x):.{digits}f}" for x in of(key)]

    table.add_row("mean ratio at the first update", *mean("mean ratio", 6))
    table.add_row("smallest", *(f"{min(x):.6f}" for x in of("smallest ratio")))
    table.add_row("share of tokens clipped, all updates", *mean("clipped", 3))
    table.add_row("mean size of a set", *mean("ids", 1))
    table.add_row("reward of the first rollout", *map(spread, of("reward", slice(1))))
    table.add_row("reward of the last rollout", *map(spread, of("reward", slice(-1, None))))
    return table


def main(seeds: int = 3, rollouts: int = 20, top_p: float = 0.8) -> None:
    """Trains both arms from the same models and prints what they measured."""
    runs: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in ARMS}
    for seed in track(range(seeds), description="training"):
        start = build_model(seed)
        for arm, use_sets in ARMS.items():
            runs[arm].append(train(copy.deepcopy(start), use_sets, top_p, rollouts))
    console = Console()
    console.print(summary(runs, top_p))
    console.print("Arms within a standard deviation of each other cannot be distinguished.")


if __name__ == "__main__":
    typer.run(main)
