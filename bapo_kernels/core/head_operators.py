"""The operators of a head: log-probs of hidden states, forward and backward, for all backends.

A compiler cannot trace the loop over chunks, which reads on the host how many rows are counted: to
it these are two operators, and autograd takes them in eager code, too. Imports hidden, rows and the
data of a call; the schemas stand in ``operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import KL_LOSS_TYPES, Options
from .call import Call, Coefficients, RowStatistics, SamplingSets
from .distributed import VocabShard
from .head import Head, HeadGradients
from .hidden import Chunks, HeldSets, add_recomputed, add_set_statistics, chunk_statistics
from .inputs import bounds_tensor
from .labels import hidden_gradient_of_labels
from .operators import FIELDS, NATIVE, register
from .rows import Rows, hidden_gradient, multiplied, second_pass


class _HeadCall(NamedTuple):
    """What both operators take behind hidden states, weight and bias, in the order of schemas."""

    labels: Tensor
    counted: Tensor
    tokens: Tensor | None
    present: int
    options: Sequence[float]
    dtype: torch.dtype
    logits_dtype: torch.dtype
    backend: str
    chunk_tokens: int | None
    shard_sizes: Tensor | None
    group: str | None
    token_ids: Tensor | None
    offsets: Tensor | None

    def made(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Call, Head]:
        columns, labels = weight.shape[0], self.labels
        shard, sets = VocabShard.named(columns, self.shard_sizes, self.group), None
        if self.token_ids is not None and self.offsets is not None:
            ids = self.token_ids, self.offsets
            sets = SamplingSets.of(*ids, labels, self.backend, shard or columns)
        call = Call(
            Options(*self.options),
            self.backend,
            self.counted.shape,
            self.counted,
            self.counted,
            self.tokens,
            self.present,
            labels=labels,
            shard=shard,
            sets=sets,
        )
        return call, Head.of(hidden, weight, bias, self.dtype, shard, self.logits_dtype)


def _head_forward(
    unscaled: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the counted rows, a chunk at a time; ``others`` as :class:`_HeadCall` has them.

    With ``unscaled`` also the gradient of each log-prob with respect to its hidden state, or of
    several labels per row what they have in common, ``sum_j p_j*dx_j/dz_j*W_j`` over the columns
    that are none of them. That is of this rank's columns, and of rows without a set.
    """
    given = _HeadCall(*others)
    call, head = given.made(hidden, weight, bias)
    rows = call.counted_logits.nonzero().squeeze(1)
    size = head.rows_per_chunk(rows.numel(), given.chunk_tokens, sums_weight=False)
    chunks, memory = rows.split(size), head.chunk_memory(size)
    no_gradient = hidden.new_empty(0)
    no_values = hidden.new_empty(0, dtype=torch.float32)
    several = given.labels.ndim == 2
    if not unscaled or several:
        in_common = HeadGradients(head, (unscaled, False, False), True)
        found = chunk_statistics(call, head, chunks, memory, in_common if unscaled else None)
        values = no_values if call.sets is None else add_set_statistics(call, head, found)
        gradient = in_common.hidden
        gradient = no_gradient if gradient is None else gradient.to(hidden.dtype).view(hidden.shape)
        return *found, gradient, values
    # The loss whose gradient this is: the k1 term alone, summed.
    options = call.options._replace(kl_loss_coef=1.0, kl_loss_type=float(KL_LOSS_TYPES["k1"]))
    ones = torch.ones_like(given.labels, dtype=torch.float64)
    tokens = torch.zeros(len(FIELDS), ones.numel(), device=ones.device)
    if (temperatures := call.field("temperatures")) is not None:
        tokens[FIELDS.index("temperatures")] = temperatures
    zeros = 1 << FIELDS.index("advantages") | 1 << FIELDS.index("ref_log_probs")
    call = replace(
        call,
        options=options,
        tokens=tokens,
        present=call.present | zeros,
        weights=ones,
        bounds=bounds_tensor((1.0, 1.0), ones),
    )
    made = Chunks(call, head, HeadGradients(head, (True, False, False), True), memory)
    for chunk in chunks:
        made.add(made.forward(chunk), Coefficients(ones[chunk], None))
    if call.sets is not None:
        coefficients = Coefficients(ones, None).without(~given.counted)
        HeldSets(call, head, made.gradients, made.found).add(coefficients)
    gradient, *_ = made.gradients.of(hidden, None, None)
    assert gradient is not None
    return *made.found, gradient, no_values


def _head_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    stats: Tensor,
    values: Tensor,
    unscaled: Tensor | None,
    needs: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> list[Tensor]:
    """Makes the logits of the rows again whose incoming gradients are not zero.

    With ``unscaled`` (of several labels per row) those of the entropy alone.
    """
    given = _HeadCall(*others)
    call, head = given.made(hidden, weight, bias)
    found = RowStatistics(log_probs, entropy, stats)
    if dlog_probs is None:
        dlog_probs = torch.zeros_like(given.labels, dtype=torch.float64)
    coefficients = recomputed = Coefficients(dlog_probs, dentropy)
    if unscaled is not None:
        recomputed = Coefficients(torch.zeros_like(dlog_probs), dentropy)
    gradients = _recomputed(call, head, tuple(needs), given.chunk_tokens, found, recomputed)
    if unscaled is not None and gradients.hidden is not None:
        of_logits = coefficients.without(~call.counted_logits).dlog_probs
        sums = of_logits.sum(1, keepdim=True)
        in_common = torch.where(sums != 0, -sums * unscaled.view(len(sums), weight.shape[1]), 0.0)
        of_labels = hidden_gradient_of_labels(call, found, of_logits, head.weight)
        gradients.hidden += (in_common + of_labels).to(gradients.hidden.dtype)
    if call.sets is not None:
        kept = values.numel() == call.sets.token_ids.numel()
        _, head_rows, _ = operands = head.set_operands
        values = values if kept else multiplied(call, operands)
        dvalues = call.sets.zero_values()
        of_counted = coefficients.without(~given.counted)
        second_pass(call, Rows.of_values(call, values), found, of_counted, dvalues)
        if gradients.hidden is not None:
            hidden_gradient(call, dvalues, head_rows, gradients.hidden)
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
    counted = call.counted_logits
    rows = (counted & coefficients.has_gradient()).nonzero().squeeze(1)
    size = head.rows_per_chunk(rows.numel(), chunk_tokens, sums_weight=needs[1])
    chunks, memory = rows.split(size), head.chunk_memory(size)
    gradients = HeadGradients(head, needs, one_chunk=len(chunks) == 1 and call.sets is None)
    for chunk in chunks:
        add_recomputed(call, gradients, chunk, memory, found, coefficients)
    return gradients


register(NATIVE, "head_forward", _head_forward, ["CompositeExplicitAutograd"])
register(NATIVE, "head_backward", _head_backward, ["CompositeExplicitAutograd"])
