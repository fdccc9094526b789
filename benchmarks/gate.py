"""A method is timed only after its result has passed this check against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import reference

from .cases import Batch, Case
from .methods import Method, Step


class WrongAnswerError(Exception):
    """Names the quantity that is wrong, and its error."""


def tolerance(dtype: torch.dtype) -> float:
    """Relative to a norm: eight roundings to a dtype, plus float32 summation."""
    return 8 * torch.finfo(dtype).eps + 1e-4


def logits_dtype(method: Method, case: Case) -> torch.dtype:
    """In which a method keeps the logits of a case: values are as exact as these are."""
    return torch.float32 if method.float32_logits else case.torch_dtype


def truth(batch: Batch) -> Step:
    """Result of the reference in float64."""
    leaves = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in batch.inputs]
    case = batch.case
    if case.level == "tokens":
        return torch.stack(reference.find_clip_bounds(*batch.tokens, config=case.config)), ()
    if batch.teacher is not None:
        rows, *weight = (leaf.flatten(0, -2) for leaf in leaves)
        logits = F.linear(rows, *weight) if weight else rows
        value, weights = _distilled(batch, logits, slice(None)), None
        if case.task == "vjp":
            weights = batch.teacher.log_probs.exp().view(value.shape).double()
        else:
            logp = reference.log_probs(logits, batch.labels.flatten())[0]
            value = _with_loss(batch, value.mean(), logp.view(batch.labels.shape))
    else:
        at_logits, mask = case.level == "logits", {"sampling_mask": batch.sampling_mask}
        if case.task == "log_probs":
            function = reference.log_probs if at_logits else reference.linear_log_probs
            with torch.no_grad():
                return function(*leaves, batch.labels, **mask)[0], ()
        loss = reference.bapo_loss if at_logits else reference.bapo_linear_loss
        value, weights = loss(*leaves, *batch.rest, **batch.options, **mask).loss, None
    value.backward(weights)
    return value.detach(), tuple(leaf.grad for leaf in leaves)


def check(method: Method, case: Case, device: str) -> tuple[float, float]:
    """Errors of value and gradients on a small case of the same kind.

    Raises:
        WrongAnswerError: an error exceeds the :func:`tolerance` of the dtype of the logits, or, of
            gradients, that of the inputs.
    """
    batch = Batch(case.shrunk(), device)
    expected = truth(batch)
    got = method.step(batch)
    value = check_value(got[0], expected[0], batch, logits_dtype(method, case))
    pairs = zip(got[1], expected[1], strict=True)
    gradient = max((distance(a, b) for a, b in pairs if b is not None), default=0.0)
    raise_above(tolerance(case.torch_dtype), "gradient", gradient)
    return value, gradient


def check_value(got: Tensor, expected: Tensor, batch: Batch, dtype: torch.dtype) -> float:
    """Error of log-probs or bounds, or of a loss relative to the mean absolute advantage.

    The terms of a loss have both signs and may cancel, so the loss itself is no scale. ``dtype`` is
    that of the logits.
    """
    got = got.view(expected.shape)
    if expected.ndim and batch.mask is not None:
        got, expected = got[batch.mask], expected[batch.mask]
    error = distance(got, expected)
    if expected.ndim == 0:
        scale = expected.abs() / batch.A.abs().mean()
        error *= min(1.0, scale.item())
    raise_above(tolerance(dtype), "value", error)
    return error


def value_at_full_size(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Loss, log-probs or bounds, in float64 from the log-probs of logits of this dtype."""
    case = batch.case
    own = dtype == case.torch_dtype
    logp = batch.logp if own else batch.log_probs(dtype)
    if batch.teacher is not None:
        parts = [_distilled(batch, logits, part) for part, logits in batch.logits(dtype, 64)]
        found = torch.cat(parts)
        return found if case.task == "vjp" else _with_loss(batch, found.mean(), logp.double())
    if case.task == "log_probs":
        return logp
    arguments = logp.double(), batch.old, batch.A, batch.mask
    if case.task == "search":
        return torch.stack(reference.find_clip_bounds(*arguments, config=case.config))
    return reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss


def _distilled(batch: Batch, logits: Tensor, part: slice) -> Tensor:
    """Of these rows, in float64 and from the whole softmax: log-probs or a divergence."""
    teacher, task = batch.teacher, batch.case.task
    assert teacher is not None
    logp = logits.double().log_softmax(-1)
    if task == "vjp":
        return logp.gather(-1, teacher.ids[part])
    if task == "forward_kl":
        assert teacher.hidden_states is not None
        factors = teacher.hidden_states[part], batch.inputs[1].detach()
        t = F.linear(*(factor.to(logits.dtype) for factor in factors)).double().log_softmax(-1)
        return (t.exp() * (t - logp)).sum(-1)
    ids, p = teacher.ids[part], teacher.log_probs[part].double().exp()
    others, p_of_others = logp.scatter(-1, ids, -torch.inf).logsumexp(-1), 1 - p.sum(-1)
    kl = (p * (p.log() - logp.gather(-1, ids))).sum(-1)
    return kl + p_of_others * (p_of_others.log() - others)


def _with_loss(batch: Batch, loss: Tensor, logp: Tensor) -> Tensor:
    """BAPO's loss added if the task has it."""
    if not batch.case.task.startswith("loss"):
        return loss
    arguments = logp, batch.old, batch.A, batch.mask
    return loss + reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss


def raise_above(most: float, name: str, error: float) -> None:
    """Raises WrongAnswerError if the error exceeds ``most``."""
    if not error <= most:
        raise WrongAnswerError(f"{name} off by {error:.1e}, at most {most:.1e}")


def distance(got: Tensor | None, expected: Tensor) -> float:
    """Relative norm of the difference."""
    if got is None:
        return float("inf")
    return ((got.double() - expected).norm() / expected.norm()).item()
