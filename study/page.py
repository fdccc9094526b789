"""The tables of ``docs/internals/study.md``, from the records."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from benchmarks.tables import filled, markdown

from .compare import complete_scenarios, courses, end_points


def tables(runs: pd.DataFrame) -> dict[str, list[str]]:
    """By their marks."""
    real, toy = (complete_scenarios(runs, of_the_toy) for of_the_toy in (False, True))
    return {
        "runs": [made(runs[runs.scenario.isin(real)])],
        "ends": [markdown(end_points(runs, real))],
        "courses": [markdown(courses(runs, scenario)) for scenario in real],
        "toy_runs": [made(runs[runs.scenario.isin(toy)])],
        "toy": [markdown(end_points(runs, toy))],
    }


def made(runs: pd.DataFrame) -> str:
    """How many runs, where, and at which commits."""
    commits = ", ".join(f"{n} at commit {c}" for c, n in runs["commit"].value_counts().items())
    last = runs.sort_values("date").iloc[-1]
    machines = "; ".join(sorted(runs.machine.unique()))
    return (
        f"{len(runs)} runs of {last.updates} updates, {commits}; {machines}; one thread per run, "
        f"torch {last.torch}, {last.date[:10]}."
    )


def fill(runs: pd.DataFrame, page: Path) -> Path:
    """Writes the tables between their marks."""
    page.write_text(filled(page.read_text(), tables(runs)))
    return page
