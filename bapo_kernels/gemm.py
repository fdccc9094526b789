"""The products of a head with hidden states, and the dtypes in which they are summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .distributed import VocabShard

CHUNK_BYTES = 2**30
_SUM_TERMS = 4096  # of a float32 sum over the vocabulary
_WEIGHT_ROWS = 1024  # of a weight gradient at once, where a GEMM cannot add to float32 itself


@dataclass(frozen=True)
class Head:
    """``hidden [N, H]``, ``weight [V, H]``, ``bias [V]`` in the dtype of the GEMMs.

    With a shard, ``weight`` and ``bias`` are those of its part of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        shard: VocabShard | None = None,
    ) -> Head:
        """Detached, rows flat, in the dtype of the GEMMs."""
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        bias = None if bias is None else bias.detach().to(dtype)
        return cls(rows.to(dtype), weight.detach().to(dtype), bias, shard)

    def logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[n, H]`` and logits ``[n, V]`` of some rows."""
        h = self.hidden[rows]
        with _without_autocast(h):
            return h, F.linear(h, self.weight, self.bias)

    def rows_per_chunk(self, asked: int | None) -> int:
        """Rows of a chunk: as asked, or 1 GiB of logits; the same on every rank of a shard."""
        columns = self.weight.shape[0] if self.shard is None else self.shard.widest()
        fitting = CHUNK_BYTES // (columns * self.weight.element_size())
        return int(asked) if asked else max(1, fitting)


def _zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, as an operator that scales a gradient in place asks for."""
    return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


class HeadGradients:
    """Gradients of a head, added up chunk by chunk; only those that are needed are made.

    Args:
        needs: whether the hidden states, the weight and the bias need a gradient.
        one_chunk: the weight's gradient is one product, which may be rounded to its dtype at once.
    """

    def __init__(self, head: Head, needs: tuple[bool, ...], one_chunk: bool) -> None:
        self.head, self.one_chunk = head, one_chunk
        # Parts of a sum over ranks are float32.
        dtype = None if head.shard is None else torch.float32
        self.hidden = _zeros_like(head.hidden, dtype) if needs[0] else None
        self.weight: Tensor | None = None
        self.needs_weight = needs[1]
        V = head.weight.shape[0]
        self.bias = torch.zeros(V, device=head.weight.device) if needs[2] else None

    def add(self, rows: Tensor, h: Tensor, dlogits: Tensor) -> None:
        """``dlogits [n, V]`` of rows that have had none so far."""
        if rows.numel() == 0:
            return
        with _without_autocast(h):
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
            self.weight = _zeros_like(self.head.weight, torch.float32)
        if h.dtype == torch.float32:
            self.weight.addmm_(dlogits.T, h)
            return
        for first in range(0, dlogits.shape[1], _WEIGHT_ROWS):
            at = slice(first, first + _WEIGHT_ROWS)
            self.weight[at] += _float32_product(dlogits[:, at].T, h)

    def of(self, *parameters: Tensor | None) -> list[Tensor | None]:
        """In the shapes and dtypes of hidden states, weight and bias; zeros without any row.

        With a shard the hidden states' is summed over the ranks, by one all-reduce.
        """
        if self.head.shard is not None and self.hidden is not None:
            dist.all_reduce(self.hidden, group=self.head.shard.group)
        if self.needs_weight and self.weight is None:
            self.weight = _zeros_like(self.head.weight)
        made = (self.hidden, self.weight, self.bias)
        return [
            None
            if gradient is None or parameter is None
            else gradient.to(parameter.dtype).reshape(parameter.shape)
            for gradient, parameter in zip(made, parameters, strict=True)
        ]


def _without_autocast(operand: Tensor) -> torch.autocast:
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
    for a, b in zip(dlogits.split(_SUM_TERMS, 1), weight.split(_SUM_TERMS), strict=True):
        total += a.float() @ b.float()
    return total


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
