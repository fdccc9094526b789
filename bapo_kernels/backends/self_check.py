"""Compares the CUDA kernels with torch in float64, on a few rows, at the first call on a GPU.

May import ``checks``, ``config``, ``output``, ``native``, ``core.operators``. A file remembers for
which library, GPU and driver they agreed: whatever else may change a result must change its name.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..checks import runs_while_traced, warn_once
from ..config import BAPOConfig
from ..core.operators import FIELDS, SCHEMAS, ops_of
from ..output import REPORT
from . import native

_C: Any = torch._C
Comparisons = Iterator[tuple[str, Tensor, Tensor]]  # operator, its result, and the truth
Result = TypeVar("Result")

enabled = True  # False before the first call leaves the check out, like BAPO_SELF_CHECK=0

# Numbers of columns for the generic row pass and for clusters of every size, some not aligned.
_BF16, _F32 = torch.bfloat16, torch.float32
ROWS = [*((V, _BF16) for V in (257, 10_000, 30_001, 60_000, 151_936)), (257, _F32), (151_936, _F32)]
GPU = "cuda"  # has streams
BOUNDS = (0.6, 2.0)  # the result of the reference for the tokens of _search

_found: dict[int | None, str | None] = {}  # verdict by GPU
_lock = threading.Lock()


def why_not(device: torch.device) -> str | None:
    """The reason if a kernel is wrong on this GPU, or ``None``; the first call finds out."""
    if not torch.compiler.is_compiling() and device.index not in _found and _can_run_now():
        with _lock:
            if device.index not in _found:
                with suppress(torch.OutOfMemoryError):  # no fault of a kernel: a later call checks
                    _found[device.index] = _verdict(device)
    return known(device)


@runs_while_traced
def known(device: torch.device) -> str | None:
    """The verdict on this GPU, if it has been checked."""
    return _found.get(device.index)


def _can_run_now() -> bool:
    """Whether kernels can be launched and synchronised: nothing is traced, captured or fake."""
    traced = _C._len_torch_dispatch_stack() or _C._are_functorch_transforms_active()
    if traced or not torch.cuda.is_initialized():
        return False
    return not torch.cuda.is_current_stream_capturing() and not torch.cuda.get_sync_debug_mode()


def _verdict(device: torch.device) -> str | None:
    if not enabled or os.environ.get("BAPO_SELF_CHECK") == "0":
        return None
    agreed = _record(device)
    if os.path.exists(agreed):
        return None
    with torch.no_grad():
        failure = first_failure(ops_of("cuda"), device)
    if failure is None:
        with suppress(OSError):
            agreed.parent.mkdir(parents=True, exist_ok=True)
            agreed.touch()  # empty, so that no process reads a part of it
    else:
        warn_once(
            f"bapo_kernels: a CUDA kernel fails its check on {device}: {failure}. Another backend "
            'takes over, except where backend="cuda" is given. Please report this with the file '
            "that `python -m bapo_kernels validate --json FILE` writes.",
            RuntimeWarning,
        )
    return failure


def _record(device: torch.device) -> Path:
    """The file that exists if the kernels have agreed."""
    gpu, no_clusters = torch.cuda.get_device_properties(device), os.environ.get("BAPO_NO_CLUSTERS")
    facts = repr((gpu, native.cuda_of_driver(), torch.__version__, no_clusters)).encode()
    checksum = hashlib.sha256(native.LIBRARY.read_bytes() + facts).hexdigest()
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder, "bapo_kernels", f"agreed-{checksum[:32]}")


def first_failure(ops: Any, device: torch.device) -> str | None:
    """The first operator that raises, or is further from the truth than rounding explains."""
    g = torch.Generator(device).manual_seed(0)
    longest = max(V for V, _ in ROWS)
    logits = 3 * torch.randn(2, longest, generator=g, dtype=_F32, device=device)
    checks = {"600 tokens": _search(ops, device), "two sets": _passes(ops, logits[:, :700])}
    checks["two samples"] = _samples(ops, logits[None, :, :700] / 3)
    for V, dtype in ROWS:
        rows = logits[None, :, :V].to(dtype)
        checks[f"rows of {V:,} columns in {str(dtype)[6:]}"] = _passes(ops, rows)
    if device.type == GPU:
        ops = SimpleNamespace(**{name: partial(late, getattr(ops, name)) for name in SCHEMAS})
        checks["600 tokens in a side stream"] = _search(ops, device)
        for V in (ROWS[0][0], longest):  # without and with a cluster
            rows = logits[None, :, :V].bfloat16()
            checks[f"rows of {V:,} columns in a side stream"] = _passes(ops, rows)
    for name, comparisons in checks.items():
        try:
            for operator, got, truth in comparisons:
                rounding = torch.finfo(got.dtype).eps / 2 + 1e-5  # of the result, and before
                share = (got.double() - truth).abs() / (rounding * truth.abs() + 1e-37)
                if not share.max() <= 1:  # NaN fails too
                    most = f"{share.max():.3g} times what rounding explains"
                    return f"{operator} of {name} is off by {most}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return None


def late(call: Callable[..., Result], *arguments: Any) -> Result:
    """Calls in a side stream, where the tensors get their values behind a sleep of some 10 ms.

    A kernel on another stream is too early: it reads zeros, and what it writes is overwritten.
    """
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    device, values = tensors[0].device, [tensor.detach().clone() for tensor in tensors]
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            for tensor in tensors:
                tensor.detach().zero_()
            call(*arguments)  # the first one loads and allocates, which may wait for the GPU
            torch.cuda._sleep(20_000_000)
            for tensor, value in zip(tensors, values, strict=True):
                tensor.detach().copy_(value)
            return call(*arguments)
    finally:
        here.wait_stream(side)  # also before the memory of a failed call is used again


def _passes(ops: Any, rows: Tensor) -> Comparisons:
    """Runs two rows at ratio 1: logits ``[1, 2, V]``, or values ``[2, V]`` of sets."""
    V, are_sets, device = rows.shape[-1], rows.ndim == 2, rows.device
    labels = torch.tensor([[V // 3], [V - 1]], device=device)
    log_p = rows.reshape(2, V).double().log_softmax(1)
    p = log_p.exp()
    statistics = torch.cat([log_p.gather(1, labels)[:, 0], torch.special.entr(p).sum(1)])
    gradient = p - (torch.arange(V, device=device) == labels).double()  # of -log_probs.sum()
    x = rows.clone(memory_format=torch.contiguous_format)
    out, ones = torch.empty_like(x), torch.ones(2, dtype=torch.float64, device=device)
    found = torch.full((8,), torch.nan, dtype=torch.float64, device=device)
    weights, dlog_probs = ones * torch.nan, ones * torch.nan
    tokens = weights.float().repeat(len(FIELDS), 1)
    report = torch.full((len(REPORT),), torch.nan, dtype=torch.float32, device=device)
    operands = dict(
        logits=x.flatten() if are_sets else x,
        dlogits=out.flatten() if are_sets else out,
        offsets=torch.tensor([0, V, 2 * V], device=device) if are_sets else None,
        labels_or_log_probs=labels,
        fields=[ones[:, None].float(), *[None] * (len(FIELDS) - 1)],  # advantages
        present=1,
        scale=2.0,  # over two tokens: each has a weight of 1
        live=False,
        bounds=torch.tensor([0.8, 1.2], dtype=torch.float32, device=device),
        options=BAPOConfig().options,
        **dict(unmasked=~ones.bool(), counted=~ones.bool(), labels=0 * labels.flatten()),
        **dict(weights=weights, tokens=tokens, ticket=torch.ones_like(report[:1]).int()),
        **dict(log_probs=found[:2], entropy=found[2:4], stats=found[4:].view(2, 2)),
        **dict(report=report, dlog_probs=dlog_probs, undecided=ones.byte()),
    )
    _call(ops, "prepare", operands)
    yield "prepare", weights, ones
    for operator, result, truth in (
        ("row_statistics", found[:4], statistics),
        ("token_loss", report[:2], -2 * ones),  # loss and pg_loss
        ("row_gradient", out.view(2, V), gradient),
        ("row_pass", out.view(2, V), gradient),
        ("row_pass_", x.view(2, V), gradient),
    ):
        out.fill_(torch.nan)
        if operator.startswith("row_pass"):  # the others need those of row_statistics
            found.fill_(torch.nan)
        _call(ops, operator, operands)
        yield operator, found[:4], statistics
        yield operator, result, truth


def _samples(ops: Any, rows: Tensor) -> Comparisons:
    """Draws samples of two rows: of all ids, and of ids that are all below the threshold."""
    V, device = rows.shape[-1], rows.device
    labels = torch.tensor([[V // 3], [V - 1]], device=device)
    log_p = rows[0].double().log_softmax(1)
    beside = -torch.expm1(log_p.gather(1, labels)[:, 0])
    made = torch.full((2, V + 1), torch.nan, dtype=torch.float32, device=device)
    operands: dict[str, Any] = dict(
        logits=rows,
        labels=labels,
        counted=beside > 0,
        **dict(log_probs=beside + 0, entropy=beside + 0, stats=log_p[:, :2] * torch.nan),
        beside=beside,
        seeds=labels[:, 0].int(),
        present=0,
        options=BAPOConfig().options,
        counts=torch.zeros_like(labels[:, 0]).int(),
        ids=torch.zeros_like(made).int(),
        values=made,
        drawn=torch.full((2, 4), torch.nan, dtype=torch.float64, device=device),
    )
    _call(ops, "row_statistics", operands)
    _call(ops, "sample_rows", operands | dict(gradient_samples=2**16))
    yield "sample_rows", operands["counts"].float(), torch.full_like(beside, V)
    yield "sample_rows", made[:, :V], rows[0].double()
    yield "sample_rows", operands["ids"][:, :V].float(), torch.arange(V, device=device).double()
    _call(ops, "sample_rows", operands | dict(gradient_samples=1))
    yield "sample_rows", operands["drawn"][:, 3] / operands["stats"][:, 1], beside


def _search(ops: Any, device: torch.device) -> Comparisons:
    k = torch.arange(600, device=device).double()
    old, advantages = (-1 - k % 7 / 7).float(), torch.where(k % 3 == 0, 1.35, -1.0).float()
    bounds = torch.full((2,), torch.nan, dtype=torch.float32, device=device)
    operands = dict(
        log_probs=old + (k % 11 - 5) / 7,
        counted=k >= 0,
        tokens=torch.stack([advantages, *[old] * (len(FIELDS) - 1)]),
        present=3,  # advantages and old log-probs
        options=BAPOConfig().options,
        bounds=bounds,
        masses=k.new_empty(6),
    )
    _call(ops, "search", operands)
    yield "search", bounds, torch.tensor(BOUNDS, dtype=torch.float64, device=device)


def _call(ops: Any, operator: str, operands: dict[str, Any]) -> None:
    """Calls an operator with those of the operands that it has, and ``None`` for the others."""
    names = [argument.split()[-1] for argument in SCHEMAS[operator].split(", ")]
    getattr(ops, operator)(*map(operands.get, names))
