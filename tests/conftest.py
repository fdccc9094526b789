import pytest
import torch

from bapo_kernels import available_backends

DEVICES = {"cpu": "cpu", "reference": "cpu", "triton": "cuda", "cuda": "cuda"}


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=["cuda", "triton", "cpu"])
def backend(request):
    """Every backend with kernels of its own; the reference is what they are compared with."""
    reason = available_backends()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
def device(backend):
    return DEVICES[backend]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
