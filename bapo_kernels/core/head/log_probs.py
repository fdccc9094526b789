"""Log-probs of hidden states: two operators for all backends, and autograd around them.

Imports the other files of the head, autograd, rows and the data of a call. A compiler cannot trace
the loop over chunks, which reads on the host how many rows are counted.
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
from ..call import Call, Products, SamplingSets, bounds_tensor
from ..distributed import VocabShard
from ..operators import FIELDS, NATIVE, implement
from ..rows import RowStatistics, finite_only
from ..tokens import Coefficients
from .head import Head, HeadGradients
from .hidden import Chunks, add_recomputed, chunk_statistics
from .sampled import Sample, add_sample, repeats, sampled_rows
from .sets import HeldSets, add_second_pass, add_set_statistics, multiplied


class HeadCall(NamedTuple):
    """A call as the operators of a head take it, in the order of their schemas."""

    labels: Tensor
    counted: Tensor
    fields: Tensor | None
    present: int
    options: Sequence[float]
    dtype: torch.dtype
    logits_dtype: torch.dtype
    chunk_tokens: int | None
    gradient_samples: int | None
    backend: str
    shard_sizes: Tensor | None = None
    group: str | None = None
    token_ids: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, call: Call, products: Products) -> HeadCall:
        assert call.labels is not None
        given = call.labels, call.counted, *call.temperatures, call.options, *products, call.backend
        shard = call.shard
        sharded = (None, None) if shard is None else (shard.sizes, shard.group.group_name)
        mask = (None, None) if call.sets is None else call.sets[:2]
        return cls(*given, *sharded, *mask)

    def restored(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Call, Head]:
        """The call and the head that these tensors and numbers stand for."""
        columns = weight.shape[0]
        shard, sets = VocabShard.named(columns, self.shard_sizes, self.group), None
        if self.token_ids is not None and self.offsets is not None:
            where = self.labels, self.backend, shard or columns
            sets = SamplingSets.of(self.token_ids, self.offsets, *where)
        given = self.counted.shape, self.counted, self.counted, self.fields, self.present
        options, labels = Options(*self.options), self.labels
        call = Call(options, self.backend, *given, labels=labels, shard=shard, sets=sets)
        products = Products(self.dtype, self.logits_dtype, self.chunk_tokens, self.gradient_samples)
        return call, Head.of(hidden, weight, bias, products, shard)


def _head_forward(
    unscaled: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Statistics of the counted rows, a chunk at a time; ``others`` as :class:`HeadCall` has them.

    With ``unscaled`` also the gradient of each log-prob with respect to its hidden state, or of
    several labels per row what they have in common, ``sum_j p_j*dx_j/dz_j*W_j`` over the columns
    that are none of them. That is of this rank's columns, and of rows without a set. With
    ``gradient_samples`` also the samples of the rows.
    """
    given = HeadCall(*others)
    call, head = given.restored(hidden, weight, bias)
    no_values = hidden.new_empty(0, dtype=torch.float32)
    if given.gradient_samples is not None:
        found, sample = sampled_rows(call, head)
        values = no_values if call.sets is None else add_set_statistics(call, head, found)
        return *found, hidden.new_empty(0), values, list(sample)
    if unscaled and given.labels.ndim == 1:
        return *_log_prob_gradients(call, head, hidden), no_values, []
    chunks, memory = head.chunks(call.counted_logits.nonzero().squeeze(1))
    in_common = HeadGradients(head, (unscaled, False, False), True)
    found = chunk_statistics(call, head, chunks, memory, in_common if unscaled else None)
    values = no_values if call.sets is None else add_set_statistics(call, head, found)
    gradient = hidden.new_empty(0)
    if in_common.hidden is not None:
        gradient = in_common.hidden.to(hidden.dtype).view(hidden.shape)
    return *found, gradient, values, []


def _log_prob_gradients(
    call: Call, head: Head, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows, and the gradient of each log-prob, in one pass over the logits.

    They are those of a loss which is the sum of the log-probs: its KL term of the kind k1, towards
    log-probs of 0, while advantages of 0 leave no policy term.
    """
    assert call.labels is not None
    options = call.options._replace(kl_loss_coef=1.0, kl_loss_type=float(KL_LOSS_TYPES["k1"]))
    ones = torch.ones_like(call.labels, dtype=torch.float64)
    fields = torch.zeros(len(FIELDS), ones.numel(), device=ones.device)
    if (temperatures := call.field("temperatures")) is not None:
        fields[FIELDS.index("temperatures")] = temperatures
    zeros = 1 << FIELDS.index("advantages") | 1 << FIELDS.index("ref_log_probs")
    call = replace(
        call,
        options=options,
        fields=fields,
        present=call.present | zeros,
        weights=ones,
        bounds=bounds_tensor((1.0, 1.0), ones),
    )
    rows, memory = head.chunks(call.counted_logits.nonzero().squeeze(1))
    chunks = Chunks(call, head, HeadGradients(head, (True, False, False), True), memory)
    for chunk in rows:
        chunks.add(chunks.forward(chunk), Coefficients(ones[chunk], None))
    if call.sets is not None:
        coefficients = Coefficients(ones, None).without(~call.counted)
        HeldSets(call, head, chunks.gradients, chunks.found).add(coefficients)
    gradient, *_ = chunks.gradients.like(hidden, None, None)
    assert gradient is not None
    return *chunks.found, gradient


def _head_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    statistics: Sequence[Tensor],
    values: Tensor,
    sample: Sequence[Tensor],
    unscaled: Tensor | None,
    needs: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> list[Tensor]:
    """Makes the logits of the rows again whose incoming gradients are not zero.

    With ``unscaled`` (of several labels per row) those of the entropy alone; with a sample none.
    """
    given = HeadCall(*others)
    call, head = given.restored(hidden, weight, bias)
    found = RowStatistics(*statistics)
    if dlog_probs is None:
        dlog_probs = torch.zeros_like(given.labels, dtype=torch.float64)
    coefficients = recomputed = Coefficients(dlog_probs, dentropy)
    if unscaled is not None:
        recomputed = Coefficients(torch.zeros_like(dlog_probs), dentropy)
    counted = coefficients.without(~given.counted)
    if sample:
        gradients = HeadGradients(head, tuple(needs), False)
        add_sample(gradients, call, Sample(*sample), found, counted)
    else:
        rows = (call.counted_logits & recomputed.has_gradient()).nonzero().squeeze(1)
        chunks, memory = head.chunks(rows, sums_weight=needs[1])
        one_chunk = len(chunks) == 1 and call.sets is None
        gradients = HeadGradients(head, tuple(needs), one_chunk)
        for chunk in chunks:
            add_recomputed(call, gradients, chunk, memory, found, recomputed)
    if unscaled is not None and gradients.hidden is not None:
        dlog_probs = coefficients.without(~call.counted_logits).dlog_probs
        sums = dlog_probs.sum(1, keepdim=True)
        in_common = torch.where(sums != 0, -sums * unscaled.view(len(sums), weight.shape[1]), 0.0)
        at_labels = _hidden_gradient_of_labels(call, found, dlog_probs, head.weight)
        gradients.hidden += (in_common + at_labels).to(gradients.hidden.dtype)
    if call.sets is not None:
        if values.numel() != call.sets.token_ids.numel():  # not kept
            values = multiplied(call, head.set_operands)
        add_second_pass(gradients, call, values, found, counted)
    return [gradient for gradient in gradients.like(hidden, weight, bias) if gradient is not None]


def _hidden_gradient_of_labels(
    call: Call, found: RowStatistics, dlog_probs: Tensor, weight: Tensor
) -> Tensor:
    """``sum_i (G_i - p_i*sum_k g_k) * dx_i/dz_i * W_i`` over the columns that are labels of a row.

    ``G_i`` adds the ``g_k`` of the labels that are ``i``. What is never made is ``[N, K, H]``.
    """
    assert call.labels is not None
    columns, log_probs, options = call.label_columns, found.log_probs, call.options
    is_here = (columns >= 0) & (columns < weight.shape[0]) & log_probs.isfinite()
    is_here &= call.counted_logits[:, None]
    p = torch.where(repeats(call.labels), 0.0, log_probs.exp())
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


_SAVED = ("labels", "counted", "fields", "shard_sizes", "token_ids", "offsets")


class LinearLogProbs(torch.autograd.Function):
    """:class:`LogProbs` of hidden states; backward makes the logits of some rows again.

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
        products: Products,
    ) -> tuple[Tensor, Tensor]:
        given = HeadCall.of(call, products)
        parameters = hidden, weight, bias
        found = _OPS.head_forward(unscaled, *parameters, *given)
        log_probs, entropy, stats, gradient, values, sample = found
        tensors = *parameters, *(getattr(given, name) for name in _SAVED)
        # Autograd refuses tensors that were made in inference mode and have no versions.
        traced = torch.compiler.is_compiling()
        kept = [x is not None and not traced and x.is_inference() for x in tensors]
        ctx.inference = [x if keeps else None for x, keeps in zip(tensors, kept, strict=True)]
        saved = (None if keeps else x for x, keeps in zip(tensors, kept, strict=True))
        several = log_probs if given.labels.ndim == 2 else None
        ctx.save_for_backward(*saved, several, entropy, stats, values, gradient, *sample)
        ctx.given, ctx.unscaled = given._asdict() | dict.fromkeys(_SAVED), unscaled
        ctx.set_materialize_grads(False)
        return log_probs, entropy, *sample[1:2]  # ids, where a compiler sees how many there are

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once, as checkpoints of activations demand
        tensors = [x if y is None else y for x, y in zip(saved, ctx.inference, strict=False)]
        log_probs, entropy, stats, values, unscaled, *sample = saved[len(tensors) :]
        given = HeadCall(**ctx.given | dict(zip(_SAVED, tensors[3:], strict=True)))
        inputs = dlog_probs, dentropy, *tensors[:3]
        dlog_probs, dentropy = (None if d is None else d.detach() for d in (dlog_probs, dentropy))
        needs, no_others = [bool(needed) for needed in ctx.needs_input_grad[:3]], (None,) * 3

        if log_probs is not None and dlog_probs is not None:
            dlog_probs = finite_only(dlog_probs, given.labels, log_probs, entropy)
        in_common = unscaled if ctx.unscaled and log_probs is not None else None

        def recomputed(dlog_probs: Tensor | None) -> list[Tensor]:
            found = [entropy if log_probs is None else log_probs, entropy, stats]
            incoming = dlog_probs, dentropy, found, values, sample, in_common, needs
            made: list[Tensor] = _OPS.head_backward(*incoming, *tensors[:3], *given)
            return made

        if not ctx.unscaled or in_common is not None:
            gradients = (without_derivative(each, *inputs) for each in recomputed(dlog_probs))
            return (*(next(gradients) if needed else None for needed in needs), *no_others)
        factors = torch.zeros_like(entropy) if dlog_probs is None else dlog_probs
        factors = torch.where(given.counted, factors, 0.0).float().view(*unscaled.shape[:-1], 1)
        # A row without a gradient may hold anything.
        gradient = torch.where(factors != 0, unscaled * factors, 0.0)
        if dentropy is not None:  # compiled, it is 0 where it is unused, and no row is recomputed
            gradient = gradient + recomputed(None)[0]
        return without_derivative(gradient.to(unscaled.dtype), *inputs), None, None, *no_others


implement("cpu", "head_forward", _head_forward, ["CompositeExplicitAutograd"])
implement("cpu", "head_backward", _head_backward, ["CompositeExplicitAutograd"])
_OPS: Any = getattr(torch.ops, NATIVE)  # one operator of a head for all backends
