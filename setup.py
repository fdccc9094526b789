"""Builds the native library, a plain shared object on torch's stable ABI.

It contains no Python API: one binary serves every Python version, and every torch from
TORCH_TARGET on. Without a compiler or torch the install is pure Python, and
``python -m bapo_kernels`` tells why; likewise without nvcc, or where it fails, the CUDA backend is
absent. BAPO_REQUIRE_CUDA=1 makes that an error. BAPO_SANITIZE=1 builds with AddressSanitizer and
UBSan.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
TORCH_TARGET = "0x020a000000000000"  # 2.10
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
INSTRUCTION_SETS = {
    "portable": [],
    **(
        {
            "avx2": ["-mavx2", "-mfma", "-mf16c"],
            "avx512": AVX512,
            "avx512bf16": [*AVX512, "-mavx512bf16"],
        }
        if X86
        else {}
    ),
}

# In a torch for CUDA the stream comes from libtorch_cuda, which libtorch pulls in. Without a strong
# reference a linker told --as-needed, as most distributions' are, would leave libtorch out.
LINK_LIBTORCH = ["-ltorch"]
if sys.platform == "linux":
    LINK_LIBTORCH = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]

CUDA_ARCHITECTURES = {
    # Clusters and bulk copies begin with sm_90; nothing is specific to one architecture, so that
    # each binary serves its whole generation and PTX what comes after.
    "row_pass_cluster": ("90", "100", "120"),
    "row_pass": ("80", "90", "100", "120"),
    "tokens": ("80", "90", "100", "120"),
}


class Unit(NamedTuple):
    """One object file."""

    name: str
    source: str
    flags: list[str]


class CudaToolkit(NamedTuple):
    """The CUDA compiler and the folder of its libraries."""

    nvcc: str
    libraries: Path
    version: str

    @classmethod
    def find(cls) -> CudaToolkit:
        nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
        if nvcc is None:
            raise OSError("no CUDA compiler found (nvcc on the path, or NVCC)")
        if os.environ.get("BAPO_SANITIZE"):
            raise OSError("a library with sanitizers has the CPU kernels alone")
        # nvcc may be a script that calls another one: ask it where its toolkit is.
        dry = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
        root = Path(re.search(r"^#\$ TOP=(.*)$", dry, re.MULTILINE)[1].strip())
        version = subprocess.check_output([nvcc, "--version"], text=True)
        release = re.search(r"release ([\d.]+)", version)[1]
        places = [root / "lib64", root / "targets/x86_64-linux/lib", root / "lib"]
        libraries = [path for path in places if (path / "libcudart_static.a").exists()]
        if not libraries:
            raise OSError(f"libcudart_static.a not found under {root}")
        return cls(nvcc, libraries[0], release)


def compile_flags() -> list[str]:
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra"]
    flags += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", f"-I{ROOT / 'csrc'}"]
    flags += ["-DBAPO_X86=1"] if X86 else []
    if os.environ.get("BAPO_SANITIZE"):
        return [*flags, *sanitize_flags(), "-O1", "-g", "-fno-omit-frame-pointer"]
    return [*flags, "-O3"]


def sanitize_flags() -> list[str]:
    if not os.environ.get("BAPO_SANITIZE"):
        return []
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def torch_headers() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return [flag for path in include_paths() for flag in ("-isystem", path)]


def units() -> list[Unit]:
    rows = [
        Unit(f"row_pass_{isa}", "csrc/cpu/row_pass.cpp", [f"-DBAPO_ISA={isa}", *flags])
        for isa, flags in INSTRUCTION_SETS.items()
    ]
    return [
        *rows,
        Unit("dispatch", "csrc/cpu/dispatch.cpp", []),
        Unit("tokens", "csrc/cpu/tokens.cpp", []),
        Unit("binding", "csrc/binding.cpp", torch_headers()),
    ]


def cuda_units() -> list[Unit]:
    units = []
    for name, architectures in CUDA_ARCHITECTURES.items():
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
        newest = architectures[-1]
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        units.append(Unit(f"cuda_{name}", f"csrc/cuda/{name}.cu", codes))
    return units


def cuda_flags() -> list[str]:
    host = "-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    return ["-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", "--threads=2", f"-Xcompiler={host}"]


class NativeBuild(build_ext):
    """Compiles the units side by side and links them; a failure leaves a reason, not an error."""

    def run(self) -> None:
        library, report = self.outputs()
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            info = self.build_library(library)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            require_cuda_is_not_set(error)
            info = {"native": reason(error)}
            print(f"bapo_kernels: installing without the native library: {info['native']}")
        report.write_text(json.dumps(info, indent=2) + "\n")

    def outputs(self) -> tuple[Path, Path]:
        in_place = self.inplace or self.editable_mode
        package = (ROOT if in_place else Path(self.build_lib)) / "bapo_kernels"
        return package / "_C.abi3.so", package / "_build.json"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.outputs() if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def build_library(self, target: Path) -> dict[str, str]:
        import torch
        from torch.utils.cpp_extension import library_paths

        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            raise OSError("no C++ compiler found (g++ or c++ on the path, or CXX)")
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)

        def build(command: list[str], unit: Unit) -> str:
            output = str(folder / f"{unit.name}.o")
            run([*command, *unit.flags, "-c", str(ROOT / unit.source)], output)
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            command = [compiler, *compile_flags()]
            cpp = [pool.submit(build, command, unit) for unit in units()]
            cuda_objects, cuda_libraries, cuda = build_cuda(pool, build, command)
            objects = [future.result() for future in cpp] + cuda_objects
        libraries = [f"-L{path}" for path in library_paths()]
        libraries += [*LINK_LIBTORCH, "-ltorch_cpu", *cuda_libraries]
        run([compiler, "-shared", *sanitize_flags(), *objects, *libraries], str(target))
        version = subprocess.check_output([compiler, "--version"], text=True).splitlines()[0]
        sets = ", ".join(INSTRUCTION_SETS)
        return {
            "compiler": version,
            "torch": torch.__version__,
            "instruction sets": sets,
            **cuda,
        }

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")]


def build_cuda(
    pool: ThreadPoolExecutor, build: Callable, cpp_command: list[str]
) -> tuple[list[str], list[str], dict]:
    """Objects and libraries of the CUDA backend, and what to report; without nvcc the reason."""
    try:
        toolkit = CudaToolkit.find()
        command = [toolkit.nvcc, *cuda_flags()]
        kernels = [pool.submit(build, command, unit) for unit in cuda_units()]
        objects = [future.result() for future in kernels]
    except (OSError, subprocess.CalledProcessError) as error:
        require_cuda_is_not_set(error)
        if isinstance(error, subprocess.CalledProcessError):
            warn(f"nvcc failed, so the CUDA backend is left out: {error.stderr.strip()}")
        return [], [], {"why no cuda": reason(error)}
    binding = Unit("binding_cuda", "csrc/binding_cuda.cpp", torch_headers())
    objects.append(build(cpp_command, binding))
    libraries = [f"-L{toolkit.libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    architectures = ", ".join(f"sm_{a}" for a in CUDA_ARCHITECTURES["tokens"])
    return objects, libraries, {"cuda": f"{toolkit.version} for {architectures}"}


def require_cuda_is_not_set(error: Exception) -> None:
    if os.environ.get("BAPO_REQUIRE_CUDA"):
        raise SystemExit(f"bapo_kernels: BAPO_REQUIRE_CUDA is set, and {reason(error)}") from error


def warn(message: str) -> None:
    print(f"bapo_kernels: WARNING: {message}", file=sys.stderr)


def run(command: list[str], output: str) -> None:
    subprocess.run([*command, "-o", output], check=True, stderr=subprocess.PIPE, text=True)


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or ["failed"]
        return f"{Path(error.cmd[0]).name}: {lines[0].strip()}"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "no torch where it was built: install torch, then with pip's --no-build-isolation"
    return str(error)


class AnyPython(bdist_wheel):
    """The wheel's tag: the library does not touch the Python API."""

    def get_tag(self) -> tuple[str, str, str]:
        return "cp310", "abi3", super().get_tag()[2]


class NativeDistribution(Distribution):
    """Marks the wheel as platform-dependent."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[Extension("bapo_kernels._C", sources=[])],
    cmdclass={"build_ext": NativeBuild, "bdist_wheel": AnyPython},
    distclass=NativeDistribution,
)
