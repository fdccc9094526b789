"""Trinity-RFT: a policy loss of its registry (``algorithm.policy_loss_fn: bapo``).

May import public modules, and Trinity inside of functions. Trinity finds arguments by their names,
so these must stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import BAPOConfig
from ..functional import bapo_loss_from_log_probs
from . import BOUND_METRICS, CLIP_METRICS, config_of, left_to, masked_reduction, on_host

_OWNERS = left_to("Trinity", loss_agg_mode="loss_agg_mode")
_METRICS = ("pg_loss", *CLIP_METRICS, "ppo_kl", *BOUND_METRICS)


def bapo_policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    config: BAPOConfig,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of tensors ``[B, T]``, and metrics; the arguments have Trinity's names.

    ``config.loss_agg_mode`` is Trinity's: ``seq-mean-token-sum-norm`` divides the sum by the
    padded length alone, and a mean over sequences counts all of them.
    """
    mode, counts = masked_reduction(config.loss_agg_mode, action_mask)
    config = replace(config, loss_agg_mode=mode)
    out = bapo_loss_from_log_probs(
        logprob, old_logprob, advantages, action_mask, config=config, **counts
    )
    return out.loss, on_host(config, out.metrics, _METRICS)


def register(name: str = "bapo") -> Any:
    """Adds a ``PolicyLossFn`` with this loss to Trinity's registry, and returns the class.

    Call it in a module that Trinity loads as a plugin.
    """
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN, PolicyLossFn

    class BAPOPolicyLossFn(PolicyLossFn):
        """``policy_loss_fn_args``: ``preset``, ``loss_agg_mode``, ``options`` of the search."""

        def __init__(
            self,
            backend: str = "verl",
            preset: str = "paper",
            loss_agg_mode: str = "token-mean",
            options: dict[str, Any] | None = None,
        ) -> None:
            super().__init__(backend=backend)
            self.config = config_of(preset, options, _OWNERS, loss_agg_mode=loss_agg_mode)

        def __call__(
            self,
            logprob: Tensor,
            old_logprob: Tensor,
            action_mask: Tensor,
            advantages: Tensor,
            **kwargs: Any,
        ) -> tuple[Tensor, dict[str, float]]:
            return bapo_policy_loss(logprob, old_logprob, action_mask, advantages, self.config)

        @classmethod
        def default_args(cls) -> dict[str, Any]:
            return {"preset": "paper", "loss_agg_mode": "token-mean"}

    return POLICY_LOSS_FN.register_module(name)(BAPOPolicyLossFn)
