"""64 off-policy updates: the fused loss drifts no further than rounding explains."""

import gc

import pytest
import torch
from helpers import needs_native

for package in ("transformers", "matplotlib", "pandas", "rich"):
    pytest.importorskip(package)
long_run = pytest.importorskip("study.long_run")

pytestmark = [needs_native, pytest.mark.xdist_group("long run")]
UPDATES = 64


def tensors():
    """Numbers of tensors and elements in memory, without a compiler's symbolic tensors."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    alive = [t for t in alive if isinstance(t.numel(), int)]
    return len(alive), sum(t.numel() for t in alive)


def test_the_drift_is_below_that_of_rounding_the_weights(monkeypatch):
    """A run whose weights are moved by one float32 unit after each update drifts further."""
    monkeypatch.delitem(long_run.LOSSES, "plain")  # is drawn, not compared
    rows, alive = [], []
    for row in long_run.run(UPDATES):
        rows.append(row)
        if row["update"] % long_run.UPDATES == 0:  # the last one of a rollout
            alive.append(tensors())
    assert len(set(alive[1:])) == 1  # the optimizer creates its state in the first update
    assert rows[-1]["moved"] > 1e3 * rows[-1]["distance, nudged"], "the run learns"
    assert len({row["upper, exact"] for row in rows}) > 1, "the search moves the bounds"
    for row in rows:
        assert row["distance, fused"] < row["distance, nudged"], row["update"]
    fused, nudged = (
        max(abs(row[f"loss, {name}"] - row["loss, exact"]) for row in rows)
        for name in ("fused", "nudged")
    )
    assert fused < nudged
    assert all(row["same bits"] for row in rows)
    again = long_run.run(long_run.UPDATES + 1)  # into the second rollout
    for row, same in zip(rows, again, strict=False):
        assert row | {"MiB": 0} == same | {"MiB": 0}
