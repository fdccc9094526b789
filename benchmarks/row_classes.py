"""What the loss makes of a token, as the kernels decide it (``docs/internals/derivation.md``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.reference.tokens import clipped

Bounds = tuple[float | Tensor, float | Tensor]


class RowClasses(NamedTuple):
    """Boolean masks, shaped like the tokens; every token is in exactly one.

    Attributes:
        skipped: not counted; the logits are never read.
        idle: counted, without advantage; the gradient is zero.
        kept: decided, with a gradient.
        clipped: decided, without a gradient.
        undecided: the gradient depends on where in its range the search puts the bounds.
    """

    skipped: Tensor
    idle: Tensor
    kept: Tensor
    clipped: Tensor
    undecided: Tensor


def row_classes(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    counted: Tensor | None,
    config: BAPOConfig,
    bounds: Bounds | None = None,
) -> RowClasses:
    """The class of each token, with the clip of its own ratio and no KL, entropy or dual clip term.

    Args:
        counted: the tokens that are computed; ``None``: all.
        bounds: fixed bounds, at which no row is undecided.
    """
    tokens = reference.Contributions(config, log_probs, old_log_probs, advantages, counted)
    ends = bounds or config.options.start(), bounds or config.options.maximum()
    start, last = (clipped(tokens.r, tokens.A, *end) for end in ends)
    skipped = torch.zeros_like(start) if counted is None else counted == 0
    active = tokens.A != 0
    decided = start == last
    kept, given_up = active & ~start & decided, start & decided
    return RowClasses(skipped, ~skipped & ~active, kept, given_up, ~decided)
