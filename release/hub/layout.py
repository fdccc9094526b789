"""Writes a build variant for the kernels hub: ``python release/hub/layout.py cpu|cuda FOLDER``.

A variant is a folder with torch-ext/bapo_kernels, in it the package as ``package`` with its native
library, and metadata.json. ``kernels`` imports the folder under the ``id`` of its metadata, so that
several versions can be in one process: the operators of each are in a namespace of this name.

The library is built by setup.py and its environment variables, for the glibc of this machine or a
later one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HUB = Path(__file__).parent
ROOT = HUB.parents[1]
NO_CODE = shutil.ignore_patterns("__pycache__", "_C.abi3.so", "_build.json")


def write_variant(backend: str, folder: Path) -> Path:
    """Builds the library and writes the variant into the folder; returns its path."""
    config = tomllib.loads((HUB / "build.toml").read_text())
    metadata = metadata_of(config, backend)
    with tempfile.TemporaryDirectory() as build:
        info = build_library(Path(build), backend, metadata["id"])
        variant = folder / variant_name(config, backend, info)
        shutil.rmtree(variant, ignore_errors=True)
        shutil.copytree(HUB / "torch-ext" / "bapo_kernels", variant, ignore=NO_CODE)
        shutil.copytree(ROOT / "bapo_kernels", variant / "package", ignore=NO_CODE)
        shutil.copytree(Path(build) / "bapo_kernels", variant / "package", dirs_exist_ok=True)
        shutil.copy(ROOT / "LICENSE", variant)
        shutil.copytree(ROOT / "release" / "licenses", variant / "licenses")
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def metadata_of(config: dict[str, Any], backend: str) -> dict[str, Any]:
    general = config["general"]
    name = general["name"].replace("-", "_")
    about: dict[str, Any] = {"type": backend}
    if backend == "cuda":
        about["archs"] = config["kernel"]["cuda"]["cuda-capabilities"]
    return {
        "name": general["name"],
        "id": f"_{name}_{backend}_{revision()}",
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": about,
    }


def revision() -> str:
    """The commit, marked as not clean if tracked files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=_dirty"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def build_library(folder: Path, backend: str, namespace: str) -> dict[str, str]:
    """Writes the library and its report into ``folder/bapo_kernels``; returns the report."""
    flags = f"{os.environ.get('CXXFLAGS', '')} -DBAPO_NAMESPACE={namespace}"
    required = "BAPO_REQUIRE_CUDA" if backend == "cuda" else "BAPO_REQUIRE_NATIVE"
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}"]
    command += [f"--build-temp={folder / 'objects'}"]
    environment = os.environ | {"CXXFLAGS": flags, required: "1", "TORCH_CUDA_ARCH_LIST": "all"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return json.loads((folder / "bapo_kernels" / "_build.json").read_text())


def variant_name(config: dict[str, Any], backend: str, info: dict[str, str]) -> str:
    """As torch-stable-abi210-cu130-x86_64-linux."""
    torch = config["torch"]["stable-abi"][backend].replace(".", "")
    compute = backend
    if backend == "cuda":
        compute = "cu" + re.match(r"(\d+\.\d+)", info["cuda"])[1].replace(".", "")
    return f"torch-stable-abi{torch}-{compute}-{platform.machine()}-{platform.system().lower()}"


if __name__ == "__main__":
    print(write_variant(sys.argv[1], Path(sys.argv[2])))
