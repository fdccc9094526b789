"""The row kernels of the built CUDA library, and what a row of theirs executes."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import bapo_kernels

from .gpus import GPU
from .launch import Plan, Trace, launch, traces
from .model import (
    BARRIER,
    PREDICTED,
    READ,
    STORE,
    WAIT,
    Case,
    Line,
    Prediction,
    events,
    first_loads,
    is_vector,
    predict,
    sends,
    steps,
)
from .sass import Code, disassemble

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
DTYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16", "f": "float32"}
# kernel<dtype, soft cap, aligned>
MANGLED = re.compile(r"\drow_pass(_cluster)?_kernelI(.+)Lb0ELb1EEEv")
PHASES = ("set-up", "first pass", "decision", "second pass", "loads")


@functools.cache
def kernels(library: Path, arch: str) -> dict[tuple[bool, str], Code]:
    """Those for aligned rows without a soft cap, by (whether of clusters, dtype)."""
    options = () if library.suffix == ".cubin" else ("-arch", arch)
    found = {MANGLED.search(name): code for name, code in disassemble(library, *options).items()}
    return {(bool(name[1]), DTYPES[name[2]]): code for name, code in found.items() if name}


@dataclass(frozen=True)
class Row:
    """A row of some vocabulary, as the GPUs of one architecture process it."""

    arch: str
    vocabulary: int
    dtype: str = "bfloat16"
    gradient: bool = True
    library: Path = LIBRARY

    @functools.cached_property
    def block(self) -> tuple[Plan, Code, list[Trace]]:
        """Traces of all warps of a block; that of the generic kernel has one row."""
        plan, parameters = launch(self.vocabulary, self.dtype, self.arch, self.gradient)
        code = kernels(self.library, self.arch)[plan.cluster > 0, self.dtype]
        return plan, code, traces(code, self.arch, plan, parameters)

    @functools.cached_property
    def turns(self) -> list[Turn]:
        """Of the cluster kernel's warps that compute."""
        plan, _, found = self.block
        return [Turn.of(trace, plan.warps) for trace in found[: plan.warps]]

    @functools.cached_property
    def steps(self) -> list[np.ndarray]:
        """What is simulated of every warp: the loads of 32 rows, and computation of 28."""
        plan, _, found = self.block
        if not plan.cluster:
            first = first_loads(found)
            return [steps(trace, first=first) for trace in found]
        computing = [steps(turn.first + turn.nine(plan.cluster)) for turn in self.turns]
        return [*computing, steps(found[-1], loader=True)]

    def plan(self, gpu: GPU) -> Plan:
        plan, code, _ = self.block
        if plan.cluster:
            return plan
        return replace(plan, blocks=gpu.resident(plan.warps, code.registers))

    def counts(self) -> dict[str, float]:
        """Executed instructions per element by phase, of rows in the middle of a launch."""
        plan, _, found = self.block
        total = Counter[str]()
        if plan.cluster:
            for turn in self.turns:
                for rows, share in ((turn.own, 1), (turn.others, plan.cluster - 1)):
                    for phase, count in phases(rows, "decision").items():
                        total[phase] += count * share / plan.cluster / (plan.warps - 1)
                total["set-up"] += len(turn.fields) / 32
            total["loads"] += len(found[-1]) / 32
        else:
            first = first_loads(found)
            for trace in found:
                total += phases(trace, first=first)
        elements = self.vocabulary / max(plan.cluster, 1) / 32
        counts = {phase: total[phase] / elements for phase in PHASES}
        return counts | {"all": sum(counts.values())}

    def predict(self, gpu: GPU, case: Case = PREDICTED) -> Prediction:
        return predict(self.steps, self.plan(gpu), gpu, case)


@dataclass(frozen=True)
class Turn:
    """Parts of the trace of a warp of the cluster kernel, from row to row where sums are sent.

    Attributes:
        first: up to the sums of the first row.
        fields: what is executed once for 32 rows, before they begin.
        own: as many rows as there are warps that decide in turn: all but the first.
        others: as many, on which another block decides if there is no gradient.
    """

    first: Trace
    fields: Trace
    own: Trace
    others: Trace

    @classmethod
    def of(cls, trace: Trace, warps: int) -> Turn:
        what = np.fromiter(events(trace), int)
        cuts = sends(what)
        begin = next(i for i, (one, *_) in enumerate(trace) if one.name == "UCGABAR_WAIT")
        end = int(np.argmax(what == BARRIER))
        n = warps - 1
        rows = [trace[cuts[i] : cuts[i + n]] for i in (0, n)]
        return cls(trace[: cuts[0]], trace[begin + 1 : end + 1], *rows)

    def nine(self, cluster: int) -> Trace:
        """Nine turns, of which each block of a cluster has one if there is no gradient."""
        own = [i % cluster == min(cluster, 8) // 2 for i in range(9)]
        turns = [self.own if mine else self.others for mine in own]
        return list(itertools.chain(*turns[:4], self.fields, *turns[4:]))


def phases(
    trace: Trace, phase: str = "set-up", first: Mapping[Line, int] | None = None
) -> Counter[str]:
    """Instructions by phase, of a trace that begins in one."""
    total, last = Counter[str](), 0
    for i, ((one, *_), what) in enumerate(zip(trace, events(trace, first=first), strict=True)):
        before = phase
        if (what == WAIT or (what == READ and is_vector(one))) and phase != "first pass":
            before = "decision" if phase == "decision" else "set-up"
            phase = "first pass"
        elif phase == "first pass" and one.name in ("REDUX", "CREDUX", "SHFL"):
            phase = "decision"
        elif what == BARRIER and phase == "decision":
            phase = "second pass"
        elif what != STORE:
            continue
        total[before] += i - last
        last = i
    total["set-up"] += len(trace) - last
    return total
