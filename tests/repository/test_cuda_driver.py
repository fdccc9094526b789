"""The driver of tests/cuda_driver: tested on the CPU, compiled for GPUs, run where there is one."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_driver.build import KERNELS, NVCC, ROOT, SOURCES, build, nvcc_flags

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="its fibers need Linux"),
    pytest.mark.xdist_group("cuda driver"),  # one worker builds it
]
needs_nvcc = pytest.mark.skipif(shutil.which(NVCC[0]) is None, reason="needs nvcc")
# Changes to row_pass_cluster.cu, a case that must fail with each, and a part of its message.
BREAKS = [
    (
        "each = gradient_of<kSoftcap, kBonus>",
        "each = (kAligned ? -1 : 1) * gradient_of<kSoftcap, kBonus>",
        "bf16 V=9192 rows=20 cluster=1 aligned in place",
        "first wrong: gradient: row 0 element ",
    ),
    (
        "values, row.tail())",
        "values, row.tail() + 1)",
        "fp16 V=74733 rows=9 cluster=16 unaligned out of place",
        " were written; ",
    ),
]


def compile_object(source, target):
    """For the CPU instead of a GPU."""
    include = [f"-I{ROOT / folder}" for folder in ("tests/cuda_on_host", "csrc", "csrc/cuda")]
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", *include]
    subprocess.run(["g++", *flags, "-x", "c++", "-c", source, "-o", target], check=True)
    return target


def link(objects, target):
    subprocess.run(["g++", *objects, "-pthread", "-o", target], check=True)
    return target


def run(driver, *arguments):
    return subprocess.run([driver, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The driver and its object files."""
    folder = tmp_path_factory.mktemp("cuda_driver")
    sources = [*SOURCES, *(ROOT / f"csrc/cuda/{name}.cu" for name in KERNELS)]
    targets = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        link(list(pool.map(compile_object, sources, targets)), folder / "driver")
    return folder


def test_on_the_host(folder):
    """Clusters of every size and the generic kernel, all dtypes, at addresses of all kinds."""
    listed = run(folder / "driver", "--quick", "--list").stdout.splitlines()
    done = run(folder / "driver", "--quick")
    assert done.returncode == 0, done.stdout
    _, *lines, last = done.stdout.splitlines()
    assert [line.split("ms  ")[1] for line in lines] == listed
    assert all(line.startswith("ok ") for line in lines)
    assert last == f"0 of {len(listed)} cases failed"
    for layout in ("cluster=1", "cluster=2", "cluster=4", "cluster=8", "cluster=16", "generic"):
        assert sum(layout in line for line in lines) >= 6


def test_broken_kernels_are_detected_and_located(folder, tmp_path):
    name = "row_pass_cluster"
    text = (ROOT / f"csrc/cuda/{name}.cu").read_text()
    for good, bad, _, _ in BREAKS:
        assert good in text
        text = text.replace(good, bad)
    (tmp_path / f"{name}.cu").write_text(text)
    broken = compile_object(tmp_path / f"{name}.cu", tmp_path / f"{name}.o")
    others = [path for path in folder.glob("*.o") if path.stem != name]
    driver = link([*others, broken], tmp_path / "driver")
    for _, _, case, message in BREAKS:
        done = run(driver, "--quick", "--only", case)
        (failed, *_) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        assert done.returncode == 1
        assert case in failed
        assert message in failed
    assert run(driver, "--quick", "--only", "generic aligned in place").returncode == 0


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_nvcc_accepts_the_sources(source):
    command = [*NVCC, *nvcc_flags(), "-Xcompiler=-Werror,-fsyntax-only", "-c", source]
    subprocess.run([*command, "-o", os.devnull], check=True)


@pytest.mark.gpu
@needs_nvcc
def test_on_the_gpu(tmp_path):
    for driver in build(tmp_path):
        done = run(driver)
        assert done.returncode == 0, done.stdout
