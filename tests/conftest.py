import gc
import getpass
import os
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

if "TRITON_PTX" in os.environ:
    from ptx import backend as ptx_backend
elif not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor's cache hands one capability the code of another, which writes past its tensors.
    folder = Path(tempfile.gettempdir()) / f"inductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))

os.environ.setdefault("BAPO_SELF_CHECK", "0")  # tests have it run where it is their subject

from helpers import (
    DEVICES,
    INTERPRETED,
    KERNELS,
    PTX,
    needs_gpu_memory,
    not_tested_on_the_gpu,
    poisoned_memory,
)
from hypothesis import settings
from torch.utils._device import DeviceContext

import bapo_kernels
from bapo_kernels import available_backends
from bapo_kernels.tools.sum_order import SumOrder

settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.register_profile("deep", max_examples=3_000, deadline=None)
settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


LIKE_OTHERS = "test_autograd", "test_misuse"  # their Triton kernels are those of other tests
INNER = "test_loss", "test_labels", "test_policies"  # interpreted in `make test` too
OF_TOKENS = "test_options_of_loss_from_log_probs"  # without rows: quick in the interpreter


def pytest_addoption(parser):
    parser.addoption(
        "--sum-order", type=int, metavar="SEED", help="PyTorch's sums in another order"
    )
    parser.addoption("--poisoned", action="store_true", help="memory is full of NaN at first")
    parser.addoption("--default-device", help="PyTorch's, for what the package makes")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "worlds" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
    left_out = set(shorten_triton(items))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def shorten_triton(items):
    """Without a GPU: marks what is slow, and what other stages or `make ptx` run too.

    In the interpreter a row takes milliseconds. It has the first case of a test, and ``OF_TOKENS``;
    of `test_triton*.py` all, but not in `make test`. Yields what it leaves to compiled kernels
    (tests/ptx).
    """
    seen = set()
    for item in items:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        on_all = case.get("backend") == "triton"  # by the fixture
        if not on_all and not item.path.stem.startswith("test_triton"):
            continue
        dtype = case.get("dtype", torch.bfloat16) if on_all else torch.bfloat16
        test = item.path, item.originalname, dtype
        is_first = test not in seen
        seen.add(test)
        is_quick = item.originalname == OF_TOKENS and dtype == torch.bfloat16
        if INTERPRETED and on_all and not is_first and not is_quick:
            yield item
        elif item.get_closest_marker("slow"):  # compilers, and processes, which have no plugin
            continue
        elif dtype != torch.bfloat16 or (on_all and item.path.stem in LIKE_OTHERS):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.repeated)
        elif INTERPRETED or not is_first:
            item.add_marker(pytest.mark.repeated)
            is_inner = item.path.stem in INNER if on_all else is_first
            if INTERPRETED and not is_inner:
                item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    missing = not_tested_on_the_gpu()
    if "cuda" in missing and os.environ.get("BAPO_REQUIRE_CUDA", "0") not in ("", "0"):
        raise pytest.UsageError(f"BAPO_REQUIRE_CUDA is set, and no CUDA backend: {missing['cuda']}")
    if PTX:
        config.pluginmanager.register(ptx_backend)


def pytest_report_header():
    reasons = available_backends().items()
    return [f"backend {name}: {reason or 'tested'}" for name, reason in reasons]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the list of failures
def pytest_terminal_summary(terminalreporter):
    result = yield
    if missing := not_tested_on_the_gpu():
        terminalreporter.section("NOT TESTED ON THE GPU OF THIS MACHINE", red=True, bold=True)
        for name, reason in missing.items():
            terminalreporter.line(f"backend {name}: {reason}")
        terminalreporter.line("To have it: docs/install.md, CUDA and Triton; then build again")
        terminalreporter.line("(`make test` does after `rm bapo_kernels/_build.json`).")
    return result


@pytest.fixture(
    params=KERNELS or [pytest.param("none", marks=pytest.mark.skip("no kernels"))],
    ids=lambda name: "triton-ptx" if PTX and name == "triton" else name,
)
def backend(request):
    """Every backend that has its own kernels and can run here."""
    return request.param


@pytest.fixture
def device(backend):
    return DEVICES[backend]


@pytest.fixture
def interpreted(backend):
    """Whether kernels run in Triton's interpreter, where a row takes milliseconds."""
    return backend == "triton" and INTERPRETED


@pytest.fixture
def gpu_memory():
    """:func:`needs_gpu_memory`, after which the memory is given back to the other workers."""
    yield needs_gpu_memory
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Process groups by number of ranks, each started on first use."""
    from world import world  # imports DTensor, which takes longer than `make check` allows

    with ExitStack() as stack:

        def start(ranks, device="cpu"):
            return stack.enter_context(world(ranks, tmp_path_factory.mktemp("ranks"), device))

        yield cache(start)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def sum_order(request):
    """With ``--sum-order``, as on other processors; compiled code has an order of its own."""
    seed = request.config.getoption("sum_order")
    other = seed is not None and request.node.get_closest_marker("compile") is None
    with SumOrder(seed) if other else nullcontext():
        yield


@pytest.fixture(autouse=True)
def poisoned(request):
    """With ``--poisoned``, and in eager code: what nothing has written reaches no result."""
    asked = request.config.getoption("poisoned")
    eager = request.node.get_closest_marker("compile") is None
    with poisoned_memory() if asked and eager else nullcontext():
        yield


PACKAGE = os.path.join(os.path.dirname(bapo_kernels.__file__), "")


class DefaultDevice(DeviceContext):
    """PyTorch's default device, for calls from the package; a test's own tensors are on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def default_device(request):
    device = request.config.getoption("default_device")
    with DefaultDevice(device) if device else nullcontext():
        yield
