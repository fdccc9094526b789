"""The results of ``pytest benchmarks`` as data frames."""

from __future__ import annotations

import json

import pandas as pd

from .cases import GAUSSIAN, Case
from .records import RESULTS


def results(kind: str) -> pd.DataFrame:
    """A row per method and case of ``cpu``, ``avx2`` (no AVX-512) or ``cuda``, logits first."""
    rows = []
    for path in sorted(RESULTS.glob(f"{kind}_*.json"), reverse=True):
        file = json.loads(path.read_text())
        facts = file["machine_info"] | {"machine": file["machine_info"]["processor"]}
        facts |= {"date": file["datetime"], "commit": file["commit_info"]["id"]}
        for run in file["benchmarks"]:
            rows.append(facts | {"ms": 1e3 * run["stats"]["median"]} | run["extra_info"])
    return pd.DataFrame(rows, columns=None if rows else ["method", *Case.__dataclass_fields__])


def shorten() -> None:
    """Rewrites the files with a line per benchmark, where the plugin writes one per number."""
    for path in RESULTS.glob("*.json"):
        file = json.loads(path.read_text())
        benchmarks = ",\n".join(map(json.dumps, file.pop("benchmarks")))
        path.write_text(f'{json.dumps(file)[:-1]}, "benchmarks": [\n{benchmarks}\n]}}\n')


def plain_losses(frame: pd.DataFrame, profile: str = GAUSSIAN) -> pd.DataFrame:
    """Losses with gradients on dense, slightly stale data: of the models, and over N and V."""
    plain = "task == 'loss' and layout == 'dense' and data == 'stale' and profile == @profile"
    return frame[frame.sweep.isna() | frame.sweep.isin(["N", "V"])].query(plain)
