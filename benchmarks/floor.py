"""What a case must move and compute: the model behind every GB/s and TFLOP/s.

Bytes at the level of logits, b bytes an element: every row that is read once (``read``), rows that
wait for the search once more (``undecided``), every gradient written once, zeros too:
``(read + undecided + 1)*N*V*b``; log-probs alone ``read*N*V*b``. From hidden states FLOPs:
``2*V*H`` for each row that is read, ``4*V*H`` for each that has a gradient once the bounds are
known. The search reads three float32 a token.

The model is of the task, not of the way: whoever moves more than this has a lower rate.
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
    """Of a case whose data has these shares of rows; ``live`` leaves out rows of no advantage."""
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
