"""Builds and tests the package with other versions of Python, torch and Triton.

``make versions`` names them. Each has an environment and a clone of the last commit in
``build/versions``; what they print last is the table of ``docs/internals/compatibility.md``.
Imports the standard library alone, as any interpreter may run it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# The fast tests, and all of torch.compile.
OPTIONS = ["-q", "-n2", "--dist=loadgroup", "--hypothesis-profile=quick", "-m=not slow or compile"]
LOSSES = ("compile", "linear", "log_probs", "loss", "policies")
# The other versions in requirements/ need Python 3.11;
PINS = re.findall(r"^pytest(?:-xdist)?==.*", (ROOT / "requirements/all.in").read_text(), re.M)
TOOLS = ["setuptools>=77", "numpy", "hypothesis", "rich", "typer", *PINS]
COLUMNS = ["Python", "torch", "Triton", "NumPy", "tests passed", "of torch.compile"]
FACTS = """
import importlib.metadata, platform, torch
versions = {d.name: d.version for d in importlib.metadata.distributions()}
others = (versions.get(name, "") for name in ("triton", "numpy"))
print(platform.python_version(), torch.__version__, *others, sep=",")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="python3.10,torch==2.10.0,...")
    parser.add_argument("--losses", action="store_true", help="and torch.compile alone")
    parser.add_argument("--keep", action="store_true", help="leave build/versions as it is")
    given = parser.parse_args()
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    for version, python in [(name, interpreter(name.split(",")[0])) for name in given.versions]:
        print(f"== {version}", flush=True)
        folder = ROOT / "build" / "versions" / re.sub(r"\W+", "_", version)
        try:
            table.append(tested(folder, python, version.split(",")[1:], given.losses))
        finally:
            if not given.keep:
                shutil.rmtree(folder, ignore_errors=True)
    print(f"Commit {run('git', 'describe', '--always', stdout=subprocess.PIPE, cwd=ROOT)}")
    print("\n".join(f"| {' | '.join(row)} |" for row in table))
    if any("failed" in cell for row in table for cell in row):
        raise SystemExit("tests failed")


def interpreter(name: str) -> str:
    """Its path, also where ``name`` is a command of pyenv, which runs no version but the chosen."""
    command = [name, "-c", "import sys; print(sys.executable)"]
    env = os.environ | {"PYENV_VERSION": name.removeprefix("python")}
    try:
        return subprocess.check_output(command, env=env, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"{name} must be on the path, or among the versions of pyenv") from None


def tested(folder: Path, base: str, packages: list[str], losses: bool) -> list[str]:
    """The row of the table: versions, and what the tests of the last commit have found."""
    tree, report, python = folder / "tree", folder / "tests.xml", folder / "env" / "bin" / "python"
    run(base, "-m", "venv", folder / "env")
    run(python, "-m", "pip", "install", "-q", "--no-compile", *packages, *TOOLS)
    shutil.rmtree(tree, ignore_errors=True)
    run("git", "clone", "-q", ROOT, tree)
    # The CUDA kernels take minutes to compile, and no test here needs them.
    env = {"PYTHONPATH": str(tree), "BAPO_REQUIRE_NATIVE": "1", "NVCC": "false"}
    # What the compiler of another torch has written is not for this one.
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    run(python, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=env)
    files: list[str | Path] = [f"tests/test_{name}.py" for name in LOSSES]
    if not losses:
        files = sorted(path.relative_to(tree) for path in tree.glob("tests/test_*.py"))
    tests = "-m", "pytest", *OPTIONS, f"--junitxml={report}", *files
    run(python, *tests, fine=(0, 1), cwd=tree, env=env)  # 1: tests have failed
    cases = list(ElementTree.parse(report).iter("testcase"))
    of_compile = [case for case in cases if case.get("classname") == "tests.test_compile"]
    facts = run(python, "-c", FACTS, cwd=tree, env=env, stdout=subprocess.PIPE)
    return [*facts.strip().split(","), counted(cases), counted(of_compile)]


def counted(cases: list[ElementTree.Element]) -> str:
    """By their outcome; an error before or after a test is a failure."""
    outcomes = ["".join(part.tag for part in case) for case in cases]
    skipped = sum("skipped" in outcome for outcome in outcomes)
    failed = sum("failure" in outcome or "error" in outcome for outcome in outcomes)
    passed = f"{len(cases) - skipped - failed:,}"
    return f"{passed}, {failed} failed" if failed else passed


def run(*command: str | Path, fine: tuple[int, ...] = (0,), **options: Any) -> str:
    """What the command writes, where ``stdout`` is a pipe; it ends with one of the ``fine``."""
    options["env"] = {**os.environ, **options.get("env", {})}
    done = subprocess.run(command, text=True, **options)
    if done.returncode not in fine:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return done.stdout


if __name__ == "__main__":
    main()
