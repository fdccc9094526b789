"""Kernels in Triton for NVIDIA and AMD GPUs, or interpreted on the CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..._ops import SCHEMAS, TRITON, register, without_dispatcher


def _is_interpreted() -> bool:
    """By Triton's own rule, for which its import, which takes long, is rarely needed."""
    may_be = "TRITON_INTERPRET" in os.environ or "triton" in sys.modules
    if not may_be or importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


INTERPRETED = _is_interpreted()


@cache
def why_not() -> str | None:
    """Why the backend cannot run on this machine, or ``None``; asks for GPUs."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not INTERPRETED and torch.cuda.device_count() == 0:
        return "no GPU that torch can use, and TRITON_INTERPRET is not 1"
    return None


@cache
def _operators() -> dict[str, Callable[..., None]]:
    """Made at the first call, because the import of Triton takes long."""
    from . import head_sets, policy, prepare, row_gradient, row_pass, search, sequences, sets

    return {
        "row_statistics": row_pass.row_statistics,
        "row_pass": row_pass.row_pass,
        "row_pass_": row_pass.row_pass_,
        "row_gradient": row_gradient.row_gradient,
        "row_gradient_": row_gradient.row_gradient_,
        "prepare": prepare.prepare,
        "sequence_log_ratios": sequences.sequence_log_ratios,
        "add_sequence_means_": sequences.add_sequence_means_,
        "contributions": search.contributions,
        "solve": search.solve,
        "search": search.search,
        "policy": policy.policy,
        "find_labels": sets.find_labels,
        "gather_sets": sets.gather_sets,
        "multiply_sets": head_sets.multiply_sets,
        "sets_statistics": sets.sets_statistics,
        "sets_pass_": sets.sets_pass_,
        "sets_gradient": sets.sets_gradient,
        "sets_gradient_": sets.sets_gradient_,
        "scatter_sets": sets.scatter_sets,
        "head_sets_pass": head_sets.head_sets_pass,
        "sets_dhidden": head_sets.sets_dhidden,
        "sets_dweight": head_sets.sets_dweight,
        "scale_": row_gradient.scale_,
    }


@cache
def _check() -> Callable[[str, tuple[Any, ...]], None]:
    from .checks import check

    return check


def launcher(name: str) -> Callable[..., None]:
    """An operator that launches on the device of its arguments, without checks."""

    def run(*arguments: Any) -> None:
        device = arguments[0].device
        if device.type == "cpu" or device.index == torch.cuda.current_device():
            _operators()[name](*arguments)
            return
        with torch.cuda.device(device):
            _operators()[name](*arguments)

    return run


def kernel(name: str) -> Callable[..., None]:
    """An operator for anybody to call."""
    launch = launcher(name)

    def run(*arguments: Any) -> None:
        _check()(name, arguments)
        launch(*arguments)

    return run


# Of every loss: the public functions have checked what the caller gave, and make the rest.
_UNCHECKED = (
    *("prepare", "row_statistics", "row_pass", "row_pass_", "search", "policy"),
    *("row_gradient", "row_gradient_", "scale_"),
)
without_dispatcher(
    "triton", {name: kernel(name) for name in SCHEMAS} | {n: launcher(n) for n in _UNCHECKED}
)
for _name in SCHEMAS:
    register(TRITON, _name, kernel(_name), ("CUDA", "CPU") if INTERPRETED else ("CUDA",))
