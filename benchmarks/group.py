"""The methods of a case: checked, then timed in turns, so that a slow minute meets all of them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bapo_kernels.core.memory import empty_cache
from bapo_kernels.tools.timing import Call, GPUClock, Timed, clock_of, in_turns

from .cases import STEPS, Batch, Case
from .checks import FewRows, WrongAnswerError, check
from .floor import floor
from .methods.method import Method
from .targets import targets


def resident_bytes(call: Call) -> int:
    """Most memory that the process has during a call: Linux counts it.

    Of the step of a model the profiler, which counts what tensors take, itself takes gigabytes.
    """
    empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
    call()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])


class Group:
    """Samples and facts by method.

    Attributes:
        samples: seconds of each call of the methods that can be timed; empty without ``timed``.
        facts: for ``extra_info``.
        failures: why the others cannot be timed.
    """

    def __init__(self, case: Case, methods: Sequence[Method], device: str, timed: bool) -> None:
        self.batch, self.clock = Batch(case, device), clock_of(device)
        self.shares, few = self.batch.shares(), FewRows(case, device)
        self.facts: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, Exception] = {}
        calls = {}
        for method in methods:
            facts = {"method": method.name, "version": method.version, **asdict(case)}
            self.facts[method.name] = facts
            try:
                calls[method.name] = self._ready(method, few, facts)
            except Exception as error:  # a package may fail in any way; the others go on
                self.failures[method.name] = error
            self.batch.release()
        self.samples, failed = in_turns(calls, self.clock) if timed else ({}, {})
        self.failures |= failed
        self._add_rates(methods)
        for method in methods:
            self.facts[method.name]["targets"] = targets(case, method, self.facts)

    def _ready(self, method: Method, few: FewRows, facts: dict[str, Any]) -> Timed:
        """A call that has been made once, with its errors and costs."""
        batch, case = self.batch, self.batch.case
        if method.yardstick is not None:
            facts |= method.need(batch)._asdict() if method.need is not None else {}
            facts |= check(method, few) if method.train or method.log_probs else {}
            call = method.yardstick(batch)
            if case.sweep in STEPS:
                on_gpu = isinstance(self.clock, GPUClock)
                peak_bytes = self.clock.peak_bytes if on_gpu else resident_bytes
                facts["peak_bytes"] = peak_bytes(call)
                facts["head_seconds"] = call.head_seconds  # those of the samples will be here
                call.head_seconds.clear()
            else:
                call()
            return Timed(call, graph=case.sweep not in STEPS)
        facts |= check(method, few) | {"shares": self.shares}
        facts |= floor(case, self.shares, method.live)._asdict()
        own = batch.overwritable if method.overwrites else batch
        prepare = partial(own.restore, batch) if method.overwrites else None
        call = partial(method.step, own)
        if prepare is not None:
            prepare()
        value, gradients = call()  # also compiles, tunes and warms up
        if not value.isfinite().all():
            raise WrongAnswerError("value must be finite")
        facts["gradient_bytes"] = sum(g.nbytes for g in gradients if g is not None)
        del value, gradients
        own.release()
        facts["peak_bytes"] = self.clock.peak_bytes(call)
        # From hidden states the number of counted rows is read on the host.
        return Timed(call, prepare, graph=method.backend is not None and case.level == "logits")

    def _add_rates(self, methods: Sequence[Method]) -> None:
        """Rates, and multiples of the yardstick, the first method, of medians and of minima."""
        first = methods[0].name
        yardstick = self.samples.get(first) if methods[0].yardstick is not None else None
        for name, samples in self.samples.items():
            facts, seconds = self.facts[name], median(samples)
            for need, rate, unit in (("bytes", "GB_per_s", 1e9), ("flops", "TFLOP_per_s", 1e12)):
                if facts.get(need):
                    facts[rate] = facts[need] / seconds / unit
                    if rate in (best := self.facts[first]):
                        facts["share"] = facts[rate] / best[rate]
            if yardstick:
                facts["yardstick"] = first
                facts["multiple"] = seconds / median(yardstick)
                facts["multiple_min"] = min(samples) / min(yardstick)
