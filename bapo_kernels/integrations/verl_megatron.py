"""verl's ``use_fused_kernels`` in its Megatron engine, with ``linear_log_probs``, once imported.

May import public modules and the adapter ``megatron``. verl passes the arguments of
``fused_output_processor`` by their names.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..linear import linear_log_probs
from . import require_version

require_version("verl", "0.9")
require_version("megatron.core", "0.18")  # verl patches the forward of earlier models

from verl.models.mcore import model_forward_fused  # noqa: E402
from verl.utils.model import CausalLMOutputForPPO  # noqa: E402

from .megatron import FusedHead  # noqa: E402

gradient_samples: int | None = None  # that linear_log_probs is called with; yours to set


def fused_output_processor(
    *, hidden_states: Tensor, labels: Tensor, context: Any, **given: Any
) -> CausalLMOutputForPPO:
    """Log-probs and entropy ``[1, T]``, float32, of packed sequences, at its temperature."""
    options = dict(temperature=context.temperature, gradient_samples=gradient_samples)
    head = FusedHead(linear_log_probs, labels, **options)
    log_probs, entropy = head(hidden_states=hidden_states, **given)
    return CausalLMOutputForPPO(hidden_states=hidden_states, log_probs=log_probs, entropy=entropy)


model_forward_fused.fused_output_processor = fused_output_processor
