"""``python -m benchmarks.tune_triton``: the cuts of a row that are worth putting in the table.

Times the Triton row pass for programs of other widths, unrolling and register limits; the winner
of each vocabulary and dtype belongs in ``bapo_kernels/backends/triton/launch.py``.
"""

from __future__ import annotations

import itertools

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bapo_kernels import bapo_loss
from bapo_kernels.backends.triton import launch, row_pass

from .cases import Batch, Case
from .timing import GPUClock, Timed, summary


def main(N: int = 8_192, V: int = 151_936, dtype: str = "bfloat16") -> None:
    """Prints the variants of one shape, fastest first."""
    batch = Batch(Case("logits", "loss", "any", N, V, 1, dtype, data="on-policy"), "cuda")
    (leaf,), clock = batch.inputs, GPUClock()
    vector = 16 // leaf.element_size()

    def run() -> None:
        leaf.grad = None
        bapo_loss(leaf, batch.labels, None, batch.A, backend="triton").loss.backward()

    results = []
    variants = list(itertools.product((8, 16, 32), (1, 2, 4, 8), (64, 96, 128)))
    for num_warps, unroll, registers in track(variants, "variants"):
        if num_warps * 32 * registers > 65_536:
            continue
        shape = launch.RowShape(vector * 32 * num_warps, unroll, num_warps)
        row_pass.row_shape = lambda *_, shape=shape: shape
        row_pass.limits = lambda warps, registers, most=registers: launch.limits(warps, most)
        times = summary(clock.samples(Timed(run, graph=True)))
        results.append((times["ms"], num_warps, unroll, registers))
    table = Table(title=f"N = {N:,}, V = {V:,}, {dtype}")
    for column in ("ms", "warps", "unroll", "registers"):
        table.add_column(column, justify="right")
    for ms, *variant in sorted(results):
        table.add_row(f"{ms:.3f}", *map(str, variant))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
