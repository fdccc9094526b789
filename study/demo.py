"""The demo: the same rollouts under several ways to clip, by SmolLM2 or by the toy."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Column, Table
from smollm2_model import fetch

from benchmarks.plot import RC, save

from . import language_model
from .arms import ARMS, DEMO, NO_CLIP, SCENARIOS
from .arms import FEW as OF_TOY
from .curves import PANELS, training
from .language_model import train, words
from .runs import Run, execute_all
from .toy.training import EVALUATE_EVERY

SCENARIO = SCENARIOS["largest, staleness 32"]
LR = 2e-4  # a third more than the study's, so that the end is soon reached
NOW = "{}: reward {training_reward:.2f}, bounds {bapo_clip_low:.3g} to {bapo_clip_high:.3g}"

TITLE = (
    "Held-out reward at the end and at best, reward of the last updates, entropy, largest gradient"
    " norm, share at the starting bounds, updates with a share below the target and with raised"
    " bounds"
)
FIGURES = "before_after.png", "offpolicy_rlvr.png"  # the first is that of examples/before_after.py
SMOOTH = 8  # updates of a running mean
OFFLINE = (
    "SmolLM2 has not been downloaded (pip says why); the toy is trained instead, as by"
    " 'python -m study demo --policy toy'."
)
WHAT_TO_SEE = {
    "smollm2": (
        "Both arms learn from the same {S} batches until the policy has moved far from the one that"
        " sampled them. Without clipping it then ends every answer at once, gets no reward, and"
        " has no gradient any more. Whether the search is better than bounds that are fixed at its"
        " maxima is another question: docs/internals/study.md."
    ),
    "toy": (
        "Wrong walks are longer than right ones, so tokens of negative advantage outweigh the"
        " others: where the share at the starting bounds is below the target of 0.4, BAPO raises"
        " its bounds. Compare BAPO with fixed 0.9/3.0, where its search usually ends, to see what"
        " the search itself changes, and with 'no clip' to see what clipping is for; arms whose"
        " ranges over the seeds overlap cannot be told apart."
    ),
}


def run(out: Path, policy: str, seeds: int | None, updates: int | None) -> pd.DataFrame:
    """Trains all arms; writes a CSV and a figure, prints a table."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if policy == "smollm2":
        try:
            fetch()
        except subprocess.CalledProcessError:
            console.print(OFFLINE)
            policy = "toy"
    if policy == "smollm2":
        rows, every = of_smollm2(console, updates or 40), language_model.EVALUATE_EVERY
    else:
        rows, every = of_toy(console, seeds or 3, updates or 96), EVALUATE_EVERY
    rows = rows.sort_values(["arm", "seed", "update"], ignore_index=True)
    rows.to_csv(out / "offpolicy_rlvr.csv", index=False)
    draw(rows, every, out / "offpolicy_rlvr.png")
    console.print(summary(rows))
    console.print(WHAT_TO_SEE[policy].format(S=SCENARIO.staleness))
    for figure in filter(Path.exists, (out / name for name in FIGURES)):
        print(figure)
    return rows


def of_smollm2(console: Console, updates: int) -> pd.DataFrame:
    """The arms in turns, so that they share the model and its first rollout."""
    policies = {arm: language_model.untrained(SCENARIO.task, LR) for arm in DEMO}
    questions = language_model.held_out(SCENARIO.task, 3)
    said = {"before": words(policies[NO_CLIP], questions)}
    rows = []
    with Progress(console=console) as progress:
        sampling = partial(progress.track, description="completions")
        options = SCENARIO, 0, updates, False, sampling
        trainings = {arm: train(policies[arm], ARMS[arm], *options) for arm in DEMO}
        bars = {arm: progress.add_task(arm, total=updates) for arm in DEMO}
        for update in range(updates):
            for arm in DEMO:
                row = next(trainings[arm])
                rows.append({"arm": arm, "seed": 0, "update": update} | row)
                progress.update(bars[arm], advance=1, description=NOW.format(arm, **row))
    said |= {arm: words(policies[arm], questions) for arm in DEMO}
    table = Table("held-out question", *said, title="Most likely completions", show_lines=True)
    for question, *completions in zip(questions, *said.values(), strict=True):
        table.add_row(" ... ".join(question[:2]), *completions)
    console.print(table)
    return pd.DataFrame(rows)


def of_toy(console: Console, seeds: int, updates: int) -> pd.DataFrame:
    """Runs in processes of their own."""
    console.print(f"{seeds} policies have a supervised warm-up; each arm then updates all of them")
    runs = [Run("staleness 8", arm, seed, updates) for seed in range(seeds) for arm in OF_TOY]
    frames = []
    for done, rows in track(execute_all(runs), f"{len(runs)} runs", total=len(runs)):
        frame = pd.DataFrame(rows).rename_axis("update").reset_index()
        frames.append(frame.assign(arm=done.arm, seed=done.seed))
    return pd.concat(frames, ignore_index=True)


def draw(rows: pd.DataFrame, every: int, path: Path) -> Path:
    """All panels; what is known for every update as a running mean."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for arm in rows.arm.unique():
        of_seeds = [of_seed for _, of_seed in rows[rows.arm == arm].groupby("seed")]
        curves[arm] = {name: [_smooth(of_seed, name) for of_seed in of_seeds] for name in PANELS}
    points = {name: every if name == "held_out" else 1 for name in PANELS}
    note = f"Lines: mean over seeds, running mean over {SMOOTH} updates. Bands: range over seeds."
    with mpl.rc_context(RC):
        return save(training(curves, points, note), path)


def _smooth(rows: pd.DataFrame, name: str) -> list[float]:
    if name == "held_out":
        return rows[name].dropna().tolist()
    return rows[name].rolling(SMOOTH, min_periods=1).mean().tolist()


def summary(rows: pd.DataFrame) -> Table:
    """What came out, as mean and standard deviation over the seeds."""
    quantities = {}
    for arm, of_arm in rows.groupby("arm"):
        of_seeds = of_arm.groupby("seed")
        over_seeds = {
            "held-out": of_seeds.held_out_end.last(),
            "at best": of_seeds.held_out.max(),
            "reward": of_seeds.training_reward.apply(lambda values: values.tail(SMOOTH).mean()),
            "entropy": of_seeds.entropy.apply(lambda values: values.tail(SMOOTH).mean()),
            "max gradient": of_seeds.grad_norm.max(),
            "share": of_seeds.bapo_pos_share_start.mean(),
        }
        spread = " ± {:.2f}" if rows.seed.nunique() > 1 else ""
        cells = {name: f"{c.mean():.2f}{spread.format(c.std())}" for name, c in over_seeds.items()}
        cells |= {"below 0.4": f"{of_arm.below_target.mean():.0%}"}
        quantities[arm] = cells | {"raised": f"{of_arm.moved.mean():.0%}"}
    columns = (Column(arm, justify="right") for arm in quantities)
    table = Table("", *columns, title=TITLE, title_justify="left")
    for name in quantities[NO_CLIP]:
        table.add_row(name, *(quantities[arm][name] for arm in quantities))
    return table
