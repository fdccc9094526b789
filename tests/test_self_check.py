"""The check at the first call: what it notices, what follows, and when it does not run.

The CPU kernels stand for those of a GPU; test_cuda_on_host.py has it check the CUDA kernels.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import needs_native
from torch._subclasses.fake_tensor import FakeTensorMode

from bapo_kernels import backends, checks, warm_up, warmup
from bapo_kernels.backends import native, self_check, triton
from bapo_kernels.tools import validate

pytestmark = needs_native
GPU_TENSOR = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16)
first_failure = self_check.first_failure


class Gpu:
    """Operators, of which some may be wrong, and how often they have been checked."""

    def __init__(self):
        self.wrong, self.checks = {}, 0

    def __getattr__(self, name):
        return self.wrong.get(name, getattr(torch.ops.bapo_kernels, name))

    def first_failure(self, ops, device):
        self.checks += 1
        return first_failure(self, torch.device("cpu"))

    def chosen(self, backend=None):
        return backends.choose(backend, GPU_TENSOR, "logits")

    def checks_of_processes(self):
        new_process()
        assert self.chosen() == "cuda"
        return self.checks


def new_process():
    self_check._found.clear()
    checks.warn_once.cache_clear()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    gpu, of_cuda = Gpu(), dict(is_initialized=True, is_current_stream_capturing=False)
    of_cuda |= dict(Stream=Mock(), current_stream=Mock(), stream=nullcontext(), _sleep=None)
    returned = {
        native: dict(why_no_cuda=None, why_no_kernels=None, cuda_of_driver=13_020),
        triton: dict(why_not=None),
        torch.cuda: of_cuda | dict(get_sync_debug_mode=0, get_device_properties="an H100"),
    }
    for module, functions in returned.items():
        for name, value in functions.items():
            monkeypatch.setattr(module, name, lambda *given, value=value: value)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(backends, "_UNASKED", backends.NAMES)
    monkeypatch.setattr(
        self_check, "ROWS", [(V, t) for V in (257, 10_000) for t in (torch.bfloat16, torch.float32)]
    )
    monkeypatch.setattr(self_check, "first_failure", gpu.first_failure)
    monkeypatch.setattr(self_check, "GPU", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BAPO_SELF_CHECK", raising=False)
    new_process()
    yield gpu
    new_process()


def test_kernels_that_agree_are_checked_once(gpu, tmp_path, recwarn):
    assert (gpu.chosen("cuda"), gpu.checks) == ("cuda", 1)
    assert (gpu.chosen(), gpu.checks) == ("cuda", 1)
    assert gpu.checks_of_processes() == 1
    (file,) = (tmp_path / "bapo_kernels").iterdir()
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()  # so that no file can be written, which is no error
    assert [gpu.checks_of_processes(), gpu.checks_of_processes()] == [2, 3]
    assert not recwarn.list


def test_without_memory_a_later_call_checks(gpu, recwarn):
    def full(*arguments):
        raise torch.OutOfMemoryError

    gpu.wrong["row_pass"] = full
    assert (gpu.chosen(), gpu.checks) == ("cuda", 1)
    gpu.wrong.clear()
    assert [(gpu.chosen(), gpu.checks) for _ in range(2)] == [("cuda", 2)] * 2
    assert not recwarn.list


def test_another_library_gpu_or_driver_is_checked_again(gpu, monkeypatch, tmp_path):
    other = tmp_path / "library"
    other.write_bytes(native.LIBRARY.read_bytes() + b"other")
    assert gpu.checks_of_processes() == 1
    monkeypatch.setattr(native, "LIBRARY", other)
    assert gpu.checks_of_processes() == 2
    monkeypatch.setattr(native, "cuda_of_driver", lambda: 13_030)
    assert gpu.checks_of_processes() == 3
    monkeypatch.setattr(torch.cuda, "get_device_properties", str)
    assert gpu.checks_of_processes() == 4
    monkeypatch.setenv("BAPO_NO_CLUSTERS", "1")
    assert gpu.checks_of_processes() == 5


def not_launched(*arguments):
    raise RuntimeError("a CUDA kernel was not launched")


SHORT = "rows of 257 columns in bfloat16 is off by 4 times"


@pytest.mark.parametrize(
    ("operator", "at", "dtype", "failure"),
    [
        ("search", -2, torch.float64, "search of 600 tokens is off"),
        ("row_statistics", -3, torch.float32, "row_statistics of two sets is off"),
        ("row_gradient", -1, torch.bfloat16, f"row_gradient of {SHORT}"),
        ("row_pass", -1, torch.bfloat16, f"row_pass of {SHORT}"),
        ("row_pass_", 0, torch.bfloat16, f"row_pass_ of {SHORT}"),
        ("row_pass", -5, None, "row_pass of two sets is off by nan times"),
        ("row_gradient", -1, None, "row_gradient of two sets is off by nan times"),
    ],
)
def test_a_wrong_kernel_is_named_and_triton_takes_over(gpu, operator, at, dtype, failure, tmp_path):
    """A number is off, by two units in the last place of bfloat16, or none is written."""

    def run(*arguments):
        before = arguments[at].clone()
        getattr(torch.ops.bapo_kernels, operator)(*arguments)
        if dtype is None:
            arguments[at].copy_(before)
        elif arguments[0].dtype == dtype:
            arguments[at].view(-1)[-1] *= 1 + 2**-6

    gpu.wrong = {operator: run}
    with pytest.warns(RuntimeWarning, match=f"cuda:0: {failure}.*validate --json") as warned:
        chosen = [gpu.chosen("cuda"), gpu.chosen(), gpu.chosen("cuda")]
    assert (chosen, gpu.checks, len(warned)) == (["cuda", "triton", "cuda"], 1, 1)
    assert not list(tmp_path.iterdir())


class Early:
    """A call on another stream than the current one: it is made while that sleeps."""

    def __init__(self, call):
        self.call, self.made = call, []

    def __call__(self, *arguments, **options):
        self.again = partial(self.call, *arguments, **options)
        return self.made.pop() if self.made else self.again()

    def sleep(self, cycles):
        self.made = [self.again()]


@pytest.mark.parametrize(
    "operator", ["prepare", "row_statistics", "row_gradient", "row_pass_", "search", "token_loss"]
)
def test_a_kernel_on_another_stream_is_named(gpu, monkeypatch, operator):
    gpu.wrong = {operator: (early := Early(getattr(torch.ops.bapo_kernels, operator)))}
    monkeypatch.setattr(torch.cuda, "_sleep", early.sleep)
    what = "600 tokens" if operator == "search" else "rows of 257 columns"
    with pytest.warns(RuntimeWarning, match=f"{operator} of {what} in a side stream is off"):
        assert gpu.chosen() == "triton"


@pytest.mark.parametrize("is_early", [False, True])
def test_validate_calls_in_a_side_stream(gpu, monkeypatch, is_early):
    """Where the kernels run on another one, no result is right."""
    early = Early(validate.bapo_loss)
    if is_early:
        monkeypatch.setattr(validate, "bapo_loss", early)
        monkeypatch.setattr(torch.cuda, "_sleep", early.sleep)
    measured = validate._loss(validate._late, "cpu", dtype=torch.bfloat16)
    wrong = {quantity for quantity, error, budget in measured if not error <= budget}
    assert wrong >= {"loss", "log_probs", "entropy", "gradient"} if is_early else not wrong


def test_where_it_cannot_run_it_runs_later(gpu, monkeypatch):
    for module, name, value in (
        (torch.cuda, "is_current_stream_capturing", True),
        (torch.cuda, "get_sync_debug_mode", 2),
        (torch.cuda, "is_initialized", False),
        (torch._C, "_are_functorch_transforms_active", True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            assert (gpu.chosen(), gpu.checks) == ("cuda", 0), name
    with FakeTensorMode():
        assert (gpu.chosen(), gpu.checks) == ("cuda", 0)
    assert (gpu.chosen(), gpu.checks) == ("cuda", 1)


@pytest.mark.compile
def test_a_compiled_function_takes_what_is_known(gpu):
    @torch.compile(fullgraph=True, backend="eager")
    def is_triton(x):
        return x + (gpu.chosen() == "triton")

    gpu.wrong = {"row_pass": not_launched}
    assert (is_triton(torch.zeros(())), gpu.checks) == (0, 0)
    with pytest.warns(
        RuntimeWarning, match="two sets: RuntimeError: a CUDA kernel was not launched"
    ):
        gpu.chosen()
    torch.compiler.reset()
    assert (is_triton(torch.zeros(())), gpu.checks) == (1, 1)
    torch.compiler.reset()


@pytest.mark.parametrize(("variable", "enabled"), [("0", True), ("1", False)])
def test_off(gpu, monkeypatch, variable, enabled):
    monkeypatch.setenv("BAPO_SELF_CHECK", variable)
    monkeypatch.setattr(self_check, "enabled", enabled)
    assert (gpu.chosen(), gpu.checks) == ("cuda", 0)


def test_threads_wait_for_one_check(gpu):
    gpu.wrong, barrier = {"row_pass": not_launched}, threading.Barrier(4)

    def work(_):
        barrier.wait()
        return gpu.chosen()

    with ThreadPoolExecutor(4) as pool, pytest.warns(RuntimeWarning, match="not launched"):
        assert list(pool.map(work, range(4))) == ["triton"] * 4
    assert gpu.checks == 1


def test_warm_up_checks_before_it_calls(monkeypatch):
    checked = []
    monkeypatch.setattr(self_check, "why_not", checked.append)
    warm_up(torch.add, torch.ones(2), torch.ones(2))
    assert not checked
    monkeypatch.setattr(warmup, "why_not", lambda *given: None)
    warm_up(lambda *given: checked.append(given), torch.ones(2), [torch.ones(2)])
    assert checked[:2] == [torch.device("cpu")] * 2
    assert len(checked) == 3
