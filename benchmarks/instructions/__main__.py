"""``python -m benchmarks.instructions``: instructions per element of the row passes, from SASS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import typer
from rich.table import Table

from .cuda import LIBRARY, cuda_counts
from .page import both_passes, by_unit
from .page import write as write_page
from .passes import BYTES, PASSES, Count
from .triton_kernels import triton_counts


def main(
    library: Annotated[
        Path, typer.Option(exists=True, help="the built library, or a cubin")
    ] = LIBRARY,
    arch: Annotated[
        Literal["sm_80", "sm_90", "sm_100"], typer.Option(help="architecture")
    ] = "sm_90",
    only: Annotated[str, typer.Option(help="part of the title of a pass")] = "",
    path: Annotated[bool, typer.Option("--path", help="print the counted instructions")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON records")] = False,
    write: Annotated[bool, typer.Option("--write", help="write docs/cuda_plan.md")] = False,
) -> None:
    """Counts the instructions per element of the row passes, by unit, without a GPU."""
    if write:
        print(write_page())
        return
    found = [one for one in counts(library, arch) if only in str(one)]
    if not found:
        raise typer.BadParameter(f"no title has it, got {only!r}", param_hint="--only")
    if json:
        print(frame(found).to_json(orient="records", lines=True), end="")
    elif path:
        for one in found:
            print(f"\n{one}: {one.elements} elements, {one.issued:.2f} per element")
            print(*one.path.instructions, sep="\n")
    else:
        from ..run import wide_console

        console = wide_console()
        console.print(rich(by_unit(frame(found)), f"Instructions per element on {arch}, by unit"))
        if not only:
            console.print(rich(both_passes(frame(found)), "Both passes, and shares of a copy"))


def counts(library: Path, arch: str) -> Iterator[Count]:
    yield from cuda_counts(library, arch)
    yield from triton_counts(arch)


def frame(counts: list[Count]) -> pd.DataFrame:
    """One record per pass, in the order of the tables."""
    result = pd.DataFrame([one.record() for one in counts])
    result["dtype"] = pd.Categorical(result["dtype"], list(BYTES))
    result["pass"] = pd.Categorical(result["pass"], PASSES)
    return result.sort_values(["kernel", "dtype", "softcap", "pass"], ignore_index=True)


def rich(table: pd.DataFrame, title: str) -> Table:
    result = Table("", title=title)
    for name in table.columns:
        result.add_column(name, justify="right")
    for row in table.itertuples():
        result.add_row(*row)
    return result


if __name__ == "__main__":
    typer.run(main)
