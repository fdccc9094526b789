"""Gradients of a head from a sample of each row's vocabulary: one product with the head per row.

Imports the head, its sets, rows, and the reference's seeds. The rule is that of
``reference/sampled.py``; a row's sample is kept until its coefficients are known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...output import BAPOOutput
from ...reference.sampled import row_seeds
from ..call import Call, SamplingSets
from ..operators import ops_of
from ..rows import RowStatistics, statistics_at
from ..tokens import Coefficients, loss_of_log_probs
from .head import Head, HeadGradients
from .sets import add_second_pass, add_set_statistics

_SPARE_PLACES = 512  # a row has 2*gradient_samples + 512, and needs more with p < 1e-280 (Chernoff)


class Sample(NamedTuple):
    """The entries of the gradients of rows, as sets; rows that are not counted have none.

    Attributes:
        values: float32 ``[K]``, logits.
        token_ids, offsets: as in :class:`SamplingSets`.
        drawn: float64 ``[N, 4]``, what the smaller ones of a row stand for, as ``row_gradient``
            takes it.
    """

    values: Tensor
    token_ids: Tensor
    offsets: Tensor
    drawn: Tensor


def loss_of_sample(
    call: Call, head: Head, needs: tuple[bool, ...]
) -> tuple[BAPOOutput, HeadGradients]:
    """The loss of a call, and the gradients of its head from the samples of its rows.

    Rows with a sampling mask, which are sparse already, stay exact.
    """
    found, sample = sampled_rows(call, head)
    values = None if call.sets is None else add_set_statistics(call, head, found)
    output, coefficients = loss_of_log_probs(call, found.log_probs, found.entropy)
    gradients = HeadGradients(head, needs, False)
    add_sample(gradients, call, sample, found, coefficients)
    if values is not None:
        add_second_pass(gradients, call, values, found, coefficients)
    t, _, _, T = (sample.drawn / found.stats[:, 1:]).unbind(1)
    noise = torch.where(t > 0, coefficients.dlog_probs.square() * t * T, 0.0).sum()
    measured = dict(gradient_entries=sample.offsets[-1], gradient_noise=noise)
    output.metrics.update({name: value.float() for name, value in measured.items()})
    return output, gradients


def sampled_rows(call: Call, head: Head) -> tuple[RowStatistics, Sample]:
    """Makes the logits of all counted rows without a sampling mask: their statistics and samples.

    Of rows that are sharded each rank draws among its columns; ``t`` and the seeds come from the
    whole rows.
    """
    rows = call.counted_logits.nonzero().squeeze(1)
    chunks, memory = head.chunks(rows)
    found, parts = RowStatistics.zeros(call), []
    counts = torch.zeros_like(call.counted, dtype=torch.int32)
    drawn = found.entropy.new_zeros(counts.numel(), 4)
    for chunk in chunks:
        _, logits = head.logits(chunk, memory)
        found.put(chunk, statistics_at(call, chunk, logits))
        counts[chunk], drawn[chunk], *entries = _draw(call, head, chunk, logits, found.at(chunk))
        parts.append(entries)
    values, ids = (torch.cat(entries) for entries in zip(*parts, strict=True))
    return found, Sample(values, ids, F.pad(counts.cumsum(0), (1, 0)), drawn)


def _draw(
    call: Call, head: Head, rows: Tensor, logits: Tensor, found: RowStatistics
) -> tuple[Tensor, ...]:
    """Counts, what was drawn, values and ids of the entries of some rows."""
    samples = head.products.gradient_samples
    assert samples is not None
    call = call.with_labels_of(rows)
    assert call.labels is not None
    n, V = logits.shape
    labels, columns, log_probs = (
        x if x.ndim == 2 else x[:, None] for x in (call.labels, call.label_columns, found.log_probs)
    )
    seeds = row_seeds(torch.stack([log_probs[:, 0], found.entropy], 1), labels)
    beside = -torch.expm1(log_probs[:, 0].nan_to_num(-torch.inf))  # NaN: the label is no column
    if labels.shape[1] > 1:
        p = torch.where(repeats(labels) | (labels < 0), 0.0, log_probs.exp())
        beside = 1.0 - p.nan_to_num(0.0).sum(1)
    places = min(V, 2 * samples + _SPARE_PLACES) + labels.shape[1]
    counts, ids = (seeds.new_empty(shape) for shape in ((n,), (n, places)))
    values = torch.empty_like(ids, dtype=torch.float32)
    drawn = beside.new_empty(n, 4)
    span = None if call.shard is None else call.shard.span()
    given = logits[None], columns.sort(1)[0], found.stats, beside, seeds, span, samples
    made = counts, ids, values, drawn
    ops_of(call.backend).sample_rows(*given, *call.temperatures, call.options, *made)
    widest = int(counts.max()) if n else 0
    is_entry = torch.arange(widest, device=counts.device) < counts[:, None]
    entries = is_entry.nonzero(as_tuple=True)
    return counts, drawn, values[entries], ids[entries]


def add_sample(
    gradients: HeadGradients,
    call: Call,
    sample: Sample,
    found: RowStatistics,
    coefficients: Coefficients,
) -> None:
    """Adds the gradients of the rows that have been sampled."""
    assert call.labels is not None
    where = call.labels, call.backend, call.shard or gradients.head.weight.shape[0]
    sets = SamplingSets.of(sample.token_ids, sample.offsets, *where)
    others = sample.drawn, call.sets is None
    call = replace(call, sets=sets)
    add_second_pass(gradients, call, sample.values, found, coefficients, *others)


def repeats(labels: Tensor) -> Tensor:
    """bool ``[N, K]``: whether a label stands further ahead in its row, too."""
    ascending, order = labels.sort(stable=True, dim=1)
    repeats = F.pad(ascending[:, 1:] == ascending[:, :-1], (1, 0))
    return torch.empty_like(repeats).scatter_(1, order, repeats)
