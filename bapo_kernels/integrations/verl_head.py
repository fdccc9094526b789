"""verl's ``use_fused_kernels`` with :func:`bapo_kernels.linear_log_probs` as its head.

Set ``VERL_USE_EXTERNAL_MODULES=bapo_kernels.integrations.verl_head`` and
``actor_rollout_ref.model.use_fused_kernels=True`` with the backend ``torch``. Importing this module
replaces the forward of verl's ``FusedLinearForPPO``, which the fused forward of every model family
calls. Log-probs and entropy stay the same up to rounding, and both are float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..linear import linear_log_probs
from . import require_version

require_version("verl", "0.6.1")

from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: E402


def forward(
    self: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """``(log_probs, entropy)`` of ``hidden_states [..., H]`` and aligned labels ``input_ids``."""
    return linear_log_probs(hidden_states, vocab_weights, input_ids, temperature=temperature)


FusedLinearForPPO.forward = forward
