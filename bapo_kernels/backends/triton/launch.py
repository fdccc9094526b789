"""What a launch needs to know of the device, and how rows are cut into programs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
from torch import Tensor


def warp_size() -> int:
    """Threads of a warp; the interpreter has none, and takes the cuts of NVIDIA."""
    if triton.knobs.runtime.interpret:
        return 32
    return int(_target().warp_size)


def _target() -> Any:
    return triton.runtime.driver.active.get_current_target()


def limits(num_warps: int, registers: int) -> dict[str, int]:
    """Launch options: registers a thread, which fix how many programs share a multiprocessor.

    Left to itself ptxas spills a few bytes to fit one program more.
    """
    if triton.knobs.runtime.interpret or _target().backend != "cuda":
        return dict(num_warps=num_warps)
    return dict(num_warps=num_warps, maxnreg=registers)


class RowShape(NamedTuple):
    """A program of ``num_warps`` takes a row in steps of ``UNROLL`` times ``W`` lanes."""

    W: int
    UNROLL: int
    num_warps: int


def row_shape(rows: Tensor, softcapped: bool = False, threads: int = 512) -> RowShape:
    """16 bytes a thread and lane group; wide programs, so that few rows at once share the L2 cache.

    Two programs of 512 threads and 64 registers fill a multiprocessor: one loads while the other
    writes. Without a second look, two of 256 threads and 96 registers do. Depends on V and dtype
    only, as the bits of a row must.
    """
    vector, warp = 16 // rows.element_size(), warp_size()
    V = max(1, rows.shape[-1])  # a shard may be empty
    num_warps = min(threads // warp, triton.next_power_of_2(triton.cdiv(V, 4 * vector * warp)))
    W = vector * warp * num_warps
    unroll = 1 if softcapped and vector == 8 else 4  # tanh of more elements would not fit
    return RowShape(W, unroll if unroll * W <= V else 1, num_warps)


def alignment(*tensors: Tensor) -> int:
    """Elements, at most 16 bytes, that all rows of these tensors are a multiple apart."""
    apart = [16 // tensors[0].element_size()]
    for tensor in tensors:
        sizes = zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
        apart += [stride for size, stride in sizes if size > 1]
    return math.gcd(*apart)
