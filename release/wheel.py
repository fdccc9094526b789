"""Builds the source distribution, and from it the wheels: ``make wheel``.

They run on Linux with glibc 2.28, Python 3.10, torch 2.10 or later ones of each: one on x86-64, and
with the compiler CROSS on the path one on aarch64. They are built on any such x86-64 machine with a
C++20 compiler. nvcc comes from PyPI, and so does zig, which provides the symbols of glibc 2.28,
against which the library is linked. libstdc++ is linked statically, because that of the build
machine may be newer than the user's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from release import repair

ROOT = Path(__file__).parent.parent
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
GLIBC, MACHINE, OTHER = "2.28", "x86_64", "aarch64"
CROSS = f"{OTHER}-linux-gnu-g++"
ZIG = (sys.executable, "-m", "ziglang")
OF_GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    if (sys.platform, platform.machine()) != ("linux", MACHINE):
        raise SystemExit(f"the wheel is built on Linux on {MACHINE}, got {platform.platform()}")
    machines = [MACHINE, OTHER] if shutil.which(CROSS) else [MACHINE]
    built = [build(BUILD / machine, machine) for machine in machines]
    shutil.rmtree(DIST, ignore_errors=True)
    for sdist, wheel in built:
        print(repair.repair(wheel, DIST))
        shutil.copy(sdist, DIST)
    if OTHER not in machines:
        print(f"no wheel for {OTHER}: {CROSS} is not on the path")


def build(folder: Path, machine: str) -> tuple[Path, Path]:
    """Of source distribution and wheel, the latter in the tree of the former."""
    folder.mkdir(parents=True)
    compilers = {"NVCC": shlex.join([str(nvcc()), "--compress-mode=size"])}
    flags = link_flags(folder, machine)
    if machine != MACHINE:
        compilers = {"NVCC": f"{compilers['NVCC']} -ccbin={CROSS}", "CXX": CROSS}
        compilers["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"  # for setup.py and the tag
        flags += [f"-L{path}" for path in (torch(folder), cudart(folder, machine))]
    environment = os.environ | {
        "BAPO_REQUIRE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "all",
        **compilers,
        "CXXFLAGS": "",
        "LDFLAGS": shlex.join(flags),
        "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip(),
    }
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={folder}", str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def torch(folder: Path) -> Path:
    """Libraries with the names of torch's stable ABI and no code, for the linker of CROSS."""
    libraries = importlib.util.find_spec("torch").submodule_search_locations[0]
    names = run(
        "nm", "-D", "--defined-only", "--format=just-symbols", f"{libraries}/lib/libtorch_cpu.so"
    )
    names = [name for name in names.split() if name.startswith(("aoti_torch_", "torch_"))]
    source = folder / "torch.cpp"
    for library, content in ("torch", []), ("torch_cpu", names):
        source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in content))
        name = f"lib{library}.so"
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        run(CROSS, "-fPIC", str(source), *link)
    return folder


def cudart(folder: Path, machine: str) -> Path:
    """The folder of NVIDIA's libraries for another machine, in the locked version."""
    locked = (ROOT / "requirements" / "wheel.txt").read_text()
    requirement = folder / "cudart.txt"
    requirement.write_text(re.search(r"^nvidia-cuda-runtime==(.*\\\n)+.*", locked, re.MULTILINE)[0])
    options = ["--no-deps", "--only-binary=:all:", f"--platform=manylinux2014_{machine}"]
    options += ["--require-hashes", f"--target={folder / 'cuda'}", f"--requirement={requirement}"]
    run(sys.executable, "-m", "pip", "install", "-q", *options)
    (library,) = (folder / "cuda").rglob("libcudart_static.a")
    return library.parent


def nvcc() -> Path:
    """nvcc of the wheel nvidia-cuda-nvcc, which has no launcher."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else []
    found = [path for place in places or [] for path in Path(place).glob("cu*/bin/nvcc")]
    if not found:
        raise SystemExit("nvcc must be installed (requirements/wheel.txt)")
    return found[0]


def link_flags(folder: Path, machine: str) -> list[str]:
    """So that the library needs nothing newer than glibc 2.28, and shows nothing of its own."""
    exported = folder / "nothing.map"
    exported.write_text("{ local: *; };\n")
    flags = ["-Wl,-s", "-Wl,--gc-sections", f"-Wl,--version-script={exported}"]
    flags += ["-Wl,-z,defs", "-static-libstdc++"]  # defs: no symbol that is newer may be left over
    if machine == MACHINE and platform.libc_ver() == ("glibc", GLIBC):
        return flags
    # zig keeps what it makes in a folder of its own, where the libraries are then found.
    cache, target = folder / "zig", ("-target", f"{machine}-linux-gnu.{GLIBC}")
    own = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    flag, empty = folder / "glibc_2_28.o", folder / "empty.c"
    source = ROOT / "release" / "glibc_2_28.c"
    run(*ZIG, "cc", *target, "-c", "-fPIC", str(source), "-o", str(flag), env=os.environ | own)
    empty.write_text("")
    # Shared libraries with the symbols of glibc 2.28 and no code, as zig makes for its linker.
    stub = ["-dynamic", "-lc", *target, f"-femit-bin={folder / 'empty.so'}", str(empty)]
    run(*ZIG, "build-lib", *stub, env=os.environ | own)
    (libc,) = cache.rglob("libc.so.6")
    libraries = [f"-l:{name}" for name in OF_GLIBC]
    needed = ["-Wl,--push-state,--no-as-needed", *libraries, "-Wl,--pop-state"]
    return [*flags, str(flag), f"-L{libc.parent}", *needed]


def run(*command: str, **options) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


if __name__ == "__main__":
    main()
