"""Plain PyTorch: cross entropy with the token loss, also compiled, and the search as a loop."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import reference
from bapo_kernels.tools.plain import plain_bapo_loss, plain_log_probs

from ..cases import Batch
from .method import Method, Step, trained


def cross_entropy(*inputs: Tensor) -> Tensor:
    """Log-probs, without entropy, of logits and labels, or of hidden states, weight and labels."""
    *factors, labels = inputs
    logits = factors[0] if len(factors) == 1 else F.linear(*factors)
    return -F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")


def log_softmax(batch: Batch) -> Tensor:
    """The columns of the whole ``[N, V]``, in float32."""
    logits = batch.inputs[0] if len(batch.inputs) == 1 else F.linear(*batch.inputs)
    return logits.float().log_softmax(-1).gather(-1, batch.columns)


def chunked_head(batch: Batch) -> Tensor:
    """``linear_cross_entropy`` in its own choice of chunks; masked rows are skipped."""
    hidden, weight = (leaf.flatten(0, -2) for leaf in batch.inputs)
    labels, options = batch.ignored_labels.flatten(), torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)


def before(batch: Batch) -> Step:
    """The README's Before."""
    logp = plain_log_probs(F.linear(*batch.inputs), batch.labels, 1.0)
    mask = torch.ones_like(batch.A) if batch.mask is None else batch.mask
    return trained(plain_bapo_loss(logp, batch.old, batch.A, mask)[0], batch)


@cache
def compiled(function: Any) -> Any:
    """The function compiled by torch.compile, once."""
    return torch.compile(function)


def _cross_entropy(batch: Batch, compile_it: bool) -> Tensor:
    function = compiled(cross_entropy) if compile_it else cross_entropy
    return function(*batch.inputs, batch.labels)


def _search(batch: Batch) -> Step:
    return torch.stack(reference.find_clip_bounds(*batch.tokens, config=batch.case.config)), ()


CROSS_ENTROPY = [
    Method(f"PyTorch cross_entropy{form}", log_probs=partial(_cross_entropy, compile_it=bool(form)))
    for form in ("", ", compiled")
]
# The CPU's cases are too few tokens for its chunks (docs/internals/measured.md).
CHUNKED = {"module": "torch.nn.modules.linear_cross_entropy_options", "devices": ("cuda",)}
HIDDEN = [Method("PyTorch linear_cross_entropy", log_probs=chunked_head, **CHUNKED)]
BEFORE = Method("PyTorch, README's Before", before)  # from hidden states
OF_TOP_K = Method("PyTorch log_softmax", log_probs=log_softmax)
LOOP = Method("the paper's loop", _search)
