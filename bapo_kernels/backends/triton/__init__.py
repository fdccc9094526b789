"""Kernels in Triton for NVIDIA and AMD GPUs, or interpreted on the CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from ..._ops import SCHEMAS, TRITON, register

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not INTERPRETED and torch.cuda.device_count() == 0:
        return "no GPU that torch can use, and TRITON_INTERPRET is not 1"
    return None


# Why the backend cannot run on this machine; None if it can.
WHY_NOT = _why_not()


def _kernel(name: str) -> Any:
    def run(*arguments: Any) -> None:
        from . import checks, row_pass, tokens  # at the first call: importing Triton takes a while

        checks.check(name, arguments)
        with torch.cuda.device_of(arguments[0]):
            getattr(row_pass if hasattr(row_pass, name) else tokens, name)(*arguments)

    return run


for _name in SCHEMAS:
    register(TRITON, _name, _kernel(_name), ("CUDA", "CPU") if INTERPRETED else ("CUDA",))
