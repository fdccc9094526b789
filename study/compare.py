"""Records as a table, and paired differences of arms."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd
from scipy import stats

from benchmarks.records import Record, load

from .arms import ARMS, SCENARIOS
from .runs import WINDOW, rounded

BASELINE = "fixed 0.8/1.2"
CONFIDENCE, SEEDS = 0.95, 3
LATE = 3  # points of a curve, of WINDOW updates each


def frame(records: list[Record] | Path) -> pd.DataFrame:
    """One row per run; the means of its curves, over all and over the last points, are columns."""
    rows = []
    for record in load(records) if isinstance(records, Path) else records:
        curves = record["curves"].items()
        late = {f"late_{name}": fmean(values[-LATE:]) for name, values in curves}
        whole = {f"mean_{name}": fmean(values) for name, values in curves}
        rows.append(record | late | whole)
    return pd.DataFrame(rows).sort_values(["scenario", "arm", "seed"], ignore_index=True)


def complete_scenarios(runs: pd.DataFrame, of_the_toy: bool) -> list[str]:
    """The scenarios of SmolLM2 or the toy all of whose arms were run with at least SEEDS seeds."""
    seeds = runs.groupby(["scenario", "arm"]).seed.nunique()

    def enough(scenario: str) -> bool:
        return all(seeds.get((scenario, arm), 0) >= SEEDS for arm in SCENARIOS[scenario].arms)

    return [s for s in SCENARIOS if (SCENARIOS[s].task == "") == of_the_toy and enough(s)]


def arms_of(scenarios: list[str]) -> list[str]:
    """Of any of these."""
    return [arm for arm in ARMS if any(arm in SCENARIOS[s].arms for s in scenarios)]


class Difference(NamedTuple):
    """The difference of two arms by seed, its mean, and the confidence interval of the mean."""

    by_seed: list[float]
    mean: float
    low: float
    high: float

    @property
    def separated(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired(
    runs: pd.DataFrame, scenario: str, arm: str, column: str = "held_out", against: str = BASELINE
) -> Difference:
    """``arm`` minus ``against``: both started from the same policy for each seed (paired t)."""
    wide = runs[runs.scenario == scenario].pivot(index="seed", columns="arm", values=column)
    both = wide[[arm, against]].dropna()
    test = stats.ttest_rel(both[arm], both[against])
    interval = test.confidence_interval(CONFIDENCE)
    by_seed = both[arm] - both[against]
    return Difference(by_seed.tolist(), float(by_seed.mean()), interval.low, interval.high)


def end_points(runs: pd.DataFrame, scenarios: list[str]) -> pd.DataFrame:
    """Held-out rewards; in brackets the difference from the baseline, bold if it excludes zero."""

    def cell(scenario: str, arm: str) -> str:
        if arm not in SCENARIOS[scenario].arms:
            return ""
        reward = runs[(runs.scenario == scenario) & (runs.arm == arm)].held_out.mean()
        if arm == BASELINE:
            return f"{reward:.3f}"
        d = paired(runs, scenario, arm)
        text = f"{reward:.3f} ({d.mean:+.3f}±{d.high - d.mean:.3f})"
        return f"**{text}**" if d.separated else text

    return pd.DataFrame({s: {arm: cell(s, arm) for arm in arms_of(scenarios)} for s in scenarios})


def courses(runs: pd.DataFrame, scenario: str) -> pd.DataFrame:
    """What happened on the way to the end: means over the seeds, in brackets their range."""
    runs = runs[runs.scenario == scenario]
    at_maxima = [share_at_maxima(*row) for row in zip(runs.arm, runs.bounds, strict=True)]
    runs = runs.assign(
        best=[max(curves["held_out"]) for curves in runs.curves],
        worst=[min(curves["held_out"]) for curves in runs.curves],
        at_maxima=at_maxima,
    )
    columns = {
        "best": "held-out reward at best",
        "worst": "at worst",
        "late_training_reward": f"reward of the last {LATE * WINDOW} updates",
        "late_entropy": "entropy of these, nats",
        "largest_grad_norm": "largest gradient norm",
        "at_maxima": "updates at the maxima",
    }

    def cell(values: pd.Series[float]) -> str:
        if values.isna().any():
            return ""
        return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"

    table = runs.groupby("arm")[[*columns]].agg(cell).rename(columns=columns)
    return table.loc[[arm for arm in ARMS if arm in table.index]].rename_axis(scenario)


def share_at_maxima(arm: str, bounds: list[list[float]] | float) -> float:
    """Of the updates; NaN for an arm that does not search."""
    if not isinstance(bounds, list):
        return float("nan")
    maximum = [rounded(bound) for bound in ARMS[arm].config.options.maximum()]
    return fmean(both == maximum for both in bounds)
