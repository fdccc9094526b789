"""The three matrix products of a head with hidden states, and the dtypes in which they are summed.

Imports nothing of the package. On a CPU without instructions for half precision, PyTorch's products
of it take twice to a hundred times as long as those of float32, which then takes their place.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_BLOCK = 1024  # rows of the head that are multiplied at once in float32: as caches hold
# Up to torch 2.10 the sum must have the dtype of the operands.
_SUM_MAY_BE_FLOAT32 = TorchVersion(torch.__version__) >= "2.11"


@cache
def why_in_float32(dtype: torch.dtype) -> str | None:
    """Why products of this dtype are made in float32 on this CPU; ``None`` if they are not.

    It depends on the instructions that the CPU has and oneDNN may use (``ONEDNN_MAX_CPU_ISA``).
    """
    if dtype == torch.float32:
        return None
    ops = torch.ops.mkldnn
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if not (
        torch.backends.mkldnn.is_available() and getattr(ops, f"_is_mkldnn_{name}_supported")()
    ):
        return f"oneDNN finds no instructions for {name}"
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if x86 and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return "the processor has no AVX512-BF16"  # oneDNN would emulate it
    return None


def in_own_dtype(operand: Tensor) -> bool:
    """Whether products of such operands are made, and rounded, in their dtype."""
    return operand.is_cuda or why_in_float32(operand.dtype) is None


def multiply(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = h @ weight.T + bias`` of ``[n, H]``, ``[V, H]``, ``[V]``; out may be float32."""
    if out.dtype == h.dtype and in_own_dtype(h):
        if bias is None:
            torch.mm(h, weight.T, out=out)
        else:
            torch.addmm(bias, h, weight.T, out=out)
    elif h.is_cuda:
        torch.mm(h, weight.T, out_dtype=torch.float32, out=out)
        if bias is not None:
            out += bias
    else:
        h = h.float()
        for columns, part in _in_float32(weight):
            there = out[:, columns]
            product = torch.mm(h, part.T, out=there if out.dtype == torch.float32 else None)
            if bias is not None:
                product += bias[columns]
            there.copy_(product)


def hidden_gradient(dlogits: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``dlogits @ weight`` in ``dtype``, that of the weight or float32.

    In float32 on a CPU as a sum of parts: the libraries there add the terms of a few rows one after
    the other, all of the vocabulary.
    """
    if weight.is_cuda and dtype != weight.dtype:
        return torch.mm(dlogits, weight, out_dtype=dtype)
    if weight.is_cuda or (dtype != torch.float32 and in_own_dtype(weight)):
        return torch.mm(dlogits, weight)
    total = dlogits.new_zeros(dlogits.shape[0], weight.shape[1], dtype=torch.float32)
    for columns, part in _in_float32(weight):
        total += torch.mm(dlogits[:, columns].float(), part)
    return total.to(dtype)


def add_weight_gradient(total: Tensor, dlogits: Tensor, h: Tensor, first: bool) -> None:
    """``total += dlogits.T @ h``; the first product is written, and the total not read.

    Args:
        total: ``[V, H]``, float32, or of the dtype of ``h`` if this is the only product.
    """
    if total.dtype == h.dtype and in_own_dtype(h):
        _add_product(total, dlogits.T, h, first)
    elif adds_in_float32(h):
        _add_product(total, dlogits.T, h, first, out_dtype=torch.float32)
    else:
        _add_in_blocks(total, dlogits, h, first)


def adds_in_float32(operand: Tensor) -> bool:
    """Whether a product of half precision can add to a float32 sum."""
    return operand.is_cuda and _SUM_MAY_BE_FLOAT32


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool, **options: Any) -> None:
    if first:
        torch.mm(a, b, **options, out=total)
    else:
        torch.addmm(total, a, b, **options, out=total)


def _add_in_blocks(total: Tensor, dlogits: Tensor, h: Tensor, first: bool) -> None:
    """A block of the sum after the other, while it is in the cache.

    Products that a CPU makes in bfloat16 are rounded to it, as the whole is that one makes.
    """
    options: dict[str, Any] = dict(out_dtype=torch.float32) if h.is_cuda else {}
    if not h.is_cuda and (h.dtype == torch.float16 or not in_own_dtype(h)):
        h = h.float()
    for begin in range(0, total.shape[0], _BLOCK):
        block = slice(begin, begin + _BLOCK)
        product = torch.mm(dlogits[:, block].to(h.dtype).T, h, **options)
        if first:
            total[block] = product
        else:
            total[block] += product


def _in_float32(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The blocks of a weight in float32, in one memory: each lasts until the next one."""
    memory = weight.new_empty(min(_BLOCK, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    for begin in range(0, weight.shape[0], _BLOCK):
        block = slice(begin, begin + _BLOCK)
        part = weight[block]
        if part.dtype != torch.float32:
            part = memory[: part.shape[0]].copy_(part)
        yield block, part
