"""Executes PTX on the CPU: compiles the machine, hands it a kernel, and says what went wrong.

    kernel = executor.load(ptx)
    executor.launch(kernel, grid=(4, 1, 1), threads=128, arguments=[tensor, 3.0, 7], seed=1)

Tensors are CPU tensors; of each its storage may be accessed, and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import parser

HERE = Path(__file__).parent
UNITS = ("operations", "memory_operations", "machine")
# Bytes of memory that nobody has written, by address modulo 8: NaN in every format.
POISON = torch.tensor([0xAD, 0x7F, 0xA5, 0xFF, 0xBE, 0x7F, 0xF5, 0xFF], dtype=torch.uint8)


class ExecutionError(Exception):
    """What a kernel must not do. Names instruction, block and warp."""


class _Instruction(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("operation", "predicate", "negated", "target")],
        *[(name, ctypes.c_int32 * 8) for name in ("to", "sources")],
        *[(name, ctypes.c_int32) for name in ("to_count", "source_count", "space", "bytes")],
        *[(name, ctypes.c_int32) for name in ("vector", "flags", "scope", "padding")],
        ("offset", ctypes.c_int64),
    ]


class _Range(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint64) for name in ("begin", "bytes")],
        *[(name, ctypes.c_uint32) for name in ("granule", "padding")],
        ("shadow", ctypes.c_void_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.POINTER(_Instruction)),
        *[(name, ctypes.c_int32) for name in ("instructions", "registers", "constants", "special")],
        ("values", ctypes.POINTER(ctypes.c_uint64)),
        ("parameters", ctypes.c_char_p),
        ("ranges", ctypes.POINTER(_Range)),
        *[(name, ctypes.c_int32) for name in ("parameter_bytes", "range_count")],
        ("grid", ctypes.c_uint32 * 3),
        *[(name, ctypes.c_uint32) for name in ("threads", "shared_bytes", "resident")],
        *[(name, ctypes.c_uint64) for name in ("seed", "error_seed", "most_instructions")],
        *[(name, ctypes.c_int32) for name in ("finds_races", "padding")],
    ]


class Outcome(ctypes.Structure):
    """Executed instructions, and where a fault was."""

    _fields_ = [
        *[(name, ctypes.c_uint64) for name in ("warp_instructions", "lane_instructions")],
        *[(name, ctypes.c_int32) for name in ("instruction", "block", "warp", "padding")],
        ("message", ctypes.c_char * 400),
    ]


def build(folder: Path) -> Path:
    """Compiles the machine; with several processes, each for itself and the last one stays."""
    library = folder / "ptx_machine.so"
    part = folder / f"ptx_machine.{os.getpid()}.so"
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
    sources = [str(HERE / f"{unit}.cpp") for unit in UNITS]
    subprocess.run(["g++", *flags, *sources, "-o", str(part)], check=True)
    os.replace(part, library)
    return library


@cache
def machine() -> ctypes.CDLL:
    """Compiled at its first use, into the folder of the environment variable PTX_MACHINE."""
    folder = Path(os.environ.get("PTX_MACHINE", HERE.parent.parent / "build"))
    folder.mkdir(exist_ok=True)
    library = folder / "ptx_machine.so"
    newest = max(file.stat().st_mtime for file in HERE.iterdir() if file.suffix in (".cpp", ".h"))
    if not library.exists() or library.stat().st_mtime < newest:
        build(folder)
    return ctypes.CDLL(str(library))


class Loaded:
    """A kernel as the machine takes it."""

    def __init__(self, ptx: str) -> None:
        self.kernel = parser.parse(ptx)
        self.code = (_Instruction * len(self.kernel.code))()
        unknown = set()
        for packed, each in zip(self.code, self.kernel.code, strict=True):
            packed.operation = machine().ptx_operation(each.operation.encode())
            if packed.operation < 0:
                unknown.add(each.operation)
            packed.predicate, packed.negated, packed.target = each[3:6]
            packed.to_count, packed.source_count = len(each.to), len(each.sources)
            packed.to[:] = (*each.to, *[-1] * (8 - len(each.to)))
            packed.sources[:] = (*each.sources, *[-1] * (8 - len(each.sources)))
            for name in ("space", "bytes", "vector", "flags", "scope", "offset"):
                setattr(packed, name, getattr(each, name))
        if unknown:
            raise parser.UnknownError(f"{self.kernel.name}: {', '.join(sorted(unknown))}")
        constants = self.kernel.constants
        self.constants = (ctypes.c_uint64 * max(1, len(constants)))(*constants)


@cache
def load(ptx: str) -> Loaded:
    return Loaded(ptx)


def _packed(value: Any, size: int) -> bytes:
    if isinstance(value, torch.Tensor):
        return struct.pack("<Q", value.data_ptr())
    if value is None:
        return bytes(size)
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    return int(value).to_bytes(size, "little", signed=value < 0)


def _ranges(tensors: Sequence[torch.Tensor]) -> list[_Range]:
    """Of storages; the granule of each is the smallest element of those that share it."""
    granules: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        granules[key] = min(tensor.element_size(), 8, granules.get(key, 8))
    return [_Range(*key, granule, 0, None) for key, granule in granules.items() if key[1]]


def launch(
    loaded: Loaded,
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Any],
    *,
    shared_bytes: int = 0,
    seed: int = 1,
    error_seed: int = 0,
    resident: int = 3,
    races: bool = True,
    most_instructions: int = 10**10,
) -> Outcome:
    """Executes a grid.

    Args:
        arguments: tensors, numbers, None for a null pointer; parameters behind them are zero.
        seed: of the schedule; 0 runs one warp after the other, and stores are visible at once.
        error_seed: of the errors of approximate instructions, 0 for none.
        resident: blocks that run at once.
        races: whether they are looked for.

    Raises:
        ExecutionError: an access out of bounds, misaligned, in a race, or of what was never
            written; lanes or warps that miss a barrier; no end.
    """
    kernel = loaded.kernel
    parameters = bytearray(kernel.parameter_bytes)
    for (offset, size), value in zip(kernel.parameters, arguments, strict=False):
        parameters[offset : offset + size] = _packed(value, size)
    ranges = _ranges([value for value in arguments if isinstance(value, torch.Tensor)])
    request = _Launch(
        code=loaded.code,
        instructions=len(loaded.code),
        registers=kernel.registers,
        constants=len(kernel.constants),
        special=kernel.registers + len(kernel.constants),
        values=loaded.constants,
        parameters=bytes(parameters),
        ranges=(_Range * max(1, len(ranges)))(*ranges),
        parameter_bytes=len(parameters),
        range_count=len(ranges),
        grid=(ctypes.c_uint32 * 3)(*grid),
        threads=threads,
        shared_bytes=shared_bytes,
        resident=resident,
        seed=seed,
        error_seed=error_seed,
        most_instructions=most_instructions,
        finds_races=races,
    )
    outcome = Outcome()
    if machine().ptx_run(ctypes.byref(request), ctypes.byref(outcome)):
        where = f"{kernel.name}, block {outcome.block}, warp {outcome.warp}"
        text = kernel.text[outcome.instruction]
        message = outcome.message.decode()
        raise ExecutionError(
            f"{message}\n  at instruction {outcome.instruction} `{text}` of {where}"
        )
    return outcome


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Marks the memory of a tensor as never written."""
    storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    count = storage.numel()
    storage.copy_(POISON.repeat(count // 8 + 1)[:count])
    return tensor
