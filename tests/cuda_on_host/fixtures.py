"""The CUDA kernels on CPU tensors, as fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from ptx import executor

from bapo_kernels.core import operators

from .build import build
from .emulated import CALLERS, DEVICES, EVERYWHERE, ROUNDING
from .library import NAMESPACE, Library

CONTROLS = {
    "device": "(int major, int bytes, int clusters, int ptx_version=90, int reserved=0) -> ()",
    "fail_launch": "(int error, int after) -> ()",
    "stream": "(int handle, int status=0, int device=0) -> ()",
    "last_cluster": "() -> int",
    "planned_cluster": "(int vocab) -> int",
    "launches": "() -> int",
}


def pytest_collection_modifyitems(items):
    """Each case runs on a device or two, the next one on others; `make exhaustive` has the rest."""
    for item in items:
        if "on_host" not in getattr(item, "fixturenames", ()):
            continue
        names_its_devices = any(
            "on_host" in mark.args[0] for mark in item.iter_markers("parametrize")
        )
        if not names_its_devices and sum(item.callspec.indices.values()) % 5:
            item.add_marker(pytest.mark.exhaustive)


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
    yield Library(built)
    definitions._destroy()


@pytest.fixture(params=EVERYWHERE)
def on_host(request, library, monkeypatch):
    """The CPU backend runs the CUDA kernels."""
    library.device(*DEVICES[request.param][0])
    library.seed, library.error_seed = 0, ROUNDING
    library.stream(1)
    # Blocks may write one place then, as the results mean nothing.
    library.unwritten, library.races = (
        False,
        not request.node.originalname.startswith("test_broken_offsets"),
    )
    for module in CALLERS:
        monkeypatch.setattr(module, "ops_of", lambda backend: library)
    for owner, name in executor.ALLOCATORS:
        monkeypatch.setattr(owner, name, executor.poisoned(getattr(owner, name)))
    return request.param
