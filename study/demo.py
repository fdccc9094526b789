"""The demo: a training in which the search acts, under four ways to clip."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.plot import RC, save

from .arms import DEMO
from .figures import PANELS, training
from .runs import Run, execute_all
from .training import EVALUATE_EVERY

SCENARIO = "staleness 8"
SMOOTH = 8  # updates of a running mean; that many share a rollout
WHAT_TO_SEE = (
    "Wrong walks are longer than right ones, so tokens of negative advantage outweigh the others:"
    " where the share at the starting bounds is below the target of 0.4, BAPO raises its bounds."
    " Compare BAPO with fixed 0.9/3.0, where its search usually ends, to see what the search itself"
    " changes, and with 'no clip' to see what clipping is for; arms whose ranges over the seeds"
    " overlap cannot be told apart."
)


def run(out: Path, seeds: int, updates: int) -> pd.DataFrame:
    """Trains all arms for all seeds; writes a CSV and a figure, prints a table."""
    out.mkdir(parents=True, exist_ok=True)
    runs = [Run(SCENARIO, arm, seed, updates) for seed in range(seeds) for arm in DEMO]
    frames = []
    for done, rows_ in track(execute_all(runs), "training", total=len(runs)):
        frame = pd.DataFrame(rows_).rename_axis("update").reset_index()
        frames.append(frame.assign(arm=done.arm, seed=done.seed))
    rows = pd.concat(frames, ignore_index=True)
    rows = rows.sort_values(["arm", "seed", "update"], ignore_index=True)
    rows.to_csv(out / "offpolicy_rlvr.csv", index=False)
    draw(rows, out / "offpolicy_rlvr.png")
    console = Console()
    console.print(summary(rows))
    console.print(WHAT_TO_SEE)
    console.print(f"Wrote offpolicy_rlvr.csv and offpolicy_rlvr.png to {out}/")
    return rows


def draw(rows: pd.DataFrame, path: Path) -> Path:
    """All panels; what is known for every update as a running mean."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for arm in DEMO:
        of_seeds = [of_seed for _, of_seed in rows[rows.arm == arm].groupby("seed")]
        curves[arm] = {name: [_smooth(of_seed, name) for of_seed in of_seeds] for name in PANELS}
    every = {name: EVALUATE_EVERY if name == "held_out" else 1 for name in PANELS}
    note = f"Lines: mean over seeds, running mean over {SMOOTH} updates. Bands: range over seeds."
    with mpl.rc_context(RC):
        return save(training(curves, every, note), path)


def _smooth(rows: pd.DataFrame, name: str) -> list[float]:
    if name == "held_out":
        return rows[name].dropna().tolist()
    return rows[name].rolling(SMOOTH, min_periods=1).mean().tolist()


def summary(rows: pd.DataFrame) -> Table:
    """What came out, as mean and standard deviation over the seeds."""
    table = Table(title="Mean ± standard deviation over seeds; means are over all updates")
    for heading in (
        "arm", "held-out reward", "greedy", "entropy at the end", "largest gradient norm",
        "share at starting bounds", "below target", "bounds raised",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in DEMO:
        of_seeds = rows[rows.arm == arm].groupby("seed")
        columns = [
            of_seeds.held_out_end.last(),
            of_seeds.held_out_greedy.last(),
            of_seeds.entropy.apply(lambda values: values.tail(SMOOTH).mean()),
            of_seeds.grad_norm.max(),
            of_seeds.bapo_pos_share_start.mean(),
        ]
        cells = [f"{c.mean():.3f} ± {c.std(ddof=len(c) > 1):.3f}" for c in columns]
        decisions = rows.loc[rows.arm == arm, ["below_target", "moved"]].mean()
        table.add_row(arm, *cells, *(f"{share:.0%}" for share in decisions))
    return table
