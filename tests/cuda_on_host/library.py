"""The operators of the CUDA backend on CPU tensors; their kernels are executed as PTX."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ptx import executor

NAMESPACE = "bapo_kernels_cuda_on_host"
EXECUTE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
)
STATIC_BYTES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
ALLOCATED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class Library:
    """The operators and controls of binding.cpp, and what they call back to.

    Attributes:
        seed: of the schedules; 0 runs one warp after the other.
        error_seed: of the errors of approximate instructions.
        races: whether they are looked for.
        unwritten: whether memory that was never written may be read, if nothing depends on it.
        relied: on what PTX does not promise, by all launches.
    """

    def __init__(self, built: Path) -> None:
        self.seed = self.error_seed = 0
        self.races, self.unwritten = True, False
        self.relied = executor.Relied()  # by the operators so far
        self.ptx: dict[str, dict[int, str]] = {}  # of each kernel the modules, by architecture
        for text in (path.read_text() for path in sorted(built.parent.glob("*.ptx"))):
            architecture = int(re.search(r"\.target sm_(\d+)", text)[1])
            for name in re.findall(r"\.entry (\S+)\(", text):
                self.ptx.setdefault(name, {})[architecture] = text
        self.tensors: list[torch.Tensor] = []  # of the operator that runs
        self.failure: Exception | None = None
        torch.ops.load_library(str(built))
        self.operators = getattr(torch.ops, NAMESPACE)
        self.runtime = ctypes.CDLL(str(built))
        self.called = {
            "execute": EXECUTE(self.execute),
            "static_bytes": STATIC_BYTES(lambda *kernel: self.kernel(*kernel).shared_bytes),
            "allocated": ALLOCATED(self.allocated),
        }
        for name, function in self.called.items():
            address = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.in_dll(self.runtime, name).value = address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self.operators, name)

        def run(*arguments: Any, **options: int) -> Any:
            given = [each if isinstance(each, list | tuple) else [each] for each in arguments]
            self.tensors = [x for xs in given for x in xs if isinstance(x, torch.Tensor)]
            self.failure = None
            try:
                return operator(*arguments, **options)
            except RuntimeError as error:
                raise self.failure or error from None
            finally:
                assert self.runtime.cudaGetLastError() == 0, "torch's next launch raises it again"

        return run

    def allocated(self, address: int, count: int) -> None:
        if count == 0:
            return
        memory = (ctypes.c_float * (2 * count)).from_address(address)  # whose parts may be int32
        self.tensors.append(executor.poison(torch.frombuffer(memory, dtype=torch.float32)))

    def kernel(self, name: bytes, major: int) -> Any:
        """As a device of this compute capability executes it."""
        modules = self.ptx[name.decode()]
        newest = max((each for each in modules if each <= 10 * major), default=min(modules))
        return executor.load(modules[newest], name.decode())

    def execute(self, name: bytes, launch: Any, arguments: Any) -> int:
        try:
            kernel = self.kernel(name, launch[6])
            sizes = [size for _, size in kernel.parameters]
            relied = executor.launch(
                kernel,
                tuple(launch[:3]),
                launch[3],
                [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)],
                tensors=self.tensors,
                cluster=launch[4],
                shared_bytes=launch[5],
                seed=self.seed,
                error_seed=self.error_seed,
                races=self.races,
                poisons=True,
                unwritten=self.unwritten,
            )
            self.relied = executor.Relied(*map(sum, zip(self.relied, relied, strict=True)))
        except Exception as failure:
            self.failure = failure
        return self.failure is not None


class Counted:
    """The operators of a library, and the most launches of each."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.most: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            self.library.stream(7)
            getattr(self.library, name)(*arguments)
            assert self.library.launches() > 0
            self.most[name] = max(self.most.get(name, 0), self.library.launches())

        return run
