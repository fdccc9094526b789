"""Figures of the demo and of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.plot import FIGURES, RC, save

from .arms import ARMS, DEMO, NO_CLIP
from .compare import BASELINE, compared, paired
from .runs import RULE_SCENARIO, WINDOW
from .training import TARGET

STYLES = {
    "fixed 0.8/1.2": dict(color="#222222", linestyle="-"),
    "clip-higher 0.8/1.28": dict(color="#888888", linestyle="--"),
    "fixed 0.6/1.2": dict(color="#b8860b", linestyle="-"),
    "fixed 0.6/3.0": dict(color="#e08a2e", linestyle="--"),
    "fixed 0.9/3.0": dict(color="#2e8b57", linestyle="-."),
    NO_CLIP: dict(color="#c0392b", linestyle=":"),
    "BAPO": dict(color="#0b5fc0", linestyle="-"),
    "BAPO, gradient": dict(color="#5aa9f2", linestyle="--"),
    "BAPO, recipe": dict(color="#0a9fb3", linestyle="-."),
}
PANELS = {
    "bapo_pos_share_start": "Share of positive tokens at the start",
    "bapo_clip_high": "Upper clip bound",
    "bapo_clip_low": "Lower clip bound",
    "entropy": "Entropy of the policy, nats per token",
    "clipped_positive": "Clipped, of tokens with A > 0",
    "clipped_negative": "Clipped, of tokens with A < 0",
    "held_out": "Held-out reward",
    "grad_norm": "Gradient norm, before it is clipped to 1",
}
RULE_LIMITS = 0.1, 0.04
Curves = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]  # by arm and name, one per seed


def training(curves: Curves, every: Mapping[str, int], note: str) -> Figure:
    """A panel per quantity: the mean over seeds, in a band from the least to the greatest.

    Args:
        every: how many updates lie between two points of a curve.
    """
    figure, axes = plt.subplots(2, 4, figsize=(17, 7.4), layout="constrained", sharex=True)
    for ax, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for arm, of_arm in curves.items():
            runs = np.array(of_arm[name])
            if arm == NO_CLIP and name.startswith("bapo_clip"):
                continue  # there are no bounds to draw
            updates = (np.arange(runs.shape[1]) + 1) * every[name]
            ax.plot(updates, runs.mean(0), label=arm, linewidth=1.8, **STYLES[arm])
            if len(runs) > 1:
                band = runs.min(0), runs.max(0)
                ax.fill_between(updates, *band, color=STYLES[arm]["color"], alpha=0.12, lw=0)
        if "share" in name:
            ax.axhline(TARGET, color="#c0392b", linewidth=1)
            ax.text(1.0, TARGET, "target ", color="#c0392b", ha="right", va="bottom",
                    transform=ax.get_yaxis_transform())  # fmt: skip
        if name == "grad_norm":
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")
        if name == "entropy":  # without clipping it goes anywhere
            others = [point for arm in set(curves) - {NO_CLIP} for run in curves[arm][name]
                      for point in run]  # fmt: skip
            ax.set_ylim(0.9 * min(others), 1.1 * max(others))
        ax.set_title(title)
    for ax in axes[1]:
        ax.set_xlabel("update")
    handles = axes.flat[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(curves))
    figure.supxlabel(note, fontsize=9)
    return figure


def differences(runs: pd.DataFrame) -> Figure:
    """The end point: paired differences from the baseline, one panel per scenario."""
    scenarios = compared(runs)
    arms = [arm for arm in ARMS if arm != BASELINE]
    figure, axes = plt.subplots(
        1, len(scenarios), figsize=(2.3 * len(scenarios) + 1.5, 3.6), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for scenario, ax in zip(scenarios, axes[0], strict=True):
        for place, arm in enumerate(reversed(arms)):
            d = paired(runs, scenario, arm)
            style = dict(color=STYLES[arm]["color"], marker="o" if d.separated else "|")
            ax.plot([d.low, d.high], [place, place], color=style["color"], linewidth=2)
            ax.plot(d.mean, place, markersize=6 if d.separated else 9, **style)
        ax.axvline(0, color="#222222", linewidth=0.8)
        ax.set_yticks(range(len(arms)), reversed(arms))
        ax.set_title(scenario)
    figure.supxlabel(f"held-out reward at the end, difference from {BASELINE}", fontsize=10)
    return figure


def rule(runs: pd.DataFrame) -> Figure:
    """Predicted against measured change of the entropy, a point per update."""
    measured = runs[runs.scenario == RULE_SCENARIO].dropna(subset="rule")
    figure, axes = plt.subplots(
        3, 3, figsize=(10, 8.4), sharex=True, sharey=True, layout="constrained"
    )
    for arm, ax in zip(ARMS, axes.flat, strict=True):
        points = np.concatenate([np.array(r) for r in measured[measured.arm == arm].rule])
        ax.plot(*points.T, ".", markersize=2.5, alpha=0.5, color=STYLES[arm]["color"])
        ax.axhline(0, color="#222222", linewidth=0.6)
        ax.axvline(0, color="#222222", linewidth=0.6)
        outside = (np.abs(points) > RULE_LIMITS).any(-1).sum()
        ax.set_title(arm)
        words = f"{outside} of {len(points)} outside"
        ax.text(0.98, 0.03, words, ha="right", fontsize=8, transform=ax.transAxes)
    x, y = RULE_LIMITS
    ax.set(xlim=(-x, x), ylim=(-y, y))
    figure.supxlabel(
        "predicted: mean over prefixes of -Cov[log pi, A X], up to the factor eta", fontsize=10
    )
    figure.supylabel("measured change of the entropy in the update, nats", fontsize=10)
    return figure


def of_study(runs: pd.DataFrame, folder: Path = FIGURES) -> list[Path]:
    """Writes the figures of docs/study.md."""
    shown = runs[runs.scenario == RULE_SCENARIO]
    curves = {
        arm: {name: [r[name] for r in shown[shown.arm == arm].curves] for name in PANELS}
        for arm in DEMO
    }
    note = f"Lines: mean over seeds of the means over {WINDOW} updates. Bands: range over seeds."
    with mpl.rc_context(RC):
        figures = {
            "study_training": training(curves, dict.fromkeys(PANELS, WINDOW), note),
            "study_differences": differences(runs),
            "study_rule": rule(runs),
        }
        return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]
