"""Builds the driver, which runs without torch and Python, and one whose endless waits trap.

    python tests/cuda_driver/build.py FOLDER [--all]

``cuda_driver`` and ``cuda_driver_debug`` are for sm_90, with ``--all`` for every architecture of
setup.py.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NVCC = os.environ.get("NVCC", "nvcc")
KERNELS = ["row_pass_cluster", "row_pass", "prepare", "sequences", "search", "policy"]
SOURCES = sorted(HERE.glob("*.cpp"))
DEBUG = "-DBAPO_TRAP_WAITS"  # a wait without an end says which one it is, and traps


def architectures() -> dict[str, tuple[str, ...]]:
    """By kernel file, as setup.py has them."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "CUDA_ARCHITECTURES":
            return ast.literal_eval(node.value)
    raise LookupError("no CUDA_ARCHITECTURES in setup.py")


def nvcc_flags() -> list[str]:
    return ["-std=c++20", "-O2", "-lineinfo", f"-I{ROOT / 'csrc'}", "-Xcompiler=-Wall,-Wextra"]


def compile_object(source: Path, target: Path, *flags: str) -> Path:
    subprocess.run([NVCC, *nvcc_flags(), *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


def build(folder: Path, every_architecture: bool = False) -> tuple[Path, Path]:
    """The driver, and the one with traps."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    of_kernel = architectures() if every_architecture else dict.fromkeys(KERNELS, ("90",))

    def kernel(name: str, *flags: str) -> Path:
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in of_kernel[name]]
        target = folder / f"{name}{'_debug' if flags else ''}.o"
        return compile_object(ROOT / f"csrc/cuda/{name}.cu", target, *codes, *flags)

    def link(name: str, objects: list[Future[Path]]) -> Path:
        flags = ["-Xcompiler=-static-libstdc++,-static-libgcc,-pthread", "-o", str(folder / name)]
        subprocess.run([NVCC, *(str(o.result()) for o in objects), *flags], check=True)
        return folder / name

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        clusters, *others = [pool.submit(kernel, name) for name in KERNELS]
        trapping = pool.submit(kernel, KERNELS[0], DEBUG)  # the one that waits
        others += [pool.submit(compile_object, s, folder / f"{s.stem}.o") for s in SOURCES]
    return link("cuda_driver", [clusters, *others]), link("cuda_driver_debug", [trapping, *others])


if __name__ == "__main__":
    print(*build(Path(sys.argv[1]), "--all" in sys.argv[2:]), sep="\n")
