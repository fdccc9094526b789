"""Builds the operators of the CUDA backend for CPU tensors, and the PTX of their kernels."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOST = Path(__file__).parent
ROOT = HOST.parent.parent
NVCC = shlex.split(os.environ.get("NVCC", "nvcc"))
KERNELS = ["row_pass_cluster", "row_pass", "prepare", "sequences", "search", "token_loss"]
KERNELS += ["labels", "sampling_sets", "head_sampling_sets"]


def architectures(unit: str) -> list[str]:
    """Each device executes the newest code up to its architecture, or that of EMULATE_ARCH.

    That for sm_120 is the same as for sm_100, but for one unit.
    """
    newest = ["120"] if unit == "row_pass_cluster" else []
    return os.environ.get("EMULATE_ARCH", "").split() or ["90", "100", *newest]


def compile_kernels(source: Path, folder: Path, csrc: Path = ROOT / "csrc") -> Path:
    """The object file, with the PTX for each architecture beside it."""
    target = folder / f"{source.stem}.o"
    kept = folder / f"kept_{source.stem}"
    kept.mkdir(exist_ok=True)
    flags = ["-std=c++20", "-O3", "-w", f"-I{csrc}"]
    flags += [f"-gencode=arch=compute_{n},code=compute_{n}" for n in architectures(source.stem)]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden"]
    command = [*NVCC, *flags, "--keep", f"--keep-dir={kept}", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    for ptx in kept.glob("*.ptx"):
        os.replace(ptx, folder / ptx.name)
    return target


def compile_host(source: Path, folder: Path) -> Path:
    from torch.utils.cpp_extension import include_paths

    target = folder / f"{source.stem}.o"
    flags = ["-std=c++20", "-O1", f"-I{HOST}", f"-I{ROOT / 'csrc'}"]
    flags += [flag for path in include_paths() for flag in ("-isystem", path)]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    subprocess.run([*NVCC, *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


def link(objects: Iterable[Path], target: Path) -> None:
    """Links another file and renames it, so that ``target`` is complete as soon as it exists."""
    from torch.utils.cpp_extension import library_paths

    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu"]
    part = f"{target}.part"
    command = ["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), *libraries, "-o", part]
    subprocess.run(command, check=True)
    os.replace(part, target)


def build(folder: Path, csrc: Path = ROOT / "csrc") -> None:
    """The library, with its objects and the PTX beside it."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [csrc / f"cuda/{name}.cu" for name in KERNELS]
        host = [HOST / "binding.cpp", HOST / "runtime.cpp"]
        objects = [pool.submit(compile_kernels, source, folder, csrc) for source in kernels]
        objects += [pool.submit(compile_host, source, folder) for source in host]
    link([each.result() for each in objects], folder / "cuda_on_host.so")
