"""Memory of gradients on a CPU that is used again: fresh memory costs more than the kernels."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

_C: Any = torch._C
# Below, the C library keeps freed memory itself (glibc's largest threshold for mmap).
KEPT_FROM_BYTES = 2**25


class _Block(NamedTuple):
    memory: Tensor  # uint8, of which the gradient shares the storage
    address: int

    def is_free(self) -> bool:
        """Whether nobody else holds the storage, and it still has the memory it was made with.

        Another process (``share_memory_``) or a lazy clone has the memory without the storage, but
        then the storage has other memory, in the latter case as soon as its address is asked for.
        """
        holders = _C._storage_Use_Count(_C._storage_address(self.memory))
        return holders == 1 and self.memory.data_ptr() == self.address


# Its methods are atomic, so threads need no lock, which a fork could leave locked.
_last: deque[_Block] = deque(maxlen=1)


def empty_gradient(logits: Tensor) -> Tensor:
    """``torch.empty`` like contiguous ``logits``, in the memory of the gradient before if possible.

    On a CPU, if nobody holds that memory any more and it is at most twice as large as needed.
    """
    if torch.compiler.is_compiling() or not _is_kept(logits):
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    try:
        block = _last.pop()  # no other thread has it now
    except IndexError:
        block = None
    size = logits.nbytes
    if block is None or not size <= block.memory.nbytes <= 2 * size or not block.is_free():
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        block = _Block(memory, memory.data_ptr())
    values = block.memory[:size].view(logits.dtype)
    _last.append(block)
    return values.view(logits.shape).data  # for autograd not a view


def _is_kept(logits: Tensor) -> bool:
    """A real, ordinary tensor: not one that torch traces or that belongs to inference mode."""
    return (
        logits.device.type == "cpu"
        and logits.nbytes >= KEPT_FROM_BYTES
        and not torch.is_inference_mode_enabled()
        and not _C._len_torch_dispatch_stack()
    )


def empty_cache() -> None:
    """Frees the memory that the last gradient on the CPU has left for the next one.

    The gradient of :func:`bapo_loss` and :func:`log_probs` takes over the memory of the one before
    if nobody holds it any more: that of at most one gradient is kept.

    Examples:
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> bapo_loss(logits, torch.tensor([0, 1, 2]), None, torch.ones(3)).loss.backward()
        >>> empty_cache()  # logits.grad is held, and stays what it is
        >>> logits.grad[0]
        tensor([-0.2500,  0.0833,  0.0833,  0.0833])
    """
    _last.clear()
