"""Records as a table, and paired differences of arms."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd
from scipy import stats

from benchmarks.records import Record, load

from .arms import ARMS, SCENARIOS

BASELINE = "fixed 0.8/1.2"
CONFIDENCE = 0.95
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


def compared(runs: pd.DataFrame) -> list[str]:
    """The scenarios in which every arm was run: all but the on-policy one."""
    return [s for s in SCENARIOS if set(ARMS) <= set(runs[runs.scenario == s].arm)]


class Difference(NamedTuple):
    """The mean over seeds of the difference of two arms, and its confidence interval."""

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
    return Difference(float((both[arm] - both[against]).mean()), interval.low, interval.high)


def end_points(runs: pd.DataFrame) -> pd.DataFrame:
    """Held-out rewards; in brackets the difference from the baseline, bold if it excludes zero."""

    def cell(scenario: str, arm: str) -> str:
        reward = runs[(runs.scenario == scenario) & (runs.arm == arm)].held_out.mean()
        if arm == BASELINE:
            return f"{reward:.3f}"
        d = paired(runs, scenario, arm)
        text = f"{reward:.3f} ({d.mean:+.3f}±{d.high - d.mean:.3f})"
        return f"**{text}**" if d.separated else text

    scenarios = compared(runs)
    return pd.DataFrame({s: {arm: cell(s, arm) for arm in ARMS} for s in scenarios})
