"""The row kernels of the built CUDA library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import bapo_kernels

from .passes import Count, Variant, count
from .sass import disassemble

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
KERNELS = {"row_pass_cluster_kernel": "CUDA cluster", "row_pass_kernel": "CUDA generic"}
DTYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16", "f": "float32"}
# kernel<dtype, soft cap, aligned>
MANGLED = re.compile(r"\d(row_pass_cluster_kernel|row_pass_kernel)I(.+)Lb([01])ELb1EEEv")


def cuda_counts(library: Path, arch: str) -> Iterator[Count]:
    """The counts of every aligned variant in the library, or in a cubin."""
    options = () if library.suffix == ".cubin" else ("-arch", arch)
    for name, code in disassemble(library, *options).items():
        if found := MANGLED.search(name):
            kernel, dtype, softcap = found.groups()
            variant = Variant(KERNELS[kernel], arch, DTYPES[dtype], softcap == "1")
            yield from count(variant, code)
