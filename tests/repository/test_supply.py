"""Source distribution, builds and wheels: their contents, and what a failed build reports."""

import email
import importlib.metadata
import json
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

import bapo_kernels

ROOT = Path(__file__).parents[2]
SOURCES = ["bapo_kernels", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
SOURCES += ["MANIFEST.in", "release", "tests"]
BUILT = {"bapo_kernels/_C.abi3.so", "bapo_kernels/_build.json"}

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in the repository"),
    pytest.mark.xdist_group("supply"),  # the tests share what is built once
]
with_scripts = pytest.mark.skipif(sys.platform != "linux", reason="uses shell scripts as compilers")


def run(*arguments, cwd, **env):
    """Runs this interpreter, by default without any compiler on the path."""
    given = ("CXX", "CXXFLAGS", "LDFLAGS", "NVCC", "PYTHONPATH", "TORCH_CUDA_ARCH_LIST")
    own = {k: v for k, v in os.environ.items() if k not in given and not k.startswith("BAPO_")}
    command = [sys.executable, *map(str, arguments)]
    env = own | {"PATH": ""} | env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def python(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_ext(folder, *options, **env):
    options = options or (f"--build-lib={folder}",)
    command = ["setup.py", "-q", "build_ext", f"--build-temp={folder / 'temp'}", *options]
    return run(*command, **{"cwd": ROOT} | env)


def unpacked(sdist, folder):
    """The tree of a source distribution, with a library that an earlier build left in place."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    (tree / "bapo_kernels" / "_C.abi3.so").write_text("old")
    return tree


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built in a tree with the library of an earlier build in place."""
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
    """Built by pip from the source distribution, without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = unpacked(sdist, folder)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q"]
    python("-m", "pip", "wheel", *options, "-w", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


COMPILER = """#!/bin/sh
line=$(printf '[%s]' "$@"); echo "$line" >> "$0.log"
case "$*" in *--version*) echo g++ 12 ;; *) eval ": >\\"\\${$#}\\"" ;; esac
"""
OLD_COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo g++ 9 ;;
  *) echo "g++: error: no option '-std=c++20'" >&2; exit 1 ;;
esac
"""
LAUNCHER = """#!/bin/sh
exec "$@"
"""
NVCC = """#!/bin/sh
line=$(printf '[%s]' "$@"); echo "$line" >> "$0.log"
case "$*" in
  *--dryrun*) echo "#$ TOP=${0%/nvcc}" >&2 ;;
  *--version*) echo "release 13.0, V13.0.88" ;;
  *) eval ": >\\"\\${$#}\\"" ;;
esac
"""
FAILING_NVCC = NVCC.replace("eval", "echo 'row_pass.cu(7): error: expected a ;' >&2; exit 2; eval")


TORCH_FOR_CUDA = """
__version__ = "2.13.0+cu130"
class version: cuda = "13.0"
class cuda: is_available = staticmethod(lambda: False)
"""
TORCH_FOR_CPUS = """
__version__ = "2.13.0+cpu"
class version: cuda = None
"""


@pytest.fixture
def tools(tmp_path):
    """Scripts that stand in for compilers, and a torch that is quick to import."""
    folder = tmp_path / "the tools"
    scripts = {"c++": COMPILER, "old c++": OLD_COMPILER, "launcher": LAUNCHER, "nvcc": NVCC}
    for name, text in (scripts | {"failing/nvcc": FAILING_NVCC}).items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for toolkit in (folder, folder / "failing"):
        (toolkit / "lib64").mkdir()
        (toolkit / "lib64" / "libcudart_static.a").touch()
    write_torch(folder, TORCH_FOR_CUDA)
    return folder


def write_torch(folder, text):
    (folder / "torch" / "utils").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(text)
    paths = "def include_paths():\n    return []\n\nlibrary_paths = include_paths\n"
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(paths)


def test_the_sdist_has_all_files_of_a_build(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*")}
    sources |= {str(p.relative_to(ROOT)) for p in (ROOT / "bapo_kernels").rglob("*.py")}
    assert len(sources) > 50
    assert {*sources, "setup.py", "pyproject.toml", "LICENSE", "bapo_kernels/py.typed"} <= names
    assert not names & BUILT
    assert not any(name.startswith("tests/") for name in names)


def test_a_wheel_without_compilers_is_pure_python(wheel):
    """The library of an earlier build is never packed when the build fails."""
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        reason = archive.read("bapo_kernels/_build.json").decode()
    assert tag(wheel) == ("true", "py3-none-any")
    assert "no C++ compiler found" in reason
    assert "bapo_kernels/_C.abi3.so" not in names
    packed = {n for n in names if n.startswith("bapo_kernels/") and n.endswith(".py")}
    assert packed == {str(p.relative_to(ROOT)) for p in (ROOT / "bapo_kernels").rglob("*.py")}
    assert not any(name.startswith(("tests/", "csrc/", "benchmarks/")) for name in names)


@with_scripts
def test_a_wheel_with_the_library_has_a_platform_tag(sdist, tools, tmp_path):
    (tmp_path / "tree").mkdir()
    tree = unpacked(sdist, tmp_path / "tree")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    python("-c", code, cwd=tree, CXX=f"'{tools / 'c++'}'", PYTHONPATH=str(tools))
    (wheel,) = tmp_path.glob("*.whl")
    pure, platform = tag(wheel)
    assert pure == "false"
    assert platform.startswith("cp310-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("bapo_kernels/_C.abi3.so") == b""
    links = [line for line in (tools / "c++.log").read_text().splitlines() if "[-shared]" in line]
    assert len(links) == 1, "the library is built once"


def tag(wheel):
    """(Root-Is-Purelib, Tag)."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/WHEEL")]
        fields = email.message_from_bytes(archive.read(name))
    return fields["Root-Is-Purelib"], fields["Tag"]


USE = """
import os, runpy, sys, torch
os.environ["BAPO_REQUIRE_NATIVE"] = "1"
try:
    import bapo_kernels
except ImportError as error:
    print(error)
os.environ["BAPO_REQUIRE_NATIVE"] = "0"
import bapo_kernels
assert bapo_kernels.__file__.startswith({site!r}), bapo_kernels.__file__
logits = torch.zeros(2, 5, requires_grad=True)
for _ in range(2):
    out = bapo_kernels.bapo_loss(logits, torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5]))
out.loss.backward()
print(out.loss.item(), logits.grad.isfinite().all().item())
runpy.run_module("bapo_kernels", run_name="__main__")
"""


def test_an_install_without_compilers_works_and_reports_what_is_missing(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = python("-c", USE.format(site=str(tmp_path)), cwd=tmp_path)
    missing = "the native library is absent: no C++ compiler found (g++ or c++ on the path, or CXX)"
    refusal, loss, report = done.stdout.split("\n", maxsplit=2)
    assert refusal == f"BAPO_REQUIRE_NATIVE is set, and {missing}"
    assert loss == "-0.25 True"
    assert re.search(rf"^backend cpu\s+absent: {re.escape(missing)}$", report, re.MULTILINE)
    assert re.search(r"^backend reference\s+available$", report, re.MULTILINE)
    assert done.stderr.count("UserWarning: ") == done.stderr.count(f"(cpu: {missing})") == 1


def metadata(wheel):
    """The fields of METADATA, and the requirements without an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(name))
    needs = [Requirement(line) for line in fields.get_all("Requires-Dist")]
    return fields, [need for need in needs if need.marker is None]


def test_the_version_is_that_of_the_package(wheel):
    assert metadata(wheel)[0]["Version"] == bapo_kernels.__version__


def test_the_core_depends_on_torch_alone(wheel):
    assert [need.name for need in metadata(wheel)[1]] == ["torch"]


def test_older_versions_of_torch_are_refused(wheel):
    """The oldest torch of the metadata is the one whose ABI the library is built for."""
    (torch,) = metadata(wheel)[1]
    setup = (ROOT / "setup.py").read_text()
    major, minor = map(int, re.search(r"TORCH = \((\d+), (\d+)\)", setup).groups())
    assert torch.specifier.contains(f"{major}.{minor}.0")
    assert not torch.specifier.contains(f"{major}.{minor - 1}.1")
    assert torch.specifier.contains(importlib.metadata.version("torch"))


@with_scripts
@pytest.mark.parametrize(
    ("nvcc", "listed", "reason"),
    [
        (None, "", "no CUDA compiler found (nvcc on the path, or NVCC)"),
        ("failing/nvcc", "", "nvcc: row_pass.cu(7): error: expected a ;"),
        ("old c++", "", "NVCC must be nvcc or call it, got "),
        (
            "nvcc",
            "Hopper",
            "TORCH_CUDA_ARCH_LIST must be numbers such as 8.0;9.0+PTX, or all, got ",
        ),
    ],
)
@pytest.mark.parametrize("required", ["0", "1"])
def test_a_build_without_cuda_warns_or_fails(tools, tmp_path, nvcc, listed, reason, required):
    """A GPU machine must not silently lose its backend."""
    env = {"CXX": f"'{tools / 'c++'}'", "PYTHONPATH": str(tools), "BAPO_REQUIRE_CUDA": required}
    env |= {"NVCC": f"'{tools / nvcc}'"} if nvcc else {}
    env["TORCH_CUDA_ARCH_LIST"] = listed
    done = build_ext(tmp_path, **env)
    assert "WARNING: building without the CUDA backend: " in done.stderr
    assert (done.returncode != 0) == (required == "1"), done.stderr
    assert (f"BAPO_REQUIRE_CUDA is set, and {reason}" in done.stderr) == (required == "1")
    assert reason in (tmp_path / "bapo_kernels" / "_build.json").read_text()


@with_scripts
@pytest.mark.parametrize(
    ("cxx", "torch", "reason"),
    [
        (None, None, "no C++ compiler found (g++ or c++ on the path, or CXX)"),
        ("absent -m64", None, "CXX must name a program that can run, got 'absent'"),
        ("old c++", None, "old c++: g++: error: no option '-std=c++20'"),
        ("c++", '__version__ = "2.9.1"', "torch must be 2.10 or later, got 2.9.1"),
        ("c++", "raise ModuleNotFoundError(name='torch')", "the build found no torch"),
    ],
    ids=["no compiler", "CXX does not exist", "an old compiler", "an old torch", "no torch"],
)
def test_a_required_library_that_cannot_be_built_fails_the_build(
    tools, tmp_path, cxx, torch, reason
):
    if torch is not None:
        write_torch(tools, torch)
    env = {"PYTHONPATH": str(tools), "BAPO_REQUIRE_NATIVE": "1"}
    if cxx is not None:
        env["CXX"] = f"'{tools / cxx}'" if (tools / cxx).exists() else cxx
    done = build_ext(tmp_path, **env)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(
        f"bapo_kernels: BAPO_REQUIRE_NATIVE is set, and {reason}"
    )


@with_scripts
def test_compilers_and_flags_come_from_the_environment(tools, tmp_path):
    done = build_ext(
        tmp_path,
        PYTHONPATH=str(tools),
        CXX=f"'{tools / 'launcher'}' '{tools / 'c++'}' -m64",
        CXXFLAGS="-DNAME='a b' -O2 -std=c++17",
        LDFLAGS="-Wl,-s '-L/a b'",
        NVCC=f"'{tools / 'launcher'}' '{tools / 'nvcc'}' -m64",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    version, *compiled, linked = (tools / "c++.log").read_text().splitlines()
    assert version == "[-m64][--version]"
    assert len(compiled) > 5
    for line in compiled:  # flags override preferences, but not what the code needs
        ours = "[-O1]" if "/binding" in line else "[-O3]"
        wanted = "[-m64]", ours, "[-DNAME=a b]", "[-O2]", "[-std=c++17]", "[-std=c++20]"
        places = [line.index(flag) for flag in wanted]
        assert places == sorted(places)
    assert "[-Wl,-s][-L/a b]" in linked
    assert all(line.startswith("[-m64]") for line in (tools / "nvcc.log").read_text().splitlines())
    report = json.loads((tmp_path / "bapo_kernels" / "_build.json").read_text())
    assert report["cuda"] == "13.0 for sm_80, sm_90, sm_100, sm_120, compute_120"


@with_scripts
def test_cuda_is_not_compiled_for_a_torch_for_cpus(tools, tmp_path):
    """Unless it is required; a reason is no warning, since nothing could run."""
    write_torch(tools, TORCH_FOR_CPUS)
    env = {"CXX": f"'{tools / 'c++'}'", "PYTHONPATH": str(tools), "NVCC": f"'{tools / 'nvcc'}'"}
    report = tmp_path / "bapo_kernels" / "_build.json"
    assert build_ext(tmp_path, **env).stderr == ""
    assert not (tools / "nvcc.log").exists()
    assert json.loads(report.read_text())["why no cuda"] == (
        "torch was 2.13.0+cpu, which has no CUDA support (BAPO_REQUIRE_CUDA=1 builds it anyway)"
    )
    assert build_ext(tmp_path, BAPO_REQUIRE_CUDA="1", **env).returncode == 0
    assert json.loads(report.read_text())["cuda"].startswith("13.0 for sm_80, sm_90, ")


@with_scripts
def test_cuda_is_compiled_for_the_listed_gpus(tools, tmp_path):
    env = {"CXX": f"'{tools / 'c++'}'", "PYTHONPATH": str(tools), "NVCC": f"'{tools / 'nvcc'}'"}
    assert build_ext(tmp_path, TORCH_CUDA_ARCH_LIST="8.6;12.0+PTX", **env).returncode == 0
    report = json.loads((tmp_path / "bapo_kernels" / "_build.json").read_text())
    assert report["cuda"] == "13.0 for sm_80, sm_120, compute_120"
    codes = [line for line in (tools / "nvcc.log").read_text().splitlines() if "[-c]" in line]
    assert len(codes) > 5
    assert not any("90" in line.partition("[-c]")[0] for line in codes)


@with_scripts
@pytest.mark.parametrize("place", [".", "build/lib"])
def test_a_failed_build_removes_the_library_of_an_earlier_build(sdist, tools, tmp_path, place):
    (tmp_path / "tree").mkdir()
    tree = unpacked(sdist, tmp_path / "tree")
    library = tree / place / "bapo_kernels" / "_C.abi3.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_text("old")
    where = "--inplace" if place == "." else f"--build-lib={place}"
    env = {"CXX": f"'{tools / 'c++'}'", "PYTHONPATH": str(tools), "BAPO_REQUIRE_CUDA": "1"}
    assert build_ext(tmp_path, where, cwd=tree, **env).returncode != 0
    assert not library.exists()
    report = json.loads((library.parent / "_build.json").read_text())
    assert report["native"].startswith("BAPO_REQUIRE_CUDA is set, and no CUDA compiler found")


SETUPTOOLS = """
__version__ = "76.1.0"
Distribution = Extension = object
def setup(**options): raise ValueError("a page about project.license")
"""


def test_an_old_setuptools_is_refused_with_a_remedy(tmp_path):
    """Under --no-build-isolation pip does not check the build requirements of pyproject.toml."""
    commands = tmp_path / "setuptools" / "command"
    commands.mkdir(parents=True)
    (commands.parent / "__init__.py").write_text(SETUPTOOLS)
    for name in ("build_ext", "bdist_wheel"):
        (commands / f"{name}.py").write_text(f"{name} = object")
    done = run("setup.py", "build_ext", cwd=ROOT, PYTHONPATH=str(tmp_path))
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'^requires = \["setuptools>=(.*?)"\]', project, re.MULTILINE)
    assert done.returncode != 0
    assert done.stderr == (
        f"bapo_kernels: setuptools must be {oldest} or later to build, got 76.1.0: "
        "pip install -U setuptools\n"
    )
