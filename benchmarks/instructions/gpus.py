"""The GPUs that times are predicted for; assumptions, nothing was measured here."""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 228 << 10  # bytes of a multiprocessor of sm_90 and sm_100


@dataclass(frozen=True)
class GPU:
    name: str
    arch: str  # of the code that runs on it
    multiprocessors: int
    clock: float  # per second, under load
    copy: float  # bytes per second that a copy reads and writes
    l2_speed: float  # bytes per second
    l2: int  # bytes
    l1: int  # of a multiprocessor, with its shared memory
    warps: int = 64  # resident on a multiprocessor, at most
    blocks: int = 32
    fp32: int = 128  # operations of a multiprocessor per clock
    fp64: int = 64
    boost: float = 0.0  # the highest clock, where the one under load is not known

    @property
    def l2_used(self) -> float:
        """Half of an L2 in two parts, which both hold what both read."""
        return 0.5 if self.name in ("A100", "H100", "H200") else 1.0

    def resident(self, warps: int, registers: int) -> int:
        """Blocks of so many warps on a multiprocessor, if shared memory does not limit them."""
        by_registers = 65_536 // (-(-registers // 8) * 8 * 32 * warps)
        return min(self.blocks, self.warps // warps, by_registers)


MB, TB = 1 << 20, 1e12
GPUS = (
    GPU("A100", "sm_80", 108, 1.41e9, 1.75 * TB, 4.5 * TB, 40 * MB, 192 << 10, fp32=64, fp64=32),
    GPU("L40S", "sm_80", 142, 2.3e9, 0.75 * TB, 4.5 * TB, 48 * MB, 128 << 10, 48, 24, fp64=2),
    GPU("RTX 4090", "sm_80", 128, 2.5e9, 0.92 * TB, 4.5 * TB, 72 * MB, 128 << 10, 48, 24, fp64=2),
    GPU("H100", "sm_90", 132, 1.755e9, 3.0 * TB, 5.5 * TB, 50 * MB, 256 << 10, boost=1.98e9),
    GPU("H200", "sm_90", 132, 1.755e9, 4.3 * TB, 5.5 * TB, 50 * MB, 256 << 10, boost=1.98e9),
    GPU("B200", "sm_100", 148, 1.85e9, 7.0 * TB, 10 * TB, 126 * MB, 256 << 10),
)
