"""Real process groups (gloo, or NCCL on GPUs) whose ranks run a function together."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@cache
def grid(data: int, tensor: int, device: str = "cpu") -> DeviceMesh:
    """A data x tensor parallel mesh; cached, because an idle gloo group polls its sockets."""
    ranks = torch.arange(data * tensor).view(data, tensor)
    return DeviceMesh(device, ranks, mesh_dim_names=("data", "tensor"))


def resumed(search, folder):
    """A new search with what this one has saved in a checkpoint."""
    group = search.process_group
    other = type(search)(search.config, search.scope, group)
    dcp.save({"search": search}, checkpoint_id=folder, no_dist=group is None)
    dcp.load({"search": other}, checkpoint_id=folder, no_dist=group is None)
    before, after = (repr((each.metrics, each.state_dict())) for each in (search, other))
    assert before == after
    return other


def whole_tensor(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def _packed(values):
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _serve(rank, size, store, device, timeout, pipe):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while (task := pipe.recv()) is not None:
        function, args, kwargs = task
        try:
            torch.manual_seed(0)
            pipe.send((True, _packed(function(rank, *args, **kwargs))))
        except BaseException:  # that of pytest.fail is no Exception
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # Python takes a second to tear torch down


class World:
    def __init__(self, pipes):
        self.pipes = pipes

    def answers(self, function, *args, **kwargs):
        """Run ``function(rank, ...)`` on every rank: (True, result) or (False, error) per rank."""
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = [pipe.recv() for pipe in self.pipes]
        return [
            (fine, torch.load(io.BytesIO(answer), weights_only=False) if fine else answer)
            for fine, answer in answers
        ]

    def run(self, function, *args, **kwargs):
        """Run ``function(rank, ...)`` on every rank; the results in rank order."""
        answers = self.answers(function, *args, **kwargs)
        errors = [f"rank {rank}: {error}" for rank, (fine, error) in enumerate(answers) if not fine]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]


@contextmanager
def world(size, folder, device="cpu", timeout=60):
    """``size`` processes in one group."""
    # Ranks are forks of a process that has imported torch, but not one that has looked for a GPU.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp"])
    ends = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=_serve, args=(rank, size, folder / "store", device, timeout, end), daemon=True
        )
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    pipes = [end for end, _ in ends]
    yield World(pipes)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
