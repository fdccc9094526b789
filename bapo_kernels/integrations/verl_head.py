"""verl's ``use_fused_kernels`` with :func:`bapo_kernels.linear_log_probs` as its head.

Set ``VERL_USE_EXTERNAL_MODULES=bapo_kernels.integrations.verl_head`` and
``actor_rollout_ref.model.use_fused_kernels=True`` with the backend ``torch``. Importing this module
replaces the forward of verl's ``FusedLinearForPPO``, which the fused forward of every model family
calls. Log-probs and entropy stay the same up to rounding, and both are float32.

With verl 0.8 and later a batch may have ``sampling_mask`` among its non-tensors: for each sequence
a list with the token ids that each response token was drawn from, empty for tokens that were drawn
from the whole vocabulary. Log-probs and entropies, old and reference ones too, are over these sets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..linear import linear_log_probs
from . import require_version, verl_sampling_mask

verl = require_version("verl", "0.6.1")

from packaging.version import Version  # noqa: E402
from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: E402


def forward(
    self: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """``(log_probs, entropy)`` of ``hidden_states [..., H]`` and aligned labels ``input_ids``."""
    return linear_log_probs(
        hidden_states,
        vocab_weights,
        input_ids,
        temperature=temperature,
        sampling_mask=verl_sampling_mask.take(input_ids),
    )


FusedLinearForPPO.forward = forward
if Version(verl.__version__) >= Version("0.8"):  # whose actors run on this engine
    verl_sampling_mask.install()
