"""The commands of ``python -m bapo_kernels``.

May import typer and rich, which the package does not need, and, inside of a command, its tool.
Scripts use options and exit statuses: a failed check that exits with 0 would pass there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from json import dumps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from typer import BadParameter, Option, Typer

if TYPE_CHECKING:
    from .validate import Check, Task

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses a file that cannot be made; Click itself checks only files that exist."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise BadParameter(f"no file can be made in {path.parent}")
    return path


def _can_be_drawn(path: Path | None) -> Path | None:
    if path is not None and find_spec("matplotlib") is None:
        raise BadParameter("a figure needs matplotlib: pip install matplotlib")
    if path is not None and path.suffix not in (formats := (".pdf", ".png", ".svg")):
        raise BadParameter(f"a figure must end in one of {formats}, got {path.name!r}")
    return _in_a_folder(path)


File = Annotated[Path | None, Option(dir_okay=False, writable=True, callback=_in_a_folder)]
Picture = Annotated[Path | None, Option(dir_okay=False, writable=True, callback=_can_be_drawn)]


def commands() -> Typer:
    """The application of all commands."""
    about = "Without a command: versions, and which backends run here. --version: its own alone."
    names = {"help_option_names": ["-h", "--help"]}
    app = Typer(help=about, add_completion=False, context_settings=names)
    app.command()(validate)
    app.command()(bench)
    return app


def validate(
    device: Device | None = None,
    backend: list[str] | None = None,
    dtype: Dtype | None = None,
    require: list[str] | None = None,
    limit: Annotated[float, Option(min=0.0)] = 120.0,
    json: File = None,
) -> None:
    """Checks the kernels of this machine against the reference in float64.

    The device defaults to the GPU if there is one. --backend may be repeated and defaults to every
    backend that can run on the device; --dtype restricts the checks to one dtype. --require, which
    may be repeated, names a backend that must have been checked. The cases run in another process;
    one that takes more than --limit seconds, or ends its process, has failed, and the others go on
    in a new one. With 0 they run in this process, without a limit. --json names a file for a report
    to attach to an issue. The exit status is 0 if no check failed and none is missing.
    """
    from .validate import machine, run, why_not_on

    report: dict[str, Any] = {"plan": {}, "machine": {}, "running": None, "lost": [], "checks": []}

    def keep() -> None:
        if json is not None:
            json.write_text(dumps(report, indent=1) + "\n")

    def selected(tasks: Sequence[Task]) -> Iterator[Task]:
        tasks = [t for t in tasks if dtype is None or t.dtype == getattr(torch, dtype)]
        names = dict.fromkeys(task.backend for task in tasks)
        left = {name: why or "not asked for" for name, why in why_not_on(on).items()}
        words = [f"{name} ({why})" for name, why in left.items() if name not in names]
        plan = {"device": on, "backends": [*names], "not checked": ", ".join(words)}
        report["plan"] = plan | {"limit": limit, "cases": [_name(task) for task in tasks]}
        report["machine"] = machine(on)
        limited = f"each in at most {limit:g} s" if limit else "without a limit"
        where = report["machine"].get("gpu", on)
        print(f"{len(tasks)} cases of {', '.join(names)} on {where}, {limited}", flush=True)
        if words:
            print("not checked:", plan["not checked"], flush=True)
        progress = track(tasks, "cases", console=Console(stderr=True), transient=True)
        for number, task in enumerate(progress, 1):
            report["running"] = _name(task)
            keep()
            print(f"{number}/{len(tasks)} {_name(task)}", file=sys.stderr, flush=True)
            yield task
        report["running"] = None

    def tell(check: Check) -> None:
        report["checks"].append(_row(check))
        if check.quantity == "process":
            report["lost"].append(f"{_name(check)}: {check.note}")
        if not check.passed:
            print(f"{_name(check)}: {check.words}", flush=True)

    try:
        checks = run(on := _device(device), backend, selected, tell, limit)
    except (ValueError, ChildProcessError) as error:
        raise SystemExit(report.setdefault("stopped", str(error))) from None
    finally:
        keep()
    failed = [check for check in checks if not check.passed]
    if shares := {c.error / c.budget: c for c in checks if c.passed and c.budget}:
        closest = shares[max(shares)]
        print(f"closest to its budget: {_name(closest)}: {closest.words}")
    backends = ", ".join(dict.fromkeys(check.backend for check in failed))
    print(f"{len(checks)} checks, {len(failed)} failed", *([f"on {backends}"] if failed else ()))
    if left := report["plan"]["not checked"]:
        print("not checked:", left)
    if missing := [name for name in require or () if name not in report["plan"]["backends"]]:
        print("required, but not checked:", ", ".join(missing))
    raise SystemExit(1 if failed or missing else 0)


def bench(
    tokens: Annotated[int, Option(min=1)] = 512,
    vocab: Annotated[int, Option(min=2)] = 151_936,
    hidden: Annotated[int | None, Option(min=1)] = None,
    dtype: Dtype = "bfloat16",
    device: Device | None = None,
    backend: list[str] | None = None,
    frozen: Annotated[bool, Option("--frozen")] = False,
    plot: Picture = None,
    json: File = None,
) -> None:
    """Times loss and gradients on this machine, beside PyTorch's.

    From logits, or with --hidden from hidden states of that width; with --frozen the head needs no
    gradient. The rows are those of a language model, and the search acts. A kernel that is wrong on
    8 of them is named, and not timed. --device and --backend are as in validate; --plot names a
    file for a figure, --json one for all numbers. The exit status is 0 if all kernels were timed.
    """
    from . import bench as tool
    from .validate import machine

    if frozen and hidden is None:
        raise BadParameter("needs --hidden: logits come without a head", param_hint="'--frozen'")
    try:
        sizes = tool.Sizes(tokens, vocab, hidden or 0, dtype, _device(device), frozen)
        console = Console(stderr=True)
        with console.status("", refresh_per_second=2) as status:  # a thread beside what is timed
            rows = tool.run(sizes, backend, status.update)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(tool.title(sizes), tool.table(sizes, rows), sep="\n")
    if json is not None:
        kept = [asdict(row) | {"failed": [*map(_row, row.failed)]} for row in rows]
        report = {"sizes": asdict(sizes), "machine": machine(sizes.device), "rows": kept}
        json.write_text(dumps(report, indent=1) + "\n")
    if plot is not None:
        tool.draw(sizes, rows, plot)
    ours = [row for row in rows if row.name.startswith(tool.OURS)]
    raise SystemExit(1 if any(row.why_not for row in ours) else 0)


def _name(case: Task | Check) -> str:
    return f"{case.backend}, {case.case}, {str(case.dtype).removeprefix('torch.')}"


def _device(name: Device | None) -> str:
    from .validate import why_not_on

    if name == "cuda" and not torch.cuda.is_available():
        reason = why_not_on("cpu")["cuda"]
        raise ValueError(f"device must be one that torch can use, got 'cuda' ({reason})")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _row(check: Check) -> dict[str, Any]:
    row = asdict(check) | {"passed": check.passed}
    for name in ("error", "budget"):
        if not isfinite(row[name]):  # JSON has no NaN
            row[name] = str(row[name])
    return row
