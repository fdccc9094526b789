"""The runs of a study, some at a time, and their records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.records import Record, append, environment, load

from . import language_model
from .arms import ARMS, SCENARIOS, SCOPES
from .toy import training
from .toy.policy import warm_policy

WORKERS = min(4, os.cpu_count() or 1)  # each has one thread
WINDOW = 8  # updates that a point of a recorded curve is the mean of
RULE_SCENARIO = "largest, staleness 8"  # where every update measures the Entropy-Clip Rule
RULE = ("rule", "entropy_change")
SIZE_OF_SMOLLM2, SIZE_OF_THE_TOY = (3, 64), (5, 160)  # seeds and updates
WITH_SCOPES = "staleness 8", "sample replay"
# What is kept of each update's decisions: the share of them of which it is true.
DECISIONS = ("below_target", "moved", "interior", "bapo_saturated")


@dataclass(frozen=True)
class Run:
    """What one run is, apart from the code."""

    scenario: str
    arm: str
    seed: int
    updates: int


def planned(
    scenarios: Sequence[str], seeds: int | None = None, updates: int | None = None
) -> list[Run]:
    """The arms of the scenarios, and in two of the toy's the scopes of the search."""
    runs = []
    for scenario in scenarios:
        arms = [*SCENARIOS[scenario].arms, *(SCOPES if scenario in WITH_SCOPES else [])]
        most, length = SIZE_OF_SMOLLM2 if SCENARIOS[scenario].task else SIZE_OF_THE_TOY
        both = product(range(seeds or most), arms)
        runs += [Run(scenario, arm, seed, updates or length) for seed, arm in both]
    return runs


def execute(run: Run) -> list[dict[str, float]]:
    """The rows of a run, one per update, on one thread."""
    torch.set_num_threads(1)
    arm, scenario = (ARMS | SCOPES)[run.arm], SCENARIOS[run.scenario]
    if scenario.task:
        policy = language_model.untrained(scenario.task)
        measure_rule = run.scenario == RULE_SCENARIO
        rows = language_model.train(policy, arm, scenario, run.seed, run.updates, measure_rule)
    else:
        rows = training.train(warm_policy(run.seed), arm, scenario, run.seed, run.updates)
    return list(rows)


def execute_all(runs: Sequence[Run]) -> Iterator[tuple[Run, list[dict[str, float]]]]:
    """Runs and their rows, in the order in which they end."""
    with ProcessPoolExecutor(WORKERS) as pool:
        pending = {pool.submit(execute, run): run for run in runs}
        for future in as_completed(pending):
            yield pending[future], future.result()


def record(run: Run, rows: list[dict[str, float]]) -> Record:
    """A run in one line: its end, shares of updates, curves, and the updates of the rule."""
    config = (ARMS | SCOPES)[run.arm].config
    end = rows[-1]
    result: Record = {
        **asdict(run),
        "held_out": end["held_out_end"],
        **({"held_out_greedy": end["held_out_greedy"]} if "held_out_greedy" in end else {}),
        "largest_grad_norm": rounded(max(row["grad_norm"] for row in rows)),
        "curves": {name: means([r[name] for r in rows]) for name in rows[0] if name not in RULE},
    }
    for name in DECISIONS:
        result[name.removeprefix("bapo_")] = rounded(fmean(row[name] for row in rows))
    if config.options.start() != config.options.maximum():
        sides = "bapo_clip_low", "bapo_clip_high"
        result["bounds"] = [[rounded(row[side]) for side in sides] for row in rows]
    result["curves"]["held_out"] = [row["held_out"] for row in rows if "held_out" in row]
    if RULE[0] in end:
        result["rule"] = [[rounded(row[name]) for name in RULE] for row in rows]
    return result


def means(values: list[float]) -> list[float]:
    """Over every WINDOW updates."""
    return [rounded(fmean(values[i : i + WINDOW])) for i in range(0, len(values), WINDOW)]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def done(path: Path) -> dict[Run, Record]:
    """The records of a file by their runs."""
    return {Run(*(r[name] for name in Run.__dataclass_fields__)): r for r in load(path)}


def complete(path: Path, runs: list[Run]) -> Iterator[Run]:
    """Appends the records of all runs that the file lacks; yields each run once it is there."""
    known, facts = done(path), environment() | {"threads": 1}
    yield from (run for run in runs if run in known)
    missing = [run for run in runs if run not in known]
    for run, rows in execute_all(missing):
        append(path, [facts | record(run, rows)])
        yield run
