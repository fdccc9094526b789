"""The loss of hidden states: the rows of a call through the head, a chunk of logits at a time.

Imports head, its sets and samples, rows and tokens. What is kept until backward, gradients and
never logits, is decided here, and which rows need a gradient GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...output import BAPOOutput
from ..call import Call, bounds_tensor
from ..rows import (
    RowStatistics,
    both_passes,
    gradients_at,
    logit_rows,
    pass_beside_labels,
    row_statistics,
    statistics_at,
)
from ..tokens import Coefficients, loss_of_log_probs, token_loss
from .head import Head, HeadGradients
from .sampled import loss_of_sample
from .sets import HeldSets, add_set_statistics


def loss_of_hidden(
    call: Call, head: Head, needs: tuple[bool, ...]
) -> tuple[BAPOOutput, HeadGradients | None]:
    """Forward GEMM, row pass and gradient GEMMs of every chunk; search and loss; undecided rows.

    Skipped rows never reach the head, and rows whose gradient is surely zero no gradient GEMM. The
    logits of the last chunk are held until the bounds are known, and so are the values of the rows
    with a sampling mask, which are in no chunk; undecided rows of the other chunks are recomputed
    then, or with a frozen head the gradients of their log-probs are scaled.
    """
    if any(needs) and head.products.gradient_samples is not None:
        return loss_of_sample(call, head, needs)
    counted = call.counted_logits.nonzero().squeeze(1)
    (*earlier, last), memory = head.chunks(counted, sums_weight=needs[1])
    if not any(needs):
        found = chunk_statistics(call, head, [*earlier, last], memory)
        if call.sets is not None:
            add_set_statistics(call, head, found)
        output, _ = loss_of_log_probs(call, found.log_probs, found.entropy)
        return output, None
    one_chunk = not earlier and call.sets is None
    chunks = Chunks(call, head, HeadGradients(head, needs, one_chunk), memory)
    for rows in earlier:
        chunks.add_decided(chunks.forward(rows))
    held = chunks.forward(last)
    held_sets = None if call.sets is None else HeldSets(call, head, chunks.gradients, chunks.found)
    output, coefficients = loss_of_log_probs(call, chunks.found.log_probs, chunks.found.entropy)
    chunks.add_held(held, coefficients)
    if earlier and chunks.unscaled:
        chunks.scale_undecided(coefficients)
    elif earlier:
        for rows in chunks.undecided_rows(earlier, coefficients).split(memory.shape[0]):
            chunks.add_recomputed(rows, coefficients)
    if held_sets is not None:
        held_sets.add(coefficients)
    return output, chunks.gradients


class _Chunk(NamedTuple):
    """Rows of a call, their part of it, and their hidden states and logits."""

    rows: Tensor
    call: Call
    h: Tensor
    logits: Tensor


class Chunks:
    """The rows of a call that needs gradients, as they go through the head.

    Attributes:
        unscaled: only hidden states need a gradient, and that of a row is the gradient of its
            log-prob times a number. So undecided rows get the former now, and the number later.
    """

    def __init__(self, call: Call, head: Head, gradients: HeadGradients, memory: Tensor) -> None:
        self.call, self.head, self.gradients, self.memory = call, head, gradients, memory
        self.unscaled = gradients.are_of_hidden_alone and not call.options.entropy_coef
        self.found = RowStatistics.zeros(call)
        self.undecided = torch.zeros_like(call.counted, dtype=torch.uint8)

    def forward(self, rows: Tensor) -> _Chunk:
        """A chunk whose logits have become gradients where a row is decided."""
        h, logits = self.head.logits(rows, self.memory)
        call = self.call.at(rows)
        if call.rows_decide:
            found = RowStatistics.empty(call)
            self.undecided[rows] = both_passes(call, logit_rows(call, logits), found)
        else:
            found = row_statistics(call, logit_rows(call, logits))
        self.found.put(rows, found)
        return _Chunk(rows, call, h, logits)

    def add_decided(self, chunk: _Chunk) -> None:
        """Adds the rows that no admissible bounds could change; the others follow later."""
        rows, call, _, _ = chunk
        if call.sequences is not None:
            self.undecided[rows] = 1
            if self.unscaled:
                ones = torch.ones_like(self.found.log_probs[rows])
                self.add(chunk, Coefficients(ones, None), self._may_have_gradient[rows])
            return
        log_probs, entropy, _ = self.found.at(rows)
        first, last = _ends_of_the_search(call)
        _, coefficients = token_loss(call, log_probs, entropy, first)
        if self.head.shard is not None:
            at_last = token_loss(call, log_probs, entropy, last)[1].dlog_probs
            differs = (coefficients.dlog_probs != at_last) & ~coefficients.dlog_probs.isnan()
            self.undecided[rows] = differs.to(torch.uint8)
        undecided = self.undecided[rows] != 0
        if self.unscaled:
            dlog_probs = torch.where(undecided, 1.0, coefficients.dlog_probs)
            coefficients = Coefficients(dlog_probs, None)
            self.add(chunk, coefficients, coefficients.has_gradient())
        else:
            self.add(chunk, coefficients, coefficients.has_gradient() & ~undecided)

    @cached_property
    def _may_have_gradient(self) -> Tensor:
        """bool ``[N]``: the rows of sequences with an advantage; with a KL term all."""
        call, advantages = self.call, self.call.field("advantages")
        assert call.sequences is not None
        assert advantages is not None
        if call.options.kl_loss_coef:
            return call.counted
        return call.sequences.with_any(call.counted & (advantages != 0))

    def add_held(self, chunk: _Chunk, whole: Coefficients) -> None:
        """Adds all rows of a chunk that was held until the bounds were known."""
        coefficients = whole.at(chunk.rows)
        self.add(chunk, coefficients, coefficients.has_gradient())
        self.undecided[chunk.rows] = 0

    def add(self, chunk: _Chunk, coefficients: Coefficients, keep: Tensor | None = None) -> None:
        """Adds some rows, by default all.

        Undecided rows among them get the gradient of these coefficients, and where the row pass
        can decide none all do.
        """
        rows, _, h, dlogits = chunk
        if keep is not None:
            kept = Compaction.of(keep)
            rows, h, dlogits = rows[kept.rows], h[kept.rows], kept.moved(dlogits)
            coefficients = coefficients.at(kept.rows)
        only = self.undecided[rows] if self.call.rows_decide else None
        gradients_at(self.call, rows, dlogits, self.found.at(rows), coefficients, only)
        self.gradients.add(rows, h, dlogits)

    def scale_undecided(self, whole: Coefficients) -> None:
        """Turns the gradients of the undecided rows' log-probs into those of the loss."""
        self.gradients.scale_hidden(torch.where(self.undecided != 0, whole.dlog_probs, 1.0))

    def undecided_rows(self, chunks: Sequence[Tensor], whole: Coefficients) -> Tensor:
        """The rows of some chunks that were undecided and have a gradient."""
        rows = torch.cat(list(chunks))
        return rows[(self.undecided[rows] != 0) & whole.at(rows).has_gradient()]

    def add_recomputed(self, rows: Tensor, whole: Coefficients) -> None:
        """Makes the logits of undecided rows a second time and adds their gradients."""
        if rows.numel() == 0:
            return
        add_recomputed(self.call, self.gradients, rows, self.memory, self.found, whole)


class Compaction(NamedTuple):
    """How the rows of a chunk that stay move to its front, in its memory, when others are dropped.

    The last of those that stay take the places of those that are dropped; no other row moves.

    Attributes:
        rows: the row that each place gets.
        places, fillers: the places to and from which rows move.
    """

    rows: Tensor
    places: Tensor
    fillers: Tensor

    @classmethod
    def of(cls, keep: Tensor) -> Compaction:
        """The compaction to the rows of bool ``keep [n]``. Reads two counts on the host."""
        order = (~keep).argsort(stable=True)  # rows that stay, then the others, both ascending
        index = torch.arange(keep.numel(), device=keep.device)
        staying = keep.sum()
        moving = (keep & (index >= staying)).sum()
        count, moves = torch.stack([staying, moving]).tolist()
        fillers, places = order[:count][count - moves :], order[count : count + moves]
        rows = index[:count]
        rows[places] = fillers
        return cls(rows, places, fillers)

    def moved(self, values: Tensor) -> Tensor:
        """``values[rows]``, in the memory of ``values``; a 32nd of them is copied at a time."""
        size = max(1, values.shape[0] // 32)
        for to, by in zip(self.places.split(size), self.fillers.split(size), strict=True):
            values[to] = values[by]
        return values[: self.rows.numel()]


def _ends_of_the_search(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """First and last bounds; a decided row has the same gradient at both."""
    if not call.searches:
        return call.bounds, call.bounds
    first = bounds_tensor(call.options.start(), call.counted)
    return first, bounds_tensor(call.options.maximum(), call.counted)


def chunk_statistics(
    call: Call,
    head: Head,
    chunks: Sequence[Tensor],
    memory: Tensor,
    in_common: HeadGradients | None = None,
) -> RowStatistics:
    """Makes the first pass over the rows of some chunks; zeros in the others.

    Args:
        in_common: to which the part is added that the gradients of all labels of a row share.
    """
    found = RowStatistics.zeros(call)
    for rows in chunks:
        h, logits = head.logits(rows, memory)
        found.put(rows, statistics_at(call, rows, logits))
        if in_common is not None:
            pass_beside_labels(call, rows, logits, found.at(rows))
            in_common.add(rows, h, logits)
    return found


def add_recomputed(
    call: Call,
    gradients: HeadGradients,
    rows: Tensor,
    memory: Tensor,
    found: RowStatistics,
    coefficients: Coefficients,
) -> None:
    """Makes the logits of some rows a second time and adds their gradients.

    A product of other rows may sum in another order, so that its logits are rounded differently:
    their own statistics normalise them, or p would not add up to 1. With a shard these would take a
    collective, and the first ones are kept.
    """
    h, logits = gradients.head.logits(rows, memory)
    mine = statistics_at(call, rows, logits) if call.shard is None else found.at(rows)
    gradients_at(call, rows, logits, mine, coefficients.at(rows))
    gradients.add(rows, h, logits)
