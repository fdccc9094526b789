"""The tables of ``docs/internals/study.md``, from the records."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pandas as pd

from benchmarks.records import Record
from benchmarks.tables import filled, markdown

from .compare import complete_scenarios, courses, end_points, paired

BATCH = 8  # updates of a rollout, the last of which an entropy is the mean of


def tables(runs: pd.DataFrame, of_head: list[Record]) -> dict[str, list[str]]:
    """By their marks."""
    real, toy = (complete_scenarios(runs, of_the_toy) for of_the_toy in (False, True))
    return {
        "runs": [made(runs[runs.scenario.isin(real)])],
        "ends": [markdown(end_points(runs, real))],
        "courses": [markdown(courses(runs, scenario)) for scenario in real],
        "toy_runs": [made(runs[runs.scenario.isin(toy)])],
        "toy": [markdown(end_points(runs, toy))],
        **of_sampled_head(of_head),
    }


def of_sampled_head(records: list[Record]) -> dict[str, list[str]]:
    """The ends of the trainings, the steps of the head's rows, and the variances."""
    trained = pd.DataFrame([r for r in records if "rule" in r])
    runs = trained.assign(
        scenario="",
        arm=trained.rule,
        held_out=trained.held_out.map(lambda values: values[-1]),
        entropy=trained.entropy.map(lambda values: fmean(values[-BATCH:])),
        entries=trained.entries.map(fmean),
    )
    ends, steps = {}, {}
    for rule, mine in runs.groupby("arm", sort=False):
        ends[rule] = {"entries of a row": f"{mine.entries.mean():,.0f}"}
        for column, name in (("held_out", "held-out accuracy"), ("entropy", "entropy")):
            values = mine[column]
            ends[rule][name] = f"{values.mean():.3f} (spread {values.std():.3f})"
            if rule != "exact":
                d = paired(runs, "", rule, column, "exact")
                ends[rule][f"{name}, less exact"] = f"{d.mean:+.3f} ± {d.high - d.mean:.3f}"
        for name, of_seeds in pd.DataFrame([*mine.steps]).items() if rule != "exact" else ():
            known = [values for values in of_seeds.dropna() if values[0]]
            if known:
                ids, step, exact = map(fmean, zip(*known, strict=True))
                low, high = name.split(" to ")
                name = low if low == high else name
                steps.setdefault(rule, {})[name] = f"{step / exact:.2f} ({ids:,.0f} ids)"
    added = {
        f"{part}, after {r['updates']} updates": {
            rule: f"{of_rule[part]:.3%}" for rule, of_rule in r["variances"].items()
        }
        for part in ("all", "layers", "head")
        for r in records
        if "variances" in r
    }
    made = pd.DataFrame(ends).T, pd.DataFrame(steps).T, pd.DataFrame(added)
    names = "head_ends", "head_steps", "head_variances"
    index = "gradient of the head"
    return {
        name: [markdown(table.fillna("").rename_axis(index))]
        for name, table in zip(names, made, strict=True)
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


def fill(runs: pd.DataFrame, of_head: list[Record], page: Path) -> Path:
    """Writes the tables between their marks."""
    page.write_text(filled(page.read_text(), tables(runs, of_head)))
    return page
