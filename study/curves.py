"""The figure of a training, of the demo's and of the study's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .arms import NO_CLIP
from .metrics import TARGET

STYLES = {
    "fixed 0.8/1.2": dict(color="#222222", linestyle="-"),
    "clip-higher 0.8/1.28": dict(color="#888888", linestyle="--"),
    "fixed 0.6/1.2": dict(color="#b8860b", linestyle="-"),
    "fixed 0.6/3.0": dict(color="#e08a2e", linestyle="--"),
    "fixed 0.9/3.0": dict(color="#2e8b57", linestyle="-."),
    "fixed 0.8/2.0, dual clip 3": dict(color="#8e44ad", linestyle="-."),
    "CISPO 0/5": dict(color="#d35fa8", linestyle="--"),
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
FIRST_PANELS = "held_out", "entropy", "bapo_clip_high", "clipped_negative"  # of the README
Curves = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]  # by arm and name, one per seed


def training(
    curves: Curves, every: Mapping[str, int], note: str, panels: Collection[str] = PANELS
) -> Figure:
    """A panel per quantity: the mean over seeds, in a band from the least to the greatest.

    Args:
        every: how many updates lie between two points of a curve.
    """
    rows = len(panels) // 4
    size = dict(figsize=(17, 0.4 + 3.5 * rows), squeeze=False)
    figure, axes = plt.subplots(rows, 4, **size, layout="constrained", sharex=True)
    for ax, name in zip(axes.flat, panels, strict=True):
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
        ax.set_title(PANELS[name])
    for ax in axes[-1]:
        ax.set_xlabel("update")
    handles = axes.flat[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(curves))
    figure.supxlabel(note, fontsize=9)
    return figure
