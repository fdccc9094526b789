"""The response tokens of a micro-batch of slime, and which context-parallel rank has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import IGNORE_INDEX


@dataclass(frozen=True)
class ResponseTokens:
    """Positions among the response tokens of all samples, one sample after the other.

    Attributes:
        lengths: of the responses; their sum is ``R``.
        labels: ``[T]``, of the rows of the logits that this rank has; -100 in rows that predict no
            response token.
        rows: ``[n]``, those that predict one.
        predicted: ``[n]``, the positions of the tokens that these predict.
        listed: ``[m]``, the positions of the tokens in the lists per sample of the batch.
        group: the context-parallel ranks; ``None`` where there is one rank.
    """

    lengths: list[int]
    labels: Tensor
    rows: Tensor
    predicted: Tensor
    listed: Tensor
    group: dist.ProcessGroup | None

    def whole(self, values: Tensor, positions: Tensor) -> Tensor:
        """``[k, R]`` from the values ``[k, ...]`` that each rank has at its positions."""
        empty = values.new_zeros(len(values), sum(self.lengths))
        own = empty.index_copy(1, positions, values)
        summed: Tensor = own if self.group is None else _Sum.apply(own, self.group)
        return summed

    def spread(self, values: Tensor) -> Tensor:
        """``[T]`` from the values ``[R]`` of a rank that has all tokens; 0 in the other rows."""
        return values.new_zeros(len(self.labels)).index_copy(0, self.rows, values)

    def means(self, values: Tensor, masks: list[Tensor]) -> Tensor:
        """``[R]``: for each token the mean of its response."""
        samples = zip(values.split(self.lengths), masks, strict=True)
        means = [((x * mask).sum() / mask.sum().clamp(min=1)).expand_as(x) for x, mask in samples]
        return torch.cat(means)

    def weights(self, reduction: Callable[[Tensor], Tensor]) -> Tensor:
        """Weights ``[R]`` of a reduction of slime, which is linear: its gradient.

        Zero for the tokens of other ranks.
        """
        with torch.enable_grad():
            ones = torch.ones(len(self.listed), device=self.listed.device, requires_grad=True)
            (weights,) = torch.autograd.grad(reduction(ones), ones)
        empty = weights.new_zeros(sum(self.lengths))
        return empty.index_copy(0, self.listed, weights)


def response_tokens(
    args: Any, batch: dict[str, Any], T: int, device: torch.device
) -> ResponseTokens:
    """Those of a micro-batch, of which this rank has ``T`` rows of logits.

    With context parallelism a rank has two chunks of every sample, mirror images of each other, and
    lists of the tokens that they predict. With ``allgather_cp`` it has one chunk of all samples
    together, while the lists stay as they are.
    """
    from megatron.core import mpu

    size, rank, group = mpu.get_context_parallel_world_size(), 0, None
    if size > 1:
        rank, group = mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()
    labels = torch.full((T,), IGNORE_INDEX, dtype=torch.long, device=device)
    rows, predicted, listed = [], [], []
    start = row_start = position = 0
    lengths = zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    )
    for tokens, total, response in lengths:
        at = torch.arange(total - response - 1, total - 1, device=device)
        chunk = -(-total // (2 * size)) if size > 1 else total
        mirrored = at // chunk == 2 * size - 1 - rank
        of_rank = (at // chunk == rank) | mirrored
        row = row_start + at % chunk + chunk * mirrored
        listed.append(position + of_rank.nonzero().flatten())
        if size > 1 and getattr(args, "allgather_cp", False):
            row = start + at - rank * T
            of_rank = (row >= 0) & (row < T)
        rows.append(row[of_rank])
        predicted.append(position + of_rank.nonzero().flatten())
        labels[rows[-1]] = tokens.to(labels)[at[of_rank] + 1]
        start, position = start + total, position + response
        row_start += 2 * chunk if size > 1 else total
    return ResponseTokens(
        batch["response_lengths"],
        labels,
        torch.cat(rows),
        torch.cat(predicted),
        torch.cat(listed),
        group,
    )


class _Sum(torch.autograd.Function):
    """Over ranks whose losses add up, so the gradients add up too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
