"""Nobody is timed whose answer is wrong: errors against the reference in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_kernels import reference

from .cases import Batch, Case
from .peers import Peer, Step


class WrongAnswerError(Exception):
    """Says which quantity is off, and by how much."""


def tolerance(case: Case) -> float:
    """Of a norm, relative: eight roundings of the dtype of the inputs, and float32's sums."""
    return 8 * torch.finfo(getattr(torch, case.dtype)).eps + 1e-4


def truth(batch: Batch) -> Step:
    """The case in float64."""
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


def check(peer: Peer, case: Case, device: str) -> tuple[float, float]:
    """Errors of the value and of the gradients on a small case of the same kind.

    Raises:
        WrongAnswerError: an error is above :func:`tolerance`.
    """
    batch = Batch(case.shrunk(), device)
    expected = truth(batch)
    got = peer.step(batch)
    value = check_value(got[0], expected[0], batch)
    gradient = max(map(distance, got[1], expected[1]), default=0.0)
    raise_above(tolerance(case), "gradient", gradient)
    return value, gradient


def check_value(got: Tensor, expected: Tensor, batch: Batch) -> float:
    """Error of log-probs, of bounds, or of a loss as a share of the mean advantage.

    A loss is a sum of both signs, which may cancel to nothing.
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
    """Loss, log-probs or bounds of a batch from its log-probs in float64."""
    case = batch.case
    if case.task == "log_probs":
        return batch.logp
    arguments = batch.logp.double(), batch.old, batch.A, batch.mask
    if case.task == "search":
        return torch.stack(reference.find_clip_bounds(*arguments, config=case.config))
    return reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss


def raise_above(most: float, name: str, error: float) -> None:
    """Raises WrongAnswerError."""
    if not error <= most:
        raise WrongAnswerError(f"{name} off by {error:.1e}, at most {most:.1e}")


def distance(got: Tensor | None, expected: Tensor) -> float:
    """Norm of the difference, relative."""
    if got is None:
        return float("inf")
    return ((got.double() - expected).norm() / expected.norm()).item()
