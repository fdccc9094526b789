"""The native library stays within torch's stable ABI."""

import shutil
import subprocess
from pathlib import Path

import pytest
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
