"""The commands of ``python -m bapo_kernels``. They need typer and rich, the package does not.

May import these two and, inside of a command, its tool. Options and exit statuses are used by
scripts: a failed check that exits with 0 would pass there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from json import dumps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer import BadParameter, Option, Typer

if TYPE_CHECKING:
    from .profile import Profile
    from .validate import Check, Task

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Size = Annotated[int, Option(min=1)]
Share = Annotated[float, Option(min=0, max=1)]


def _in_a_folder(path: Path | None) -> Path | None:
    """Click's own checks are of files that exist."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise BadParameter(f"no file can be made in {path.parent}")
    return path


File = Annotated[Path | None, Option(dir_okay=False, writable=True, callback=_in_a_folder)]


def commands() -> Typer:
    """The application of all commands."""
    about = "Without a command: versions, and which backends run here. --version: its own alone."
    names = {"help_option_names": ["-h", "--help"]}
    app = Typer(help=about, add_completion=False, context_settings=names)
    app.command()(validate)
    app.command()(profile)
    return app


def validate(
    device: Device | None = None,
    backend: list[str] | None = None,
    dtype: Dtype | None = None,
    json: File = None,
) -> None:
    """Checks the kernels of this machine against the reference in float64.

    The device defaults to the GPU if there is one. --backend may be repeated and defaults to every
    backend that can run on the device; --dtype restricts the checks to one dtype. --json names a
    file that receives one line per check as it is made. The exit status is 0 if no check failed.
    """
    from .validate import run

    def selected(tasks: Sequence[Task]) -> Iterable[Task]:
        wanted = None if dtype is None else getattr(torch, dtype)
        return _with_progress([t for t in tasks if wanted in (None, t.dtype)])

    def tell(check: Check) -> None:
        if file is not None:
            print(_json(check), file=file, flush=True)
        if not check.passed:
            where = f"{check.backend}, {check.case}, {check.dtype}"
            numbers = f"{check.quantity} off by {check.error:.1e}, budget {check.budget:.1e}"
            print(f"{where}: {check.note or numbers}", flush=True)

    with nullcontext() if json is None else json.open("w") as file:
        try:
            checks = run(_device(device), backend, selected, tell)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    for name in dict.fromkeys(check.backend for check in checks):
        _console().print(_checks_table(name, [c for c in checks if c.backend == name]))
    failed = [check for check in checks if not check.passed]
    backends = ", ".join(dict.fromkeys(check.backend for check in failed))
    print(f"{len(checks)} checks, {len(failed)} failed", *([f"on {backends}"] if failed else ()))
    raise SystemExit(1 if failed else 0)


def profile(
    device: Device | None = None,
    backend: str | None = None,
    tokens: Size = 256,
    vocab: Size = 151_936,
    hidden: Annotated[int | None, Option(min=1)] = None,
    dtype: Dtype = "bfloat16",
    masked: Share = 0.0,
    idle: Share = 0.0,
    statistics: Literal["all", "live"] = "all",
    inplace: bool = False,
    trace: File = None,
) -> None:
    """Shows where the time of a loss with gradients goes, from logits or from hidden states.

    --hidden is the size of the hidden states; without it the call starts from logits. --masked and
    --idle are the shares of tokens that are masked and that have no advantage. --trace names a file
    for the profile of one call, to be opened with chrome://tracing or Perfetto.
    """
    from .profile import Workload, run

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs each start and stop
    try:
        workload = Workload(
            device=_device(device),
            backend=backend,
            tokens=tokens,
            vocab=vocab,
            hidden=hidden,
            dtype=getattr(torch, dtype),
            masked=masked,
            idle=idle,
            statistics=statistics,
            inplace=inplace,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    name = f"bapo_linear_loss, hidden size {hidden:,}" if hidden else "bapo_loss"
    print(f"{name}, {tokens:,} tokens, vocabulary {vocab:,}, {dtype}, backend {workload.backend}")

    def tell(name: str, ms: float) -> None:
        print(f"{name:<38}{ms:>10,.2f} ms", flush=True)

    _console().print(_profile_table(run(workload, trace, tell)))


def _device(name: Device | None) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that torch can use, got 'cuda'")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _console() -> Console:
    return Console(markup=False, highlight=False)


def _with_progress(tasks: Sequence[Task]) -> Iterable[Task]:
    return track(tasks, "cases", console=Console(stderr=True), transient=True)


def _checks_table(backend: str, checks: list[Check]) -> Table:
    table = Table(title=f"{backend} against float64")
    for column in ("case", "dtype", "quantity", "error", "budget", "verdict"):
        table.add_column(column, justify="right" if column in ("error", "budget") else "left")
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        row = check.case, check.dtype, check.quantity
        numbers = f"{check.error:.1e}", f"{check.budget:.1e}"
        table.add_row(*row, *numbers, verdict, style=None if check.passed else "bold red")
    return table


def _json(check: Check) -> str:
    row = asdict(check) | {"passed": check.passed}
    for name in ("error", "budget"):
        if not isfinite(row[name]):  # JSON has no NaN
            row[name] = str(row[name])
    return dumps(row)


def _profile_table(profile: Profile) -> Table:
    table = Table(show_footer=True)
    table.add_column("part", "a call under the profiler")
    footers = {"ms": f"{profile.profiled:,.2f}", "share": "100.0%", "MB": "", "GB/s": ""}
    for column, footer in footers.items():
        table.add_column(column, footer, justify="right")
    for part in profile.parts:
        row = [part.name, f"{part.ms:,.2f}", f"{part.ms / profile.profiled:.1%}"]
        if part.bytes is not None:
            row += [f"{part.bytes / 1e6:,.0f}", f"{part.bytes / part.ms / 1e6:,.1f}"]
        table.add_row(*row)
    return table
