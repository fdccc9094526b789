"""The tables on sampling masks of ``docs/internals/benchmarks.md``."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from .cases import SAMPLING_MASK
from .plot import LEVELS
from .tables import by_column, machine


def of_masks(frame: pd.DataFrame) -> Iterator[str]:
    """A table per level, by dtype and head, with the floor at the rate of the copy."""
    frame = frame[frame.layout == "dense"]
    masked, ours = frame.sweep == SAMPLING_MASK, frame.method.str.startswith("bapo")
    first = frame[masked].iloc[0]
    ids = first.shares["allowed"] * first.V
    sizes = f"N = {first.N:,}, V = {first.V:,}, H = {first.H:,}; {ids:.1f} ids per set"
    yield f"{sizes}; {machine(frame)}"
    heads = frame.frozen.map({True: ", frozen", False: ", trained"})
    frame = frame.assign(
        column=frame["dtype"] + heads.where(frame.level == "hidden", ""),
        peak_bytes=frame.peak_bytes - frame.gradient_bytes,
        method=frame.method.where(masked, frame.method + ", whole vocabulary"),
    )
    floors = frame[masked & ours & (frame.bytes > 0)].drop_duplicates(["level", "column"])
    floors = floors.assign(method="floor", ms=floors.share * floors.ms, peak_bytes=float("nan"))
    frame = pd.concat([frame[masked | ours], floors])
    for level, of_level in frame.groupby("level", sort=False):
        peaks = of_level[of_level["dtype"] == "bfloat16"]
        yield by_column(of_level, f"Loss and gradients {LEVELS[str(level)]}, ms", peaks)
