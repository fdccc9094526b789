"""The two passes over rows: of logits, and of the values of sampling sets.

The values of a call are float32 ``[K]``, the logits of all its sets in the order of their ids:
short rows for the same two passes. They are gathered from the logits, or made of hidden states by
products with the rows of the head that the ids name; then they become their gradients. Imports the
data of a call and the operators; a pass is launched here and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call, Coefficients, RowStatistics, SamplingSets
from .operators import as_rows, ops_of


class Rows(NamedTuple):
    """What is passed over: logits ``[B, S, V]``, or values ``[K]`` and the offsets of their sets.

    A pass touches no row that the other kind stands for.
    """

    data: Tensor
    offsets: Tensor | None
    labels: Tensor

    @classmethod
    def of_logits(cls, call: Call, logits: Tensor) -> Rows:
        """``[..., V]``, the columns of this rank."""
        return cls(as_rows(logits), None, call.label_columns)

    @classmethod
    def of_values(cls, call: Call, values: Tensor) -> Rows:
        """Of the sets of a call."""
        sets = _sets(call)
        return cls(values, sets.offsets, sets.positions)


def first_pass(call: Call, rows: Rows, found: RowStatistics) -> None:
    """Writes the statistics of the rows, of those of a shard what is in it."""
    of_call = _counted(call, rows), *call.temperatures, call.options
    ops_of(call.backend).row_statistics(*rows, *of_call, *found)


def _counted(call: Call, rows: Rows) -> Tensor:
    return call.counted_logits if rows.offsets is None else call.counted


def row_statistics(call: Call, *rows: Rows | None) -> RowStatistics:
    """Of all rows, also where each rank has a shard of them."""
    found = RowStatistics.empty(call)
    for each in rows:
        if each is not None:
            first_pass(call, each, found)
    return of_all_ranks(call, found)


def of_all_ranks(call: Call, found: RowStatistics) -> RowStatistics:
    """The statistics of counted rows of which each rank has a shard."""
    if call.shard is None:
        return found
    assert call.labels is not None
    here = call.labels, call.label_columns, call.counted
    return RowStatistics(
        *call.shard.combine(*here, *found, call.options, call.field("temperatures"))
    )


def both_passes(call: Call, rows: Rows, found: RowStatistics, out: Tensor | None = None) -> Tensor:
    """The second pass makes the gradient of each counted row where it is decided.

    Args:
        out: where the gradients go; ``None``: over the rows.

    Returns:
        uint8 ``[N]``: 1 where a row is undecided and has no gradient yet.
    """
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    arguments = *_to_decide(call, rows), *found, undecided
    if out is None:
        ops_of(call.backend).row_pass_(rows.data, *arguments)
    else:
        ops_of(call.backend).row_pass(rows.data, *arguments, out)
    return undecided


def head_set_pass(
    call: Call, operands: tuple[Any, ...], found: RowStatistics, dhidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Products and both passes; the hidden states' gradient of each decided row goes to dhidden.

    Args:
        operands: as of :func:`multiplied`.

    Returns:
        The values, and as of :func:`both_passes`.
    """
    values = _sets(call).zero_values()
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    arguments = *_to_decide(call, Rows.of_values(call, values)), *found, undecided
    ids = _sets(call).token_ids
    ops_of(call.backend).head_sets_pass(*operands, ids, *arguments, values, dhidden)
    return values, undecided


def _to_decide(call: Call, rows: Rows) -> tuple[Any, ...]:
    """What operators take that decide on the gradients of rows, between these and the results."""
    of_tokens = _counted(call, rows), call.weights, call.tokens, call.present
    return *rows[1:], *of_tokens, call.bounds, call.options


def second_pass(
    call: Call,
    rows: Rows,
    found: RowStatistics,
    coefficients: Coefficients,
    out: Tensor | None = None,
    only: Tensor | None = None,
) -> None:
    """Of rows whose coefficients are known; the logits of rows with a set get zeros.

    Args:
        out: where the gradients go; ``None``: over the rows.
        only: uint8 ``[N]``, the rows it is about; ``None``: all.
    """
    if rows.offsets is None and only is None and call.sets is not None:
        coefficients = coefficients.without(call.sets.present)
    given = rows.offsets, rows.labels, found.stats, found.entropy, *coefficients, only
    arguments = rows.data, *given, *call.temperatures, call.options
    if out is None:
        ops_of(call.backend).row_gradient_(*arguments)
    else:
        ops_of(call.backend).row_gradient(*arguments, out)


def pass_beside_labels(call: Call, rows: Rows, found: RowStatistics) -> None:
    """Over logits ``[1, n, V]``: ``p_j*dx_j/dz_j``, but 0 at the ``K`` labels of each row."""
    none, minus = torch.full_like(rows.labels[:, 0], -1), torch.full_like(found.entropy, -1.0)
    second_pass(call, rows._replace(labels=none), found, Coefficients(minus, None))
    (logits,) = rows.data.unbind()
    is_here = (rows.labels >= 0) & (rows.labels < logits.shape[1])
    # A label that has no column repeats one that has; a row without any keeps its first entry.
    of_row = torch.where(is_here, rows.labels, -1).amax(1, keepdim=True)
    columns = torch.where(is_here, rows.labels, of_row.clamp(min=0))
    kept = torch.where(of_row < 0, logits[:, :1], 0.0)
    if logits.shape[1]:
        logits.scatter_(1, columns, kept.to(logits.dtype).expand(columns.shape))


def gathered(call: Call, logits: Tensor) -> Tensor:
    """The values of the counted rows, of logits ``[B, S, V]``."""
    sets = _sets(call)
    values = sets.empty_values()
    ops_of(call.backend).gather_sets(logits, call.counted, *sets.columns(), values)
    return values


def multiplied(call: Call, operands: tuple[Any, ...]) -> Tensor:
    """The values of the counted rows: products of hidden states and rows of the head.

    Args:
        operands: hidden states, weight and bias, as :attr:`Head.set_operands` has them.
    """
    sets = _sets(call)
    values = sets.zero_values()
    ops_of(call.backend).multiply_sets(*operands, call.counted, *sets.columns(), values)
    return values


def scatter(call: Call, dvalues: Tensor, dlogits: Tensor) -> None:
    """Puts the gradients of the values into ``dlogits [B, S, V]``, 0 so far in these rows."""
    ops_of(call.backend).scatter_sets(dvalues, call.counted, *_sets(call).columns(), dlogits)


def hidden_gradient(
    call: Call, dvalues: Tensor, weight: Tensor, dhidden: Tensor, only: Tensor | None = None
) -> None:
    """Writes the gradient of the hidden states of rows with a set; ``only``: of those rows."""
    ops_of(call.backend).sets_dhidden(dvalues, weight, *_sets(call).columns(), only, dhidden)


def weight_gradient(
    call: Call,
    dvalues: Tensor,
    hidden: Tensor,
    add: bool,
    dweight: Tensor,
    dbias: Tensor | None,
) -> None:
    """Sums over the rows whose sets have a column: in the order of the rows, in float32.

    Args:
        add: to what is in ``dweight``; otherwise it is overwritten. It may have no columns where
            only ``dbias`` is wanted, which is always added to.
    """
    sets, V = _sets(call), dweight.shape[0]
    order = sets.token_ids.argsort(stable=True)
    last = max(0, sets.offsets.numel() - 2)
    rows = torch.searchsorted(sets.offsets, order, right=True).sub_(1).clamp_(0, last)
    # Ids of other ranks, and of no token, come before column 0 and after the last one.
    columns = sets.token_ids.long() if sets.span is None else sets.token_ids - sets.span[0]
    counts = columns.new_zeros(V + 2)
    counts.scatter_add_(0, columns.clamp(-1, V) + 1, torch.ones_like(columns))
    segments = counts.cumsum(0)[:-1]
    ops_of(call.backend).sets_dweight(
        dvalues, hidden[:, : dweight.shape[1]], order, rows.int(), segments, add, dweight, dbias
    )


def _sets(call: Call) -> SamplingSets:
    assert call.sets is not None
    return call.sets
