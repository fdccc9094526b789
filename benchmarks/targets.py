"""Target times of the kernels on a GPU, in copies of the logits or in bare matrix products.

A copy reads and writes the logits once, so half a copy is a read. Every method takes turns with its
yardstick, after its results have passed the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from rich.console import Console

from bapo_kernels.core import rows as passes
from bapo_kernels.core.head.head import CHUNK_BYTES

from .cases import Batch, Case, Level
from .methods import Method, methods
from .records import Record
from .run import Interrupted, in_turns, measure, quiet, selected, shown
from .timing import Call, Timed, clock_of


@dataclass(frozen=True)
class Target:
    """A variant of ours on a case, and the most time it may take on a backend.

    ``form`` ends the name of the method; the time is divided by the ``unit``, which is the case's
    yardstick times ``yardsticks``.
    """

    name: str
    case: Case
    most: dict[str, float]
    unit: str
    yardsticks: float = 1.0
    form: str = ""

    def result(self, backend: str, records: list[Record], missing: dict[str, str]) -> Record:
        """The result, from the records of the case and the reasons of methods without one."""
        made = {r["method"]: r for r in records}
        name = f"bapo_kernels {backend}{self.form}"
        mine = made.get(name, {"status": "not measured", "why": missing.get(name, "")})
        result = _result(self.name, backend, self.most.get(backend), self.unit)
        if "yardstick" not in mine:
            return result | {key: mine[key] for key in ("status", "why") if key in mine}
        keys = ("ms", "ms_20", "ms_80", "GB_per_s", "TFLOP_per_s", "peak_bytes")
        result |= {key: mine[key] for key in keys if key in mine}
        unit_ms = self.yardsticks * made[mine["yardstick"]]["ms"]
        return _judged(result | {"unit_ms": unit_ms, "ratio": mine["ms"] / unit_ms})


def targets(level: Level, N: int, V: int, H: int, dtype: str) -> list[Target]:
    """The targets of a level."""

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
        Target("all rows active", dense, {"cuda": 1.05, "triton": 1.25}, "copy"),
        Target("mixed rows", mixed, {"cuda": 0.93, "triton": 1.10}, "copy"),
        Target("mixed rows, live", mixed, {"cuda": 0.79, "triton": 0.95}, "copy", form=", live"),
        Target("log-probs", case("log_probs"), {"cuda": 1.10, "triton": 1.15}, "read", 0.5),
    ]


def run(
    level: Level, backend: str, device: str, N: int, V: int, H: int, dtype: str, console: Console
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Yields records and results of each case; of an interrupted one, those that are complete."""
    quiet()
    goals = [g for g in targets(level, N, V, H, dtype) if _method(backend, g.case, g.form)]
    for case in dict.fromkeys(goal.case for goal in goals):
        interrupt = None
        try:
            records = measure(case, device, [f"bapo_kernels {backend}"])
        except Interrupted as error:
            interrupt, records = error, error.records
        console.print(shown(case, records))
        _, missing = selected(case, device, [f"bapo_kernels {backend}"])
        results = [goal.result(backend, records, missing) for goal in goals if goal.case == case]
        if level == "hidden":
            results.append(_extra_memory(results[0], case))
        yield records, [case.fields() | result for result in results]
        if interrupt is not None:
            raise interrupt
    if level == "logits":
        dense = goals[0].case
        yield [], [dense.fields() | beyond_the_row_pass(dense, backend, device)]


def beyond_the_row_pass(case: Case, backend: str, device: str) -> Record:
    """The share of a call that is spent on search, loss, metrics and backward."""
    batch, clock = Batch(case, device), clock_of(device)
    method = _method(backend, case)
    assert method is not None
    calls = {
        "whole": Timed(lambda: method.step(batch), graph=True),
        "row pass": Timed(_row_pass_of(method, batch), graph=True),
    }
    result = _result("beyond the row pass", backend, 0.03, "call")
    times, failures, _ = in_turns(calls, clock)
    if len(times) < len(calls):
        return result | {"status": "failed", "why": "; ".join(failures.values())}
    whole, rows = (times[name]["ms"] for name in calls)
    share = (whole - rows) / whole
    return _judged(result | {"ms": whole - rows, "unit_ms": whole, "ratio": share})


def _method(backend: str, case: Case, form: str = "") -> Method | None:
    name = f"bapo_kernels {backend}{form}"
    return next((p for p in methods() if p.name == name and p.takes(case)), None)


def _row_pass_of(method: Method, batch: Batch) -> Call:
    """The operator with the arguments of a call."""
    ops_of, seen = passes.ops_of, list[Call]()

    def recording(backend: str) -> Any:
        ops = ops_of(backend)

        def row_pass(*arguments: Any) -> None:
            seen.append(partial(ops.row_pass, *arguments))
            seen[-1]()

        return mock.Mock(wraps=ops, row_pass=row_pass)

    with mock.patch.object(passes, "ops_of", recording):
        method.step(batch)
    return seen[0]


def _extra_memory(result: Record, case: Case) -> Record:
    """Memory of a call beyond the gradients that it returns, in chunks."""
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
    met = None if result["most"] is None else bool(result["ratio"] <= result["most"])
    return result | {"status": "measured", "met": met}


def in_words(result: Record) -> str:
    """A result in one line."""
    name = f"{result['backend']}, {result['target']}:"
    if result["status"] != "measured":
        return f"{name} {result['status']} {result.get('why', '')}"
    verdict = "no target"
    if result["met"] is not None:
        verdict = f"target {result['most']}, {'met' if result['met'] else 'missed'}"
    time = f"{result['ms']:.3f} ms, " if "ms" in result else ""
    return f"{name} {time}{result['ratio']:.3f} x {result['unit']}; {verdict}"


def verdict(results: list[Record]) -> str:
    """All results in one line."""
    ratios = (f"{r['target']} {r['ratio']:.2f}" if "ratio" in r else r["target"] for r in results)
    missed = [r["target"] for r in results if r.get("met") is False]
    failed = [r["target"] for r in results if r["status"] != "measured"]
    words = [", ".join(ratios)]
    words += [f"missed: {', '.join(missed)}"] if missed else []
    words += [f"failed: {', '.join(failed)}"] if failed else []
    return "; ".join(words)
