"""Memory on a CPU that is used again: fresh memory costs more than the kernels that fill it.

Imports nothing of the package. A mistake here overwrites a gradient that a user still holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_C: Any = torch._C
# Below, the C library keeps freed memory itself (glibc's largest threshold for mmap).
KEPT_FROM_BYTES = 2**25


class _Block(NamedTuple):
    memory: Tensor  # uint8, of which the tensor shares the storage
    address: int

    def is_free(self) -> bool:
        """Whether nobody else holds the storage, and it still has the memory it was made with.

        Another process (``share_memory_``) or a lazy clone has the memory without the storage, but
        then the storage has other memory, in the latter case as soon as its address is asked for.
        """
        holders = _C._storage_Use_Count(_C._storage_address(self.memory))
        return holders == 1 and self.memory.data_ptr() == self.address


class Memory:
    """The last tensor of a kind leaves its memory to the next one once it is unreferenced."""

    def __init__(self) -> None:
        # Its methods are atomic, so threads need no lock, which a fork could leave locked.
        self.last: deque[_Block] = deque(maxlen=1)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Makes a tensor as ``torch.empty``, on a CPU in the last memory if that is free.

        The memory must suffice, and at most half of it is left unused.
        """
        size = math.prod(shape) * dtype.itemsize
        if torch.compiler.is_compiling() or not _is_kept(size, device):
            return torch.empty(shape, dtype=dtype, device=device)
        try:
            block = self.last.pop()  # no other thread has it now
        except IndexError:
            block = None
        if block is None or not size <= block.memory.nbytes <= 2 * size or not block.is_free():
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            block = _Block(memory, memory.data_ptr())
        values = block.memory[:size].view(dtype)
        self.last.append(block)
        return values.view(shape).data  # for autograd not a view


def _is_kept(size: int, device: torch.device) -> bool:
    """Whether memory is kept: for tensors that torch neither traces nor made in inference mode."""
    return (
        device.type == "cpu"
        and size >= KEPT_FROM_BYTES
        and not torch.is_inference_mode_enabled()
        and not _C._len_torch_dispatch_stack()
    )


LOGITS, CHUNKS, SUMS, WEIGHTS = Memory(), Memory(), Memory(), Memory()


def empty_gradient(logits: Tensor) -> Tensor:
    """Contiguous memory for the gradient of ``logits``."""
    return LOGITS.empty(logits.shape, logits.dtype, logits.device)


def empty_cache() -> None:
    """Frees the memory that the last calls on the CPU have left for the next ones.

    The gradient of logits reuses the buffer of the previous one once that is unreferenced. So do,
    from hidden states, the chunk of logits, the gradient of the weight and its float32 sum. At
    most one of each is kept.

    Examples:
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> bapo_loss(logits, torch.tensor([0, 1, 2]), None, torch.ones(3)).loss.backward()
        >>> empty_cache()  # logits.grad is held, and stays what it is
        >>> logits.grad[0]
        tensor([-0.2500,  0.0833,  0.0833,  0.0833])
    """
    for memory in (LOGITS, CHUNKS, SUMS, WEIGHTS):
        memory.last.clear()
