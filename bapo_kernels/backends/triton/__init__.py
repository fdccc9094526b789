"""Registers the Triton kernels, for NVIDIA and AMD GPUs, or interpreted on the CPU.

May import ``core.operators`` alone. ``import bapo_kernels`` must not import Triton, which takes
longer than the package: the other files of this folder are imported at the first call.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ...core.operators import SCHEMAS, implement


@cache
def _why_no_triton() -> str | None:
    """Why Triton must not be imported: it is absent, or, as its file says, too old."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "triton is not installed"
    found = re.search(r"__version__ = ['\"](.+?)['\"]", Path(spec.origin).read_text())
    too_old = found and TorchVersion(found[1]) < "3.6"  # 3.4 fails at the first call
    return f"triton must be 3.6 or later, got {found[1]}" if found and too_old else None


def _is_interpreted() -> bool:
    """Whether Triton interprets kernels, by its own rule; rarely needs its slow import."""
    may_be = "TRITON_INTERPRET" in os.environ or "triton" in sys.modules
    if not may_be or _why_no_triton() is not None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


INTERPRETED = _is_interpreted()


@cache
def why_not() -> str | None:
    """Why the backend cannot run on this machine, or ``None``; asks for GPUs."""
    if (reason := _why_no_triton()) is not None:
        return reason
    if not INTERPRETED and torch.cuda.device_count() == 0:
        return "no GPU that torch can use, and TRITON_INTERPRET is not 1"
    return None


@cache
def _operators() -> dict[str, Callable[..., None]]:
    """The launchers, each in a module as the function of its name."""
    names = (
        *("prepare", "row_pass", "row_gradient", "search", "sequences", "token_loss"),
        *("sampling_sets", "head_sampling_sets", "sample_rows"),
    )
    modules = [importlib.import_module(f".{name}", __name__) for name in names]
    return {name: f for module in modules for name, f in vars(module).items() if name in SCHEMAS}


def _launch(name: str, *arguments: Any) -> None:
    """Runs an operator on the device of its arguments, without checks."""
    device = arguments[0].device
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        _operators()[name](*arguments)
        return
    with torch.cuda.device(device):
        _operators()[name](*arguments)


def _checked_launch(name: str, *arguments: Any) -> None:
    from .checks import check

    check(name, arguments)
    _launch(name, *arguments)


# The operators of every loss: public functions check what the caller gives, and make the rest.
_UNCHECKED = (
    *("prepare", "row_statistics", "row_pass", "row_pass_", "search", "token_loss"),
    *("row_gradient", "row_gradient_", "scale_"),
)


def implement_all(keys: Iterable[str]) -> None:
    """Registers the launchers of all operators, for tensors of these dispatch keys."""
    for name in SCHEMAS:
        unchecked = partial(_launch, name) if name in _UNCHECKED else None
        implement("triton", name, partial(_checked_launch, name), keys, unchecked)


implement_all(("CUDA", "CPU") if INTERPRETED else ("CUDA",))
