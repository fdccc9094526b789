"""Figures of ``docs/internals/numerics.md``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plot import FIGURES, RC, STYLES, save
from ..records import Record
from .decisions import BITS, MARGINS
from .errors import DTYPES, ROWS, VOCABULARIES

KEY = ("part", "preset", "dtype", "V", "H", "rows")
BUDGET = "our error budget"
CURVES = STYLES | {
    "PyTorch log_softmax": dict(color="#7a3e00", marker="v"),
    BUDGET: dict(color="#222222", linestyle="--", marker=""),
}
LARGE = 151_936
FLOOR = 1e-9  # smaller errors are drawn here


def frames(records: list[Record]) -> tuple[pd.DataFrame, dict[str, Record]]:
    """The last errors by case, method and quantity, and the last decisions by preset."""
    last = {tuple(r.get(k) for k in KEY): r for r in records}.values()
    rows = []
    for record in (r for r in last if r["part"] != "decisions"):
        budget = {name: [value, float("nan")] for name, value in record["budget"].items()}
        for method, errors in {**record["errors"], BUDGET: budget}.items():
            for quantity, error in errors.items():
                absolute, relative = error or (float("nan"), float("nan"))
                case = {k: record.get(k) for k in KEY}
                numbers = {"error": absolute, "relative": relative, "finite": error is not None}
                rows.append({**case, "method": method, "quantity": quantity, **numbers})
    return pd.DataFrame(rows), {r["preset"]: r for r in last if r["part"] == "decisions"}


def draw(records: list[Record], folder: Path = FIGURES) -> list[Path]:
    """Writes every figure."""
    errors, decisions = frames(records)
    paths = []
    with mpl.rc_context(RC):
        for name, figure in (
            ("errors", figure_of_errors(errors)),
            ("vocabulary", figure_over_vocabulary(errors)),
            ("decisions", figure_of_decisions(decisions)),
        ):
            paths.append(save(figure, folder / f"numerics_{name}.png"))
    return paths


def lines(ax: Axes, frame: pd.DataFrame, x: str, y: str, order: list[Any]) -> None:
    """One line per method over column ``x``, whose values are in ``order``."""
    for method in (w for w in CURVES if w in set(frame.method)):
        values = frame[frame.method == method].set_index(x)[y].reindex(order).clip(lower=FLOOR)
        width = 2.4 if method.startswith("bapo") else 1.3
        label = method if values.notna().any() else None
        style = CURVES[method] | dict(linewidth=width, markersize=5)
        ax.plot(range(len(order)), values, label=label, **style)
    ax.set_yscale("log")
    names = [f"{v:,}" if isinstance(v, int) else v for v in order]
    ax.set_xticks(range(len(order)), names, rotation=35, ha="right")


def figure_of_errors(errors: pd.DataFrame) -> Figure:
    """Errors of log-probs and gradients by kind of rows, one column per dtype."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.4), layout="constrained", sharey="row")
    frame = errors[(errors.part == "logits") & (errors.V == LARGE)]
    quantities_ = {"log_probs": ("error", "log-prob"), "gradient": ("relative", "gradient")}
    for (quantity, (y, words)), row in zip(quantities_.items(), axes, strict=True):
        for dtype, ax in zip(DTYPES, row, strict=True):
            of_panel = frame[(frame.quantity == quantity) & (frame["dtype"] == dtype)]
            lines(ax, of_panel, "rows", y, list(ROWS))
            ax.set_title(f"{words.capitalize()}, {dtype} logits")
        row[0].set_ylabel("largest error" if y == "error" else "error relative to the norm")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return figure


def figure_over_vocabulary(errors: pd.DataFrame) -> Figure:
    """Errors of log-probs, entropy and gradient over the vocabulary, for float32 logits."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    frame = errors[(errors.part == "logits") & (errors["dtype"] == "float32")]
    frame = frame[frame.rows == "std 3"]
    words = {"log_probs": "Log-prob", "entropy": "Entropy", "gradient": "Gradient"}
    for (quantity, title), ax in zip(words.items(), axes, strict=True):
        y = "relative" if quantity == "gradient" else "error"
        lines(ax, frame[frame.quantity == quantity], "V", y, list(VOCABULARIES))
        unit = "error relative to the norm" if y == "relative" else "largest error"
        ax.set(title=f"{title}, float32, std 3", xlabel="vocabulary", ylabel=unit)
    handles = axes[0].get_legend_handles_labels()
    axes[-1].legend(*handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return figure


def figure_of_decisions(decisions: Mapping[str, Record]) -> Figure:
    """Distances of targets from tested quantities, and flips by the precision of log-probs."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for (preset, record), colour in zip(decisions.items(), ("#0b5fc0", "#e08a2e"), strict=True):
        counts = [count or float("nan") for count in record["margins"]]
        axes[0].plot(MARGINS, counts, "-", color=colour, label=preset)
        for name, bits in BITS.items():
            shift = record["sources"][f"rounded to {name} bits"]["shift"]
            axes[0].axvline(shift, color=colour, linestyle=":", linewidth=1)
            if preset == "paper":
                axes[0].text(shift, 1.2, f" {bits} bits", rotation=90, fontsize=8, ha="right")
        found = [record["sources"][f"rounded to {name} bits"] for name in BITS]
        bits = list(BITS.values())
        predicted, observed = ([f[k] for f in found] for k in ("predicted", "observed"))
        axes[1].plot(bits, predicted, "-", color=colour, label=f"{preset}: predicted")
        seen = [count or float("nan") for count in observed]
        axes[1].plot(bits, seen, "o", color=colour, label=f"{preset}: observed")
    axes[0].set(xscale="log", yscale="log", xlabel="margin |tested quantity - target|")
    axes[0].set(
        xlim=(1e-10, 1e-1),
        ylabel="batches with a smaller margin",
        title="Margins, and shifts due to rounding",
    )
    axes[1].set(yscale="log", xlabel="significant bits of a log-prob", ylabel="flipped decisions")
    axes[1].set(title="Flips due to rounding of log-probs", xticks=list(BITS.values()))
    for ax in axes:
        ax.legend(fontsize=8)
    return figure
