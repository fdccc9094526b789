"""Rows with a sampling mask: products of hidden states with the rows of a head that their ids name.

Imports the head, rows and the data of a call. The sums over rows have a fixed order: another would
change the bits of a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call, SamplingSets
from ..memory import SUMS, WEIGHTS
from ..operators import NATIVE, ops_of
from ..rows import RowStatistics, both_passes, second_pass, set_rows, set_statistics, to_decide
from ..tokens import Coefficients
from .head import Head, HeadGradients


class HeldSets:
    """The rows of a call that have a sampling mask: their values, until the bounds are known.

    The hidden states' gradients of decided rows are made with the values, which on a CPU finds the
    head's rows in the cache.
    """

    def __init__(
        self, call: Call, head: Head, gradients: HeadGradients, found: RowStatistics
    ) -> None:
        self.call, self.head, self.gradients, self.found = call, head, gradients, found
        self.undecided: Tensor | None = None
        if not call.rows_decide:
            self.values = add_set_statistics(call, head, found)
        elif gradients.hidden is not None:
            self.values, self.undecided = head_set_pass(
                call, head.set_operands, found, gradients.hidden
            )
        else:
            self.values = multiplied(call, head.set_operands)
            self.undecided = both_passes(call, set_rows(call, self.values), found)

    def add(self, coefficients: Coefficients) -> None:
        """Adds the gradients of all these rows, which no bounds change any more."""
        call, values, dhidden = self.call, self.values, self.gradients.hidden
        if call.searches or not call.rows_decide:
            sets = set_rows(call, values)
            second_pass(call, sets, self.found, coefficients, only=self.undecided)
            if dhidden is not None:
                _, weight, _ = self.head.set_operands
                hidden_gradient(call, values, weight, dhidden, self.undecided)
        add_set_gradients(self.gradients, call, values)


def add_set_statistics(call: Call, head: Head, found: RowStatistics) -> Tensor:
    """Makes the values of the rows that have a sampling mask, and their first pass."""
    values = multiplied(call, head.set_operands)
    set_statistics(call, values, found)
    return values


def head_set_pass(
    call: Call, operands: tuple[Any, ...], found: RowStatistics, dhidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Makes products and both passes, and into dhidden the gradients of decided rows.

    Args:
        operands: those of :func:`multiplied`.

    Returns:
        The values, and the result of :func:`both_passes`.
    """
    values = call.given_sets.zero_values()
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    arguments = *to_decide(call, set_rows(call, values)), *found, undecided
    ids = call.given_sets.token_ids
    ops_of(call.backend).head_sets_pass(*operands, ids, *arguments, values, dhidden)
    return values, undecided


def multiplied(call: Call, operands: tuple[Any, ...]) -> Tensor:
    """The values of the counted rows: products of hidden states and rows of the head.

    Args:
        operands: hidden states, weight and bias, as :attr:`Head.set_operands` has them.
    """
    sets = call.given_sets
    values = sets.zero_values()
    ops_of(call.backend).multiply_sets(*operands, call.counted, *sets.columns(), values)
    return values


def hidden_gradient(
    call: Call, dvalues: Tensor, weight: Tensor, dhidden: Tensor, only: Tensor | None = None
) -> None:
    """Writes the gradient of the hidden states of rows with a set, or ``only`` of some of them."""
    ops_of(call.backend).sets_dhidden(dvalues, weight, *call.given_sets.columns(), only, dhidden)


def add_set_gradients(
    gradients: HeadGradients, call: Call, dvalues: Tensor, last: bool = True
) -> None:
    """Adds the gradients of weight and bias of rows that are sets; last as add_second_pass."""
    head, dweight, h = gradients.head, gradients.weight, gradients.head.hidden
    if gradients.needs_weight and dweight is None:
        dtype = torch.float32 if head.trains_float32 or not last else h.dtype
        memory = WEIGHTS if dtype == h.dtype else SUMS
        dweight = memory.empty(head.weight.shape, dtype, h.device)
    elif not gradients.needs_weight and gradients.bias is not None:
        # The kernel of both makes the bias alone.
        dweight = h.new_empty(gradients.bias.numel(), 0)
    if dweight is not None:
        hidden, add = head.set_operands[0], gradients.weight is not None
        _weight_gradient(call, dvalues, hidden, add, dweight, gradients.bias)
    if gradients.needs_weight:
        gradients.weight = dweight


def add_second_pass(
    gradients: HeadGradients,
    call: Call,
    values: Tensor,
    found: RowStatistics,
    coefficients: Coefficients,
    drawn: Tensor | None = None,
    last: bool = True,
) -> None:
    """Adds the gradients of rows whose values are kept, and whose coefficients are known.

    Args:
        drawn: what the smaller values of rows that are samples stand for.
        last: nothing more is added to the weight's gradient, which may be rounded to its dtype.
    """
    dvalues = call.given_sets.zero_values()
    second_pass(call, set_rows(call, values), found, coefficients, dvalues, drawn=drawn)
    if gradients.hidden is not None:
        _, weight, _ = gradients.head.set_operands
        hidden_gradient(call, dvalues, weight, gradients.hidden)
    add_set_gradients(gradients, call, dvalues, last)


def _weight_gradient(
    call: Call, dvalues: Tensor, hidden: Tensor, add: bool, dweight: Tensor, dbias: Tensor | None
) -> None:
    """Sums over the rows whose sets have a column: in the order of the rows, in float32.

    Args:
        add: to what is in ``dweight``; otherwise it is overwritten. It may have no columns where
            only ``dbias`` is wanted, which is always added to.
    """
    sets, V = call.given_sets, dweight.shape[0]
    order = by_column_on_cpu(sets, V) if call.backend == "cpu" else by_column(sets, V)
    hidden = hidden[:, : dweight.shape[1]]
    ops_of(call.backend).sets_dweight(dvalues, hidden, *order, add, dweight, dbias)


def by_column(sets: SamplingSets, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """The values of sets in the order of their columns, and of the rows in each column.

    Returns:
        Their order, int64 ``[K]``, their rows, int32 ``[K]``, and where each column begins and the
        last one ends, int64 ``[V + 1]``. Ids of other ranks, and of no token, come before column 0
        and after the last one.
    """
    order = sets.token_ids.argsort(stable=True)
    last = max(0, sets.offsets.numel() - 2)
    rows = torch.searchsorted(sets.offsets, order, right=True).sub_(1).clamp_(0, last)
    columns = sets.token_ids.long() if sets.span is None else sets.token_ids - sets.span[0]
    counts = columns.new_zeros(V + 2)
    counts.scatter_add_(0, columns.clamp(-1, V) + 1, torch.ones_like(columns))
    return order, rows.int(), counts.cumsum(0)[:-1]


def by_column_on_cpu(sets: SamplingSets, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, by a counting sort; argsort takes several times as long."""
    order = sets.token_ids.new_empty(sets.token_ids.shape, dtype=torch.int64)
    made = order, torch.empty_like(sets.token_ids), order.new_empty(V + 1)
    getattr(torch.ops, NATIVE).sort_sets(*sets.columns(), *made)
    return made
