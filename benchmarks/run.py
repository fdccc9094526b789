"""Measures a suite: on every case, the methods whose results are correct take turns."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bapo_kernels import log_probs

from . import gate
from .cases import HEAD, SAMPLING_MASK, Batch, Case
from .console import digits, spread, table
from .floor import Floor, floor
from .methods import Method, methods
from .records import Record
from .timing import Call, Clock, Timed, clock_of, summary

ROUNDS = 5
SECONDS = 12.0  # after which a slow method gets no more than three turns


class Interrupted(KeyboardInterrupt):
    """Carries the records of a case that were complete at the interrupt."""

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
    """Yields the records of each case, and prints a table per case and a progress bar.

    Methods that cannot run here are printed and have no record. No case is started after
    ``minutes``. An interrupted case yields the records that were complete.
    """
    quiet()
    cases, begin, told = list(cases), time.monotonic(), set()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(cases))
        for i, case in enumerate(cases):
            if time.monotonic() - begin > 60 * minutes:
                console.print(f"The time is up: {len(cases) - i} cases are left.")
                return
            progress.update(bar, description=case.title)
            _, missing = selected(case, device, only, without)
            for name, why in missing.items():
                if (name, why) not in told:
                    console.print(f"{name} is not measured: {why}")
                told.add((name, why))
            try:
                records = measure(case, device, only, without)
            except Interrupted as interrupted:
                console.print(shown(case, interrupted.records))
                yield interrupted.records
                raise
            console.print(shown(case, records))
            yield records
            progress.advance(bar)


def quiet() -> None:
    """Silences torch.compile: the reference reads values, so graph breaks are expected."""
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    torch._dynamo.config.cache_size_limit = 1_000
    warnings.filterwarnings("ignore")


def selected(
    case: Case, device: str, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[list[Method], dict[str, str]]:
    """The methods that can compute a case here, and why the others cannot, by name."""
    able, missing = [], {}
    for method in methods():
        named = not only or any(name in method.name for name in only)
        if not named or any(name in method.name for name in without) or not method.takes(case):
            continue
        why_not = method.why_not(case, device)
        if why_not is None:
            able.append(method)
        else:
            missing[method.name] = why_not
    return able, missing


def measure(case: Case, device: str, only: list[str], without: Sequence[str] = ()) -> list[Record]:
    """One record per yardstick and method, also if a method fails or its result is wrong.

    Raises:
        Interrupted: by the user, or by an error after which this process cannot use the device.
            After the user's interrupt the methods that are ready have one turn.
    """
    records: list[Record] = []
    try:
        return _measure(case, device, selected(case, device, only, without)[0], records)
    except torch.AcceleratorError as error:
        raise Interrupted(records) from error


def _measure(case: Case, device: str, able: list[Method], records: list[Record]) -> list[Record]:
    batch, clock = Batch(case, device), clock_of(device)
    shares, expected = batch.shares(), cache(partial(gate.value_at_full_size, batch))
    calls: dict[str, Timed] = {}
    found: dict[str, Record] = {}
    interrupted = False
    try:
        for method in able:
            record: Record = {"method": method.name, "version": method.version, **case.fields()}
            try:
                calls[method.name], facts = _ready(method, batch, expected, clock)
                need = floor(case, shares, method.live)
                found[method.name] = record | facts | need._asdict()
            except gate.WrongAnswerError as error:
                records.append({**record, "status": "wrong", "why": str(error)})
            except Exception as error:  # a package may fail in any way; the others go on
                records.append({**record, "status": "failed", "why": _in_words(error)})
            batch.release()
    except KeyboardInterrupt:
        interrupted = True
    yardsticks = _yardsticks(batch)
    for name, (need, _) in yardsticks.items():
        found[name] = {"method": name, **case.fields(), **need._asdict()}
    calls = {name: Timed(call, graph=True) for name, (_, call) in yardsticks.items()} | calls
    times, failures, stopped = in_turns(calls, clock, 1 if interrupted else ROUNDS)
    for name, why in failures.items():
        records.append({**found[name], "status": "failed", "why": why})
    for name, of_name in times.items():
        record = found[name] | {"status": "measured", "shares": shares} | of_name
        if record["bytes"]:
            record["GB_per_s"] = record["bytes"] / record["ms"] / 1e6
        if record["flops"]:
            record["TFLOP_per_s"] = record["flops"] / record["ms"] / 1e9
        records.append(record)
    _add_shares_of(next(iter(yardsticks), None), records)
    batch.release()
    if interrupted or stopped:
        raise Interrupted(records)
    return records


def _ready(
    method: Method, batch: Batch, expected: Callable[[torch.dtype], torch.Tensor], clock: Clock
) -> tuple[Timed, Record]:
    """A call whose results have passed the check, with its errors and costs."""
    case = batch.case
    value_error, gradient_error = gate.check(method, case, batch.device.type)
    own = batch.overwritable if method.overwrites else batch
    call = _call(method, own)
    prepare = partial(own.restore, batch) if method.overwrites else None
    if prepare is not None:
        prepare()
    dtype = gate.logits_dtype(method, case)
    gate.check_value(call(), expected(dtype), batch, dtype)  # also compiles, tunes and warms up
    gradients = sum(leaf.grad.nbytes for leaf in own.inputs if leaf.grad is not None)
    own.release()
    # From hidden states the number of counted rows is read on the host.
    timed = Timed(call, prepare, graph=method.backend is not None and case.level == "logits")
    facts = {"value_error": value_error, "gradient_error": gradient_error}
    return timed, facts | {"gradient_bytes": gradients, "peak_bytes": clock.peak_bytes(call)}


def _call(method: Method, batch: Batch) -> Call:
    def call() -> torch.Tensor:
        with torch.set_grad_enabled(batch.case.task != "log_probs"):
            return method.step(batch)[0]

    return call


def in_turns(
    calls: dict[str, Timed], clock: Clock, rounds: int = ROUNDS
) -> tuple[dict[str, dict[str, float]], dict[str, str], bool]:
    """Times, reasons of failures, and whether an interrupt ended the measurement.

    Each method has one turn per round, so that a slow minute of the machine affects all of them.
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


def _yardsticks(batch: Batch) -> dict[str, tuple[Floor, Call]]:
    """A copy of the logits, or the bare matrix products; rates are relative to the first.

    They write to memory that previous calls have touched. A frozen head needs two products, a
    trained one three. With a sampling mask no product is of whole matrices: the yardsticks are a
    copy, of the head from hidden states, and zeros over the logits. Several labels take turns with
    one, of our default backend.
    """
    case = batch.case
    inputs = [leaf.detach() for leaf in batch.inputs]
    found: dict[str, tuple[Floor, Call]] = {}
    if case.level == "logits" or case.sweep == SAMPLING_MASK:
        other = torch.empty_like(inputs[-1])
        found["copy"] = Floor(2.0 * other.nbytes, 0.0), lambda: other.copy_(inputs[-1])
        if case.level == "logits" and case.sweep == SAMPLING_MASK:
            # The memory that methods in place write to, which is restored before each of them.
            own = batch.overwritable.inputs[0].detach()
            found["zeros"] = Floor(float(own.nbytes), 0.0), own.zero_
        if case.task == "vjp":
            leaf, weights = batch.inputs[0], torch.ones_like(batch.old)

            def one_label() -> None:
                leaf.grad = None
                log_probs(leaf, batch.labels)[0].backward(weights)

            found["bapo_kernels, one label"] = Floor(3.0 * other.nbytes, 0.0), one_label
    elif case.level == "hidden":
        hidden, weight = inputs[0].flatten(0, -2), inputs[1]
        most = min(case.N, 8_192)  # the logits of all rows might not fit
        logits = hidden.new_empty(most, case.V)
        gradients = torch.empty_like(hidden), torch.empty_like(weight)

        def products(rows_per_chunk: int) -> None:
            chunks = hidden.split(rows_per_chunk), gradients[0].split(rows_per_chunk)
            for h, dh in zip(*chunks, strict=True):
                z = logits[: h.shape[0]]
                torch.mm(h, weight.T, out=z)
                torch.mm(z, weight, out=dh)
                if not case.frozen:
                    torch.mm(z.T, h, out=gradients[1])

        name = "two matrix products" if case.frozen else "three matrix products"
        need = Floor(0.0, (4.0 if case.frozen else 6.0) * case.N * case.V * case.H)
        found[name] = need, partial(products, most)
        if case.sweep == HEAD:
            found[f"{name}, four chunks"] = need, partial(products, -(-most // 4))
    for _, call in found.values():
        call()
    return found


def _add_shares_of(yardstick: str | None, records: list[Record]) -> None:
    """Adds to each record its rate relative to that of the yardstick."""
    best = next((record for record in records if record["method"] == yardstick), {})
    for record in records:
        for rate in ("GB_per_s", "TFLOP_per_s"):
            if rate in record and rate in best:
                record["yardstick"], record["share"] = yardstick, record[rate] / best[rate]


def shown(case: Case, records: list[Record]) -> Table:
    """The table of a case, fastest first; its caption says why methods were not measured."""
    columns = "", "ms", "20 % .. 80 %", "GB/s", "TFLOP/s", "of yardstick", "peak MiB", "error"
    rows, reasons = [], dict[str, list[str]]()
    for r in sorted(records, key=lambda r: r.get("ms", 0.0)):
        if r["status"] != "measured":
            reasons.setdefault(f"{r['status']}, {r['why']}", []).append(r["method"])
            continue
        rates = digits(r.get("GB_per_s")), digits(r.get("TFLOP_per_s"))
        share = f"{100 * r['share']:.0f} %" if "share" in r else ""
        peak = digits(r.get("peak_bytes"), 2**20)
        error = f"{r['gradient_error'] or r['value_error']:.0e}" if "value_error" in r else ""
        rows.append((r["method"], digits(r["ms"]), spread(r), *rates, share, peak, error))
    made = table(case.title, columns, rows)
    made.caption = "\n".join(f"{'; '.join(names)}: {why}" for why, names in reasons.items())
    made.caption_justify = "left"
    return made
