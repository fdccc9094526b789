"""Records as data frames."""

from __future__ import annotations

from dataclasses import fields

import pandas as pd

from .cases import DISTILLATION, GAUSSIAN, HEAD, SAMPLING_MASK, WHOLE_VOCABULARY, Case
from .records import RESULTS, load

CASE = [field.name for field in fields(Case)]


def latest(device: str, profile: str = GAUSSIAN) -> pd.DataFrame:
    """The last record of each method and case on a device, without sweeps that have a section."""
    frame = _last_records(device)
    apart = frame.sweep.isin([HEAD, SAMPLING_MASK, WHOLE_VOCABULARY, DISTILLATION])
    return frame[~apart & (frame.profile == profile)].reset_index(drop=True)


def measured_in(device: str, *sweeps: str) -> pd.DataFrame:
    """The last record of each method in these sweeps, where it was measured."""
    frame = _last_records(device)
    mine = frame.sweep.isin(sweeps) & (frame.status == "measured")
    return frame[mine].reset_index(drop=True)


def _last_records(device: str) -> pd.DataFrame:
    # What records say nothing about that are older than a field.
    older = {"frozen": False, "K": 0, "profile": GAUSSIAN}
    records = [older | record for record in load(RESULTS / f"{device}.jsonl")]
    frame = pd.DataFrame(records, columns=None if records else ["method", "status", *CASE])
    return frame.drop_duplicates(["method", *CASE], keep="last").reset_index(drop=True)


def plain_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured losses with gradients on dense, slightly stale data."""
    plain = (frame.task == "loss") & (frame.layout == "dense") & (frame.data == "stale")
    return frame[plain & (frame.status == "measured")]
