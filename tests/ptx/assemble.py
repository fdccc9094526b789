"""Small kernels for tests: one instruction between loads and stores, or statements as they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from . import executor, parser

# Registers by the bytes of a value; those of one byte are predicates.
_REGISTERS = {1: "%p", 2: "%rs", 4: "%r", 8: "%rd"}


def run(statements: str, *tensors: torch.Tensor, **options: Any) -> executor.Relied:
    """Executes statements, and tells what they relied on.

    ``%r0`` is ``%tid.x``, ``%rd0`` the address of the first tensor, ``%rd20`` that of its row %r0.
    """
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(tensors)))
    text = f".extern .shared .align 16 .b8 memory[];\n.entry test({declared})\n{{\n"
    text += "mov.u32 %r0, %tid.x;\n"
    for i, tensor in enumerate(tensors):
        text += f"ld.param.b64 %rd{i}, [p{i}];\n"
        text += f"mad.wide.u32 %rd{20 + i}, %r0, {tensor[0].nbytes}, %rd{i};\n"
    kernel = executor.load(f"{text}{statements}\n}}\n")
    options = {"grid": (1, 1, 1), "threads": 32, **options}
    return executor.launch(kernel, arguments=tensors, **options)


def evaluate(
    statement: str, results: list[torch.Tensor], sources: list[torch.Tensor], **options: Any
) -> None:
    """What an instruction, or a statement of {0}, {1}, ..., makes of rows; bool is a predicate."""
    registers, loads, stores = [], [], []
    for i, tensor in enumerate([*results, *sources]):
        size = tensor[0].nbytes
        register, place = f"{_REGISTERS[size]}{40 + i}", f"[%rd{20 + i}]"
        registers.append(register)
        if size == 1:
            loads.append(f"ld.global.b8 %rs1, {place}; setp.ne.b16 {register}, %rs1, 0;")
            stores.append(f"selp.b16 %rs1, 1, 0, {register}; st.global.b8 {place}, %rs1;")
        else:
            loads.append(f"ld.global.b{8 * size} {register}, {place};")
            stores.append(f"st.global.b{8 * size} {place}, {register};")
    if "{" not in statement:
        statement = f"{statement} {', '.join(registers)};"
    lines = [*loads[len(results) :], statement.format(*registers), *stores[: len(results)]]
    run("\n".join(lines), *results, *sources, threads=len(results[0]), **options)


def check(match: str, statements: str, *tensors: torch.Tensor, seeds=range(1, 9), **options):
    """What is left in copies of tensors, with each seed; all have no fault, or all the same."""
    copies = [[tensor.clone() for tensor in tensors] for _ in seeds]
    faults = executor.ExecutionError, parser.UnknownError
    for seed, given in zip(seeds, copies, strict=True):
        with pytest.raises(faults, match=match) if match else nullcontext():
            run(statements, *given, seed=seed, shared_bytes=256, **options)
    return copies
