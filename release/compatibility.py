"""On what the wheel was installed, and with what the kernels were compiled and emulated.

``python -m release.compatibility`` has one command per kind of test; each appends a record to
``release/compatibility.jsonl``, from which ``page`` fills the tables of
``docs/internals/compatibility.md``.
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
from benchmarks.tables import filled

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
    """Fills the tables of the page from the last record of each kind."""
    PAGE.write_text(page_of(load()))


GPUS = {
    "cuda:80": "sm_80, sm_86: A100, A10, RTX 30",
    "cuda:89": "sm_89: L4, L40S, RTX 40",
    "cuda:90": "sm_90: H100, H200",
    "cuda:100": "sm_100: B200",
    "cuda:103": "sm_103: B300",
    "cuda:120": "sm_120: RTX 50, RTX PRO 6000",
    "hip:gfx942": "gfx942: MI300X",
}
SERVED_BY = {"cuda:89": "cuda:80", "cuda:103": "cuda:100"}  # by binaries of their generation


def page_of(records: list[Record]) -> str:
    return filled(PAGE.read_text(), blocks(records))


def blocks(records: list[Record]) -> dict[str, str]:
    installed = last(records, "installed", "python", "torch")
    (cuda,) = last(records, "cuda", "compiler")
    of_triton = last(records, "triton", "compiler")
    tests = last(records, "tests", "torch", "python", "triton")
    return {
        "installed": table(map(row_of_install, installed)),
        "tests": table(map(row_of_tests, tests)),
        "triton": table(map(row_of_triton, of_triton)),
        "compiled": table(row_of_target(target, cuda, of_triton[-1]) for target in GPUS),
        "records": f"{cuda['passed']} tests ran the CUDA kernels on a CPU, thread by thread under "
        f"adversarial schedules. {commits(installed, tests, [cuda], of_triton)}.",
    }


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
    wrong = [
        *["no CPU kernels"] * ("cpu kernels" not in report),
        *["stream not found"] * (not record["finds the stream"] and bool(record["cuda of torch"])),
    ]
    passed = "FAILED" if checks["exit status"] else str(checks["checks"])
    return {
        "Python": record["python"],
        "torch": record["torch"],
        "Triton": record.get("triton", ""),
        "glibc": record["libc"].removeprefix("glibc "),
        "checks passed": ", ".join([passed, *wrong]),
    }


def row_of_tests(record: Record) -> dict[str, str]:
    def outcome(counts: Record) -> str:
        return f"{counts['passed']}{f', {n} FAILED' if (n := counts['failed']) else ''}"

    return {
        "Python": record["python"],
        "torch": record["torch"],
        "Triton": record["triton"],
        "NumPy": record["numpy"],
        "tests passed": outcome(record),
        "of torch.compile": outcome(record["torch.compile"]),
    }


def row_of_triton(record: Record) -> dict[str, str]:
    return {
        "Triton": record["compiler"].removeprefix("Triton "),
        "NumPy": record["numpy"],
        "tests passed": str(record["passed"]),
        "kernels (spilling)": described(*record["targets"].values()),
    }


def row_of_target(target: str, *records: Record) -> dict[str, str]:
    row = {"GPU": GPUS[target]}
    for record in records:
        made, by = record["targets"].get(target), SERVED_BY.get(target)
        row[record["compiler"]] = (
            described(made) if made else f"as {by.replace('cuda:', 'sm_')}" if by else ""
        )
    return row


def described(*made: dict[str, int]) -> str:
    spilling = sum(one["spilling"] for one in made)
    in_loops = sum(one.get("spilling in loops", 0) for one in made)
    loops = f", {in_loops} in loops" if in_loops else ""
    return f"{sum(one['kernels'] for one in made)} ({spilling}{loops})"


def commits(*of_kinds: list[Record]) -> str:
    kinds = {records[0]["kind"]: {record["commit"] for record in records} for records in of_kinds}
    words = (f"{kind} {', '.join(sorted(of))}" for kind, of in kinds.items())
    return f"Commits: {'; '.join(words)}"


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
