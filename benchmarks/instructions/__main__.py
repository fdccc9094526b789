"""``python -m benchmarks.instructions``: instructions per element of the row passes, from SASS."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .cuda import LIBRARY, cuda_counts
from .passes import Count
from .units import NAMES


def main(
    library: Annotated[Path, typer.Option(help="built library, or a cubin")] = LIBRARY,
    arch: Annotated[str, typer.Option(help="sm_80, sm_90, sm_100 or sm_120")] = "sm_90",
    only: Annotated[str, typer.Option(help="part of a kernel's title")] = "",
    json: Annotated[bool, typer.Option("--json", help="print records, one per line")] = False,
    path: Annotated[bool, typer.Option("--path", help="print the counted instructions")] = False,
) -> None:
    """Counts the instructions per element of the row passes."""
    counts = [c for c in cuda_counts(library, arch) if only in title(c)]
    if json:
        for one in counts:
            print(json_format.dumps(one.record()))
        return
    if path:
        for one in counts:
            print(f"\n{title(one)}: {one.elements} elements, {one.issued:.2f} per element")
            print(*one.path.instructions, sep="\n")
        return
    Console(width=140).print(table(counts))


def title(one: Count) -> str:
    softcap = ", soft cap" if one.variant.softcap else ""
    return f"{one.variant.kernel}, {one.variant.dtype}{softcap}, {one.of}"


def table(counts: list[Count]) -> Table:
    result = Table(title="Instructions per element")
    result.add_column("")
    for name in ("issued", *NAMES):
        result.add_column(name, justify="right")
    for one in counts:
        units = one.units
        result.add_row(
            title(one), f"{one.issued:.2f}", *(f"{units.get(name, 0):.2f}" for name in NAMES)
        )
    return result


if __name__ == "__main__":
    typer.run(main)
