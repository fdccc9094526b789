"""A test case, its results, and the error budget of a kernel, which is computed, never tuned.

May import public modules, the reference, ``sum_order`` and ``real_rows``, never a kernel: a wider
budget hides wrong kernels from ``validate`` and from the tests, which take it from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import reference
from ..config import IGNORE_INDEX, BAPOConfig
from ..output import BAPOOutput, ClipBounds
from .real_rows import real_rows
from .sum_order import SumOrder

EPS = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float64: 2.0**-53,
}
# The spacing of subnormal numbers, where one rounding is an absolute error.
TINY = {dtype: torch.finfo(dtype).tiny * torch.finfo(dtype).eps for dtype in EPS}
# Gradients below this are zero on a CPU, where products of subnormal numbers are slow. In float16
# these are most of a gradient, and stay.
FLUSHED = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126}

Measured = tuple[str, float, float]  # quantity, error, budget
GRADIENTS = "gradient", "weight gradient", "bias gradient"
Loss = Callable[..., BAPOOutput]
T = TypeVar("T")


def in_some_orders(run: Callable[[], T], others: int = 2) -> list[T]:
    """Returns the results of ``run`` with its sums in PyTorch's order and in some others.

    In a single order the error of a reference may be small by luck.
    """
    results = [run()]
    for seed in range(1, others + 1):
        with SumOrder(seed):
            results.append(run())
    return results


def error_and_budget(
    got: Tensor,
    same_dtype: Tensor | Sequence[Tensor],
    truth: Tensor,
    *,
    operand: float = 0.0,
    inherited: float = 0.0,
) -> tuple[float, float]:
    """``|got - truth|``, and ``2*|same_dtype - truth| + one rounding``, in the maximum norm.

    If there are several references in the dtype, the one with the largest error counts. The
    rounding is that of the largest value, or of the largest operand of a difference; ``inherited``
    is added to the budget. The error is NaN, which exceeds every budget, if the shapes differ or if
    NaN and infinities are not where the truth has them.
    """
    truth = truth.double()
    got64 = got.double().to(truth.device)
    finite = truth.isfinite()
    rounding = EPS[got.dtype] * max(largest(truth[finite]), operand) + TINY[got.dtype]
    references = [same_dtype] if isinstance(same_dtype, Tensor) else same_dtype
    errors = [largest((same.double().to(truth.device) - truth)[finite]) for same in references]
    budget = 2 * max(errors) + rounding + inherited
    same_places = got64.shape == truth.shape and torch.allclose(
        got64[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True
    )
    return largest((got64 - truth)[finite]) if same_places else math.nan, budget


def largest(values: Tensor) -> float:
    """The maximum norm."""
    return values.abs().max().item() if values.numel() else 0.0


def difference(bounds: ClipBounds, expected: ClipBounds) -> float:
    """The largest difference of bounds; 0 where both are equal, infinite ones too."""
    errors = []
    for got, wanted in zip(bounds, map(Tensor.float, expected), strict=True):
        same = (got == wanted) | (got.isnan() & wanted.isnan())  # NaN at masked tokens
        errors.append(largest(torch.where(same, 0.0, got - wanted)))
    return max(errors)


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
        """The positional arguments after the logits."""
        return self.labels, self.old_log_probs, self.advantages, self.response_mask

    def with_options(self, **options: Any) -> Case:
        """Returns a copy with further options."""
        return replace(self, options=self.options | options)


def make_case(
    shape: tuple[int, ...] = (3, 7),
    V: int = 257,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    logits: Tensor | None = None,
    labels: Tensor | None = None,
    real: float | None = None,
    staleness: float = 0.3,
    spread: float = 3.0,
    masked: float = 0.25,
    idle: float = 0.2,
    config: BAPOConfig | None = None,
    seed: int = 0,
    poison: bool = True,
    **options: Any,
) -> Case:
    """A stale batch with masked tokens, ignored labels and zero advantages.

    With ``real``, the temperature, it has rows of a language model. With ``poison`` every value of
    a masked token is NaN.
    """
    g = torch.Generator().manual_seed(seed)
    config = config or BAPOConfig()
    if real:
        logits, labels = real_rows(shape, V, real, seed)
        logits = logits.to(dtype)
    if logits is None:
        logits = (spread * torch.randn(*shape, V, generator=g, device="cpu")).to(dtype)
    drawn = torch.randint(0, V, shape, generator=g, device="cpu")
    labels = drawn if labels is None else labels.clone()
    logp, _ = reference.log_probs(
        logits.double(),
        labels,
        temperature=options.get("temperature", config.temperature),
        logit_scale=config.logit_scale,
        final_logit_softcapping=config.final_logit_softcapping,
    )
    old = (logp + staleness * torch.randn(shape, generator=g, device="cpu")).float()
    advantages = torch.randn(shape, generator=g, device="cpu")
    advantages[torch.rand(shape, generator=g, device="cpu") < idle] = 0.0
    mask = torch.rand(shape, generator=g, device="cpu") >= masked
    labels[torch.rand(shape, generator=g, device="cpu") < 0.05] = IGNORE_INDEX
    unmasked = mask & (labels != IGNORE_INDEX)
    if poison:
        logits[~unmasked] = torch.nan

    def finished(value: Tensor) -> Tensor:
        if value.shape == tuple(shape) and poison:
            value = value.masked_fill(~unmasked, torch.nan)
        return value.to(device)

    tokens = labels.to(device), finished(old), finished(advantages), mask.to(device)
    moved = tree_map_only(Tensor, finished, options)
    return Case(logits.to(device), *tokens, {"config": config, **moved})


def per_token(
    shape: tuple[int, ...] = (3, 7), seed: int = 1, low: float = -6.0, high: float = 0.0
) -> Tensor:
    """Uniformly distributed values for an optional argument."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g, device="cpu") * (high - low) + low


@dataclass
class Result:
    """The output of a loss, and its gradients by logits, or by hidden states and weight."""

    output: BAPOOutput
    gradients: tuple[Tensor, ...]

    @property
    def gradient(self) -> Tensor:
        """The first gradient."""
        return self.gradients[0]


def evaluate(
    loss: Loss, case: Case, parameters: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> Result:
    """Calls ``loss(*parameters, ...)`` on a case, its parameters cast to ``dtype`` if given."""
    leaves = [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in parameters]
    output = loss(*leaves, *case.arguments(), **case.options)
    return Result(output, torch.autograd.grad(output.loss, leaves))


def loss_sensitivity(case: Case, truth: Result) -> tuple[float, float]:
    """The sums of |d loss / d log_prob| and of |d loss / d entropy|."""
    unmasked = case.labels != IGNORE_INDEX
    if case.response_mask is not None:
        unmasked = unmasked & (case.response_mask != 0)
    log_probs, entropy = truth.output.log_probs, truth.output.entropy
    assert entropy is not None
    leaves = [v.double().nan_to_num(0.0).requires_grad_() for v in (log_probs, entropy)]
    in_log_probs = ("temperature", "sampling_mask")
    options = {name: x for name, x in case.options.items() if name not in in_log_probs}
    if options["config"].has_bounds:
        options["bounds"] = truth.output.bounds
    loss = reference.bapo_loss_from_log_probs(
        leaves[0], case.old_log_probs, case.advantages, unmasked, entropy=leaves[1], **options
    ).loss
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    by_log_probs, by_entropy = (gradient.abs().sum().item() for gradient in gradients)
    return by_log_probs, by_entropy


def quantities(
    case: Case, got: Result, same: Sequence[Result], truth: Result
) -> Iterator[Measured]:
    """Measures bounds, gradients, log-probs, entropy, loss, and the metric closest to its budget.

    Sums of log-probs and entropies inherit their rounding, and gradients inherit it through the
    ratio.

    Args:
        same: the reference in the dtype, with its sums in some orders.
    """
    yield "bounds", difference(got.output.bounds, truth.output.bounds), 0.0
    log_probs = truth.output.log_probs
    operand = largest(log_probs[log_probs.isfinite()])
    by_leaf = zip(*(result.gradients for result in (got, truth, *same)), strict=True)
    for name, (mine, exact, *theirs) in zip(GRADIENTS, by_leaf, strict=False):
        inherited = EPS[torch.float32] * operand * largest(exact.nan_to_num())
        inherited += FLUSHED.get(mine.dtype, 0.0)
        yield name, *error_and_budget(mine, theirs, exact, inherited=inherited)

    values, true, *others = (values_of(result) for result in (got, truth, *same))

    def compared(name: str, operand: float = 0.0) -> Measured:
        references = [each[name] for each in others]
        return name, *error_and_budget(values[name], references, true[name], operand=operand)

    yield compared("log_probs")
    entropy_operand = max(1.0, operand)  # a logarithm, which has a sum's relative rounding
    yield compared("entropy", entropy_operand)
    by_log_probs, by_entropy = loss_sensitivity(case, truth)
    yield compared("loss", operand * by_log_probs + entropy_operand * by_entropy)
    metrics = []
    for name, value in truth.output.metrics.items():
        size = max(1.0, value.abs().nan_to_num(posinf=0.0).item())  # it may be a ratio of sums
        factor = entropy_operand if name == "entropy" else operand
        metrics.append(compared(f"metric {name}", factor * size))
    yield max(metrics, key=lambda m: (not m[1] <= m[2], m[1] / m[2]))


def values_of(result: Result) -> dict[str, Tensor]:
    """The tensors by the names of :func:`quantities`; of bounds the pairs."""
    output = result.output
    assert output.entropy is not None
    values = {"log_probs": output.log_probs, "entropy": output.entropy, "loss": output.loss}
    values["bounds"] = torch.stack([bound.float() for bound in output.bounds], -1)
    values |= zip(GRADIENTS, result.gradients, strict=False)
    return values | {f"metric {name}": value for name, value in output.metrics.items()}
