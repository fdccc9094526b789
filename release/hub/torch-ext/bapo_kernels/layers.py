"""The losses in the form that ``kernels.kernelize`` gives to a module: a ``forward`` without state.

The module whose ``forward`` they become has a ``BAPOConfig`` as ``config``.
"""

from __future__ import annotations

import torch

from .package import BAPOConfig, BAPOOutput, bapo_linear_loss, bapo_loss


class BAPOLoss(torch.nn.Module):
    """:func:`bapo_kernels.bapo_loss`."""

    can_torch_compile = True
    config: BAPOConfig

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        advantages: torch.Tensor,
        response_mask: torch.Tensor | None = None,
    ) -> BAPOOutput:
        """The loss of a batch."""
        return bapo_loss(
            logits, labels, old_log_probs, advantages, response_mask, config=self.config
        )


class BAPOLinearLoss(torch.nn.Module):
    """:func:`bapo_kernels.bapo_linear_loss`."""

    can_torch_compile = True
    config: BAPOConfig

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head_weight: torch.Tensor,
        labels: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        advantages: torch.Tensor,
        response_mask: torch.Tensor | None = None,
    ) -> BAPOOutput:
        """The loss of a batch."""
        return bapo_linear_loss(
            hidden_states,
            lm_head_weight,
            labels,
            old_log_probs,
            advantages,
            response_mask,
            config=self.config,
        )
