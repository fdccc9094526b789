"""When kernels of the Triton backend are compiled and loaded, by Triton's own launcher.

Needs compiled kernels without a GPU (tests/ptx): there the driver is a stand-in.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from accuracy import assert_same
from helpers import PTX, make_case

from bapo_kernels import bapo_loss, log_probs, warm_up

pytestmark = pytest.mark.skipif(not PTX, reason="needs the stand-in for the driver (TRITON_PTX)")
if PTX:
    import triton.language as tl
    from ptx.absent_gpu import current
    from ptx.backend import LIBCUDA, kernels

    from bapo_kernels.backends import triton as package
    from bapo_kernels.backends.triton.kernel import Kernel


@pytest.fixture
def driver(monkeypatch):
    """Variables of the stand-in, of which one counts the modules that were loaded."""
    names = "loads", "load_error", "load_milliseconds"
    variables = SimpleNamespace(**{name: ctypes.c_int.in_dll(LIBCUDA, name) for name in names})
    for variable in vars(variables).values():
        monkeypatch.setattr(variable, "value", 0)
    return variables


@pytest.fixture
def fill():
    """A launch of a kernel that nobody has loaded yet; returns what it has written."""

    def fill_kernel(x, value: tl.float32, SIZE: tl.constexpr):
        tl.store(x + SIZE * tl.program_id(0) + tl.arange(0, SIZE), value)

    kernel = Kernel(fill_kernel)

    def launch(value, programs=1, kind=torch.Tensor):
        x = torch.zeros(programs, 32).as_subclass(kind)
        kernel[(programs,)](x, value, 32, num_warps=1)
        return x.unique().tolist()

    return launch


@pytest.fixture
def none_loaded(monkeypatch):
    """No variant of the package's kernels is known; returns the kernels."""
    for kernel in kernels():
        monkeypatch.setattr(kernel, "compiled", {})
    return kernels()


def test_a_load_that_fails_is_tried_again(driver, fill):
    driver.load_error.value = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Triton Error.*an error"):
            fill(1.0)
    driver.load_error.value = 0
    assert fill(2.0) == [2.0]
    assert fill(3.0) == [3.0]
    assert driver.loads.value == 3


def test_other_threads_wait_for_a_load(driver, fill):
    """And then launch their own grids."""
    driver.load_milliseconds.value = 300
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fill, (1.0, 2.0, 3.0, 4.0), (1, 2, 3, 4))) == [
            [1.0],
            [2.0],
            [3.0],
            [4.0],
        ]
    assert driver.loads.value == 1


def test_each_gpu_has_its_own_modules(monkeypatch, fill):
    """And a launch is on that of its tensors, whichever is the current one."""

    @contextmanager
    def on(device):
        with monkeypatch.context() as patch:
            patch.setitem(vars(current), "gpu", device.index)
            yield

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.gpu)
    monkeypatch.setitem(package._operators(), "fill", lambda x: fill(2.0, kind=type(x)))
    gpus = [torch.device("cuda", index) for index in range(2)]
    kinds = [type("OfGpu", (torch.Tensor,), dict(device=gpu)) for gpu in gpus]
    for gpu, kind in product(gpus, kinds):
        with on(gpu):
            package._launch("fill", torch.zeros(1).as_subclass(kind))


def test_products_and_sums_are_fused(monkeypatch, none_loaded):
    """Whatever the default of a version of Triton is: the bits of a result depend on it."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    log_probs(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long), backend="triton")
    compiled = [each for kernel in none_loaded for each in kernel.compiled.values()]
    assert {each.metadata.enable_fp_fusion for each in compiled} == {True}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_first_call_in_a_graph(monkeypatch, none_loaded, dtype, inplace):
    """It needs a warm-up, of which the error tells; whatever the number of tokens was in that."""
    case, other = (make_case((2, n), 40, dtype, staleness=0.4) for n in (3, 7))

    def loss_of(logits, *others):
        return bapo_loss(logits, *others, backend="triton", inplace=inplace)

    def step(case):
        logits = case.logits.clone().requires_grad_()
        loss_of(logits * 1 if inplace else logits, *case.arguments()).loss.backward()
        return logits.grad

    capturing, is_capturing = [], "is_current_stream_capturing"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, is_capturing, lambda: bool(capturing), raising=False)
    expected = step(other)
    for kernel in none_loaded:
        kernel.compiled.clear()
    capturing.append(True)
    with pytest.raises(RuntimeError, match=r"_kernel is not loaded yet.* bapo_kernels.warm_up\("):
        step(other)
    capturing.clear()
    warm_up(loss_of, case.logits.clone().requires_grad_(), *case.arguments())
    capturing.append(True)
    assert_same(step(other), expected)
