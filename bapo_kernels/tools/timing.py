"""Time and peak memory of calls, on the CPU and on a GPU.

May import ``empty_cache`` alone: what is timed is the caller's.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.memory import empty_cache

Call = Callable[[], Any]
LONG = 10.0  # seconds of a call that has two turns
ENOUGH = 3.0  # seconds of a call's samples after which three turns suffice


@dataclass(frozen=True)
class Timed:
    """A call, an untimed preparation before each, and whether a CUDA graph may capture it."""

    call: Call
    prepare: Call | None = None
    graph: bool = False


class CPUClock:
    """Wall time; memory as counted by torch's allocator."""

    TURNS = 60
    SECONDS = 0.02  # of a turn: a slow moment of the machine meets every method

    def samples(self, timed: Timed) -> list[float]:
        """Seconds of each of a few consecutive calls."""
        samples: list[float] = []
        while not samples or sum(samples) < self.SECONDS:
            if timed.prepare is not None:
                timed.prepare()
            start = time.perf_counter()
            timed.call()
            samples.append(time.perf_counter() - start)
        return samples

    def peak_bytes(self, call: Call) -> int:
        """Peak memory of a call, above what was allocated before."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints two lines
        empty_cache()  # memory that an earlier call has left belongs to the peak of this one
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            call()
        results: Any = profile.profiler and profile.profiler.kineto_results
        memory = [event for event in results.events() if event.name() == "[memory]"]
        memory.sort(key=lambda event: event.start_ns())
        sizes: list[int] = [event.nbytes() for event in memory]
        return max(itertools.accumulate(sizes, initial=0))


class GPUClock:
    """Device time between events, with a cold L2 cache.

    Calls that never synchronise are captured in a CUDA graph, so that host time is not counted.
    The others are timed as they are, synchronisation included.
    """

    TURNS = 5
    REPETITIONS = 10  # of a turn

    def samples(self, timed: Timed) -> list[float]:
        """Seconds of each of a few consecutive calls."""
        call = captured(timed.call) if timed.graph else timed.call
        flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
        pairs = []
        for _ in range(self.REPETITIONS + 1):
            if timed.prepare is not None:
                timed.prepare()
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in pairs[1:]]

    def peak_bytes(self, call: Call) -> int:
        """Peak memory of a call, above what was allocated before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


Clock = CPUClock | GPUClock


def clock_of(device: str) -> Clock:
    """The clock of a device."""
    return GPUClock() if device == "cuda" else CPUClock()


def captured(call: Call) -> Call:
    """A call captured in a CUDA graph: launches the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(
    calls: Mapping[str, Timed],
    clock: Clock,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """The samples of each call in seconds, and the errors of those that failed.

    Each call has one turn per round, so that a slow minute of the machine affects all of them. Slow
    ones have fewer: three once their samples exceed ``ENOUGH``, two if one exceeds ``LONG``.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    failures: dict[str, Exception] = {}
    for turn, name in itertools.product(range(clock.TURNS), calls):
        mine = samples[name]
        done = (turn >= 2 and max(mine, default=0.0) > LONG) or (turn >= 3 and sum(mine) > ENOUGH)
        if name not in failures and not done:
            tell(f"{name}: turn {turn + 1} of {clock.TURNS}")
            try:
                mine += clock.samples(calls[name])
            except Exception as error:  # the others go on
                failures[name] = error
    return {name: mine for name, mine in samples.items() if name not in failures}, failures
