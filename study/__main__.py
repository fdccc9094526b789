"""``python -m study``: the demo and the study, whose page is ``docs/internals/study.md``."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.progress import track

from . import demo as demo_
from .runs import complete, planned

RESULTS = Path(__file__).parent / "results" / "study.jsonl"
DOCS = Path(__file__).parents[1] / "docs"
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def demo(out: Path = Path("out"), seeds: int = 3, updates: int = 96) -> None:
    """Trains four arms at a staleness of 8; three minutes on two cores."""
    demo_.run(out, seeds, updates)


@app.command()
def run(out: Path = RESULTS, seeds: int = 5, updates: int = 160) -> None:
    """Trains every arm in every scenario; a file that is there already is completed."""
    runs = planned(seeds, updates)
    for _ in track(complete(out, runs), "runs", total=len(runs)):
        pass


@app.command()
def report(records: Path = RESULTS, out: Path = DOCS) -> None:
    """Prints the rewards at the end and draws the figures from the records."""
    from benchmarks.tables import markdown  # with packages that the environment of the demo lacks

    from .compare import end_points, frame
    from .figures import of_study

    runs = frame(records)
    print(markdown(end_points(runs)))
    for written in of_study(runs, out / "figures"):
        print(written)


if __name__ == "__main__":
    app()
