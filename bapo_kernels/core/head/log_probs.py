"""Log-probs of hidden states: two operators for all backends, and autograd around them.

A compiler cannot trace the loop over chunks, which reads on the host how many rows are counted.
Imports the other files of the head, autograd, rows and the data of a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import KL_LOSS_TYPES, Options
from ..autograd import without_derivative
from ..call import Call, Coefficients, RowStatistics, SamplingSets, bounds_tensor
from ..distributed import VocabShard
from ..operators import FIELDS, NATIVE, implement
from ..rows import Rows, of_finite, second_pass
from .head import Head, HeadGradients
from .hidden import Chunks, add_recomputed, chunk_statistics
from .sets import HeldSets, add_set_gradients, add_set_statistics, hidden_gradient, multiplied


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
        add_set_gradients(gradients, call, dvalues)
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


class LinearLogProbs(torch.autograd.Function):
    """As :class:`LogProbs`, of hidden states; backward makes the logits of some rows again.

    With ``unscaled`` (of a frozen head) forward makes the gradient of each log-prob, which
    backward scales, and the logits are made again only for a gradient of the entropy. Of several
    labels per row, forward makes the part that they have in common.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        unscaled: bool,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        shard = call.shard
        sizes, group = (None, None) if shard is None else (shard.sizes, shard.group.group_name)
        dtype, logits_dtype, chunk_tokens = options
        tokens, present = call.temperatures
        tensors = hidden, weight, bias, call.labels, call.counted, tokens
        mask = (None, None) if call.sets is None else call.sets[:2]
        ctx.numbers = present, call.options, dtype, logits_dtype, call.backend, chunk_tokens
        log_probs, entropy, stats, gradient, values = _OPS.head_forward(
            unscaled, *tensors, *ctx.numbers, sizes, group, *mask
        )
        # Autograd refuses tensors that were made in inference mode and have no versions.
        traced = torch.compiler.is_compiling()
        kept = [x is not None and not traced and x.is_inference() for x in tensors]
        ctx.inference = [x if keeps else None for x, keeps in zip(tensors, kept, strict=True)]
        saved = (None if keeps else x for x, keeps in zip(tensors, kept, strict=True))
        several = call.labels is not None and call.labels.ndim == 2
        found = log_probs if several else None, entropy, stats
        ctx.save_for_backward(*saved, sizes, *mask, *found, values, gradient)
        ctx.unscaled, ctx.group = unscaled, group
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, sizes, ids, offsets, log_probs, entropy, stats, values, unscaled = (
            ctx.saved_tensors
        )
        tensors = [x if y is None else y for x, y in zip(tensors, ctx.inference, strict=True)]
        dlog_probs, dentropy = (None if d is None else d.detach() for d in (dlog_probs, dentropy))
        needs, others = [bool(needed) for needed in ctx.needs_input_grad[:3]], (None,) * 5

        if log_probs is not None and dlog_probs is not None:
            labels = tensors[3]
            dlog_probs = of_finite(dlog_probs, labels, log_probs, entropy)
        in_common = unscaled if ctx.unscaled and log_probs is not None else None

        def recomputed(dlog_probs: Tensor | None) -> list[Tensor]:
            found = entropy if log_probs is None else log_probs, entropy, stats
            gradients = dlog_probs, dentropy, *found, values, in_common, needs
            options = *tensors, *ctx.numbers, sizes, ctx.group, ids, offsets
            made: list[Tensor] = _OPS.head_backward(*gradients, *options)
            return made

        if not ctx.unscaled or in_common is not None:
            gradients = map(without_derivative, recomputed(dlog_probs))
            return (*(next(gradients) if needed else None for needed in needs), *others)
        *_, counted, _ = tensors
        factors = torch.zeros_like(entropy) if dlog_probs is None else dlog_probs
        factors = torch.where(counted, factors, 0.0).float().view(*unscaled.shape[:-1], 1)
        # A row without a gradient may hold anything.
        gradient = torch.where(factors != 0, unscaled * factors, 0.0)
        if dentropy is not None:  # compiled, it is 0 where it is unused, and no row is recomputed
            gradient = gradient + recomputed(None)[0]
        return without_derivative(gradient.to(unscaled.dtype)), None, None, *others


implement("cpu", "head_forward", _head_forward, ["CompositeExplicitAutograd"])
implement("cpu", "head_backward", _head_backward, ["CompositeExplicitAutograd"])


_OPS: Any = getattr(torch.ops, NATIVE)  # one operator of a head for all backends
