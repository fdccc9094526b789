"""The row kernels of the built CUDA library, and what a row of theirs executes."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import bapo_kernels

from .launch import ROWS, Plan, Trace, launch, traces
from .sass import Code, Instruction, disassemble

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
DTYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16", "f": "float32"}
# kernel<dtype, soft cap, aligned>
MANGLED = re.compile(r"\drow_pass(_cluster)?_kernelI(.+)Lb0ELb1EEEv")
PHASES = ("set-up", "first pass", "decision", "second pass", "loads")
SUMS_ARRIVED = (0x400, 0x408)  # the two barriers at the beginning of the block's memory


@functools.cache
def kernels(library: Path, arch: str) -> dict[tuple[bool, str], Code]:
    """Those for aligned rows without a soft cap, by (whether of clusters, dtype)."""
    found = {MANGLED.search(name): code for name, code in disassemble(library, arch).items()}
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
    def block(self) -> tuple[Plan, list[Trace]]:
        """Traces of all warps of a block; that of the generic kernel has one row."""
        plan, parameters = launch(self.vocabulary, self.dtype, self.arch, self.gradient)
        code = kernels(self.library, self.arch)[plan.cluster > 0, self.dtype]
        return plan, traces(code, self.arch, plan, parameters)

    def counts(self) -> dict[str, float]:
        """Executed instructions per element by phase, of rows in the middle of a launch."""
        plan, found = self.block
        total = Counter[str]()
        for trace in found[: plan.warps]:
            if not plan.cluster:
                total += phases(trace)
                continue
            own, others, fields = turns(trace, plan.warps - 1)
            for rows, share in ((own, 1), (others, plan.cluster - 1)):
                for phase, count in phases(rows, "decision").items():
                    total[phase] += count * share / plan.cluster / (plan.warps - 1)
            total["set-up"] += fields / 32
        if plan.cluster:
            total["loads"] += len(found[-1]) / 32
        elements = self.vocabulary / max(plan.cluster, 1) / 32
        counts = {phase: total[phase] / elements for phase in PHASES}
        return counts | {"all": sum(counts.values())}


def turns(trace: Trace, count: int) -> tuple[Trace, Trace, int]:
    """Parts of the trace of a warp of the cluster kernel, from row to row where sums are sent.

    First as many rows as there are warps that decide in turn; then as many on which another block
    decides if there is no gradient. The number is of the instructions that are executed once for 32
    rows, before these begin.
    """
    what = [event(*one) for one in trace]
    places = [i for i, each in enumerate(what) if each in ("send", "wait")]
    cuts = [b for a, b in pairwise(places) if (what[a], what[b]) == ("wait", "send")]
    begin = next(i for i, (one, *_) in enumerate(trace) if one.name == "UCGABAR_WAIT")
    own, others = (trace[cuts[i] : cuts[i + count]] for i in (0, count))
    return own, others, what.index("barrier") - begin


def phases(trace: Trace, phase: str = "set-up") -> Counter[str]:
    """Instructions by phase, of a trace that begins in one."""
    total, last = Counter[str](), 0
    for i, (one, active, place) in enumerate(trace):
        what, before = event(one, active, place), phase
        if (what == "wait" and phase != "first pass") or (what == "read" and phase == "set-up"):
            before = "decision" if phase == "decision" else "set-up"
            phase = "first pass"
        elif phase == "first pass" and one.name in ("REDUX", "CREDUX", "SHFL"):
            phase = "decision"
        elif what == "barrier" and phase == "decision":
            phase = "second pass"
        elif what != "store":
            continue
        total[before] += i - last
        last = i
    total["set-up"] += len(trace) - last
    return total


def event(one: Instruction, active: bool, place: int) -> str:
    """What an instruction does besides: waits for a chunk or sends sums, in the cluster kernel."""
    words = one.opcode.split(".")
    if not active:
        return ""
    if one.name == "BAR":
        return "barrier"
    if one.name == "SYNCS" and "PHASECHK" in words:
        return "" if place in SUMS_ARRIVED else "wait"
    if one.name == "STAS" or (one.name == "SYNCS" and "ARRIVE" in words and place in SUMS_ARRIVED):
        return "send"
    if place >> 32 in ROWS and one.name == "STG":
        return "store"
    return "read" if place >> 32 in ROWS and "128" in words else ""
