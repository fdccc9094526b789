"""The row kernels of Triton, compiled through their launchers for a GPU that need not be there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import triton

from .launch import BYTES
from .paths import Iteration, executed_paths
from .sass import disassemble

# isort: split
from compile_triton import TARGETS, AbsentGPU, Compiled, one_row_pass, one_row_statistics


def triton_counts(arch: str) -> dict[str, dict[str, float]]:
    """Instructions per element in the longest loop of each pass, by dtype."""
    triton.runtime.driver.set_active(AbsentGPU(TARGETS[arch.replace("sm_", "cuda:")]))
    compiled = Compiled()
    counts = {}
    for name, size in BYTES.items():
        one_row_pass(getattr(torch, name), kl=2)
        first, second = _longest(compiled, stores=False), _longest(compiled, stores=True)
        one_row_pass(getattr(torch, name), everything=True, kl=2)
        entropy = _longest(compiled, stores=True)
        one_row_statistics(getattr(torch, name))
        alone = _longest(compiled, stores=False)
        passes = {
            "first pass": first,
            "second pass": second,
            "second pass, entropy gradient": entropy,
            "log-probs alone": alone,
        }
        counts[name] = {of: per_element(path, size) for of, path in passes.items()}
    return counts


def per_element(path: Iteration, size: int) -> float:
    """Instructions per element of this many bytes, by the 16-byte accesses and by the exps."""
    elements = (path.stores or path.loads) * 16 // size
    # The first pass has some more exps, which move its sums to a new maximum.
    if not 0 <= path.exps - elements <= elements:
        raise ValueError(f"{path.exps} exps for {elements} elements")
    return len(path.instructions) / elements


def _longest(compiled: Compiled, stores: bool) -> Iteration:
    """Of the kernel compiled last: the path with the most elements, of those with stores or not."""
    *_, (_, _, kernel) = compiled.kernels.values()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        (code,) = disassemble(Path(file.name)).values()
    paths = [path for path in executed_paths(code.instructions) if bool(path.stores) == stores]
    return max(paths, key=lambda path: (path.loads, -len(path.instructions)))
