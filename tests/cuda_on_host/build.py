"""Builds the emulation: the kernels of csrc/cuda as C++, with operators for CPU tensors."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOST = Path(__file__).parent
ROOT = HOST.parent.parent
KERNELS = ["row_pass_cluster", "row_pass", "prepare", "sequences", "search", "token_loss"]
KERNELS += ["sampling_sets", "head_sampling_sets"]


def compile_object(source, target, csrc=ROOT / "csrc"):
    from torch.utils.cpp_extension import include_paths

    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", f"-I{HOST}", f"-I{csrc}"]
    flags += ["-U_FORTIFY_SOURCE"]  # whose checks forbid longjmp to another stack
    flags += [flag for path in include_paths() for flag in ("-isystem", path)]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-x", "c++", "-c"]
    subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)


def link(objects, target):
    """Links another file and renames it, so that ``target`` is complete as soon as it exists."""
    from torch.utils.cpp_extension import library_paths

    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu"]
    part = f"{target}.part"
    command = ["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), *libraries, "-o", part]
    subprocess.run(command, check=True)
    os.replace(part, target)


def build(folder, csrc=ROOT / "csrc"):
    """The library, with its object files beside it."""
    sources = [*(csrc / f"cuda/{name}.cu" for name in KERNELS), HOST / "binding.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_object, sources, objects, [csrc] * len(sources)))
    link(objects, folder / "cuda_on_host.so")
