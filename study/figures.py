"""Figures of the study."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.plot import FIGURES, RC, save

from .arms import NO_CLIP, OF_SMOLLM2, ON_POLICY, SCENARIOS
from .compare import BASELINE, arms_of, complete_scenarios, paired
from .curves import FIRST_PANELS, PANELS, STYLES, training
from .runs import RULE_SCENARIO, WINDOW

RULE_LIMITS = 0.1, 0.04


def differences(runs: pd.DataFrame, of_the_toy: bool) -> Figure:
    """The end point: paired differences from the baseline, one panel per scenario."""
    scenarios = [s for s in complete_scenarios(runs, of_the_toy) if SCENARIOS[s].arms != ON_POLICY]
    arms = [arm for arm in arms_of(scenarios) if arm != BASELINE]
    figure, axes = plt.subplots(
        1, len(scenarios), figsize=(2.3 * len(scenarios) + 1.5, 3.6), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for scenario, ax in zip(scenarios, axes[0], strict=True):
        for place, arm in enumerate(reversed(arms)):
            if arm not in SCENARIOS[scenario].arms:
                continue
            d = paired(runs, scenario, arm)
            style = dict(color=STYLES[arm]["color"], marker="o" if d.separated else "|")
            ax.plot([d.low, d.high], [place, place], color=style["color"], linewidth=2)
            ax.plot(d.mean, place, markersize=6 if d.separated else 9, **style)
            ax.plot(d.by_seed, [place] * len(d.by_seed), "x", markersize=4, color="#222222")
        ax.set_xlim(max(ax.get_xlim()[0], -1), min(ax.get_xlim()[1], 1))
        ax.axvline(0, color="#222222", linewidth=0.8)
        ax.set_yticks(range(len(arms)), reversed(arms))
        ax.set_title(scenario)
    figure.supxlabel(
        f"held-out reward at the end, difference from {BASELINE}; scales differ", fontsize=10
    )
    return figure


def rule(runs: pd.DataFrame) -> Figure:
    """Predicted against measured change of the entropy, a point per update."""
    measured = runs[runs.scenario == RULE_SCENARIO].dropna(subset="rule")
    layout = dict(figsize=(12, 6), layout="constrained", sharex=True, sharey=True)
    figure, axes = plt.subplots(2, 4, **layout)
    for arm, ax in zip(OF_SMOLLM2, axes.flat, strict=True):
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
    predicted = "predicted: mean over prefixes of -Cov[log pi, A X], up to the factor eta"
    figure.supxlabel(predicted, fontsize=10)
    figure.supylabel("measured change of the entropy in the update, nats", fontsize=10)
    return figure


def of_study(runs: pd.DataFrame, folder: Path = FIGURES) -> list[Path]:
    """Writes the figures of docs/internals/study.md and of the README."""
    shown = runs[runs.scenario == "largest, staleness 32"]
    curves = {
        arm: {name: [r[name] for r in shown[shown.arm == arm].curves] for name in PANELS}
        for arm in OF_SMOLLM2
    }
    every = dict.fromkeys(PANELS, WINDOW)
    note = f"Lines: mean over seeds of the means over {WINDOW} updates. Bands: range over seeds."
    few = {arm: curves[arm] for arm in (NO_CLIP, BASELINE, "BAPO")}
    with mpl.rc_context(RC):
        figures = {
            "smollm2": training(few, every, note, FIRST_PANELS),
            "study_training": training(curves, every, note),
            "study_differences": differences(runs, of_the_toy=False),
            "study_of_the_toy": differences(runs, of_the_toy=True),
            "study_rule": rule(runs),
        }
        return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]
