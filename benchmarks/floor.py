"""The bytes and FLOPs that a case cannot do without: the model behind every GB/s and TFLOP/s.

From logits, with b bytes per element: each unmasked row is read once, each undecided row a second
time, and each row of the gradient is written once, zeros included, ``(unmasked + undecided +
1)*N*V*b`` bytes; log-probs alone take ``unmasked*N*V*b``. From hidden states: ``2*V*H`` FLOPs per
unmasked row, and ``4*V*H``, or ``2*V*H`` with a frozen head, per row that has a gradient once the
bounds are known. The search reads three float32 values per token.

The model describes the task, not a way to compute it: an implementation that moves more bytes than
this has a lower rate.
"""

from __future__ import annotations

from typing import NamedTuple

from .cases import Case


class Floor(NamedTuple):
    """Bytes of memory traffic, and floating-point operations, that a case cannot do without."""

    bytes: float
    flops: float


def floor(case: Case, shares: dict[str, float], live: bool = False) -> Floor:
    """The floor of a case with these shares of rows; with ``live`` only active rows are read."""
    elements = case.N * case.V * case.torch_dtype.itemsize
    counted = shares["active" if live else "unmasked"]
    if case.level == "tokens":
        return Floor(12.0 * case.N, 0.0)
    trains = case.task != "log_probs"
    if case.level == "hidden":
        of_gradients = 2 if case.frozen else 4
        products = 2 * counted + (of_gradients * shares["gradient"] if trains else 0.0)
        return Floor(0.0, products * case.N * case.V * case.H)
    again = shares["undecided"] if case.task == "loss" else 0.0
    written = 1.0 if trains else 0.0
    return Floor((counted + again + written) * elements, 0.0)
