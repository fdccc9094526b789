"""The loss alone at a real vocabulary: before and after.

Before is the loss in plain PyTorch (``bapo_kernels.reference``), after is the fused loss, on the
same float32 or bfloat16 logits. Each way runs in a process of its own, so that its peak memory can
be measured. The fused loss is timed only if its gradient is at most twice as far from float64 as
that of plain PyTorch, plus one rounding; the error of plain PyTorch is shown, whatever it is.

    python examples/before_after.py --out out
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import typer
from rich.progress import track

from bapo_kernels import bapo_loss, log_probs, reference
from bapo_kernels.tools.budget import error_and_budget, largest

VOCABULARY = 151_936  # Qwen3
WAYS = {"before": "PyTorch", "after": "bapo_kernels", "inplace": "bapo_kernels, inplace=True"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def batch(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits, labels, log-probs of a slightly older policy, advantages."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(tokens, VOCABULARY, dtype=dtype)
    for row in logits:
        row.copy_(3 * torch.randn(VOCABULARY, generator=generator))
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    with torch.no_grad():
        logp, _ = log_probs(logits, labels)
    old = logp + 0.1 * torch.randn(tokens, generator=generator)
    return logits, labels, old, torch.randn(tokens, generator=generator)


def gradient(way: str, logits: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    """Loss and its gradient; in place the gradient replaces the logits."""
    if way == "inplace":
        bapo_loss(logits, *arguments, inplace=True)
        return logits
    logits = logits.requires_grad_()
    function = reference.bapo_loss if way == "before" else bapo_loss
    (result,) = torch.autograd.grad(function(logits, *arguments).loss, logits)
    logits.requires_grad_(False)
    return result


def checked_error(way: str, dtype: torch.dtype, rows: int = 8) -> float:
    """Error of the gradient against float64, relative to its largest entry.

    Raises:
        SystemExit: it exceeds the budget, which that of plain PyTorch cannot.
    """
    logits, *arguments = batch(rows, dtype)
    exact = gradient("before", logits.double(), *arguments)
    plain = gradient("before", logits, *arguments)
    error, budget = error_and_budget(gradient(way, logits, *arguments), plain, exact)
    if not error <= budget:
        raise SystemExit(f"{way} {dtype}: gradient is off by {error:.1e}, at most {budget:.1e}")
    return error / largest(exact)


def peak_mib() -> float:
    """Peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(way: str, dtype: str, tokens: int) -> dict[str, str | float]:
    """Time and memory of one way to compute loss and gradient, once the gradient is checked."""
    error = checked_error(way, DTYPES[dtype])
    logits, *arguments = batch(tokens, DTYPES[dtype])
    started_at = peak_mib()
    gradient(way, logits, *arguments)
    peak = peak_mib() - started_at
    times = []
    for _ in range(2 if way == "before" else 9):
        source = logits.clone() if way == "inplace" else logits
        start = time.perf_counter()
        gradient(way, source, *arguments)
        times.append(time.perf_counter() - start)
    return {
        "dtype": dtype,
        "way": WAYS[way],
        "milliseconds": 1e3 * statistics.median(times),
        "peak_mib": peak,
        "largest_error": error,
    }


def main(out: Path = Path("out"), tokens: int = 256) -> None:
    """Measures every way in every dtype; writes a CSV and a figure."""
    out.mkdir(parents=True, exist_ok=True)
    cases = [(way, dtype) for dtype in DTYPES for way in WAYS]
    records = []
    for way, dtype in track(cases, description="loss and gradient"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            records.append(pool.submit(measure, way, dtype, tokens).result())
    table = pd.DataFrame(records)
    table.to_csv(out / "before_after.csv", index=False)
    print(f"Loss and gradient of {tokens} tokens, vocabulary {VOCABULARY:,}")
    formats = ["{:,.1f}".format, "{:,.0f}".format, "{:.1e}".format]
    print(
        table.to_string(index=False, formatters=dict(zip(table.columns[2:], formats, strict=True)))
    )
    print(plot(table, out / "before_after.png"))


def plot(table: pd.DataFrame, path: Path) -> Path:
    """Time and peak memory of each way to compute the loss, side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    titles = {
        "milliseconds": "Loss and gradient, milliseconds (log scale)",
        "peak_mib": "Peak extra memory, MiB",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        values = table.pivot(index="dtype", columns="way", values=key)
        values.loc[[*DTYPES], [*WAYS.values()]].plot.barh(
            ax=axis, title=title, width=0.7, legend=False, logx=key == "milliseconds", ylabel=""
        )
        for bars in axis.containers:
            axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(WAYS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    typer.run(main)
