"""Compiling and loading the kernels of a call before the first one that counts.

May import the output and the backends. A kernel that it leaves out is loaded inside of the capture
of a CUDA graph, which fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .backends import self_check, why_not
from .output import BAPOOutput


def warm_up(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls ``function`` and its backward once, so that later calls compile and load no kernel.

    Triton compiles and loads a kernel at its first launch, which the capture of a CUDA graph does
    not allow: a first call there raises an error that names this function. The CUDA backend loads
    its kernels and sets their attributes at their first launch, and checks itself before: neither
    belongs in a capture, and a compiled function leaves the check out.
    One call with few tokens is enough, as neither their number nor values matter. What is loaded
    depends on the device, dtypes, given arguments, options of the config, V, and the strides and
    alignment of the logits (on AMD GPUs also on whether they take 2 GB).

    Args:
        function: a loss or :func:`log_probs` of this package, a module of it, or a function that
            calls one and returns its result.
        args, kwargs: its arguments. Gradients of the tensors among them are computed and dropped.
            With ``inplace=True`` the logits are overwritten, as by any call. With a group, every
            rank must call.

    Examples:
        >>> logits, labels = torch.zeros(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
        >>> warm_up(bapo_loss, logits, labels, None, torch.ones(3))
        >>> logits.grad is None
        True
    """
    leaves: list[Tensor] = []

    def with_other_leaf(given: Tensor) -> Any:
        if not given.requires_grad:
            return given
        leaves.append(given.detach().requires_grad_())
        return _SameMemory.apply(leaves[-1])

    for given in tree_leaves((args, kwargs)):
        if isinstance(given, Tensor) and why_not("cuda", given, "an argument") is None:
            self_check.why_not(given.device)
    args, kwargs = tree_map_only(Tensor, with_other_leaf, (args, kwargs))
    result = function(*args, **kwargs)
    results = tree_leaves(result.loss if isinstance(result, BAPOOutput) else result)
    results = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    if leaves and results:
        gradients = [torch.ones_like(each) for each in results]
        torch.autograd.grad(results, leaves, gradients, allow_unused=True)


class _SameMemory(torch.autograd.Function):
    """A tensor that is not a leaf, because a call may overwrite it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
