"""The runs of a study, some at a time, and their records."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.records import Record, append, environment, load

from .arms import ARMS, DEMO, SCENARIOS, SCOPES, Scenario
from .policy import warm_policy
from .training import train

WORKERS = min(4, os.cpu_count() or 1)  # each has one thread
WINDOW = 16  # updates that a point of a recorded curve is the mean of
RULE_SCENARIO = "staleness 8"  # where every update measures the Entropy-Clip Rule
RULE = ("rule", "entropy_change")
# What is kept of each update's decisions: the share of them of which it is true.
DECISIONS = ("below_target", "moved", "interior", "bapo_saturated")


@dataclass(frozen=True)
class Run:
    """What one run is, apart from the code."""

    scenario: str
    arm: str
    seed: int
    updates: int


def arms_of(scenario: str) -> list[str]:
    """On-policy all ratios are 1 and the bounds of no arm clip anything: two arms show it."""
    on_policy = SCENARIOS[scenario] == Scenario()
    return [arm for arm in ARMS if not on_policy or arm in DEMO[:2]]


def planned(seeds: int, updates: int) -> list[Run]:
    """All arms in all scenarios, then the scopes of the search, seed after seed."""
    pairs = [(scenario, arm) for scenario in SCENARIOS for arm in arms_of(scenario)]
    pairs += [(scenario, arm) for scenario in ("staleness 8", "sample replay") for arm in SCOPES]
    return [Run(*pair, seed, updates) for seed in range(seeds) for pair in pairs]


def warmed_up(seed: int) -> bytes:
    """The policy that all runs of a seed start from."""
    torch.set_num_threads(1)
    return pickle.dumps(warm_policy(seed))  # processes would share the memory of its tensors


def execute(run: Run, policy: bytes, measure_rule: bool) -> list[dict[str, float]]:
    """The rows of a run, one per update, on one thread."""
    torch.set_num_threads(1)
    arm, scenario = (ARMS | SCOPES)[run.arm], SCENARIOS[run.scenario]
    measure_rule &= run.scenario == RULE_SCENARIO and run.arm in ARMS
    return list(train(pickle.loads(policy), arm, scenario, run.seed, run.updates, measure_rule))


def execute_all(
    runs: Sequence[Run], measure_rule: bool = False
) -> Iterator[tuple[Run, list[dict[str, float]]]]:
    """Runs and their rows, in the order in which they end."""
    with ProcessPoolExecutor(WORKERS) as pool:
        seeds = dict.fromkeys(run.seed for run in runs)
        policies = {seed: pool.submit(warmed_up, seed) for seed in seeds}
        pending = {
            pool.submit(execute, run, policies[run.seed].result(), measure_rule): run
            for run in runs
        }
        for future in as_completed(pending):
            yield pending[future], future.result()


def record(run: Run, rows: list[dict[str, float]]) -> Record:
    """A run in one line: its end, shares of updates, curves, and the updates of the rule."""
    config = (ARMS | SCOPES)[run.arm].config
    end = rows[-1]
    result: Record = {
        **asdict(run),
        "held_out": end["held_out_end"],
        "held_out_greedy": end["held_out_greedy"],
        "largest_grad_norm": rounded(max(row["grad_norm"] for row in rows)),
        "curves": {name: means([r[name] for r in rows]) for name in rows[0] if name not in RULE},
    }
    for name in DECISIONS:
        result[name.removeprefix("bapo_")] = rounded(fmean(row[name] for row in rows))
    if config.options.start() != config.options.maximum():
        sides = "bapo_clip_low", "bapo_clip_high"
        result["bounds"] = [[rounded(row[side]) for side in sides] for row in rows]
    result["curves"]["held_out"] = [row["held_out"] for row in rows if "held_out" in row]
    if "rule" in end:
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
    for run, rows in execute_all(missing, measure_rule=True):
        append(path, [facts | record(run, rows)])
        yield run
