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
    from .validate import Check, Task

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


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
    app.callback()(lambda: None)  # else a single command would have no name
    return app


def validate(
    device: Device | None = None,
    backend: list[str] | None = None,
    dtype: Dtype | None = None,
    require: list[str] | None = None,
    json: File = None,
) -> None:
    """Checks the kernels of this machine against the reference in float64.

    The device defaults to the GPU if there is one. --backend may be repeated and defaults to every
    backend that can run on the device; --dtype restricts the checks to one dtype. --require, which
    may be repeated, names a backend that must have been checked. --json names a file that receives
    one line per check as it is made. The exit status is 0 if no check failed and none is missing.
    """
    from .validate import run, why_not_on

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
            checks = run(on := _device(device), backend, selected, tell)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    for name in dict.fromkeys(check.backend for check in checks):
        _console().print(_checks_table(name, [c for c in checks if c.backend == name]))
    failed = [check for check in checks if not check.passed]
    backends = ", ".join(dict.fromkeys(check.backend for check in failed))
    print(f"{len(checks)} checks, {len(failed)} failed", *([f"on {backends}"] if failed else ()))
    checked = {check.backend for check in checks}
    left = {name: why or "not asked for" for name, why in why_not_on(on).items()}
    words = [f"{name} ({why})" for name, why in left.items() if name not in checked]
    if words:
        print("not checked:", ", ".join(words))
    if missing := [name for name in require or () if name not in checked]:
        print("required, but not checked:", ", ".join(missing))
    raise SystemExit(1 if failed or missing else 0)


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
