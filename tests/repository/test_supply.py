"""Source distribution, builds and wheels: their contents, and what a failed build reports."""

import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import bapo_kernels

ROOT = Path(__file__).parents[2]
SOURCES = "bapo_kernels csrc release tests setup.py pyproject.toml README.md LICENSE MANIFEST.in"
NO_COMPILERS = {"PATH": "", "CUDA_HOME": "none"}
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
    command, env = [sys.executable, *map(str, arguments)], own | NO_COMPILERS | env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def python(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_ext(folder, tree=None, **env):
    """The run, and the report that it leaves in the folder, or beside the sources in a tree."""
    where = "--inplace" if tree else f"--build-lib={folder}"
    options = ["-q", "build_ext", f"--build-temp={folder / 'temp'}", where]
    done = run("setup.py", *options, cwd=tree or ROOT, **env)
    return done, json.loads(((tree or folder) / "bapo_kernels" / "_build.json").read_text())


def unpacked(sdist, folder):
    """The tree of a source distribution, with a library that an earlier build left in place."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "tree", filter="data")
    (tree,) = (folder / "tree").iterdir()
    (tree / "bapo_kernels" / "_C.abi3.so").write_text("old")
    return tree


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built in a tree with the library of an earlier build in place."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in SOURCES.split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
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
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", folder]
    python("-m", "pip", "wheel", *options, unpacked(sdist, folder), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


COMPILER = """#!/bin/sh
line=$(printf '[%s]' "$@"); echo "$line" >> "$0.log"
case "$*" in
  *--dryrun*) echo "#$ TOP=${0%/nvcc}" >&2 ;;
  *--version*) echo "g++ or release 13.0, V13.0.88" ;;
  *) eval "output=\\"\\${$#}\\""; echo "$output:" >"${output%.o}.d"; echo "$output" >"$output" ;;
esac
"""
SCRIPTS = {
    "c++": COMPILER,
    "nvcc": COMPILER,
    "failing/nvcc": COMPILER.replace("eval", "echo 'row_pass.cu(7): error: a ;' >&2; exit 2; eval"),
    "old c++": COMPILER.replace("eval", "echo \"g++: error: no '-std=c++20'\" >&2; exit 1; eval"),
    "killing/c++": COMPILER.replace("eval", "kill -9 $PPID; eval"),
    "home/bin/nvcc": COMPILER,
    "launcher": '#!/bin/sh\nexec "$@"\n',
}
TORCH_FOR_CUDA = """
__version__ = "2.13.0+cu130"
class version: cuda = "13.0"
class cuda: is_available = staticmethod(lambda: False)
"""
TORCH_FOR_CPUS = TORCH_FOR_CUDA.replace("cu130", "cpu").replace('"13.0"', "None")
NO_CXX = "no C++ compiler found: tried g++ and c++, and CXX is not set"
EXTENSION = "def include_paths():\n    return []\n\nlibrary_paths = include_paths\n"
WITH_NVCC = {"NVCC": "'{0}/nvcc'"}


@pytest.fixture
def tools(tmp_path):
    """Scripts that stand in for compilers, and a torch that is quick to import.

    The libraries of CUDA lie as an installer has them, or as a package for several machines has.
    """
    folder = tmp_path / "the tools"
    files = {"torch/utils/cpp_extension.py": EXTENSION, **SCRIPTS}
    places = ("failing/lib64", "home/bin/lib64", "targets/{}/lib")
    machines = ("x86_64-linux", "sbsa-linux")
    files |= {f"{place.format(m)}/libcudart_static.a": "" for place in places for m in machines}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def given(tools, torch=TORCH_FOR_CUDA, **commands):
    """The environment of a build; commands have the folder of the tools as ``{0}``."""
    (tools / "torch" / "__init__.py").write_text(torch)
    commands = {"CXX": "'{0}/c++'"} | commands
    return {"PYTHONPATH": str(tools)} | {k: v.format(tools) for k, v in commands.items()}


def test_sdist_and_wheel_have_all_files(sdist, wheel):
    """Without compilers the wheel is pure Python: the library of an earlier build is not packed."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "bapo_kernels").rglob("*.py")}
    package |= {"bapo_kernels/py.typed", "bapo_kernels/tools/real_rows.pt"}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*")}
    assert {*sources, *package, "setup.py", "pyproject.toml", "LICENSE"} <= names
    assert not names & BUILT
    assert not any(name.startswith("tests/") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert "no C++ compiler found" in archive.read("bapo_kernels/_build.json").decode()
        name = f"bapo_kernels-{bapo_kernels.__version__}.dist-info/METADATA"
        metadata = email.message_from_bytes(archive.read(name))
    assert names == {*package, "bapo_kernels/_build.json"}
    assert wheel.name.endswith("-py3-none-any.whl")
    needs = [line for line in metadata.get_all("Requires-Dist") if ";" not in line]
    oldest = re.search(r"TORCH = \((\d+), (\d+)\)", (ROOT / "setup.py").read_text())
    assert needs == ["torch>={}.{}".format(*oldest.groups())]


USE = """
import runpy, torch, bapo_kernels
logits = torch.zeros(2, 5, requires_grad=True)
out = bapo_kernels.bapo_loss(logits, torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5]))
out.loss.backward()
print(bapo_kernels.__file__, out.loss.item(), logits.grad.isfinite().all().item())
runpy.run_module("bapo_kernels", run_name="__main__")
"""


def test_an_install_without_compilers_works_and_reports_what_is_missing(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = python("-c", USE, cwd=tmp_path)
    missing = f"the native library is absent: {NO_CXX}"
    loss, report = done.stdout.split("\n", maxsplit=1)
    assert loss == f"{tmp_path}/bapo_kernels/__init__.py -0.25 True"
    assert re.search(rf"^backend cpu\s+absent: {re.escape(missing)}$", report, re.MULTILINE)
    assert re.search(r"^backend reference\s+available$", report, re.MULTILINE)
    assert done.stderr.count(f"(cpu: {missing})") == 1
    done = run("-c", "import bapo_kernels", cwd=tmp_path, BAPO_REQUIRE_NATIVE="1")
    assert f"BAPO_REQUIRE_NATIVE is set, and {missing}" in done.stderr


@with_scripts
@pytest.mark.parametrize(
    ("part", "commands", "reason"),
    [
        ("CUDA", {}, "no CUDA compiler found: tried nvcc and none/bin/nvcc, and NVCC is not set"),
        ("CUDA", {"NVCC": "'{0}/failing/nvcc'"}, "nvcc: row_pass.cu(7): error: a ;"),
        ("CUDA", WITH_NVCC | {"TORCH_CUDA_ARCH_LIST": "8"}, "TORCH_CUDA_ARCH_LIST must be "),
        ("NATIVE", {"CXX": ""}, NO_CXX),
        ("NATIVE", {"CXX": "'{0}/old c++'"}, "old c++: g++: error: no '-std=c++20'"),
        ("NATIVE", {"torch": '__version__ = "2.9.1"'}, "torch must be 2.10 or later, got 2.9.1"),
    ],
)
def test_a_build_without_a_part_warns_or_fails(tools, tmp_path, part, commands, reason):
    """A GPU machine must not silently lose its backend."""
    missing = "the CUDA backend" if part == "CUDA" else "the native library"
    for required in ("0", "1"):
        env = given(tools, **{"TORCH_CUDA_ARCH_LIST": "all"} | commands)
        env |= {f"BAPO_REQUIRE_{part}": required}
        done, report = build_ext(tmp_path, **env)
        assert f"WARNING: building without {missing}: " in done.stderr
        assert any(reason in value for value in report.values())
        refusal = f"bapo_kernels: BAPO_REQUIRE_{part} is set, and {reason}"
        assert (refusal in done.stderr) == (done.returncode != 0) == (required == "1"), done.stderr


@with_scripts
def test_compilers_flags_and_gpus_come_from_the_environment(tools, tmp_path):
    done, report = build_ext(
        tmp_path,
        CXXFLAGS="-DNAME='a b' -O2 -std=c++17",
        LDFLAGS="-Wl,-s '-L/a b'",
        TORCH_CUDA_ARCH_LIST="8.6;12.0+PTX",
        **given(tools, CXX="'{0}/launcher' '{0}/c++' -m64", NVCC="'{0}/launcher' '{0}/nvcc' -m64"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    _, *compiled, linked = (tools / "c++.log").read_text().splitlines()
    assert len(compiled) > 5
    for line in compiled:  # flags override preferences, but not what the code needs
        ours = "[-O1]" if "/binding" in line else "[-O3]"
        wanted = "[-m64]", ours, "[-DNAME=a b]", "[-O2]", "[-std=c++17]", "[-std=c++20]"
        places = [line.index(flag) for flag in wanted]
        assert places == sorted(places)
    assert "[-Wl,-s][-L/a b]" in linked
    of_cuda = [line for line in (tools / "nvcc.log").read_text().splitlines() if "[-c]" in line]
    assert len(of_cuda) > 5
    assert all(line.startswith("[-m64]") for line in of_cuda)
    assert not any("90" in line.partition("[-c]")[0] for line in of_cuda)
    assert report["cuda"] == "13.0 for sm_80, sm_120, compute_120"


@with_scripts
def test_cuda_is_not_compiled_for_a_torch_for_cpus(tools, tmp_path):
    """Unless it is required; a reason is no warning, since nothing could run."""
    env = given(tools, TORCH_FOR_CPUS, **WITH_NVCC)
    done, report = build_ext(tmp_path, **env)
    assert done.stderr == ""
    assert "which has no CUDA support (BAPO_REQUIRE_CUDA=1 builds" in report["why no cuda"]
    done, report = build_ext(tmp_path, BAPO_REQUIRE_CUDA="1", **env)
    assert done.returncode == 0
    assert report["cuda"] == "13.0 for sm_80, sm_90, sm_100, sm_120, compute_120"


@with_scripts
def test_where_torch_sees_no_gpu_cuda_is_compiled_on_request(tools, tmp_path):
    """For all GPUs it takes minutes; the reason says how, as pip hides what a build prints."""
    env = given(tools, **WITH_NVCC)
    done, report = build_ext(tmp_path, **env)
    assert report["why no cuda"].startswith("torch saw no GPU, and TORCH_CUDA_ARCH_LIST was not ")
    assert "TORCH_CUDA_ARCH_LIST=all pip install --no-build" in report["why no cuda"]
    assert report["why no cuda"] in done.stderr
    elsewhere = {"NVCC": "", "CUDA_HOME": str(tools / "home"), "TORCH_CUDA_ARCH_LIST": "all"}
    for more in ({"TORCH_CUDA_ARCH_LIST": "all"}, {"BAPO_REQUIRE_CUDA": "1"}, elsewhere):
        done, report = build_ext(tmp_path, **env | more)
        assert report.get("cuda") == "13.0 for sm_80, sm_90, sm_100, sm_120, compute_120"


READ_ONLY = "import os; f = os.access; os.access = lambda path, mode: mode != 2 and f(path, mode)"


@with_scripts
def test_a_second_install_compiles_what_has_changed(sdist, tools, tmp_path):
    """pip's -e has a temporary folder for objects, which serves where the sources are read-only."""
    tree, log = unpacked(sdist, tmp_path), tools / "c++.log"
    install = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"

    def compiled(first=""):
        log.write_text("")
        python("-c", f"{first}\n{install}", cwd=tree, **given(tools))
        return log.read_text().count("[-c]")

    assert compiled(READ_ONLY) == (every := compiled())
    (tools / "c++").write_text(COMPILER.replace("g++", "a later g++"))
    assert [compiled(), compiled()] == [every, 0]


@with_scripts
def test_an_interrupted_build_leaves_the_earlier_library_a_failed_one_a_reason(
    sdist, tools, tmp_path
):
    tree = unpacked(sdist, tmp_path)
    library = tree / "bapo_kernels" / "_C.abi3.so"
    library.with_name("_build.json").write_text('{"built": "earlier"}')
    done, report = build_ext(tmp_path, tree, **given(tools, CXX="'{0}/killing/c++'"))
    assert (done.returncode, report) == (-signal.SIGKILL, {"built": "earlier"})
    assert library.read_text() == "old"
    done, report = build_ext(tmp_path, tree, BAPO_REQUIRE_CUDA="1", **given(tools))
    assert done.returncode != 0
    assert not library.exists()
    assert report["native"].startswith("BAPO_REQUIRE_CUDA is set, and no CUDA compiler found")
