"""The ratio of a sequence (GSPO): the mean of its tokens' log-ratios, whose gradient they share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._ops import ops_of
from .aggregation import sequence_index

if TYPE_CHECKING:
    from .call import Call


class Sequences(NamedTuple):
    """The sequences of flat tokens: rows of ``length``, or between ``cu_seqlens`` if given."""

    length: int
    cu_seqlens: Tensor | None

    def with_any(self, tokens: Tensor) -> Tensor:
        """bool ``[N]``: the tokens of the sequences that have one of these, bool ``[N]`` too."""
        if self.cu_seqlens is None:
            rows = tokens.view(-1, max(self.length, 1))
            return rows.any(1, keepdim=True).expand(rows.shape).reshape(-1)
        index = sequence_index(self.cu_seqlens, tokens.numel())
        counts = index.new_zeros(self.cu_seqlens.numel()).index_add_(0, index, tokens.long())
        return (counts > 0)[index]


def with_log_ratios(call: Call, log_probs: Tensor) -> Call:
    """The call with the log-ratios of its sequences, where the ratio is theirs."""
    if call.sequences is None or call.backend == "reference":
        return call
    log_ratios = torch.empty_like(log_probs)
    tokens = log_probs, call.counted, call.old_log_probs
    ops_of(call.backend).sequence_log_ratios(*tokens, *call.sequences, log_ratios)
    return replace(call, log_ratios=log_ratios)


def spread(call: Call, dlog_ratios: Tensor, dlog_probs: Tensor) -> None:
    """Adds the gradient of the log-ratios to those of the log-probs that they are means of."""
    assert call.sequences is not None
    gradients = dlog_ratios, call.counted, *call.sequences, dlog_probs
    ops_of(call.backend).add_sequence_means_(*gradients)
