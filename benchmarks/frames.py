"""Records as data frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from .records import RESULTS, load

CASE = ["level", "task", "model", "N", "V", "H", "dtype", "layout", "data", "sweep"]


def latest(device: str, folder: Path = RESULTS) -> pd.DataFrame:
    """The last record of each method and case on a device; empty if there are none."""
    frame = pd.DataFrame(load(folder / f"{device}.jsonl"))
    if frame.empty:
        return frame
    return frame.drop_duplicates(["method", *CASE], keep="last").reset_index(drop=True)


def plain_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured losses with gradients on dense, slightly stale data."""
    plain = (frame.task == "loss") & (frame.layout == "dense") & (frame.data == "stale")
    return frame[plain & (frame.status == "measured")]
