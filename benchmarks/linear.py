"""``python -m benchmarks.linear``: the loss from hidden states beside its bare GEMMs.

FLOPs of ours: 2*V*H for each row that is computed and 4*V*H for each that has a gradient; rows that
wait for the search cost 2*V*H more. Nothing is timed before its gradient has been checked. The peer
is TRL's chunked head with the loss on top, where TRL is installed (``pip install trl``).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bapo_kernels import BAPOConfig, bapo_linear_loss, linear_log_probs, reference
from bapo_kernels.linear import CHUNK_BYTES

from .timing import append, environment, measure

RESULTS = Path(__file__).parent / "results" / "linear.jsonl"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASKED, IDLE = 0.25, 0.4
SPARSE = "25 % masked, 40 % idle"
TRL_CHUNK = 8_192  # columns of a tile, TRL's default


class Case:
    """Hidden states, lm_head and tokens, and what is measured on them."""

    def __init__(self, N: int, V: int, H: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(N, H).to(dtype).requires_grad_()
        self.weight = (torch.randn(V, H) * H**-0.5).to(dtype).requires_grad_()
        self.labels = torch.randint(0, V, (N,))
        with torch.no_grad():
            self.old = linear_log_probs(self.hidden, self.weight, self.labels)[0]
        self.old += 0.02 * torch.randn(N)
        self.A = torch.randn(N)
        self.mask = torch.rand(N) >= MASKED
        self.sparse = torch.where(torch.rand(N) < IDLE, 0.0, self.A)
        self.live = int((self.mask & (self.sparse != 0)).sum())

    def gemms(self, rows: int) -> None:
        """Logits, and both gradients from something of their shape."""
        h, weight = self.hidden.detach()[:rows], self.weight.detach()
        logits = h @ weight.T
        logits @ weight
        logits.T @ h

    def eager(self, A: Tensor, mask: Tensor | None) -> None:
        """Logits by a GEMM, the reference on top."""
        logits = F.linear(self.hidden, self.weight)
        self._backward(reference.bapo_loss(logits, self.labels, self.old, A, mask).loss)

    def trl(self, A: Tensor, mask: Tensor | None) -> None:
        """TRL's chunked log-probs and the same loss; on a CPU TRL computes masked rows as well."""
        from trl.kernels import ChunkedLogProbFunction

        logp, *_ = ChunkedLogProbFunction.apply(
            self.hidden, self.weight, None, self.labels, 1.0, TRL_CHUNK, None, 1.0, ("entropy",)
        )
        out = reference.bapo_loss_from_log_probs(logp, self.old, A, mask)
        self._backward(out.loss)

    def replayed(self, A: Tensor, mask: Tensor | None) -> int:
        """Rows that wait for the search: their ratio lies where a bound may come to lie."""
        config = BAPOConfig()
        with torch.no_grad():
            logp = linear_log_probs(self.hidden, self.weight, self.labels)[0]
        r = (logp - self.old).exp()
        up = (A > 0) & (r > config.ratio_upper_start) & (r <= config.ratio_upper_max)
        down = (A < 0) & (r >= config.ratio_lower_start) & (r < config.ratio_lower_max)
        waits = up | down if mask is None else (up | down) & mask
        return int(waits.sum())

    def fused(self, A: Tensor, mask: Tensor | None, **options: Any) -> None:
        """Ours."""
        arguments = self.labels, self.old, A, mask
        self._backward(bapo_linear_loss(self.hidden, self.weight, *arguments, **options).loss)

    def _backward(self, loss: Tensor) -> None:
        self.hidden.grad = self.weight.grad = None
        loss.backward()


def check(dtype: torch.dtype) -> None:
    """A wrong gradient is not timed: a small case against the reference in float64."""
    case = Case(24, 1_000, 64, dtype)
    case.fused(case.sparse, case.mask, statistics="live", chunk_tokens=7)
    gradients = case.hidden.grad, case.weight.grad
    leaves = [p.detach().double().requires_grad_() for p in (case.hidden, case.weight)]
    arguments = case.labels, case.old, case.sparse, case.mask
    reference.bapo_linear_loss(*leaves, *arguments).loss.backward()
    for got, leaf in zip(gradients, leaves, strict=True):
        error = (got.double() - leaf.grad).norm() / leaf.grad.norm()
        if not error <= 4 * torch.finfo(dtype).eps + 1e-5:
            raise SystemExit(f"gradient in {dtype} is off by {error:.1e}, not timed")


def suite(N: int, V: int, H: int, name: str) -> list[dict[str, Any]]:
    """Every case of one dtype."""
    check(DTYPES[name])
    case = Case(N, V, H, DTYPES[name])
    sparse = case.sparse, case.mask
    no_trl = importlib.util.find_spec("trl") is None
    live_waits = case.replayed(*sparse)
    cases: list[tuple[str, int, int, Callable[[], None] | None]] = [
        ("three bare GEMMs", N, 0, lambda: case.gemms(N)),
        ("GEMM and eager reference", N, 0, lambda: case.eager(case.A, None)),
        ("TRL's chunked head", N, 0, None if no_trl else lambda: case.trl(case.A, None)),
        ("bapo_linear_loss", N, case.replayed(case.A, None), lambda: case.fused(case.A, None)),
        ("three bare GEMMs on the live rows", case.live, 0, lambda: case.gemms(case.live)),
        (f"GEMM and eager reference, {SPARSE}", N, 0, lambda: case.eager(*sparse)),
        (f"TRL's chunked head, {SPARSE}", N, 0, None if no_trl else lambda: case.trl(*sparse)),
        (
            f"bapo_linear_loss, {SPARSE}, live",
            case.live,
            live_waits,
            lambda: case.fused(*sparse, statistics="live"),
        ),
    ]
    records = []
    for case_name, rows, replayed, run in cases:
        shape = {"case": case_name, "N": N, "V": V, "H": H, "dtype": name}
        if run is None:
            print(f"{case_name}: not measured, TRL is not installed")
            continue
        times = measure(run, seconds=6.0)
        flops = (6 * rows + 2 * replayed) * V * H
        rate = {"GFLOP": flops / 1e9, "GFLOP_per_s": flops / times["ms"] / 1e6}
        records.append({**shape, "rows": rows, "replayed": replayed, **times, **rate})
    return records


def peak_memory(N: int, V: int, H: int) -> dict[str, Any]:
    """Bytes at the peak of a call above its inputs and gradients, float32, chunks of 1 GiB.

    Linux only: reads the high-water mark of the process, after resetting it.
    """
    case = Case(N, V, H, torch.float32)
    outputs = case.hidden.numel() + case.weight.numel()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    start = time.perf_counter()
    case.fused(case.A, None)
    seconds = time.perf_counter() - start
    above = _status("VmHWM") - before - 4 * outputs
    shape = {"case": "peak memory", "N": N, "V": V, "H": H, "dtype": "float32"}
    return {**shape, "above_bytes": above, "of_a_chunk": above / CHUNK_BYTES, "seconds": seconds}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if field in line).split()[1])


def show(records: list[dict[str, Any]]) -> None:
    """A table a dtype; the GEMMs of a case stand before it."""
    table = Table(title=f"N = {records[0]['N']}, {records[0]['dtype']}")
    for column in ("case", "rows", "replayed", "ms", "GFLOP", "GFLOP/s", "x GEMMs"):
        table.add_column(column, justify="left" if column == "case" else "right")
    gemms = records[0]["ms"]
    for r in records:
        gemms = r["ms"] if "bare" in r["case"] else gemms
        numbers = f"{r['ms']:.0f}", f"{r['GFLOP']:.0f}", f"{r['GFLOP_per_s']:.0f}"
        counts = str(r["rows"]), str(r["replayed"])
        table.add_row(r["case"], *counts, *numbers, f"{r['ms'] / gemms:.2f}")
    Console(width=110).print(table)


def main(N: int = 512, V: int = 151_936, H: int = 1_024, out: Path = RESULTS) -> None:
    """Runs every case, and adds the records to a file of JSON lines."""
    facts = environment()
    records = []
    for name in DTYPES:
        of_dtype = suite(N, V, H, name)
        show(of_dtype)
        records += of_dtype
    for tokens in (8_192, 32_768):
        record = peak_memory(tokens, V, H // 8)
        above = f"{record['above_bytes'] / 2**20:.0f} MiB above inputs and gradients"
        print(f"N = {tokens:,}, H = {H // 8}: {above}, {record['of_a_chunk']:.2f} chunks")
        records.append(record)
    append(out, [{**facts, **record} for record in records])


if __name__ == "__main__":
    typer.run(main)
