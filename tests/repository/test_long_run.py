"""64 off-policy updates: the fused loss drifts no further than rounding explains."""

import pytest
from helpers import needs_native

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
long_run = pytest.importorskip("study.long_run")


@needs_native
def test_the_drift_is_below_that_of_rounding_the_weights(monkeypatch):
    """A run whose weights are moved by one float32 unit after each update drifts further."""
    monkeypatch.delitem(long_run.LOSSES, "plain")  # is drawn, not compared
    rows = list(long_run.run(64))
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
