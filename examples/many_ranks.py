"""BAPO on data-parallel and tensor-parallel ranks, with each scope of the search.

Each data-parallel rank has its own sequences, and FSDP2 shards the model over these ranks;
tensor-parallel ranks have shards of the vocabulary. Runs on CPUs (gloo) and on GPUs (NCCL)::

    torchrun --nproc-per-node 4 examples/many_ranks.py --tensor 2 --scope step
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from bapo_kernels import BAPOConfig, BAPOOutput, ClipBoundSearch, bapo_linear_loss

V, H, B, S = 512, 32, 8, 16
MICRO_BATCHES = 2
Scope = Literal["call", "step", "lagged"]


class PolicyLoss(torch.nn.Module):
    """A model and its loss, computed inside the forward that FSDP2 wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.block = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.GELU())
        self.lm_head = torch.nn.Linear(H, V, bias=False)

    def forward(self, tokens: torch.Tensor, *batch: Any, **options: Any) -> BAPOOutput:
        hidden = self.block(self.embedding(tokens[:, :-1]))
        return bapo_linear_loss(hidden, self.lm_head.weight, tokens[:, 1:], *batch, **options)


def main(tensor: int = 1, scope: Scope = "step", steps: int = 4) -> None:
    """Makes optimizer steps on synthetic stale rollouts; prints what each step decides."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # If one rank fails, the others raise after this time.
    dist.init_process_group(timeout=timedelta(minutes=2))
    shape = dist.get_world_size() // tensor, tensor
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))
    vocabulary = mesh["tensor"].get_group()

    torch.manual_seed(0)  # the same weights everywhere
    policy = PolicyLoss().to(device)
    parallelize_module(policy, mesh["tensor"], {"lm_head": ColwiseParallel()})
    for part in (policy.block, policy.lm_head, policy):
        fully_shard(part, mesh=mesh["data"])
    optimizer = torch.optim.SGD(policy.parameters(), lr=5.0)

    def log_probs(tokens: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Log-probs of the current policy."""
        with torch.no_grad():
            return policy(tokens, None, advantages, vocab_group=vocabulary).log_probs

    g = torch.Generator(device).manual_seed(1 + mesh["data"].get_local_rank())
    batches = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(V, (B, S + 1), device=device, generator=g)
        stale = 0.3 * torch.randn(B, S, device=device, generator=g)
        advantages = torch.randn(B, device=device, generator=g) - 0.2
        batches.append((tokens, log_probs(tokens, advantages) + stale, advantages))

    config = BAPOConfig.paper(target=0.45)
    search = ClipBoundSearch(config, scope, mesh["data"].get_group(), device)
    tokens_of_the_step = mesh["data"].size() * MICRO_BATCHES * B * S
    for step in range(steps):
        if scope == "step":  # all micro-batches, before the first backward
            for tokens, old, advantages in batches:
                search.update(log_probs(tokens, advantages), old, advantages)
            search.step()
        total = torch.zeros((), device=device)
        for batch in batches:
            out = policy(
                *batch,
                batch_num_tokens=tokens_of_the_step,
                dp_size=mesh["data"].size(),  # FSDP takes the mean over the ranks
                vocab_group=vocabulary,
                **search.options,
            )
            out.loss.backward()
            total += out.loss.detach()
            if scope == "lagged":
                search.update(out.log_probs, *batch[1:])
        if scope == "lagged":
            search.step()  # decides the bounds of the next step
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh["data"].get_group())
        if dist.get_rank() == 0:
            low, high = (bound.item() for bound in out.bounds)
            loss = total.item() / mesh["data"].size()
            print(f"step {step}  loss {loss:+.4f}  bounds {low:.2f} .. {high:.2f}")
    dist.barrier()  # no rank exits while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
