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
from .cuda import LIBRARY, Row, kernels
from .gpus import GPU, GPUS
from .model import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "cuda_plan.md"
BEGIN = "<!-- from the disassembly: python -m benchmarks.instructions --write -->"
PEERS = "<!-- from public kernels: python -m benchmarks.instructions --peers --write -->"
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
FEW_TOKENS = (64, 128, 256, 1_024, 8_192)


def title(vocabulary: int, dtype: str) -> str:
    return f"{vocabulary:,}" + " float32" * (dtype == "float32")


def blocks(row: Row) -> str:
    plan, *_ = row.block
    threads = f"{32 * plan.warps} threads"
    return f"{plan.cluster} of {threads}" if plan.cluster else threads


def over_copy(row: Row, gpu: GPU) -> str:
    """The predicted time over that of a copy, and its range."""
    return whole_op.ranged([row.predict(gpu, case).over_copy for case in CASES])


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
    for arch in ARCHITECTURES:
        kernels(LIBRARY, arch)  # before the processes fork
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


def waves() -> pd.DataFrame:
    """Of the row pass over a copy, on GPUs with clusters."""
    lines = {
        gpu.name: {f"N = {tokens:,}": whole_op.over_copy(tokens, gpu) for tokens in FEW_TOKENS}
        for gpu in GPUS
        if gpu.arch != "sm_80"
    }
    return pd.DataFrame(lines).T


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


def _microseconds(times: Sequence[float]) -> str:
    return whole_op.ranged([1e6 * time for time in times], 1, " us")


def assumptions() -> str:
    words = (
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.clock / 1e9:g}"
        + f" to {gpu.boost / 1e9:g}" * bool(gpu.boost)
        + f" GHz, a copy at {gpu.copy / 1e12:g} TB/s, L2 of {gpu.l2 >> 20} MB"
        + f", of which {gpu.l2_used:.0%} count," * (gpu.l2_used < 1)
        + f" at {gpu.l2_speed / 1e12:g} TB/s"
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
        f"move bytes. Assumed are {_microseconds(whole_op.BETWEEN_LAUNCHES)} between two kernels "
        f"and {_microseconds(whole_op.ROUND_TRIP)} per round trip to memory; their number is an "
        "estimate by reading the kernels (`benchmarks/instructions/whole_op.py`):",
        markdown(whole()),
        f"Predicted time of the row pass for few rows (V = {whole_op.VOCABULARY:,}, bfloat16, with "
        "gradient), over a copy of their bytes without a launch. Clusters take whole rounds, at "
        "best the last one in proportion to its rows, and "
        f"{_microseconds(whole_op.CLUSTERS)} to begin and end:",
        markdown(waves()),
        "Triton's row pass on sm_90, instructions per element in the loops of its passes:",
        markdown(triton("sm_90").map("{:.2f}".format)),
    ]
    return "\n\n".join(parts)


def write(begin: str, made: str) -> None:
    """Replaces a block of the page."""
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{begin}\n{made}\n\n{END}{after}")
