"""Autograd around the kernels: gradients that forward made, and those that backward makes.

Imports rows and tokens, and is imported by the public functions alone. What is saved for backward,
and therefore the memory between forward and backward, is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..output import BAPOOutput
from .call import Call, Coefficients, RowStatistics, SamplingSets
from .labels import of_finite
from .memory import empty_gradient
from .operators import NATIVE, ops_of
from .rows import Rows, gathered, row_statistics, scatter, second_pass
from .tokens import loss_of_log_probs


class _NoDerivative(torch.autograd.Function):
    """A gradient whose own derivative raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, dgradient: Tensor) -> Tensor:
        raise RuntimeError(
            "the gradient of the BAPO loss and of log_probs has no derivative; "
            "bapo_kernels.reference has all derivatives"
        )


def without_derivative(gradient: Tensor) -> Tensor:
    """``gradient``; under ``create_graph=True`` a second derivative must raise, not be 0."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradient
    result: Tensor = _NoDerivative.apply(gradient.requires_grad_())
    return result


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


def _with_own_version(values: Tensor) -> Tensor:
    """An output without the version counter that it shares with others of its kernel.

    They share no element. In eager code that needs no launch; a compiler would repeat the view.
    """
    return values.clone() if torch.compiler.is_compiling() else values.data


_HANDED_OVER = (
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
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        ctx.backend, ctx.overwritten = backend, overwritten
        ctx.gradients, ctx.tensors = tensors[len(tensors) // 2 :], len(tensors)
        ctx.set_materialize_grads(False)
        others = (None if values is None else _with_own_version(values) for values in beside)
        return _with_own_version(loss), *others

    @staticmethod
    def backward(
        ctx: Any, dloss: Tensor | None, *dbeside: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in dbeside):
            raise RuntimeError(_NO_GRADIENT_BESIDE)
        if dloss is None:  # as DDP leaves it where the loss was not used
            return (None, None, None, None, *(None for _ in range(ctx.tensors)))
        if ctx.gradients is None:
            raise RuntimeError(_HANDED_OVER)
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
        made = (None if each is None else without_derivative(each) for each in gradients)
        return (None, None, None, None, *made, *(None for _ in gradients))


def output_with_gradients(
    output: BAPOOutput,
    backend: str,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    overwritten: OverwrittenLogits | None = None,
) -> BAPOOutput:
    """With d loss / d inputs = ``gradients``, which it takes over; None where not needed.

    Log-probs and entropy have none: a backward through them raises instead of giving 0.
    Forward-mode AD and ``torch.func`` raise here, since the inputs are arguments of a Function.
    """
    beside = output.log_probs, output.entropy
    loss, log_probs, entropy = _with_gradients(
        output.loss, beside, backend, inputs, gradients, overwritten
    )
    return BAPOOutput(loss, log_probs, entropy, output.bounds, output.metrics)


def _with_gradients(
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
    tensors = *inputs, *gradients
    made: tuple[Any, ...] = _PrecomputedGradient.apply(loss, beside, backend, overwritten, *tensors)
    return made


class _PerToken(torch.autograd.Function):
    """Outputs per token, with the gradient of the flat float64 values that they show."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shown: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(counted)
        return _with_own_version(shown)

    @staticmethod
    def backward(ctx: Any, dshown: Tensor) -> tuple[Tensor, None, None]:
        (counted,) = ctx.saved_tensors
        return torch.where(counted, dshown.reshape(-1).double(), 0.0), None, None


def differentiable_loss(call: Call, log_probs: Tensor, entropy: Tensor | None) -> BAPOOutput:
    """The loss of flat float64 log-probs and entropy; all its outputs have their gradients."""
    with torch.no_grad():
        detached = None if entropy is None else entropy.detach()
        output, coefficients = loss_of_log_probs(call, log_probs.detach(), detached)
    per_token = log_probs, entropy
    gradients = [
        made if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad else None
        for tensor, made in zip(per_token, coefficients, strict=True)
    ]
    (loss,) = _with_gradients(output.loss, (), call.backend, per_token, gradients)
    shown: Tensor = _PerToken.apply(log_probs, output.log_probs, call.counted)
    if entropy is not None:
        entropy = _PerToken.apply(entropy, output.entropy, call.counted)
    # Dynamo of torch 2.11 cannot return what _replace makes.
    return BAPOOutput(loss, shown, entropy, output.bounds, output.metrics)


def in_backward(dtype: torch.dtype) -> bool:
    """Whether backward computes a gradient of this dtype, not forward.

    The range of float16 ends at 6e-8, where many of a loss's derivatives are; those of a loss times
    a scale are above, and the scale is known in backward. A compiled backward would copy what
    forward made before an operator may scale it: reading the logits again moves fewer bytes.
    """
    return dtype == torch.float16 or torch.compiler.is_compiling()


class LogProbs(torch.autograd.Function):
    """Float64 ``(log_probs, entropy)`` of rows; backward makes the softmax again from their sums.

    Log-probs are in the shape of the labels of the call. Rows that are not counted are not read,
    and 0. With ``overwritten`` backward writes the gradient over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, call: Call, overwritten: OverwrittenLogits | None
    ) -> tuple[Tensor, Tensor]:
        values = set_rows = None
        if call.sets is not None:
            values = gathered(call, logits)
            set_rows = Rows.of_values(call, values)
        found = row_statistics(call, Rows.of_logits(call, logits), set_rows)
        ctx.call, ctx.overwritten = call, overwritten
        ctx.inplace = None if overwritten is None else logits.detach()
        # Autograd would refuse logits that it knows to be overwritten.
        saved = logits if overwritten is None else None
        tokens, ctx.present = call.temperatures
        of_call = call.labels, call.counted, tokens
        ctx.save_for_backward(saved, *of_call, values, *found, *(call.sets or ()))
        ctx.set_materialize_grads(False)
        return found.log_probs, found.entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, labels, counted, tokens, values, *others = ctx.saved_tensors
        found = RowStatistics(*others[:3])
        sets = None if values is None else SamplingSets(*others[3:])
        call = replace(
            ctx.call,
            labels=labels,
            counted=counted,
            tokens=tokens,
            present=ctx.present,
            sets=sets,
        )

        dlog_probs, dentropy = (None if d is None else d.detach() for d in (dlog_probs, dentropy))
        if dentropy is not None:
            dentropy = torch.where(counted, dentropy, 0.0)
        if dlog_probs is None:
            dlog_probs = torch.zeros_like(found.log_probs)
        elif labels.ndim == 1:
            dlog_probs = torch.where(counted, dlog_probs, 0.0)
        else:
            dlog_probs = of_finite(dlog_probs, labels, found.log_probs, found.entropy)
        coefficients = Coefficients(dlog_probs, dentropy)
        if logits is not None:
            dlogits = empty_gradient(logits)
            second_pass(call, Rows.of_logits(call, logits), found, coefficients, dlogits)
        elif ctx.inplace is not None:
            ctx.overwritten.check()
            dlogits, ctx.inplace, ctx.overwritten = ctx.inplace, None, None
            second_pass(call, Rows.of_logits(call, dlogits), found, coefficients)
        else:
            raise RuntimeError(_HANDED_OVER)
        if values is not None:
            dvalues = call.sets.empty_values()
            second_pass(call, Rows.of_values(call, values), found, coefficients, dvalues)
            scatter(call, dvalues, dlogits)
        return without_derivative(dlogits), None, None


class LinearLogProbs(torch.autograd.Function):
    """As :class:`LogProbs`, of hidden states; backward makes the logits of some rows again.

    With ``unscaled`` (of a frozen head) forward makes the gradient of each log-prob, which
    backward scales, and the logits are made again only for a gradient of the entropy. Of several
    labels per row, forward makes the part that they have in common.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        unscaled: bool,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        shard = call.shard
        sizes, group = (None, None) if shard is None else (shard.sizes, shard.group.group_name)
        dtype, logits_dtype, chunk_tokens = options
        tokens, present = call.temperatures
        tensors = hidden, weight, bias, call.labels, call.counted, tokens
        mask = (None, None) if call.sets is None else call.sets[:2]
        ctx.numbers = present, call.options, dtype, logits_dtype, call.backend, chunk_tokens
        log_probs, entropy, stats, gradient, values = _OPS.head_forward(
            unscaled, *tensors, *ctx.numbers, sizes, group, *mask
        )
        # Autograd refuses tensors that were made in inference mode and have no versions.
        traced = torch.compiler.is_compiling()
        kept = [x is not None and not traced and x.is_inference() for x in tensors]
        ctx.inference = [x if keeps else None for x, keeps in zip(tensors, kept, strict=True)]
        saved = (None if keeps else x for x, keeps in zip(tensors, kept, strict=True))
        several = call.labels is not None and call.labels.ndim == 2
        found = log_probs if several else None, entropy, stats
        ctx.save_for_backward(*saved, sizes, *mask, *found, values, gradient)
        ctx.unscaled, ctx.group = unscaled, group
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, sizes, ids, offsets, log_probs, entropy, stats, values, unscaled = (
            ctx.saved_tensors
        )
        tensors = [x if y is None else y for x, y in zip(tensors, ctx.inference, strict=True)]
        dlog_probs, dentropy = (None if d is None else d.detach() for d in (dlog_probs, dentropy))
        needs, others = [bool(needed) for needed in ctx.needs_input_grad[:3]], (None,) * 5

        if log_probs is not None and dlog_probs is not None:
            labels = tensors[3]
            dlog_probs = of_finite(dlog_probs, labels, log_probs, entropy)
        in_common = unscaled if ctx.unscaled and log_probs is not None else None

        def recomputed(dlog_probs: Tensor | None) -> list[Tensor]:
            found = entropy if log_probs is None else log_probs, entropy, stats
            gradients = dlog_probs, dentropy, *found, values, in_common, needs
            options = *tensors, *ctx.numbers, sizes, ctx.group, ids, offsets
            made: list[Tensor] = _OPS.head_backward(*gradients, *options)
            return made

        if not ctx.unscaled or in_common is not None:
            gradients = map(without_derivative, recomputed(dlog_probs))
            return (*(next(gradients) if needed else None for needed in needs), *others)
        *_, counted, _ = tensors
        factors = torch.zeros_like(entropy) if dlog_probs is None else dlog_probs
        factors = torch.where(counted, factors, 0.0).float().view(*unscaled.shape[:-1], 1)
        # A row without a gradient may hold anything.
        gradient = torch.where(factors != 0, unscaled * factors, 0.0)
        if dentropy is not None:  # compiled, it is 0 where it is unused, and no row is recomputed
            gradient = gradient + recomputed(None)[0]
        return without_derivative(gradient.to(unscaled.dtype)), None, None, *others


_OPS: Any = getattr(torch.ops, NATIVE)  # one operator of a head for all backends
