"""The gradient of a row from a sample of its vocabulary, whose mean is the exact gradient.

Imports nothing of the package: what is sampled, and by which hash, is defined here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF


class Sample(NamedTuple):
    """What stands for a row's softmax in its gradient, 0 where an id is not kept."""

    kept: Tensor  # bool [N, V]
    p: Tensor  # for p: the gradient of a log-prob is onehot - p
    dentropy: Tensor  # for -p*(log p + H), the gradient of the entropy H


def sample(log_p: Tensor, labels: Tensor, seeds: Tensor, gradient_samples: int) -> Sample:
    """``p_j`` where it is at least ``t``; of smaller ones a share of ``p_j/t`` is kept.

    With the distinct labels L of a row, ``t = (1 - sum of p over L)/gradient_samples``. The smaller
    ones that are kept share the exact sum of all smaller ones in equal parts, each of which stands
    for p in the gradient of the entropy too, with an equal shift to its exact sum. Labels are
    always kept, exactly. At most ``gradient_samples + |L|`` ids are expected.

    Sampling with the least entries for a given variance: Wangni et al. 2017, Gradient
    Sparsification for Communication-Efficient Distributed Optimization. Keeping the largest alone
    is biased: arXiv 2503.16870.

    Args:
        log_p: ``[N, V]``, the log-softmax of the row.
        labels: ``[N, K]``; those outside of ``[0, V)`` are none.
        seeds: integer ``[N]``, as :func:`row_seeds` makes them.
    """
    V = log_p.shape[-1]
    known = (labels >= 0) & (labels < V)
    counts = torch.zeros_like(log_p).scatter_add_(1, labels.clamp(0, V - 1), known.to(log_p.dtype))
    is_label, p = counts > 0, log_p.exp()
    beside = torch.where(is_label, 0.0, p)
    t = beside.sum(-1, keepdim=True) / gradient_samples
    large = (beside >= t) & (t > 0)
    small = ~large & ~is_label
    u = uniforms(seeds[:, None], torch.arange(V, device=log_p.device)).to(p.dtype)
    drawn = small & (beside >= t * u) & (t > 0)
    count = drawn.sum(-1, keepdim=True).clamp(min=1)

    def total(values: Tensor, of: Tensor) -> Tensor:
        return torch.where(of, values, 0.0).sum(-1, keepdim=True)

    def made(values: Tensor, drawn_ones: Tensor) -> Tensor:
        return torch.where(is_label | large, values, torch.where(drawn, drawn_ones, 0.0))

    log_ratio = torch.where(p > 0, log_p, 0.0)
    log_ratio = log_ratio - (p * log_ratio).sum(-1, keepdim=True)  # log p + H
    exact, part = -p * log_ratio, total(p, small) / count
    shift = (total(exact, small) + total(part * log_ratio, drawn)) / count
    return Sample(is_label | large | drawn, made(p, part), made(exact, shift - part * log_ratio))


def with_sampled_gradient(
    x: Tensor, log_p: Tensor, labels: Tensor, logp: Tensor, entropy: Tensor, gradient_samples: int
) -> tuple[Tensor, Tensor]:
    """Log-probs ``[..., K]`` and entropies ``[...]``, with the gradients of a :func:`sample`.

    Args:
        x: ``[..., V]``, whose log-softmax is ``log_p``; finite.
    """
    V, K = log_p.shape[-1], labels.shape[-1]
    rows, ids = log_p.detach().reshape(-1, V), labels.reshape(-1, K)
    first = logp.detach().reshape(-1, K)[:, :1], entropy.detach().reshape(-1, 1)
    seeds = row_seeds(torch.cat(first, 1).double(), ids)
    _, p, dentropy = (each.view(x.shape) for each in sample(rows, ids, seeds, gradient_samples))
    at_labels = x.gather(-1, labels.clamp(0, V - 1))
    dlogp = torch.where(
        (labels >= 0) & (labels < V), at_labels - (p * x).sum(-1, keepdim=True), 0.0
    )
    return _with_gradient(logp, dlogp), _with_gradient(entropy, (dentropy * x).sum(-1))


def _with_gradient(values: Tensor, of: Tensor) -> Tensor:
    """These values, with the gradient of others."""
    return values.detach() + (of - of.detach())


def row_seeds(statistics: Tensor, labels: Tensor) -> Tensor:
    """int32 ``[N]`` from the bits of float64 ``[N, S]`` statistics and the first label of a row."""
    bits = statistics.contiguous().view(torch.int64)
    x = (labels if labels.ndim == 1 else labels[:, 0]).long()
    for column in bits.unbind(1):
        x = (x ^ column) * 0x2545F4914F6CDD1D  # int64 wraps around
        x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    return (x >> 32).int()


def uniforms(seeds: Tensor, ids: Tensor) -> Tensor:
    """Of a seed and an id, a hash in (0, 1): ``(h + 0.5)/2**24`` with 24 bits h."""
    x = (ids.long() * 0x9E3779B9 + seeds) & _32_BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32_BITS
    return (((x ^ (x >> 16)) >> 8).double() + 0.5) * 2.0**-24
