"""Results on a few rows of a case, against float64.

Ours is timed only if its error is within the budget of the tests, at most twice that of the
reference in the same dtype plus one rounding. The error of a baseline is recorded; only NaN, and a
result of another shape, are wrong.
"""

from __future__ import annotations

import copy
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import reference
from bapo_kernels.tools.budget import EPS, FLUSHED, error_and_budget, in_some_orders, largest

from .cases import Batch, Case
from .methods.method import Method, Step, trained, value_of


class WrongAnswerError(Exception):
    """Names the quantity that is wrong, and its error."""


def check(method: Method, few: FewRows) -> dict[str, float]:
    """The errors of a method, relative to a norm.

    Raises:
        WrongAnswerError: ours exceeds its budget, or a result is not finite or of another shape.
    """
    batch = few.batch
    if method.overwrites:
        batch = few.batch.overwritable
        batch.restore(few.batch)
    value, gradients = method.step(batch)
    value = value.view(few.truth[0].shape) if value.numel() == few.truth[0].numel() else value
    got, expected = (value, *gradients), (few.truth[0], *few.truth[1])
    names = "value", "gradient", "weight gradient"
    errors = []
    for place, (name, mine, exact) in enumerate(zip(names, got, expected, strict=False)):
        if exact is None:
            continue
        if mine is None or mine.shape != exact.shape or not mine.isfinite().all():
            said = "no result" if mine is None else f"{tuple(mine.shape)}, maybe with NaN"
            raise WrongAnswerError(f"{name} must be finite and {tuple(exact.shape)}, got {said}")
        if method.backend is not None:
            same = [(value, *gradients)[place] for value, gradients in few.same]
            error, budget = error_and_budget(mine, same, exact, **few.roundings(place))
            if place and method.samples is not None:
                budget += 5 * few.noise(place, method.samples)
            if not error <= budget:
                raise WrongAnswerError(f"{name} off by {error:.1e}, at most {budget:.1e}")
        errors.append(((mine.double() - exact).norm() / few.scale(exact)).item())
    return {"value_error": errors[0], "gradient_error": max(errors[1:], default=0.0)}


class FewRows:
    """A few rows of a case, with the results of the reference."""

    def __init__(self, case: Case, device: str) -> None:
        self.batch = Batch(case.shrunk(), device)
        self.truth = by_reference(self.batch, torch.float64)

    @cached_property
    def same(self) -> list[Step]:
        """In the dtype of the case, with sums in some orders."""
        return in_some_orders(partial(by_reference, self.batch, self.batch.case.torch_dtype))

    def scale(self, exact: Tensor) -> Tensor:
        """What an error is relative to: of a loss, which may cancel, at least ``mean |A|``."""
        least = self.batch.A.abs().mean() if exact.ndim == 0 else 0.0
        return torch.maximum(exact.norm(), torch.as_tensor(least, device=exact.device))

    def roundings(self, place: int) -> dict[str, float]:
        """What a value, or a gradient, takes over from the rounding of float32 log-probs."""
        operand = largest(self.batch.logp)
        if place == 0:
            return {"operand": operand * self.sensitivity}
        exact = self.truth[1][place - 1]
        assert exact is not None
        inherited = EPS[torch.float32] * operand * largest(exact)
        return {"inherited": inherited + FLUSHED.get(self.batch.case.torch_dtype, 0.0)}

    @property
    def sensitivity(self) -> float:
        """The sum of ``|d value / d log_prob|`` of a scalar; of log-probs 0, as they are exact."""
        return 0.0 if self.truth[0].ndim else self.by_log_probs.abs().sum().item()

    @cached_property
    def by_log_probs(self) -> Tensor:
        """``d value / d log_prob`` of a scalar."""
        logp = log_probs(self.batch).detach().requires_grad_()
        return torch.autograd.grad(value_of(logp, self.batch), logp)[0]

    def noise(self, place: int, samples: int) -> float:
        """The standard deviation that samples may add to an entry of a gradient.

        Of a hidden state ``|g|*(1 - p)*max|W|/sqrt(samples)``; of the weight the same of all rows
        together, with the largest hidden state in the place of ``W``.
        """
        rows = self.by_log_probs.double() * -torch.expm1(self.batch.logp.double())
        most = rows.abs().max() if place == 1 else rows.norm()
        return (most * self.batch.inputs[2 - place].abs().max() / samples**0.5).item()


def by_reference(batch: Batch, dtype: torch.dtype) -> Step:
    """Value and gradients by the reference, in a dtype."""
    if batch.case.level == "tokens":
        return torch.stack(reference.find_clip_bounds(*batch.tokens, config=batch.case.config)), ()
    own = copy.copy(batch)
    own.inputs = tuple(
        leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
        for leaf in batch.inputs
    )
    if batch.case.task == "forward_kl":
        return trained(_divergence(own), own)
    with torch.set_grad_enabled(batch.case.task != "log_probs"):
        return trained(value_of(log_probs(own), own), own)


def log_probs(batch: Batch) -> Tensor:
    """Of the columns, by the reference."""
    function = reference.log_probs if len(batch.inputs) == 1 else reference.linear_log_probs
    return function(*batch.inputs, batch.columns, sampling_mask=batch.sampling_mask)[0]


def _divergence(batch: Batch) -> Tensor:
    """Over the whole vocabulary, the mean of all rows."""
    teacher, (hidden, weight) = batch.teacher, batch.inputs
    assert teacher is not None
    assert teacher.hidden_states is not None
    of_teacher = F.linear(teacher.hidden_states.to(weight.dtype), weight.detach())
    rows = F.linear(hidden, weight).flatten(0, -2)
    p, q = (x.to(torch.float64).log_softmax(-1) for x in (of_teacher, rows))
    return F.kl_div(q, p, reduction="sum", log_target=True) / len(rows)
