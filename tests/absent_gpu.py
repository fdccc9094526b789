"""A driver for Triton without a GPU: what it asks before it compiles, and what launchers ask."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class AbsentGPU:
    def __init__(self, target: GPUTarget, multiprocessors: int = 132) -> None:
        self.target = target
        self.utils = self
        self.multiprocessors = multiprocessors

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": self.multiprocessors}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
