"""On what the wheel was installed, and with what the kernels were compiled and emulated.

``python -m release.compatibility`` has one command per kind of test; each appends a record to
``release/compatibility.jsonl``, from which ``page`` writes ``docs/internals/compatibility.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import triton
import typer

from benchmarks.records import environment

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "release" / "compatibility.jsonl"
PAGE = ROOT / "docs" / "internals" / "compatibility.md"
ON_HOST = ("tests/test_cuda_on_host.py", "tests/test_sets_on_host.py")
INTERPRETED = ("-m=not slow", "-k=triton", *map(str, sorted(ROOT.glob("tests/test_*.py"))))
Record = dict[str, Any]
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def install(
    wheel: Path,
    others: Annotated[list[str] | None, typer.Argument(help="as typer==0.19.0")] = None,
    *,
    torch: Annotated[str, typer.Option(help="version of torch")],
    python: Annotated[str, typer.Option(help="an interpreter")] = sys.executable,
    folder: Annotated[Path | None, typer.Option(help="an environment to keep and to reuse")] = None,
) -> None:
    """Installs the wheel into an environment of its own, without a compiler, and probes it."""
    with tempfile.TemporaryDirectory() as temporary:
        place = (folder or Path(temporary)).absolute()
        if not (place / "bin" / "python").exists():
            run(python, "-m", "venv", str(place))
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
        run(*pip, f"torch=={torch}")
        run(*pip, "--force-reinstall", "--no-deps", str(wheel))
        run(*pip, f"{wheel}[cli]", *(others or []))
        probe = [str(place / "bin" / "python"), str(ROOT / "release" / "probe.py")]
        facts = json.loads(run(*probe, cwd=temporary, env={"PATH": "", "HOME": temporary}))
    content = wheel.read_bytes()
    of_wheel = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    append({"kind": "installed", "wheel": wheel.name, **of_wheel, **facts})


@app.command()
def cuda() -> None:
    """Reads what nvcc made of the CUDA kernels, and runs them on this CPU, thread by thread."""
    usage = run(str(cuobjdump()), "-res-usage", "bapo_kernels/_C.abi3.so")
    report = json.loads((ROOT / "bapo_kernels" / "_build.json").read_text())
    stacks = defaultdict(list)
    for target, part in re.findall(r"arch = sm_(\d+)\n(.*?)(?=^arch = |\Z)", usage, re.M | re.S):
        kernels = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", part)
        stacks[f"cuda:{target}"] += [int(stack) + int(local) for stack, local in kernels]
    facts = {"compiler": f"nvcc {report['cuda'].partition(' ')[0]}", "passed": tests(*ON_HOST)}
    append({"kind": "cuda", **facts, "targets": {k: counted(v) for k, v in stacks.items()}})


def cuobjdump() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@app.command(name="triton")
def of_triton(
    version: str,
    numpy: Annotated[str, typer.Option(help="version of NumPy")] = np.__version__,
) -> None:
    """Runs the Triton kernels in the interpreter of a version, and compiles them for each GPU."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"--target={folder}"]
        run(*pip, f"triton=={version}", f"numpy=={numpy}")
        env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
        facts = {"numpy": numpy, "passed": tests(*INTERPRETED, env=env), "targets": {}}
        for target in GPUS:
            output = run(sys.executable, "tests/compile_triton.py", target, "extremes", env=env)
            kernels = json.loads(output)["kernels"]
            in_loops = ["LDL" in str(k["in_loops"]) or "STL" in str(k["in_loops"]) for k in kernels]
            made = counted([kernel["stack"] for kernel in kernels])
            facts["targets"][target] = made | {"spilling in loops": sum(in_loops)}
    torch = environment()["torch"]
    append({"kind": "triton", "compiler": f"Triton {version}", "torch": torch, **facts})


def tests(*arguments: str, **options: Any) -> int:
    """How many have passed, if none has failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "--dist=loadgroup"]
    return int(re.search(r"(\d+) passed", run(*command, *arguments, **options))[1])


def counted(stacks: list[int]) -> dict[str, int]:
    """``stacks``: bytes of stack and spills of each kernel."""
    return {"kernels": len(stacks), "spilling": sum(stack > 0 for stack in stacks)}


@app.command()
def page() -> None:
    """Writes the page from the last record of each kind."""
    PAGE.write_text(page_of(load()))


GPUS = {
    "cuda:80": "NVIDIA sm_80: A100; also sm_86 (A10, RTX 30)",
    "cuda:89": "NVIDIA sm_89: L4, L40S, RTX 40",
    "cuda:90": "NVIDIA sm_90: H100, H200",
    "cuda:100": "NVIDIA sm_100: B200",
    "cuda:103": "NVIDIA sm_103: B300",
    "cuda:120": "NVIDIA sm_120: RTX 50, RTX PRO 6000",
    "hip:gfx942": "AMD gfx942: MI300X",
}
SERVED_BY = {"cuda:89": "cuda:80", "cuda:103": "cuda:100"}  # by binaries of their generation
TEXT = """# Compatibility

On what the wheel has been installed and run, and for which GPUs the kernels have been compiled
and emulated. This page is written by `python -m release.compatibility page` from the records in
`release/compatibility.jsonl`; `python -m release.compatibility --help` has the commands that make
them.

The wheel is for Linux on x86-64 with glibc 2.28 or later, Python 3.10 or later and torch 2.10 or
later. One file serves all of them: the library is built for torch's stable ABI, and does not use
Python's. It has {wheel:.1f} MB, and the library takes {library:.1f} MB where it is installed.
Elsewhere the package installs from source ([Installation](../install.md)).

## Python and torch

Each row is a fresh environment without a compiler, into which the wheel was installed and in
which `python -m bapo_kernels validate` compared every kernel that can run with the reference in
float64. The machine has no GPU. With a CUDA build of torch the table says whether the library has
found the function of torch that tells the current stream, the only one that it needs of it.

{installed}

## Triton

Each row is a version that torch 2.10 or a later one brings along: tests in its interpreter, and
kernels that it has compiled. The interpreter is for tests alone; that of Triton 3.6 fails with
NumPy 2.4 and later.

{triton}

## GPUs

**No kernel has run on a GPU yet.** Compiled means: every kernel, of Triton's the smallest and the
largest variants, and how many of them spill registers to memory or use the stack. Emulated means:
run on a CPU and compared with the reference in float64, the CUDA kernels thread by thread under
adversarial schedules, which {emulated:,} tests have passed, the Triton kernels in Triton's
interpreter and, for sm_80 and sm_90, as PTX under a race detector.

{compiled}

The CUDA kernels come with CUDA {cuda}, which needs NVIDIA's driver 580 or later, whatever the
CUDA version of torch. PTX of the newest architecture is in the wheel too, for GPUs that are
newer. Triton compiles for the GPU it finds, and comes with torch.

{sources}
"""


def page_of(records: list[Record]) -> str:
    installed = last(records, "installed", "python", "torch")
    (cuda,) = last(records, "cuda", "compiler")
    of_triton = last(records, "triton", "compiler")
    return TEXT.format(
        wheel=installed[-1]["bytes"] / 1e6,
        library=installed[-1]["bytes of the library"] / 1e6,
        installed=table(map(row_of_install, installed)),
        triton=table(map(row_of_triton, of_triton)),
        compiled=table(row_of_target(target, cuda, of_triton[-1]) for target in GPUS),
        emulated=cuda["passed"],
        cuda=cuda["compiler"].removeprefix("nvcc "),
        sources=sources(installed, [cuda], of_triton),
    )


def table(rows: Iterable[dict[str, str]]) -> str:
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def last(records: list[Record], kind: str, *keys: str) -> list[Record]:
    """The last record of each, ordered by version."""
    found = {tuple(r[key] for key in keys): r for r in records if r["kind"] == kind}
    return [found[key] for key in sorted(found, key=lambda key: [numbers(part) for part in key])]


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def row_of_install(record: Record) -> dict[str, str]:
    report, checks = record["report"], record["validate"]
    failed = checks["exit status"] != 0
    stream = "found" if record["finds the stream"] else "not found"
    return {
        "Python": record["python"],
        "torch": record["torch"],
        "Triton": record.get("triton", ""),
        "typer": record.get("typer", ""),
        "system": record["libc"],
        "CPU kernels": report.get("cpu kernels", "absent"),
        "`validate`": f"{checks['checks']} checks, {'FAILED' if failed else 'passed'}",
        "CUDA backend": report["backend cuda"],
        "stream of torch": stream if record["cuda of torch"] else "",
    }


def row_of_triton(record: Record) -> dict[str, str]:
    targets = record["targets"]
    names = ", ".join(map(architecture, targets))
    return {
        "Triton": record["compiler"].removeprefix("Triton "),
        "torch": record["torch"],
        "NumPy": record["numpy"],
        "interpreted": f"{record['passed']} tests passed",
        "compiled": f"{names}: {described(*targets.values())}",
    }


def row_of_target(target: str, *records: Record) -> dict[str, str]:
    row = {"GPU": GPUS[target]}
    for record, name in zip(records, ("CUDA", "Triton"), strict=True):
        made, by = record["targets"].get(target), SERVED_BY.get(target)
        row[name] = f"the binary for {architecture(by)}" if by else "not compiled here"
        if made:
            row[name] = f"{record['compiler']}: {described(made)}"
    return row


def architecture(target: str) -> str:
    return target.replace("cuda:", "sm_").removeprefix("hip:")


def described(*made: dict[str, int]) -> str:
    spilling = sum(one["spilling"] for one in made)
    in_loops = sum(one.get("spilling in loops", 0) for one in made)
    spills = f"{spilling} spill, {in_loops or 'none'} in a loop" if spilling else "no spill"
    return f"{sum(one['kernels'] for one in made)} kernels, {spills}"


def sources(*of_kinds: list[Record]) -> str:
    made = [record for records in of_kinds for record in records]
    machine = " and ".join(sorted({record["machine"] for record in made}))
    commits = {
        r["kind"]: sorted({x["commit"] for x in made if x["kind"] == r["kind"]}) for r in made
    }
    return f"{machine}; " + "; ".join(f"{k}: commit {', '.join(v)}" for k, v in commits.items())


def load() -> list[Record]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def append(facts: Record) -> None:
    print(json.dumps(facts, indent=2))
    machine = {key: environment()[key] for key in ("date", "machine")}
    with RECORDS.open("a") as file:
        file.write(json.dumps(facts | machine | {"commit": commit()}) + "\n")


def commit() -> str:
    """Marked as dirty if anything but the records has changed since."""
    described = run("git", "describe", "--always", "--abbrev=10").strip()
    paths = ["--", ".", f":!{RECORDS.relative_to(ROOT)}"]
    changed = run("git", "status", "--porcelain", "--untracked-files=no", *paths)
    return f"{described}-dirty" if changed else described


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **{"cwd": ROOT} | options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    app()
