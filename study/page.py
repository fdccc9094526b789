"""The tables of ``docs/internals/study.md``, from the records of the study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.tables import filled, markdown

from .arms import ARMS, NO_CLIP, SCOPES
from .compare import BASELINE, CONFIDENCE, Difference, compared, paired
from .runs import RULE_SCENARIO

NAME = "internals/study.md"
DOCS = Path(__file__).parents[1] / "docs"
SEARCHING = ("BAPO", "BAPO, gradient")
CONTRASTS = [
    ("fixed 0.8/1.2", "fixed 0.6/1.2"),
    ("fixed 0.9/3.0", "fixed 0.6/3.0"),
    ("fixed 0.6/3.0", "fixed 0.6/1.2"),
    ("BAPO", "fixed 0.9/3.0"),
    ("BAPO", "fixed 0.8/1.2"),
]


def page(runs: pd.DataFrame) -> str:
    """The page with the tables of the runs."""
    return filled((DOCS / NAME).read_text(), blocks(runs))


def blocks(runs: pd.DataFrame) -> dict[str, str]:
    return {
        "runs": made(runs),
        "end-point": by_scenario(runs, {arm: end_point(runs, arm) for arm in ARMS}),
        "comparisons": f"{by_chance(runs)} {on_policy(runs)}",
        "entropy": by_scenario(
            runs,
            {f"{a} minus {b}".replace("fixed ", ""): entropy(runs, a, b) for a, b in CONTRASTS},
        ),
        "searches": searches(runs),
        "scopes": scopes(runs),
        "rule": rule(runs),
    }


Cell = Callable[[str], str]


def by_scenario(runs: pd.DataFrame, lines: dict[str, Cell]) -> str:
    """A table: ``lines`` down, scenarios across."""
    cells = {s: {name: cell(s) for name, cell in lines.items()} for s in compared(runs)}
    return markdown(pd.DataFrame(cells))


def made(runs: pd.DataFrame) -> str:
    """What was run, on what, and at which commits."""
    last = runs.iloc[-1]
    counts = runs.groupby("commit").date.agg(["size", "max"])
    commits = "; ".join(f"{n} runs at commit {c}, {d[:10]}" for c, (n, d) in counts.T.items())
    return (
        f"{len(runs)} runs of {runs.updates.max()} updates, {runs.seed.nunique()} seeds; "
        f"{last.machine}, one thread per run, torch {last.torch}; {commits}."
    )


def bold(text: str, difference: Difference) -> str:
    return f"**{text}**" if difference.separated else text


def interval(difference: Difference) -> str:
    return f"{difference.mean:+.3f}±{difference.high - difference.mean:.3f}"


def end_point(runs: pd.DataFrame, arm: str) -> Cell:
    def cell(scenario: str) -> str:
        of_arm = runs[(runs.scenario == scenario) & (runs.arm == arm)]
        mean = f"{of_arm.held_out.mean():.3f}"
        if arm == BASELINE:
            return mean
        difference = paired(runs, scenario, arm)
        return bold(f"{mean} ({interval(difference)})", difference)

    return cell


def entropy(runs: pd.DataFrame, arm: str, against: str) -> Cell:
    def cell(scenario: str) -> str:
        difference = paired(runs, scenario, arm, "late_entropy", against)
        return bold(f"{difference.mean:+.3f}", difference)

    return cell


def on_policy(runs: pd.DataFrame) -> str:
    """The arms of the on-policy scenario, which must be the same to the bit."""
    rewards = runs[runs.scenario == "staleness 1"].pivot(
        index="seed", columns="arm", values="held_out"
    )
    same = (rewards.nunique(axis=1) == 1).all()
    words = "are the same to the bit" if same else "differ, which they must not"
    spread = f"{rewards[BASELINE].mean():.3f} ± {rewards[BASELINE].std():.3f}"
    return f"On-policy, {' and '.join(rewards.columns)} {words}: {spread}."


def by_chance(runs: pd.DataFrame) -> str:
    """How many intervals exclude zero, and how many would by chance."""
    arms = [arm for arm in ARMS if arm not in (BASELINE, NO_CLIP)]
    found = [paired(runs, scenario, arm) for scenario in compared(runs) for arm in arms]
    above, below = sum(d.low > 0 for d in found), sum(d.high < 0 for d in found)
    return (
        f"Of the {len(found)} intervals without '{NO_CLIP}', {above} lie above 0 and {below} below;"
        f" if no arm differed, about {(1 - CONFIDENCE) * len(found):.0f} would exclude 0 by chance."
    )


def searches(runs: pd.DataFrame) -> str:
    """What the searches did, as means over the seeds and the updates."""
    rows: dict[str, dict[str, str]] = {scenario: {} for scenario in compared(runs)}
    for arm in SEARCHING:
        name = arm.removeprefix("BAPO, ")
        for scenario, row in rows.items():
            mean = runs[(runs.scenario == scenario) & (runs.arm == arm)].mean(numeric_only=True)
            shares = mean.mean_bapo_pos_share_start, mean.mean_bapo_pos_share_max
            row[f"{name}: share"] = "{:.3f}-{:.3f}".format(*shares)
            row[f"{name}: raised"] = f"{mean.moved:.0%}"
            row[f"{name}: inside"] = f"{mean.interior:.0%}"
    return markdown(pd.DataFrame(rows).T)


def scopes(runs: pd.DataFrame) -> str:
    """Scopes over four micro-batches, and one call over the whole update."""
    rows: dict[str, dict[str, str]] = {}
    for scenario in dict.fromkeys(runs[runs.arm.isin(SCOPES)].scenario):
        for arm in SCOPES:
            of_arm = runs[(runs.scenario == scenario) & (runs.arm == arm)]
            reward = paired(runs, scenario, arm, against="BAPO")
            scope = arm.removeprefix("BAPO, scope ")
            rows.setdefault(scenario, {})[scope] = f"{interval(reward)}, {of_arm.moved.mean():.0%}"
    return markdown(pd.DataFrame(rows).T)


def rule(runs: pd.DataFrame) -> str:
    """Agreement of predicted and measured changes of the entropy, over all updates of an arm."""
    measured = runs[runs.scenario == RULE_SCENARIO].dropna(subset="rule")
    correlations, signs = {}, {}
    for arm in ARMS:
        points = np.concatenate([np.array(r) for r in measured[measured.arm == arm].rule])
        predicted, change = points.T
        correlations[arm] = stats.pearsonr(predicted, change).statistic
        signs[arm] = np.mean(np.sign(predicted) == np.sign(change))
    of_no_clip = signs.pop(NO_CLIP)
    return (
        f"Correlation {min(correlations.values()):.2f} to {max(correlations.values()):.2f} by arm; "
        f"the same sign in {min(signs.values()):.0%} to {max(signs.values()):.0%} of the updates, "
        f"in {of_no_clip:.0%} without clipping."
    )
