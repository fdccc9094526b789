"""The GPUs that shares of a copy are predicted for; assumptions, nothing was measured here."""

from __future__ import annotations

from dataclasses import dataclass

ISSUED_PER_CLOCK = 4  # instructions of a warp, by a multiprocessor
EXPS_PER_CLOCK = 16  # of threads, by a multiprocessor
WARP = 32


@dataclass(frozen=True)
class GPU:
    name: str
    arch: str
    multiprocessors: int
    clock: float  # per second, under load
    copy: float  # bytes per second that a copy reads and writes

    def issue_share(self, issued: float, bytes_moved: int) -> float:
        """Issue slots of this many instructions per element, as a share of moving its bytes."""
        return self._share(issued / WARP / ISSUED_PER_CLOCK, bytes_moved)

    def exp_share(self, exps: float, bytes_moved: int) -> float:
        """The same of the unit that computes the exps."""
        return self._share(exps / EXPS_PER_CLOCK, bytes_moved)

    def _share(self, clocks: float, bytes_moved: int) -> float:
        return clocks / (self.multiprocessors * self.clock) / (bytes_moved / self.copy)


GPUS = (
    GPU("H100 SXM", "sm_90", 132, 1.755e9, 3.0e12),
    GPU("H200", "sm_90", 132, 1.755e9, 4.3e12),
    GPU("B200", "sm_100", 148, 1.85e9, 7.0e12),
)
