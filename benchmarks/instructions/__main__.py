"""``python -m benchmarks.instructions``: what the row passes execute, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from ..tables import markdown
from .cuda import LIBRARY, Row

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# The generic kernel, Qwen3 on 8 ranks, Llama 3, Qwen3, gpt-oss, Gemma 3.
LENGTHS = (4_096, 151_936 // 8, 128_256, 151_936, 201_088, 262_208)
ROWS = [*((V, "bfloat16") for V in LENGTHS), (151_936, "float32")]


def counted(arch: str, gradient: bool, library: Path = LIBRARY) -> pd.DataFrame:
    """Of the CUDA kernels, a line per length of a row."""
    lines = {}
    for V, dtype in ROWS:
        row = Row(arch, V, dtype, gradient, library)
        plan, _ = row.block
        blocks = f"{plan.cluster} of " * bool(plan.cluster) + f"{32 * plan.warps} threads"
        counts = {phase: f"{count:.2f}" for phase, count in row.counts().items()}
        lines[f"{V:,}" + " float32" * (dtype == "float32")] = {"blocks of a row": blocks} | counts
    return pd.DataFrame(lines).T


def triton(arch: str) -> pd.DataFrame:
    """By a process of its own: it compiles for one GPU only, and not if it interprets kernels."""
    code = "from benchmarks.instructions.triton_kernels import *; import json; "
    command = [sys.executable, "-c", f"{code}print(json.dumps(triton_counts({arch!r})))"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    return pd.DataFrame(json.loads(output)).T


def main(
    arch: Annotated[list[str], typer.Option(help="repeatable")] = [*ARCHITECTURES],  # noqa: B006
    library: Annotated[Path, typer.Option(exists=True, help="the built library")] = LIBRARY,
) -> None:
    """Prints executed instructions per element, by phase, and those of Triton's loops."""
    for each in arch:
        for gradient, words in ((True, "with gradient"), (False, "log-probs alone")):
            print(f"\n{each}, {words}\n\n{markdown(counted(each, gradient, library))}")
        print(f"\n{each}, Triton\n\n{markdown(triton(each).map('{:.2f}'.format))}")


if __name__ == "__main__":
    typer.run(main)
