"""Distillation: the teacher of a batch, and the loss in plain PyTorch on log-probs of its top K."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels.distillation import kl, with_tail

APART = 0.3  # from the teacher's rows to the student's, in their standard deviation


class Teacher(NamedTuple):
    """Of the student's head; ids are int64 ``[N, K]``, the most probable, log-probs float32.

    ``hidden_states`` are ``[N, H]``, and None of a batch of logits.
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
            hidden += [part] if weight else []
            logits = (F.linear(part, *weight) if weight else part).float()
            top, places = logits.topk(K)
            ids.append(places)
            log_probs.append(top - logits.logsumexp(-1, keepdim=True))
        return cls(torch.cat(hidden) if hidden else None, torch.cat(ids), torch.cat(log_probs))


def forward_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """``KL(teacher | student)`` of each row, over K ids and one bucket for all others."""
    return kl(with_tail(teacher_log_probs), with_tail(log_probs))
