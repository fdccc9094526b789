"""A model of multiprocessors that execute the traces of all resident warps, cycle by cycle.

Each of the four sub-partitions issues one instruction per cycle, of the warp that has waited
longest among those that are ready. A warp issues in order, as its control codes say: after the
stall of the instruction before, and after the scoreboards that it waits for. A unit accepts an
instruction of a warp every so many cycles. Memory serves requests in their order, at the bandwidth
of a copy. A few multiprocessors, which start one after the other, share their part of it: one that
waits leaves its own to the others.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .gpus import GPU
from .launch import ROWS, Plan, Trace
from .machine import access_bytes
from .sass import Instruction

# The events of an instruction besides its issue, as simulate.cpp numbers them.
PLAIN, WAIT, FREE, SUMS, LOAD, STORE, SEND, BARRIER, RELEASE, READ, REREAD = range(11)
MOVING = READ, REREAD, STORE
SUMS_ARRIVED = (0x400, 0x408)  # the two barriers at the beginning of the block's memory
FIELDS = "stall", "waits", "writes", "reads", "unit", "event", "bytes"
STEP = np.dtype([(name, "i4") for name in FIELDS])
# Issue interval in a sub-partition, and latency where it is not in the control code.
UNITS = {
    "fma": (1, 4),
    "fma of pairs": (2, 4),
    "integer multiply": (2, 4),
    "alu": (2, 5),
    "uniform": (2, 12),
    "double": (2, 16),
    "function": (8, 24),  # exp, and conversions to and from double
    "shuffle": (4, 24),
    "shared": (4, 33),
    "vector": (16, 40),
    "constant": (2, 40),
    "barrier in memory": (4, 24),
    "global": (4, 800),
    "control": (1, 20),
}
UNIT = {
    name: unit
    for unit, names in {
        "fma": "FFMA FMUL FADD HFMA2 HADD2 HMUL2 FHADD",
        "fma of pairs": "FFMA2 FMUL2 FADD2",
        "integer multiply": "IMAD",
        "double": "DADD DMUL DFMA DSETP",
        "function": "MUFU F2F I2F F2I FRND",
        "shuffle": "SHFL REDUX CREDUX VOTE",
        "alu": "FMNMX FMNMX3 FSEL FSETP HMNMX2 VHMNMX F2FP I2FP MOV IADD3 VIADD VIADDMNMX VIMNMX "
        "IMNMX IABS LOP3 PLOP3 ISETP SEL SHF LEA PRMT BREV FLO POPC P2R R2P CS2R",
        "uniform": "R2UR LDCU ULDC USHF UMOV USEL ULEA ULOP3 UIADD3 UIMAD UISETP UPRMT UPLOP3 "
        "UCGABAR_ARV UCGABAR_WAIT",
        "shared": "LDS STS STAS LDL STL",  # what spills stays in L1
        "constant": "LDC S2R S2UR",
        "barrier in memory": "SYNCS UBLKCP",
        "global": "LDG STG LD ST",
        "control": "BRA EXIT RET CALL BSSY BSYNC BREAK BMOV WARPSYNC BAR NOP YIELD CCTL ELECT "
        "MEMBAR FENCE ERRBAR CGAERRBAR",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class Latencies:
    """Assumed cycles, beside those of `UNITS`; `factor` is of all latencies, not of intervals."""

    memory: float = 800
    l2: float = 270
    l1: float = 40
    operands: float = 12  # until a scoreboard of read operands is released
    barrier: float = 24  # of the warps of a block
    exchange: float = 250  # from a store to another block until its barrier has been seen
    packet: float = 4  # between two such stores that complete on a barrier
    load: float = 1000  # from a bulk copy's issue to its arrival, without a queue
    block_start: float = 600  # after the end of the one before
    factor: float = 1.0


@dataclass(frozen=True)
class Case:
    """What is varied: latencies, sub-partitions of loading warps, L2, clock, and who shares memory.

    Attributes:
        l2_used: None for that of the GPU.
        teams: blocks that are simulated, at least, on as many multiprocessors as that takes.
    """

    latencies: Latencies = Latencies()
    loaders_apart: bool = True
    l2_used: float | None = None
    boost: bool = False
    teams: int = 4


ROWS_OF_TEAMS, ROWS_OF_A_TEAM = 48, 5  # of the generic kernel, one after the other, at least
PREDICTED = Case()
OPTIMISTIC = Case(Latencies(factor=0.8, packet=2.5), l2_used=1.0, boost=True)
PESSIMISTIC = Case(Latencies(factor=1.25, packet=6.5), loaders_apart=False, l2_used=0.5, teams=1)
CASES = PREDICTED, OPTIMISTIC, PESSIMISTIC


def unit(one: Instruction) -> str:
    if one.name not in UNIT:
        raise NotImplementedError(f"no unit is known to execute {one}")
    found = UNIT[one.name]
    return "vector" if found in ("shared", "global") and is_vector(one) else found


def is_vector(one: Instruction) -> bool:
    return "128" in one.opcode.split(".")


Line = tuple[int, int]  # number and bytes


def line(one: Instruction, place: int) -> Line:
    """What a warp accesses at once; the first lane may be at either end."""
    size = 32 * access_bytes(one)
    return place // size, size


def loads(one: Instruction, place: int) -> bool:
    return one.name in ("LDG", "LD") and place >> 32 in ROWS


def first_loads(traces: Iterable[Trace]) -> dict[Line, int]:
    """After how many barriers a warp of the block first loads each line of a row."""
    first: dict[Line, int] = {}
    for trace in traces:
        barriers = 0
        for one, active, place in trace:
            barriers += one.name == "BAR"
            if active and loads(one, place):
                key = line(one, place)
                first[key] = min(barriers, first.get(key, barriers))
    return first


def events(
    trace: Trace, loader: bool = False, first: Mapping[Line, int] | None = None
) -> Iterator[int]:
    """Of every instruction; by ``first_loads`` of the block, others of a line are loads again."""
    first = first_loads([trace]) if first is None else first
    barriers, read = 0, set()
    for one, active, place in trace:
        words = one.opcode.split(".")
        what = {"UBLKCP": LOAD, "STAS": SEND, "BAR": BARRIER}.get(one.name, PLAIN)
        if not active:
            what = PLAIN
        elif one.name == "SYNCS" and "PHASECHK" in words:
            what = FREE if loader else SUMS if place in SUMS_ARRIVED else WAIT
        elif one.name == "SYNCS" and "A1T0" in words:
            what = RELEASE
        elif loads(one, place):
            key = line(one, place)
            what = REREAD if key in read or barriers > first[key] else READ
            read.add(key)
        elif one.name in ("STG", "ST") and place >> 32 in ROWS:
            what = STORE
        yield what
        barriers += one.name == "BAR"


def steps(
    trace: Trace, loader: bool = False, first: Mapping[Line, int] | None = None
) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(UNITS)}
    rows = [
        (one.stall, one.waits, one.writes, one.reads, numbers[unit(one)], what)
        + (32 * access_bytes(one) if what in MOVING else 0,)
        for (one, *_), what in zip(trace, events(trace, loader, first), strict=True)
    ]
    return np.array(rows, STEP)


@functools.cache
def _library() -> ctypes.CDLL:
    library = Path(tempfile.mkdtemp()) / "simulate.so"
    source = Path(__file__).with_name("simulate.cpp")
    options = "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"
    subprocess.run(["c++", *options, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Prediction:
    cycles: float  # of a multiprocessor per row of a block
    copy: float  # that a copy takes for its bytes
    clock: float
    issue: tuple[float, ...]  # share of the cycles in which a sub-partition issues

    @property
    def over_copy(self) -> float:
        return self.cycles / self.copy


def costs(gpu: GPU, factor: float) -> np.ndarray:
    """Interval and latency of every unit."""
    intervals = {"fma": 128 / gpu.fp32, "double": 128 / gpu.fp64}
    rows = [(intervals.get(name, UNITS[name][0]), factor * UNITS[name][1]) for name in UNITS]
    return np.array(rows, "f8")


def predict(code: Sequence[np.ndarray], plan: Plan, gpu: GPU, case: Case = PREDICTED) -> Prediction:
    """From the steps of all warps of a block."""
    if case.boost and gpu.boost:
        gpu = replace(gpu, clock=gpu.boost)
    stores = any((each["event"] == STORE).any() for each in code)
    moved = plan.row_bytes * (1 + stores)
    speed = gpu.copy / gpu.multiprocessors / gpu.clock
    ends = np.cumsum([len(each) for each in code])
    placed = []
    many = -(-case.teams // plan.blocks)  # multiprocessors
    teams = many * plan.blocks
    for team in range(teams):
        block, at = divmod(team, many)
        # Warps lie on the sub-partitions in turn, and blocks start apart.
        begin = round(team / many * moved / speed)
        for i, end in enumerate(ends):
            loads = i >= plan.warps
            place = block * len(code) + i if case.loaders_apart or not loads else 0
            placed.append((end - len(code[i]), end, 4 * at + place % 4, team, loads, begin))
    rows = max(ROWS_OF_TEAMS // teams, ROWS_OF_A_TEAM)
    if plan.cluster:
        rows = len(sends(code[0]["event"]))
    lat = case.latencies
    live = plan.blocks * plan.row_bytes
    in_flight = live * gpu.multiprocessors
    l2_used = case.l2_used or gpu.l2_used
    # Of a chunk on average: the traces are of the block that has most of a row.
    full = plan.row_bytes / (plan.chunks * plan.chunk_bytes) if plan.cluster else 1.0
    settings = [
        *(lat.factor * each for each in (lat.memory, lat.l2, lat.l1, lat.operands, lat.barrier)),
        lat.factor * lat.exchange + packets(code[0]["event"], plan) * lat.packet,
        *(lat.factor * each for each in (lat.load, lat.block_start)),
        many * speed,
        many * gpu.l2_speed / gpu.multiprocessors / gpu.clock,
        min(1.0, gpu.l1 / live),
        min(1.0, l2_used * gpu.l2 / in_flight),
        full * plan.chunk_bytes,
        full,
        plan.stages,
    ]
    finished = np.zeros((teams, rows))
    issued, last = np.zeros(4), np.zeros(1)
    _simulate(
        np.concatenate(code),
        np.array(placed, "i4"),
        costs(gpu, lat.factor),
        np.array(settings, "f8"),
        finished,
        issued,
        last,
        many,
    )
    skipped = rows // 4
    # While all blocks are busy, and load.
    begin, end = finished[:, skipped].max(), finished[:, -1 - skipped // 2].min()
    done = sum(np.diff(np.interp((begin, end), times, range(rows)))[0] for times in finished)
    # What the rings held at the start would make the first rows faster than memory.
    cycles = max((end - begin) / float(done) * many, moved / speed)
    shares = issued / last / many
    return Prediction(cycles, moved / speed, gpu.clock, tuple(shares.tolist()))


def sends(what: np.ndarray) -> np.ndarray:
    """Where the cluster kernel begins to send the sums of each row."""
    places = np.flatnonzero(np.isin(what, (SEND, WAIT)))
    kinds = what[places]
    return places[1:][(kinds[1:] == SEND) & (kinds[:-1] == WAIT)]


def packets(what: np.ndarray, plan: Plan) -> float:
    """Stores of sums that a block of a cluster receives per row, from the events of a warp."""
    rows = len(sends(what))
    return (what == SEND).sum() / rows * plan.warps * plan.cluster if rows else 0.0


def _simulate(steps, placed, costs, settings, finished, issued, last, many) -> None:
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    blocks, rows = finished.shape
    _library().simulate(
        pointer(steps),
        pointer(placed),
        len(placed),
        pointer(costs),
        len(costs),
        pointer(settings),
        blocks,
        4 * many,
        rows,
        *map(pointer, (finished, issued, last)),
    )
