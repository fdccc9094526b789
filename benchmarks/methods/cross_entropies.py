"""Fused cross entropies: cut cross-entropy, flash-attn's Triton kernel, and QuACK."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..cases import Batch
from .method import Method


def cut(batch: Batch, **options: object) -> Tensor:
    """Masked rows are skipped."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(*batch.inputs, batch.ignored_labels, reduction="none", **options)


def flash_attention(batch: Batch) -> Tensor:
    """The gradient is written to a tensor of its own."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    labels = batch.ignored_labels.flatten()
    return -cross_entropy_loss(batch.inputs[0].flatten(0, -2), labels, inplace_backward=False)[0]


def quack(batch: Batch) -> Tensor:
    """Keeps rows on chip as our kernels do; the gradient is written to a tensor of its own."""
    from quack.cross_entropy import cross_entropy

    logits, labels = batch.inputs[0].flatten(0, -2), batch.ignored_labels.flatten()
    return -cross_entropy(logits, labels, reduction="none", inplace_backward=False)


CUT = {"package": "cut-cross-entropy", "module": "cut_cross_entropy"}
FLASH = {"package": "flash-attn", "module": "flash_attn.ops.triton.cross_entropy"}
QUACK = {"package": "quack-kernels", "module": "quack.cross_entropy"}
ON_A_GPU = {"devices": ("cuda",)}
kernel = partial(cut, impl="cce", filter_eps=None)  # without gradient filtering
compiled = partial(cut, impl="torch_compile")
LOGITS = [
    Method("flash-attn cross entropy", log_probs=flash_attention, **FLASH, **ON_A_GPU),
    Method("QuACK cross entropy", log_probs=quack, **QUACK, **ON_A_GPU),
]
HIDDEN = [Method("cut-cross-entropy", log_probs=kernel, **CUT, **ON_A_GPU)]
WITH_ALL_LOGITS = [Method("cut-cross-entropy, compiled", log_probs=compiled, **CUT)]
