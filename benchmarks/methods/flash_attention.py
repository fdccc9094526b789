"""flash-attn's Triton cross entropy."""

from __future__ import annotations

from torch import Tensor

from ..cases import Batch
from .method import Method


def log_probs(batch: Batch) -> Tensor:
    """The gradient is written to a tensor of its own."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    labels = batch.ignored_labels.flatten()
    return -cross_entropy_loss(batch.inputs[0].flatten(0, -2), labels, inplace_backward=False)[0]


METHODS = [
    Method(
        "flash-attn cross entropy",
        "logits",
        log_probs=log_probs,
        package="flash-attn",
        module="flash_attn.ops.triton.cross_entropy",
        devices=("cuda",),
    )
]
