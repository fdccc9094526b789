"""What the benchmarks take from the emulations of a GPU in tests/, which import no benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
CUDA_ON_HOST = TESTS / "cuda_on_host"  # stands for the CUDA runtime
sys.path.insert(0, str(TESTS))

from ptx.absent_gpu import absent_gpu  # noqa: E402

__all__ = ["CUDA_ON_HOST", "absent_gpu"]
