"""Figures of the examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


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
