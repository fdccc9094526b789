"""The build variant for the kernels hub: its sources, its names, and loading it as the hub does."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import EPS, assert_within_budget

import bapo_kernels
from bapo_kernels.tools.budget import Case, evaluate, in_some_orders, largest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
HUB = ROOT / "release" / "hub"

pytestmark = [
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the commit"),
    pytest.mark.xdist_group("hub"),  # one worker builds the library
]


def test_its_configuration_is_that_of_setup():
    """Every source is listed once, with the same GPUs, and the oldest torch is the same."""
    config, setup = tomllib.loads((HUB / "build.toml").read_text()), (ROOT / "setup.py").read_text()
    kernels = config["kernel"].values()
    listed = [name for part in (config["torch"], *kernels) for name in part["src"]]
    written = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")]
    assert sorted(listed) == sorted(written)
    lists = re.findall(r'^    "(\w+)": \(([\d", ]+)\),$', setup, re.MULTILINE)
    built = {name: [f"{a[:-1]}.{a[-1]}" for a in re.findall(r"\d+", x)] for name, x in lists}
    capabilities = {
        Path(source).stem: kernel["cuda-capabilities"]
        for kernel in kernels
        for source in kernel["src"]
        if source.endswith(".cu")
    }
    assert capabilities == built
    (oldest,) = set(config["torch"]["stable-abi"].values())
    assert f"TORCH = ({oldest.replace('.', ', ')})" in setup


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """Built without optimisation, and without CUDA."""
    folder = tmp_path_factory.mktemp("hub") / "build"
    command = [sys.executable, str(HUB / "layout.py"), "cpu", str(folder)]
    environment = os.environ | {"CXXFLAGS": "-O0", "NVCC": "false"}
    subprocess.run(command, env=environment, check=True)
    (variant,) = folder.iterdir()
    return variant


def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator, requires_grad=True)
    labels = torch.randint(50, (8,), generator=generator)
    old_log_probs = torch.randn(8, generator=generator) - 4
    return logits, labels, old_log_probs, torch.randn(8, generator=generator)


def check_loss(loss):
    """``loss`` has the gradient of the reference, as the installed package does."""
    logits, *others = batch()
    run = partial(
        evaluate, bapo_kernels.reference.bapo_loss, Case(logits, *others, None), (logits,)
    )
    same, truth = [result.gradient for result in in_some_orders(run)], run(torch.float64)
    size = largest(truth.output.log_probs) * largest(truth.gradient)  # by the ratio
    for function in (loss, bapo_kernels.bapo_loss):
        function(*(got := batch())).loss.backward()
        inherited = EPS[torch.float32] * size
        assert_within_budget("gradient", got[0].grad, same, truth.gradient, inherited=inherited)


def test_it_runs_on_its_own_library(variant):
    """Under its unique name, beside the installed package, whose operators are others."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert set(loaded.__all__) == {*bapo_kernels.__all__, "layers"}
    for public in loaded.__all__:
        value = getattr(loaded, public)
        home = value.__name__ if public in ("debug", "layers", "reference") else value.__module__
        assert home.startswith(f"{name}.")
    for path in variant.rglob("*.py"):  # the installed package is not there for a user of the hub
        assert not re.search(r"^\s*(from|import) bapo_kernels\b", path.read_text(), re.M), path
    assert loaded.available_backends()["cpu"] is None
    assert (variant / "package" / "_C.abi3.so").exists()
    with torch.profiler.profile() as profile:
        check_loss(loaded.bapo_loss)
    operators = {event.key for event in profile.key_averages()}
    assert {f"{name}::row_pass", "bapo_kernels::row_pass"} <= operators


def test_kernels_loads_it_and_replaces_the_forward_of_a_loss(variant):
    kernels = pytest.importorskip("kernels")
    from kernels._rust import Build

    Build.open(HUB)  # raises if build.toml is not valid
    module = kernels.get_local_kernel(variant.parent, backend="cpu")
    assert module.available_backends()["cpu"] is None
    check_loss(module.bapo_loss)

    @kernels.use_kernel_forward_from_hub("BAPOLoss")
    class Loss(torch.nn.Module):
        config = bapo_kernels.BAPOConfig()

        def forward(self, logits, labels, old_log_probs, advantages, response_mask=None):
            raise AssertionError("the forward of the hub is not in its place")

    repository = kernels.LocalLayerRepository(variant, layer_name="BAPOLoss")
    with kernels.use_kernel_mapping({"BAPOLoss": {"cpu": repository}}):
        loss = kernels.kernelize(Loss(), mode=kernels.Mode.TRAINING, device="cpu")
    loss.config = module.BAPOConfig()
    check_loss(loss)
