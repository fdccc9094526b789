"""The backends: which can run here, why the others cannot, and the choice between them.

May import ``checks`` and the files of this folder. Must not import Triton or initialise CUDA at
import: ``import bapo_kernels`` would do so too.
"""

from __future__ import annotations

import torch

from ..checks import refuse, runs_while_traced, warn_once
from . import native, self_check, triton

NAMES = ("cuda", "triton", "cpu", "reference")
# Triton's interpreter is for tests: it runs only if the caller names the backend.
_UNASKED = tuple(n for n in NAMES if n != "triton" or not triton.INTERPRETED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernels take


def available_backends() -> dict[str, str | None]:
    """Backends in order of preference: ``None`` if one can run here, else the reason why not.

    With several GPUs, the answer is about the current one.

    Examples:
        >>> for name, reason in available_backends().items():
        ...     print(name, reason or "runs here")  # doctest: +ELLIPSIS
        cuda ...
        triton ...
        cpu ...
        reference runs here
    """
    reasons = {name: _why_not_here(name) for name in NAMES}
    for name in ("cuda", "triton"):
        interpreted = name == "triton" and triton.INTERPRETED
        if reasons[name] is None and not interpreted and not torch.cuda.is_available():
            # A GPU was counted without its driver, which may be too old for this torch.
            reasons[name] = f"CUDA of torch {torch.__version__} does not start"
    if reasons["cuda"] is None:
        reasons["cuda"] = native.why_no_kernels(torch.device("cuda"))
    return reasons


@runs_while_traced
def _why_not_here(backend: str) -> str | None:
    """Why a backend cannot run on this machine, or ``None``."""
    if backend == "cuda":
        return native.why_no_cuda()
    if backend == "triton":
        return triton.why_not()
    return native.WHY_NO_CPU if backend == "cpu" else None


def choose(backend: str | None, tensor: torch.Tensor, name: str) -> str:
    """The backend for ``tensor``, an argument called ``name``.

    Raises:
        ValueError: the named backend is unknown or cannot run on this tensor.
    """
    if backend is None:
        backend = next(n for n in _UNASKED if _why_not_unasked(n, tensor, name) is None)
        if backend in ("triton", "reference") and tensor.dtype in _DTYPES:
            _warn_of_fallback(backend, tensor.device)
        elif backend == "reference":
            _warn_of_float64()
    elif backend not in NAMES:
        raise ValueError(f"backend must be None or one of {list(NAMES)}, got {backend!r}")
    elif (reason := why_not(backend, tensor, name)) is not None:
        raise ValueError(f"backend {backend!r} cannot run: {reason}")
    elif backend == "cuda":
        self_check.why_not(tensor.device)  # only warns, as the caller named it
    if backend == "reference" and tensor.device.type == "meta":
        refuse(name, "have values", "a tensor on the meta device")
    return backend


def why_not(backend: str, tensor: torch.Tensor, name: str) -> str | None:
    """Why a backend cannot run on ``tensor``, or ``None``."""
    reason = _why_not_here(backend)
    if reason is not None or backend == "reference":
        return reason
    on_cpu = backend == "cpu" or (backend == "triton" and triton.INTERPRETED)
    device = "cpu" if on_cpu else "cuda"
    if tensor.device.type != device:
        return f"{name} must be on a {device} device, got {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}"
    return native.why_no_kernels(tensor.device) if backend == "cuda" else None


def _why_not_unasked(backend: str, tensor: torch.Tensor, name: str) -> str | None:
    reason = why_not(backend, tensor, name)
    return self_check.why_not(tensor.device) if backend == "cuda" and reason is None else reason


@runs_while_traced
def _warn_of_float64() -> None:
    warn_once(
        "bapo_kernels runs float64 on the PyTorch reference, many times slower than its kernels, "
        "which take float32, bfloat16 and float16. Where a function has that argument, "
        "backend='reference' avoids this warning."
    )


@runs_while_traced
def _warn_of_fallback(backend: str, device: torch.device) -> None:
    """Warns that a slower backend takes the place of kernels that a build could have."""
    if device.type not in ("cpu", "cuda"):  # no other device has kernels
        return
    slower, why = "the PyTorch reference, many times slower than its kernels", "none of them can"
    install = "pip install --no-build-isolation -e . in the source folder"
    if device.type == "cpu":
        absent = f"cpu: {native.WHY_NO_CPU}"
        cure = f"install torch and a C++20 compiler and build again ({install})"
        if not native.build_info():  # these are sources, and the built package is elsewhere
            cure = f"work in another folder, or build here ({install})"
    else:
        cuda = native.why_no_cuda() or native.why_no_kernels(device)
        absent, listed = f"cuda: {cuda or self_check.known(device)}", _listed(device)
        cure = f"build again with nvcc on the path (TORCH_CUDA_ARCH_LIST={listed} {install})"
        if backend == "triton":
            if cuda is None or listed is None:
                return  # the self-check has warned, or no build has kernels for this GPU
            slower, why = "its Triton kernels", "those of the CUDA backend cannot"
        else:
            absent += f"; triton: {triton.why_not() or 'TRITON_INTERPRET=1 is for the CPU'}"
            cure = f"pip install triton, or {cure}" if listed else "pip install triton"
    warn_once(
        f"bapo_kernels runs on {slower}, because {why} run on {device} here ({absent}). "
        f"To have them, {cure}; python -m bapo_kernels shows what was built. "
        f"backend={backend!r} avoids this warning."
    )


def _listed(device: torch.device) -> str | None:
    """TORCH_CUDA_ARCH_LIST of a build for this GPU, on any machine; ``None`` if there is none."""
    if torch.version.hip:
        return None
    if not torch.cuda.is_available():  # a fake tensor
        return "all"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}" if major >= 8 else None
