"""What BAPO does to each token: ratios and bounds, clipped shares by sign, entropy.

A small policy learns off-policy from rollouts that serve eight updates each. The picture has the
ratios of the last update over its log-probs, with the bounds that the search found, then the
clipped shares of both signs and the entropy over the updates.

    python examples/per_token.py --out out
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import typer

from bapo_kernels import BAPOOutput, bapo_loss, log_probs

B, S, V = 64, 8, 500
COLOURS = {"A > 0": "#1b7837", "A < 0": "#b2182b"}


def train(rollouts: int) -> tuple[pd.DataFrame, pd.DataFrame, BAPOOutput]:
    """Metrics of each update; tokens of the last one; its output."""
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Embedding(S, 32), torch.nn.Linear(32, V))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    positions = torch.arange(S).expand(B, S)
    updates = []
    for _ in range(rollouts):
        with torch.no_grad():
            labels = torch.distributions.Categorical(logits=policy(positions)).sample()
            old_log_probs, _ = log_probs(policy(positions), labels)
        reward = (labels % 10 == 0).float().mean(-1)
        advantages = (reward - reward.mean()) / (reward.std() + 1e-6) - 0.3
        for _ in range(8):
            out = bapo_loss(policy(positions), labels, old_log_probs, advantages)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            updates.append({name: value.item() for name, value in out.metrics.items()})
    tokens = {
        "log_prob": out.log_probs.detach(),  # it has no gradient of its own
        "ratio": (out.log_probs.detach() - old_log_probs).exp(),
        "advantage": advantages[:, None].expand(B, S),
    }
    return pd.DataFrame(updates), pd.DataFrame({k: v.flatten() for k, v in tokens.items()}), out


def plot(updates: pd.DataFrame, tokens: pd.DataFrame, out: BAPOOutput, path: Path) -> Path:
    """Three panels: tokens of the last update, clipped shares by sign, entropy."""
    figure, (ratios, clipped, entropy) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    signs = {"A > 0": tokens[tokens.advantage > 0], "A < 0": tokens[tokens.advantage < 0]}
    for (name, some), bound in zip(signs.items(), out.bounds[::-1], strict=True):
        ratios.scatter(some.log_prob, some.ratio, s=8, alpha=0.6, label=name, color=COLOURS[name])
        ratios.axhline(bound.item(), color=COLOURS[name], lw=1, ls="--")
    ratios.set(yscale="log", xlabel="log-prob of the token", ylabel="ratio")
    ratios.set_title("Ratios in the last update, and the bounds of either sign")
    ratios.legend(frameon=False)
    shares = {"A > 0": "pg_clipfrac_pos", "A < 0": "pg_clipfrac_neg"}
    for name, metric in shares.items():
        clipped.plot(updates[metric], label=name, color=COLOURS[name])
    clipped.fill_between(updates.index, updates.bapo_acted, alpha=0.12, step="mid", color="black")
    clipped.set(xlabel="update", ylabel="share", ylim=(0, 1))
    clipped.set_title(f"Clipped tokens; grey: the search acts ({updates.bapo_acted.mean():.0%})")
    clipped.legend(frameon=False)
    entropy.plot(updates.entropy, color="#333333")
    entropy.set(xlabel="update", ylabel="nats", title="Entropy")
    for axis in (ratios, clipped, entropy):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(out: Path = Path("out"), rollouts: int = 10) -> None:
    """Trains, and draws the figure."""
    out.mkdir(parents=True, exist_ok=True)
    print(plot(*train(rollouts), out / "per_token.png"))


if __name__ == "__main__":
    typer.run(main)
