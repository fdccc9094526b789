"""Figures of the examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

PANELS = {
    "held_out_reward": "Held-out exact match (greedy)",
    "training_reward": "Reward of the rollouts",
    "entropy": "Entropy of the policy (nats per token)",
    "bapo_pos_share": "Share of positive tokens in the loss",
    "bapo_clip_high": "Upper clip bound",
    "bapo_clip_low": "Lower clip bound",
    "pg_clipfrac": "Share of tokens clipped",
    "grad_norm": "Gradient norm",
}


def plot_training(rows: Sequence[dict], arms: Sequence[str], path: Path) -> None:
    """One panel per quantity: mean over seeds, band from the smallest to the largest."""
    figure, axes = plt.subplots(2, 4, figsize=(18, 8), sharex=True)
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for arm, style in zip(arms, ("-", "--", ":"), strict=True):
            seeds = sorted({row["seed"] for row in rows if row["arm"] == arm})
            runs = np.array(
                [[r[name] for r in rows if r["arm"] == arm and r["seed"] == s] for s in seeds]
            )
            smooth = np.array([smoothed(run) for run in runs])
            updates = np.arange(runs.shape[1])
            (line,) = axis.plot(updates, smooth.mean(0), label=arm, linestyle=style, linewidth=2)
            axis.fill_between(
                updates, smooth.min(0), smooth.max(0), color=line.get_color(), alpha=0.15
            )
        axis.set_title(title, fontsize=11)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("update (every 8 use the same rollouts)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(arms), fontsize=12, frameon=False)
    figure.text(
        0.5,
        0.005,
        "Lines: mean over seeds, running mean over 8 updates. Bands: range over seeds.",
        ha="center",
    )
    figure.tight_layout(rect=(0, 0.02, 1, 0.94))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smoothed(values: np.ndarray, window: int = 8) -> np.ndarray:
    """Running mean over the last ``window`` values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_before_after(records: Sequence[dict], path: Path) -> None:
    """Time and peak memory of each way to compute the loss, side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    ways = list(dict.fromkeys(r["way"] for r in records))
    height = 0.8 / len(ways)
    for axis, key, title in (
        (axes[0], "milliseconds", "Loss and gradient, milliseconds (log scale)"),
        (axes[1], "peak_mib", "Peak extra memory, MiB"),
    ):
        for i, way in enumerate(ways):
            values = [
                next(r[key] for r in records if (r["dtype"], r["way"]) == (d, way)) for d in dtypes
            ]
            places = np.arange(len(dtypes)) + i * height
            bars = axis.barh(places, values, height=height * 0.9, label=way)
            axis.bar_label(bars, [f"{v:,.0f}" for v in values], padding=4, fontsize=9)
        axis.set_yticks(np.arange(len(dtypes)) + height * (len(ways) - 1) / 2, dtypes)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=11)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(ways), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
