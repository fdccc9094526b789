"""The emulation as a fixture."""

import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from bapo_kernels.core import operators

from .build import build
from .emulated import CALLERS, DEVICES, ROUNDING

NAMESPACE = "bapo_kernels_cuda_on_host"
CONTROLS = {
    "device": "(int major, int bytes, int clusters, int ptx_version=90) -> ()",
    "schedule": "(int seed) -> ()",
    "rounding": "(int seed) -> ()",
    "stream": "(int handle, int status) -> ()",
    "last_cluster": "() -> int",
    "planned_cluster": "(int vocab) -> int",
    "launches": "() -> int",
    "launched_on": "(int handle) -> bool",
}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Built once for all workers, unless EMULATE_LIBRARY names a library."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    built = Path(os.environ.get("EMULATE_LIBRARY", folder / "cuda_on_host.so"))
    with FileLock(folder / "cuda_on_host.lock"):
        if not built.exists():
            build(folder)
    definitions = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in operators.SCHEMAS.items():
        definitions.define(f"{name}({schema}) -> ()")
    for name, schema in CONTROLS.items():
        definitions.define(name + schema)
    torch.ops.load_library(str(built))
    yield getattr(torch.ops, NAMESPACE)
    definitions._destroy()


@pytest.fixture(params=DEVICES)
def on_host(request, library, monkeypatch):
    """The CPU backend runs the CUDA kernels."""
    library.device(*DEVICES[request.param][0])
    library.schedule(0)
    library.rounding(ROUNDING)
    library.stream(1, 0)
    for module in CALLERS:
        monkeypatch.setattr(module, "ops_of", lambda backend: library)
    return request.param
