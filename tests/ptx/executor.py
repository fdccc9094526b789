"""Executes PTX on the CPU: compiles the machine, hands it a kernel, and says what went wrong.

    kernel = executor.load(ptx)
    executor.launch(kernel, grid=(4, 1, 1), threads=128, arguments=[tensor, other], seed=1)

Tensors are CPU tensors; of each its storage may be accessed, and nothing else.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import parser

HERE = Path(__file__).parent
# Bytes of memory that nobody has written, by address modulo 8: NaN in every format.
POISON = np.array([0xAD, 0x7F, 0xA5, 0xFF, 0xBE, 0x7F, 0xF5, 0xFF] * 2, dtype=np.uint8)


# For operands with more than 2**31 elements: the parts that may be accessed of storages too large
# for a shadow, and the blocks of a grid that run, by their number; ``None``: all.
LARGE = 1 << 30
windows: list[torch.Tensor] = []
blocks: Callable[[int], Sequence[int]] | None = None


class ExecutionError(Exception):
    """What a kernel must not do. Names instruction, block and warp."""


class Relied(NamedTuple):
    """How often a launch relied on what PTX does not promise, by what it is.

    Attributes:
        foreign: vectors of 16 bytes of which another cluster writes a part at the same time.
        beyond: reads of global memory that was never written, or vectors partly in no tensor.
        order: stores that come after a read only because hardware reads before it sends what
            it issues next to another block.
    """

    foreign: int = 0
    beyond: int = 0
    order: int = 0


@cache
def machine() -> ctypes.CDLL:
    """Compiled at its first use, into the folder of the environment variable PTX_MACHINE."""
    folder = Path(os.environ.get("PTX_MACHINE", HERE.parent.parent / "build"))
    folder.mkdir(exist_ok=True)
    library = folder / "ptx_machine.so"
    newest = max(file.stat().st_mtime for file in HERE.iterdir() if file.suffix in (".cpp", ".h"))
    if not library.exists() or library.stat().st_mtime < newest:
        part = folder / f"ptx_machine.{os.getpid()}.so"  # of several processes the last one stays
        flags = ["-std=c++20", "-O2", "-march=native", "-fwrapv", "-ffp-contract=off"]
        made = ["-shared", "-fPIC", "-o", str(part), *map(str, HERE.glob("*.cpp"))]
        subprocess.run(["g++", *flags, *made], check=True)
        os.replace(part, library)
    loaded = ctypes.CDLL(str(library))
    loaded.ptx_operation.restype = ctypes.c_void_p
    return loaded


@cache
def load(ptx: str, name: str | None = None) -> parser.Kernel:
    """An entry, the first by default.

    Raises :class:`parser.UnknownError` for what cannot be executed.
    """
    kernel = parser.parse(ptx, name)
    rows = []
    for each, text in zip(kernel.code, kernel.text, strict=True):
        sources = ctypes.c_int64(len(each.sources))
        operation = machine().ptx_operation(each.operation.encode(), sources)
        if operation is None:
            raise parser.UnknownError(f"{kernel.name}: {text}")
        operands = [(*numbers, *[-1] * (8 - len(numbers))) for numbers in (each.to, each.sources)]
        rows.append((operation, *each[3:], *operands[0], *operands[1]))
    kernel.arrays = np.array(rows), np.array(kernel.initial)
    return kernel


def launch(
    kernel: parser.Kernel,
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Any],
    *,
    tensors: Sequence[torch.Tensor] = (),
    cluster: int = 1,
    shared_bytes: int = 0,
    seed: int = 1,
    error_seed: int = 0,
    races: bool = True,
    poisons: bool = False,
    unwritten: bool = False,
    most_instructions: int = 10**11,
) -> Relied:
    """Executes a grid; tells what it relied on.

    Args:
        arguments: tensors, or the bytes of others, such as ``struct.pack("<f", 3.0)``.
        tensors: that may be accessed too, where arguments have their addresses.
        cluster: blocks in a cluster.
        shared_bytes: of the array whose size the kernel leaves open.
        seed: of the schedule; 0 runs one warp after the other, and stores are visible at once.
        error_seed: of the errors of approximate instructions, 0 for none.
        races: whether they are looked for.
        poisons: parts of vectors of 16 bytes that should not be read are NaN, and no fault, such as
            the elements around a row.
        unwritten: with ``poisons``, nor are other reads of memory that was never written.

    Raises:
        ExecutionError: an access out of bounds, misaligned, in a race, or of what was never
            written; lanes or warps that miss a barrier; no end; more threads or blocks than there
            may be.
    """
    most = kernel.directives.get("maxntid", 1024)
    if threads > most or threads != kernel.directives.get("reqntid", threads):
        limits = f".maxntid {most}, .reqntid {kernel.directives.get('reqntid')}"
        raise ExecutionError(f"{threads} threads for {limits} of {kernel.name}")
    if any(n > most for n, most in zip(grid, (2**31 - 1, 65_535, 65_535), strict=True)):
        raise ExecutionError(f"a grid of {grid} blocks of {kernel.name}")
    parameters = bytearray(kernel.parameter_bytes + 1)
    for (offset, size), value in zip(kernel.parameters, arguments, strict=False):
        address = struct.pack("<Q", value.data_ptr()) if isinstance(value, torch.Tensor) else value
        parameters[offset : offset + size] = address
    granules: dict[tuple[int, int], int] = {}  # of storages, the smallest element that they hold
    for tensor in (*arguments, *tensors):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            key = storage.data_ptr(), storage.nbytes()
            granules[key] = min(tensor.element_size(), granules.get(key, 8))
    granules = {key: granule for key, granule in granules.items() if key[1] < LARGE}
    granules |= {(each.data_ptr(), each.nbytes): each.element_size() for each in windows}
    chosen = range(math.prod(grid)) if blocks is None else blocks(math.prod(grid))
    ranges = [(*key, granule) for key, granule in granules.items()]
    message = ctypes.create_string_buffer(400)
    read = [*kernel.arrays, np.array(ranges), np.array(chosen), np.frombuffer(parameters, np.uint8)]
    request = [array.ctypes.data for array in (*read, POISON)] + [ctypes.addressof(message)]
    request += [len(kernel.initial), len(ranges), len(chosen), kernel.parameter_bytes, *grid]
    request += [threads, cluster, kernel.shared_bytes + shared_bytes]
    request += [seed, error_seed, most_instructions, races, poisons, unwritten]
    answer = np.array([*request, 0, 0, 0, 0, 0, 0])
    failed = machine().ptx_run(ctypes.c_void_p(answer.ctypes.data))
    at, warp, *relied = answer[-5:].tolist()
    if failed:
        block, warp = divmod(warp, -(-threads // 32))
        where = f"instruction {at} `{kernel.text[at]}` of {kernel.name}, block {block}, warp {warp}"
        raise ExecutionError(f"{message.value.decode()}\n  at {where}")
    return Relied(*relied)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Marks the memory of a tensor as never written."""
    storage = torch.tensor([], dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    storage.numpy()[:] = np.resize(POISON, len(storage))
    return tensor


ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


def poisoned(
    make: Callable[..., torch.Tensor], strict: Callable[[], bool] = lambda: True
) -> Callable[..., torch.Tensor]:
    """A function that allocates, with memory that counts as never written where it is strict."""

    @wraps(make)
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = make(*arguments, **options)
        plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.is_quantized
        return poison(tensor) if plain and strict() and tensor.numel() else tensor

    return made
