"""The cases on the CPU: the loss at a real vocabulary, and the search.

Bytes are those that the algorithm must move: a copy reads and writes every element once; loss and
gradient read every row that is alive once and write every gradient once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bapo_kernels import BAPOConfig, bapo_loss, find_clip_bounds, log_probs, reference

from .timing import measure

N, V = 256, 151_936
MASKED, IDLE = 0.25, 0.4 / 0.75  # 65 % of all rows need no gradient


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, log-probs of a slightly older policy, advantages."""
    torch.manual_seed(0)
    logits = torch.empty(N, V, dtype=dtype)
    for row in logits:
        row.copy_(3 * torch.randn(V))
    labels = torch.randint(0, V, (N,))
    old = log_probs(logits, labels)[0] + 0.05 * torch.randn(N)
    return logits, labels, old, torch.randn(N)


def check(logits: Tensor, *arguments: Tensor) -> None:
    """A wrong gradient is not timed."""
    rows = slice(0, 8)
    logits, arguments = logits[rows], tuple(a[rows] for a in arguments)
    gradients = []
    for function, dtype in ((bapo_loss, logits.dtype), (reference.bapo_loss, torch.float64)):
        x = logits.to(dtype, copy=True).requires_grad_()
        function(x, *arguments).loss.backward()
        gradients.append(x.grad.double())
    error = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
    if not error <= torch.finfo(logits.dtype).eps + 1e-6:
        raise SystemExit(f"gradient in {logits.dtype} is off by {error:.1e}, not timed")


def loss_cases(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Loss and gradient: the copy first, then the reference, then the kernels."""
    logits, labels, old, A = batch(dtype)
    check(logits, labels, old, A)
    tensor_bytes = logits.numel() * logits.element_size()
    leaf = logits.clone().requires_grad_()
    other = torch.empty_like(logits)

    def record(case: str, bytes_moved: float, run: Any, prepare: Any = None) -> dict[str, Any]:
        return {"case": case, "bytes": bytes_moved, **measure(run, prepare=prepare)}

    def backward(function: Any, A: Tensor = A, mask: Tensor | None = None, **options: Any) -> None:
        leaf.grad = None
        function(leaf, labels, old, A, mask, **options).loss.backward()

    yield record("copy", 2 * tensor_bytes, lambda: other.copy_(logits))
    yield record("reference", 2 * tensor_bytes, lambda: backward(reference.bapo_loss))
    torch._logging.set_logs(dynamo=logging.ERROR)  # it reads values: graph breaks are expected
    compiled = torch.compile(reference.bapo_loss)
    yield record("reference, compiled", 2 * tensor_bytes, lambda: backward(compiled))
    yield record("cpu", 2 * tensor_bytes, lambda: backward(bapo_loss))
    yield record(
        "cpu, inplace",
        2 * tensor_bytes,
        lambda: bapo_loss(other, labels, old, A, inplace=True),
        prepare=lambda: other.copy_(logits),
    )
    mask = torch.rand(N) >= MASKED
    sparse = torch.where(torch.rand(N) < IDLE, 0.0, A)
    for statistics in ("all", "live"):
        alive = mask if statistics == "all" else mask & (sparse != 0)
        share = alive.float().mean().item()
        yield record(
            f"cpu, 65 % of rows dead or idle, statistics={statistics}",
            (1 + share) * tensor_bytes,
            lambda statistics=statistics: backward(bapo_loss, sparse, mask, statistics=statistics),
        )
        yield record(
            f"cpu, inplace, 65 % of rows dead or idle, statistics={statistics}",
            (1 + share) * tensor_bytes,
            lambda statistics=statistics: bapo_loss(
                other, labels, old, sparse, mask, statistics=statistics, inplace=True
            ),
            prepare=lambda: other.copy_(logits),
        )
    with torch.no_grad():
        yield record("log_probs and entropy", tensor_bytes, lambda: log_probs(logits, labels))


def search_cases(tokens: int = 1_000_000) -> Iterator[dict[str, Any]]:
    """Search of bounds that visits the whole grid: 53 probes of the literal loop."""
    torch.manual_seed(0)
    old = -3 * torch.rand(tokens)
    arguments = old + 0.3 * torch.randn(tokens), old, torch.randn(tokens)
    config = BAPOConfig(target=1.0)
    got = find_clip_bounds(*arguments, config=config)
    if got != reference.find_clip_bounds(*arguments, config=config):
        raise SystemExit("the search differs from the literal loop, not timed")
    for case, function in (
        ("search, literal loop", reference.find_clip_bounds),
        ("search", find_clip_bounds),
    ):
        yield {
            "case": case,
            "tokens": tokens,
            **measure(lambda function=function: function(*arguments, config=config)),
        }
