"""Measures a suite: everybody on every case, in turns, after their answers were checked."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import gate
from .cases import Batch, Case
from .floor import Floor, floor
from .peers import Peer, peers
from .records import Record
from .timing import Call, Clock, Timed, clock_of, summary

ROUNDS = 5
SECONDS = 12.0  # after which a slow one gets no more than three turns


class Interrupted(KeyboardInterrupt):
    """Carries the records that a case had until then."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__()
        self.records = records


def run(
    cases: Iterable[Case],
    device: str,
    only: list[str],
    minutes: float,
    console: Console,
    without: Sequence[str] = (),
) -> Iterator[list[Record]]:
    """Records, case by case; prints a table a case, and a bar of the progress.

    No case is begun after ``minutes``. Of one that is interrupted come the records it had.
    """
    quiet()
    cases, begin = list(cases), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(cases))
        for i, case in enumerate(cases):
            if time.monotonic() - begin > 60 * minutes:
                console.print(f"The time is up: {len(cases) - i} cases are left.")
                return
            progress.update(bar, description=case.title)
            try:
                records = measure(case, device, only, without)
            except Interrupted as interrupted:
                console.print(table(case, interrupted.records))
                yield interrupted.records
                raise
            console.print(table(case, records))
            yield records
            progress.advance(bar)


def wide_console() -> Console:
    """Of the terminal, or wide enough for a table."""
    return Console(width=None if Console().is_terminal else 140)


def quiet() -> None:
    """The reference reads values: graph breaks and recompilations are expected."""
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    torch._dynamo.config.cache_size_limit = 1_000
    warnings.filterwarnings("ignore")


def measure(case: Case, device: str, only: list[str], without: Sequence[str] = ()) -> list[Record]:
    """The yardstick first, then everybody: a record each, also of those who cannot.

    Raises:
        Interrupted: by the user, or by an error after which this process cannot use the device.
            A user's interrupt leaves one turn to those who were ready.
    """
    batch, clock = Batch(case, device), clock_of(device)
    shares, expected = batch.shares(), gate.value_at_full_size(batch)
    records: list[Record] = []
    calls: dict[str, Timed] = {}
    found: dict[str, Record] = {}
    interrupted = False
    try:
        for peer in peers():
            named = not only or any(name in peer.name for name in only)
            if not named or any(name in peer.name for name in without) or not peer.takes(case):
                continue
            record: Record = {"who": peer.name, "version": peer.version, **case.fields()}
            try:
                why_not = peer.why_not(case, device)
                if why_not is not None:
                    records.append({**record, "status": "absent", "why": why_not})
                    continue
                calls[peer.name], facts = _ready(peer, batch, expected, clock)
                need = floor(case, shares, peer.live)
                found[peer.name] = record | facts | need._asdict()
            except gate.WrongAnswerError as error:
                records.append({**record, "status": "wrong", "why": str(error)})
            except Exception as error:  # a package may fail in any way; the others go on
                records.append({**record, "status": "failed", "why": _in_words(error)})
            batch.release()
        yardstick = _yardstick(batch)
    except KeyboardInterrupt:
        interrupted, yardstick = True, _yardstick(batch)
    except torch.AcceleratorError as error:
        raise Interrupted(records) from error
    if yardstick is not None:
        name, need, call = yardstick
        calls = {name: Timed(call, graph=True), **calls}
        found[name] = {"who": name, **case.fields(), **need._asdict()}
    times, failures, stopped = in_turns(calls, clock, 1 if interrupted else ROUNDS)
    for name, why in failures.items():
        records.append({**found[name], "status": "failed", "why": why})
    for name in times:
        rates = _rates(found[name], times[name])
        records.append({**found[name], "status": "measured", "shares": shares, **rates})
    records = _with_shares_of(yardstick[0] if yardstick else None, records)
    try:
        batch.release()
    except torch.AcceleratorError as error:
        raise Interrupted(records) from error
    if interrupted or stopped:
        raise Interrupted(records)
    return records


def _ready(peer: Peer, batch: Batch, expected: torch.Tensor, clock: Clock) -> tuple[Timed, Record]:
    """A call whose answers are right, and its errors and peak memory."""
    case = batch.case
    value_error, gradient_error = gate.check(peer, case, batch.device.type)
    own = batch.overwritable() if peer.overwrites else batch
    call = _call(peer, own)
    prepare = partial(own.restore, batch) if peer.overwrites else None
    if prepare is not None:
        prepare()
    gate.check_value(call(), expected, batch)  # compiles, tunes, and warms up
    own.release()
    # From hidden states the number of rows that matter is read on the host.
    timed = Timed(call, prepare, graph=peer.backend is not None and case.level == "logits")
    errors = {"value_error": value_error, "gradient_error": gradient_error}
    return timed, errors | {"peak_bytes": clock.peak_bytes(call)}


def _call(peer: Peer, batch: Batch) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad() if batch.case.task == "log_probs" else nullcontext():
            return peer.step(batch)[0]

    return call


def in_turns(
    calls: dict[str, Timed], clock: Clock, rounds: int = ROUNDS
) -> tuple[dict[str, dict[str, float]], dict[str, str], bool]:
    """Times, who failed why, and whether an interrupt ended it.

    All have a turn a round, so that a slow minute hits everybody.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent, failures = dict.fromkeys(calls, 0.0), {}
    interrupted = False
    try:
        for turn, name in itertools.product(range(rounds), calls):
            if name in failures or (turn >= 3 and spent[name] >= SECONDS):
                continue
            start = time.perf_counter()
            try:
                times[name] += clock.samples(calls[name])
            except Exception as error:
                failures[name] = _in_words(error)
            spent[name] += time.perf_counter() - start
    except KeyboardInterrupt:
        interrupted = True
    measured = {name: summary(ms) for name, ms in times.items() if ms and name not in failures}
    return measured, failures, interrupted


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _yardstick(batch: Batch) -> tuple[str, Floor, Call] | None:
    """A copy of the logits, or the three matrix products of forward and backward."""
    case = batch.case
    inputs = [leaf.detach() for leaf in batch.inputs]
    if case.level == "logits":
        other = torch.empty_like(inputs[0])
        need = Floor(2.0 * other.numel() * other.element_size(), 0.0)
        return "copy", need, lambda: other.copy_(inputs[0])
    if case.level == "hidden":
        hidden, weight = inputs[0].flatten(0, -2), inputs[1]

        def products() -> None:
            for rows in hidden.split(8_192):  # the logits of all would not fit
                logits = rows @ weight.T
                logits @ weight
                logits.T @ rows

        return "three matrix products", Floor(0.0, 6.0 * case.N * case.V * case.H), products
    return None


def _rates(record: Record, times: dict[str, float]) -> Record:
    bytes_moved, flops = record["bytes"], record["flops"]
    rates: Record = dict(times)
    if bytes_moved:
        rates["GB_per_s"] = bytes_moved / times["ms"] / 1e6
    if flops:
        rates["TFLOP_per_s"] = flops / times["ms"] / 1e9
    return rates


def _with_shares_of(yardstick: str | None, records: list[Record]) -> list[Record]:
    """Adds to each record its rate as a share of the yardstick's."""
    best = next((record for record in records if record["who"] == yardstick), {})
    for record in records:
        for rate in ("GB_per_s", "TFLOP_per_s"):
            if rate in record and rate in best:
                record["yardstick"], record["share"] = yardstick, record[rate] / best[rate]
    return records


def table(case: Case, records: list[Record]) -> Table:
    """A case, fastest first; those who were not measured at the end, with the reason."""
    out = Table(title=case.title, title_justify="left")
    out.add_column("", max_width=34)
    for column in ("ms", "20 % .. 80 %", "GB/s", "TFLOP/s", "of yardstick", "peak MiB", "error"):
        out.add_column(column, justify="right")
    measured = [r for r in records if r["status"] == "measured"]
    for r in sorted(measured, key=lambda r: r["ms"]):
        out.add_row(
            r["who"],
            _number(r["ms"]),
            f"{_number(r['ms_20'])} .. {_number(r['ms_80'])}",
            _number(r.get("GB_per_s")),
            _number(r.get("TFLOP_per_s")),
            f"{100 * r['share']:.0f} %" if "share" in r else "",
            _number(r.get("peak_bytes"), 2**20),
            f"{r['gradient_error'] or r['value_error']:.0e}" if "value_error" in r else "",
        )
    reasons: dict[str, list[str]] = {}
    for r in (r for r in records if r["status"] != "measured"):
        reasons.setdefault(f"{r['status']}, {r['why']}", []).append(r["who"])
    out.caption = "\n".join(f"{'; '.join(names)}: {why}" for why, names in reasons.items())
    out.caption_justify = "left"
    return out


def _number(value: Any, unit: float = 1.0) -> str:
    """Three digits."""
    if value is None:
        return ""
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
