"""Our CPU cases for pytest-benchmark: ``pytest benchmarks/test_cpu.py``.

``--benchmark-compare`` and ``--benchmark-autosave`` show what a change did.
"""

from __future__ import annotations

import pytest

from . import gate
from .cases import Batch, Case
from .peers import ours

LOGITS = Case.of("logits", "loss", "Qwen3-0.6B", 128)
HIDDEN = Case.of("hidden", "loss", "Qwen3-0.6B", 64)
CASES = [
    Case.of("logits", "loss", "Qwen3-0.6B", 128, dtype="float32"),
    LOGITS,
    Case.of("logits", "loss", "Qwen3-0.6B", 128, layout="zero advantage"),
    Case.of("logits", "log_probs", "Qwen3-0.6B", 128),
    HIDDEN,
    Case.of("hidden", "loss", "Qwen3-0.6B", 64, layout="zero advantage"),
    Case("tokens", "search", "at the last bounds", 1_048_576, 1, 1, "float32", data="very stale"),
]
MINE = [p for p in ours.PEERS if "cpu" in p.devices]


@pytest.mark.parametrize(
    ("case", "peer"),
    [
        pytest.param(case, peer, id=f"{peer.name}: {case.title}")
        for case in CASES
        for peer in MINE
        if peer.takes(case)
    ],
)
def test_time(case, peer, benchmark):
    gate.check(peer, case, "cpu")
    batch = Batch(case, "cpu")
    own = batch.overwritable()

    def fresh_logits():
        if peer.overwrites:
            own.restore(batch)

    benchmark.group = case.title
    benchmark.pedantic(peer.step, (own,), setup=fresh_logits, rounds=10, warmup_rounds=1)
