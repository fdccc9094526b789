"""Plain PyTorch: this package's reference, cross entropy with the token loss, and both compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import reference

from ..cases import Batch
from .method import OF_TOP_K, Method, Step, trained


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


def reference_loss(*arguments: Any, **options: Any) -> Tensor:
    """The reference loss, from logits or from hidden states and weight."""
    hidden = arguments[1].is_floating_point()
    function = reference.bapo_linear_loss if hidden else reference.bapo_loss
    return function(*arguments, **options).loss


@cache
def compiled(function: Any) -> Any:
    """The function compiled by torch.compile, once."""
    return torch.compile(function)


def _reference(batch: Batch, compile_it: bool) -> Step:
    function = compiled(reference_loss) if compile_it else reference_loss
    return trained(function(*batch.inputs, *batch.rest, **batch.options), batch)


def _cross_entropy(batch: Batch, compile_it: bool) -> Tensor:
    function = compiled(cross_entropy) if compile_it else cross_entropy
    return function(*batch.inputs, batch.labels)


def _search(batch: Batch) -> Step:
    return torch.stack(reference.find_clip_bounds(*batch.tokens, config=batch.case.config)), ()


def _methods(level: str) -> Iterator[Method]:
    yield Method("PyTorch log_softmax", level, log_probs=log_softmax, tasks=OF_TOP_K)
    whole = {"holds_logits": True}
    for name, it in (("", False), (", compiled", True)):
        loss, log_probs = (partial(f, compile_it=it) for f in (_reference, _cross_entropy))
        yield Method(f"PyTorch reference{name}", level, loss, everywhere=False, **whole)
        yield Method(f"PyTorch cross_entropy{name}", level, log_probs=log_probs, **whole)


METHODS = [
    *_methods("logits"),
    *_methods("hidden"),
    Method(
        "PyTorch linear_cross_entropy",
        "hidden",
        log_probs=chunked_head,
        module="torch.nn.modules.linear_cross_entropy_options",
        # The CPU's cases are too few tokens for its chunks (docs/internals/measured.md).
        devices=("cuda",),
        everywhere=False,
    ),
    Method("the paper's loop", "tokens", _search),
]
