"""Off-policy reinforcement learning with verifiable rewards, with three ways to clip.

A small Qwen3 decoder learns to add. After a short supervised warm-up it gets some of the sums
right; from then on the only signal is whether a sampled answer is correct. Every batch of rollouts
is used for eight updates, so the policy moves away from the one that sampled. This is the
off-policy setting that BAPO (arXiv 2510.18927) is made for. For each seed all arms start from the
same warm model and see the same prompts; they differ in the clip bounds of the loss alone:

    fixed        0.8 .. 1.2, PPO and GRPO
    clip-higher  0.8 .. 1.28, DAPO
    BAPO         searched at every update (preset of the paper)

    python examples/offpolicy_rlvr.py --out out
"""

from __future__ import annotations

import copy
import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from plots import plot_training
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_kernels import BAPOConfig, bapo_loss, log_probs

DIGITS = 2
ALPHABET = "0123456789+="
PROMPT = 2 * DIGITS + 2
ANSWER = DIGITS + 1
ARMS = {
    "fixed 0.8/1.2": BAPOConfig.fixed(0.8, 1.2),
    "clip-higher 0.8/1.28": BAPOConfig.fixed(0.8, 1.28),
    "BAPO": BAPOConfig.paper(),
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the experiment."""

    warmup_reward: float = 0.4
    warmup_steps: int = 600
    warmup_batch: int = 256
    warmup_lr: float = 1e-3
    rollouts: int = 40
    prompts: int = 48
    group: int = 8
    updates: int = 8
    lr: float = 1e-4
    held_out: int = 512


def sums(count: int, generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Prompts ``a+b=`` and their answers, last digit first, as token ids.

    A fifth of all pairs is held out: never trained on, neither in warm-up nor in rollouts.
    """
    a, b = torch.randint(10**DIGITS, (2, 8 * count), generator=generator)
    kept = (((37 * a + 53 * b) % 97 < 20) == held_out).nonzero()[:count, 0]
    a, b = a[kept], b[kept]

    def digits(number: Tensor, width: int) -> Tensor:
        return torch.stack([number // 10**k % 10 for k in range(width)], -1)

    plus, equals = (torch.full((count, 1), ALPHABET.index(c)) for c in "+=")
    prompts = [digits(a, DIGITS).flip(-1), plus, digits(b, DIGITS).flip(-1), equals]
    return torch.cat(prompts, -1), digits(a + b, ANSWER)


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
    )
    return Qwen3ForCausalLM(config)


def answer_logits(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of the answer tokens: those of the positions one before them."""
    return model(tokens, use_cache=False).logits[:, PROMPT - 1 : -1]


def warm_up(seed: int, settings: Settings) -> Qwen3ForCausalLM:
    """Next-token training on correct answers, stopped once some sums are correct."""
    torch.manual_seed(seed)
    model = build_model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warmup_lr)
    for step in range(settings.warmup_steps):
        prompts, answers = sums(settings.warmup_batch, generator)
        if step % 10 == 0 and exact_match(model, prompts, answers) >= settings.warmup_reward:
            break
        logp, _ = log_probs(answer_logits(model, torch.cat([prompts, answers], -1)), answers)
        optimizer.zero_grad()
        (-logp.mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: Tensor, generator: torch.Generator | None) -> Tensor:
    """Answers sampled token by token; the most likely tokens without a generator."""
    tokens = prompts
    for _ in range(ANSWER):
        logits = model(tokens, use_cache=False).logits[:, -1]
        if generator is None:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, token], -1)
    return tokens[:, PROMPT:]


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Rewards relative to the other answers to the same prompt (GRPO)."""
    grouped = rewards.view(-1, group)
    spread = grouped.std(-1, keepdim=True)
    return ((grouped - grouped.mean(-1, keepdim=True)) / (spread + 1e-4)).flatten()


def train(model: Qwen3ForCausalLM, arm: str, seed: int, settings: Settings, tick) -> list[dict]:
    """One arm of one seed: rollouts, each used for several updates. Returns one row per update."""
    generator = torch.Generator().manual_seed(1000 + seed)
    held_out = held_out_sums(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    rows = []
    for rollout in range(settings.rollouts):
        prompts, answers = sums(settings.prompts, generator)
        prompts = prompts.repeat_interleave(settings.group, 0)
        answers = answers.repeat_interleave(settings.group, 0)
        sampled = sample(model, prompts, generator)
        rewards = (sampled == answers).all(-1).float()
        advantages = group_advantages(rewards, settings.group)
        tokens = torch.cat([prompts, sampled], -1)
        with torch.no_grad():
            old_log_probs, _ = log_probs(answer_logits(model, tokens), sampled)
        held_out_reward = exact_match(model, *held_out)
        for update in range(settings.updates):
            out = bapo_loss(
                answer_logits(model, tokens), sampled, old_log_probs, advantages, config=ARMS[arm]
            )
            optimizer.zero_grad()
            out.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rows.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "update": rollout * settings.updates + update,
                    "held_out_reward": held_out_reward,
                    "training_reward": rewards.mean().item(),
                    "grad_norm": norm.item(),
                    **{name: value.item() for name, value in out.metrics.items()},
                }
            )
        tick()
    rows[-1]["held_out_reward"] = exact_match(model, *held_out)
    return rows


def held_out_sums(settings: Settings) -> tuple[Tensor, Tensor]:
    return sums(settings.held_out, torch.Generator().manual_seed(99), held_out=True)


def exact_match(model: Qwen3ForCausalLM, prompts: Tensor, answers: Tensor) -> float:
    return (sample(model, prompts, None) == answers).all(-1).float().mean().item()


def summary(rows: list[dict], start: list[float]) -> Table:
    table = Table(title="Held-out exact match, mean and standard deviation over seeds")
    for column in ("arm", "after warm-up", "at the end", "best", "entropy at the end"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in ARMS:
        runs: dict[int, list[dict]] = {}
        for row in rows:
            if row["arm"] == arm:
                runs.setdefault(row["seed"], []).append(row)
        ends = [run[-1]["held_out_reward"] for run in runs.values()]
        best = [max(row["held_out_reward"] for row in run) for run in runs.values()]
        entropy = [run[-1]["entropy"] for run in runs.values()]
        cells = (mean_std(v) for v in (start, ends, best, entropy))
        table.add_row(arm, *cells)
    return table


def mean_std(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def main(out: Path = Path("out"), seeds: int = 3, rollouts: int = 40, quick: bool = False) -> None:
    """Trains every arm for every seed; writes a CSV and a figure, prints a table."""
    settings = Settings(rollouts=rollouts)
    if quick:
        seeds, settings = 1, Settings(warmup_steps=60, rollouts=2)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    start = []
    held_out = held_out_sums(settings)
    with Progress() as progress:
        task = progress.add_task("training", total=seeds * len(ARMS) * settings.rollouts)
        for seed in range(seeds):
            progress.update(task, description=f"seed {seed}, warm-up")
            warm = warm_up(seed, settings)
            start.append(exact_match(warm, *held_out))
            for arm in ARMS:
                progress.update(task, description=f"seed {seed}, {arm}")
                model = copy.deepcopy(warm)
                rows += train(model, arm, seed, settings, lambda: progress.advance(task))
    with (out / "offpolicy_rlvr.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    plot_training(rows, list(ARMS), out / "offpolicy_rlvr.png")
    console = Console()
    console.print(summary(rows, start))
    console.print("Arms within a standard deviation of each other cannot be distinguished.")
    console.print(f"Wrote offpolicy_rlvr.csv and offpolicy_rlvr.png to {out}/")


if __name__ == "__main__":
    typer.run(main)
