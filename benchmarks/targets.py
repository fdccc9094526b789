"""What the kernels may take on a GPU: copies of the logits, or bare matrix products.

A copy reads and writes the logits once, and half of one is a read. Everything is measured in turns
with its yardstick, after its answers were checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rich.console import Console

from bapo_kernels import fused
from bapo_kernels.gemm import CHUNK_BYTES

from .cases import Batch, Case, Level
from .peers import Peer, peers
from .records import Record
from .run import Interrupted, in_turns, measure, quiet, table
from .timing import Call, Timed, clock_of


@dataclass(frozen=True)
class Target:
    """One form of ours on a case, and the most it may take on a backend.

    ``form`` ends the name of the peer; ``unit`` is what the time is divided by, and ``yardsticks``
    how many of the case's yardstick that is.
    """

    name: str
    case: Case
    most: dict[str, float]
    unit: str
    yardsticks: float = 1.0
    form: str = ""

    def result(self, backend: str, records: list[Record]) -> Record:
        """Of the records of the case."""
        made = {r["who"]: r for r in records}
        mine = made.get(f"bapo_kernels {backend}{self.form}", {"status": "not measured"})
        result = _result(self.name, backend, self.most.get(backend), self.unit)
        if "yardstick" not in mine:
            return result | {key: mine[key] for key in ("status", "why") if key in mine}
        keys = ("ms", "ms_20", "ms_80", "GB_per_s", "TFLOP_per_s", "peak_bytes")
        result |= {key: mine[key] for key in keys if key in mine}
        unit_ms = self.yardsticks * made[mine["yardstick"]]["ms"]
        return _judged(result | {"unit_ms": unit_ms, "ratio": mine["ms"] / unit_ms})


def targets(level: Level, N: int, V: int, H: int, dtype: str) -> list[Target]:
    """Those of a level."""

    def case(task: Any = "loss", **options: Any) -> Case:
        return Case(level, task, "Qwen3-8B", N, V, H, dtype, **options)

    if level == "hidden":
        both, products = {"cuda": 1.10, "triton": 1.10}, "three matrix products"
        return [
            Target("from hidden states", case(), both, products),
            Target("from hidden states, one chunk", case(), both, products, form=", one chunk"),
        ]
    dense, mixed = case(data="on-policy"), case(layout="mixed", data="on-policy")
    return [
        Target("all rows live", dense, {"cuda": 1.05, "triton": 1.25}, "copy"),
        Target("mixed rows", mixed, {"cuda": 0.93, "triton": 1.10}, "copy"),
        Target("mixed rows, live", mixed, {"cuda": 0.79, "triton": 0.95}, "copy", form=", live"),
        Target("log-probs", case("log_probs"), {"cuda": 1.10, "triton": 1.15}, "read", 0.5),
    ]


def run(
    level: Level, backend: str, device: str, N: int, V: int, H: int, dtype: str, console: Console
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Records and results, case by case; of one that is interrupted those it had."""
    quiet()
    goals = [g for g in targets(level, N, V, H, dtype) if _peer(backend, g.case, g.form)]
    for case in dict.fromkeys(goal.case for goal in goals):
        interrupt = None
        try:
            records = measure(case, device, [f"bapo_kernels {backend}"])
        except Interrupted as error:
            interrupt, records = error, error.records
        console.print(table(case, records))
        results = [goal.result(backend, records) for goal in goals if goal.case == case]
        if level == "hidden":
            results.append(_extra_memory(results[0], case))
        yield records, [case.fields() | result for result in results]
        if interrupt is not None:
            raise interrupt
    if level == "logits":
        dense = goals[0].case
        yield [], [dense.fields() | beyond_the_row_pass(dense, backend, device)]


def beyond_the_row_pass(case: Case, backend: str, device: str) -> Record:
    """The share of a call that search, loss, metrics and backward take."""
    batch, clock = Batch(case, device), clock_of(device)
    peer = _peer(backend, case)
    assert peer is not None
    calls = {
        "whole": Timed(lambda: peer.step(batch), graph=True),
        "row pass": Timed(_row_pass_of(peer, batch), graph=True),
    }
    result = _result("beyond the row pass", backend, 0.03, "call")
    times, failures, _ = in_turns(calls, clock)
    if len(times) < len(calls):
        return result | {"status": "failed", "why": "; ".join(failures.values())}
    whole, rows = (times[name]["ms"] for name in calls)
    share = (whole - rows) / whole
    return _judged(result | {"ms": whole - rows, "unit_ms": whole, "ratio": share})


def _peer(backend: str, case: Case, form: str = "") -> Peer | None:
    name = f"bapo_kernels {backend}{form}"
    return next((p for p in peers() if p.name == name and p.takes(case)), None)


def _row_pass_of(peer: Peer, batch: Batch) -> Call:
    """The operator with the arguments it has in a call."""
    seen: list[Call] = []

    class Recorder:
        def __init__(self, ops: Any) -> None:
            self.ops = ops

        def __getattr__(self, name: str) -> Any:
            op = getattr(self.ops, name)
            if name != "row_pass":
                return op

            def recorded(*arguments: Any) -> None:
                seen.append(lambda: op(*arguments))
                op(*arguments)

            return recorded

    ops_of = fused.ops_of
    with mock.patch.object(fused, "ops_of", lambda backend: Recorder(ops_of(backend))):
        peer.step(batch)
    return seen[0]


def _extra_memory(result: Record, case: Case) -> Record:
    """What a call needs beside the gradients it returns, in chunks."""
    extra = _result("extra memory", result["backend"], 1.0, "chunk")
    if "peak_bytes" not in result:
        return extra
    itemsize = 4 if case.dtype == "float32" else 2
    gradients = (case.N + case.V) * case.H * itemsize
    beyond = result["peak_bytes"] - gradients
    return _judged(extra | {"bytes": beyond, "ratio": beyond / CHUNK_BYTES})


def _result(name: str, backend: str, most: float | None, unit: str) -> Record:
    return {"target": name, "backend": backend, "most": most, "unit": unit, "status": "failed"}


def _judged(result: Record) -> Record:
    most = result["most"]
    met = None if most is None else bool(result["ratio"] <= most)
    return result | {"status": "measured", "met": met}


def in_words(result: Record) -> str:
    """A line."""
    name = f"{result['backend']}, {result['target']}:"
    if result["status"] != "measured":
        return f"{name} {result['status']} {result.get('why', '')}"
    most = result["most"]
    met = "met" if result["met"] else "missed"
    verdict = "no target" if most is None else f"target {most}, {met}"
    time = f"{result['ms']:.3f} ms, " if "ms" in result else ""
    return f"{name} {time}{result['ratio']:.3f} x {result['unit']}; {verdict}"


def verdict(results: list[Record]) -> str:
    """All results in a line."""
    ratios = (f"{r['target']} {r['ratio']:.2f}" if "ratio" in r else r["target"] for r in results)
    missed = [r["target"] for r in results if r.get("met") is False]
    failed = [r["target"] for r in results if r["status"] != "measured"]
    words = [", ".join(ratios)]
    words += [f"missed: {', '.join(missed)}"] if missed else []
    words += [f"failed: {', '.join(failed)}"] if failed else []
    return "; ".join(words)
