"""Builds the operators of the CUDA backend for CPU tensors, and the PTX of their kernels."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

HOST = Path(__file__).parent
ROOT = HOST.parent.parent
KEPT = ROOT / "build/cuda_on_host"
NVCC = shlex.split(os.environ.get("NVCC", "nvcc"))
KERNELS = ["row_pass_cluster", "row_pass", "prepare", "sequences", "search", "token_loss"]
KERNELS += ["labels", "sampling_sets", "head_sampling_sets", "sample_rows"]


def architectures(unit: str) -> list[str]:
    """Each device executes the newest code up to its architecture, or that of EMULATE_ARCH.

    That for sm_120 is the same as for sm_100, but for one unit.
    """
    newest = ["120"] if unit == "row_pass_cluster" else []
    return os.environ.get("EMULATE_ARCH", "").split() or ["90", "100", *newest]


def compile_kernels(source: Path, folder: Path) -> Path:
    numbers = architectures(source.stem)
    flags = ["-O3", "-w", *(f"-gencode=arch=compute_{n},code=compute_{n}" for n in numbers)]
    return compile_unless_kept(source, flags, KEPT / "_".join([source.stem, *numbers]), folder)


def compile_host(source: Path, folder: Path) -> Path:
    from torch.utils.cpp_extension import include_paths

    flags = ["-O1", f"-I{HOST.relative_to(ROOT)}", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [flag for path in include_paths() for flag in ("-isystem", path)]
    return compile_unless_kept(source, flags, KEPT / source.stem, folder)


def compile_unless_kept(source: Path, flags: list[str], kept: Path, folder: Path) -> Path:
    """The object file in ``folder``, with the PTX for each architecture beside it.

    Files of the same content are not compiled again, also those of a copy of the tree.
    """
    target, reads, key = (kept / f"{source.stem}.{ending}" for ending in ("o", "d", "key"))
    command = [*NVCC, "-std=c++20", *flags, "-Icsrc", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += ["-c", str(source.relative_to(ROOT))]

    def content() -> str:
        names = shlex.split(reads.read_text().replace("\\\n", " ").partition(":")[2])
        made_by = *command, compiler(), version("torch")
        content = [repr(made_by).encode(), *((ROOT / name).read_bytes() for name in names)]
        return hashlib.sha256(b"\0".join(content)).hexdigest()

    if not key.exists() or key.read_text() != content():
        shutil.rmtree(kept, ignore_errors=True)
        with TemporaryDirectory() as intermediate:
            kept.mkdir(parents=True)
            command_here = [*command, "-MMD", "-MF", str(reads), "-o", str(target)]
            subprocess.run(
                [*command_here, "--keep", f"--keep-dir={intermediate}"], check=True, cwd=ROOT
            )
            for ptx in Path(intermediate).glob("*.ptx"):
                shutil.move(ptx, kept)
        key.write_text(content())
    for file in (target, *kept.glob("*.ptx")):
        shutil.copy(file, folder)
    return folder / target.name


@cache
def compiler() -> str:
    return subprocess.check_output([*NVCC, "--version"], text=True)


def link(objects: Iterable[Path], target: Path) -> None:
    """Links another file and renames it, so that ``target`` is complete as soon as it exists."""
    from torch.utils.cpp_extension import library_paths

    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu"]
    part = f"{target}.part"
    command = ["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), *libraries, "-o", part]
    subprocess.run(command, check=True)
    os.replace(part, target)


def build(folder: Path) -> None:
    """The library, with its objects and the PTX beside it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(KEPT / "lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [ROOT / f"csrc/cuda/{name}.cu" for name in KERNELS]
        host = [HOST / "binding.cpp", HOST / "runtime.cpp"]
        objects = [pool.submit(compile_kernels, source, folder) for source in kernels]
        objects += [pool.submit(compile_host, source, folder) for source in host]
    link([each.result() for each in objects], folder / "cuda_on_host.so")
