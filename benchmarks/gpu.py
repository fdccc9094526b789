"""``python -m benchmarks.gpu``: loss and gradient on a GPU beside a copy of the logits.

Time is that of the device: a call is captured in a CUDA graph, L2 is overwritten before each
replay, and events stand around the replay. Bytes are those the algorithm must move: every row that
is alone read once, rows that wait for the search twice, every gradient written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bapo_kernels import available_backends, bapo_loss, log_probs, reference

from .timing import append, environment

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
SHAPES = [(8_192, 151_936), (8_192, 128_256), (8_192, 262_208), (24_576, 151_936)]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MASKED, IDLE, UNDECIDED = 0.25, 0.4, 0.03
REPETITIONS = 30


class Case:
    """A batch, and the calls that are measured on it."""

    def __init__(self, N: int, V: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.logits = torch.empty(N, V, dtype=dtype, device="cuda")
        for rows in self.logits.split(1024):
            rows.normal_().mul_(3)
        self.labels = torch.randint(0, V, (N,), device="cuda")
        self.logp = log_probs(self.logits, self.labels)[0]
        self.A = torch.randn(N, device="cuda")
        self.mask = torch.rand(N, device="cuda") >= MASKED
        self.sparse = torch.where(torch.rand(N, device="cuda") < IDLE, 0.0, self.A)
        # A > 0 and r between the smallest and the largest upper bound waits for the search.
        waits = torch.rand(N, device="cuda") < 2 * UNDECIDED / (1 - MASKED) / (1 - IDLE)
        self.old = torch.where(waits, self.logp - 0.5, self.logp)
        positive = self.mask & (self.sparse > 0) & waits
        self.undecided = positive.float().mean().item()
        self.alive = self.mask.float().mean().item()
        self.live = (self.mask & (self.sparse != 0)).float().mean().item()

    def leaf(self) -> Tensor:
        return self.logits.detach().requires_grad_()


def check(case: Case, backend: str) -> None:
    """A wrong gradient is not timed."""
    rows = slice(0, 16)
    tokens = case.labels[rows], case.old[rows], case.sparse[rows], case.mask[rows]
    gradients = []
    for function, dtype, options in (
        (bapo_loss, case.logits.dtype, {"backend": backend}),
        (reference.bapo_loss, torch.float64, {}),
    ):
        x = case.logits[rows].to(dtype, copy=True).requires_grad_()
        function(x, *tokens, **options).loss.backward()
        gradients.append(x.grad.double())
    error = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
    if not error <= torch.finfo(case.logits.dtype).eps + 1e-6:
        raise SystemExit(f"gradient of {backend} in {case.logits.dtype} is off by {error:.1e}")


def measure(run: Callable[[], Any]) -> dict[str, float]:
    """Median and 20/80 percentiles in milliseconds of a captured call on a cold L2 cache."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(REPETITIONS + 2):
        flush.zero_()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        graph.replay()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events[2:]]
    low, median, high = np.percentile(times, [20, 50, 80])
    return {"ms": median, "ms_20": low, "ms_80": high, "repetitions": len(times)}


def kernel_times(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one call, by name."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {e.key[:60]: e.device_time_total / 1e3 for e in profile.key_averages()}


def cases(case: Case, backend: str) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Name, bytes as a multiple of the tensor's, and call."""
    leaf = case.leaf()

    def backward(old: Tensor | None, A: Tensor, mask: Tensor | None, **options: Any) -> None:
        leaf.grad = None
        bapo_loss(leaf, case.labels, old, A, mask, backend=backend, **options).loss.backward()

    def no_gradient() -> None:
        with torch.no_grad():
            log_probs(case.logits, case.labels, backend=backend)

    yield "all live, on-policy", 2.0, lambda: backward(None, case.A, None)
    for statistics, share in (("all", case.alive), ("live", case.live)):
        yield (
            f"25 % masked, 40 % idle, undecided, statistics={statistics}",
            1 + share + case.undecided,
            lambda statistics=statistics: backward(
                case.old, case.sparse, case.mask, statistics=statistics
            ),
        )
    yield "log_probs and entropy", 1.0, no_gradient


def suite(N: int, V: int, dtype_name: str) -> list[dict[str, Any]]:
    """Every case of one shape, the copy first."""
    case = Case(N, V, DTYPES[dtype_name])
    tensor_bytes = case.logits.numel() * case.logits.element_size()
    copy = measure(lambda: torch.empty_like(case.logits).copy_(case.logits))
    shape = {"N": N, "V": V, "dtype": dtype_name}
    records = [record("copy", "torch", 2 * tensor_bytes, copy, copy, shape)]
    for backend in ("cuda", "triton"):
        if available_backends()[backend] is not None:
            continue
        check(case, backend)
        for name, multiple, run in cases(case, backend):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            peak = torch.cuda.max_memory_allocated() - before
            times = measure(run)
            entry = record(name, backend, multiple * tensor_bytes, times, copy, shape)
            entry["peak_bytes"] = peak
            if "on-policy" in name:
                kernels = kernel_times(run)
                rows = sum(ms for key, ms in kernels.items() if "row_pass" in key)
                entry["kernels_ms"] = kernels
                entry["beyond_row_pass"] = 1 - rows / sum(kernels.values())
            records.append(entry)
    return records


def record(
    name: str,
    backend: str,
    bytes_moved: float,
    times: dict[str, float],
    copy: dict[str, float],
    shape: dict[str, Any],
) -> dict[str, Any]:
    """A line of the results; ``times_copy`` of a case that only reads is against half a copy."""
    reads_only = name.startswith("log_probs")
    return {
        "case": name,
        "backend": backend,
        **shape,
        **times,
        "bytes": bytes_moved,
        "GB_per_s": bytes_moved / times["ms"] / 1e6,
        "times_copy": times["ms"] / copy["ms"] * (2 if reads_only else 1),
    }


def show(records: list[dict[str, Any]]) -> None:
    """A table a shape."""
    first = records[0]
    table = Table(title=f"N = {first['N']:,}, V = {first['V']:,}, {first['dtype']}")
    for column in ("case", "backend", "ms", "20 % .. 80 %", "GB/s", "x copy", "beyond rows"):
        table.add_column(column, justify="left" if column in ("case", "backend") else "right")
    for r in records:
        beyond = f"{100 * r['beyond_row_pass']:.1f} %" if "beyond_row_pass" in r else ""
        spread = f"{r['ms_20']:.3f} .. {r['ms_80']:.3f}"
        numbers = f"{r['ms']:.3f}", spread, f"{r['GB_per_s']:.0f}", f"{r['times_copy']:.3f}"
        table.add_row(r["case"], r["backend"], *numbers, beyond)
    Console(width=120).print(table)


def main(out: Path = RESULTS, quick: bool = False) -> None:
    """Measures every backend that runs on this GPU; ``--quick`` takes the first shape only."""
    facts = {**environment(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    for N, V in SHAPES[:1] if quick else SHAPES:
        for dtype_name in DTYPES:
            if N * V * DTYPES[dtype_name].itemsize > 12e9:
                continue  # three of them must fit beside their graphs
            records = suite(N, V, dtype_name)
            show(records)
            append(out, [{**facts, **r} for r in records])


if __name__ == "__main__":
    typer.run(main)
