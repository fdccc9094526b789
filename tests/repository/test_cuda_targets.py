"""What the CUDA kernels are compiled for: the list of the environment, or the GPUs here."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
ALL = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_120"]

setuptools = pytest.importorskip("setuptools")
pytestmark = pytest.mark.skipif(not (ROOT / "release").exists(), reason="not in the repository")


@pytest.fixture
def setup(monkeypatch):
    """The functions of setup.py."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


@pytest.fixture
def targets(setup, monkeypatch):
    """Those of a list, with a torch for CUDA that sees some GPUs."""

    def targets(listed, *capabilities, cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])
        if listed is None:
            monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        else:
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        return setup.cuda_targets(setup.cuda_architectures())

    return targets


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("8.6;12.0+PTX", ["sm_80", "sm_120", "compute_120"]),
        ("8.6 8.9; 8.7", ["sm_80"]),  # a generation is one binary; torch takes spaces too
        ("8.0;11.0", ["sm_80", "compute_100"]),  # 11.0 has no binary of its generation
        ("13.0+PTX", ["compute_120"]),
        ("9.0a;10.0f+PTX", ["sm_90", "sm_100", "compute_100"]),
        ("5.0 7.5 8.0+PTX", ["sm_80", "compute_80"]),  # those before 8.0 are left out
        ("all", ALL),
    ],
)
def test_the_list_of_the_environment_wins_over_the_gpus(targets, listed, expected):
    assert targets(listed, (9, 0)) == targets(listed) == expected


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([(9, 0), (9, 0)], ["sm_90"]),
        ([(8, 9), (12, 0)], ["sm_80", "sm_120"]),
        ([(7, 5), (8, 0)], ["sm_80"]),
        ([], ALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("listed", [None, "", "native"])
def test_the_gpus_that_are_present(targets, monkeypatch, gpus, expected, listed):
    """All where torch sees none and CUDA is required, which ``test_supply.py`` also tests."""
    monkeypatch.setenv("BAPO_REQUIRE_CUDA", "1")
    assert targets(listed, *gpus) == expected
    assert targets(listed, *gpus, cuda=None) == ALL  # a torch for ROCm calls GPUs of AMD so


def test_a_gpu_that_is_too_old_is_refused(setup, targets):
    with pytest.raises(setup.BUILD_ERRORS, match="capability 8[.]0 or later, got 7[.]5"):
        targets(None, (7, 5))
