"""The sums of PyTorch in another order, as other processors and libraries add them.

Imports nothing of the package. An operator that is not listed keeps its order: budgets get smaller.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where the factors begin
_SUMS = aten.sum, aten.mean, aten.logsumexp
_SOFTMAXES = {  # how many tensors there are before the dimension
    **{aten._softmax: 1, aten._log_softmax: 1},
    **{aten._softmax_backward_data: 2, aten._log_softmax_backward_data: 2},
}


class SumOrder(TorchDispatchMode):
    """Matrix products, sums and softmaxes of floats add in an order drawn by a seed.

    It depends on the number of terms alone, so equal rows have equal sums. Compiled code and the
    sums inside of kernels keep their order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Says no: to keep the compiler out, torch would import it and slow down every operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the operator on permuted operands."""
        args, kwargs, name = list(args), kwargs or {}, func.overloadpacket
        if name in _PRODUCTS:
            a = _PRODUCTS[name]
            order = self._order(args[a], -1)
            args[a : a + 2] = args[a][..., order], args[a + 1][..., order, :]
        elif name in _SUMS and args[0].is_floating_point():
            dims = args[1] if len(args) > 1 and args[1] else range(args[0].ndim)
            for dim in [dims] if isinstance(dims, int) else dims:
                args[0] = args[0].index_select(dim, self._order(args[0], dim))
        elif name in _SOFTMAXES and args[0].ndim:
            count = _SOFTMAXES[name]
            dim, order = args[count], self._order(args[0], args[count])
            args[:count] = [x.index_select(dim, order) for x in args[:count]]
            return func(*args, **kwargs).index_select(dim, order.argsort())
        return func(*args, **kwargs)

    def _order(self, x: Tensor, dim: int) -> Tensor:
        return _permutation(self.seed, x.shape[dim], x.device)


@cache
def _permutation(seed: int, count: int, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=g, device="cpu").to(device)
