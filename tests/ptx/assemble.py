"""Small kernels for tests: one instruction between loads and stores, or statements as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import executor

# Registers by the bytes of an element; those of one byte are predicates.
_REGISTERS = {1: "%p", 2: "%rs", 4: "%r", 8: "%rd"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kernel(statements: str, parameters: int) -> str:
    """PTX that has the addresses of its tensors in ``%rd0``, ``%rd1``, ... and ``%r0 = %tid.x``."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "".join(f"ld.param.b64 %rd{i}, [p{i}];\n" for i in range(parameters))
    head = f".extern .shared .align 16 .b8 memory[];\n.entry test({declared})\n{{\n"
    return f"{head}mov.u32 %r0, %tid.x;\n{loads}{statements}\nret;\n}}\n"


def run(
    statements: str,
    *tensors: torch.Tensor,
    threads: int = 32,
    blocks: int = 1,
    shared_bytes: int = 0,
    **options: Any,
) -> executor.Outcome:
    loaded = executor.load(kernel(statements, len(tensors)))
    grid = blocks, 1, 1
    return executor.launch(loaded, grid, threads, tensors, shared_bytes=shared_bytes, **options)


def evaluate(
    name: str, dtypes: Sequence[torch.dtype], *sources: torch.Tensor, suffix: str = ""
) -> list[torch.Tensor]:
    """What an instruction makes of its sources, one element per thread; bool is a predicate."""
    lines, operands = [], []
    results = [torch.empty(len(sources[0]), dtype=dtype) for dtype in dtypes]
    tensors = [*results, *sources]
    for index, tensor in enumerate(tensors):
        size, at = tensor.element_size(), 10 + index
        lines.append(f"mad.wide.u32 %rd{at}, %r0, {size}, %rd{index};")
        register = _register(tensor, at + 100)
        operands.append(register)
        if index < len(results):
            continue
        if tensor.dtype == torch.bool:
            lines += [f"ld.global.u8 %r{at}, [%rd{at}];", f"setp.ne.b32 {register}, %r{at}, 0;"]
        else:
            lines.append(f"ld.global.b{8 * size} {register}, [%rd{at}];")
    to = "|".join(operands[: len(results)])
    lines.append(f"{name} {', '.join([to, *operands[len(results) :]])}{suffix};")
    for index, result in enumerate(results):
        register, at = operands[index], 10 + index
        if result.dtype == torch.bool:
            lines.append(f"selp.b32 %r{at}, 1, 0, {register};")
            register = f"%r{at}"
        lines.append(f"st.global.b{8 * result.element_size()} [%rd{at}], {register};")
    run("\n".join(lines), *tensors, threads=len(sources[0]))
    return results


def _register(tensor: torch.Tensor, number: int) -> str:
    return f"{_REGISTERS[tensor.element_size()]}{number}"
