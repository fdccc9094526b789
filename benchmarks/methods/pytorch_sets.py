"""Plain PyTorch with a sampling mask: -inf outside of the sets, or only the logits in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Batch
from ..sets import Places
from .method import Method
from .pytorch import compiled


def filled(places: Places, labels: Tensor, *inputs: Tensor) -> Tensor:
    """Log-probs of the logits of the whole vocabulary, -inf outside of the sets."""
    logits = (inputs[0] if len(inputs) == 1 else F.linear(*inputs)).flatten(0, -2)
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[places.rows, places.ids] = True
    logits = logits.float().masked_fill(~allowed, -torch.inf)
    return -F.cross_entropy(logits, labels.flatten(), reduction="none")


def gathered(places: Places, labels: Tensor, *inputs: Tensor) -> Tensor:
    """Log-probs of the logits of the sets, gathered or made of the rows of the head.

    Each id has a row of its own: batched products over padded sets would gather a row for each id
    that the largest set has.
    """
    rows = inputs[0].flatten(0, -2)
    if len(inputs) == 1:
        return _of_values(places, rows[places.rows, places.ids].float())
    products = inputs[1][places.ids] * rows[places.rows]
    return _of_values(places, products.sum(-1, dtype=torch.float32))


def sampled(places: Places, labels: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-probs of the entries of the product that a sparse matrix names, without the others."""
    rows = hidden.flatten(0, -2)
    zeros, size = weight.new_zeros(places.ids.shape), (rows.shape[0], weight.shape[0])
    sets = places.offsets, places.ids
    wanted = torch.sparse_csr_tensor(*sets, zeros, size, check_invariants=False)
    return _of_values(places, torch.sparse.sampled_addmm(wanted, rows, weight.T).values())


def _of_values(places: Places, values: Tensor) -> Tensor:
    padded = values.new_full((places.labels.shape[0], places.largest), -torch.inf)
    padded = padded.index_put((places.rows, places.places), values)
    return -F.cross_entropy(padded, places.labels, reduction="none")


def _method(name: str, function: Callable[..., Tensor]) -> Method:
    def log_probs(batch: Batch) -> Tensor:
        made = compiled(function) if name.endswith("compiled") else function
        return made(batch.places, batch.labels, *batch.inputs)

    return Method(f"PyTorch {name}", log_probs=log_probs)


SAMPLED = _method("sampled_addmm", sampled)  # of float32
SETS = [
    _method(f"{name}{form}", function)
    for name, function in (("masked_fill", filled), ("gather", gathered))
    for form in ("", ", compiled")
]
