"""``python -m study``: the demo and the study, whose page is ``docs/internals/study.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import track

from benchmarks.records import load

from . import demo as demo_
from .arms import SCENARIOS
from .runs import complete, planned

RESULTS = Path(__file__).parent / "results" / "study.jsonl"
OF_HEAD = RESULTS.with_name("sampled_head.jsonl")
DOCS = Path(__file__).parents[1] / "docs"
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def demo(
    out: Path = Path("out"),
    policy: Literal["smollm2", "toy"] = "smollm2",
    seeds: Annotated[int | None, typer.Option(help="of the toy: 3")] = None,
    updates: Annotated[int | None, typer.Option(help="40; of the toy 96")] = None,
) -> None:
    """Trains SmolLM2 without clipping and with BAPO, or the toy under four arms."""
    demo_.run(out, policy, seeds, updates)


@app.command()
def run(
    out: Path = RESULTS,
    seeds: Annotated[int | None, typer.Option(help="3; of the toy 5")] = None,
    updates: Annotated[int | None, typer.Option(help="64; of the toy 160")] = None,
    scenario: list[str] | None = None,
) -> None:
    """Trains every arm in every scenario, or in some; a file that is there already is completed."""
    runs = planned(scenario or [*SCENARIOS], seeds, updates)
    for _ in track(complete(out, runs), "runs", total=len(runs)):
        pass


@app.command()
def report(records: Path = RESULTS, out: Path = DOCS) -> None:
    """Draws the figures from the records, and writes the tables of the page."""
    from .compare import frame
    from .figures import of_study
    from .page import fill

    runs = frame(records)
    print(fill(runs, load(OF_HEAD), out / "internals" / "study.md"))
    for written in of_study(runs, out / "figures"):
        print(written)


if __name__ == "__main__":
    app()
