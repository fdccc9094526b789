"""``python -m benchmarks.plot``: the figures of docs/internals/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd

from .reading import plain_losses, results
from .tables import machine

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
LEVELS = {"logits": "from logits", "hidden": "from hidden states"}
YARDSTICKS = "copy", "three matrix products"
# In the order of matplotlib's colours; the first is ours on the CPU and CUDA.
PROJECTS = "bapo_kernels c", "PyTorch", "TRL", "Liger", "cut-cross-entropy", "flash-attn", "QuACK"
PROJECTS += "verl", "bapo_kernels triton"
RC = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def plot(kind: str, folder: Path = FIGURES) -> Iterator[Path]:
    """Draws all figures if each level has a yardstick, ours and another project."""
    half = plain_losses(results(kind)).query("dtype == 'bfloat16'")
    projects = half.method.str.split().str[0].groupby(half.level).nunique()
    if any(projects.get(level, 0) < 3 for level in LEVELS):
        return
    models = half[half.sweep.isna()]
    first = models[models.model.str.startswith("Qwen3")]
    over_N, over_V = (pd.concat([half[half.sweep == sweep], first]) for sweep in "NV")
    memory = over_N[over_N.peak_bytes > 2**20].assign(MiB=lambda f: f.peak_bytes / 2**20)
    models = models[~models.method.isin(YARDSTICKS)]
    figures = {
        "time_over_tokens": ("Milliseconds, loss and gradients", over, over_N, "N", "ms"),
        "time_over_vocabulary": ("Milliseconds, loss and gradients", over, over_V, "V", "ms"),
        "memory_over_tokens": ("Peak MiB, loss and gradients", over, memory, "N", "MiB"),
        "roofline": ("Share of the roofline,", roofline, models),
        "speedup": ("Loss and gradients", speedup, models),
    }
    machines = [f"{LEVELS[level]}: {machine(f)}" for level, f in half.groupby("level", sort=False)]
    with mpl.rc_context(RC):
        for name, panels in figures.items():
            figure = _panels(*panels)
            figure.text(0.005, -0.02, "\n".join(machines), fontsize=7, color="#777777", va="top")
            yield save(figure, folder / f"{kind}_{name}.png")


def save(figure: plt.Figure, path: Path) -> Path:
    """Writes a figure and closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144, bbox_inches="tight")
    plt.close(figure)
    return path


def _panels(title: str, draw: Callable, frame: pd.DataFrame, *options: str) -> plt.Figure:
    """A figure with a panel per level."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for ax, (level, words) in zip(axes, LEVELS.items(), strict=True):
        of_level = frame[frame.level == level]
        draw(ax, of_level, _styles(of_level.method), *options)
        ax.set_title(f"{title} {words}")
    return figure


def _styles(methods: pd.Series[str]) -> dict[str, dict]:
    """By method: each variant of a project is lighter than the one before."""
    found = {name: dict(color="#222222", linestyle="--") for name in YARDSTICKS}
    for color, (project, marker) in enumerate(zip(PROJECTS, "ovPX*p8hD", strict=True)):
        for n, method in enumerate(sorted({m for m in methods if m.startswith(project)})):
            light = [1 - 0.6**n * (1 - part) for part in mpl.colors.to_rgb(f"C{color}")]
            found[method] = dict(color=light, marker=marker)
    return found


def _plain_numbers(axis: mpl.axis.Axis) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5), numticks=30))
    axis.set_major_formatter("{x:,g}")
    axis.axes.minorticks_off()


def over(ax: plt.Axes, frame: pd.DataFrame, styles: dict[str, dict], x: str, y: str) -> None:
    """One line per method over a size, both axes logarithmic."""
    lines = frame.pivot_table(y, x, "method")
    for method in lines.ffill().iloc[-1].sort_values(ascending=False).index:
        options = styles[method] | dict(linewidth=2.4 if method.startswith("bapo") else 1.3)
        ax.plot(lines[method].dropna(), label=method, markersize=5, **options)
    ax.set(xscale="log", yscale="log", xlabel={"N": "tokens", "V": "vocabulary"}[x])
    ticks = lines.index.map("{:,}".format)
    ax.set_xticks(lines.index, ticks, rotation=30 if x == "V" else 0)
    _plain_numbers(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def roofline(ax: plt.Axes, frame: pd.DataFrame, styles: dict[str, dict]) -> None:
    """Rate of each method as a share of the yardstick's, one row per model."""
    for method, rows in frame.groupby("method", sort=False):
        size = 90 if method.startswith("bapo") else 45
        ax.scatter(rows.share, rows.model, s=size, label=method, zorder=3, **styles[method])
    ax.axvline(1, color="#222222", linestyle="--", linewidth=1.2)
    ax.margins(y=0.15)
    ax.invert_yaxis()  # the first model is at the top
    ax.set_xscale("log" if frame.share.min() < 0.1 else "linear")
    ax.set_xlabel(f"rate, as a share of the {frame.yardstick.iloc[0]}")
    ax.xaxis.set_major_formatter("{x:.0%}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def speedup(ax: plt.Axes, frame: pd.DataFrame, styles: dict[str, dict]) -> None:
    """Time of each method relative to ours: the median over the models, and their range."""
    first = next(method for method in frame.method if method.startswith("bapo"))
    times = frame.pivot_table("ms", "model", "method")
    ratios = times.div(times[first], axis=0).drop(columns=first)
    ratios = ratios[ratios.median().sort_values(ascending=False).index]
    median, low, high = ratios.median(), ratios.min(), ratios.max()
    colors = [styles[method]["color"] for method in ratios]
    options = dict(xerr=[median - low, high - median], ecolor="#444444", capsize=2, height=0.65)
    ax.barh(ratios.columns, median - 1, left=1, color=colors, **options)
    for height, (ratio, end) in enumerate(zip(median, high, strict=True)):
        ax.text(max(end, 1), height, f"  {ratio:.3g} x", va="center", fontsize=9)
    ax.axvline(1, color=styles[first]["color"], linewidth=2.4)
    ax.set(xscale="log", xlim=(0.8 * low.min(), 1.6 * high.max()))
    _plain_numbers(ax.xaxis)
    ax.set_xlabel(f"time relative to {first}; whiskers: range over the models")
    ax.grid(visible=False, axis="y")


if __name__ == "__main__":
    print(*plot("cpu"), *plot("cuda"), sep="\n")
