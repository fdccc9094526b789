"""Cases, and the error budget: twice the error of the reference in the kernel's dtype, plus one
rounding. Both are computed against the reference in float64."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bapo_kernels
from bapo_kernels import BAPOConfig, BAPOOutput, reference

# Backends with kernels of their own that run here; the reference is their yardstick.
KERNELS = [
    name
    for name, reason in bapo_kernels.available_backends().items()
    if reason is None and name != "reference"
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = {"cpu": "cpu", "triton": "cpu" if INTERPRETED else "cuda", "cuda": "cuda"}

needs_native = pytest.mark.skipif(
    bapo_kernels.available_backends()["cpu"] is not None, reason="the native library is absent"
)
EPS = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float64: 0.0,
}
# Below this a result of the dtype is subnormal: one rounding is absolute there.
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


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
        return self.labels, self.old_log_probs, self.advantages, self.response_mask

    def with_options(self, **options: Any) -> Case:
        return replace(self, options=self.options | options)


def make_case(
    shape=(3, 7),
    V=257,
    dtype=torch.float32,
    device="cpu",
    *,
    staleness=0.3,
    spread=3.0,
    masked=0.25,
    idle=0.2,
    config=None,
    seed=0,
    poison=True,
    **options,
) -> Case:
    """A stale batch with masked, ignored and zero-advantage tokens; NaN wherever it is masked."""
    g = torch.Generator().manual_seed(seed)
    config = config or BAPOConfig()
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
    labels[torch.rand(shape, generator=g) < 0.05] = -100
    live = mask & (labels != -100)
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


def per_token(shape=(3, 7), seed=1, low=-6.0, high=0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g) * (high - low) + low


@dataclass
class Result:
    output: BAPOOutput
    gradient: Tensor


def run_kernel(case: Case, backend: str, scale: float = 1.0, **extra: Any) -> Result:
    logits = case.logits.detach().clone().requires_grad_()
    output = bapo_kernels.bapo_loss(
        logits, *case.arguments(), backend=backend, **(case.options | extra)
    )
    (output.loss * scale).backward()
    assert logits.grad.dtype == logits.dtype
    return Result(output, logits.grad)


def run_reference(case: Case, dtype: torch.dtype | None = None, **extra: Any) -> Result:
    logits = case.logits.detach().to(dtype or case.logits.dtype).clone().requires_grad_()
    output = reference.bapo_loss(logits, *case.arguments(), **(case.options | extra))
    output.loss.backward()
    return Result(output, logits.grad)


def assert_within_budget(
    name: str,
    got: Tensor,
    same_dtype: Tensor,
    truth: Tensor,
    operand: float = 0.0,
    inherited: float = 0.0,
) -> None:
    """``|got - truth| <= 2*|same_dtype - truth| + one rounding`` in the maximum norm.

    The rounding is one of the largest value, or of the largest operand of a difference;
    ``inherited`` comes on top.
    """
    got64, ref64, truth = got.double().cpu(), same_dtype.double().cpu(), truth.double().cpu()
    assert got64.shape == truth.shape, name
    assert torch.equal(got64.isnan(), truth.isnan()), f"{name}: NaN in different places"
    finite = truth.isfinite()
    assert torch.equal(got64[~finite & ~truth.isnan()], truth[~finite & ~truth.isnan()]), name
    if not finite.any():
        return
    error = (got64 - truth)[finite].abs().max().item()
    reference_error = (ref64 - truth)[finite].abs().max().item()
    largest = max(truth[finite].abs().max().item(), operand)
    rounding = EPS[got.dtype] * largest + TINY[got.dtype]
    budget = 2 * reference_error + rounding + inherited
    assert error <= budget, f"{name}: error {error:.3e} over budget {budget:.3e}"


def loss_sensitivity(case: Case, truth: Result, **extra: Any) -> float:
    """Sum of |d loss / d log_prob|."""
    live = case.labels != -100
    if case.response_mask is not None:
        live = live & (case.response_mask != 0)
    logp = truth.output.log_probs.double().nan_to_num(0.0).requires_grad_()
    options = case.options | extra | {"bounds": truth.output.bounds}
    loss = reference.bapo_loss_from_log_probs(
        logp, case.old_log_probs, case.advantages, live, **options
    ).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    return gradient.abs().sum().item()


def check_against_reference(
    case: Case, backend: str, few_tokens: bool = False, **extra: Any
) -> Result:
    """Loss, gradient, log-probs, entropy, bounds and metrics of one case.

    The gradient inherits the rounding of the log-prob in r; of ``few_tokens`` the reference may
    have got all right by luck.
    """
    got = run_kernel(case, backend, **extra)
    same = run_reference(case, **extra)
    truth = run_reference(case, torch.float64, **extra)
    for bound, expected in zip(got.output.bounds, truth.output.bounds, strict=True):
        assert bound.item() == expected.float().item()
    finite = truth.output.log_probs[truth.output.log_probs.isfinite()]
    operand = finite.abs().max().item() if finite.numel() else 0.0
    inherited = EPS[torch.float32] * operand * truth.gradient.abs().nan_to_num().max().item()
    gradients = (r.gradient for r in (got, same, truth))
    assert_within_budget("gradient", *gradients, inherited=few_tokens * inherited)
    parts = (r.output.log_probs for r in (got, same, truth))
    assert_within_budget("log_probs", *parts)
    # What is summed from log-probs inherits their rounding; with few tokens the reference may be
    # right by luck.
    parts = (r.output.entropy for r in (got, same, truth))
    assert_within_budget("entropy", *parts, operand=operand)
    parts = (r.output.loss for r in (got, same, truth))
    assert_within_budget("loss", *parts, operand=operand * loss_sensitivity(case, truth, **extra))
    assert set(got.output.metrics) == set(truth.output.metrics)
    for name in truth.output.metrics:
        parts = [r.output.metrics[name] for r in (got, same, truth)]
        size = max(1.0, parts[2].abs().nan_to_num(posinf=0.0).item())  # of a ratio of sums
        assert_within_budget(name, *parts, operand=operand * size)
        assert got.output.metrics[name].ndim == 0
        assert not got.output.metrics[name].requires_grad
    return got
