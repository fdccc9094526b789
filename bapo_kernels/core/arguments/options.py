"""The options of the public functions as typed dictionaries, which mypy checks from end to end.

Imports public data classes alone.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import BAPOConfig
from ...output import GivenBounds
from ...sampling_mask import SamplingMask
from ..call import Statistics


class TokenOptions(TypedDict, total=False):
    """What a loss may be given per token, and the normalisers of its aggregation."""

    cu_seqlens: Tensor | None
    rollout_log_probs: Tensor | None
    rollout_is_weights: Tensor | None
    ref_log_probs: Tensor | None
    batch_num_tokens: float | Tensor | None
    global_batch_size: float | Tensor | None
    dp_size: int


class LossOptions(TokenOptions, total=False):
    """Keyword arguments of every loss; :func:`bapo_kernels.bapo_loss` documents them."""

    config: BAPOConfig | None
    bounds: GivenBounds | None
    statistics: Statistics
    process_group: dist.ProcessGroup | None


class LogitsOptions(LossOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_loss`."""

    temperature: Tensor | None
    sampling_mask: SamplingMask | None
    backend: str | None
    inplace: bool
    vocab_group: dist.ProcessGroup | None


class LinearOptions(LossOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_linear_loss`."""

    bias: Tensor | None
    temperature: Tensor | None
    sampling_mask: SamplingMask | None
    backend: str | None
    chunk_tokens: int | None
    logits_dtype: torch.dtype | None
    vocab_group: dist.ProcessGroup | None
