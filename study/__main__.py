"""``python -m study``: the demo, the study, and its page."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.progress import track

from .runs import complete, planned

RESULTS = Path(__file__).parent / "results" / "study.jsonl"
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(out: Path = RESULTS, seeds: int = 5, updates: int = 160) -> None:
    """Trains every arm in every scenario; a file that is there already is completed."""
    runs = planned(seeds, updates)
    for _ in track(complete(out, runs), "runs", total=len(runs)):
        pass


if __name__ == "__main__":
    app()
