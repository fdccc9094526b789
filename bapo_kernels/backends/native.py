"""The C++ library: found beside the package, loaded once, its absence explained."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from .. import _ops as _ops  # schemas come before the kernels that implement them

_PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def build_info() -> dict[str, Any]:
    """What ``setup.py`` wrote about the build; empty if it never ran."""
    path = _PACKAGE / "_build.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


@functools.cache
def why_no_cpu() -> str | None:
    """Loads the library on first use; the reason if there is none."""
    path = _PACKAGE / "_C.abi3.so"
    if not path.exists():
        reason = build_info().get("native") or "setup.py has not built it"
        return f"the native library is absent: {reason}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the native library does not load: {error}"
    return None


def why_no_cuda() -> str | None:
    """CUDA kernels are not built yet."""
    return "not part of this version"
