"""A loss of log-probs against a framework's own, or the reference, within the error budget."""

from functools import partial
from typing import Any, NamedTuple

import torch
from helpers import EPS, assert_within_budget
from torch import Tensor

from bapo_kernels.tools.budget import in_some_orders, largest

DIGITS = 5e-9  # the relative error of recorded numbers, of which nine digits are


class Found(NamedTuple):
    """A loss, what is logged, and the gradient of log-probs or logits."""

    loss: Tensor
    log: dict[str, Any]
    gradient: Tensor


def recorded(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def found(function, values, dtype=None):
    """Of a function that returns a loss and what it logs."""
    leaf = values.detach().to(dtype or values.dtype, copy=True).requires_grad_()
    loss, log = function(leaf)
    loss.backward()
    return Found(loss.detach(), log, leaf.grad)


def in_both(function, values):
    """What is found in the dtype, with sums in some orders, and in float64."""
    same = in_some_orders(partial(found, function, values))
    return same, found(function, values, torch.float64)


def compare(ours, theirs, log_probs, relative=0.0):
    """:func:`assert_parity` of two functions of the log-probs; what was found, and the truth."""
    got, (same, truth) = found(ours, log_probs), in_both(theirs, log_probs)
    assert_parity(got, same, truth, largest(log_probs), relative)
    return got, truth


def assert_parity(got, same, truth, size, relative=0.0):
    """The gradient, the loss, and what the truth logs.

    Args:
        size: the largest log-prob, whose rounding is in every ratio: the gradient and the sums
            that loss and metrics are made of inherit it.
        relative: the error of the truth itself.
    """
    eps = EPS[got.gradient.dtype]
    gradients = got.gradient, [x.gradient for x in same], truth.gradient
    assert_gradient("gradient", *gradients, size + relative / eps)
    assert truth.gradient.any()
    inherited = eps * size * truth.gradient.abs().sum().item() + relative * largest(truth.loss)
    losses = got.loss, [x.loss for x in same], truth.loss
    assert_within_budget("loss", *losses, inherited=inherited)
    for name, value in truth.log.items():  # in float32, whatever the dtype of the loss
        mine, *others = (torch.as_tensor(x.log[name]).detach().float() for x in (got, *same))
        exact = torch.as_tensor(value, dtype=torch.float64).detach()
        operand = size * max(1.0, abs(exact.item()))
        assert_within_budget(name, mine, others, exact, operand)


def assert_gradient(name, got, same, truth, size):
    """It inherits the rounding of log-probs up to this size, through the ratio or the softmax."""
    inherited = EPS[got.dtype] * size * largest(truth)
    assert_within_budget(name, got, same, truth, inherited=inherited)


def assert_gradients(got, same, truth, size):
    """:func:`assert_gradient` of parameters by name."""
    assert got.keys() == truth.keys()
    for name, exact in truth.items():
        assert_gradient(name, got[name], [made[name] for made in same], exact, size)


def assert_trained(got, same, truth, before, steps, size):
    """Parameters by name: each step rounds the weight, and its change is that of ratios."""
    assert got.keys() == truth.keys()
    for name, exact in truth.items():
        rounded = steps * largest(exact) + size * largest(exact - before[name])
        inherited = EPS[torch.float32] * rounded
        assert_within_budget(name, got[name], [made[name] for made in same], exact, 0.0, inherited)
