"""The loss of logits: the kernels one after the other; nothing is read on the host in between.

Imports rows and tokens. Which rows the second pass has to touch, and when the values of sets are
read and written, is decided here: a change shows in results where logits are overwritten.
"""

from __future__ import annotations

from torch import Tensor

from ..output import BAPOOutput
from .call import Call, RowStatistics
from .memory import empty_gradient
from .operators import as_rows
from .rows import Rows, both_passes, gathered, row_statistics, scatter, second_pass
from .tokens import loss_of_log_probs


def loss_of_logits(
    call: Call, logits: Tensor, needs_gradient: bool, inplace: bool
) -> tuple[BAPOOutput, Tensor | None]:
    """Row pass, search, loss, and the gradient of the rows that were undecided.

    Where the row pass can decide no row (:attr:`Call.rows_decide`), all are; with given bounds none
    of the others is. The values of sets are gathered before their rows of logits become zeros,
    among which the gradients are scattered at the end.
    """
    z = Rows.of_logits(call, logits)
    dlogits = out = undecided = undecided_sets = values = None
    if call.sets is not None:
        values = Rows.of_values(call, gathered(call, z.data))
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
