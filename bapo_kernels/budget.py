"""A case, what it computes, and how far off a kernel may be.

The budget of an error is computed, never tuned: twice the error of the reference in the kernel's
dtype, plus one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import reference
from .config import IGNORE_INDEX, BAPOConfig
from .output import BAPOOutput, ClipBounds

EPS = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float64: 0.0,
}
# Below this a result of the dtype is subnormal: one rounding is absolute there.
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

Measured = tuple[str, float, float]  # quantity, error, budget
Loss = Callable[..., BAPOOutput]


def error_and_budget(
    got: Tensor, same_dtype: Tensor, truth: Tensor, *, operand: float = 0.0, inherited: float = 0.0
) -> tuple[float, float]:
    """``|got - truth|``, and ``2*|same_dtype - truth| + one rounding``, in the maximum norm.

    The rounding is one of the largest value, or of the largest operand of a difference;
    ``inherited`` comes on top. The error is NaN, above every budget, where shapes differ or NaN or
    an infinity stands in another place than in the truth.
    """
    got64, same64, truth = got.double().cpu(), same_dtype.double().cpu(), truth.double().cpu()
    finite = truth.isfinite()
    rounding = EPS[got.dtype] * max(largest(truth[finite]), operand) + TINY[got.dtype]
    budget = 2 * largest((same64 - truth)[finite]) + rounding + inherited
    alike = got64.shape == truth.shape and torch.allclose(
        got64[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True
    )
    return largest((got64 - truth)[finite]) if alike else math.nan, budget


def largest(values: Tensor) -> float:
    """The maximum norm."""
    return values.abs().max().item() if values.numel() else 0.0


def difference(bounds: ClipBounds, expected: ClipBounds) -> float:
    """The largest of both bounds; equal ones are 0 apart."""
    return largest(torch.stack(bounds) - torch.stack(expected).float())


@dataclass
class Case:
    """Arguments of ``bapo_loss``."""

    logits: Tensor
    labels: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    response_mask: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        """Those between the logits and the options."""
        return self.labels, self.old_log_probs, self.advantages, self.response_mask

    def with_options(self, **options: Any) -> Case:
        """The same case, with more options."""
        return replace(self, options=self.options | options)


def make_case(
    shape: tuple[int, ...] = (3, 7),
    V: int = 257,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    logits: Tensor | None = None,
    staleness: float = 0.3,
    spread: float = 3.0,
    masked: float = 0.25,
    idle: float = 0.2,
    config: BAPOConfig | None = None,
    seed: int = 0,
    poison: bool = True,
    **options: Any,
) -> Case:
    """A stale batch with masked, ignored and zero-advantage tokens; NaN wherever it is masked."""
    g = torch.Generator().manual_seed(seed)
    config = config or BAPOConfig()
    if logits is None:
        logits = (spread * torch.randn(*shape, V, generator=g)).to(dtype)
    labels = torch.randint(0, V, shape, generator=g)
    transform = {
        name: getattr(config, name)
        for name in ("temperature", "logit_scale", "final_logit_softcapping")
    }
    logp = reference.log_probs(logits.double(), labels, **transform)[0]
    old = (logp + staleness * torch.randn(shape, generator=g)).float()
    advantages = torch.randn(shape, generator=g)
    advantages[torch.rand(shape, generator=g) < idle] = 0.0
    mask = torch.rand(shape, generator=g) >= masked
    labels[torch.rand(shape, generator=g) < 0.05] = IGNORE_INDEX
    live = mask & (labels != IGNORE_INDEX)
    if poison:
        logits[~live] = torch.nan
        old[~live] = torch.nan
        advantages[~live] = torch.nan
    for name, value in options.items():
        if isinstance(value, Tensor) and value.shape == tuple(shape) and poison:
            options[name] = value.clone().masked_fill(~live, torch.nan)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return Case(
        logits.to(device),
        labels.to(device),
        old.to(device),
        advantages.to(device),
        mask.to(device),
        {"config": config, **moved},
    )


def per_token(
    shape: tuple[int, ...] = (3, 7), seed: int = 1, low: float = -6.0, high: float = 0.0
) -> Tensor:
    """Uniform values of an optional argument."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g) * (high - low) + low


@dataclass
class Result:
    """Output of a loss, and its gradients of logits, or of hidden states and weight."""

    output: BAPOOutput
    gradients: tuple[Tensor, ...]

    @property
    def gradient(self) -> Tensor:
        """The first gradient."""
        return self.gradients[0]


def evaluate(
    loss: Loss, case: Case, parameters: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> Result:
    """``loss(*parameters, ...)`` of a case, the parameters in another dtype if one is given."""
    leaves = [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in parameters]
    output = loss(*leaves, *case.arguments(), **case.options)
    return Result(output, torch.autograd.grad(output.loss, leaves))


def loss_sensitivity(case: Case, truth: Result) -> float:
    """Sum of |d loss / d log_prob|."""
    live = case.labels != IGNORE_INDEX
    if case.response_mask is not None:
        live = live & (case.response_mask != 0)
    logp = truth.output.log_probs.double().nan_to_num(0.0).requires_grad_()
    options = case.options | {"bounds": truth.output.bounds}
    loss = reference.bapo_loss_from_log_probs(
        logp, case.old_log_probs, case.advantages, live, **options
    ).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    return gradient.abs().sum().item()


def quantities(
    case: Case, got: Result, same: Result, truth: Result, few_tokens: bool
) -> Iterator[Measured]:
    """Bounds, gradients, log-probs, entropy, loss, and the metric that is nearest to its budget.

    The gradient inherits the rounding of the log-prob in r; of ``few_tokens`` the reference may
    have got all right by luck. What is summed from log-probs inherits their rounding.
    """
    results = got, same, truth
    yield "bounds", difference(got.output.bounds, truth.output.bounds), 0.0
    log_probs = truth.output.log_probs
    operand = largest(log_probs[log_probs.isfinite()])
    for name, *gradients in zip(
        ("gradient", "weight gradient"), *(r.gradients for r in results), strict=False
    ):
        of_ratio = EPS[torch.float32] * operand * largest(gradients[2].nan_to_num())
        yield name, *error_and_budget(*gradients, inherited=few_tokens * of_ratio)
    operands = {"entropy": operand, "loss": operand * loss_sensitivity(case, truth)}
    for name in ("log_probs", "entropy", "loss"):
        parts = (getattr(r.output, name) for r in results)
        yield name, *error_and_budget(*parts, operand=operands.get(name, 0.0))
    metrics = []
    for name, value in truth.output.metrics.items():
        size = max(1.0, value.abs().nan_to_num(posinf=0.0).item())  # of a ratio of sums
        parts = (r.output.metrics[name] for r in results)
        metrics.append((f"metric {name}", *error_and_budget(*parts, operand=operand * size)))
    yield max(metrics, key=lambda m: (not m[1] <= m[2], m[1] / m[2]))
