"""The build variant for the kernels hub: its sources, its names, and loading it as the hub does."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bapo_kernels

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
HUB = ROOT / "release" / "hub"
CONFIG = tomllib.loads((HUB / "build.toml").read_text())
SETUP = (ROOT / "setup.py").read_text()

pytestmark = [
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the commit"),
    pytest.mark.xdist_group("hub"),  # one worker builds the library
]


def sources(*sections):
    return [name for section in sections for name in section["src"]]


def test_every_source_is_listed_once():
    listed = sources(CONFIG["torch"], *CONFIG["kernel"].values())
    written = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")]
    assert sorted(listed) == sorted(written)


def test_cuda_capabilities_are_those_of_setup():
    lists = re.findall(r'^    "(\w+)": \(([\d", ]+)\),$', SETUP, re.MULTILINE)
    built = {name: [f"{a[:-1]}.{a[-1]}" for a in re.findall(r"\d+", x)] for name, x in lists}
    listed = {
        Path(source).stem: kernel["cuda-capabilities"]
        for kernel in CONFIG["kernel"].values()
        for source in kernel["src"]
        if source.endswith(".cu")
    }
    assert listed == built


def test_oldest_torch_is_that_of_setup():
    (oldest,) = set(CONFIG["torch"]["stable-abi"].values())
    assert f"TORCH = ({oldest.replace('.', ', ')})" in SETUP


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """Built without optimisation, and without CUDA."""
    folder = tmp_path_factory.mktemp("hub") / "build"
    command = [sys.executable, str(HUB / "layout.py"), "cpu", str(folder)]
    environment = os.environ | {"CXXFLAGS": "-O0", "NVCC": "false"}
    subprocess.run(command, env=environment, check=True)
    (variant,) = folder.iterdir()
    return variant


@pytest.fixture(scope="module")
def loaded(variant):
    """The module, under its unique name, beside the installed package."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator, requires_grad=True)
    labels = torch.randint(50, (8,), generator=generator)
    old_log_probs = torch.randn(8, generator=generator) - 4
    return logits, labels, old_log_probs, torch.randn(8, generator=generator)


def check_loss(loss):
    """``loss`` has the value and the gradient of the installed package."""
    expected, got = batch(), batch()
    bapo_kernels.bapo_loss(*expected).loss.backward()
    result = loss(*got)
    result.loss.backward()
    torch.testing.assert_close(got[0].grad, expected[0].grad)


def test_public_names(loaded):
    assert set(loaded.__all__) == {*bapo_kernels.__all__, "layers"}
    for name in loaded.__all__:
        home = getattr(loaded, name).__name__ if name in ("debug", "layers", "reference") else None
        assert (home or getattr(loaded, name).__module__).startswith(f"{loaded.__name__}.")


def test_it_runs_on_its_own_library(loaded, variant):
    """Beside the installed package, whose operators have another namespace."""
    assert loaded.available_backends()["cpu"] is None
    assert (variant / "package" / "_C.abi3.so").exists()
    with torch.profiler.profile() as profile:
        check_loss(loaded.bapo_loss)
    operators = {event.key for event in profile.key_averages()}
    assert f"{loaded.__name__}::row_pass" in operators
    assert "bapo_kernels::row_pass" in operators


def test_imports_are_relative(variant):
    """The installed package is not there for a user of the hub."""
    for path in variant.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not [x for x in lines if re.match(r"\s*(from|import) bapo_kernels\b", x)], path


def test_kernels_reads_the_configuration_and_loads_the_variant(variant):
    kernels = pytest.importorskip("kernels")
    from kernels._rust import Build

    Build.open(HUB)  # raises if build.toml is not valid
    module = kernels.get_local_kernel(variant.parent, backend="cpu")
    assert module.available_backends()["cpu"] is None
    check_loss(module.bapo_loss)


def test_kernels_replaces_the_forward_of_a_loss(variant):
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("BAPOLoss")
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = bapo_kernels.BAPOConfig()

        def forward(self, logits, labels, old_log_probs, advantages, response_mask=None):
            raise AssertionError("the forward of the hub is not in its place")

    module = kernels.get_local_kernel(variant.parent, backend="cpu")
    repository = kernels.LocalLayerRepository(variant.parent, layer_name="BAPOLoss")
    mapping = {"BAPOLoss": {"cpu": repository}}
    with kernels.use_kernel_mapping(mapping):
        loss = kernels.kernelize(Loss(), mode=kernels.Mode.TRAINING, device="cpu")
    loss.config = module.BAPOConfig()
    check_loss(loss)
