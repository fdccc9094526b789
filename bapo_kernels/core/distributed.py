"""Many ranks: sums in rank order, shards of the vocabulary, sharded weights.

Imports the checks and the config. To the kernels a shard is a short row. Every rank must make the
same collectives in the same order; the host reads nothing except where a function says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import is_dtensor, require
from ..config import IGNORE_INDEX, Options


def rows_of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks of a group, ``[ranks, ...]``, to be added in order on each of them.

    One all-reduce of this rank's own row and zeros elsewhere, which rounds nothing.
    """
    rows = values.new_zeros(dist.get_world_size(group), *values.shape)
    rows[dist.get_rank(group)] = values
    dist.all_reduce(rows, group=group)
    return rows


def device_of_tables(group: dist.ProcessGroup | None) -> torch.device | None:
    """The device for the table of a rank that had no tokens: NCCL adds tables of GPUs alone."""
    if group is not None and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return None


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[ranks, ...]`` of equal shapes."""
    ranks = dist.get_world_size(group)
    gathered = values.new_empty(ranks * values.numel())
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name
    all_gather(gathered, values.reshape(-1).contiguous(), group=group)
    return gathered.view(ranks, *values.shape)


@dataclass(frozen=True)
class VocabShard:
    """The columns ``[first, first + columns)`` of a vocabulary that is sharded over a group.

    Shards are in rank order and may differ in size; the sizes stay on the device.
    """

    group: dist.ProcessGroup
    columns: int
    sizes: Tensor  # int64 [ranks]

    @classmethod
    def of(cls, columns: int, like: Tensor, group: dist.ProcessGroup | None) -> VocabShard | None:
        """The shard of this rank; ``None`` without a group. One collective, 8 bytes per rank."""
        if group is None:
            return None
        mine = torch.full((), columns, dtype=torch.int64, device=like.device)
        return cls(group, columns, gather(mine, group))

    @classmethod
    def named(cls, columns: int, sizes: Tensor | None, name: str | None) -> VocabShard | None:
        """The shard of a group known by its name, as operators take it; sizes as of :meth:`of`."""
        if sizes is None or name is None:
            return None
        c10d: Any = dist.distributed_c10d  # untyped, and without a public name for this
        return cls(c10d._resolve_process_group(name), columns, sizes)

    def span(self) -> Tensor:
        """int64 ``[2]``: the first column of this shard, and the columns of all."""
        return torch.stack([self.sizes[: dist.get_rank(self.group)].sum(), self.sizes.sum()])

    def labels(self, labels: Tensor) -> Tensor:
        """Labels as columns of this shard; -1 where another shard has them; -100 stays."""
        first = self.sizes[: dist.get_rank(self.group)].sum()
        here = labels - first
        elsewhere = torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, -1)
        return torch.where((here >= 0) & (here < self.columns), here, elsewhere)

    def combine(
        self,
        labels: Tensor,
        here: Tensor,
        counted: Tensor,
        log_probs: Tensor,
        entropy: Tensor,
        stats: Tensor,
        options: Options,
        temperatures: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combines the statistics of every rank's shard into those of the whole rows.

        With ``q_k`` the probability of shard ``k``, ``logp = logp_k + log q_k`` for the shard that
        has the label, and ``entropy = sum_k q_k*(entropy_k - log q_k)``.

        Args:
            labels: ``[N]`` or ``[N, K]``, of the whole vocabulary; here: what :meth:`labels` makes
                of them.
            counted: bool ``[N]``; the other rows become 0, and so do labels of -100.
            log_probs: float64 inside the shard, of the labels; entropy: ``[N]``, too.
            stats: float64 ``[N, 2]``: origin of y and sum of exp(x - scale*origin), x = scale*y.
        """
        mine = torch.where(here >= 0, log_probs, -torch.inf)
        mine = mine[:, None] if labels.ndim == 1 else mine
        shards = gather(torch.cat([stats, entropy[:, None], mine], 1), self.group)
        (origin, total, entropies), logp = shards[..., :3].unbind(-1), shards[..., 3:]
        by = options.temperature if temperatures is None else temperatures.double()
        scale = options.logit_scale if options.softcap == math.inf else options.softcap
        top = origin.amax(0)
        log_q = total.log() + (origin - top) * (scale / by)
        q = log_q.exp()
        whole = q.sum(0)
        log_q, q = log_q - whole.log(), q / whole
        entropy = torch.where(q == 0, 0.0, q * (entropies - log_q)).sum(0)
        log_q = log_q[..., None]
        logp = torch.where(total[..., None] == 0, log_q, logp + log_q)  # 0: -inf logits alone
        known = (labels >= 0) & (labels < self.sizes.sum())
        # New tensors: Dynamo of torch 2.11 gives no gradient to outputs that were written into.
        logp = torch.where(known, logp.amax(0).view(labels.shape), torch.nan)
        given = labels != IGNORE_INDEX
        given &= counted if labels.ndim == 1 else counted[:, None]
        logp = torch.where(given, logp, 0.0)
        return logp, torch.where(counted, entropy, 0.0), torch.stack([top, whole], 1)

    def widest(self) -> int:
        """Columns of the largest shard. Reads the device."""
        return int(self.sizes.max())


def whole_vocabulary(shard: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The shards of all ranks, concatenated; only this rank's own shard gets a gradient."""
    if group is None:
        return shard
    mine = torch.tensor(shard.shape[dim], device=shard.device)
    sizes = gather(mine, group).tolist()
    padded = shard.detach().movedim(dim, 0)
    padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(padded), *padded.shape[1:])])
    parts = [
        part[:size].movedim(0, dim) for part, size in zip(gather(padded, group), sizes, strict=True)
    ]
    parts[dist.get_rank(group)] = shard
    return torch.cat(parts, dim)


class _MeanGradient(torch.autograd.Function):
    """A parameter whose gradient, a sum over ranks, is divided by their number."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def _local_parameter(name: str, parameter: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
    """The part of a DTensor that a rank computes with: all of it, or its shard of ``vocab_group``.

    The gradient returns to the placement of the parameter. Over the mesh dimensions that are
    gathered it is the mean of the ranks, as with FSDP.
    """
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard

    weight: Any = parameter
    mesh = weight.device_mesh
    placements: list[Placement] = [Replicate()] * mesh.ndim
    gradients: list[Placement] = [Partial()] * mesh.ndim
    if vocab_group is not None:
        ranks = dist.get_process_group_ranks(vocab_group)
        over = [
            d for d in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(d)) == ranks
        ]
        sharded = bool(over) and weight.placements[over[-1]].is_shard(0)
        rule = "be sharded along dimension 0 over vocab_group"
        require(sharded, name, rule, f"placements {weight.placements} on {mesh}")
        placements[over[-1]] = gradients[over[-1]] = Shard(0)
    ranks_averaged = math.prod(
        [mesh.size(d) for d, placement in enumerate(placements) if placement.is_replicate()]
    )
    averaged = _MeanGradient.apply(weight, ranks_averaged)
    local: Tensor = averaged.redistribute(placements=placements).to_local(grad_placements=gradients)
    return local


def local_head(
    weight: Tensor, bias: Tensor | None, vocab_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as this rank computes with them, each of which may be a DTensor."""
    local = _local_parameter("lm_head_weight", weight, vocab_group)
    return local, None if bias is None else _local_parameter("bias", bias, vocab_group)
