"""Several labels per row: which of them have a gradient, and what they add to hidden states.

Imports the data of a call. Labels of a row may be equal: each has its log-prob, and their gradients
add up in one column.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import IGNORE_INDEX
from .call import Call, RowStatistics


def of_finite(dlog_probs: Tensor, labels: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
    """0 where a label is -100, or its log-prob -inf or NaN; not in rows that are NaN as a whole."""
    kept = (labels != IGNORE_INDEX) & (log_probs.isfinite() | entropy.isnan()[:, None])
    return torch.where(kept, dlog_probs, 0.0)


def repeat_others(labels: Tensor) -> Tensor:
    """bool ``[N, K]``: whether a label stands further ahead in its row, too."""
    ascending, order = labels.sort(stable=True, dim=1)
    repeats = F.pad(ascending[:, 1:] == ascending[:, :-1], (1, 0))
    return torch.empty_like(repeats).scatter_(1, order, repeats)


def hidden_gradient_of_labels(
    call: Call, found: RowStatistics, dlog_probs: Tensor, weight: Tensor
) -> Tensor:
    """``sum_i (G_i - p_i*sum_k g_k) * dx_i/dz_i * W_i`` over the columns that are labels of a row.

    ``G_i`` adds the ``g_k`` of the labels that are ``i``. What is never made is ``[N, K, H]``.
    """
    assert call.labels is not None
    columns, log_probs, options = call.label_columns, found.log_probs, call.options
    is_here = (columns >= 0) & (columns < weight.shape[0]) & log_probs.isfinite()
    is_here &= call.counted_logits[:, None]
    p = torch.where(repeat_others(call.labels), 0.0, log_probs.exp())
    factors = dlog_probs - p * dlog_probs.sum(1, keepdim=True)
    temperatures = call.field("temperatures")
    by = options.temperature if temperatures is None else temperatures.double()[:, None]
    slope = options.logit_scale / by
    if options.softcap < math.inf:
        origin, total = found.stats[:, :1], found.stats[:, 1:]
        y = (log_probs + total.log()) * (by / options.softcap) + origin
        slope = slope * (1 - y * y)
    factors = torch.where(is_here, factors * slope, 0.0).to(weight.dtype)
    if weight.shape[0] == 0:
        return weight.new_zeros(len(columns), weight.shape[1])
    columns = torch.where(is_here, columns, 0)
    return F.embedding_bag(columns, weight, mode="sum", per_sample_weights=factors)
