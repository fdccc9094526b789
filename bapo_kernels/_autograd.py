"""Autograd around the kernels: gradients that forward made, and those that backward makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._ops import ops_of
from .config import Transform
from .distributed import VocabShard
from .fused import row_statistics


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
    gradient without a copy, because nothing else holds it. Those in float64 are of tokens.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, backend: str, *tensors: Tensor | None) -> Tensor:
        ctx.backend, ctx.overwritten = backend, None
        ctx.gradients = tensors[len(tensors) // 2 :]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradient of this loss was handed over in its first backward; "
                "call the loss again instead of backward with retain_graph=True"
            )
        _check_unchanged(ctx.overwritten)
        gradients, ctx.gradients, ctx.overwritten = ctx.gradients, None, None
        for gradient in gradients:
            if gradient is not None and gradient.dtype == torch.float64:
                gradient.mul_(dloss.detach())
            elif gradient is not None:
                ops_of(ctx.backend).scale_(gradient, dloss.detach())
        made = (None if gradient is None else final(gradient) for gradient in gradients)
        return (None, None, *made, *(None for _ in gradients))


def attach(
    loss: Tensor, backend: str, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> Tensor:
    """``loss`` with d loss / d inputs = ``gradients``, which it takes over; None where not needed.

    Forward-mode AD and ``torch.func`` meet the inputs here, and raise.
    """
    assert len(inputs) == len(gradients)
    if torch.compiler.is_compiling() and all(gradient is None for gradient in gradients):
        return loss  # Dynamo does not trace a Function of any number of tensors without grad mode
    result: Tensor = _PrecomputedGradient.apply(loss, backend, *inputs, *gradients)
    return result


class _WithoutGradient(torch.autograd.Function):
    """Values beside a loss whose gradient forward made: a backward through them raises."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return values.detach()

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor | None) -> tuple[None, None]:
        if dvalues is not None:
            raise RuntimeError(
                "log_probs and entropy of a BAPOOutput have no gradient here: forward made that of "
                "the loss. For a term of your own take log_probs or linear_log_probs, and "
                "bapo_loss_from_log_probs for the loss; otherwise .detach() them"
            )
        return None, None


def without_gradient(values: Tensor, loss: Tensor) -> Tensor:
    """``values``, through which a backward to the inputs of ``loss`` raises instead of giving 0."""
    if not loss.requires_grad:
        return values
    result: Tensor = _WithoutGradient.apply(values, loss)
    return result


def _check_unchanged(overwritten: tuple[Tensor, int] | None) -> None:
    if overwritten is not None and overwritten[0]._version != overwritten[1]:
        raise RuntimeError(
            "logits that a loss overwrites with its gradient (inplace=True) were changed before "
            "its backward"
        )


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


def mark_overwritten(logits: Tensor, result: Tensor) -> None:
    """Makes later uses of ``logits`` raise in backward, and ``result`` too once they change.

    Args:
        result: of :func:`attach` or :class:`LogProbs`.
    """
    _Overwritten.apply(logits)
    node: Any = result.grad_fn
    if node is not None:
        node.overwritten = logits.detach(), logits._version


class LogProbs(torch.autograd.Function):
    """Float64 ``(log_probs, entropy)`` of rows; backward makes the softmax again from their sums.

    Args:
        live: bool ``[N]``; the others are not read, and 0.
        inplace: backward writes the gradient over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        live: Tensor,
        transform: Transform,
        backend: str,
        shard: VocabShard | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        results = row_statistics(backend, logits, labels, live, transform, shard)
        log_probs, entropy, stats, _ = results
        here = labels if shard is None else shard.labels(labels)
        ctx.inplace, ctx.overwritten = logits.detach() if inplace else None, None
        ctx.save_for_backward(None if inplace else logits, here, live, stats, entropy)
        ctx.transform, ctx.backend = transform, backend
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, labels, live, stats, entropy = ctx.saved_tensors

        def of_live(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else torch.where(live, gradient.detach(), 0.0)

        dlog_probs = of_live(dlog_probs)
        arguments = (
            labels,
            stats,
            entropy,
            torch.zeros_like(entropy) if dlog_probs is None else dlog_probs,
            of_live(dentropy),
            None,
            *ctx.transform,
        )
        if ctx.inplace is not None:
            _check_unchanged(ctx.overwritten)
            dlogits, ctx.inplace, ctx.overwritten = ctx.inplace, None, None
            ops_of(ctx.backend).row_gradient_(dlogits, *arguments)
        else:
            dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            ops_of(ctx.backend).row_gradient(logits, *arguments, dlogits)
        return (final(dlogits), *(None for _ in range(6)))
