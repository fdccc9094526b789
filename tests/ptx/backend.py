"""A plugin of pytest that executes the PTX of Triton's kernels on CPU tensors.

Triton compiles for a GPU that is not there, and launches. Below its launcher, in the place of the
driver, the PTX is executed.

With the environment variable TRITON_PTX, 80, 90 or 100, tests of the backend ``triton`` run so
instead of in Triton's interpreter; of several of these, test files take turns. PTX_SEED is the seed
of the schedules, PTX_ERRORS that of the errors of approximate instructions (0: none). With
PTX_COMPLETE=1 tests fail that leave out a kernel, a tensor that a kernel may be given, or a value
of a flag.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import pkgutil
import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

# Triton's own functions are not interpreted, which it decides when it is imported. This package
# takes CPU tensors; its kernels, imported at the first call, are not interpreted either.
os.environ["TRITON_INTERPRET"] = "0"
import triton

os.environ["TRITON_INTERPRET"] = "1"
from triton.backends.compiler import GPUTarget

import bapo_kernels  # noqa: F401

triton.knobs.runtime.interpret = False

from . import executor  # noqa: E402
from .absent_gpu import Current, absent_gpu, current  # noqa: E402

CAPABILITIES = [int(each) for each in os.environ["TRITON_PTX"].split()]
ERRORS = int(os.environ.get("PTX_ERRORS", "0"))
# Tests with offsets that are broken: programs may write one place, or leave a place unwritten that
# others read, as the results mean nothing then. That nothing else is touched is still checked.
BROKEN_OFFSETS = "test_broken_offsets"
TOO_LARGE = "test_offsets_beyond_32_bits"  # the shadow of a byte takes 20

LIBCUDA = absent_gpu(CAPABILITIES[0])  # of two multiprocessors, so that programs stride over rows

import bapo_kernels.backends.triton as package  # noqa: E402
from bapo_kernels.backends.triton import launch  # noqa: E402
from bapo_kernels.backends.triton.kernel import Kernel  # noqa: E402

assert not launch.INTERPRETED


class Executed(NamedTuple):
    """One launch; of constants and of tensors that are not given their values, by name."""

    kernel: str
    values: dict[str, Any]


LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
)


class Launches:
    """Executes what Triton's launcher hands to the driver, and keeps count."""

    def __init__(self) -> None:
        self.schedules = random.Random(int(os.environ.get("PTX_SEED", "1")))
        self.strict = True
        self.streams = itertools.count(0x77, 16)
        self.executed: list[Executed] = []
        self.current = threading.local()
        self.launch, self.launched = Kernel.run, LAUNCHED(self.execute)
        self.load = Kernel.load
        address = ctypes.cast(self.launched, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(LIBCUDA, "launched").value = address

    def load_once(self, compiled: Any) -> None:
        """As Kernel.load, and notes the GPU; only the first call loads."""
        vars(compiled).setdefault("gpu", current.gpu)
        self.load(compiled)

    def run(self, compiled: Any, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """As Kernel.run, on a stream that no other launch has; raises what was wrong."""
        current.stream = next(self.streams)
        self.current.compiled, self.current.values, self.current.failure = compiled, values, None
        self.launch(compiled, grid, values)
        failure = self.current.failure
        self.current.values = self.current.failure = None  # tests look at what is kept
        if failure is not None:
            raise failure

    def execute(self, config: Any, parameters: Any) -> int:
        """Called by the driver library; ``config`` is a CUlaunchConfig."""
        try:
            compiled, values = self.current.compiled, self.current.values
            kernel = executor.load(compiled.asm["ptx"])
            gpu, of = current.gpu, values[0].device.index  # None: a tensor that is not of a GPU
            place = config[8] | config[9] << 32, compiled.gpu, gpu if of is None else of
            if place != (current.stream + gpu, gpu, gpu):
                told = "{} on stream {:#x}, of a module on GPU {}, with tensors on GPU {}"
                there = f"the current stream is {current.stream + gpu:#x}, of GPU {gpu}"
                raise executor.ExecutionError(f"{told.format(kernel.name, *place)}: {there}")
            sizes = [size for _, size in kernel.parameters]
            packed = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
            executor.launch(
                kernel,
                tuple(config[:3]),
                config[3] * config[4] * config[5],
                packed,
                tensors=[value for value in values if isinstance(value, torch.Tensor)],
                shared_bytes=config[6],
                seed=self.schedules.getrandbits(60) | 1,
                error_seed=ERRORS,
                races=self.strict,
            )
            kinds = compiled.src.signature.items()
            constants = {
                name: value
                for (name, kind), value in zip(kinds, values, strict=True)
                if kind == "constexpr"
            }
            self.executed.append(Executed(kernel.name, constants))
        except Exception as failure:
            self.current.failure = failure
        return 0

    def missing(self) -> Iterator[str]:
        """Kernels that were not executed, tensors that none had, and flags that had one value."""
        parameters = {each._function.fn.__name__: each._names for each in kernels()}
        for kernel, names in parameters.items():
            launches = [each.values for each in self.executed if each.kernel == kernel]
            for name in names:
                values = {each.get(name, "given") for each in launches}
                only = values.pop() if len(values) == 1 else ...
                if not launches or only is None or isinstance(only, bool):
                    yield f"{kernel}: {name} other than {only}" if launches else kernel


@cache
def kernels() -> list[Kernel]:
    """All of this backend."""
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    found = [each for module in modules for each in vars(module).values()]
    return [each for each in found if isinstance(each, Kernel)]


@cache
def compiled_for(capability: int) -> list[dict[Any, Any]]:
    """What each kernel has been compiled to."""
    return [{} for _ in kernels()]


def use(capability: int) -> None:
    """Compiles and launches for this GPU; to Triton each is a device of its own."""
    driver = triton.runtime.driver.active
    Current.gpu = CAPABILITIES.index(capability)
    driver.get_current_target = lambda: GPUTarget("cuda", capability, 32)
    for kernel, compiled in zip(kernels(), compiled_for(capability), strict=True):
        kernel.compiled = compiled


launches = Launches()
Kernel.run = staticmethod(launches.run)  # type: ignore[method-assign]
Kernel.load = staticmethod(launches.load_once)  # type: ignore[method-assign]


for owner, name in executor.ALLOCATORS:
    setattr(owner, name, executor.poisoned(getattr(owner, name), lambda: launches.strict))


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.node.originalname
    if name == TOO_LARGE:
        pytest.skip("too large for the executor of PTX")
    use(CAPABILITIES[sum(request.path.stem.encode()) % len(CAPABILITIES)])
    monkeypatch.setattr(launches, "strict", not name.startswith(BROKEN_OFFSETS))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["executed"] = [tuple(each) for each in launches.executed]
    elif "PTX_COMPLETE" in os.environ and any(launches.missing()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker of xdist has executed, unless it crashed."""
    output = getattr(node, "workeroutput", {"executed": []})
    launches.executed += [Executed(*each) for each in output["executed"]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = launches.missing() if "PTX_COMPLETE" in os.environ else ()
    terminalreporter.write_line("\n".join(f"never executed: {each}" for each in missing))
