"""The bytes and FLOPs that a case cannot do without: the model behind every GB/s and TFLOP/s.

From logits, with b bytes per element: counted rows are read once (``read``), undecided rows once
more (``undecided``), and every gradient is written once, including zeros:
``(read + undecided + 1)*N*V*b`` bytes. Log-probs alone take ``read*N*V*b``. From hidden states:
``2*V*H`` FLOPs for each counted row, and ``4*V*H`` for each row with a gradient at the final bounds.
The search reads three float32 per token.

The model describes the task and not an implementation: one that moves more bytes has a lower rate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cases import Case


class Floor(NamedTuple):
    """Bytes of memory traffic, and floating-point operations, that a case cannot do without."""

    bytes: float
    flops: float


def floor(case: Case, shares: dict[str, float], live: bool = False) -> Floor:
    """The floor of a case whose data has these shares of rows; ``live``: of active rows alone."""
    elements = case.N * case.V * getattr(torch, case.dtype).itemsize
    read = shares["live" if live else "read"]
    if case.level == "tokens":
        return Floor(12.0 * case.N, 0.0)
    trains = case.task != "log_probs"
    if case.level == "hidden":
        products = 2 * read + (4 * shares["gradient"] if trains else 0.0)
        return Floor(0.0, products * case.N * case.V * case.H)
    again = shares["undecided"] if case.task == "loss" else 0.0
    written = 1.0 if trains else 0.0
    return Floor((read + again + written) * elements, 0.0)
