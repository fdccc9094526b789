"""The data of a call: made once from the arguments, taken by everything behind them.

Imports the config, the operators and ``distributed``. What a member means is said here and nowhere
else: all layers above take their per-token tensors from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Options
from .distributed import VocabShard
from .operators import FIELDS, ops_of

Statistics = Literal["all", "live"]

TEMPERATURES = 1 << FIELDS.index("temperatures")
_OUTSIDE = -1  # the position of a label that is not in its set


class Sequences(NamedTuple):
    """The sequences of flat tokens: rows of ``length``, or between ``cu_seqlens`` if given."""

    length: int
    cu_seqlens: Tensor | None

    def sequence_ids(self, N: int) -> Tensor:
        """The sequence of each of ``N`` tokens; behind the last offset the number of sequences."""
        if self.cu_seqlens is None:
            return torch.arange(N, device="cpu") // max(self.length, 1)
        positions = torch.arange(N, device=self.cu_seqlens.device)
        return torch.bucketize(positions, self.cu_seqlens[1:].long(), right=True)

    def with_any(self, tokens: Tensor) -> Tensor:
        """bool ``[N]``: the tokens of the sequences that have one of these, bool ``[N]`` too."""
        if self.cu_seqlens is None:
            rows = tokens.view(-1, max(self.length, 1))
            return rows.any(1, keepdim=True).expand(rows.shape).reshape(-1)
        index = self.sequence_ids(tokens.numel())
        counts = index.new_zeros(self.cu_seqlens.numel()).index_add_(0, index, tokens.long())
        return (counts > 0)[index]


class Products(NamedTuple):
    """How logits are made: the dtype of the products, that of the logits, the most rows at once.

    Also how many of them a row's gradient is expected to have, beside its labels; ``None``: all.
    """

    dtype: torch.dtype
    logits_dtype: torch.dtype
    chunk_tokens: int | None = None
    gradient_samples: int | None = None


class SamplingSets(NamedTuple):
    """The sampling mask of a call.

    Attributes:
        token_ids: int32 ``[K]``, ascending in each set.
        offsets: int64 ``[N + 1]``, of the sets.
        present: bool ``[N]``, whether a row has a set.
        positions: int64 ``[N]`` or ``[N, K]``, of the labels in their sets; of a row without one,
            the label as a column of this rank.
        span: int64 ``[2]``, the first column of this rank, and those of all; ``None``: all are
            here.
    """

    token_ids: Tensor
    offsets: Tensor
    present: Tensor
    positions: Tensor
    span: Tensor | None

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor, labels: Tensor, backend: str, shard: VocabShard | int
    ) -> SamplingSets:
        """Args: labels: flat; shard: of the vocabulary, or the number of its columns."""
        if isinstance(shard, VocabShard):
            positions, span, V = shard.labels(labels), shard.span(), 2**31 - 1
        else:
            positions, span, V = labels.clone(), None, shard
        ops_of(backend).find_labels(labels, ids, offsets, V, positions)
        return cls(ids, offsets, offsets[1:] != offsets[:-1], positions, span)

    def columns(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of operators that look for the ids among the columns of this rank."""
        return self.token_ids, self.offsets, self.span

    def labels_outside(self, unmasked: Tensor) -> Tensor:
        """The number of unmasked tokens whose label is not in their set, float32."""
        outside = unmasked & self.present & (self.positions == _OUTSIDE)
        return outside.sum(dtype=torch.float32)

    def empty_values(self) -> Tensor:
        """Memory for values, or for their gradients."""
        return self.token_ids.new_empty(self.token_ids.shape, dtype=torch.float32)

    def zero_values(self) -> Tensor:
        """Zeros to add to: wrong offsets leave values to no row, which nothing writes."""
        return self.empty_values().zero_()


@dataclass(eq=False)  # nobody changes it; frozen, it would take three times as long to make
class Call:
    """A checked call of a loss, or of log-probs alone.

    Tensors per token are flat, contiguous and detached, or ``None`` where not given. Masked entries
    may hold anything.

    Attributes:
        shape: of the labels, or of the log-probs where they are given.
        unmasked: bool ``[N]``.
        counted: bool ``[N]``, the tokens that are computed: all unmasked ones, or with
            ``statistics="live"`` those that can change the loss.
        fields: float32 ``[fields, N]``, of which ``present`` says which fields are given
            (:data:`bapo_kernels.core.operators.FIELDS`); ``None``: none is.
        labels: int64 ``[N]``, or ``[N, K]`` where each row has several; ``None`` where log-probs
            are given.
        weights: float64 ``[N]``, of the aggregation.
        adds_up: whether the losses of the calls of a batch add up to that of the batch.
        ticket: int32 ``[1]``, 0: the scratch memory of ``token_loss``.
        bounds: float32 ``[2]``, of all tokens; ``None``: tokens have their own, or the call
            searches.
        sequences: where the ratio is that of a sequence; ``None``: it is the token's.
        log_ratios: float64 ``[N]``, of the sequences, once the log-probs are known.
        shard: the columns of the vocabulary that this rank has; ``None``: all.
        sets: the sampling mask; ``None``: every row has the whole vocabulary.
    """

    options: Options
    backend: str
    shape: torch.Size
    unmasked: Tensor
    counted: Tensor
    fields: Tensor | None = None
    present: int = 0
    statistics: Statistics = "all"
    labels: Tensor | None = None
    weights: Tensor | None = None
    adds_up: bool = False
    ticket: Tensor | None = None
    bounds: Tensor | None = None
    sequences: Sequences | None = None
    log_ratios: Tensor | None = None
    process_group: dist.ProcessGroup | None = None
    shard: VocabShard | None = None
    sets: SamplingSets | None = None

    def has(self, name: str) -> bool:
        """Whether a field is given."""
        return bool(self.present >> FIELDS.index(name) & 1)

    def field(self, name: str) -> Tensor | None:
        """float32 ``[N]``, if it is given."""
        if self.fields is None or not self.has(name):
            return None
        return self.fields[FIELDS.index(name)]

    @property
    def given_sets(self) -> SamplingSets:
        """The sampling mask of a call that has one."""
        assert self.sets is not None
        return self.sets

    @property
    def searches(self) -> bool:
        """Whether no bounds are given."""
        return self.bounds is None and not self.has("lower")

    @property
    def temperatures(self) -> tuple[Tensor | None, int]:
        """Fields and presence for operators that read the temperatures alone."""
        present = self.present & TEMPERATURES
        return (self.fields if present else None), present

    @property
    def counted_logits(self) -> Tensor:
        """bool ``[N]``: the counted rows that have no set, so that all their logits matter."""
        return self.counted if self.sets is None else self.counted > self.sets.present

    def at(self, rows: Tensor) -> Call:
        """The call of some of its tokens, which have no set."""
        return replace(
            self,
            shape=rows.shape,
            unmasked=self.unmasked[rows],
            counted=self.counted[rows],
            labels=None if self.labels is None else self.labels[rows],
            fields=None if self.fields is None else self.fields.index_select(1, rows),
            weights=None if self.weights is None else self.weights[rows],
            sets=None,
        )

    def with_labels_of(self, rows: Tensor) -> Call:
        """Keeps labels and temperatures of some rows: a second pass takes no more per token."""
        assert self.labels is not None
        fields, present = self.temperatures
        fields = None if fields is None else fields.index_select(1, rows)
        return replace(self, labels=self.labels[rows], fields=fields, present=present, sets=None)

    @property
    def rows_decide(self) -> bool:
        """Whether the row pass can make gradients.

        Those of a shard need the sums of the other ranks, those of a sequence its other rows.
        """
        return self.shard is None and self.sequences is None

    @property
    def label_columns(self) -> Tensor:
        """int64, the labels as columns of this rank's logits; -1: another rank has it.

        Of a row with a set, its position in that.
        """
        assert self.labels is not None
        if self.sets is not None:
            return self.sets.positions
        return self.labels if self.shard is None else self.shard.labels(self.labels)


def bounds_tensor(bounds: tuple[float, float], like: Tensor) -> Tensor:
    """Bounds of all tokens, float32 ``[2]`` on the device of ``like``."""
    parts = [torch.full((), bound, dtype=torch.float32, device=like.device) for bound in bounds]
    return torch.stack(parts)
