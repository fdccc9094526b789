"""Builds the source distribution, and from it the wheel: ``make wheel``.

The wheel runs on Linux on x86-64, with glibc 2.28, Python 3.10, torch 2.10 or later ones of each.
It is built on any such machine with a C++20 compiler. nvcc comes from PyPI, and so does zig, which
provides the symbols of glibc 2.28, against which the library is linked. libstdc++ is linked
statically, because that of the build machine may be newer than the user's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from release import repair

ROOT = Path(__file__).parent.parent
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
GLIBC, MACHINE = "2.28", "x86_64"
ZIG, ZIG_CACHE = (sys.executable, "-m", "ziglang"), BUILD / "zig"
TARGET = f"{MACHINE}-linux-gnu.{GLIBC}"
OF_GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    if (sys.platform, platform.machine()) != ("linux", MACHINE):
        raise SystemExit(f"the wheel is built on Linux on {MACHINE}, got {platform.platform()}")
    os.environ |= {
        "BAPO_REQUIRE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "all",
        "NVCC": shlex.join([str(nvcc()), "--compress-mode=size"]),
        "CXXFLAGS": "",
        "LDFLAGS": shlex.join(link_flags()),
        "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip(),
    }
    # Builds the wheel in the tree of the source distribution that it has built before.
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={BUILD}", str(ROOT)]
    subprocess.run(command, check=True)
    (sdist,), (wheel,) = BUILD.glob("*.tar.gz"), BUILD.glob("*.whl")
    shutil.rmtree(DIST, ignore_errors=True)
    print(repair.repair(wheel, DIST))
    shutil.copy(sdist, DIST)


def nvcc() -> Path:
    """nvcc of the wheel nvidia-cuda-nvcc, which has no launcher."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else []
    found = [path for place in places or [] for path in Path(place).glob("cu*/bin/nvcc")]
    if not found:
        raise SystemExit("nvcc must be installed (requirements/wheel.txt)")
    return found[0]


def link_flags() -> list[str]:
    """So that the library needs nothing newer than glibc 2.28, and shows nothing of its own."""
    exported = BUILD / "nothing.map"
    exported.write_text("{ local: *; };\n")
    flags = ["-Wl,-s", "-Wl,--gc-sections", f"-Wl,--version-script={exported}"]
    flags += ["-Wl,-z,defs", "-static-libstdc++"]  # defs: no symbol that is newer may be left over
    if platform.libc_ver() == ("glibc", GLIBC):
        return flags
    flag = BUILD / "glibc_2_28.o"
    source = ROOT / "release" / "glibc_2_28.c"
    run(*ZIG, "cc", "-target", TARGET, "-c", "-fPIC", str(source), "-o", str(flag), env=of_zig())
    libraries = [f"-l:{name}" for name in OF_GLIBC]
    needed = ["-Wl,--push-state,--no-as-needed", *libraries, "-Wl,--pop-state"]
    return [*flags, str(flag), f"-L{stubs_of_glibc()}", *needed]


def stubs_of_glibc() -> Path:
    """Shared libraries with the symbols of glibc 2.28 and no code, as zig makes for its linker."""
    source = BUILD / "empty.c"
    source.write_text("")
    library = f"-femit-bin={BUILD / 'empty.so'}"
    run(
        *(*ZIG, "build-lib", "-dynamic", "-lc", "-target", TARGET, library, str(source)),
        env=of_zig(),
    )
    (libc,) = ZIG_CACHE.rglob("libc.so.6")
    return libc.parent


def of_zig() -> dict[str, str]:
    """zig keeps what it makes in a folder of its own, where the libraries are then found."""
    cache = str(ZIG_CACHE)
    return os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}


def run(*command: str, **options) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


if __name__ == "__main__":
    main()
