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
from concurrent.futures import Future, ThreadPoolExecutor
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


def compile_object(source: Path, target: Path, *flags: str) -> Path:
    command = [*NVCC, *nvcc_flags(), *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def build(folder: Path) -> tuple[Path, Path]:
    """The driver, and the one with traps."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    of_kernel = targets()

    def kernel(name: str, *flags: str) -> Path:
        target = folder / f"{name}{'_debug' if flags else ''}.o"
        return compile_object(ROOT / f"csrc/cuda/{name}.cu", target, *of_kernel[name], *flags)

    def link(name: str, objects: list[Future[Path]]) -> Path:
        flags = ["-Xcompiler=-static-libstdc++,-static-libgcc,-pthread", "-o", str(folder / name)]
        subprocess.run([*NVCC, *(str(o.result()) for o in objects), *flags], check=True)
        return folder / name

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        clusters, *others = [pool.submit(kernel, name) for name in KERNELS]
        trapping = pool.submit(kernel, KERNELS[0], DEBUG)  # the one that waits
        others += [pool.submit(compile_object, s, folder / f"{s.stem}.o") for s in SOURCES]
    return link("cuda_driver", [clusters, *others]), link("cuda_driver_debug", [trapping, *others])


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])), sep="\n")
