"""Autograd around the kernels: gradients that forward has made, and values that have none.

Imports the operators and the output. A loss hands over the memory of its gradient: a second
backward, or one through values beside the loss, must raise and not return a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..output import BAPOOutput
from .operators import ops_of


class _NoDerivative(torch.autograd.Function):
    """A tensor whose derivative by the inputs is not known: asking for it raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *inputs: Tensor | None) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, derivative: Tensor) -> Tensor:
        raise RuntimeError(
            "the gradient of the BAPO loss and of log_probs has no derivative; "
            "bapo_kernels.reference has all derivatives"
        )


def without_derivative(gradient: Tensor, *inputs: Tensor | None) -> Tensor:
    """``gradient``; under ``create_graph=True`` its derivative by the inputs must raise, not be 0.

    Autograd comes here only on its way to what is asked for. So the inputs are all that the
    gradient depends on, the incoming ones too.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradient
    result: Tensor = _NoDerivative.apply(gradient, *inputs)
    return result


def path_to(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """A tensor that depends on these and keeps none of them, for :func:`without_derivative`."""
    return (without_derivative(torch.empty(0, device="cpu"), *inputs),)


class OverwrittenLogits:
    """Logits that a loss overwrites with their gradient, so that a later change is detected.

    The loss is made with this object, whose :meth:`check` its backward calls; :meth:`mark` follows.
    """

    def __init__(self) -> None:
        self.logits: Tensor | None = None
        self.version = 0

    def mark(self, logits: Tensor) -> None:
        """Declares that ``logits`` hold their gradient now: using them again raises in backward."""
        _Overwritten.apply(logits)
        self.logits, self.version = logits.detach(), logits._version

    def check(self) -> None:
        """Raises if the logits were written to since :meth:`mark`."""
        if self.logits is not None and self.logits._version != self.version:
            raise RuntimeError(
                "logits that a loss overwrites with its gradient (inplace=True) were changed "
                "before its backward"
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


def with_own_version(values: Tensor) -> Tensor:
    """An output without the version counter that it shares with others of its kernel.

    They share no element. In eager code that needs no launch; a compiler would repeat the view.
    """
    return values.clone() if torch.compiler.is_compiling() else values.data


HANDED_OVER = (
    "backward() of this loss can be called once, because it hands over the memory of the gradient. "
    "Call the loss again instead of backward(retain_graph=True)."
)
_NO_GRADIENT_BESIDE = (
    "log_probs and entropy of a BAPOOutput have no gradient here, because forward has already "
    "computed that of the loss. For a term of your own, compute them with log_probs() or "
    "linear_log_probs(), and the loss with bapo_loss_from_log_probs(). For their values alone, "
    ".detach() them."
)


class _PrecomputedGradient(torch.autograd.Function):
    """A loss whose gradients are known: backward multiplies them by the incoming gradient.

    They are scaled in place and handed over, so there is one backward; autograd then keeps a
    gradient without a copy, because nothing else holds it. Torch scales those in float64, which are
    per token and small, and those of the reference. A backward through the values beside the loss
    raises.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        beside: tuple[Tensor | None, ...],
        backend: str,
        overwritten: OverwrittenLogits | None,
        path: tuple[Tensor, ...],
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        ctx.backend, ctx.overwritten, ctx.path = backend, overwritten, path
        ctx.gradients, ctx.tensors = tensors[len(tensors) // 2 :], len(tensors)
        ctx.set_materialize_grads(False)
        others = (None if values is None else with_own_version(values) for values in beside)
        return with_own_version(loss), *others

    @staticmethod
    def backward(
        ctx: Any, dloss: Tensor | None, *dbeside: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in dbeside):
            raise RuntimeError(_NO_GRADIENT_BESIDE)
        if dloss is None:  # as DDP leaves it where the loss was not used
            return (None, None, None, None, None, *(None for _ in range(ctx.tensors)))
        if ctx.gradients is None:
            raise RuntimeError(HANDED_OVER)
        if ctx.overwritten is not None:
            ctx.overwritten.check()
        gradients, ctx.gradients, ctx.overwritten = ctx.gradients, None, None
        factor = dloss.detach()
        for gradient in gradients:
            if gradient is None:
                continue
            if gradient.dtype == torch.float64 or ctx.backend == "reference":
                gradient.mul_(factor)
            else:
                ops_of(ctx.backend).scale_(gradient, factor)
        inputs = dloss, *ctx.path
        made = (None if each is None else without_derivative(each, *inputs) for each in gradients)
        return (None, None, None, None, None, *made, *(None for _ in gradients))


def output_with_gradients(
    output: BAPOOutput,
    backend: str,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    overwritten: OverwrittenLogits | None = None,
) -> BAPOOutput:
    """Attaches ``gradients`` = d loss / d inputs, which it takes over; None where not needed.

    Log-probs and entropy have none: a backward through them raises instead of giving 0.
    Forward-mode AD and ``torch.func`` raise here, since the inputs are arguments of a Function.
    """
    beside = output.log_probs, output.entropy
    loss, log_probs, entropy = with_gradients(
        output.loss, beside, backend, inputs, gradients, overwritten
    )
    return BAPOOutput(loss, log_probs, entropy, output.bounds, output.metrics)


def with_gradients(
    loss: Tensor,
    beside: tuple[Tensor | None, ...],
    backend: str,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    overwritten: OverwrittenLogits | None = None,
) -> tuple[Any, ...]:
    assert len(inputs) == len(gradients)
    if torch.compiler.is_compiling() and all(gradient is None for gradient in gradients):
        # Dynamo does not trace a Function of any number of tensors without grad mode.
        return loss, *beside
    tensors = path_to(*inputs), *inputs, *gradients
    made: tuple[Any, ...] = _PrecomputedGradient.apply(loss, beside, backend, overwritten, *tensors)
    return made


def in_backward(dtype: torch.dtype) -> bool:
    """Whether backward computes a gradient of this dtype, not forward.

    The range of float16 ends at 6e-8, where many of a loss's derivatives are; those of a loss times
    a scale are above, and the scale is known in backward. A compiled backward would copy what
    forward made before an operator may scale it: reading the logits again moves fewer bytes.
    """
    return dtype == torch.float16 or torch.compiler.is_compiling()
