"""``python -m benchmarks.host_time``: the time of a tiny call, which is that of the host.

Forward and backward of ``bapo_loss`` on 16 tokens with V = 64, where kernels have nothing to do.
The backend ``triton`` compiles for sm_90 and launches as on a GPU, except that the driver library
below the launcher answers every call and does nothing, so that results hold anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
import typer

from bapo_kernels import bapo_loss
from bapo_kernels.backends import triton as triton_backend

from .emulation import absent_gpu

B, S, V = 2, 8, 64


def install_absent_gpu() -> None:
    """Lets the operators of this package launch on CPU tensors, for a GPU that is not there."""
    absent_gpu()
    triton_backend.why_not, triton_backend.INTERPRETED = lambda: None, True  # takes CPU tensors
    triton_backend.implement_all(["CPU"])


def tiny_call(backend: str) -> Callable[[], tuple[float, float]]:
    """A function that takes the seconds of forward and of backward."""
    torch.manual_seed(0)
    logits = torch.randn(B, S, V, requires_grad=True)
    labels = torch.randint(0, V, (B, S))
    old, advantages, mask = *torch.randn(2, B, S), torch.ones(B, S)

    def run() -> tuple[float, float]:
        logits.grad = None
        begin = time.perf_counter()
        loss = bapo_loss(logits, labels, old, advantages, mask, backend=backend).loss
        middle = time.perf_counter()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    return run


def main(backend: Literal["cpu", "triton"] = "cpu", calls: int = 2_000) -> None:
    """Median microseconds of forward, backward and both."""
    torch.set_num_threads(1)
    if backend == "triton":
        install_absent_gpu()
    run = tiny_call(backend)
    for _ in range(100):
        run()
    times = [(*both, sum(both)) for both in (run() for _ in range(calls))]
    for name, values in zip(("forward", "backward", "both"), zip(*times, strict=True), strict=True):
        print(f"{name} {1e6 * statistics.median(values):.1f} us")


if __name__ == "__main__":
    typer.run(main)
