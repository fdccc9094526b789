"""Builds the native library, a plain shared object on torch's stable ABI.

It does not use Python's C API: one binary serves every Python version, and every torch from TORCH
on. Without a C++20 compiler or torch the install is pure Python: the wheel has the tag of a pure
package, the first call warns, and ``python -m bapo_kernels`` prints the reason. If nvcc is missing
or fails, or torch has no CUDA support or sees no GPU, only the CUDA backend is absent.

Objects stay in build/objects, and are compiled again only where what they are made of has changed.
Library and report replace earlier ones at the end: an interrupted build leaves what was there.

Environment variables:
    CXX, NVCC: the compilers, each a command of one or more words (``ccache g++``). nvcc is also
        found in CUDA_HOME and in /usr/local/cuda.
    CXXFLAGS, LDFLAGS: additional flags. They override -O, but not the flags that the code needs.
    TORCH_CUDA_ARCH_LIST: the GPUs that the CUDA backend is compiled for, as 8.0;9.0+PTX or all. The
        default is those that torch sees; where it sees none, there is no CUDA backend.
    BAPO_REQUIRE_NATIVE=1, BAPO_REQUIRE_CUDA=1: the build fails if the library, or its CUDA backend,
        cannot be built. With the second it is also built where torch has no CUDA or sees no GPU.
    BAPO_SANITIZE=1: builds with AddressSanitizer and UBSan.
    BAPO_PORTABLE=1: builds the CPU kernels for the oldest processors alone, in a third of the time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools.command.build_ext import build_ext

# As in pyproject.toml, whose build requirements pip ignores under --no-build-isolation.
OLDEST_SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    raise SystemExit(
        f"bapo_kernels: setuptools must be {OLDEST_SETUPTOOLS} or later to build, "
        f"got {setuptools.__version__}: pip install -U setuptools"
    )

from setuptools.command.bdist_wheel import bdist_wheel


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


ROOT = Path(__file__).parent
TORCH = (2, 10)  # the oldest supported; the library is built for its stable ABI
# The variable, as of Python's own builds, names the platform of the wheel where it is another one.
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).lower()
X86 = MACHINE.endswith(("x86_64", "amd64"))
WIDE = X86 and not enabled("BAPO_PORTABLE")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
INSTRUCTION_SETS = {
    "portable": [],
    **(
        {
            "avx2": ["-mavx2", "-mfma", "-mf16c"],
            "avx512": AVX512,
            "avx512bf16": [*AVX512, "-mavx512bf16"],
        }
        if WIDE
        else {}
    ),
}

# With CUDA the stream comes from libtorch_cuda, which libtorch loads. Nothing refers to libtorch
# strongly, so a linker with --as-needed, the default of most distributions, would drop it.
LINK_LIBTORCH = ["-ltorch"]
if sys.platform == "linux":
    LINK_LIBTORCH = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]

CUDA_ARCHITECTURES = {
    # The longest to compile come first. Clusters and bulk copies need sm_90. No code is specific to
    # one architecture, so each binary serves its whole generation, and PTX serves later ones.
    "row_pass_cluster": ("90", "100", "120"),
    "row_pass": ("80", "90", "100", "120"),
    "head_sampling_sets": ("80", "90", "100", "120"),
    "sample_rows": ("80", "90", "100", "120"),
    "sampling_sets": ("80", "90", "100", "120"),
    "prepare": ("80", "90", "100", "120"),
    "search": ("80", "90", "100", "120"),
    "token_loss": ("80", "90", "100", "120"),
    "sequences": ("80", "90", "100", "120"),
    "labels": ("80", "90", "100", "120"),
}

BUILD_ERRORS = (ImportError, OSError, subprocess.CalledProcessError)


class Unit(NamedTuple):
    """One object file."""

    name: str
    source: str
    flags: list[str]


class CudaToolkit(NamedTuple):
    """The CUDA compiler and the folder of its libraries."""

    nvcc: list[str]
    libraries: Path
    version: str
    described: str

    @classmethod
    def find(cls) -> CudaToolkit:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        nvcc = compiler("CUDA", "NVCC", "nvcc", f"{home}/bin/nvcc")
        if enabled("BAPO_SANITIZE"):
            raise OSError("a library with sanitizers has the CPU kernels alone")
        # nvcc may be a script that calls the real one, so ask where its toolkit is.
        dry = subprocess.run([*nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.*)$", dry, re.MULTILINE)
        described = run([*nvcc, "--version"])
        release = re.search(r"release ([\d.]+)", described)
        if top is None or release is None:
            raise OSError(f"NVCC must be nvcc or call it, got {shlex.join(nvcc)}")
        root = Path(top[1].strip())
        target = "targets/x86_64-linux/lib" if X86 else "targets/sbsa-linux/lib"
        places = [root / "lib64", root / target, root / "lib"]
        libraries = [path for path in places if (path / "libcudart_static.a").exists()]
        if not libraries:
            raise OSError(f"libcudart_static.a not found under {root}")
        return cls(nvcc, libraries[0], release[1], described)


def words(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def compiler(language: str, variable: str, *programs: str) -> list[str]:
    """The command from the environment, or the first of the programs that there is."""
    command = words(variable)
    if command and shutil.which(command[0]) is None:
        raise OSError(f"{variable} must name a program that can run, got {command[0]!r}")
    command = command or [path for path in map(shutil.which, programs) if path][:1]
    if not command:
        tried = " and ".join(programs)
        raise OSError(f"no {language} compiler found: tried {tried}, and {variable} is not set")
    return command


def compile_flags(optimise: str = "-O3") -> list[str]:
    flags = [optimise, "-Wall", "-Wextra", *sanitize_flags(), *words("CXXFLAGS")]
    flags += ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast"]
    flags += [f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}{0:012x}"]
    return [*flags, f"-ffile-prefix-map={ROOT}/=", f"-I{ROOT / 'csrc'}"]


def sanitize_flags() -> list[str]:
    if not enabled("BAPO_SANITIZE"):
        return []
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    return [*checks, "-O1", "-g", "-fno-omit-frame-pointer"]


def binding(name: str) -> Unit:
    """Messages of the library name the places of checks, but not folders of this machine."""
    import torch
    from torch.utils.cpp_extension import include_paths

    names = f"-ffile-prefix-map={Path(torch.__file__).parent}=torch"
    flags = [names, *(flag for path in include_paths() for flag in ("-isystem", path))]
    return Unit(name, f"csrc/{name}.cpp", flags)


def units() -> list[Unit]:
    rows = [
        Unit(f"{name}_{isa}", f"csrc/cpu/{name}.cpp", [f"-DBAPO_ISA={isa}", *flags])
        for name in ("row_pass", "sample_rows", "sampling_sets")
        for isa, flags in INSTRUCTION_SETS.items()
    ]
    return [
        *rows,
        Unit("dispatch", "csrc/cpu/dispatch.cpp", ["-DBAPO_X86=1"] if WIDE else []),
        Unit("tokens", "csrc/cpu/tokens.cpp", []),
    ]


def cuda_architectures() -> list[str]:
    """Those of TORCH_CUDA_ARCH_LIST, or of the GPUs here; all of ours if CUDA is required."""
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if listed in ([], ["native"]) and torch.version.cuda and torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        return [f"{major}.{minor}" for major, minor in gpus]
    if not listed and not enabled("BAPO_REQUIRE_CUDA"):  # compiling all takes minutes
        command = "TORCH_CUDA_ARCH_LIST=all pip install --no-build-isolation -e ."
        why = "torch saw no GPU, and TORCH_CUDA_ARCH_LIST was not set"
        raise OSError(f"{why}; in the source folder, with nvcc, {command} builds it")
    if listed in ([], ["native"], ["all"]):
        ours = [f"{a[:-1]}.{a[-1]}" for a in CUDA_ARCHITECTURES["token_loss"]]
        return [*ours, f"{ours[-1]}+PTX"]
    return listed


def cuda_targets(requested: list[str]) -> list[str]:
    """What serves them, of what we compile for: sm_80 is a binary, compute_80 is PTX."""
    compiled = [int(a) for a in CUDA_ARCHITECTURES["token_loss"]]
    binaries, ptx = set(), set()
    for each in requested:
        number = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", each)
        if number is None:
            syntax = "numbers such as 8.0;9.0+PTX, or all"
            raise OSError(f"TORCH_CUDA_ARCH_LIST must be {syntax}, got {each!r}")
        wanted = int(number[1] + number[2])
        nearest = max((a for a in compiled if a <= wanted), default=None)
        if nearest is None:
            continue
        same_generation = nearest // 10 == wanted // 10
        if same_generation:
            binaries.add(nearest)
        if number[3] or not same_generation:
            ptx.add(nearest)
    if not binaries | ptx:
        oldest, got = compiled[0] / 10, ", ".join(requested)
        raise OSError(f"a GPU must have compute capability {oldest} or later, got {got}")
    return [*(f"sm_{a}" for a in sorted(binaries)), *(f"compute_{a}" for a in sorted(ptx))]


def cuda_units(targets: list[str]) -> list[Unit]:
    """Where sm_80 is the only target, the kernels with clusters are empty ones, for the linker."""
    units = []
    for name, binaries in CUDA_ARCHITECTURES.items():
        mine = [x for x in targets if x.startswith("compute") or x.removeprefix("sm_") in binaries]
        codes = [f"-gencode=arch=compute_{x.split('_')[1]},code={x}" for x in mine or targets]
        units.append(Unit(f"cuda_{name}", f"csrc/cuda/{name}.cu", codes))
    return units


def cuda_flags() -> list[str]:
    host = "-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    return ["-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", "--threads=2", f"-Xcompiler={host}"]


class NativeBuild(build_ext):
    """Compiles the units in parallel and links them.

    A failure is recorded as a reason; it is an error only with BAPO_REQUIRE_NATIVE or
    BAPO_REQUIRE_CUDA.
    """

    def finalize_options(self) -> None:
        asked = self.build_temp
        super().finalize_options()
        kept = ROOT / "build" / "objects"  # pip's -e would take a folder that it deletes
        there = next(path for path in (kept, *kept.parents) if path.exists())
        if asked is None and os.access(there, os.W_OK):
            self.build_temp = str(kept)

    def run(self) -> None:
        library, report = self.outputs()
        library.parent.mkdir(parents=True, exist_ok=True)
        # A process that runs keeps its library, and an interrupted build the one that worked.
        new_library, new_report = (path.with_stem(f"new{path.stem}") for path in (library, report))
        try:
            info = self.build_library(new_library)
            needed_by, why = ["BAPO_REQUIRE_CUDA"], info.get("why no cuda")
        except BUILD_ERRORS as error:
            needed_by = ["BAPO_REQUIRE_NATIVE", "BAPO_REQUIRE_CUDA"]
            why = explain("the native library", error)
            info = {"native": why}
            self.distribution.ext_modules = []  # makes the wheel a pure Python one
        refused_by = [name for name in needed_by if why and enabled(name)]
        if refused_by:
            info = {"native": f"{refused_by[0]} is set, and {why}"}
        new_report.write_text(json.dumps(info, indent=2) + "\n")
        if "native" in info:  # the earlier library may be of other sources
            for path in (library, new_library):
                path.unlink(missing_ok=True)
        else:
            new_library.replace(library)
        new_report.replace(report)
        if refused_by:
            raise SystemExit(f"bapo_kernels: {info['native']}")

    def outputs(self) -> tuple[Path, Path]:
        in_place = self.inplace or self.editable_mode
        package = (ROOT if in_place else Path(self.build_lib)) / "bapo_kernels"
        return package / "_C.abi3.so", package / "_build.json"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.outputs() if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def build_library(self, target: Path) -> dict[str, str]:
        cxx = compiler("C++", "CXX", "g++", "c++")
        version = run([*cxx, "--version"]).partition("\n")[0]

        import torch
        from torch.utils.cpp_extension import library_paths

        if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH:
            oldest = ".".join(map(str, TORCH))
            raise OSError(f"torch must be {oldest} or later, got {torch.__version__}")
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)

        def build(command: list[str], unit: Unit, nvcc: str = "") -> str:
            output = folder / f"{unit.name}.o"
            reads = ["-MD", "-MF", str(output.with_suffix(".d"))]
            command = [*command, *unit.flags, "-c", str(ROOT / unit.source), *reads]
            compile_unless_current([*command, "-o", str(output)], output, version + nvcc)
            return str(output)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            of_binding = [*cxx, *compile_flags("-O1")]  # no slower, and a third less to compile
            last = pool.submit(build, of_binding, binding("binding"))
            command = [*cxx, *compile_flags()]
            cpp = [*(pool.submit(build, command, unit) for unit in units()), last]
            try:
                cuda_objects, cuda_libraries, cuda = build_cuda(pool, build, of_binding)
                objects = [future.result() for future in cpp] + cuda_objects
            except BaseException:  # after Ctrl-C, too, the pool would compile all that is left
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        libraries = [f"-L{path}" for path in library_paths()]
        libraries += [*LINK_LIBTORCH, "-ltorch_cpu", *cuda_libraries]
        link = [*cxx, *words("CXXFLAGS"), *words("LDFLAGS"), *sanitize_flags(), "-shared"]
        run([*link, *objects, *libraries, "-o", str(target)])
        sets = ", ".join(INSTRUCTION_SETS)
        return {"compiler": version, "torch": torch.__version__, "instruction sets": sets, **cuda}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")]


def build_cuda(
    pool: ThreadPoolExecutor, build: Callable, of_binding: list[str]
) -> tuple[list[str], list[str], dict]:
    """Objects and libraries of the CUDA backend, and the report: what was built, or why not."""
    import torch

    if torch.version.cuda is None and not enabled("BAPO_REQUIRE_CUDA"):
        why = f"torch was {torch.__version__}, which has no CUDA support"
        return [], [], {"why no cuda": f"{why} (BAPO_REQUIRE_CUDA=1 builds it anyway)"}
    try:
        targets, toolkit = cuda_targets(cuda_architectures()), CudaToolkit.find()
        started = [pool.submit(build, of_binding, binding("binding_cuda"))]
        command = [*toolkit.nvcc, *cuda_flags()]
        units = cuda_units(targets)
        started += [pool.submit(build, command, unit, toolkit.described) for unit in units]
        objects = [future.result() for future in started]
    except BUILD_ERRORS as error:
        return [], [], {"why no cuda": explain("the CUDA backend", error)}
    libraries = [f"-L{toolkit.libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return objects, libraries, {"cuda": f"{toolkit.version} for {', '.join(targets)}"}


def compile_unless_current(command: list[str], output: Path, made_by: str) -> None:
    """Not again what this command of this compiler has made of files with the same content."""

    def content() -> str:
        read = output.with_suffix(".d").read_text().replace("\\\n", " ").partition(":")[2]
        files = [(x, hashlib.sha256(Path(x).read_bytes()).hexdigest()) for x in shlex.split(read)]
        return json.dumps([command, made_by, files])

    key = output.with_suffix(".key")
    with suppress(OSError):  # there is nothing yet, or a header is gone
        if output.exists() and key.read_text() == content():
            return
    key.unlink(missing_ok=True)  # it stays so if the compiler fails
    logging.info("compiling %s", output.stem)  # pip -v shows it
    run(command)
    key.write_text(content())


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def explain(missing: str, error: Exception) -> str:
    """The reason in one line; the whole output of the compiler is printed."""
    output = getattr(error, "stderr", None) or reason(error)
    print(f"bapo_kernels: WARNING: building without {missing}: {output.strip()}", file=sys.stderr)
    return reason(error)


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        program = Path(error.cmd[0]).name
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        line = next((x for x in lines if re.search(r"error:|\bld: ", x)), lines[-1]).strip()
        return f"{program}: {line.removeprefix(f'{program}: ')}"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return (
            "the build found no torch (pip isolates builds): with torch installed, "
            "pip install --no-build-isolation"
        )
    return str(error)


class Wheel(bdist_wheel):
    """A wheel for every Python 3.10 or later; a pure Python one without the library."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build":  # known only after the build
            self.root_is_pure = not self.distribution.has_ext_modules()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("cp310", "abi3", tag[2])


setuptools.setup(
    ext_modules=[setuptools.Extension("bapo_kernels._C", sources=[])],
    cmdclass={"build_ext": NativeBuild, "bdist_wheel": Wheel},
)
