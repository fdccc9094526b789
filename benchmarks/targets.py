"""SPEC's targets of a GPU: the most time as a multiple of the yardstick, and the most memory."""

from __future__ import annotations

from typing import Any

from bapo_kernels.core.head.head import CHUNK_BYTES

from .cases import Case
from .methods.method import Method

BEYOND = 0.03  # the share of a call that is not the first pass
MOST = {  # by level and task, layout and form
    ("loss from logits", "dense", ""): {"cuda": 1.05, "triton": 1.25},
    ("loss from logits", "mixed", ""): {"cuda": 0.93, "triton": 1.10},
    ("loss from logits", "mixed", ", live"): {"cuda": 0.79, "triton": 0.95},
    ("log_probs from logits", "dense", ""): {"cuda": 1.10, "triton": 1.15},  # of a read
    ("loss from hidden", "dense", ""): {"cuda": 1.10, "triton": 1.10},
    ("loss from hidden", "dense", ", one chunk"): {"cuda": 1.10, "triton": 1.10},
}


def judged(case: Case, method: Method, facts: dict[str, Any], all_facts: dict[str, Any]) -> None:
    """Adds to the facts of a method its targets, each with the ratio and whether it is met."""
    form = method.name.removeprefix(f"bapo_kernels {method.backend}")
    most = MOST.get((f"{case.task} from {case.level}", case.layout, form))
    if most is None or "multiple" not in facts:
        return
    reads = 2.0 if case.task == "log_probs" else 1.0  # half a copy is a read
    found = {facts["yardstick"]: (reads * facts["multiple"], most.get(str(method.backend)))}
    alone = all_facts.get(f"{method.name}, row pass alone", {})
    if "multiple" in alone:
        found["beyond the row pass"] = 1 - alone["multiple"] / facts["multiple"], BEYOND
    if case.level == "hidden" and not form:
        extra = facts["peak_bytes"] - facts["gradient_bytes"]
        found["extra memory, chunks"] = extra / CHUNK_BYTES, 1.0
    facts["targets"] = {
        name: {"ratio": ratio, "most": limit, "met": None if limit is None else ratio <= limit}
        for name, (ratio, limit) in found.items()
    }
