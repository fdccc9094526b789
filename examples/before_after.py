"""The loss alone at a real vocabulary: README's Before and After, in float32 and bfloat16.

What ``python -m bapo_kernels bench`` measures, as a picture of both dtypes: BAPO as a trainer would
write it in PyTorch, also with the log-probs of ``cross_entropy``, and the fused loss.

    python examples/before_after.py --out out
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import typer
from rich.console import Console

from bapo_kernels.tools.bench import Sizes, run, table, title

VOCABULARY = 151_936  # Qwen3
DTYPES = "float32", "bfloat16"


def main(out: Path = Path("out"), tokens: int = 256) -> None:
    """Measures every method in both dtypes; writes a CSV and a figure."""
    out.mkdir(parents=True, exist_ok=True)
    frames, wrong = [], []
    for dtype in DTYPES:
        sizes = Sizes(tokens, VOCABULARY, dtype=dtype)
        with Console(stderr=True).status("", refresh_per_second=2) as status:
            rows = run(sizes, tell=status.update)
        print(title(sizes), table(sizes, rows), sep="\n", end="\n\n")
        frames.append(pd.DataFrame(map(asdict, rows)).assign(dtype=dtype))
        wrong += [row.name for row in rows if row.failed]
    frame = pd.concat(frames, ignore_index=True).drop(columns="failed")
    frame.to_csv(out / "before_after.csv", index=False)
    print(plot(frame, out / "before_after.png"))
    if wrong:
        raise SystemExit(f"wrong, and not timed: {', '.join(wrong)}")


def plot(frame: pd.DataFrame, path: Path) -> Path:
    """Time and peak memory of each method, side by side."""
    frame = frame.assign(ms=1e3 * frame.seconds, mib=frame.peak_bytes / 2**20)
    titles = {"ms": "Loss and gradient, milliseconds (log scale)", "mib": "Peak memory, MiB"}
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    methods = [*dict.fromkeys(frame["name"])]
    for axis, (key, title_of_axis) in zip(axes, titles.items(), strict=True):
        values = frame.pivot(index="dtype", columns="name", values=key)
        values.loc[[*DTYPES], methods].plot.barh(
            ax=axis, title=title_of_axis, width=0.8, legend=False, logx=key == "ms", ylabel=""
        )
        for bars in axis.containers:
            axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    typer.run(main)
