"""Draws the classes of rows over the ratio: ``python docs/draw_classes.py``.

A > 0 on the left and A < 0 on the right, with the ranges of the paper's preset.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bapo_kernels import BAPOConfig

FIGURES = Path(__file__).parent / "figures"
COLORS = {"kept": "#d5ecd9", "undecided": "#ffe3ae", "clipped": "#dddddd"}
MEANING = {
    "kept": "final gradient",
    "undecided": "depends on\nthe bounds",
    "clipped": "zero gradient",
}
RC = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def surrogate(r: np.ndarray, A: float, lower: float, upper: float) -> np.ndarray:
    """J of Algorithm 1, line 20."""
    return np.minimum(r * A, np.clip(r, lower, upper) * A)


def draw(ax: Axes, A: float, config: BAPOConfig, right: float) -> None:
    """One sign of the advantage: bands of the classes, and J at both ends of the bound's range."""
    if A > 0:
        name, first, last = "c_high", config.ratio_upper_start, config.ratio_upper_max
        classes = ("kept", "undecided", "clipped")
    else:
        name, first, last = "c_low", config.ratio_lower_start, config.ratio_lower_max
        classes = ("clipped", "undecided", "kept")
    edges = [0.0, first, last, right]
    for kind, left, end in zip(classes, edges[:-1], edges[1:], strict=True):
        ax.axvspan(left, end, color=COLORS[kind], linewidth=0)
        place = dict(transform=ax.get_xaxis_transform(), ha="center", va="top")
        ax.text((left + end) / 2, 1.17, f"{kind}:\n{MEANING[kind]}", **place)
    r = np.union1d(np.linspace(0, right, 400), edges)
    styles = ({"color": "#0b5fc0"}, {"color": "#c0392b", "linestyle": "--"})
    ends = (
        (f"starting bounds, {name} = {first}", config.ratio_lower_start, config.ratio_upper_start),
        (f"maximum bounds, {name} = {last}", config.ratio_lower_max, config.ratio_upper_max),
    )
    for (label, *bounds), style in zip(ends, styles, strict=True):
        ax.plot(r, surrogate(r, A, *bounds), linewidth=2.4, label=label, **style)
    for bound in (first, last):
        ax.axvline(bound, color="#555555", linewidth=1, linestyle=":")
    ax.set_xlim(0, right)
    ax.set_xticks(sorted({0, 1, first, last}), [f"{x:g}" for x in sorted({0, 1, first, last})])
    ax.set_xlabel("ratio r")
    ax.set_title(f"{'Positive' if A > 0 else 'Negative'} advantage, A = {A:+g}", pad=58)
    ax.legend(loc="lower right" if A > 0 else "lower left", frameon=True, framealpha=0.9)


def main() -> None:
    """Writes classes_of_rows.png."""
    FIGURES.mkdir(exist_ok=True)
    with mpl.rc_context(RC):
        figure, (positive, negative) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        draw(positive, 1.0, BAPOConfig.paper(), right=4.2)
        draw(negative, -1.0, BAPOConfig.paper(), right=1.5)
        positive.set_ylabel("surrogate J = min(r A, clip(r) A)")
        figure.savefig(FIGURES / "classes_of_rows.png", dpi=144)


if __name__ == "__main__":
    main()
