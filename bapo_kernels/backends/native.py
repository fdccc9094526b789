"""Loads the C++ library, which lies beside the package, or explains why it is absent.

Imports ``core.operators`` and what is below it. Whatever keeps the library from loading must become
a reason, because the package also runs without it, but where BAPO_REQUIRE_NATIVE=1 is set.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ..checks import runs_while_traced
from ..config import Options
from ..core import operators  # defines the schemas, before kernels implement them
from ..output import REPORT

OLDEST_TORCH = "2.10"  # the library is built for its stable ABI
_PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY = _PACKAGE / "_C.abi3.so"


def build_info() -> dict[str, Any]:
    """The facts that ``setup.py`` wrote about the build; empty if there was none."""
    path = _PACKAGE / "_build.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _load() -> str | None:
    if not LIBRARY.exists():
        not_here = f"setup.py has not built it in {_PACKAGE.parent}, from where Python imports"
        cure = "work in another folder, or install with pip's -e"
        return f"the native library is absent: {build_info().get('native', f'{not_here}: {cure}')}"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        reason = f"the native library does not load: {error}"
        if TorchVersion(torch.__version__) < OLDEST_TORCH:
            reason = f"torch must be {OLDEST_TORCH} or later, got {torch.__version__}; {reason}"
        return reason
    difference = _difference()
    return difference and f"the native library is of other sources: {difference}: build it again"


def _difference() -> str | None:
    """The first name at whose place the library has another.

    Fields, options and metrics cross into the kernels and back by their place alone.
    """
    try:
        layout = getattr(torch.ops, operators.NATIVE).layout()
    except NotImplementedError:
        return "layout must be one of its operators, got none"
    theirs = dict(part.split(": ") for part in layout.split("; "))
    ours = {"fields": operators.FIELDS, "options": Options._fields, "report": REPORT}
    for kind, names in ours.items():
        for place, (name, got) in enumerate(zip_longest(names, theirs.get(kind, "").split(", "))):
            if name != got:
                return f"{kind}[{place}] must be {name}, got {got}"
    return None


@cache
def why_no_cuda() -> str | None:
    """Why the CUDA backend cannot run on this machine, or ``None``; asks for GPUs."""
    if WHY_NO_CPU is not None:
        return WHY_NO_CPU
    info = build_info()
    if "cuda" not in info:
        return f"built without CUDA: {info.get('why no cuda', 'unknown build')}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count() == 0:
        return "no NVIDIA GPU that torch can use"
    return None


@runs_while_traced
def why_no_kernels(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on this GPU, or ``None``; initialises CUDA."""
    return _not_built_for(*torch.cuda.get_device_capability(device))


@cache
def _not_built_for(major: int, minor: int) -> str | None:
    toolkit, _, targets = build_info()["cuda"].split(maxsplit=2)  # "13.0 for sm_80, compute_80"
    driver = cuda_of_driver() // 1000
    if driver < int(toolkit.split(".")[0]):
        return f"built with CUDA {toolkit}, the driver knows CUDA {driver}"
    # A binary (sm) runs on GPUs of its generation, and PTX (compute), which the driver compiles, on
    # those of any; both from their own version on.
    for kind, number in re.findall(r"(sm|compute)_(\d+)", targets):
        oldest = divmod(int(number), 10)
        if oldest <= (major, minor) and (kind == "compute" or oldest[0] == major):
            return None
    cure = "" if major < 8 else f": build again with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    return f"built for {targets}, the GPU is sm_{major}{minor}{cure}"


def cuda_of_driver() -> int:
    """The version of CUDA that the driver supports, 13020 for 13.2; torch does not report it."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


# Why the CPU backend cannot run on this machine; None if it can.
WHY_NO_CPU = _load()

if WHY_NO_CPU is not None and os.environ.get("BAPO_REQUIRE_NATIVE", "") not in ("", "0"):
    raise ImportError(f"BAPO_REQUIRE_NATIVE is set, and {WHY_NO_CPU}")
