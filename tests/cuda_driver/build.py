"""Builds the driver, which runs without torch and Python, and one whose endless waits trap.

    python tests/cuda_driver/build.py FOLDER

``cuda_driver`` and ``cuda_driver_debug`` are for the GPUs that setup.py builds the library for.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NVCC = shlex.split(os.environ.get("NVCC", "nvcc"))
KERNELS = ["row_pass_cluster", "row_pass", "prepare", "sequences", "search", "token_loss"]
SOURCES = sorted(HERE.glob("*.cpp"))
DEBUG = "-DBAPO_TRAP_WAITS"  # a wait without an end says which one it is, and traps


def targets() -> dict[str, list[str]]:
    """Flags of nvcc by kernel file, as setup.py has them."""
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    units = setup["cuda_units"](setup["cuda_targets"](setup["cuda_architectures"]()))
    return {unit.name.removeprefix("cuda_"): unit.flags for unit in units}


def nvcc_flags() -> list[str]:
    return ["-std=c++20", "-O2", "-lineinfo", f"-I{ROOT / 'csrc'}", "-Xcompiler=-Wall,-Wextra"]


def build(folder: Path) -> tuple[Path, Path]:
    """The driver, and the one with traps."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path, name: str, flags: list[str]) -> str:
        command = [*NVCC, *nvcc_flags(), *flags, "-c", str(source), "-o", f"{folder}/{name}.o"]
        subprocess.run(command, check=True)
        return command[-1]

    def linked(name: str, objects: list[str]) -> Path:
        flags = ["-Xcompiler=-static-libstdc++,-static-libgcc,-pthread", "-o", str(folder / name)]
        subprocess.run([*NVCC, *objects, *flags], check=True)
        return folder / name

    flags_of = targets()
    units = [(ROOT / f"csrc/cuda/{name}.cu", name, flags_of[name]) for name in KERNELS]
    source, name, flags = units[0]  # the one that waits
    units.insert(0, (source, f"{name}_debug", [*flags, DEBUG]))
    units += [(source, source.stem, []) for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        traps, waits, *others = pool.map(lambda unit: compiled(*unit), units)
    return linked("cuda_driver", [waits, *others]), linked("cuda_driver_debug", [traps, *others])


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])), sep="\n")
