"""``python -m study``: the demo, the study, and the page of the study."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.progress import track

from . import demo as demo_
from . import long_run as long_run_
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
def long_run(
    out: Path = Path("out"), updates: int = 2000, lr: float = long_run_.LR, seed: int = 0
) -> None:
    """Thousands of updates with the kernels and with plain PyTorch, side by side."""
    long_run_.write(out, updates, lr, seed)


@app.command()
def report(records: Path = RESULTS, out: Path = DOCS) -> None:
    """Fills the tables of its page and draws its figures from the records."""
    from . import figures, page  # with packages that the environment of the demo lacks
    from .compare import frame

    runs = frame(records)
    path = out / page.NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.page(runs))
    for written in (path, *figures.of_study(runs, out / "figures")):
        print(written)


if __name__ == "__main__":
    app()
