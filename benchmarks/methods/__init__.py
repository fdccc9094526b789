"""The methods that are measured: ours and the baselines, each behind a small adapter.

Baselines are installed packages. An adapter computes the quantity of the case: BAPO's loss with the
gradients of its inputs, or log-probs. For packages that provide log-probs only, the paper's search
(a loop on the host) and the token loss are added in plain PyTorch, at the cost of some kilobytes
next to the logits.
"""

from __future__ import annotations

from . import cross_entropies, liger, ours, pytorch, pytorch_sets, trl, verl
from .method import Method, Step

__all__ = ["Method", "Step", "methods"]

# PyTorch last, because compiling it takes longest.
MODULES = (ours, trl, liger, verl, cross_entropies, pytorch, pytorch_sets)


def methods() -> list[Method]:
    """All methods, ours first."""
    return [method for module in MODULES for method in module.METHODS]
