"""A head: its logits, a chunk of rows at a time, and the sums of its gradients.

Imports the matrix products, memory and ``distributed``. The memory of a loss of hidden states, and
the dtype in which the gradient of the weight is summed, are decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import Products
from ..distributed import VocabShard
from ..memory import CHUNKS, SUMS, WEIGHTS
from . import gemm

CHUNK_BYTES = 2**30
SUM_BYTES = 4  # of an element of the weight's gradient, while several chunks are added up
_GAP_BYTES = 64  # at least so many zeros are behind a row; rows begin at multiples of them


@dataclass(frozen=True)
class Head:
    """``hidden [N, H]``, ``weight [V, H]``, ``bias [V]`` in the dtype of the products.

    With a shard, ``weight`` and ``bias`` are those of its part of the vocabulary. Logits are of the
    same dtype, or float32. Under autocast the weight that is trained may be float32
    (``trains_float32``), and so its gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    products: Products
    shard: VocabShard | None
    trains_float32: bool

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        shard: VocabShard | None = None,
    ) -> Head:
        """Detached, rows flat, in the dtype of the products, the bias in that of the logits."""
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        bias = None if bias is None else bias.detach().to(products.logits_dtype)
        operands = rows.to(products.dtype), weight.detach().to(products.dtype), bias
        return cls(*operands, products, shard, weight.dtype == torch.float32)

    @property
    def widens(self) -> bool:
        """Whether logits have more bits than what they are made of."""
        return self.products.logits_dtype != self.weight.dtype

    @property
    def set_operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Matrices with unit stride along their rows, and the bias in float32, for the sets."""
        hidden, weight = (
            matrix if matrix.stride(1) == 1 else matrix.contiguous()
            for matrix in (self.hidden, self.weight)
        )
        return hidden, weight, None if self.bias is None else self.bias.float().contiguous()

    def rows_per_chunk(self, rows: int, sums_weight: bool = False) -> int:
        """Rows of each chunk, for the fewest equal chunks; the same on every rank of a shard.

        A chunk has at most ``chunk_tokens`` rows, or 1 GiB of logits; half of that where these
        are sampled, as no product then adds to the weight's gradient. Several others need a float32
        sum of it, ``sums_weight``, before that has half precision: if all logits take no more
        memory than the sum would, they are one chunk.
        """
        halves = not self.trains_float32 and self.shard is None
        logits, total = rows * self._bytes_per_logit, SUM_BYTES * self.weight.shape[1]  # per column
        if sums_weight and halves and logits <= total:
            return max(1, rows)
        most = self.products.chunk_tokens
        if most is None:
            columns = self.weight.shape[0] if self.shard is None else self.shard.widest()
            size = CHUNK_BYTES if self.products.gradient_samples is None else CHUNK_BYTES // 2
            most = max(1, size // (columns * self._bytes_per_logit))
        return max(1, math.ceil(rows / max(1, math.ceil(rows / most))))

    @property
    def _bytes_per_logit(self) -> int:
        narrow = self.weight.element_size()
        return 4 + narrow if self.widens else narrow

    def chunks(self, rows: Tensor, sums_weight: bool = False) -> tuple[tuple[Tensor, ...], Tensor]:
        """The rows in chunks, and memory for the :meth:`logits` of one chunk after the other."""
        size = self.rows_per_chunk(rows.numel(), sums_weight)
        V, like = self.weight.shape[0], (self.products.logits_dtype, self.weight.device)
        return rows.split(size), _rows_apart(CHUNKS.empty, size, V, *like)

    def logits(self, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[n, H]`` and logits ``[n, V]`` of some rows."""
        h = self.hidden[rows]
        logits = memory[: rows.numel(), : self.weight.shape[0]]
        if rows.numel():
            with _without_autocast(h):
                gemm.multiply(h, self.weight, self.bias, logits)
        return h, logits


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
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=torch.float32)
        with _without_autocast(h):
            if self.head.widens and gemm.in_own_dtype(h):
                n, V = dlogits.shape
                narrow = _rows_apart(torch.empty, n, V, h.dtype, h.device)
                dlogits = narrow[:, :V].copy_(dlogits)
            if self.hidden is not None:
                dtype = self.hidden.dtype
                self.hidden[rows] = gemm.hidden_gradient(dlogits, self.head.weight, dtype)
            if self.needs_weight:
                self._add_weight(h, dlogits)

    @property
    def are_of_hidden_alone(self) -> bool:
        """Whether the head is frozen: only hidden states need a gradient."""
        return self.hidden is not None and not self.needs_weight and self.bias is None

    def scale_hidden(self, factors: Tensor) -> None:
        """Multiplies the gradient of each hidden state, ``[N, H]``, by its factor, ``[N]``.

        With a factor of 0 it may hold anything before, and is 0 then.
        """
        assert self.hidden is not None
        self.hidden.mul_(factors.float()[:, None]).masked_fill_((factors == 0)[:, None], 0.0)

    def _add_weight(self, h: Tensor, dlogits: Tensor) -> None:
        first = self.weight is None
        if self.weight is None:
            at_once = self.one_chunk and not self.head.trains_float32
            dtype = h.dtype if at_once else torch.float32
            memory = WEIGHTS if dtype == h.dtype else SUMS
            self.weight = memory.empty(self.head.weight.shape, dtype, h.device)
        gemm.add_weight_gradient(self.weight, dlogits, h, first)

    def like(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> list[Tensor | None]:
        """The gradients in the shapes and dtypes of these; zeros without any row.

        With a shard the hidden states' is summed over the ranks, by one all-reduce.
        """
        if self.head.shard is not None and self.hidden is not None:
            dist.all_reduce(self.hidden, group=self.head.shard.group)
        if self.needs_weight and self.weight is None:
            self.weight = _zeros_like(self.head.weight)
        if self.weight is not None and weight is not None and self.weight.dtype != weight.dtype:
            memory = WEIGHTS.empty(weight.shape, weight.dtype, weight.device)
            self.weight = memory.copy_(self.weight)
        made = ((self.hidden, hidden), (self.weight, weight), (self.bias, bias))
        return [
            None
            if gradient is None or parameter is None
            else gradient.to(parameter.dtype).reshape(parameter.shape)
            for gradient, parameter in made
        ]


def _rows_apart(
    empty: Callable[..., Tensor], rows: int, V: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory of an operand ``[rows, V]``, in whose further columns are zeros.

    A product for AMX reads on behind a row and multiplies by zero what is there: NaN stays NaN.
    """
    gap = _GAP_BYTES // dtype.itemsize
    operand = empty((rows, (-(-V // gap) + 1) * gap), dtype=dtype, device=device)
    operand[:, V:].zero_()
    return operand


def _zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, as an operator that scales a gradient in place asks for."""
    return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _without_autocast(operand: Tensor) -> torch.autocast:
    """GEMMs in the dtype of their operands: autocast would round those that are float32."""
    return torch.autocast(operand.device.type, enabled=False)
