"""``python -m benchmarks.instructions``: what the row pass executes, and its predicted time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..tables import markdown
from .cuda import LIBRARY, Row
from .gpus import GPUS
from .model import CASES
from .page import BEGIN, PEERS, block, blocks
from .page import write as write_block


def main(
    vocabulary: Annotated[int, typer.Option(help="of a row")] = 151_936,
    dtype: Annotated[str, typer.Option(help="of the logits")] = "bfloat16",
    gradient: Annotated[bool, typer.Option(help="or log-probs alone")] = True,
    gpus: Annotated[str, typer.Option(help="part of the names or architectures")] = "",
    library: Annotated[Path, typer.Option(exists=True, help="the built library")] = LIBRARY,
    peers: Annotated[
        bool, typer.Option("--peers", help="public kernels with published times instead")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="write docs/internals/cuda_plan.md")
    ] = False,
) -> None:
    """Counts executed instructions per element, and predicts time over copy, without a GPU."""
    if peers:
        from .peers import table

        made = markdown(table())
        print(made)
        if write:
            write_block(PEERS, made)
        return
    if write:
        write_block(BEGIN, block())
        return
    for gpu in (gpu for gpu in GPUS if gpus in f"{gpu.name} {gpu.arch}"):
        row = Row(gpu.arch, vocabulary, dtype, gradient, library)
        print(f"{gpu.name}: {blocks(row)}, {row.plan(gpu).blocks} blocks on a multiprocessor")
        print("  per element:", ", ".join(f"{k} {v:.2f}" for k, v in row.counts().items()))
        for case in CASES:
            found = row.predict(gpu, case)
            issue = " ".join(f"{share:.2f}" for share in found.issue)
            print(f"  {found.cycles:,.0f} cycles, {found.over_copy:.2f} of a copy, issue {issue}")


if __name__ == "__main__":
    typer.run(main)
