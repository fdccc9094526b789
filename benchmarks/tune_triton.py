"""``python -m benchmarks.tune_triton``: the cuts of a row that are worth putting in the table.

Times the Triton row pass for programs of other widths, unrolling and register limits, the widest
first, and prints each as it is measured; the winner of each vocabulary and dtype belongs in
``bapo_kernels/backends/triton/launch.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bapo_kernels import bapo_loss
from bapo_kernels.backends.triton import launch, row_pass

from . import gate
from .cases import Batch, Case
from .records import append, environment
from .timing import Timed, clock_of, summary


class Variant(NamedTuple):
    """A program of a row."""

    warps: int
    unroll: int
    registers: int

    def __str__(self) -> str:
        return f"{self.warps} warps, {self.unroll} steps at once, {self.registers} registers"


def variants() -> Iterator[Variant]:
    """Those whose registers a multiprocessor has, the widest first."""
    for variant in itertools.product((32, 16, 8), (4, 8, 2, 1), (128, 96, 64)):
        if variant[0] * 32 * variant[2] <= 65_536:
            yield Variant(*variant)


def main(
    N: int = 8_192,
    V: int = 151_936,
    dtype: str = "bfloat16",
    device: str = "cuda",
    json: Path | None = None,
) -> None:
    """Times the variants of one shape; --json is a file that gets a line for each."""
    case = Case("logits", "loss", "any", N, V, 1, dtype, data="on-policy")
    batch, clock, facts = Batch(case, device), clock_of(device), environment(device)
    expected = gate.value_at_full_size(batch)
    (leaf,) = batch.inputs
    vector = 16 // leaf.element_size()

    def run() -> Tensor:
        leaf.grad = None
        out = bapo_loss(leaf, *batch.rest, **batch.options, backend="triton")
        out.loss.backward()
        return out.loss.detach()

    def some_gradients() -> Tensor:
        return leaf.grad[-1, -64:].double()

    run()
    gradients = some_gradients()  # of the table's own cut, which tests check
    results = []
    for variant in variants():
        shape = launch.RowShape(vector * 32 * variant.warps, variant.unroll, variant.warps)
        limits = launch.limits(variant.warps, variant.registers)
        cut = {"row_shape": mock.Mock(return_value=shape), "limits": mock.Mock(return_value=limits)}
        try:
            with mock.patch.multiple(row_pass, **cut):
                gate.check_value(run(), expected, batch)
                error = gate.distance(some_gradients(), gradients)
                gate.raise_above(gate.tolerance(case), "gradient", error)
                times = summary(clock.samples(Timed(run, graph=True)))
        except Exception as failure:  # a variant may ask for more than the device has
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"{variant}: {reason}", flush=True)
            continue
        results.append((times["ms"], variant))
        print(f"{variant}: {times['ms']:.3f} ms", flush=True)
        if json is not None:
            append(json, [facts | case.fields() | variant._asdict() | times])
    results.sort()
    table = Table(title=case.title)
    for column in ("ms", *Variant._fields):
        table.add_column(column, justify="right")
    for ms, variant in results:
        table.add_row(f"{ms:.3f}", *(str(value) for value in variant))
    Console().print(table)
    if not results:
        raise SystemExit("no variant runs")
    print("{:.3f} ms at best: {}".format(*results[0]))


if __name__ == "__main__":
    typer.run(main)
