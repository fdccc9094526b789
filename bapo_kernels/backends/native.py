"""The C++ library: found beside the package, loaded once, its absence explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .. import _ops as _ops  # schemas come before the kernels that implement them

OLDEST_TORCH = "2.10"  # whose stable ABI the library is built for
_PACKAGE = Path(__file__).resolve().parent.parent


def build_info() -> dict[str, Any]:
    """What ``setup.py`` wrote about the build; empty if it never ran."""
    path = _PACKAGE / "_build.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _load() -> str | None:
    path = _PACKAGE / "_C.abi3.so"
    if not path.exists():
        reason = build_info().get("native") or f"setup.py has not built it in {_PACKAGE.parent}"
        return f"the native library is absent: {reason}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = f"the native library does not load: {error}"
        if TorchVersion(torch.__version__) < OLDEST_TORCH:
            reason = f"torch must be {OLDEST_TORCH} or later, got {torch.__version__}; {reason}"
        return reason
    return None


def _why_no_cuda() -> str | None:
    info = build_info()
    if "cuda" not in info:
        return f"built without CUDA: {info.get('why no cuda', 'unknown build')}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count() == 0:
        return "no NVIDIA GPU that torch can use"
    return None


# Why a backend cannot run on this machine; None if it can.
WHY_NO_CPU = _load()
WHY_NO_CUDA = WHY_NO_CPU or _why_no_cuda()
