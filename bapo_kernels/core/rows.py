"""The two passes over rows of logits or of the values of sampling sets, and the loss of logits.

Imports the data of a call, tokens, memory and the operators. A pass is launched here and nowhere
else; which rows the second has to touch shows in results where logits are overwritten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import IGNORE_INDEX
from ..output import BAPOOutput
from .autograd import HANDED_OVER, OverwrittenLogits, path_to, without_derivative
from .call import Call, SamplingSets
from .memory import empty_gradient
from .operators import as_rows, ops_of
from .tokens import Coefficients, loss_of_log_probs


class Rows(NamedTuple):
    """Rows to pass over: logits ``[B, S, V]``, or values ``[K]`` and the offsets of their sets.

    The values of a call are float32, the logits of all its sets in the order of their ids. They are
    gathered from the logits, or are products of hidden states and rows of a head; then they become
    their gradients. A pass touches no row that the other kind stands for.
    """

    data: Tensor
    offsets: Tensor | None
    labels: Tensor


class RowStatistics(NamedTuple):
    """The results of the first pass for each row, in float64; ``stats`` is private to a backend."""

    log_probs: Tensor  # in the shape of the labels
    entropy: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, call: Call) -> RowStatistics:
        """Uninitialised."""
        assert call.labels is not None
        log_probs = torch.empty_like(call.labels, dtype=torch.float64)
        N = log_probs.shape[0]  # `len` would fix the size in an export
        return cls(log_probs, log_probs.new_empty(N), log_probs.new_empty((N, 2)))

    @classmethod
    def zeros(cls, call: Call) -> RowStatistics:
        """The statistics of rows that are not counted."""
        found = cls.empty(call)
        for values in found:
            values.zero_()
        return found

    def at(self, rows: Tensor) -> RowStatistics:
        """The statistics of some rows."""
        return RowStatistics(*(values[rows] for values in self))

    def put(self, rows: Tensor, found: RowStatistics) -> None:
        """Takes over the statistics of some rows."""
        for whole, values in zip(self, found, strict=True):
            whole[rows] = values


def logit_rows(call: Call, logits: Tensor) -> Rows:
    """The rows of logits ``[..., V]``, the columns of this rank."""
    return Rows(as_rows(logits), None, call.label_columns)


def set_rows(call: Call, values: Tensor) -> Rows:
    """The rows that are values of the sets of a call."""
    return Rows(values, call.given_sets.offsets, call.given_sets.positions)


def first_pass(call: Call, rows: Rows, found: RowStatistics) -> None:
    """Writes the statistics of the rows, of a shard those of its columns."""
    given = _counted(call, rows), *call.temperatures, call.options
    ops_of(call.backend).row_statistics(*rows, *given, *found)


def _counted(call: Call, rows: Rows) -> Tensor:
    return call.counted_logits if rows.offsets is None else call.counted


def row_statistics(call: Call, *rows: Rows | None) -> RowStatistics:
    """Makes the first pass over all rows of a call, also where each rank has a shard of them."""
    found = RowStatistics.empty(call)
    for each in rows:
        if each is not None:
            first_pass(call, each, found)
    return combined(call, found)


def combined(call: Call, found: RowStatistics) -> RowStatistics:
    """The statistics of counted rows of which each rank has a shard."""
    if call.shard is None:
        return found
    assert call.labels is not None
    here = call.labels, call.label_columns, call.counted
    return RowStatistics(
        *call.shard.combine(*here, *found, call.options, call.field("temperatures"))
    )


def set_statistics(call: Call, values: Tensor, found: RowStatistics) -> None:
    """Makes the first pass over the values of sets, for a shard with a collective of its own."""
    sets = set_rows(call, values)
    if call.shard is None:
        first_pass(call, sets, found)
        return
    parts = RowStatistics.zeros(call)
    first_pass(call, sets, parts)
    rows = call.given_sets.present.nonzero().squeeze(1)
    found.put(rows, combined(call, parts).at(rows))


def both_passes(call: Call, rows: Rows, found: RowStatistics, out: Tensor | None = None) -> Tensor:
    """The second pass makes the gradient of each counted row where it is decided.

    Args:
        out: where the gradients go; ``None``: over the rows.

    Returns:
        uint8 ``[N]``: 1 where a row is undecided and has no gradient yet.
    """
    undecided = torch.empty_like(call.counted, dtype=torch.uint8)
    arguments = *to_decide(call, rows), *found, undecided
    if out is None:
        ops_of(call.backend).row_pass_(rows.data, *arguments)
    else:
        ops_of(call.backend).row_pass(rows.data, *arguments, out)
    return undecided


def to_decide(call: Call, rows: Rows) -> tuple[Any, ...]:
    """The arguments of operators that decide on gradients, between the rows and the results."""
    given = _counted(call, rows), call.weights, call.fields, call.present
    return *rows[1:], *given, call.bounds, call.options


def second_pass(
    call: Call,
    rows: Rows,
    found: RowStatistics,
    coefficients: Coefficients,
    out: Tensor | None = None,
    only: Tensor | None = None,
    drawn: Tensor | None = None,
) -> None:
    """Makes the gradients of rows whose coefficients are known; logits of rows with a set get 0.

    Args:
        out: where the gradients go; ``None``: over the rows.
        only: uint8 ``[N]``, the rows it is about; ``None``: all.
        drawn: what the smaller values of rows that are samples stand for.
    """
    if rows.offsets is None and only is None and call.sets is not None:
        coefficients = coefficients.without(call.sets.present)
    given = rows.offsets, rows.labels, found.stats, found.entropy, *coefficients, only, drawn
    arguments = rows.data, *given, *call.temperatures, call.options
    if out is None:
        ops_of(call.backend).row_gradient_(*arguments)
    else:
        ops_of(call.backend).row_gradient(*arguments, out)


def statistics_at(call: Call, rows: Tensor, logits: Tensor) -> RowStatistics:
    """Makes the first pass over the logits ``[n, V]`` of some rows of a call."""
    call = call.at(rows)
    return row_statistics(call, logit_rows(call, logits))


def gradients_at(
    call: Call,
    rows: Tensor,
    logits: Tensor,
    found: RowStatistics,
    coefficients: Coefficients,
    only: Tensor | None = None,
) -> None:
    """Makes the second pass over the logits of some rows, to which the others belong."""
    call = call.with_labels_of(rows)
    second_pass(call, logit_rows(call, logits), found, coefficients, only=only)


def pass_beside_labels(call: Call, at: Tensor, logits: Tensor, found: RowStatistics) -> None:
    """Turns the logits of some rows into ``p_j*dx_j/dz_j``, and 0 at the ``K`` labels of each."""
    call = call.with_labels_of(at)
    rows = logit_rows(call, logits)
    none, minus = torch.full_like(rows.labels[:, 0], -1), torch.full_like(found.entropy, -1.0)
    second_pass(call, rows._replace(labels=none), found, Coefficients(minus, None))
    is_here = (rows.labels >= 0) & (rows.labels < logits.shape[1])
    # A label that has no column repeats one that has; a row without any keeps its first entry.
    last = torch.where(is_here, rows.labels, -1).amax(1, keepdim=True)
    columns = torch.where(is_here, rows.labels, last.clamp(min=0))
    kept = torch.where(last < 0, logits[:, :1], 0.0)
    if logits.shape[1]:
        logits.scatter_(1, columns, kept.to(logits.dtype).expand(columns.shape))


def gathered(call: Call, logits: Tensor) -> Tensor:
    """The values of the counted rows, of logits ``[B, S, V]``."""
    sets = call.given_sets
    values = sets.empty_values()
    ops_of(call.backend).gather_sets(logits, call.counted, *sets.columns(), values)
    return values


def scatter(call: Call, dvalues: Tensor, dlogits: Tensor) -> None:
    """Puts the gradients of the values into ``dlogits [B, S, V]``, 0 so far in these rows."""
    ops_of(call.backend).scatter_sets(dvalues, call.counted, *call.given_sets.columns(), dlogits)


def loss_of_logits(
    call: Call, logits: Tensor, needs_gradient: bool, inplace: bool
) -> tuple[BAPOOutput, Tensor | None]:
    """Row pass, search, loss, and the gradient of the rows that were undecided.

    Where the row pass can decide no row (:attr:`Call.rows_decide`), all are; with given bounds none
    of the others is. The values of sets are gathered before their rows of logits become zeros,
    among which the gradients are scattered at the end.
    """
    z = logit_rows(call, logits)
    dlogits = out = undecided = undecided_sets = values = None
    if call.sets is not None:
        values = set_rows(call, gathered(call, z.data))
    if inplace:
        dlogits = logits
    elif needs_gradient:
        dlogits = empty_gradient(logits)
        out = as_rows(dlogits)
    if dlogits is None or not call.rows_decide:
        found = row_statistics(call, z, values)
    else:
        found = RowStatistics.empty(call)
        undecided = both_passes(call, z, found, out)
        if values is not None:
            undecided_sets = both_passes(call, values, found)
    output, coefficients = loss_of_log_probs(call, found.log_probs, found.entropy)
    if dlogits is None:
        return output, None
    if call.searches or not call.rows_decide:
        second_pass(call, z, found, coefficients, out, undecided)
        if values is not None:
            second_pass(call, values, found, coefficients, None, undecided_sets)
    if values is not None:
        scatter(call, values.data, z.data if out is None else out)
    return output, dlogits


class LogProbs(torch.autograd.Function):
    """Float64 ``(log_probs, entropy)`` of rows; backward makes the softmax again from their sums.

    Log-probs are in the shape of the labels of the call. Rows that are not counted are not read,
    and 0. With ``overwritten`` backward writes the gradient over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        call: Call,
        overwritten: OverwrittenLogits | None,
        path: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        values = None if call.sets is None else gathered(call, as_rows(logits))
        sets = None if values is None else set_rows(call, values)
        found = row_statistics(call, logit_rows(call, logits), sets)
        ctx.call, ctx.overwritten, ctx.path = call, overwritten, path
        ctx.inplace = None if overwritten is None else logits.detach()
        # Autograd would refuse logits that it knows to be overwritten.
        saved = logits if overwritten is None else None
        fields, ctx.present = call.temperatures
        given = call.labels, call.counted, fields
        ctx.save_for_backward(saved, *given, values, *found, *(call.sets or ()))
        ctx.set_materialize_grads(False)
        return found.log_probs, found.entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, labels, counted, fields, values, *others = ctx.saved_tensors
        found = RowStatistics(*others[:3])
        sets = None if values is None else SamplingSets(*others[3:])
        call = replace(
            ctx.call, labels=labels, counted=counted, fields=fields, present=ctx.present, sets=sets
        )

        inputs = dlog_probs, dentropy, *ctx.path
        dlog_probs, dentropy = (None if d is None else d.detach() for d in (dlog_probs, dentropy))
        if dentropy is not None:
            dentropy = torch.where(counted, dentropy, 0.0)
        if dlog_probs is None:
            dlog_probs = torch.zeros_like(found.log_probs)
        elif labels.ndim == 1:
            dlog_probs = torch.where(counted, dlog_probs, 0.0)
        else:
            dlog_probs = finite_only(dlog_probs, labels, found.log_probs, found.entropy)
        coefficients = Coefficients(dlog_probs, dentropy)
        if logits is not None:
            dlogits = empty_gradient(logits)
            second_pass(call, logit_rows(call, logits), found, coefficients, as_rows(dlogits))
        elif ctx.inplace is not None:
            ctx.overwritten.check()
            dlogits, ctx.inplace, ctx.overwritten = ctx.inplace, None, None
            second_pass(call, logit_rows(call, dlogits), found, coefficients)
        else:
            raise RuntimeError(HANDED_OVER)
        if values is not None:
            dvalues = call.sets.empty_values()
            second_pass(call, set_rows(call, values), found, coefficients, dvalues)
            scatter(call, dvalues, as_rows(dlogits))
        return without_derivative(dlogits, *inputs), None, None, None


def differentiable_log_probs(
    call: Call, logits: Tensor, overwritten: OverwrittenLogits | None = None
) -> tuple[Tensor, Tensor]:
    """Flat float64 log-probs and entropy, whose gradient backward makes."""
    # Saved as they came in: AOTAutograd raises for a second derivative by an input that is saved.
    made: tuple[Tensor, Tensor] = LogProbs.apply(logits, call, overwritten, path_to(logits))
    return made


def finite_only(dlog_probs: Tensor, labels: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Zeros in place of the gradients of labels that are -100, or have a log-prob of -inf or NaN.

    Rows that are NaN as a whole keep theirs.
    """
    kept = (labels != IGNORE_INDEX) & (log_probs.isfinite() | entropy.isnan()[:, None])
    return torch.where(kept, dlog_probs, 0.0)
