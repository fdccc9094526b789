"""Our CPU cases as pytest-benchmark: ``pytest benchmarks/test_cpu.py``.

``--benchmark-autosave`` and ``--benchmark-compare`` show the effect of a change.
"""

from __future__ import annotations

import pytest

from . import gate
from .cases import SAMPLING_MASK, Batch, Case
from .methods import ours

LOGITS = Case.of("logits", "loss", "Qwen3-0.6B", 128)
HIDDEN = Case.of("hidden", "loss", "Qwen3-0.6B", 64)
CASES = [
    Case.of("logits", "loss", "Qwen3-0.6B", 128, dtype="float32"),
    LOGITS,
    Case.of("logits", "loss", "Qwen3-0.6B", 128, layout="zero advantage"),
    Case.of("logits", "log_probs", "Qwen3-0.6B", 128),
    HIDDEN,
    Case.of("hidden", "loss", "Qwen3-0.6B", 64, layout="zero advantage"),
    Case.of("logits", "loss", "Qwen3-0.6B", 128, sweep=SAMPLING_MASK),
    Case.of("hidden", "loss", "Qwen3-0.6B", 64, sweep=SAMPLING_MASK),
    Case(
        "tokens", "search", "at the maximum bounds", 1_048_576, 1, 1, "float32", data="very stale"
    ),
]
MINE = [p for p in ours.METHODS if "cpu" in p.devices]


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, id=f"{method.name}: {case.title}")
        for case in CASES
        for method in MINE
        if method.takes(case)
    ],
)
def test_time(case, method, benchmark):
    gate.check(method, case, "cpu")
    batch = Batch(case, "cpu")
    own = batch.overwritable()

    def fresh_logits():
        if method.overwrites:
            own.restore(batch)

    benchmark.group = case.title
    benchmark.pedantic(method.step, (own,), setup=fresh_logits, rounds=10, warmup_rounds=1)
