"""The loss alone at a real vocabulary: README's Before and After.

Before is BAPO as a trainer would write it in PyTorch (``bapo_kernels.tools.plain``), also with the
log-probs of ``cross_entropy``, eager and compiled; after is the fused loss, on the same float32 or
bfloat16 logits, which are rows of a language model. The search acts. Each way runs in a process of
its own, so that its peak memory can be measured. The fused loss is timed only if its gradient is at
most twice as far from float64 as Before's, plus one rounding; other errors are only shown.

    python examples/before_after.py --out out
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import pandas as pd
import torch
import typer
from rich.progress import track

from bapo_kernels import bapo_loss, empty_cache, log_probs, reference
from bapo_kernels.tools.budget import error_and_budget, largest
from bapo_kernels.tools.plain import plain_bapo_loss, plain_log_probs
from bapo_kernels.tools.real_rows import real_rows

VOCABULARY = 151_936  # Qwen3
WAYS = {
    "before": "PyTorch (README's Before)",
    "cross_entropy": "PyTorch, cross_entropy",
    "compiled": "PyTorch, cross_entropy, compiled",
    "after": "bapo_kernels",
    "inplace": "bapo_kernels, inplace=True",
}
OURS = "after", "inplace"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def batch(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits, labels, log-probs of a slightly older policy, advantages, and a mask of ones."""
    logits, labels = real_rows((tokens,), VOCABULARY)
    logits = logits.to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logp, _ = log_probs(logits, labels)
    old = logp + 0.1 * torch.randn(tokens, generator=generator)
    return logits, labels, old, torch.randn(tokens, generator=generator) - 0.2, torch.ones(tokens)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs of the labels, by PyTorch's own fused loss."""
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def gradient(
    way: str, logits: torch.Tensor, labels: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """Loss and its gradient; in place the gradient replaces the logits."""
    if way == "inplace":
        bapo_loss(logits, labels, *others, inplace=True)
        return logits
    logits = logits.requires_grad_()
    if way == "after":
        loss = bapo_loss(logits, labels, *others).loss
    else:
        made_by = torch.compile(cross_entropy) if way == "compiled" else cross_entropy
        logp = plain_log_probs(logits, labels, 1.0) if way == "before" else made_by(logits, labels)
        loss, _, _ = plain_bapo_loss(logp, *others)
    (result,) = torch.autograd.grad(loss, logits)
    logits.requires_grad_(False)
    return result


def checked_error(way: str, logits: torch.Tensor, *arguments: torch.Tensor) -> float:
    """Error of the gradient against float64, relative to its largest entry.

    Raises:
        SystemExit: the fused loss exceeds the budget.
    """
    logits, labels, *others = (values[:8].clone() for values in (logits, *arguments))
    exact = logits.double().requires_grad_()
    (truth,) = torch.autograd.grad(reference.bapo_loss(exact, labels, *others).loss, exact)
    plain = gradient("before", logits, labels, *others)
    error, budget = error_and_budget(gradient(way, logits, labels, *others), plain, truth)
    if way in OURS and not error <= budget:
        off = f"gradient is off by {error:.1e}, at most {budget:.1e}"
        raise SystemExit(f"{way} {logits.dtype}: {off}")
    return error / largest(truth)


def peak_mib() -> float:
    """Peak memory of this process since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(way: str, dtype: str, file: Path) -> dict[str, str | float]:
    """Time and memory of one way to compute loss and gradient, once the gradient is checked."""
    logits, *arguments = torch.load(file)
    error = checked_error(way, logits, *arguments)
    times = []
    for _ in range(10 if way in OURS else 4):  # the first also compiles
        source = logits.clone() if way == "inplace" else logits
        start = time.perf_counter()
        gradient(way, source, *arguments)
        times.append(time.perf_counter() - start)
    empty_cache()  # what is kept, or freed but not yet returned, would hide a part of the peak
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    started_at = peak_mib()
    gradient(way, logits, *arguments)
    peak = peak_mib() - started_at
    return {
        "dtype": dtype,
        "way": WAYS[way],
        "milliseconds": 1e3 * statistics.median(times[1:]),
        "peak_mib": peak,
        "largest_error": error,
    }


def main(out: Path = Path("out"), tokens: int = 256) -> None:
    """Measures every way in every dtype; writes a CSV and a figure."""
    out.mkdir(parents=True, exist_ok=True)
    cases = [(way, dtype) for dtype in DTYPES for way in WAYS]
    # Its processes find what this one imports.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["matplotlib.pyplot", "pandas", "bapo_kernels"])
    records = []
    with TemporaryDirectory() as folder:
        for name, dtype in DTYPES.items():
            torch.save(batch(tokens, dtype), Path(folder, name))
        for way, name in track(cases, description="loss and gradient"):
            with ProcessPoolExecutor(1, processes) as pool:
                records.append(pool.submit(measure, way, name, Path(folder, name)).result())
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
