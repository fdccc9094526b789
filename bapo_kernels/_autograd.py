"""Autograd around gradients that are made in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._ops import ops_of
from .config import IGNORE_INDEX, BAPOConfig
from .distributed import VocabShard
from .fused import RowResults, row_statistics, transform


class _NoDerivative(torch.autograd.Function):
    """A gradient whose own derivative raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, dgradient: Tensor) -> Tensor:
        raise RuntimeError("the gradient of the BAPO loss and of log_probs has no derivative")


def final(gradient: Tensor) -> Tensor:
    """``gradient``; under ``create_graph=True`` a second derivative must raise, not be 0."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradient
    result: Tensor = _NoDerivative.apply(gradient.requires_grad_())
    return result


class _PrecomputedGradient(torch.autograd.Function):
    """A loss whose gradients are known: backward multiplies them by the incoming gradient.

    They are scaled in place and handed over, so there is one backward; autograd then keeps a
    gradient without a copy, because nothing else holds it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, backend: str, count: int, *tensors: Tensor) -> Tensor:
        ctx.backend, ctx.count = backend, count
        ctx.gradients = tensors[count:]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradient of this loss was handed over in its first backward; "
                "call the loss again instead of backward with retain_graph=True"
            )
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            ops_of(ctx.backend).scale_(gradient, dloss.detach())
        nothing = (None for _ in range(ctx.count))
        return (None, None, None, *(final(gradient) for gradient in gradients), *nothing)


def attach(
    loss: Tensor, backend: str, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensor:
    """``loss`` with d loss / d inputs = ``gradients``, which it takes over."""
    result: Tensor = _PrecomputedGradient.apply(loss, backend, len(inputs), *inputs, *gradients)
    return result


class _Overwritten(torch.autograd.Function):
    """Tells autograd that a tensor holds something else now, of which there is no derivative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> Tensor:
        raise RuntimeError(
            "logits were overwritten with their gradient (inplace=True) and then used again"
        )


def mark_overwritten(logits: Tensor) -> None:
    """Makes every later use of ``logits`` in a backward raise."""
    _Overwritten.apply(logits)


class LogProbs(torch.autograd.Function):
    """``(log_probs, entropy)`` of rows; backward recomputes the softmax from the saved sums."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        config: BAPOConfig,
        backend: str,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        live = labels != IGNORE_INDEX
        results = RowResults.empty(labels.numel(), labels.device, False)
        row_statistics(backend, logits, labels, live, config, results, shard)
        log_probs, entropy, stats, _ = results
        here = labels if shard is None else shard.labels(labels)
        ctx.save_for_backward(logits, here, live, stats, entropy)
        ctx.transform, ctx.backend = transform(config), backend
        ctx.set_materialize_grads(False)
        return log_probs.float(), entropy.float()

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits, labels, live, stats, entropy = ctx.saved_tensors
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)

        def of_live(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else torch.where(live, gradient.detach().double(), 0.0)

        dlog_probs = of_live(dlog_probs)
        ops_of(ctx.backend).row_gradient(
            logits,
            labels,
            stats,
            entropy,
            torch.zeros_like(entropy) if dlog_probs is None else dlog_probs,
            of_live(dentropy),
            None,
            *ctx.transform,
            dlogits,
        )
        return final(dlogits), None, None, None, None
