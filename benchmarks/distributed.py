"""The search over ranks: the paper's loop, with one all-reduce per probe, against one collective.

``python -m benchmarks.distributed`` starts four processes (gloo), and counts and times the
collectives of both searches, with a pause before each collective that imitates a slower network.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

from bapo_kernels import BAPOConfig, find_clip_bounds, reference

from .console import table, wide_console
from .records import append, environment
from .timing import summary

RESULTS = Path(__file__).parent / "results" / "distributed.jsonl"
RANKS = 4
TOKENS = 8_192  # per rank
LATENCIES_US = (0, 20, 200)
# Where the search stops: at once, half way, at the maximum bounds.
TARGETS = {"nothing to raise": 0.0, "raised half way": 0.49, "raised to the end": 1.0}


@contextmanager
def slow_network(latency_us: float) -> Iterator[list[float]]:
    """Pauses before each all-reduce; the list gets when each pause ended."""
    all_reduce, ends = dist.all_reduce, list[float]()

    def paused(*args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + 1e-6 * latency_us
        while time.perf_counter() < end:
            pass
        ends.append(end)
        return all_reduce(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", paused):
        yield ends


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    logp = -3 * torch.rand(TOKENS, generator=g)
    old = logp + 0.4 * torch.randn(TOKENS, generator=g)
    return logp, old, torch.randn(TOKENS, generator=g)


def of_rank(rank: int, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=RANKS)
    tokens, group = batch(rank), dist.group.WORLD
    records = []
    for case, target in TARGETS.items():
        config = BAPOConfig.paper(target=target)
        searches: dict[str, Callable[..., Any]] = {
            "the paper's loop": reference.find_clip_bounds,
            "find_clip_bounds": find_clip_bounds,
        }
        bounds = [f(*tokens, config=config, process_group=group) for f in searches.values()]
        assert bounds[0] == bounds[1], "only a correct result is timed"
        for (name, f), latency_us in ((s, us) for s in searches.items() for us in LATENCIES_US):
            times = []
            with slow_network(latency_us) as all_reduces:
                for _ in range(21):  # the same number on every rank
                    dist.barrier()
                    start = time.perf_counter()
                    f(*tokens, config=config, process_group=group)
                    times.append(1e3 * (time.perf_counter() - start))
            record = {
                "case": f"search over ranks: {case}, {name}",
                "ranks": RANKS,
                "tokens_per_rank": TOKENS,
                "latency_us": latency_us,
                "collectives": len(all_reduces) // 21,
                "bounds": [round(b.item(), 4) for b in bounds[0]],
            }
            records.append(record | summary(times[1:]))
    if rank == 0:
        answers.put(records)
    dist.destroy_process_group()


def main(out: Path = RESULTS) -> None:
    """Measures, prints, and appends records to a file of JSON lines."""
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(of_rank, (folder, answers), nprocs=RANKS)
        records = answers.get()
    rows: dict[str, list[Any]] = {}
    for r in records:
        rows.setdefault(r["case"].split(": ")[1], [r["collectives"]]).append(f"{r['ms']:.2f}")
    title = f"Search over {RANKS} ranks x {TOKENS:,} tokens, milliseconds per call"
    columns = "case", "collectives", *(f"{us} us" for us in LATENCIES_US)
    wide_console().print(table(title, columns, ((case, *cells) for case, cells in rows.items())))
    append(out, [{**environment(), **record} for record in records])


if __name__ == "__main__":
    typer.run(main)
