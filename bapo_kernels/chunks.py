"""From hidden states: the rows of a call through the head, a chunk of logits at a time.

Gradients are made in forward; of float16, and under ``torch.compile``, in backward, by the
operators at the end of this file. Three sets of rows are kept apart: those that are counted (the
others are skipped), those of them whose gradient is not surely zero (the others need no gradient
GEMM), and the undecided ones (of the last chunk the logits are held until the bounds are known,
those of the others are recomputed then). What is kept until backward are the gradients of the
hidden states, in their dtype, and of the weight, in float32 while it is added up and in the
weight's dtype then; never logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._ops import NATIVE, register
from .call import Call
from .config import BAPOConfig, maximum_bounds_of, starting_bounds_of
from .distributed import VocabShard
from .fused import (
    Coefficients,
    RowStatistics,
    loss_of_log_probs,
    policy,
    row_gradient,
    row_pass,
    row_statistics,
)
from .gemm import Head, HeadGradients
from .inputs import as_rows, bounds_tensor
from .output import BAPOOutput


def loss_of_hidden(
    call: Call, head: Head, needs: tuple[bool, ...], chunk_tokens: int | None
) -> tuple[BAPOOutput, HeadGradients | None]:
    """Forward GEMM, row pass and gradient GEMMs of every chunk; search and loss; undecided rows.

    The last chunk is held until the bounds are known, so that none of its rows is recomputed.
    """
    chunk_tokens = head.rows_per_chunk(chunk_tokens)
    *earlier, last = call.counted.nonzero().squeeze(1).split(chunk_tokens)
    if not any(needs):
        found = _statistics(call, head, [*earlier, last])
        output, _ = loss_of_log_probs(call, found.log_probs, found.entropy)
        return output, None
    chunks = _Chunks(call, head, HeadGradients(head, needs, one_chunk=not earlier))
    for rows in earlier:
        chunks.add_decided(chunks.forward(rows))
    held = chunks.forward(last)
    output, coefficients = loss_of_log_probs(call, chunks.found.log_probs, chunks.found.entropy)
    chunks.add_held(held, coefficients)
    del held  # before others take its place
    for rows in chunks.undecided_rows(earlier, coefficients).split(chunk_tokens):
        chunks.add_recomputed(rows, coefficients)
    return output, chunks.gradients


class _Chunk(NamedTuple):
    """Rows of a call, their part of it, and their hidden states and logits."""

    rows: Tensor
    call: Call
    h: Tensor
    logits: Tensor


class _Chunks:
    """The rows of a call that needs gradients, as they go through the head."""

    def __init__(self, call: Call, head: Head, gradients: HeadGradients) -> None:
        self.call, self.head, self.gradients = call, head, gradients
        self.found = _nothing_found(call)
        self.undecided = torch.zeros_like(call.counted, dtype=torch.uint8)

    def forward(self, rows: Tensor) -> _Chunk:
        """A chunk whose logits have become gradients where a row is decided.

        Those of a shard stay logits: their gradients need the sums of the other ranks.
        """
        h, logits = self.head.logits(rows)
        call = self.call.at(rows)
        if call.shard is None:
            found, self.undecided[rows] = row_pass(call, as_rows(logits), None)
        else:
            found = row_statistics(call, as_rows(logits))
        _put(self.found, rows, found)
        return _Chunk(rows, call, h, logits)

    def add_decided(self, chunk: _Chunk) -> None:
        """Adds the rows that no admissible bounds could change; the others are recomputed later."""
        rows, call, h, logits = chunk
        log_probs, entropy, _ = self.found.at(rows)
        first, last = _ends_of_the_search(call)
        _, coefficients = policy(call, log_probs, entropy, first)
        if self.head.shard is not None:
            at_last = policy(call, log_probs, entropy, last)[1].dlog_probs
            differs = (coefficients.dlog_probs != at_last) & ~coefficients.dlog_probs.isnan()
            self.undecided[rows] = differs.to(torch.uint8)
        decided = self.undecided[rows] == 0
        index = (decided & coefficients.has_gradient()).nonzero().squeeze(1)
        kept, dlogits = rows[index], _move_to_front(logits, index)
        if self.head.shard is not None:
            self._to_gradient(dlogits, kept, coefficients.at(index))
        self.gradients.add(kept, h[index], dlogits)

    def add_held(self, chunk: _Chunk, of_all: Coefficients) -> None:
        """Adds all rows of a chunk that was held until the bounds were known."""
        rows, _, h, logits = chunk
        index = of_all.at(rows).has_gradient().nonzero().squeeze(1)
        kept, dlogits = rows[index], _move_to_front(logits, index)
        only = self.undecided[kept] if self.head.shard is None else None
        self._to_gradient(dlogits, kept, of_all.at(kept), only)
        self.gradients.add(kept, h[index], dlogits)

    def undecided_rows(self, chunks: Sequence[Tensor], of_all: Coefficients) -> Tensor:
        """Those rows of some chunks that were undecided and have a gradient."""
        rows = torch.cat([self.undecided.new_empty(0, dtype=torch.int64), *chunks])
        return rows[(self.undecided[rows] != 0) & of_all.at(rows).has_gradient()]

    def add_recomputed(self, rows: Tensor, of_all: Coefficients) -> None:
        """Makes the logits of undecided rows a second time and adds their gradients."""
        if rows.numel() == 0:
            return
        h, logits = self.head.logits(rows)
        self._to_gradient(logits, rows, of_all.at(rows))
        self.gradients.add(rows, h, logits)

    def _to_gradient(
        self, logits: Tensor, rows: Tensor, coefficients: Coefficients, only: Tensor | None = None
    ) -> None:
        call, found = self.call.with_labels_of(rows), self.found.at(rows)
        row_gradient(call, as_rows(logits), found, coefficients, None, only)


def _ends_of_the_search(call: Call) -> tuple[Tensor, Tensor]:
    """First and last bounds; a decided row has the same gradient at both."""
    if call.bounds is not None:
        return call.bounds, call.bounds
    ends = starting_bounds_of(call.config), maximum_bounds_of(call.config)
    first, last = (bounds_tensor(end, call.counted) for end in ends)
    return first, last


def _statistics(call: Call, head: Head, chunks: Sequence[Tensor]) -> RowStatistics:
    found = _nothing_found(call)
    for rows in chunks:
        _put(found, rows, row_statistics(call.at(rows), as_rows(head.logits(rows)[1])))
    return found


def _nothing_found(call: Call) -> RowStatistics:
    found = RowStatistics.empty(call.counted.numel(), call.counted.device)
    for values in found:
        values.zero_()
    return found


def _put(found: RowStatistics, rows: Tensor, of_rows: RowStatistics) -> None:
    for whole, values in zip(found, of_rows, strict=True):
        whole[rows] = values


def _move_to_front(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` for ascending ``index``, in the memory of ``rows``.

    A row only moves forward, to where no later one is read; a 32nd of the rows is copied at once.
    """
    count, size = index.numel(), max(1, rows.shape[0] // 32)
    if count < rows.shape[0]:
        for first in range(0, count, size):
            piece = index[first : first + size]
            rows[first : first + piece.numel()] = rows[piece]
    return rows[:count]


class _HeadOptions(NamedTuple):
    """What the operators of a head take behind their tensors, in the order of the schemas."""

    dtype: torch.dtype
    temperature: float
    logit_scale: float
    softcap: float | None
    temperatures: Tensor | None
    backend: str
    chunk_tokens: int | None
    shard_sizes: Tensor | None
    group: str | None

    def call(self, labels: Tensor, counted: Tensor, columns: int) -> Call:
        config = BAPOConfig(
            temperature=self.temperature,
            logit_scale=self.logit_scale,
            final_logit_softcapping=self.softcap,
        )
        shard = VocabShard.named(columns, self.shard_sizes, self.group)
        return Call(
            config,
            self.backend,
            labels.shape,
            counted,
            counted,
            labels=labels,
            temperatures=self.temperatures,
            shard=shard,
        )


def _head_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the counted rows, a chunk at a time; ``others`` are :class:`_HeadOptions`."""
    options = _HeadOptions(*others)
    call = options.call(labels, counted, weight.shape[0])
    head = Head.of(hidden, weight, bias, options.dtype, call.shard)
    rows = counted.nonzero().squeeze(1)
    return _statistics(call, head, rows.split(head.rows_per_chunk(options.chunk_tokens)))


def _head_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    needs: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    *others: Any,
) -> list[Tensor]:
    """Makes the logits of the rows again whose incoming gradients are not zero."""
    options = _HeadOptions(*others)
    call = options.call(labels, counted, weight.shape[0])
    head = Head.of(hidden, weight, bias, options.dtype, call.shard)
    no_log_probs = entropy  # the second pass does not read them
    found = RowStatistics(no_log_probs, entropy, stats)
    coefficients = Coefficients(
        torch.zeros_like(entropy) if dlog_probs is None else dlog_probs, dentropy
    )
    rows = (counted & coefficients.has_gradient()).nonzero().squeeze(1)
    chunks = rows.split(head.rows_per_chunk(options.chunk_tokens))
    gradients = HeadGradients(head, tuple(needs), len(chunks) == 1)
    for chunk in chunks:
        h, logits = head.logits(chunk)
        of_chunk = found.at(chunk), coefficients.at(chunk)
        row_gradient(call.with_labels_of(chunk), as_rows(logits), *of_chunk, None)
        gradients.add(chunk, h, logits)
    return [gradient for gradient in gradients.of(hidden, weight, bias) if gradient is not None]


register(NATIVE, "head_forward", _head_forward, ["CompositeExplicitAutograd"])
register(NATIVE, "head_backward", _head_backward, ["CompositeExplicitAutograd"])
