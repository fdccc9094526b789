"""64 off-policy updates: the fused loss drifts no further than rounding explains."""

import gc
import os

import pytest
import torch
from helpers import needs_native

for package in ("transformers", "matplotlib", "pandas", "rich"):
    pytest.importorskip(package)
long_run = pytest.importorskip("study.long_run")

pytestmark = [needs_native, pytest.mark.xdist_group("long run")]
UPDATES = 64
EVERY = long_run.UPDATES  # updates per rollout


def tensors():
    """Numbers of tensors and elements in memory, without a compiler's symbolic tensors."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    alive = [t for t in alive if isinstance(t.numel(), int)]
    return len(alive), sum(t.numel() for t in alive)


@pytest.fixture(scope="module")
def history():
    """The rows of a run, and the tensors in memory after the last update of each rollout."""
    rows, alive = [], []
    for row in long_run.run(UPDATES):
        rows.append(row)
        if row["update"] % EVERY == 0:
            alive.append(tensors())
    return rows, alive


def test_only_one_worker_trains(request):
    """Otherwise every worker would set up this and every other group of tests."""
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getvalue("loadgroup"):
        assert request.node.nodeid.endswith("@long run")


def test_the_run_learns_and_the_search_moves_the_bounds(history):
    rows, _ = history
    assert rows[-1]["moved"] > 1e3 * rows[-1]["distance, nudged"]
    assert len({row["upper, exact"] for row in rows}) > 1


def test_a_second_run_gives_the_same_bits(history):
    rows, _ = history
    assert all(row["same bits"] for row in rows)
    for row, again in zip(rows, long_run.run(UPDATES // 4), strict=False):
        assert row | {"MiB": 0} == again | {"MiB": 0}


def test_the_drift_is_below_that_of_rounding_the_weights(history):
    """A run whose weights are moved by one float32 unit after each update drifts further."""
    rows, _ = history
    for row in rows:
        assert row["distance, fused"] < row["distance, nudged"], row["update"]
    gaps = {
        name: max(abs(row[f"loss, {name}"] - row["loss, exact"]) for row in rows)
        for name in ("fused", "nudged")
    }
    assert gaps["fused"] < gaps["nudged"]


def test_tensors_do_not_pile_up(history):
    _, alive = history
    assert len(set(alive[1:])) == 1  # the optimizer creates its state in the first update
