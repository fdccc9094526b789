"""Device properties that launches need, and the division of rows and tokens among programs.

May import ``config`` alone; every launcher imports it. The division decides the bits of sums, so it
must not depend on what else is in a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from ...config import Options, bound_grid

Result = TypeVar("Result")
INTERPRETED: bool = triton.knobs.runtime.interpret
MAX_PROGRAMS = 256  # that share the tokens: adding up their sums takes little time


def warp_size() -> int:
    """Threads of a warp; the interpreter has none, and divides rows as on NVIDIA."""
    return 32 if INTERPRETED else int(_target().warp_size)


def _target() -> Any:
    return triton.runtime.driver.active.get_current_target()


def resident_programs(rows: int, num_warps: int) -> int:
    """Programs that stride over ``rows`` rows: all that are resident at 64 registers per thread."""
    if INTERPRETED:
        return min(rows, 3)
    device = triton.runtime.driver.active.get_current_device()
    return min(rows, _resident_programs(device, num_warps))


@cache
def _resident_programs(device: int, num_warps: int) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return 1024 // (num_warps * warp_size()) * int(properties["multiprocessor_count"])


@cache
def limits(num_warps: int, registers: int) -> dict[str, int]:
    """Launch options: warps, and registers per thread, which fix the occupancy.

    Without a limit ptxas spills a few bytes to fit one more program.
    """
    if INTERPRETED or _target().backend != "cuda":
        return dict(num_warps=num_warps)
    return dict(num_warps=num_warps, maxnreg=registers)


class RowShape(NamedTuple):
    """A program of ``num_warps`` processes a row in steps of ``UNROLL`` times ``W`` elements."""

    W: int
    UNROLL: int
    num_warps: int


def row_shape(rows: Tensor, softcapped: bool = False, threads: int = 512) -> RowShape:
    """A thread loads 16 bytes; programs are wide, so that few rows share the L2 cache.

    Two programs of 512 threads and 64 registers fill a multiprocessor: one loads while the other
    writes. Without a second pass, two of 256 threads and 96 registers do. Depends on V, dtype
    and architecture alone, because the bits of a row do.
    """
    return _row_shape(rows.shape[-1], rows.element_size(), softcapped, threads)


@cache
def _row_shape(V: int, element_size: int, softcapped: bool, threads: int) -> RowShape:
    vector, warp = 16 // element_size, warp_size()
    V = max(1, V)  # a shard may be empty
    num_warps = min(threads // warp, triton.next_power_of_2(triton.cdiv(V, 4 * vector * warp)))
    # With more elements per thread and step ptxas spills; code for sm_120 needs more registers.
    is_sm_120 = not INTERPRETED and _target().arch in (120, 121)
    elements = 8 if softcapped else (16 if is_sm_120 else 32)
    return RowShape(vector * warp * num_warps, min(4, elements // vector), num_warps)


def set_shape() -> RowShape:
    """A warp takes a set; most sets take one step."""
    return RowShape(4 * warp_size(), 2, 1)


def row_sizes(
    logits: Tensor, dlogits: Tensor | None, offsets: Tensor | None
) -> tuple[tuple[int, ...], int]:
    """(K, rows per batch, V, strides of batches and rows of both), and the alignment of rows.

    The alignment is in elements, at most 16 bytes of them: a factor of the distances of all rows.
    With ``offsets`` the device knows all sizes but K, the number of values of the sets.
    """
    if offsets is not None:
        return (logits.numel(), 0, 0, 0, 0, 0, 0), 1
    grad = logits if dlogits is None else dlogits
    return _row_sizes(logits.element_size(), logits.shape, logits.stride(), grad.stride())


@lru_cache
def _row_sizes(
    element_size: int, shape: torch.Size, stride: tuple[int, ...], dstride: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    # The stride of a single row counts too, or a batch of one token would be a kernel of its own.
    apart = [each[i] for each in (stride, dstride) for i in (0, 1) if i == 1 or shape[i] > 1]
    sizes = 0, shape[1], shape[2], *stride[:2], *dstride[:2]
    return sizes, math.gcd(16 // element_size, *apart)


def per_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Caches a function of options, which the dispatcher hands over as a list."""
    known = lru_cache(function)

    def find(options: Sequence[float], *others: int) -> Result:
        given = options if isinstance(options, Options) else Options._make(options)
        return known(given, *others)

    return find


@per_options
def transform(options: Options, per_row: bool) -> tuple[bool, tuple[float, ...]]:
    """Whether there is a soft cap, and (inner, scale/ln 2, scale, slope) of logits z.

    x = scale*y with y = z, or y = tanh(inner*z) with a soft cap; dx/dz = slope, or slope*(1 - y*y).
    ``per_row``: rows have temperatures of their own; scale and slope are those at 1.
    """
    temperature = 1.0 if per_row else options.temperature
    softcapped = options.softcap < math.inf
    slope = options.logit_scale / temperature
    scale = options.softcap / temperature if softcapped else slope
    inner = options.logit_scale / options.softcap if softcapped else 1.0
    return softcapped, (inner, scale / math.log(2), scale, slope)


def ceil_div(a: int, b: int) -> int:
    """Divides and rounds up; ``triton.cdiv`` takes the host 2 us."""
    return -(-a // b)


def token_programs(N: int, tokens: int) -> int:
    """Programs that share ``N`` tokens, in steps of ``tokens``.

    The number depends on ``N`` alone, because the bits of the sums do.
    """
    return max(1, min(MAX_PROGRAMS, ceil_div(N, tokens)))


@per_options
def grid_sizes(options: Options) -> tuple[int, int]:
    """The numbers of points of the lower and the upper grid."""
    return len(bound_grid(*options[:3])), len(bound_grid(*options[3:6]))
