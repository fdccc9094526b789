"""Tables of the counts, and the block of ``docs/cuda_plan.md``."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd

from bapo_kernels.backends import native

from ..tables import markdown
from .gpus import GPUS
from .passes import BYTES, ENTROPY, FIRST, LOG_PROBS, SECOND
from .units import NAMES
from .whole_op import BETWEEN_LAUNCHES, ROUND_TRIP, VOCABULARY, predicted

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cuda_plan.md"
BEGIN = "<!-- from the disassembly: python -m benchmarks.instructions --write -->"
END = "<!-- end of the disassembly -->"
ARCHITECTURES = ("sm_90", "sm_100")


def by_unit(frame: pd.DataFrame) -> pd.DataFrame:
    """Instructions per element of every pass."""
    index = (_title(frame) + ", " + frame["pass"].astype(str)).rename("")
    return frame.set_index(index)[["issued", *NAMES]].map("{:.2f}".format)


def both_passes(frame: pd.DataFrame) -> pd.DataFrame:
    """Instructions per element and kernel, and the shares of a copy that they take."""
    titles = _title(frame).rename("")
    of = {
        column: frame.pivot_table(index=titles, columns="pass", values=column, observed=True)
        for column in ("issued", "exp")
    }
    issued, exps = (table.loc[titles.unique()] for table in of.values())
    both = issued[FIRST] + issued[SECOND]
    table = {
        FIRST: issued[FIRST],
        SECOND: issued[SECOND],
        "both": both,
        "both, entropy gradient": issued[FIRST] + issued[ENTROPY],
        LOG_PROBS: issued[LOG_PROBS],
    }
    result = pd.DataFrame(table).map("{:.2f}".format)
    size = frame["dtype"].astype(str).map(BYTES).groupby(titles).first()
    for gpu in GPUS:
        if gpu.arch == frame.arch.iloc[0]:
            shares = {
                "issue": gpu.issue_share(both, 2 * size),
                "exp": gpu.exp_share(exps[FIRST] + exps[SECOND], 2 * size),
                "issue, log-probs": gpu.issue_share(issued[LOG_PROBS], size),
            }
            for name, share in shares.items():
                result[f"{gpu.name}: {name}"] = (100 * share).map("{:.0f} %".format)
    return result


_PREDICTED = (
    f"Predicted time of `bapo_loss` and its backward (V = {VOCABULARY:,}, bfloat16, every row "
    "active, on-policy). The row pass takes the time of its bytes, its issue slots or its exps, "
    "whichever is longest; the other kernels wait for memory rather than move bytes. Assumed are "
    f"{1e6 * BETWEEN_LAUNCHES:g} us between two kernels and {1e6 * ROUND_TRIP:g} us per round trip "
    "to memory, as many as `benchmarks/instructions/whole_op.py` lists:"
)


def whole_op(frame: pd.DataFrame) -> pd.DataFrame:
    """The predicted time of a loss, from the counts of the cluster kernel in bfloat16."""
    rows = frame[(frame.kernel == "CUDA cluster") & (frame["dtype"] == "bfloat16") & ~frame.softcap]
    both = rows[rows["pass"].isin([FIRST, SECOND])]
    return predicted(frame.arch.iloc[0], both.issued.sum(), both.exp.sum())


def section(frame: pd.DataFrame) -> str:
    """The tables of one architecture."""
    arch = frame.arch.iloc[0]
    lines = [f"Both passes on {arch}:\n", markdown(both_passes(frame))]
    if arch == ARCHITECTURES[0]:
        parts = frame[~frame.softcap & frame["pass"].isin([FIRST, SECOND])]
        lines += [f"\nBy unit on {arch}, without a soft cap:\n", markdown(by_unit(parts))]
        lines += [f"\n{_PREDICTED}\n", markdown(whole_op(frame))]
    return "\n".join(lines) + "\n"


def versions() -> str:
    """The compilers whose code is counted."""
    nvcc = native.build_info()["cuda"].split()[0]
    return f"Compiled by nvcc {nvcc} and by Triton {importlib.metadata.version('triton')}."


def assumptions() -> str:
    """What is assumed about the GPUs."""
    words = (
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.clock / 1e9:g} GHz, "
        f"a copy at {gpu.copy / 1e12:.1f} TB/s"
        for gpu in GPUS
    )
    return f"Assumed are {'; '.join(words)}."


def records(arch: str) -> pd.DataFrame:
    """The records of ``python -m benchmarks.instructions``.

    A process compiles Triton's kernels for one GPU only, and not if it interprets them.
    """
    command = [sys.executable, "-m", "benchmarks.instructions", "--json", "--arch", arch]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    return pd.read_json(io.StringIO(output), lines=True)


def write() -> Path:
    """Replaces the block of the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    block = [
        BEGIN,
        f"{versions()} {assumptions()}\n",
        *(section(records(arch)) for arch in ARCHITECTURES),
        END,
    ]
    PAGE.write_text(before + "\n".join(block) + after)
    return PAGE


def _title(frame: pd.DataFrame) -> pd.Series:
    """The kernel of each record."""
    softcap = frame.softcap.map({False: "", True: ", soft cap"})
    return frame.kernel + ", " + frame["dtype"].astype(str) + softcap
