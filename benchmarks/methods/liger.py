"""Liger-Kernel: cross entropy and GRPO, both from logits and from hidden states."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..cases import Batch
from .method import Method, Step, trained


def cross_entropy(batch: Batch) -> Tensor:
    """Writes the gradient over the logits in forward."""
    from liger_kernel.ops import LigerCrossEntropyFunction

    labels = batch.ignored_labels.flatten()
    options = None, -100, 0.0, 0.0, "none", None, False
    return -LigerCrossEntropyFunction.apply(batch.inputs[0].flatten(0, -2), labels, *options)[0]


def grpo(batch: Batch) -> Step:
    """Takes logits with one position more than it uses."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = batch.padded_logits
    logits.grad = None
    config = batch.case.config
    clip = {"eps_low": 1 - config.ratio_lower_start, "eps_high": config.ratio_upper_start - 1}
    options = {"temperature": 1.0, "beta": 0.0, "loss_type": "bnpo", "completion_mask": batch.mask}
    tokens = batch.old, None, batch.labels, batch.sequence_A
    loss, _ = triton_grpo_loss(logits, *tokens, inplace=False, reduce=True, **options, **clip)
    loss.backward()
    return loss.detach(), (logits.grad[:, :-1],)


def linear_grpo(batch: Batch) -> Step:
    """One sequence at a time, which is its default; one advantage per sequence."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    config, (hidden, weight) = batch.case.config, batch.inputs
    mask = torch.ones_like(batch.A) if batch.mask is None else batch.mask.float()
    loss, _ = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        epsilon_low=1 - config.ratio_lower_start,
        epsilon_high=config.ratio_upper_start - 1,
        loss_type="bnpo",
    )(hidden, weight, batch.labels, mask, batch.sequence_A, old_per_token_logps=batch.old)
    return trained(loss, batch)


def scaled_cross_entropy(batch: Batch) -> Tensor:
    """Log-probs and entropy, written for verl; torch operations where it has no kernel."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    hidden, weight = batch.inputs
    nll, _ = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden.flatten(0, -2), weight, batch.ignored_labels.flatten(), return_entropy=True
    )
    return -nll


def divergence(batch: Batch, compiled: bool) -> Step:
    """``LigerFusedLinearJSDLoss``, over the whole vocabulary; 1,024 rows at a time."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    teacher, (hidden, weight) = batch.teacher, batch.inputs
    assert teacher is not None
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": 0.0}
    heads = hidden.flatten(0, -2), weight, teacher.hidden_states, weight.detach()
    loss = LigerFusedLinearJSDLoss(**options, compiled=compiled)(*heads, batch.labels.flatten())
    return trained(loss, batch)


LIGER = {"package": "liger-kernel"}
OF_A_GPU = LIGER | {"devices": ("cuda",)}
LOGITS = [
    Method("Liger cross entropy", log_probs=cross_entropy, overwrites=True, **OF_A_GPU),
]
GRPO = {
    "logits": Method("Liger GRPO", grpo, **OF_A_GPU),
    "hidden": Method("Liger fused linear GRPO", linear_grpo, **LIGER),
}
HIDDEN = [Method("Liger scaled cross entropy", log_probs=scaled_cross_entropy, **LIGER)]
WHOLE = [
    Method(f"Liger fused linear JSD{form}", partial(divergence, compiled=bool(form)), **LIGER)
    for form in ("", ", compiled")
]
