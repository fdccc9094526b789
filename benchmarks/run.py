"""``python -m benchmarks.run``: measures, prints a table, adds records to a file of JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import cpu
from .timing import append, environment

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def loss_suite(name: str) -> list[dict[str, Any]]:
    records = []
    for record in cpu.loss_cases(DTYPES[name]):
        copy_ms = records[0]["ms"] if records else record["ms"]
        records.append(
            {
                **record,
                "N": cpu.N,
                "V": cpu.V,
                "dtype": name,
                "GB_per_s": record["bytes"] / record["ms"] / 1e6,
                "times_copy": record["ms"] / copy_ms,
            }
        )
    return records


def show(title: str, records: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in ("case", "ms", "20 % .. 80 %", "GB/s", "x copy"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for r in records:
        rate = f"{r['GB_per_s']:.1f}" if "GB_per_s" in r else ""
        ratio = f"{r['times_copy']:.2f}" if "times_copy" in r else ""
        spread = f"{r['ms_20']:.2f} .. {r['ms_80']:.2f}"
        table.add_row(r["case"], f"{r['ms']:.2f}", spread, rate, ratio)
    Console().print(table)


def main(out: Path = RESULTS) -> None:
    """Runs every case that this machine can run."""
    facts = environment()
    records = []
    for name in DTYPES:
        suite = loss_suite(name)
        show(f"Loss and gradient, N = {cpu.N}, V = {cpu.V:,}, {name}", suite)
        records += suite
    search = list(cpu.search_cases())
    show("Search over 1,000,000 tokens, 53 probes", search)
    append(out, [{**facts, **record} for record in records + search])


if __name__ == "__main__":
    typer.run(main)
