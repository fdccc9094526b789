"""The keyword arguments of the public functions, as typed dictionaries.

Imports the public data classes and the data of a call. An option of every loss is stated here,
in the signatures of the losses, and where ``together`` checks it; mypy compares the three.
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
    """Arguments per token of every loss, and the normalisers of its aggregation."""

    cu_seqlens: Tensor | None
    rollout_log_probs: Tensor | None
    rollout_is_weights: Tensor | None
    ref_log_probs: Tensor | None
    batch_num_tokens: float | Tensor | None
    global_batch_size: float | Tensor | None
    dp_size: int


class LossOptions(TokenOptions, total=False):
    """Options of every loss; :func:`bapo_kernels.bapo_loss` documents them."""

    config: BAPOConfig | None
    bounds: GivenBounds | None
    statistics: Statistics
    process_group: dist.ProcessGroup | None


class RowOptions(LossOptions, total=False):
    """Options of a loss that computes log-probs, of logits or of hidden states."""

    temperature: float | Tensor | None
    sampling_mask: SamplingMask | None
    vocab_group: dist.ProcessGroup | None


class LogitsOptions(RowOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_loss`."""

    backend: str | None
    inplace: bool


class LinearOptions(RowOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_linear_loss`."""

    bias: Tensor | None
    backend: str | None
    chunk_tokens: int | None
    logits_dtype: torch.dtype | None
    gradient_samples: int | None


class SoftmaxOptions(TypedDict, total=False):
    """Options of the distribution that log-probs are of, without a loss."""

    temperature: float | Tensor
    logit_scale: float
    final_logit_softcapping: float | None
    sampling_mask: SamplingMask | None
    vocab_group: dist.ProcessGroup | None
