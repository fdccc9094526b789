"""Distillation on log-probs of K ids per token, in float32 or float64. Imports ``checks``."""

from math import log

import torch
from torch import Tensor

from .checks import check_like, number, require


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked(x: Tensor, ids: Tensor) -> Tensor:
    """``max(x, -1e30)``, and -1e30 where an id is -100, of ``x`` and ids ``[..., K]``.

    >>> masked(torch.tensor([-0.5, 0.0], dtype=torch.float16), torch.tensor([3, -100]))
    tensor([-5.0000e-01, -1.0000e+30])
    """
    check_like("x", x, ids, "ids")
    require(ids.dtype != torch.bool, "ids", "be integers", ids.dtype)
    return _wide(x).masked_fill(ids == -100, -1e30).clamp(min=-1e30)  # -inf has NaN gradients


def kl(a: Tensor, b: Tensor) -> Tensor:
    """``sum(exp(a) * (a - b))`` over the last dimension, of log-probs of one shape ``[..., K]``.

    >>> kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log())
    tensor(0.1438)
    """
    check_like("b", b, a, "a")
    return (_wide(a).exp() * (_wide(a) - _wide(b))).sum(-1)


def with_tail(x: Tensor) -> Tensor:
    """``[..., K + 1]``: ``x``, then ``log(max(1 - sum(exp(x)), 1e-6))``, of all other ids.

    >>> with_tail(torch.tensor([0.5, 0.125]).log()).exp()
    tensor([0.5000, 0.1250, 0.3750])
    """
    inside = _wide(x).logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    tail = torch.where(inside < -log(2), (-inside.exp()).log1p(), (-inside.expm1()).log())
    return torch.cat([x, tail], -1)


def renormalised(x: Tensor) -> Tensor:
    """``x - log(sum(exp(x)))`` over the last dimension: with probability 1 in the K ids.

    >>> renormalised(torch.tensor([0.5, 0.125]).log()).exp()
    tensor([0.8000, 0.2000])
    """
    return _wide(x).log_softmax(-1)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """``beta * kl(teacher, m) + (1 - beta) * kl(student, m)``, per token.
    ``m = log(beta * exp(teacher) + (1 - beta) * exp(student))``; beta must be in (0, 1).

    >>> jsd(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log(), 0.5)
    tensor(0.0338)
    """
    require(0 < number("beta", beta) < 1, "beta", "be in (0, 1): at its ends take kl", beta)
    check_like("teacher", teacher, student, "student")
    m = torch.logaddexp(_wide(student) + log(1 - beta), _wide(teacher) + log(beta))
    return beta * kl(teacher, m) + (1 - beta) * kl(student, m)


def padded(rows: list[list[tuple[int, float]] | None], k: int) -> tuple[Tensor, Tensor]:
    """int64 ids and float32 log-probs ``[len(rows), k]``: each row's best, then -100 and -inf.

    >>> [x.tolist() for x in padded([[(4, -3.0), (9, -0.5)], []], 1)]
    [[[9], [-100]], [[-0.5], [-inf]]]
    """
    known = [[(x, id) for id, x in row or () if x > -torch.inf] for row in rows]  # no NaN
    wrong = [id for row in known for _, id in row if id % 1]
    require(not wrong, "rows", "have pairs (id, log-prob)", f"ids {wrong[:2]}")
    top = [sorted(row + [(-torch.inf, -100)] * k, reverse=True)[:k] for row in known]
    both = torch.tensor(top, dtype=torch.float64, device="cpu").view(len(rows), k, 2)
    return both[..., 1].long(), both[..., 0].float()
