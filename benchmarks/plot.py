"""Figures of docs/internals/benchmarks.md, drawn from records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from .frames import latest, plain_losses

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
LEVELS = {"logits": "from logits", "hidden": "from hidden states"}
YARDSTICKS = "copy", "three matrix products"
# One colour per project, one shade and marker per variant.
STYLES = {
    "copy": dict(color="#222222", linestyle="--", marker=""),
    "three matrix products": dict(color="#222222", linestyle="--", marker=""),
    "bapo_kernels cpu": dict(color="#0b5fc0", marker="o"),
    "bapo_kernels cpu, in place": dict(color="#5aa9f2", marker="s"),
    "bapo_kernels cpu, live": dict(color="#5aa9f2", marker="s"),
    "bapo_kernels cuda": dict(color="#0b5fc0", marker="o"),
    "bapo_kernels cuda, in place": dict(color="#5aa9f2", marker="s"),
    "bapo_kernels cuda, one chunk": dict(color="#5aa9f2", marker="s"),
    "bapo_kernels triton": dict(color="#0a9fb3", marker="D"),
    "bapo_kernels triton, in place": dict(color="#6ed3e0", marker="d"),
    "bapo_kernels triton, one chunk": dict(color="#6ed3e0", marker="d"),
    "PyTorch reference": dict(color="#7a3e00", marker="v"),
    "PyTorch reference, compiled": dict(color="#b06a1d", marker="^"),
    "PyTorch cross_entropy": dict(color="#e08a2e", marker="v"),
    "PyTorch cross_entropy, compiled": dict(color="#f2b872", marker="^"),
    "PyTorch linear_cross_entropy": dict(color="#a04000", marker="<"),
    "TRL selective_log_softmax": dict(color="#2e8b57", marker="P"),
    "TRL chunked head": dict(color="#2e8b57", marker="P"),
    "TRL Triton": dict(color="#7cc49a", marker="P"),
    "Liger cross entropy": dict(color="#c0392b", marker="X"),
    "Liger GRPO": dict(color="#e57368", marker="X"),
    "Liger scaled cross entropy": dict(color="#c0392b", marker="X"),
    "Liger fused linear GRPO": dict(color="#e57368", marker="X"),
    "cut-cross-entropy": dict(color="#5b2c83", marker="*"),
    "cut-cross-entropy, compiled": dict(color="#8e5bb8", marker="*"),
    "verl logprobs_from_logits": dict(color="#6b6b6b", marker="h"),
    "verl chunked head": dict(color="#6b6b6b", marker="h"),
    "verl Triton head": dict(color="#a5a5a5", marker="h"),
    "flash-attn cross entropy": dict(color="#b8860b", marker="p"),
    "QuACK cross entropy": dict(color="#d16ba5", marker="8"),
}
RC = {
    "font.size": 10,
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


def plot(device: str, folder: Path = FIGURES) -> list[Path]:
    """Draws every figure that the records of a device allow."""
    frame = latest(device)
    if frame.empty:
        return []
    paths = []
    with mpl.rc_context(RC):
        for name, figure in figures(frame):
            by_level = [frame[frame.level == level].iloc[-1] for level in LEVELS]
            machines = [f"{last.machine}; torch {last.torch}" for last in by_level]
            if len(set(machines)) > 1:
                machines = list(map("{}: {}".format, LEVELS.values(), machines))
            words = "\n".join(dict.fromkeys(machines))
            figure.text(0.005, -0.02, words, fontsize=8, color="#777777", va="top")
            paths.append(save(figure, folder / f"{device}_{name}.png"))
    return paths


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure and closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144, bbox_inches="tight")
    plt.close(figure)
    return path


def figures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Names and figures."""
    half = plain_losses(frame)
    half = half[half["dtype"] == "bfloat16"]
    if not all(_comparable(half[half.level == level]) for level in LEVELS):
        return
    model = half[half.sweep.isna() & half.model.str.startswith("Qwen3")]
    over_N = pd.concat([half[half.sweep == "N"], model])
    over_V = pd.concat([half[half.sweep == "V"], model])
    yield "time_over_tokens", over(over_N, "N", "ms", "tokens", "Milliseconds")
    yield "time_over_vocabulary", over(over_V, "V", "ms", "vocabulary", "Milliseconds")
    memory = over_N[over_N.peak_bytes > 2**20].assign(MiB=lambda f: f.peak_bytes / 2**20)
    yield "memory_over_tokens", over(memory, "N", "MiB", "tokens", "Peak MiB")
    models = half[half.sweep.isna()]
    yield "roofline", roofline(models)
    yield "speedup", speedup(models)


def _comparable(of_level: pd.DataFrame) -> bool:
    """Whether ours and something else have been measured."""
    ours = of_level.method.str.startswith("bapo")
    return bool(ours.any() and of_level.method[~ours].nunique() > 1)


def over(frame: pd.DataFrame, x: str, y: str, x_label: str, y_label: str) -> Figure:
    """One line per method over a size, one panel per level, both axes logarithmic."""
    figure, panels = _panels(frame, 4.4)
    for ax, level, of_level in panels:
        ends = of_level.sort_values(x).groupby("method")[y].last().sort_values(ascending=False)
        for method in ends.index:  # so that the legend has the order of the lines
            line = of_level[of_level.method == method].sort_values(x)
            width = 2.4 if method.startswith("bapo") else 1.3
            ax.plot(line[x], line[y], label=method, linewidth=width, markersize=5, **STYLES[method])
        ax.set(xscale="log", yscale="log", xlabel=x_label)
        ax.set_title(f"{y_label}, loss and gradients {LEVELS[level]}")
        ticks = sorted(of_level[x].unique())
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30 if x == "V" else 0)
        _plain_numbers(ax.yaxis)
        ax.minorticks_off()
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return figure


def _panels(
    frame: pd.DataFrame, height: float
) -> tuple[Figure, Iterator[tuple[Axes, str, pd.DataFrame]]]:
    """A figure with a panel per level, and what belongs in each."""
    figure, axes = plt.subplots(1, 2, figsize=(12, height), layout="constrained")
    levels = zip(axes, LEVELS, strict=True)
    return figure, ((ax, level, frame[frame.level == level]) for ax, level in levels)


def _plain_numbers(axis: Axis) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5), numticks=30))
    axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:,g}"))


def roofline(frame: pd.DataFrame) -> Figure:
    """Rate of each method as a share of the yardstick's, one row per model."""
    figure, panels = _panels(frame[~frame.method.isin(YARDSTICKS)], 3.8)
    for ax, level, of_level in panels:
        models = list(of_level.model.unique())[::-1]
        for method, rows in of_level.groupby("method", sort=False):
            size = 90 if str(method).startswith("bapo") else 45
            style = {k: v for k, v in STYLES[str(method)].items() if k != "linestyle"}
            heights = [models.index(model) for model in rows.model]
            ax.scatter(100 * rows.share, heights, s=size, label=method, zorder=3, **style)
        ax.axvline(100, color="#222222", linestyle="--", linewidth=1.2)
        ax.set_yticks(range(len(models)), models)
        ax.set(xscale="log" if level == "logits" else "linear", ylim=(-0.6, len(models) - 0.4))
        unit = "copy" if level == "logits" else "bare matrix product"
        ax.set_xlabel(f"% of the rate of a {unit}")
        ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:g} %"))
        ax.set_title(f"Share of the roofline, {LEVELS[level]}")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return figure


def speedup(frame: pd.DataFrame) -> Figure:
    """Time of each method relative to ours: the median over the models, and their range."""
    figure, panels = _panels(frame[~frame.method.isin(YARDSTICKS)], 3.6)
    for ax, level, of_level in panels:
        first = next(method for method in of_level.method if method.startswith("bapo"))
        times = of_level.pivot_table(index="model", columns="method", values="ms", observed=True)
        ratios = times.div(times[first], axis=0).drop(columns=first)
        order = ratios.median().sort_values(ascending=False).index
        for height, method in enumerate(order):
            of_method = ratios[method].dropna()
            median, low, high = of_method.median(), of_method.min(), of_method.max()
            whiskers = dict(elinewidth=1, ecolor="#444444", capsize=2)
            options = dict(xerr=[[median - low], [high - median]], error_kw=whiskers, height=0.65)
            ax.barh(height, median - 1, left=1, color=STYLES[method]["color"], **options)
            ax.text(max(high, 1), height, f"  {median:.3g} x", va="center", fontsize=9)
        ax.axvline(1, color=STYLES[first]["color"], linewidth=2.4)
        ax.set_yticks(range(len(order)), order)
        ax.set(xscale="log", xlim=(0.8 * ratios.min().min(), 1.6 * ratios.max().max()))
        _plain_numbers(ax.xaxis)
        ax.minorticks_off()
        ax.set_xlabel(f"time relative to {first}; whiskers: range over the models")
        ax.set_title(f"Loss and gradients {LEVELS[level]}")
        ax.grid(visible=False, axis="y")
    return figure
