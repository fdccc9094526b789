"""Plain PyTorch: this package's reference, the leanest form of the same, and both compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import reference

from ..cases import Batch
from . import Peer, Step, trained


def cross_entropy(*inputs: Tensor) -> Tensor:
    """Log-probs of logits, or of hidden states and lm_head, and labels, without entropy."""
    *factors, labels = inputs
    logits = factors[0] if len(factors) == 1 else F.linear(*factors)
    return -F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")


def reference_loss(*arguments: Any, **options: Any) -> Tensor:
    """Of logits, or of hidden states and lm_head."""
    hidden = arguments[1].is_floating_point()
    function = reference.bapo_linear_loss if hidden else reference.bapo_loss
    return function(*arguments, **options).loss


@cache
def compiled(function: Any) -> Any:
    """By torch.compile, once."""
    return torch.compile(function)


def _train(batch: Batch, function: Any) -> Step:
    return trained(function(*batch.inputs, *batch.rest, **batch.options), batch)


def _search(batch: Batch) -> Step:
    bounds = reference.find_clip_bounds(
        batch.logp, batch.old, batch.A, batch.mask, config=batch.case.config
    )
    return torch.stack(bounds), ()


def _peers(level: str) -> list[Peer]:
    whole = {"holds_logits": True}
    return [
        Peer(
            "PyTorch reference",
            level,
            lambda batch: _train(batch, reference_loss),
            everywhere=False,
            **whole,
        ),
        Peer(
            "PyTorch reference, compiled",
            level,
            lambda batch: _train(batch, compiled(reference_loss)),
            everywhere=False,
            **whole,
        ),
        Peer(
            "PyTorch cross_entropy",
            level,
            log_probs=lambda batch: cross_entropy(*batch.inputs, batch.labels),
            **whole,
        ),
        Peer(
            "PyTorch cross_entropy, compiled",
            level,
            log_probs=lambda batch: compiled(cross_entropy)(*batch.inputs, batch.labels),
            **whole,
        ),
    ]


PEERS = [*_peers("logits"), *_peers("hidden"), Peer("the paper's loop", "tokens", _search)]
