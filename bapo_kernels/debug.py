"""What the fast path cannot afford: checks that read values, and a report of the environment."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._ops import ops_of
from .backends import available_backends, native
from .config import IGNORE_INDEX, BAPOConfig
from .distributed import whole_vocabulary
from .inputs import check_group, check_logits, token_inputs


def check_inputs(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    **unread: Any,
) -> None:
    """Raises for the first bad value at an unmasked token. Reads the device; for debugging.

    Takes the arguments of :func:`bapo_kernels.bapo_loss`; those not named here are not looked at.

    Bad are labels outside of ``[0, V)``, NaN or +inf logits, rows of -inf alone, and anything not
    finite in the other arguments. They make the loss NaN in :func:`bapo_kernels.bapo_loss`. With
    ``vocab_group`` every rank of it must call; indices are those of the whole vocabulary.

    Raises:
        ValueError: with the argument's name, the index and the value.

    Examples:
        >>> batch = torch.zeros(2, 4), torch.tensor([1, 4]), None, torch.ones(2)
        >>> bapo_loss(*batch).loss
        tensor(nan)
        >>> debug.check_inputs(*batch)
        Traceback (most recent call last):
        ValueError: labels must be in [0, 4) or -100, got 4 at (1,)
    """
    check_logits(logits, labels, vocab_group)
    check_group("vocab_group", vocab_group)
    logits = whole_vocabulary(logits, vocab_group, -1)
    tokens = token_inputs(
        labels,
        "labels",
        BAPOConfig(),
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        cu_seqlens=cu_seqlens,
        weighted=False,
    )
    V = logits.shape[-1]
    live = tokens.live.view(labels.shape)
    outside = live & ((labels < 0) | (labels >= V)) & (labels != IGNORE_INDEX)
    _raise_first("labels", f"be in [0, {V}) or {IGNORE_INDEX}", outside, labels)
    _check_offsets(cu_seqlens, labels.numel())
    given = {
        "old_log_probs": tokens.old,
        "advantages": tokens.advantages,
        "rollout_log_probs": tokens.rollout,
        "rollout_is_weights": tokens.is_weights,
        "ref_log_probs": tokens.ref,
    }
    for name, values in given.items():
        if values is not None:
            values = values.view(labels.shape)
            _raise_first(name, "be finite", live & ~values.isfinite(), values)
    for index in live.nonzero():
        row = logits[tuple(index)]
        bad = row.isnan() | (row == torch.inf)
        at = tuple(index.tolist())
        _raise_first("logits", "be finite or -inf", bad, row, at)
        if bool((row == -torch.inf).all()):
            raise ValueError(f"logits must allow a token in every row, got -inf alone at {at}")


def _raise_first(
    name: str, rule: str, bad: Tensor, values: Tensor, prefix: tuple[int, ...] = ()
) -> None:
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must {rule}, got {values[index].item()} at {prefix + index}")


def _check_offsets(cu_seqlens: Tensor | None, N: int) -> None:
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] > N or sorted(offsets) != offsets:
        raise ValueError(f"cu_seqlens must rise from 0 to at most {N}, got {offsets}")


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Runs the CPU kernels of another instruction set: to test them, or to reproduce a result.

    Args:
        name: ``"avx512bf16"``, ``"avx512"``, ``"avx2"`` or ``"portable"``.

    Raises:
        RuntimeError: this processor does not have it.

    Examples:
        >>> with debug.instruction_set("portable"):
        ...     debug.environment()["cpu kernels"]
        'portable'
    """
    ops = ops_of("cpu")
    in_use = ops.instruction_set("")
    ops.instruction_set(name)
    try:
        yield
    finally:
        ops.instruction_set(in_use)


def environment() -> dict[str, str]:
    """Versions, and for each backend whether it can run here or the reason why not.

    Examples:
        >>> debug.environment()["backend reference"]
        'available'
    """
    from . import __version__

    report = {
        "bapo_kernels": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    }
    info = native.build_info()
    if info:
        report["native build"] = ", ".join(f"{k}: {v}" for k, v in info.items() if v)
    if native.WHY_NO_CPU is None:
        report["cpu kernels"] = ops_of("cpu").instruction_set("")
    for name, reason in available_backends().items():
        report[f"backend {name}"] = "available" if reason is None else f"absent: {reason}"
    return report
