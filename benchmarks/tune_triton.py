"""``python -m benchmarks.tune_triton``: how wide a program of the Triton row pass should be.

Times the Triton kernels over rows for programs of different widths, unrolling and register limits,
and prints each time as it is measured. First come the variants that keep the fewest bytes resident,
because the second pass reads from the L2 cache. The fastest variant for each vocabulary and dtype
belongs in ``bapo_kernels/backends/triton/launch.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import typer
from torch import Tensor

from bapo_kernels import bapo_loss
from bapo_kernels.backends.triton import launch, row_gradient, row_pass
from bapo_kernels.tools.timing import Timed, clock_of

from .cases import Batch, Case
from .records import append, environment, summary


class Variant(NamedTuple):
    """How a program processes a row."""

    warps: int
    unroll: int
    registers: int

    def __str__(self) -> str:
        return f"{self.warps} warps, {self.unroll} steps at once, {self.registers} registers"


def resident_bytes(variant: Variant, row_bytes: int, multiprocessors: int) -> int:
    """Of all programs that threads and registers let a device run at once; L2 should hold them."""
    threads = 32 * variant.warps
    programs = min(2_048 // threads, 65_536 // (threads * variant.registers))
    return multiprocessors * programs * row_bytes


def variants(row_bytes: int, multiprocessors: int) -> list[Variant]:
    """The variants that fit into a multiprocessor: fewest resident bytes first, then the widest."""
    sizes = itertools.product((32, 16, 8), (4, 8, 2, 1), (128, 96, 64))
    every = list(itertools.starmap(Variant, sizes))
    resident = {v: resident_bytes(v, row_bytes, multiprocessors) for v in every}
    return sorted(filter(resident.get, every), key=resident.get)


def main(
    N: int = 8_192,
    V: int = 151_936,
    dtype: str = "bfloat16",
    device: str = "cuda",
    json: Path | None = None,
) -> None:
    """Times the variants of one shape; --json names a file to which each adds a line."""
    case = Case("logits", "loss", "any", N, V, 1, dtype, data="on-policy")
    batch, clock, facts = Batch(case, device), clock_of(device), environment(device)
    (leaf,) = batch.inputs
    vector, row_bytes = 16 // leaf.element_size(), V * leaf.element_size()
    gpu = torch.cuda.get_device_properties(device)
    multiprocessors, l2_bytes = gpu.multi_processor_count, gpu.L2_cache_size

    def run() -> Tensor:
        leaf.grad = None
        out = bapo_loss(leaf, *batch.rest, config=case.config, backend="triton")
        out.loss.backward()
        return out.loss.detach()

    loss = run()  # of the present variant, which the tests check
    gradients = leaf.grad[-1, -64:]
    results = []
    for variant in variants(row_bytes, multiprocessors):
        resident = resident_bytes(variant, row_bytes, multiprocessors)
        what = f"{variant}, {resident / 1e6:.0f} MB resident ({resident / l2_bytes:.2f} x L2)"
        shape = launch.RowShape(vector * 32 * variant.warps, variant.unroll, variant.warps)
        limits = launch.limits(variant.warps, variant.registers)
        cut = {"row_shape": mock.Mock(return_value=shape), "limits": mock.Mock(return_value=limits)}
        try:
            with mock.patch.multiple(row_pass, **cut), mock.patch.multiple(row_gradient, **cut):
                torch.testing.assert_close(run(), loss)
                torch.testing.assert_close(leaf.grad[-1, -64:], gradients, rtol=1e-2, atol=1e-9)
                samples = clock.samples(Timed(run, graph=True))
        except Exception as failure:  # a variant may need more than the device has
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"{what}: {reason}", flush=True)
            continue
        times = summary([1e3 * seconds for seconds in samples])
        results.append((times["ms"], variant))
        print(f"{what}: {times['ms']:.3f} ms", flush=True)
        if json is not None:
            append(json, [facts | asdict(case) | variant._asdict() | times])
    if not results:
        raise SystemExit("no variant runs")
    print("{:.3f} ms at best: {}".format(*min(results)))


if __name__ == "__main__":
    typer.run(main)
