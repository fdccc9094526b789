"""The row kernels of Triton, compiled through their launchers for a GPU that need not be there."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton

from .passes import BYTES, ENTROPY, FIRST, LOG_PROBS, SECOND, Count, Variant, count
from .sass import disassemble

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from compile_triton import (
    TARGETS,
    AbsentGPU,
    Compiled,
    one_row_pass,
    one_row_statistics,
)


def triton_counts(arch: str) -> Iterator[Count]:
    """The counts of the row pass without and with an entropy gradient, and of log-probs alone."""
    triton.runtime.driver.set_active(AbsentGPU(TARGETS[arch.replace("sm_", "cuda:")]))
    compiled = Compiled()
    for name in BYTES:
        dtype = getattr(torch, name)
        for softcap in (math.inf, 30.0):
            variant = Variant("Triton", arch, name, softcap < math.inf)
            one_row_pass(dtype, softcap=softcap, kl=2)
            yield from _of(variant, compiled, {FIRST: FIRST, SECOND: SECOND})
            one_row_pass(dtype, softcap=softcap, everything=True, kl=2)
            yield from _of(variant, compiled, {SECOND: ENTROPY})
            one_row_statistics(dtype, softcap=softcap)
            yield from _of(variant, compiled, {LOG_PROBS: LOG_PROBS})


def _of(variant: Variant, compiled: Compiled, names: dict[str, str]) -> Iterator[Count]:
    """Of the kernel compiled last: the counts of these passes, by the name that each has here."""
    *_, (_, _, kernel) = compiled.kernels.values()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        (code,) = disassemble(Path(file.name)).values()
    for one in count(variant, code):
        if one.of in names:
            yield replace(one, of=names[one.of])
