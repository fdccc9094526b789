"""The row kernels of Triton, compiled through their launchers for a GPU that need not be there."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton

from .launch import BYTES
from .sass import disassemble

# isort: split
from compile_triton import TARGETS, AbsentGPU, Compiled, one_row_pass, one_row_statistics


def triton_counts(arch: str) -> dict[str, dict[str, float]]:
    """Instructions per element in the loop of each pass, by dtype."""
    triton.runtime.driver.set_active(AbsentGPU(TARGETS[arch.replace("sm_", "cuda:")]))
    compiled = Compiled()
    counts: dict[str, dict[str, float]] = {}
    for name, size in BYTES.items():
        dtype, passes = getattr(torch, name), counts.setdefault(name, {})
        one_row_pass(dtype, kl=2)
        passes["first pass"] = per_element(compiled, size, stores=False)
        passes["second pass"] = per_element(compiled, size, stores=True)
        one_row_pass(dtype, everything=True, kl=2)
        passes["second pass, entropy gradient"] = per_element(compiled, size, stores=True)
        one_row_statistics(dtype)
        passes["log-probs alone"] = per_element(compiled, size, stores=False)
    return counts


def per_element(compiled: Compiled, size: int, stores: bool) -> float:
    """Of the kernel compiled last, its loop over full chunks, which writes a gradient or does not.

    A loop is what a backward branch repeats; the shortest of those that load 16 bytes and compute
    exps contains no other. The elements are ``size`` bytes each.
    """
    *_, (_, _, kernel) = compiled.kernels.values()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        (code,) = disassemble(Path(file.name)).values()
    number = {one.address: i for i, one in enumerate(code.instructions)}
    loops = []
    for end, branch in enumerate(code.instructions):
        loop = code.instructions[number.get(branch.target, end + 1) : end + 1]
        wide = Counter(one.name for one in loop if "128" in one.opcode.split("."))
        exps = sum(one.opcode == "MUFU.EX2" for one in loop)
        if exps and wide["LDG"] and bool(wide["STG"]) == stores:
            loops.append((len(loop), 16 // size * wide["LDG"], exps))
    length, elements, exps = min(loops)
    # The first pass has some more exps, which move its sums to a new maximum.
    if not elements <= exps <= 2 * elements:
        raise ValueError(f"{exps} exps for {elements} elements")
    return length / elements
