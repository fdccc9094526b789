"""From hidden states: the rows of a call through the head, a chunk of logits at a time.

Gradients are made in forward; of float16, and under ``torch.compile``, in backward, by the
operators at the end of this file. Three sets of rows are kept apart: those that are counted (the
others are skipped), those of them whose gradient is not surely zero (the others need no gradient
GEMM), and the undecided ones. Of the last chunk the logits are held until the bounds are known;
those of the others are recomputed then, or with a frozen head the gradients of their log-probs are
scaled. What is kept until backward are the gradients of the hidden states, in their dtype, and of
the weight, in float32 while several chunks are added up and in the weight's dtype then; never
logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sets
from ._ops import NATIVE, register
from .call import Call
from .config import BAPOConfig, maximum_bounds_of, starting_bounds_of
from .distributed import VocabShard
from .fused import (
    Coefficients,
    RowStatistics,
    loss_of_log_probs,
    of_all_ranks,
    policy,
    row_gradient,
    row_pass,
    row_statistics,
)
from .head import Head, HeadGradients
from .inputs import as_rows, bounds_tensor
from .output import BAPOOutput


def loss_of_hidden(
    call: Call, head: Head, needs: tuple[bool, ...], chunk_tokens: int | None
) -> tuple[BAPOOutput, HeadGradients | None]:
    """Forward GEMM, row pass and gradient GEMMs of every chunk; search and loss; undecided rows.

    The last chunk is held until the bounds are known, so that none of its rows is recomputed, and
    so are the values of the rows with a sampling mask, which are in no chunk.
    """
    counted = call.without_sets().counted.nonzero().squeeze(1)
    size = head.rows_per_chunk(counted.numel(), chunk_tokens, sums_weight=needs[1])
    *earlier, last = counted.split(size)
    memory = head.chunk_memory(size)
    if not any(needs):
        found = _statistics(call, head, [*earlier, last], memory)
        if call.sets is not None:
            _add_statistics_of_sets(call, head, found)
        output, _ = loss_of_log_probs(call, found.log_probs, found.entropy)
        return output, None
    one_chunk = not earlier and call.sets is None
    chunks = _Chunks(call, head, HeadGradients(head, needs, one_chunk), memory)
    for rows in earlier:
        chunks.add_decided(chunks.forward(rows))
    held = chunks.forward(last)
    of_sets = None if call.sets is None else _HeldSets(call, head, chunks.gradients, chunks.found)
    output, coefficients = loss_of_log_probs(call, chunks.found.log_probs, chunks.found.entropy)
    chunks.add_held(held, coefficients)
    if earlier and chunks.of_log_probs:
        chunks.scale_undecided(coefficients)
    elif earlier:
        for rows in chunks.undecided_rows(earlier, coefficients).split(size):
            chunks.add_recomputed(rows, coefficients)
    if of_sets is not None:
        of_sets.add(coefficients)
    return output, chunks.gradients


class _Chunk(NamedTuple):
    """Rows of a call, their part of it, and their hidden states and logits."""

    rows: Tensor
    call: Call
    h: Tensor
    logits: Tensor


class _Chunks:
    """The rows of a call that needs gradients, as they go through the head.

    Attributes:
        of_log_probs: only hidden states need a gradient, and that of a row is the gradient of its
            log-prob times a number. So undecided rows get the former at once, and the number later.
    """

    def __init__(self, call: Call, head: Head, gradients: HeadGradients, memory: Tensor) -> None:
        self.call, self.head, self.gradients, self.memory = call, head, gradients, memory
        self.of_log_probs = gradients.of_hidden_alone and not call.config.entropy_coef
        self.found = _nothing_found(call)
        self.undecided = torch.zeros_like(call.counted, dtype=torch.uint8)

    def forward(self, rows: Tensor) -> _Chunk:
        """A chunk whose logits have become gradients where a row is decided."""
        h, logits = self.head.logits(rows, self.memory)
        call = self.call.at(rows)
        if call.rows_decide:
            found, self.undecided[rows] = row_pass(call, as_rows(logits), None)
        else:
            found = row_statistics(call, as_rows(logits))
        _put(self.found, rows, found)
        return _Chunk(rows, call, h, logits)

    def add_decided(self, chunk: _Chunk) -> None:
        """Adds the rows that no admissible bounds could change; the others follow later."""
        rows, call, _, _ = chunk
        if call.sequences is not None:
            self.undecided[rows] = 1
            if self.of_log_probs:
                ones = torch.ones_like(self.found.log_probs[rows])
                self.add(chunk, Coefficients(ones, None), self._may_have_gradient[rows])
            return
        log_probs, entropy, _ = self.found.at(rows)
        first, last = _ends_of_the_search(call)
        _, coefficients = policy(call, log_probs, entropy, first)
        if self.head.shard is not None:
            at_last = policy(call, log_probs, entropy, last)[1].dlog_probs
            differs = (coefficients.dlog_probs != at_last) & ~coefficients.dlog_probs.isnan()
            self.undecided[rows] = differs.to(torch.uint8)
        undecided = self.undecided[rows] != 0
        if self.of_log_probs:
            of_undecided = torch.where(undecided, 1.0, coefficients.dlog_probs)
            coefficients = Coefficients(of_undecided, None)
            self.add(chunk, coefficients, coefficients.has_gradient())
        else:
            self.add(chunk, coefficients, coefficients.has_gradient() & ~undecided)

    @cached_property
    def _may_have_gradient(self) -> Tensor:
        """bool ``[N]``: the rows of sequences with an advantage; with a KL term all."""
        call = self.call
        assert call.sequences is not None
        assert call.advantages is not None
        if call.config.kl_loss_coef:
            return call.counted
        return call.sequences.with_any(call.counted & (call.advantages != 0))

    def add_held(self, chunk: _Chunk, of_all: Coefficients) -> None:
        """Adds all rows of a chunk that was held until the bounds were known."""
        coefficients = of_all.at(chunk.rows)
        self.add(chunk, coefficients, coefficients.has_gradient())
        self.undecided[chunk.rows] = 0

    def add(self, chunk: _Chunk, coefficients: Coefficients, keep: Tensor | None = None) -> None:
        """Adds some rows, by default all.

        Undecided rows among them get the gradient of these coefficients, and where the row pass
        can decide none all do.
        """
        rows, _, h, dlogits = chunk
        if keep is not None:
            front = _Front.of(keep)
            rows, h, dlogits = rows[front.rows], h[front.rows], front.moved(dlogits)
            coefficients = coefficients.at(front.rows)
        call, found = self.call.with_labels_of(rows), self.found.at(rows)
        only = self.undecided[rows] if call.rows_decide else None
        row_gradient(call, as_rows(dlogits), found, coefficients, None, only)
        self.gradients.add(rows, h, dlogits)

    def scale_undecided(self, of_all: Coefficients) -> None:
        """From the gradients of the undecided rows' log-probs to those of the loss."""
        self.gradients.scale_hidden(torch.where(self.undecided != 0, of_all.dlog_probs, 1.0))

    def undecided_rows(self, chunks: Sequence[Tensor], of_all: Coefficients) -> Tensor:
        """Those rows of some chunks that were undecided and have a gradient."""
        rows = torch.cat(list(chunks))
        return rows[(self.undecided[rows] != 0) & of_all.at(rows).has_gradient()]

    def add_recomputed(self, rows: Tensor, of_all: Coefficients) -> None:
        """Makes the logits of undecided rows a second time and adds their gradients."""
        if rows.numel() == 0:
            return
        _add_recomputed(self.call, self.gradients, rows, self.memory, self.found, of_all)


class _HeldSets:
    """The rows of a call that have a sampling mask: their values, until the bounds are known.

    The hidden states' gradients of decided rows are made while the head's rows are in the cache.
    """

    def __init__(
        self, call: Call, head: Head, gradients: HeadGradients, found: RowStatistics
    ) -> None:
        self.call, self.head, self.gradients, self.found = call, head, gradients, found
        self.undecided: Tensor | None = None
        if not call.rows_decide:
            self.values = _add_statistics_of_sets(call, head, found)
        elif gradients.hidden is not None:
            self.values, self.undecided = sets.both_passes_of_hidden(
                call, head, found, gradients.hidden
            )
        else:
            self.values = sets.multiplied(call, head)
            self.undecided = sets.both_passes(call, self.values, found)

    def add(self, coefficients: Coefficients) -> None:
        """Adds the gradients of all these rows, which no bounds change any more."""
        call, head, values = self.call, self.head, self.values
        if call.bounds is None or not call.rows_decide:
            sets.to_gradient(call, values, self.found, coefficients, self.undecided)
            if self.gradients.hidden is not None:
                dhidden = self.gradients.hidden
                sets.hidden_gradient(call, values, head, dhidden, self.undecided)
        self.gradients.add_sets(call, values)


def _add_statistics_of_sets(call: Call, head: Head, found: RowStatistics) -> Tensor:
    """The values of the rows that have a sampling mask, and what the first pass finds in them."""
    assert call.sets is not None
    values = sets.multiplied(call, head)
    if call.shard is None:
        sets.statistics(call, values, found)
        return values
    of_sets = _nothing_found(call)
    sets.statistics(call, values, of_sets)
    rows = call.sets.present.nonzero().squeeze(1)
    _put(found, rows, of_all_ranks(call, of_sets).at(rows))
    return values


class _Front(NamedTuple):
    """Where the rows of a chunk go that stay when others are dropped: to its front, in its memory.

    The last of those that stay take the places of those that are dropped; no other row moves.

    Attributes:
        rows: of each place, the row that it gets.
        places, fillers: of the rows that move, to and from.
    """

    rows: Tensor
    places: Tensor
    fillers: Tensor

    @classmethod
    def of(cls, keep: Tensor) -> _Front:
        """For bool ``keep [n]``. Reads two counts on the host, at once."""
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
        """``values[rows]``, in the memory of ``values``; a 32nd of them is copied at once."""
        size = max(1, values.shape[0] // 32)
        for to, by in zip(self.places.split(size), self.fillers.split(size), strict=True):
            values[to] = values[by]
        return values[: self.rows.numel()]


def _ends_of_the_search(call: Call) -> tuple[Tensor, Tensor]:
    """First and last bounds; a decided row has the same gradient at both."""
    if call.bounds is not None:
        return call.bounds, call.bounds
    ends = starting_bounds_of(call.config), maximum_bounds_of(call.config)
    first, last = (bounds_tensor(end, call.counted) for end in ends)
    return first, last


def _statistics(call: Call, head: Head, chunks: Sequence[Tensor], memory: Tensor) -> RowStatistics:
    found = _nothing_found(call)
    for rows in chunks:
        _, logits = head.logits(rows, memory)
        _put(found, rows, row_statistics(call.at(rows), as_rows(logits)))
    return found


def _nothing_found(call: Call) -> RowStatistics:
    found = RowStatistics.empty(call.counted.numel(), call.counted.device)
    for values in found:
        values.zero_()
    return found


def _put(found: RowStatistics, rows: Tensor, of_rows: RowStatistics) -> None:
    for whole, values in zip(found, of_rows, strict=True):
        whole[rows] = values


class _HeadOptions(NamedTuple):
    """What the operators of a head take behind their tensors, in the order of the schemas."""

    dtype: torch.dtype
    logits_dtype: torch.dtype
    temperature: float
    logit_scale: float
    softcap: float | None
    temperatures: Tensor | None
    backend: str
    chunk_tokens: int | None
    shard_sizes: Tensor | None
    group: str | None
    token_ids: Tensor | None
    offsets: Tensor | None

    def call(self, labels: Tensor, counted: Tensor, columns: int) -> Call:
        config = BAPOConfig(
            temperature=self.temperature,
            logit_scale=self.logit_scale,
            final_logit_softcapping=self.softcap,
        )
        shard = VocabShard.named(columns, self.shard_sizes, self.group)
        of_sets = None
        if self.token_ids is not None and self.offsets is not None:
            ids, offsets = self.token_ids, self.offsets
            of_sets = sets.Sets.of(ids, offsets, labels, self.backend, shard or columns)
        return Call(
            config,
            self.backend,
            labels.shape,
            counted,
            counted,
            labels=labels,
            temperatures=self.temperatures,
            shard=shard,
            sets=of_sets,
        )

    def head(self, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
        return Head.of(hidden, weight, bias, self.dtype, call.shard, self.logits_dtype)


def _head_forward(
    of_log_probs: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the counted rows, a chunk at a time; ``others`` are :class:`_HeadOptions`.

    With ``of_log_probs`` also the gradient of each log-prob with respect to its hidden state.
    """
    options = _HeadOptions(*others)
    call = options.call(labels, counted, weight.shape[0])
    head = options.head(call, hidden, weight, bias)
    rows = call.without_sets().counted.nonzero().squeeze(1)
    size = head.rows_per_chunk(rows.numel(), options.chunk_tokens, sums_weight=False)
    chunks, memory = rows.split(size), head.chunk_memory(size)
    no_gradient = hidden.new_empty(0)
    no_values = hidden.new_empty(0, dtype=torch.float32)
    if not of_log_probs:
        found = _statistics(call, head, chunks, memory)
        values = no_values if call.sets is None else _add_statistics_of_sets(call, head, found)
        return *found, no_gradient, values
    # The loss whose gradient this is: the k1 term alone, summed.
    config = replace(call.config, kl_loss_coef=1.0, kl_loss_type="k1")
    ones = torch.ones_like(labels, dtype=torch.float64)
    zeros, bounds = torch.zeros_like(labels, dtype=torch.float32), bounds_tensor((1.0, 1.0), labels)
    call = replace(
        call, config=config, advantages=zeros, ref_log_probs=zeros, weights=ones, bounds=bounds
    )
    made = _Chunks(call, head, HeadGradients(head, (True, False, False), True), memory)
    for chunk in chunks:
        made.add(made.forward(chunk), Coefficients(ones[chunk], None))
    if call.sets is not None:
        coefficients = Coefficients(ones, None).without(~counted)
        _HeldSets(call, head, made.gradients, made.found).add(coefficients)
    gradient, *_ = made.gradients.of(hidden, None, None)
    assert gradient is not None
    return *made.found, gradient, no_values


def _head_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    values: Tensor,
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
    head = options.head(call, hidden, weight, bias)
    no_log_probs = entropy  # the second pass does not read them
    found = RowStatistics(no_log_probs, entropy, stats)
    dlog_probs = torch.zeros_like(entropy) if dlog_probs is None else dlog_probs
    coefficients = Coefficients(dlog_probs, dentropy)
    gradients = _recomputed(call, head, tuple(needs), options.chunk_tokens, found, coefficients)
    if call.sets is not None:
        kept = values.numel() == call.sets.token_ids.numel()
        values = values if kept else sets.multiplied(call, head)
        dvalues = sets.gradient(call, values, found, coefficients.without(~counted))
        if gradients.hidden is not None:
            sets.hidden_gradient(call, dvalues, head, gradients.hidden)
        gradients.add_sets(call, dvalues)
    return [gradient for gradient in gradients.of(hidden, weight, bias) if gradient is not None]


def _recomputed(
    call: Call,
    head: Head,
    needs: tuple[bool, ...],
    chunk_tokens: int | None,
    found: RowStatistics,
    coefficients: Coefficients,
) -> HeadGradients:
    counted = call.without_sets().counted
    rows = (counted & coefficients.has_gradient()).nonzero().squeeze(1)
    size = head.rows_per_chunk(rows.numel(), chunk_tokens, sums_weight=needs[1])
    chunks, memory = rows.split(size), head.chunk_memory(size)
    gradients = HeadGradients(head, needs, one_chunk=len(chunks) == 1 and call.sets is None)
    for chunk in chunks:
        _add_recomputed(call, gradients, chunk, memory, found, coefficients)
    return gradients


def _add_recomputed(
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
    if call.shard is None:
        of_rows = row_statistics(call.at(rows), as_rows(logits))
    else:
        of_rows = found.at(rows)
    call, of_loss = call.with_labels_of(rows), coefficients.at(rows)
    row_gradient(call, as_rows(logits), of_rows, of_loss, None)
    gradients.add(rows, h, logits)


register(NATIVE, "head_forward", _head_forward, ["CompositeExplicitAutograd"])
register(NATIVE, "head_backward", _head_backward, ["CompositeExplicitAutograd"])
