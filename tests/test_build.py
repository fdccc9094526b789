"""The native library stays within torch's stable ABI."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elftools.elf.elffile import ELFFile
from helpers import needs_native

import bapo_kernels

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"


@needs_native
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_only_shim_symbols_of_torch_are_used():
    """No C++ name of torch: these change with every release."""
    command = ["nm", "--dynamic", "--undefined-only", str(LIBRARY)]
    symbols = [
        line.split()[-1] for line in subprocess.check_output(command, text=True).splitlines()
    ]
    of_torch = [s for s in symbols if "@" not in s and not s.startswith(("__", "_ITM"))]
    assert len(of_torch) > 10
    assert [s for s in of_torch if not s.startswith(("aoti_torch_", "torch_"))] == []


@needs_native
def test_libtorch_is_needed():
    """In a torch for CUDA the function that gives the stream is in a library that it needs."""
    with LIBRARY.open("rb") as file:
        tags = ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        assert "libtorch.so" in {tag.needed for tag in tags}


FIND_STREAM = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # torch and the extension take this libtorch for theirs
import bapo_kernels
library = ctypes.CDLL(sys.argv[2])  # loaded already: looks where its own references look
print(library.aoti_torch_get_current_cuda_stream(7, None))
"""


@needs_native
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch for CUDA")
def test_the_stream_is_found():
    assert ctypes.CDLL(str(LIBRARY)).aoti_torch_get_current_cuda_stream


@needs_native
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the real one")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(sys.platform != "linux", reason="linker options of Linux")
def test_the_stream_of_a_torch_for_cuda_is_found(tmp_path):
    """Torch opens its libraries without RTLD_GLOBAL, so the extension must reach it by itself."""
    stream = 'extern "C" int aoti_torch_get_current_cuda_stream(int i, void**) { return 42 + i; }'
    (tmp_path / "stream.cpp").write_text(stream)
    (tmp_path / "empty.cpp").write_text("")
    shared = ["g++", "-shared", "-fPIC", "-nostartfiles"]
    subprocess.run([*shared, "stream.cpp", "-o", "libtorch_cuda.so"], cwd=tmp_path, check=True)
    needs = ["-Wl,--no-as-needed", "-L.", "-ltorch_cuda", "-Wl,-rpath,$ORIGIN"]
    command = [*shared, "empty.cpp", *needs, "-Wl,-soname,libtorch.so", "-o", "libtorch.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = [sys.executable, "-c", FIND_STREAM, str(tmp_path / "libtorch.so"), str(LIBRARY)]
    assert subprocess.check_output(command, text=True, cwd=LIBRARY.parent.parent) == "49\n"


@needs_native
def test_the_build_is_reported():
    info = bapo_kernels.backends.native.build_info()
    if not info:
        pytest.skip("built without setup.py")
    assert info["torch"]
    assert "portable" in info["instruction sets"]


@needs_native
def test_an_older_torch_is_refused_in_words(monkeypatch):
    def missing_symbol(path):
        raise OSError(f"{path}: undefined symbol: torch_call_dispatcher")

    native = bapo_kernels.backends.native
    monkeypatch.setattr(native.torch.ops, "load_library", missing_symbol)
    assert native._load().startswith("the native library does not load")
    monkeypatch.setattr(native.torch, "__version__", "2.9.1+cpu")
    assert native._load().startswith("torch must be 2.10 or later, got 2.9.1+cpu")


@pytest.mark.parametrize(
    ("gpu", "driver", "reason"),
    [
        ((7, 5), 13, "built for sm_80, sm_90, sm_100, sm_120, the GPU is sm_75"),
        ((8, 0), 13, None),
        ((8, 9), 13, None),  # the binary for sm_80
        ((9, 0), 13, None),
        ((9, 0), 12, "built with CUDA 13.0, the driver knows CUDA 12"),
        ((10, 3), 13, None),
        ((11, 0), 13, "built for sm_80, sm_90, sm_100, sm_120, the GPU is sm_110"),
        ((12, 1), 13, None),
        ((13, 0), 14, None),  # compiled from PTX by the driver
    ],
)
def test_gpus_without_kernels_are_told(monkeypatch, gpu, driver, reason):
    """And ``backend=None`` takes the next backend instead of failing at the launch."""
    native = bapo_kernels.backends.native
    monkeypatch.setattr(native, "WHY_NO_CUDA", None)
    build = {"cuda": "13.0 for sm_80, sm_90, sm_100, sm_120"}
    monkeypatch.setattr(native, "build_info", lambda: build)
    monkeypatch.setattr(native.torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(native, "_cuda_of_driver", lambda: driver)
    native._not_built_for.cache_clear()
    assert bapo_kernels.available_backends()["cuda"] == reason
    logits = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16)
    taken = bapo_kernels.backends.choose(None, logits, "logits")
    assert (taken == "cuda") == (reason is None)
    native._not_built_for.cache_clear()
