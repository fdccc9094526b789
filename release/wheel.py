"""Builds the source distribution, and from it the wheel: ``make wheel``.

The wheel runs on Linux on x86-64, with glibc 2.28, Python 3.10, torch 2.10 or later ones of each.
It is built on any such machine with a C++20 compiler: nvcc comes from PyPI. So do, with zig, the
symbols of glibc 2.28, against which the library is linked. libstdc++ is linked statically, because
that of the build machine may be newer than the user's. The objects are those of every other build.
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
GLIBC = "2.28"
OF_GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    environment = os.environ | {
        "BAPO_REQUIRE_CUDA": "1",
        "NVCC": os.environ.get("NVCC") or str(nvcc()),
        "LDFLAGS": shlex.join(link_flags()),
        "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip(),
    }
    # Builds the wheel in the tree of the source distribution that it has built before.
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={BUILD}", str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    (sdist,), (wheel,) = BUILD.glob("*.tar.gz"), BUILD.glob("*.whl")
    print(repair.repair(wheel, DIST))
    shutil.copy(sdist, DIST)


def nvcc() -> Path:
    """nvcc of the wheel nvidia-cuda-nvcc, which has no launcher."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else []
    found = [path for place in places or [] for path in Path(place).glob("cu*/bin/nvcc")]
    if not found:
        raise SystemExit("nvcc must be installed (requirements-wheel.txt) or named by NVCC")
    return found[0]


def link_flags() -> list[str]:
    """So that the library needs nothing newer than glibc 2.28, and shows nothing of its own."""
    exported = BUILD / "nothing.map"
    exported.write_text("{ local: *; };\n")
    flags = ["-Wl,-s", "-Wl,--gc-sections", f"-Wl,--version-script={exported}"]
    flags += ["-static-libstdc++"]
    if platform.libc_ver() == ("glibc", GLIBC):
        return flags
    flag = BUILD / "glibc_2_28.o"
    run("cc", "-c", "-fPIC", str(ROOT / "release" / "glibc_2_28.c"), "-o", str(flag))
    libraries = [f"-l:{name}" for name in OF_GLIBC]
    needed = ["-Wl,--push-state,--no-as-needed", *libraries, "-Wl,--pop-state"]
    return [*flags, str(flag), f"-L{stubs_of_glibc()}", *needed]


def stubs_of_glibc() -> Path:
    """Shared libraries with the symbols of glibc 2.28 and no code, as zig makes for its linker."""
    source, cache = BUILD / "empty.c", BUILD / "zig"
    source.write_text("")
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    run(
        *(sys.executable, "-m", "ziglang", "build-lib", "-dynamic", "-lc", "-target", target),
        *(f"-femit-bin={BUILD / 'empty.so'}", str(source)),
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)},
    )
    (libc,) = cache.rglob("libc.so.6")
    return libc.parent


def run(*command: str, **options) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


if __name__ == "__main__":
    main()
