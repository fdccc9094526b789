"""Source distribution and wheel: what is in them, and what an install without compilers does."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = ["bapo_kernels", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
SOURCES += ["MANIFEST.in", "tests"]
BUILT = {"bapo_kernels/_C.abi3.so", "bapo_kernels/_build.json"}

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in the repository"),
    pytest.mark.xdist_group("supply"),  # they share what is built once
]


def python(*arguments, cwd, path=""):
    """Runs this interpreter; with the default ``path`` it finds no compiler."""
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "NVCC", "PYTHONPATH")}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=env | {"PATH": str(path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built where a library of an earlier build lies in place."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "_C.abi3.so", "_build.json")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    for name in BUILT:
        (tree / name).write_text("{}")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    python("-c", code, cwd=tree)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the source distribution, without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q"]
    python("-m", "pip", "wheel", *options, "-w", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_sdist_has_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*")}
    sources |= {str(p.relative_to(ROOT)) for p in (ROOT / "bapo_kernels").rglob("*.py")}
    assert len(sources) > 50
    assert {*sources, "setup.py", "pyproject.toml", "LICENSE", "bapo_kernels/py.typed"} <= names
    assert not names & BUILT
    assert not any(name.startswith("tests/") for name in names)


def test_a_wheel_without_compilers_is_pure_python(wheel):
    """A library of an earlier build is never packed in place of the one that failed."""
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        reason = archive.read("bapo_kernels/_build.json").decode()
    assert "no C++ compiler found" in reason
    assert "bapo_kernels/_C.abi3.so" not in names
    packed = {n for n in names if n.startswith("bapo_kernels/") and n.endswith(".py")}
    assert packed == {str(p.relative_to(ROOT)) for p in (ROOT / "bapo_kernels").rglob("*.py")}
    assert not any(name.startswith(("tests/", "csrc/", "benchmarks/")) for name in names)


LOSS = """
import torch, bapo_kernels
assert bapo_kernels.__file__.startswith({site!r}), bapo_kernels.__file__
logits = torch.zeros(2, 5, requires_grad=True)
out = bapo_kernels.bapo_loss(logits, torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5]))
out.loss.backward()
print(out.loss.item(), logits.grad.isfinite().all().item())
"""


def test_an_install_without_compilers_computes_and_says_what_is_missing(wheel, tmp_path):
    options = ["--no-deps", "--no-index", "-q", "--target", tmp_path]
    python("-m", "pip", "install", *options, wheel, cwd=tmp_path)
    assert python("-c", LOSS.format(site=str(tmp_path)), cwd=tmp_path) == "-0.25 True\n"
    report = python("-m", "bapo_kernels", cwd=tmp_path)
    missing = "the native library is absent: no C++ compiler found (g++ or c++ on the path, or CXX)"
    assert re.search(rf"^backend cpu\s+absent: {re.escape(missing)}$", report, re.MULTILINE)
    assert re.search(r"^backend reference\s+available$", report, re.MULTILINE)


def test_older_versions_of_torch_are_refused(wheel):
    """The oldest torch of the metadata is the one whose ABI the library is built for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    (torch,) = [r for r in needs if r.name == "torch" and r.marker is None]
    setup = (ROOT / "setup.py").read_text()
    target = re.search(r'TORCH_TARGET = "0x([0-9a-f]{2})([0-9a-f]{2})', setup)
    major, minor = (int(part, 16) for part in target.groups())
    assert torch.specifier.contains(f"{major}.{minor}.0")
    assert not torch.specifier.contains(f"{major}.{minor - 1}.1")
    assert torch.specifier.contains(importlib.metadata.version("torch"))


COMPILER = """#!/bin/sh
case "$*" in *--version*) echo g++ 12 ;; *) eval ": >\\"\\${$#}\\"" ;; esac
"""
FAILING_NVCC = """#!/bin/sh
case "$*" in
  *--dryrun*) echo "#$ TOP={root}" >&2 ;;
  *--version*) echo "release 13.0, V13.0.88" ;;
  *) echo "row_pass.cu(7): error: expected a ;" >&2; exit 2 ;;
esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="scripts in the place of compilers")
@pytest.mark.parametrize("nvcc", [True, False], ids=["nvcc fails", "no nvcc"])
@pytest.mark.parametrize("required", [False, True])
def test_a_build_without_cuda_is_loud(tmp_path, nvcc, required):
    """A machine with a GPU must not go on without its backend because a build said nothing."""
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    for name, text in (("c++", COMPILER), ("nvcc", FAILING_NVCC.format(root=tmp_path))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "NVCC", "BAPO_REQUIRE_CUDA")}
    env |= {"PATH": "", "CXX": str(tmp_path / "c++")}  # an nvcc of this machine is not found
    env |= {"NVCC": str(tmp_path / "nvcc")} if nvcc else {}
    env |= {"BAPO_REQUIRE_CUDA": "1"} if required else {}
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path}"]
    command += [f"--build-temp={tmp_path / 'temp'}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    reason = "nvcc: row_pass.cu(7): error: expected a ;" if nvcc else "no CUDA compiler found"
    if required:
        assert done.returncode != 0
        assert f"BAPO_REQUIRE_CUDA is set, and {reason}" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert ("WARNING: nvcc failed" in done.stderr) == nvcc, done.stderr
    assert reason in (tmp_path / "bapo_kernels" / "_build.json").read_text()
