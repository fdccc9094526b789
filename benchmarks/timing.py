"""Time and peak memory of a call, on the CPU and on a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bapo_kernels import empty_cache

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """A call, an untimed preparation before each, and whether a CUDA graph may capture it."""

    call: Call
    prepare: Call | None = None
    graph: bool = False


class CPUClock:
    """Wall time; memory as counted by torch's allocator."""

    SECONDS = 0.25  # of consecutive samples

    def samples(self, timed: Timed) -> list[float]:
        """Milliseconds of a few calls."""
        times: list[float] = []
        spent = 0.0
        while not times or spent < 1e3 * self.SECONDS:
            if timed.prepare is not None:
                timed.prepare()
            start = time.perf_counter()
            timed.call()
            times.append(1e3 * (time.perf_counter() - start))
            spent += times[-1]
        return times

    def peak_bytes(self, run: Call) -> int:
        """Peak memory of a call, above what was allocated before."""
        empty_cache()  # memory that an earlier call has left belongs to the peak of this one
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            run()
        events = profile.profiler.kineto_results.events()
        memory = [event for event in events if event.name() == "[memory]"]
        memory.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate((event.nbytes() for event in memory), initial=0))


class GPUClock:
    """Device time between events, with a cold L2 cache.

    Calls that never synchronise are captured in a CUDA graph, so that host time is not counted.
    The others are timed as they are, synchronisation included.
    """

    REPETITIONS = 10

    def samples(self, timed: Timed) -> list[float]:
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
        return [start.elapsed_time(end) for start, end in pairs[1:]]

    def peak_bytes(self, run: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


Clock = CPUClock | GPUClock


def captured(run: Call) -> Call:
    """A call captured in a CUDA graph: launches the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def clock_of(device: str) -> Clock:
    """The clock of a device."""
    return GPUClock() if device == "cuda" else CPUClock()


def summary(times: list[float]) -> dict[str, float]:
    """Median and 20/80 percentiles in milliseconds."""
    low, median, high = np.percentile(times, [20, 50, 80])
    return {"ms": median, "ms_20": low, "ms_80": high, "repetitions": len(times)}
