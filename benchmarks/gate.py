"""A method is timed only after its result has passed this check against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_kernels import reference

from .cases import Batch, Case
from .methods import Method, Step


class WrongAnswerError(Exception):
    """Names the quantity that is wrong, and its error."""


def tolerance(case: Case) -> float:
    """Relative to a norm: eight roundings of the inputs' dtype, plus float32 summation."""
    return 8 * torch.finfo(getattr(torch, case.dtype)).eps + 1e-4


def truth(batch: Batch) -> Step:
    """Result of the reference in float64."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in batch.inputs]
    case = batch.case
    if case.level == "tokens":
        arguments = batch.logp, batch.old, batch.A, batch.mask
        return torch.stack(reference.find_clip_bounds(*arguments, config=case.config)), ()
    at_logits = case.level == "logits"
    if case.task == "log_probs":
        function = reference.log_probs if at_logits else reference.linear_log_probs
        with torch.no_grad():
            return function(*leaves, batch.labels)[0], ()
    loss = reference.bapo_loss if at_logits else reference.bapo_linear_loss
    out = loss(*leaves, *batch.rest, **batch.options)
    out.loss.backward()
    return out.loss.detach(), tuple(leaf.grad for leaf in leaves)


def check(method: Method, case: Case, device: str) -> tuple[float, float]:
    """Errors of value and gradients on a small case of the same kind.

    Raises:
        WrongAnswerError: an error exceeds :func:`tolerance`.
    """
    batch = Batch(case.shrunk(), device)
    expected = truth(batch)
    got = method.step(batch)
    value = check_value(got[0], expected[0], batch)
    gradient = max(map(distance, got[1], expected[1]), default=0.0)
    raise_above(tolerance(case), "gradient", gradient)
    return value, gradient


def check_value(got: Tensor, expected: Tensor, batch: Batch) -> float:
    """Error of log-probs or bounds, or of a loss relative to the mean absolute advantage.

    The terms of a loss have both signs and may cancel, so the loss itself is no scale.
    """
    got = got.view(expected.shape)
    if expected.ndim and batch.mask is not None:
        got, expected = got[batch.mask], expected[batch.mask]
    error = distance(got, expected)
    if expected.ndim == 0:
        scale = expected.abs() / batch.A.abs().mean()
        error *= min(1.0, scale.item())
    raise_above(tolerance(batch.case), "value", error)
    return error


def value_at_full_size(batch: Batch) -> Tensor:
    """Loss, log-probs or bounds of a batch, computed in float64 from its log-probs."""
    case = batch.case
    if case.task == "log_probs":
        return batch.logp
    arguments = batch.logp.double(), batch.old, batch.A, batch.mask
    if case.task == "search":
        return torch.stack(reference.find_clip_bounds(*arguments, config=case.config))
    return reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss


def raise_above(most: float, name: str, error: float) -> None:
    """Raises WrongAnswerError if the error exceeds ``most``."""
    if not error <= most:
        raise WrongAnswerError(f"{name} off by {error:.1e}, at most {most:.1e}")


def distance(got: Tensor | None, expected: Tensor) -> float:
    """Relative norm of the difference."""
    if got is None:
        return float("inf")
    return ((got.double() - expected).norm() / expected.norm()).item()
