"""Errors against float64, and how often rounding changes a decision of the search.

``TRITON_INTERPRET=1 python -m benchmarks.numerics`` measures on a CPU, fills the tables of
``docs/internals/numerics.md`` and draws its figures; ``--no-measure`` does so from the records
alone, and ``--part`` measures only a part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..records import append, environment, load
from .decisions import measure_decisions
from .errors import measure_errors
from .figures import draw
from .head import measure_heads
from .page import PAGE, RESULTS, page

PARTS = {"errors": measure_errors, "head": measure_heads, "decisions": measure_decisions}


def main(
    measure: bool = True,
    part: Annotated[list[str] | None, typer.Option(help="errors, head or decisions")] = None,
    out: Path = RESULTS,
) -> None:
    """Measures, appends to a file of JSON lines, fills the tables and draws the figures."""
    if measure:
        facts = environment()
        for name in part or PARTS:
            append(out, [{**facts, **record} for record in PARTS[name]()])
    PAGE.write_text(page(load(out)))
    for path in (PAGE, *draw(load(out))):
        print(path)


if __name__ == "__main__":
    typer.run(main)
