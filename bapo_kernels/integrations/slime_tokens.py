"""The response tokens of a micro-batch of slime, and which context-parallel rank has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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
        # Under slime's --recompute-loss-function, whose own hooks these replace, the gradient would
        # otherwise recompute the loss function, inside its forward.
        own_hooks = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.enable_grad(), own_hooks:
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

    The positions are computed on the CPU, from lengths that it knows: boolean indices on the device
    would make the host wait for it at every sample.
    """
    from megatron.core import mpu

    size, rank, group = mpu.get_context_parallel_world_size(), 0, None
    if size > 1:
        rank, group = mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()
    totals, responses = (torch.tensor(batch[f"{name}_lengths"]) for name in ("total", "response"))
    chunks = -(-totals // (2 * size)) if size > 1 else totals
    starts = totals.cumsum(0) - totals
    row_starts = starts if size == 1 else 2 * (chunks.cumsum(0) - chunks)

    sample = torch.repeat_interleave(responses)
    before_response = totals - responses.cumsum(0) - 1
    at = torch.arange(len(sample)) + before_response[sample]  # predicts the next token
    chunk, offset = at // chunks[sample], at % chunks[sample]
    mirrored = chunk == 2 * size - 1 - rank
    of_rank = (chunk == rank) | mirrored
    row = row_starts[sample] + offset + chunks[sample] * mirrored
    listed = of_rank.nonzero().flatten()
    if size > 1 and getattr(args, "allgather_cp", False):
        row = starts[sample] + at - rank * T
        of_rank = (row >= 0) & (row < T)
    predicted = of_rank.nonzero().flatten()
    label = (starts[sample] + at + 1)[predicted]

    indices = (row[predicted], label, predicted, listed)
    sizes = [len(index) for index in indices]
    rows, label, predicted, listed = on_device(torch.cat(indices), device).split(sizes)
    labels = torch.full((T,), IGNORE_INDEX, dtype=torch.long, device=device)
    labels.index_copy_(0, rows, torch.cat(list(batch["unconcat_tokens"])).to(labels)[label])
    return ResponseTokens(batch["response_lengths"], labels, rows, predicted, listed, group)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU, by a copy that the host does not wait for."""
    if device.type == "cuda":
        values = values.pin_memory()  # from pageable memory the copy would synchronise
    return values.to(device, non_blocking=True)


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
