"""The demo: a training in which the search acts, under four ways to clip."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from benchmarks.plot import RC, save

from .arms import DEMO
from .curves import PANELS, training
from .runs import Run, execute_all
from .training import EVALUATE_EVERY

SCENARIO = "staleness 8"
TITLE = (
    "Held-out reward (sampled and greedy) and entropy at the end, largest gradient norm, share at"
    " the starting bounds, updates with a share below the target and with raised bounds;"
    " mean ± standard deviation over seeds"
)
FIGURES = "before_after.png", "offpolicy_rlvr.png"  # the first is that of examples/before_after.py
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
    console = Console()
    console.print(f"{seeds} policies have a supervised warm-up; each arm then updates all of them")
    runs = [Run(SCENARIO, arm, seed, updates) for seed in range(seeds) for arm in DEMO]
    frames = []
    for done, updates_of_run in track(execute_all(runs), f"{len(runs)} runs", total=len(runs)):
        frame = pd.DataFrame(updates_of_run).rename_axis("update").reset_index()
        frames.append(frame.assign(arm=done.arm, seed=done.seed))
    rows = pd.concat(frames, ignore_index=True)
    rows = rows.sort_values(["arm", "seed", "update"], ignore_index=True)
    rows.to_csv(out / "offpolicy_rlvr.csv", index=False)
    draw(rows, out / "offpolicy_rlvr.png")
    console.print(summary(rows))
    console.print(WHAT_TO_SEE)
    for figure in filter(Path.exists, (out / name for name in FIGURES)):
        print(figure)
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
    quantities = {}
    for arm in DEMO:
        of_arm = rows[rows.arm == arm]
        of_seeds = of_arm.groupby("seed")
        over_seeds = {
            "held-out": of_seeds.held_out_end.last(),
            "greedy": of_seeds.held_out_greedy.last(),
            "entropy": of_seeds.entropy.apply(lambda values: values.tail(SMOOTH).mean()),
            "max gradient": of_seeds.grad_norm.max(),
            "share": of_seeds.bapo_pos_share_start.mean(),
        }
        cells = {
            name: f"{c.mean():.2f} ± {c.std(ddof=len(c) > 1):.2f}" for name, c in over_seeds.items()
        }
        cells |= {"below 0.4": f"{of_arm.below_target.mean():.0%}"}
        quantities[arm] = cells | {"raised": f"{of_arm.moved.mean():.0%}"}
    columns = (Column(arm, justify="right") for arm in DEMO)
    table = Table("", *columns, title=TITLE, title_justify="left")
    for name in quantities[DEMO[0]]:
        table.add_row(name, *(quantities[arm][name] for arm in DEMO))
    return table
