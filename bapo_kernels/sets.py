"""Rows with a sampling mask: their logits are short rows of values, for the same two passes.

The values of a call are float32 ``[K]``, the logits of all its sets in the order of their ids. They
are gathered from the logits, or made of hidden states by products with the rows of the head that
the ids name; then they become their gradients. Rows without a set are not touched here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._ops import ops_of
from .distributed import VocabShard
from .sampling_mask import SamplingMask

if TYPE_CHECKING:
    from .call import Call
    from .fused import Coefficients, RowStatistics
    from .head import Head

_OUTSIDE = -1  # the position of a label that is not in its set


class Sets(NamedTuple):
    """The sampling mask of a call.

    Attributes:
        token_ids: int32 ``[K]``, ascending in each set.
        offsets: int64 ``[N + 1]``, of the sets.
        present: bool ``[N]``, whether a row has a set.
        positions: int64 ``[N]``, of the labels in their sets; of a row without one, the label as a
            column of this rank.
        span: int64 ``[2]``, the first column of this rank, and those of all; ``None``: all are
            here.
    """

    token_ids: Tensor
    offsets: Tensor
    present: Tensor
    positions: Tensor
    span: Tensor | None

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor, labels: Tensor, backend: str, shard: VocabShard | int
    ) -> Sets:
        """Args: labels: flat; shard: of the vocabulary, or the number of its columns."""
        if isinstance(shard, VocabShard):
            positions, span, V = shard.labels(labels), shard.span(), 2**31 - 1
        else:
            positions, span, V = labels.clone(), None, shard
        ops_of(backend).find_labels(labels, ids, offsets, V, positions)
        return cls(ids, offsets, offsets[1:] != offsets[:-1], positions, span)

    def of_columns(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What operators take that look for the ids among the columns of this rank."""
        return self.token_ids, self.offsets, self.span

    def labels_outside(self, unmasked: Tensor) -> Tensor:
        """The number of unmasked tokens whose label is not in their set, float32."""
        outside = unmasked & self.present & (self.positions == _OUTSIDE)
        return outside.sum(dtype=torch.float32)

    def values(self) -> Tensor:
        """Memory for values, or for their gradients."""
        return self.token_ids.new_empty(self.token_ids.shape, dtype=torch.float32)


def gathered(call: Call, logits: Tensor) -> Tensor:
    """The values of the counted rows, of logits ``[B, S, V]``."""
    sets = _of(call)
    values = sets.values()
    ops_of(call.backend).gather_sets(logits, call.counted, *sets.of_columns(), values)
    return values


def multiplied(call: Call, head: Head) -> Tensor:
    """The values of the counted rows: products of hidden states and rows of the head."""
    sets = _of(call)
    values = sets.values()
    ops_of(call.backend).multiply_sets(*_operands(head), call.counted, *sets.of_columns(), values)
    return values


def statistics(call: Call, values: Tensor, found: RowStatistics) -> None:
    """First pass over the values, into the statistics of all rows."""
    sets = _of(call)
    ops_of(call.backend).sets_statistics(
        values, sets.offsets, sets.positions, call.counted, *call.transform, *found
    )


def both_passes(call: Call, values: Tensor, found: RowStatistics) -> Tensor:
    """Both passes over the values, which become gradients where a row is decided.

    Returns:
        uint8 ``[N]``, 1 where a row is undecided: its values are still logits.
    """
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    sets = _of(call)
    of_pass = sets.positions, *call.of_row_pass, *found, undecided
    ops_of(call.backend).sets_pass_(values, sets.offsets, *of_pass)
    return undecided


def both_passes_of_hidden(
    call: Call, head: Head, found: RowStatistics, dhidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Products and both passes; the hidden states' gradient of each decided row goes to dhidden.

    Returns:
        The values, and as of :func:`both_passes`.
    """
    sets = _of(call)
    values = sets.values()
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    of_head = *_operands(head), sets.token_ids, sets.offsets
    of_pass = sets.positions, *call.of_row_pass, *found, undecided
    ops_of(call.backend).head_sets_pass(*of_head, *of_pass, values, dhidden)
    return values, undecided


def to_gradient(
    call: Call,
    values: Tensor,
    found: RowStatistics,
    coefficients: Coefficients,
    only: Tensor | None = None,
) -> None:
    """Second pass over the values of rows whose coefficients are known; ``only``: those rows."""
    arguments = _of_gradient(call, found, coefficients, only)
    ops_of(call.backend).sets_gradient_(values, *arguments)


def gradient(
    call: Call, values: Tensor, found: RowStatistics, coefficients: Coefficients
) -> Tensor:
    """As :func:`to_gradient`, of all rows, in other memory."""
    arguments = _of_gradient(call, found, coefficients, None)
    dvalues = torch.empty_like(values)
    ops_of(call.backend).sets_gradient(values, *arguments, dvalues)
    return dvalues


def scatter(call: Call, dvalues: Tensor, dlogits: Tensor) -> None:
    """Puts the gradients of the values into ``dlogits [B, S, V]``, 0 so far in these rows."""
    sets = _of(call)
    ops_of(call.backend).scatter_sets(dvalues, call.counted, *sets.of_columns(), dlogits)


def hidden_gradient(
    call: Call, dvalues: Tensor, head: Head, dhidden: Tensor, only: Tensor | None = None
) -> None:
    """Writes the gradient of the hidden states of rows with a set; ``only``: of those rows."""
    sets = _of(call)
    _, weight, _ = _operands(head)
    ops_of(call.backend).sets_dhidden(dvalues, weight, *sets.of_columns(), only, dhidden)


def weight_gradient(
    call: Call,
    dvalues: Tensor,
    head: Head,
    add: bool,
    dweight: Tensor,
    dbias: Tensor | None,
) -> None:
    """Sums over the rows whose sets have a column: in the order of the rows, in float32.

    Args:
        add: to what is in ``dweight``; otherwise it is overwritten. It may have no columns where
            only ``dbias`` is wanted, which is always added to.
    """
    sets, V = _of(call), dweight.shape[0]
    order = sets.token_ids.argsort(stable=True)
    last = max(0, sets.offsets.numel() - 2)
    rows = torch.searchsorted(sets.offsets, order, right=True).sub_(1).clamp_(0, last)
    # Ids of other ranks, and of no token, come before column 0 and after the last one.
    columns = sets.token_ids.long() if sets.span is None else sets.token_ids - sets.span[0]
    counts = columns.new_zeros(V + 2)
    counts.scatter_add_(0, columns.clamp(-1, V) + 1, torch.ones_like(columns))
    segments = counts.cumsum(0)[:-1]
    hidden, _, _ = _operands(head)
    ops_of(call.backend).sets_dweight(
        dvalues, hidden[:, : dweight.shape[1]], order, rows.int(), segments, add, dweight, dbias
    )


def _of(call: Call) -> Sets:
    assert call.sets is not None
    return call.sets


def _of_gradient(
    call: Call, found: RowStatistics, coefficients: Coefficients, only: Tensor | None
) -> tuple[Any, ...]:
    sets = _of(call)
    of_rows = sets.positions, found.stats, found.entropy, *coefficients, only
    return sets.offsets, *of_rows, *call.transform


def _operands(head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states and weight with unit stride along their rows, and the bias in float32."""
    hidden, weight = (
        matrix if matrix.stride(1) == 1 else matrix.contiguous()
        for matrix in (head.hidden, head.weight)
    )
    return hidden, weight, None if head.bias is None else head.bias.float().contiguous()


def sets_of(
    mask: SamplingMask | None,
    labels: Tensor | None,
    backend: str,
    shard: VocabShard | int,
) -> Sets | None:
    """The sets of a call with these flat labels, if it has a sampling mask."""
    if mask is None or labels is None:
        return None
    return Sets.of(mask._ids, mask._offsets, labels, backend, shard)
