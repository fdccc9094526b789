"""``python -m benchmarks``: measures our kernels and the baselines, draws figures, writes pages."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

from bapo_kernels.debug import instruction_set

from .cases import Level, cpu_suite, gpu_suite
from .console import wide_console
from .records import append, environment, file_of
from .run import run as measure

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


Device = Annotated[str, typer.Option(help="cpu or cuda")]


def _check_device(device: str) -> None:
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        rule = "must be cpu, or cuda where torch can use a GPU"
        raise typer.BadParameter(f"{rule}, got {device!r}", param_hint="--device")


@app.command()
def run(
    device: Device = "cpu",
    only: Annotated[
        list[str] | None, typer.Option(help="part of a method's name; repeatable")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="part of a case's title; repeatable")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="part of a name to leave out")] = None,
    minutes: Annotated[float, typer.Option(help="start no case after this time")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="JSON lines file for the records")] = None,
) -> None:
    """Measures every method on every case of a suite and appends the records to a file."""
    _check_device(device)
    suite = list(gpu_suite() if device == "cuda" else cpu_suite())
    chosen = [c for c in suite if not case or any(part in c.title for part in case)]
    if not chosen:
        titles = "\n".join(c.title for c in suite)
        raise typer.BadParameter(f"no title has {case} in it; they are\n{titles}")
    facts, path = environment(device), out or file_of(device)
    limited = torch.backends.cpu.get_cpu_capability() == "AVX2"  # maybe by ATEN_CPU_CAPABILITY
    with instruction_set("avx2") if limited else nullcontext():
        for records in measure(chosen, device, only or [], minutes, wide_console(), without or []):
            append(path, [{**facts, **record} for record in records])


@app.command()
def targets(
    device: Device = "cuda",
    backend: Annotated[str, typer.Option(help="backend of this package")] = "cuda",
    level: Annotated[Level, typer.Option(help="logits or hidden")] = "logits",
    tokens: int = 8_192,
    vocab: int = 151_936,
    hidden: int = 4_096,
    dtype: str = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="JSON lines file for the records")] = None,
    json: Annotated[Path | None, typer.Option(help="JSON lines file for the results")] = None,
) -> None:
    """Measures a backend against a copy, or the bare matrix products, and reports its targets.

    The exit status is 0 if everything could be measured, whether or not a target is met.
    """
    from .targets import in_words, run, verdict

    _check_device(device)
    facts, found = environment(device), []
    sizes = tokens, vocab, hidden, dtype
    for records, results in run(level, backend, device, *sizes, wide_console()):
        append(out or file_of(device), [facts | record for record in records])
        if json is not None:
            append(json, [facts | result for result in results])
        for result in results:
            print(in_words(result), flush=True)
        found += results
    print(verdict(found))
    raise typer.Exit(any(result["status"] != "measured" for result in found))


@app.command()
def plot() -> None:
    """Draws the figures of docs/internals/benchmarks.md from the records."""
    from .plot import plot as draw

    print(*draw("cpu"), *draw("cuda"), sep="\n")


@app.command()
def report() -> None:
    """Writes the tables of docs/internals/benchmarks.md and of the README from the records."""
    from .report import write

    print(*write(), sep="\n")


if __name__ == "__main__":
    app()
