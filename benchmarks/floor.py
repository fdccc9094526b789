"""The bytes and FLOPs that a case cannot do without: the model behind every GB/s and TFLOP/s.

From logits, with b bytes per element: each unmasked row is read once, each undecided row a second
time, and each row of the gradient is written once, zeros included, ``(unmasked + undecided +
1)*N*V*b`` bytes; log-probs alone take ``unmasked*N*V*b``. From hidden states: ``2*V*H`` FLOPs per
unmasked row, and ``4*V*H``, or ``2*V*H`` with a frozen head, per row that has a gradient once the
bounds are known; a divergence over the whole vocabulary needs the teacher's logits too. The weights
of a ``vjp`` come after its log-probs, so each row is read twice. The search reads three float32
values per token.

With a sampling mask of K ids in all and no id beside another: from logits, a line of 64 bytes is
read per id of an unmasked row and one is written per id of a row that has a gradient, and each row
of the gradient is filled with zeros, ``N*V*b`` bytes. From hidden states, the products are those of
the K ids, ``2*K*H`` FLOPs and so on, and per id of an unmasked row a row of the head is read; with
a trained head also a row of hidden states per id of a row that has a gradient, and the gradient of
the head is written once. Caches keep nothing from one set to the next, and all sets count as if
they had the mean size.

The model describes the task, not a way to compute it: an implementation that moves more bytes than
this has a lower rate.
"""

from __future__ import annotations

from typing import NamedTuple

from .cases import SAMPLING_MASK, Case

LINE = 64  # bytes that memory moves at a time


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
    if case.sweep == SAMPLING_MASK:
        ids = case.N * case.V * shares["allowed"]
        return _of_sets(case, counted * ids, shares["gradient"] * ids if trains else 0.0)
    if case.level == "hidden":
        of_gradients = 2 if case.frozen else 4
        of_teacher = 2 if case.task == "forward_kl" else 0
        products = of_teacher + 2 * counted + (of_gradients * shares["gradient"] if trains else 0.0)
        return Floor(0.0, products * case.N * case.V * case.H)
    again = shares["undecided"] if case.task in ("loss", "gspo", "vjp") else 0.0
    written = 1.0 if trains else 0.0
    return Floor((counted + again + written) * elements, 0.0)


def _of_sets(case: Case, counted: float, trained: float) -> Floor:
    """The floor of rows that have so many ids, of which so many have a gradient."""
    itemsize = case.torch_dtype.itemsize
    if case.level == "logits":
        zeros = case.N * case.V * itemsize if trained else 0
        return Floor(zeros + LINE * (counted + trained), 0.0)
    row = case.H * itemsize
    if case.frozen or not trained:
        return Floor(row * counted, 2 * case.H * (counted + trained))
    return Floor(row * (counted + trained + case.V), 2 * case.H * (counted + 2 * trained))
