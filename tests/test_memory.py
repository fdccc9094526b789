"""Gradient memory on a CPU: used again when nobody holds it, and never before."""

import gc
import os
from functools import partial

import numpy as np
import pytest
import torch
from accuracy import assert_same
from forked import in_fork
from helpers import make_case, needs_native, run_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import bapo_kernels
from bapo_kernels import BAPOConfig, bapo_loss
from bapo_kernels.core import memory
from bapo_kernels.core.memory import empty_gradient

LOGITS = torch.zeros(6, 8)


@pytest.fixture(autouse=True)
def kept_from_the_first_byte(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", 0)
    bapo_kernels.empty_cache()
    yield
    bapo_kernels.empty_cache()


def ones():
    return empty_gradient(LOGITS).fill_(1.0)


def all_of(storage):
    return torch.empty(0).set_(storage, 0, LOGITS.shape)


def as_gradient_of_a_leaf(gradient):
    leaf = torch.zeros(LOGITS.shape, requires_grad=True)
    leaf.grad = gradient
    return lambda: leaf.grad


def in_an_autograd_graph(gradient):
    w = torch.ones(LOGITS.shape, requires_grad=True)
    loss = (gradient * w).sum()
    return lambda: torch.autograd.grad(loss, w)[0]


def set_to_another(gradient):
    other = torch.zeros(3).set_(gradient)
    gradient.set_(torch.ones(3).untyped_storage(), 0, (3,))
    return lambda: torch.cat([other.flatten(), gradient])


def without_memory(gradient):
    """As FSDP frees a tensor, and allocates it again."""
    storage, size = gradient.untyped_storage(), gradient.nbytes
    storage.resize_(0)
    later = ones()
    storage.resize_(size)
    gradient.fill_(1.0)
    return lambda: torch.cat([gradient, later])


def of_shared_memory(gradient):
    """A second mapping of the memory, such as another process makes; it holds nothing here."""
    fd, size = gradient.untyped_storage()._share_fd_cpu_()
    mapped = torch.UntypedStorage._new_shared_fd_cpu(os.dup(fd), size)
    return partial(all_of, mapped)


HOLDERS = {
    "the tensor": lambda g: lambda: g,
    "a slice": lambda g: partial(torch.clone, g[2:, ::3]),
    "other dtype": lambda g: partial(torch.Tensor.view, g.view(torch.int32), torch.float32),
    "detached": lambda g: partial(torch.clone, g.detach()),
    "parameter": lambda g: partial(torch.clone, torch.nn.Parameter(g)),
    "gradient of a leaf": as_gradient_of_a_leaf,
    "autograd graph": in_an_autograd_graph,
    "storage": lambda g: partial(all_of, g.untyped_storage()),
    "numpy": lambda g: partial(torch.tensor, g.numpy()),
    "slice in numpy": lambda g: partial(torch.tensor, g.numpy()[1:, 2:]),
    "numpy and back": lambda g: partial(torch.clone, torch.from_numpy(g.numpy())),
    "memoryview": lambda g: partial(np.array, memoryview(g.numpy())),
    "DLPack capsule": lambda g: partial(torch.from_dlpack, torch.utils.dlpack.to_dlpack(g)),
    "DLPack in numpy": lambda g: partial(torch.tensor, np.from_dlpack(g)),
    "lazy clone": lambda g: partial(torch.clone, torch._lazy_clone(g)),
    "resize_": lambda g: partial(torch.narrow, g.resize_(2 * g.numel()), 0, 0, g.numel() // 2),
    "shrunk": lambda g: partial(torch.clone, g.resize_(3)),
    "set_": set_to_another,
    "resize_(0)": without_memory,
    "shared memory": lambda g: partial(torch.clone, all_of(g.share_memory_().untyped_storage())),
    "other process": of_shared_memory,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_memory_is_not_touched(holder):
    gradient = ones()
    read = HOLDERS[holder](gradient)
    del gradient
    gc.collect(1)  # what is young; all objects of a process take half a second
    later = {value: empty_gradient(LOGITS).fill_(value) for value in (2.0, 3.0, 4.0)}
    values = torch.as_tensor(read())
    assert values.numel()
    assert (values == 1).all()
    assert all((each == value).all() for value, each in later.items())


def test_free_memory_is_used_again():
    address = ones().data_ptr()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        logits = LOGITS.to(dtype)
        gradient = empty_gradient(logits.T)
        assert gradient.data_ptr() == address
        assert (gradient.shape, gradient.dtype) == (logits.T.shape, dtype)
        assert gradient.is_contiguous()
        assert not gradient.storage_offset()
        assert not gradient._is_view()
        del gradient
    bapo_kernels.empty_cache()
    held = ones()
    assert empty_gradient(LOGITS).data_ptr() != held.data_ptr()


@pytest.mark.parametrize(("rows", "again"), [(6, True), (3, True), (2, False), (7, False)])
def test_memory_of_another_size(rows, again):
    """At most half of it is left unused; a larger gradient gets memory of its own."""
    address = ones().data_ptr()
    spare = torch.empty(LOGITS.nbytes, dtype=torch.uint8)  # a freed block would come back here
    assert (empty_gradient(LOGITS[:1].expand(rows, 8)).data_ptr() == address) == again
    del spare


def test_what_is_not_kept(monkeypatch):
    with FlopCounterMode(display=False):
        ones()
    with FakeTensorMode() as mode:
        empty_gradient(mode.from_tensor(LOGITS))
    with torch.inference_mode():
        ones()
    torch.compile(empty_gradient, backend="eager", fullgraph=True)(LOGITS)
    empty_gradient(LOGITS.to("meta"))
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", LOGITS.nbytes + 1)
    ones()
    assert not memory.LOGITS.last
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", LOGITS.nbytes)
    ones()
    assert memory.LOGITS.last


def test_a_thread_in_between(monkeypatch):
    """Memory that one thread has found to be free does not go to another."""
    is_free, others = memory._Block.is_free, []

    def interrupted(block):
        free = is_free(block)
        monkeypatch.setattr(memory._Block, "is_free", is_free)
        others.append(ones())
        return free

    monkeypatch.setattr(memory._Block, "is_free", interrupted)
    ones()
    mine = empty_gradient(LOGITS).fill_(2.0)
    assert (others[0] == 1).all()
    assert (mine == 2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks():
    """Parent and child have the same free memory, each its own copy."""
    address = ones().data_ptr()

    def others():
        theirs = empty_gradient(LOGITS).fill_(2.0)
        return theirs.data_ptr(), theirs.unique().tolist()

    assert in_fork(others, 60) == (address, [2.0])
    mine = empty_gradient(LOGITS)
    assert mine.data_ptr() == address
    assert (mine == 1).all()


OPTIONS = {
    "search": {},
    "bounds": {"bounds": (0.8, 1.2)},
    "live": {"statistics": "live"},
    "entropy": {"config": BAPOConfig(entropy_coef=0.1)},
}


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_have_the_same_bits(option, dtype):
    """The memory is written completely, also where rows are masked, idle or skipped."""
    case = make_case((3, 7), 257, dtype=dtype)
    case.advantages[1] = 0.0
    expected = run_kernel(case, "cpu", **OPTIONS[option]).gradients[0].clone()
    assert (expected == 0).all(-1).any()
    assert expected.any()
    poisoned = empty_gradient(case.logits).fill_(torch.nan)
    address = poisoned.data_ptr()
    del poisoned
    got = run_kernel(case, "cpu", **OPTIONS[option]).gradients[0]
    assert got.data_ptr() == address
    assert_same(got, expected)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_released_before_backward(dtype):
    """What refuses a second derivative by them does not keep them."""
    case = make_case((3, 7), 257, dtype=dtype, poison=False)
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 1
    memory = StorageWeakRef(logits.untyped_storage())
    loss = bapo_loss(logits, *case.arguments(), backend="cpu").loss
    del logits
    assert memory.expired()
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.autograd.grad(gradient.sum(), leaf)


@needs_native
def test_training_steps():
    """From the second on, a step has the memory of the one before, unless its gradient is held."""
    case = make_case((3, 7), 257)
    logits, addresses = case.logits.detach().requires_grad_(), []
    for step in range(6):
        logits.grad = None
        bapo_loss(logits, *case.arguments(), backend="cpu", **case.options).loss.backward()
        addresses.append(logits.grad.data_ptr())
        if step == 2:
            held = [logits.grad, logits.grad.clone()]
    assert len(set(addresses[:3])) == 1
    assert len(set(addresses[3:])) == 1
    assert addresses[2] != addresses[3]
    assert_same(*held)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_accumulated_gradients_of_a_head(monkeypatch, dtype, chunk_tokens):
    """That of the weight is held between micro-batches; a chunk is not."""
    case = make_case((3, 7), 257)
    hidden, weight = torch.randn(3, 7, 16).to(dtype), torch.randn(257, 16).to(dtype)

    def gradients():
        """Of three steps of two micro-batches."""
        made = []
        for step in range(3):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            for rows in (slice(0, 2), slice(1, 3)):
                batch = (values[rows] for values in case.arguments())
                options = dict(backend="cpu", chunk_tokens=chunk_tokens)
                bapo_kernels.bapo_linear_loss(
                    (leaves[0] + step)[rows], leaves[1], *batch, **options
                ).loss.backward()
            made += [leaf.grad for leaf in leaves]
        return made

    again = gradients()
    chunk = memory.CHUNKS.last[0].address
    values = [gradient.clone() for gradient in again]
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", 2**60)
    for held, copied, expected in zip(again, values, gradients(), strict=True):
        assert_same(held, copied)
        assert_same(held, expected)
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", 0)
    gradients()
    assert memory.CHUNKS.last[0].address == chunk
    bapo_kernels.empty_cache()
    assert not memory.CHUNKS.last
    assert not memory.WEIGHTS.last
