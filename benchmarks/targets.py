"""SPEC's targets: the most time as a multiple of the yardstick, and the most memory."""

from __future__ import annotations

from typing import Any

import torch

from bapo_kernels.core.head.head import CHUNK_BYTES

from .cases import HEAD, TARGETS, Case
from .methods.method import Method

BEYOND = 0.03  # the share of a call that is not the first pass
LOGITS, HIDDEN = "loss from logits", "loss from hidden"
OF_A_GPU = {  # by what the sweep TARGETS has, layout and form
    (LOGITS, "dense", ""): {"cuda": 1.05, "triton": 1.25},
    (LOGITS, "mixed", ""): {"cuda": 0.93, "triton": 1.10},
    (LOGITS, "mixed", ", live"): {"cuda": 0.79, "triton": 0.95},
    ("log_probs from logits", "dense", ""): {"cuda": 1.10, "triton": 1.15},  # of a read
    (HIDDEN, "dense", ""): {"cuda": 1.10, "triton": 1.10},
    (HIDDEN, "dense", ", one chunk"): {"cuda": 1.10, "triton": 1.10},
}
OF_A_CPU = {  # by dtype; a processor without AVX-512 has fewer
    (LOGITS, "dense", ", in place"): {"float32": 1.5, "bfloat16": 2.0},
    (HIDDEN, "dense", ", chunk_tokens = N/4"): {"float32": 1.2, "bfloat16": 1.2},
}
OF_AVX2 = {(LOGITS, "dense", ", in place"): {"float32": 2.5, "bfloat16": 4.0}}


def targets(case: Case, method: Method, all_facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By name, of a method that has been timed: its ratio, the most it may be, and whether it is.

    Args:
        all_facts: of all methods of the case, by name.
    """
    facts, backend = all_facts[method.name], method.backend or ""
    form = method.name.removeprefix(f"bapo_kernels {backend}")
    place = f"{case.task} from {case.level}", case.layout, form
    if backend == "cpu":
        avx2 = "AVX512" not in torch.backends.cpu.get_cpu_capability()
        most = (OF_AVX2 if avx2 else OF_A_CPU).get(place, {}).get(case.dtype)
        judged = case.sweep in (None, HEAD)
    else:
        most, judged = OF_A_GPU.get(place, {}).get(backend), case.sweep == TARGETS
    if most is None or not judged or "multiple" not in facts:
        return {}
    reads = 2.0 if case.task == "log_probs" else 1.0  # half a copy is a read
    found = {f"x {'read' if reads > 1 else facts['yardstick']}": (reads * facts["multiple"], most)}
    alone = all_facts.get(f"{method.name}, row pass alone", {})
    if "multiple" in alone:
        found["beyond the row pass"] = 1 - alone["multiple"] / facts["multiple"], BEYOND
    if case.level == "hidden":
        extra = facts["peak_bytes"] - facts["gradient_bytes"]
        found["extra memory, chunks"] = extra / CHUNK_BYTES, 1.0
    return {
        name: {"ratio": ratio, "most": limit, "met": ratio <= limit}
        for name, (ratio, limit) in found.items()
    }
