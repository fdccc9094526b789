"""Tables of the counts and predictions, and the block of ``docs/internals/cuda_plan.md``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from bapo_kernels.backends import native

from ..tables import markdown
from . import whole_op
from .cuda import Row
from .gpus import GPU, GPUS
from .model import OPTIMISTIC, PESSIMISTIC, PREDICTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "cuda_plan.md"
BEGIN = "<!-- from the disassembly: python -m benchmarks.instructions --write -->"
END = "<!-- end of the disassembly -->"
LENGTHS = (
    4_096,
    151_936 // 8,
    128_256,
    151_936,
    201_088,
    262_208,
)  # the generic kernel, Qwen3 on 8 ranks, Llama 3, Qwen3, gpt-oss, Gemma 3
ROWS = [*((V, "bfloat16") for V in LENGTHS), (151_936, "float32")]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TOKENS = (8_192, 1_024)


def title(vocabulary: int, dtype: str) -> str:
    return f"{vocabulary:,}" + " float32" * (dtype == "float32")


def blocks(row: Row) -> str:
    plan, *_ = row.block
    threads = f"{32 * plan.warps} threads"
    return f"{plan.cluster} of {threads}" if plan.cluster else threads


def over_copy(row: Row, gpu: GPU) -> str:
    """The predicted time over that of a copy, and its range."""
    cases = PREDICTED, OPTIMISTIC, PESSIMISTIC
    found = [row.predict(gpu, case).over_copy for case in cases]
    return f"{found[0]:.2f} ({min(found):.2f}-{max(found):.2f})"


def of_length(length: tuple[int, str]) -> dict[str, dict[str, str]]:
    """A line of every table."""
    lines: dict[str, dict[str, str]] = {"all": {}, "gradient": {}, "log-probs": {}}
    for arch in ARCHITECTURES:
        row, alone = (Row(arch, *length, gradient) for gradient in (True, False))
        counts = row.counts()
        lines["all"][arch] = f"{counts['all']:.2f}"
        lines["all"][f"{arch}, log-probs"] = f"{alone.counts()['all']:.2f}"
        if arch == "sm_90":
            phases = {name: f"{count:.2f}" for name, count in counts.items()}
            lines["phases"] = {"blocks of a row": blocks(row)} | phases
        for gpu in (gpu for gpu in GPUS if gpu.arch == arch):
            lines["gradient"][gpu.name] = over_copy(row, gpu)
            lines["log-probs"][gpu.name] = over_copy(alone, gpu)
    return lines


def tables(lengths: Sequence[tuple[int, str]] = ROWS) -> dict[str, pd.DataFrame]:
    with ProcessPoolExecutor() as pool:
        lines = dict(zip(lengths, pool.map(of_length, lengths), strict=True))
    return {
        name: pd.DataFrame({title(*length): line[name] for length, line in lines.items()}).T
        for name in ("phases", "all", "gradient", "log-probs")
    }


def whole() -> pd.DataFrame:
    """The predicted time of a loss."""
    columns = {
        f"{gpu.name}, N = {tokens:,}": whole_op.predicted(tokens, gpu)
        for gpu in GPUS
        if gpu.name in ("A100", "H100", "H200")
        for tokens in TOKENS
    }
    return pd.DataFrame(columns)


def triton(arch: str) -> pd.DataFrame:
    """By a process of its own: it compiles for one GPU only, and not if it interprets kernels."""
    code = "from benchmarks.instructions.triton_kernels import *; import json; "
    command = [sys.executable, "-c", f"{code}print(json.dumps(triton_counts({arch!r})))"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    return pd.DataFrame(json.loads(output)).T


def versions() -> str:
    """The compilers whose code is counted."""
    nvcc = native.build_info()["cuda"].split()[0]
    return f"Compiled by nvcc {nvcc} and by Triton {importlib.metadata.version('triton')}."


def assumptions() -> str:
    words = (
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.clock / 1e9:g} GHz, a copy at "
        f"{gpu.copy / 1e12:g} TB/s, L2 of {gpu.l2 >> 20} MB at {gpu.l2_speed / 1e12:g} TB/s"
        for gpu in GPUS
    )
    return f"Assumed are {'; '.join(words)}."


def block() -> str:
    made = {name: markdown(table) for name, table in tables().items()}
    parts = [
        f"{versions()} {assumptions()}",
        "Executed instructions per element on sm_90, by phase (bfloat16 where not said otherwise):",
        made["phases"],
        "All phases, by architecture, with gradient and for log-probs alone:",
        made["all"],
        "Predicted time of the row pass with gradient, over a copy of its bytes:",
        made["gradient"],
        "Predicted time of log-probs alone, over reading their bytes at the speed of a copy:",
        made["log-probs"],
        f"Predicted time of `bapo_loss` and its backward (V = {whole_op.VOCABULARY:,}, bfloat16, "
        "every row active, on-policy). The kernels beside the row pass wait for memory rather than "
        f"move bytes. Assumed are {1e6 * whole_op.BETWEEN_LAUNCHES:g} us between two kernels and "
        f"{1e6 * whole_op.ROUND_TRIP:g} us per round trip to memory; their number is an estimate "
        "by reading the kernels (`benchmarks/instructions/whole_op.py`):",
        markdown(whole()),
        "Triton's row pass on sm_90, instructions per element in the loops of its passes:",
        markdown(triton("sm_90").map("{:.2f}".format)),
    ]
    return "\n\n".join(parts)


def write() -> Path:
    """Replaces the block of the page."""
    made = block()  # takes minutes
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n\n{END}{after}")
    return PAGE
