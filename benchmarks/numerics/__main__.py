"""Errors against float64, and how often rounding changes a decision of the search.

``TRITON_INTERPRET=1 python -m benchmarks.numerics`` measures on a CPU and writes
``docs/numerics.md`` with its figures; ``--no-measure`` writes them from the records alone.
"""

from __future__ import annotations

from pathlib import Path

import typer

from ..records import append, environment, load
from .decisions import measure_decisions
from .errors import measure_errors
from .figures import draw
from .page import PAGE, RESULTS, page


def main(measure: bool = True, out: Path = RESULTS) -> None:
    """Measures, appends to a file of JSON lines, and writes the page and its figures."""
    if measure:
        facts = environment()
        for records in (measure_errors(), measure_decisions()):
            append(out, [{**facts, **record} for record in records])
    PAGE.write_text(page(load(out)))
    for path in (PAGE, *draw(load(out))):
        print(path)


if __name__ == "__main__":
    typer.run(main)
