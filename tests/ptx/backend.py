"""Triton's kernels compiled for a GPU that is not there, and their PTX executed on CPU tensors.

With the environment variable TRITON_PTX, 80 or 90, tests of the backend ``triton`` run so instead
of in Triton's interpreter. PTX_SEED is the seed of the schedules, PTX_ERRORS that of the errors of
approximate instructions (0: none).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

os.environ["TRITON_INTERPRET"] = "1"
import bapo_kernels  # noqa: F401  (registers operators for CPU tensors)

# Triton itself must not be interpreted, and decides that when it is imported.
os.environ["TRITON_INTERPRET"] = "0"
import triton
from triton.backends.compiler import GPUTarget

triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"  # what the tests go by

from absent_gpu import AbsentGPU  # noqa: E402

from . import executor  # noqa: E402

CAPABILITY = int(os.environ["TRITON_PTX"])
ERRORS = int(os.environ.get("PTX_ERRORS", "0"))
MULTIPROCESSORS = 2  # so that programs stride over rows
# Tests with offsets that are broken: programs may write one place, or leave a place unwritten that
# others read, as the results mean nothing then. That nothing else is touched is still checked.
BROKEN_OFFSETS = {
    "test_broken_offsets",
    "test_broken_offsets_of_sequences",
    "test_broken_offsets_touch_nothing_foreign",
}
TOO_LARGE = {"test_offsets_beyond_32_bits"}  # the shadow of a byte takes up to 28


triton.runtime.driver.set_active(AbsentGPU(GPUTarget("cuda", CAPABILITY, 32), MULTIPROCESSORS))

from bapo_kernels.backends.triton import launch  # noqa: E402
from bapo_kernels.backends.triton.kernel import Kernel  # noqa: E402

assert not launch.INTERPRETED


class Executed(NamedTuple):
    """One launch."""

    kernel: str
    variant: str
    instructions: int
    seconds: float


class Launches:
    """Takes the place of ``Kernel.run``, and keeps count."""

    def __init__(self) -> None:
        self.schedules = random.Random(int(os.environ.get("PTX_SEED", "1")))
        self.strict = True
        self.executed: list[Executed] = []

    def run(self, compiled: Any, grid: tuple[int, int, int], values: list[Any]) -> None:
        arguments = [
            float(value) if kind in ("fp32", "fp64") else value
            for kind, value in zip(compiled.src.signature.values(), values, strict=True)
            if kind != "constexpr"
        ]
        loaded = executor.load(compiled.asm["ptx"])
        begin = time.process_time()
        outcome = executor.launch(
            loaded,
            grid,
            32 * compiled.metadata.num_warps,
            arguments,
            shared_bytes=compiled.metadata.shared,
            seed=self.schedules.getrandbits(60) | 1,
            error_seed=ERRORS,
            races=self.strict,
        )
        seconds = time.process_time() - begin
        done = Executed(loaded.kernel.name, compiled.hash, outcome.lane_instructions, seconds)
        self.executed.append(done)

    def report(self) -> list[str]:
        """A line for each kernel: variants, launches, instructions of lanes, and what one took."""
        lines = []
        for name in sorted({each.kernel for each in self.executed}):
            of_kernel = [each for each in self.executed if each.kernel == name]
            variants = len({each.variant for each in of_kernel})
            instructions = sum(each.instructions for each in of_kernel)
            ns = 1e9 * sum(each.seconds for each in of_kernel) / max(1, instructions)
            lines.append(
                f"{name}: {variants} variants, {len(of_kernel)} launches, "
                f"{instructions:,} instructions of threads, {ns:.1f} ns each"
            )
        return lines


launches = Launches()
Kernel.run = staticmethod(launches.run)  # type: ignore[method-assign]


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that allocates, with memory that counts as never written."""

    @wraps(make)
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = make(*arguments, **options)
        plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.is_quantized
        return executor.poison(tensor) if plain and launches.strict and tensor.numel() else tensor

    return made


for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
    setattr(owner, name, poisoned(getattr(owner, name)))
