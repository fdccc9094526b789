"""From hidden states: only rows that matter meet the lm_head, a chunk of logits at a time.

Gradients are made in forward; of float16, and under ``torch.compile``, in backward, by
``LinearLogProbs``. Three sets of rows are kept apart: those that are computed (masked ones never
are), those of them whose gradient is not surely zero (the others need no gradient GEMM), and those
that wait for the clip bounds (in memory those of the last chunk, the others are replayed once the
bounds are known). What is kept until backward are the gradients of the hidden states, in their
dtype, and of the weight, in float32 while it is added up and in the weight's dtype then; logits
never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ._autograd import final
from ._ops import NATIVE, ops_of, register
from .config import BAPOConfig, Transform, transform_of
from .distributed import VocabShard
from .fused import (
    RowResults,
    int64_labels,
    loss_of_log_probs,
    policy,
    row_pass,
    row_statistics,
    shaped,
)
from .inputs import TokenInputs, bounds_tensor
from .output import BAPOOutput

CHUNK_BYTES = 2**30
Coefficients = tuple[Tensor, Tensor | None]  # of rows: d loss / d log-prob, d loss / d entropy
_TERMS = 4096  # of a float32 sum over the vocabulary
_COLUMNS = 1024  # of the weight gradient at once, where a GEMM cannot add to float32 by itself


@dataclass(frozen=True)
class Head:
    """``hidden [N, H]``, ``weight [V, H]``, ``bias [V]`` in the dtype of the GEMMs.

    With a shard, ``weight`` and ``bias`` are those of its part of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None

    def logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of some rows, and their logits as ``[1, rows, V]``."""
        h = self.hidden[rows]
        with _as_they_are(h):
            return h, F.linear(h, self.weight, self.bias)[None]

    def chunk_tokens(self, asked: int | None) -> int:
        """Rows of a chunk: as asked, or 1 GiB of logits; the same on every rank of a shard."""
        columns = self.weight.shape[0] if self.shard is None else self.shard.widest()
        fitting = CHUNK_BYTES // (columns * self.weight.element_size())
        return int(asked) if asked else max(1, fitting)


def head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    shard: VocabShard | None = None,
) -> Head:
    """Detached, rows flat, in the dtype of the GEMMs."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    bias = None if bias is None else bias.detach().to(dtype)
    return Head(rows.to(dtype), weight.detach().to(dtype), bias, shard)


class HeadGradients:
    """Gradients of a head, added up chunk by chunk; those that nobody needs are not made.

    Args:
        needs: whether the hidden states, the weight and the bias need a gradient.
        one_chunk: the weight's gradient is one product, which may be rounded to its dtype at once.
    """

    def __init__(self, head: Head, needs: tuple[bool, ...], one_chunk: bool) -> None:
        self.head, self.one_chunk = head, one_chunk
        # Parts of a sum over ranks are float32.
        dtype = None if head.shard is None else torch.float32
        self.hidden = torch.zeros_like(head.hidden, dtype=dtype) if needs[0] else None
        self.weight: Tensor | None = None
        self.needs_weight = needs[1]
        V = head.weight.shape[0]
        self.bias = torch.zeros(V, device=head.weight.device) if needs[2] else None

    def add(self, rows: Tensor, h: Tensor, dlogits: Tensor) -> None:
        """``dlogits [n, V]`` of rows that have had none so far."""
        if rows.numel() == 0:
            return
        with _as_they_are(h):
            if self.hidden is not None:
                self.hidden[rows] = _dhidden(dlogits, self.head.weight, self.hidden.dtype)
            if self.needs_weight:
                self._add_weight(h, dlogits)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=torch.float32)

    def _add_weight(self, h: Tensor, dlogits: Tensor) -> None:
        if self.weight is None and (self.one_chunk or h.dtype == torch.float32):
            self.weight = dlogits.T @ h
            return
        if self.weight is None:
            self.weight = torch.zeros_like(self.head.weight, dtype=torch.float32)
        self.weight = self.weight.float()
        if h.dtype == torch.float32:
            self.weight.addmm_(dlogits.T, h)
            return
        for first in range(0, dlogits.shape[1], _COLUMNS):
            at = slice(first, first + _COLUMNS)
            self.weight[at] += _float32_product(dlogits[:, at].T, h)

    def of(self, *parameters: Tensor | None) -> list[Tensor | None]:
        """In the dtypes of hidden states, weight and bias; zeros where no row had a gradient.

        With a shard the hidden states' is summed over the ranks, by one all-reduce.
        """
        if self.head.shard is not None and self.hidden is not None:
            dist.all_reduce(self.hidden, group=self.head.shard.group)
        if self.needs_weight and self.weight is None:
            self.weight = torch.zeros_like(self.head.weight)
        made = (self.hidden, self.weight, self.bias)
        return [
            None if gradient is None or parameter is None else gradient.to(parameter.dtype)
            for gradient, parameter in zip(made, parameters, strict=True)
        ]


def _as_they_are(operand: Tensor) -> torch.autocast:
    """GEMMs in the dtype of their operands: autocast would round those that are float32."""
    return torch.autocast(operand.device.type, enabled=False)


def _dhidden(dlogits: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``dlogits @ weight``; float32 on a CPU as a sum of parts.

    The libraries there add the terms of a few rows one after the other, all of the vocabulary.
    """
    if dtype != torch.float32:
        return dlogits @ weight
    if dlogits.is_cuda:
        return _float32_product(dlogits, weight)
    total = dlogits.new_zeros(dlogits.shape[0], weight.shape[1], dtype=dtype)
    for a, b in zip(dlogits.split(_TERMS, 1), weight.split(_TERMS), strict=True):
        total += a.float() @ b.float()
    return total


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def loss_of_hidden(
    head: Head,
    labels: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    backend: str,
    given: Tensor | None,
    counted: Tensor,
    needs: tuple[bool, ...],
    chunk_tokens: int | None,
    process_group: dist.ProcessGroup | None,
) -> tuple[BAPOOutput, HeadGradients | None]:
    """Forward GEMM, row pass and gradient GEMMs of every chunk, search, loss, replay.

    The last chunk stays until the bounds are known, so that none of its rows is replayed.
    """
    chunk_tokens = head.chunk_tokens(chunk_tokens)
    *earlier, last = counted.nonzero().squeeze(1).split(chunk_tokens)
    gradients = HeadGradients(head, needs, one_chunk=not earlier) if any(needs) else None
    results = RowResults.zeros(labels.numel(), labels.device, any(needs))
    flat_labels = int64_labels(labels)
    chunks = _Chunks(head, flat_labels, tokens, config, backend, given, results, gradients)
    for chunk in earlier:
        h, logits = chunks.look(chunk)
        if gradients is not None:
            chunks.add_decided(chunk, h, logits)
        del h, logits
    held = chunks.look(last)
    output, dlog_probs, dentropy = loss_of_log_probs(
        results.log_probs, results.entropy, counted, tokens, config, backend, given, process_group
    )
    if gradients is not None:
        chunks.add_held(last, *held, (dlog_probs, dentropy))
        del held  # before others take its place
        for chunk in chunks.waiting(earlier, (dlog_probs, dentropy)).split(chunk_tokens):
            chunks.replay(chunk, (dlog_probs, dentropy))
    return shaped(output, labels.shape, tokens.live, counted), gradients


@dataclass(frozen=True)
class _Chunks:
    """What is done with the rows of a chunk; the arguments are the same for all of them.

    ``gradients`` is None where nobody needs any.
    """

    head: Head
    labels: Tensor
    tokens: TokenInputs
    config: BAPOConfig
    backend: str
    given: Tensor | None
    results: RowResults
    gradients: HeadGradients | None

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and logits that have become gradients where a row is decided.

        Those of a shard stay: their gradients need the sums of the other ranks.
        """
        backend, config, live = self.backend, self.config, self.tokens.live
        if self.gradients is None or self.head.shard is not None:
            transform = transform_of(config)
            h, logits, found = _statistics(self.head, rows, self.labels, live, transform, backend)
        else:
            h, logits = self.head.logits(rows)
            found = RowResults.empty(rows.numel(), rows.device, True)
            part, labels = self.tokens.at(rows), self.labels[rows]
            row_pass(
                backend, logits, labels, part.live, part, config, self.given, found, None, True
            )
        _put(self.results, rows, found)
        return h, logits

    def add_decided(self, rows: Tensor, h: Tensor, logits: Tensor) -> None:
        """Adds the rows that no admissible bounds could change; the others are replayed later."""
        assert self.gradients is not None
        assert self.results.undecided is not None
        ends = _ends_of_the_search(self.config, self.given, rows)
        coefficients = self._coefficients(rows, ends[0])
        if self.head.shard is not None:
            last = self._coefficients(rows, ends[1])
            waits = (coefficients[0] != last[0]) & ~coefficients[0].isnan()
            self.results.undecided[rows] = waits.to(torch.uint8)
        decided = self.results.undecided[rows] == 0
        index = (decided & _has_gradient(*coefficients)).nonzero().squeeze(1)
        kept, dlogits = rows[index], _move_to_front(logits[0], index)
        if self.head.shard is not None:
            self._to_gradient(dlogits[None], kept, _at(index, *coefficients), None)
        self.gradients.add(kept, h[index], dlogits)

    def add_held(self, rows: Tensor, h: Tensor, logits: Tensor, of_all: Coefficients) -> None:
        """Adds all rows of a chunk that was kept until the bounds were known."""
        assert self.gradients is not None
        assert self.results.undecided is not None
        index = _has_gradient(*_at(rows, *of_all)).nonzero().squeeze(1)
        kept, dlogits = rows[index], _move_to_front(logits[0], index)
        only = self.results.undecided[kept] if self.head.shard is None else None
        self._to_gradient(dlogits[None], kept, _at(kept, *of_all), only)
        self.gradients.add(kept, h[index], dlogits)

    def waiting(self, chunks: Sequence[Tensor], of_all: Coefficients) -> Tensor:
        """The rows of these chunks that were not added and have a gradient."""
        rows = torch.cat([self.labels.new_empty(0), *chunks])
        assert self.results.undecided is not None
        waits = self.results.undecided[rows] != 0
        return rows[waits & _has_gradient(*_at(rows, *of_all))]

    def replay(self, rows: Tensor, of_all: Coefficients) -> None:
        """Makes the logits of waiting rows again and adds their gradients."""
        assert self.gradients is not None
        if rows.numel() == 0:
            return
        h, logits = self.head.logits(rows)
        self._to_gradient(logits, rows, _at(rows, *of_all), None)
        self.gradients.add(rows, h, logits[0])

    def _coefficients(self, rows: Tensor, bounds: Tensor) -> Coefficients:
        part, of_rows = self.tokens.at(rows), (self.results.log_probs, self.results.entropy)
        log_probs, entropy = (values[rows] for values in of_rows)
        arguments = part.live, part, self.config, bounds, None
        return policy(self.backend, log_probs, entropy, *arguments)[1:]

    def _to_gradient(
        self, logits: Tensor, rows: Tensor, coefficients: Coefficients, only: Tensor | None
    ) -> None:
        _, entropy, stats, _ = self.results
        of_rows = self.labels[rows], entropy[rows], stats[rows], coefficients
        shard, transform = self.head.shard, transform_of(self.config)
        _to_gradient(logits, *of_rows, only, shard, transform, self.backend)


def _ends_of_the_search(
    config: BAPOConfig, given: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """First and last bounds; a decided row has the same gradient at both."""
    if given is not None:
        return given, given
    first = (config.ratio_lower_start, config.ratio_upper_start)
    last = (config.ratio_lower_max, config.ratio_upper_max)
    return bounds_tensor(first, like), bounds_tensor(last, like)


def _statistics(
    head: Head,
    chunk: Tensor,
    labels: Tensor,
    live: Tensor,
    transform: Transform,
    backend: str,
) -> tuple[Tensor, Tensor, RowResults]:
    """Hidden states, logits and statistics of a chunk."""
    h, logits = head.logits(chunk)
    of_chunk = row_statistics(backend, logits, labels[chunk], live[chunk], transform, head.shard)
    return h, logits, of_chunk


def _put(results: RowResults, chunk: Tensor, of_chunk: RowResults) -> None:
    for whole, values in zip(results, of_chunk, strict=True):
        if whole is not None and values is not None:
            whole[chunk] = values


def _at(rows: Tensor, dlog_probs: Tensor, dentropy: Tensor | None) -> Coefficients:
    return dlog_probs[rows], None if dentropy is None else dentropy[rows]


def _has_gradient(dlog_probs: Tensor, dentropy: Tensor | None) -> Tensor:
    some = dlog_probs != 0
    return some if dentropy is None else some | (dentropy != 0)


def _move_to_front(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` for ascending ``index``, in the memory of ``rows``.

    A row only moves forward, to where no later one is read; a 32nd of the rows is copied at once.
    """
    count, size = index.numel(), max(1, rows.shape[0] // 32)
    if count < rows.shape[0]:
        for first in range(0, count, size):
            piece = index[first : first + size]
            rows[first : first + piece.numel()] = rows[piece]
    return rows[:count]


def _to_gradient(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    stats: Tensor,
    coefficients: Coefficients,
    only: Tensor | None,
    shard: VocabShard | None,
    transform: Transform,
    backend: str,
) -> None:
    """Turns the logits of rows whose statistics are known into d loss / d logits; all or some."""
    labels = labels if shard is None else shard.labels(labels)
    ops_of(backend).row_gradient_(logits, labels, stats, entropy, *coefficients, only, *transform)


class _HeadOptions(NamedTuple):
    """What the operators of a head take behind their tensors, in the order of the schemas."""

    dtype: torch.dtype
    temperature: float
    logit_scale: float
    softcap: float | None
    backend: str
    chunk_tokens: int | None
    shard_sizes: Tensor | None
    group: str | None

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
        shard = VocabShard.named(weight.shape[0], self.shard_sizes, self.group)
        return head(hidden, weight, bias, self.dtype, shard)

    @property
    def transform(self) -> Transform:
        return self.temperature, self.logit_scale, self.softcap


def _head_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, live: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the live rows, a chunk at a time; ``others`` are :class:`_HeadOptions`."""
    options = _HeadOptions(*others)
    of_head, made_by = options.head(hidden, weight, bias), (options.transform, options.backend)
    results = RowResults.zeros(labels.numel(), labels.device, False)
    for chunk in live.nonzero().squeeze(1).split(of_head.chunk_tokens(options.chunk_tokens)):
        _put(results, chunk, _statistics(of_head, chunk, labels, live, *made_by)[2])
    return results.log_probs, results.entropy, results.stats


def _head_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    needs: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    live: Tensor,
    *others: Any,
) -> list[Tensor]:
    """Makes the logits of the rows again whose incoming gradients are not zero."""
    options = _HeadOptions(*others)
    of_head = options.head(hidden, weight, bias)
    made_by = of_head.shard, options.transform, options.backend
    coefficients = torch.zeros_like(entropy) if dlog_probs is None else dlog_probs, dentropy
    rows = (live & _has_gradient(*coefficients)).nonzero().squeeze(1)
    chunks = rows.split(of_head.chunk_tokens(options.chunk_tokens))
    gradients = HeadGradients(of_head, tuple(needs), len(chunks) == 1)
    for chunk in chunks:
        h, logits = of_head.logits(chunk)
        of_rows = entropy[chunk], stats[chunk], _at(chunk, *coefficients)
        _to_gradient(logits, labels[chunk], *of_rows, None, *made_by)
        gradients.add(chunk, h, logits[0])
    parameters = hidden, weight, bias
    made = zip(gradients.of(*parameters), parameters, strict=True)
    return [g.reshape(p.shape) for g, p in made if g is not None and p is not None]


_OPS: Any = getattr(torch.ops, NATIVE)  # one operator for all backends
register(NATIVE, "head_forward", _head_forward, ["CompositeExplicitAutograd"])
register(NATIVE, "head_backward", _head_backward, ["CompositeExplicitAutograd"])


class LinearLogProbs(torch.autograd.Function):
    """As ``LogProbs``, of hidden states; backward makes the logits of some rows again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        live: Tensor,
        transform: Transform,
        dtype: torch.dtype,
        backend: str,
        chunk_tokens: int | None,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        sizes, group = (None, None) if shard is None else (shard.sizes, shard.group.group_name)
        tensors = hidden, weight, bias, labels, live
        options = dtype, *transform, backend, chunk_tokens
        log_probs, entropy, stats = _OPS.head_forward(*tensors, *options, sizes, group)
        ctx.save_for_backward(*tensors, entropy, stats, sizes)
        ctx.options, ctx.group = options, group
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, entropy, stats, sizes = ctx.saved_tensors
        needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        incoming = [None if d is None else d.detach() for d in (dlog_probs, dentropy)]
        made = _OPS.head_backward(
            *incoming, entropy, stats, needs, *tensors, *ctx.options, sizes, ctx.group
        )
        gradients = iter(made)
        of_parameters = [final(next(gradients)) if needed else None for needed in needs]
        return (*of_parameters, *(None for _ in range(7)))
