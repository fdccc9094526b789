"""What the CUDA kernels are compiled for: the list of the environment, the GPUs here, or all."""

import os
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_driver import build as driver

ROOT = Path(__file__).parents[2]
ALL = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_120"]

setuptools = pytest.importorskip("setuptools")
pytestmark = pytest.mark.skipif(not (ROOT / "release").exists(), reason="not in the repository")


@pytest.fixture
def setup(monkeypatch):
    """The functions of setup.py, on a torch for CUDA that sees no GPU."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    see_gpus(monkeypatch)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


def see_gpus(monkeypatch, *capabilities, cuda="13.0"):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])


def targets(setup):
    return setup.cuda_targets(setup.cuda_architectures())


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("8.0", ["sm_80"]),
        ("9.0", ["sm_90"]),
        ("8.6;12.0+PTX", ["sm_80", "sm_120", "compute_120"]),
        ("8.6 8.9; 8.7", ["sm_80"]),  # a generation is one binary; torch takes spaces too
        ("10.3", ["sm_100"]),
        ("12.1", ["sm_120"]),
        ("11.0", ["compute_100"]),  # no binary of its generation
        ("13.0+PTX", ["compute_120"]),
        ("8.0;11.0", ["sm_80", "compute_100"]),
        ("9.0a;10.0f+PTX", ["sm_90", "sm_100", "compute_100"]),
        ("5.0 7.5 8.0+PTX", ["sm_80", "compute_80"]),  # those before 8.0 are left out
        ("12.0;8.0;9.0+PTX;8.0+PTX", ["sm_80", "sm_90", "sm_120", "compute_80", "compute_90"]),
        ("all", ALL),
        ("native", ALL),  # no GPU is visible
        (" ", ALL),
    ],
)
def test_the_list_of_the_environment(setup, monkeypatch, listed, expected):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert targets(setup) == expected


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            "Hopper",
            r"TORCH_CUDA_ARCH_LIST must be numbers such as 8.0;9.0\+PTX, or all, got 'Hopper'",
        ),
        ("9.0;sm_80", "TORCH_CUDA_ARCH_LIST must be .*, got 'sm_80'"),
        ("9.0,8.0", "TORCH_CUDA_ARCH_LIST must be .*, got '9.0,8.0'"),
        ("90", "TORCH_CUDA_ARCH_LIST must be .*, got '90'"),
        ("7.0;7.5+PTX", r"a GPU must have compute capability 8.0 or later, got 7.0, 7.5\+PTX"),
    ],
)
def test_a_wrong_list_is_refused(setup, monkeypatch, listed, message):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(setup.BUILD_ERRORS, match=f"^{message}$"):
        targets(setup)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([(9, 0), (9, 0)], ["sm_90"]),
        ([(8, 9), (12, 0)], ["sm_80", "sm_120"]),
        ([(11, 0)], ["compute_100"]),
        ([(7, 5), (8, 0)], ["sm_80"]),
        ([], ALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("listed", [None, "", "native"])
def test_the_gpus_that_are_present(setup, monkeypatch, gpus, expected, listed):
    see_gpus(monkeypatch, *gpus)
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert targets(setup) == expected


def test_gpus_that_are_too_old(setup, monkeypatch):
    see_gpus(monkeypatch, (7, 5))
    message = "^a GPU must have compute capability 8.0 or later, got 7.5$"
    with pytest.raises(setup.BUILD_ERRORS, match=message):
        targets(setup)


def test_the_list_wins_over_the_gpus(setup, monkeypatch):
    see_gpus(monkeypatch, (9, 0))
    for listed, expected in {"8.0;12.0": ["sm_80", "sm_120"], "all": ALL}.items():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert targets(setup) == expected


def test_gpus_of_amd_are_not_asked(setup, monkeypatch):
    """A torch for ROCm reports them as CUDA devices."""
    see_gpus(monkeypatch, (9, 4), cuda=None)
    assert targets(setup) == ALL


@pytest.mark.parametrize(
    ("listed", "codes"),
    [
        ("all", ["sm_90", "sm_100", "sm_120", "compute_120"]),
        ("8.0;9.0", ["sm_90"]),
        ("8.0", ["sm_80"]),  # without code there is nothing to link
        ("8.0+PTX", ["compute_80"]),
    ],
)
def test_kernels_with_clusters_are_compiled_where_they_run(setup, monkeypatch, listed, codes):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    clusters, *others = setup.cuda_units(targets(setup))
    assert clusters.name == "cuda_row_pass_cluster"
    assert [flag.rpartition("=")[2] for flag in clusters.flags] == codes
    assert all(len(unit.flags) == len(targets(setup)) for unit in others)
    for unit in (clusters, *others):
        for flag in unit.flags:
            architecture, code = flag.removeprefix("-gencode=arch=").split(",code=")
            assert architecture.split("_")[1] == code.split("_")[1]


NVCC = """#!/bin/sh
case "$*" in
  *--dryrun*) echo "#$ TOP=${0%/*}" >&2 ;;
  *) echo "release 13.0, V13.0.88" ;;
esac
"""


@pytest.mark.parametrize(
    ("machine", "target"), [("x86_64", "x86_64-linux"), ("aarch64", "sbsa-linux")]
)
def test_the_toolkit_of_a_package_is_found(monkeypatch, tmp_path, machine, target):
    """Without the folder lib64 of an installer, and with the libraries of other machines."""
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    for folder in ("x86_64-linux", "sbsa-linux"):
        (tmp_path / "targets" / folder / "lib").mkdir(parents=True)
        (tmp_path / "targets" / folder / "lib" / "libcudart_static.a").touch()
    monkeypatch.setenv("NVCC", shlex.quote(str(tmp_path / "nvcc")))
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    toolkit = runpy.run_path(str(ROOT / "setup.py"))["CudaToolkit"].find()
    assert toolkit.libraries == tmp_path / "targets" / target / "lib"


@pytest.mark.parametrize(
    ("gpu", "codes"),
    [
        ((8, 0), ["sm_80"]),
        ((8, 9), ["sm_80"]),
        ((9, 0), ["sm_90"]),
        ((10, 0), ["sm_100"]),
        ((10, 3), ["sm_100"]),
        ((12, 0), ["sm_120"]),
        (None, ALL),  # to be taken to any GPU
    ],
)
def test_the_driver_is_for_the_same_gpus(monkeypatch, tmp_path, gpu, codes):
    commands = []
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    see_gpus(monkeypatch, *[gpu] if gpu else [])
    monkeypatch.setattr(driver.subprocess, "run", lambda command, **_: commands.append(command))
    driver.build(tmp_path)
    of_kernels = [command for command in commands if any(".cu" in word for word in command)]
    assert len(of_kernels) == len(driver.KERNELS) + 1  # and the one with traps
    for command in of_kernels:
        has = [word.rpartition("=")[2] for word in command if "-gencode" in word]
        clusters = "row_pass_cluster" in " ".join(command) and len(codes) > 1
        assert has == (codes[1:] if clusters else codes)


def test_the_compiler_of_the_driver_may_be_of_several_words(monkeypatch):
    monkeypatch.setenv("NVCC", "ccache '/a b/nvcc'")
    assert runpy.run_path(driver.__file__)["NVCC"] == ["ccache", "/a b/nvcc"]


class BuildError(Exception):
    """Raised in place of a build, with its list of architectures."""


@pytest.fixture
def no_build(monkeypatch):
    def run(command, *, env=None, **options):
        raise BuildError((env or os.environ)["TORCH_CUDA_ARCH_LIST"])

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(os, "environ", os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0"})


@pytest.mark.usefixtures("no_build")
@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is built on Linux")
def test_the_wheel_is_for_all(monkeypatch, tmp_path):
    """Whatever the machine that builds it has."""
    pytest.importorskip("cyclonedx", reason="needs requirements/all.txt")
    from release import wheel

    monkeypatch.setattr(wheel, "BUILD", tmp_path / "wheel")
    for name, value in {"nvcc": "nvcc", "link_flags": [], "run": "0"}.items():
        monkeypatch.setattr(wheel, name, lambda *command, value=value, **options: value)
    monkeypatch.setattr(wheel.platform, "machine", lambda: wheel.MACHINE)
    with pytest.raises(BuildError, match="^all$"):
        wheel.main()
    tomllib = pytest.importorskip("tomllib")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["cibuildwheel"]["environment"]["TORCH_CUDA_ARCH_LIST"] == "all"


@pytest.mark.usefixtures("no_build")
def test_the_variant_of_the_hub_is_for_all(tmp_path):
    layout = runpy.run_path(str(ROOT / "release" / "hub" / "layout.py"))
    with pytest.raises(BuildError, match="^all$"):
        layout["build_library"](tmp_path, "cuda", "name")
