"""Distillation: the teacher of a batch, and the loss in plain PyTorch on log-probs of its top K."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

APART = 0.3  # standard deviation of what a teacher adds to the student's rows, in theirs
LEAST_TAIL = 1e-6  # of the student, below which float32 has no gradient for it


class Teacher(NamedTuple):
    """Of the student's head.

    Attributes:
        hidden_states: ``[N, H]``; None of a batch of logits.
        ids: int64 ``[N, K]``, the K most probable.
        log_probs: float32 ``[N, K]``, of these.
    """

    hidden_states: Tensor | None
    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, rows: Tensor, weight: list[Tensor], K: int, g: torch.Generator) -> Teacher:
        """Of hidden states and a weight, or of logits."""
        hidden, ids, log_probs = [], [], []
        for part in rows.split(256):
            noise = torch.randn(part.shape, generator=g, device=part.device, dtype=part.dtype)
            part = part + APART * (1.0 if weight else 3.0) * noise
            logits = (F.linear(part, *weight) if weight else part).float()
            top, places = logits.topk(K)
            ids.append(places)
            log_probs.append(top - logits.logsumexp(-1, keepdim=True))
            hidden += [part] if weight else []
        return cls(torch.cat(hidden) if weight else None, torch.cat(ids), torch.cat(log_probs))


def forward_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """``KL(teacher | student)`` over K ids and one bucket for all others, of each row.

    Args:
        log_probs: the student's, ``[..., K]``.
        teacher_log_probs: ``[..., K]``.
    """
    tail = _log1mexp(log_probs.logsumexp(-1).clamp(max=-LEAST_TAIL))
    teacher_tail = _log1mexp(teacher_log_probs.logsumexp(-1).clamp(max=0.0))
    kl = (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1)
    return kl + torch.where(
        teacher_tail > -torch.inf, teacher_tail.exp() * (teacher_tail - tail), 0.0
    )


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` of ``x <= 0``."""
    return (-x.expm1()).log()
