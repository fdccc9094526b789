"""``make mutants``: faults that tests must notice, each put into a copy of the tree by itself.

``MUTANTS="NAME ..."`` chooses some. Each of the TOML files has tables with

- ``effect``: what a user would see;
- ``tests``: of which one must fail: variables, files and options of pytest;
- ``file``, ``old``, ``new``: the change. ``old`` occurs once, whatever its white space;
- ``library = true``: if the tests need the CPU library to be built again.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import tomllib
from cuda_on_host.build import KEPT, ROOT, build

TREE = ROOT / "build/mutants"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "wheels")
LIBRARY = {"BAPO_REQUIRE_NATIVE": "1", "BAPO_PORTABLE": "1", "NVCC": "false"}
MINUTES = 15


def execute(*command, **variables):
    shared = {"PYTHONPATH": str(TREE), "PTX_MACHINE": str(ROOT / "build")}
    options = dict(cwd=TREE, env=os.environ | shared | variables, timeout=60 * MINUTES)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)


def noticed(mutant):
    """The test that fails in a copy with this mutant, and its message; otherwise raises."""
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=LEFT_OUT)
    if KEPT.exists():  # what the mutant does not change is not compiled again
        shutil.copytree(KEPT, TREE / KEPT.relative_to(ROOT))
    path = TREE / mutant["file"]
    old = r"\s+".join(map(re.escape, mutant["old"].split()))
    text, count = re.subn(old, lambda _: mutant.get("new", ""), path.read_text())
    if count != 1:
        raise ValueError(f"does not apply: {mutant['file']} has the old text {count} times")
    path.write_text(text)
    if mutant.get("library"):
        execute("setup.py", "-q", "build_ext", "--inplace", **LIBRARY).check_returncode()
    words = shlex.split(mutant["tests"])
    variables = dict(word.split("=") for word in words if re.match(r"[A-Z_]+=", word))
    options = [word for word in words if word.partition("=")[0] not in variables]
    result = execute("-m", "pytest", "-xq", "--junitxml=result.xml", *options, **variables)
    last = result.stdout.strip().rpartition("\n")[2]
    report = ElementTree.parse(TREE / "result.xml")
    for case in report.iter("testcase"):  # what fails before a test is an <error>
        if result.returncode == 1 and (failure := case.find("failure")) is not None:
            return case.get("name"), failure.get("message").splitlines()[0]
    raise ValueError(f"not noticed: {last}")


def main(*names):
    files = sorted(Path(__file__).parent.glob("*.toml"))
    mutants = {name: m for path in files for name, m in tomllib.loads(path.read_text()).items()}
    chosen = {name: mutants[name] for name in names or mutants}
    os.environ.setdefault("EMULATE_ARCH", "90")
    if any("on_host" in mutant["tests"] for mutant in chosen.values()):
        with TemporaryDirectory() as folder:
            build(Path(folder))
    failed = 0
    for name, mutant in chosen.items():
        started = time.monotonic()
        try:
            line = ": ".join(noticed(mutant))
        except (ValueError, OSError, subprocess.SubprocessError, ElementTree.ParseError) as error:
            failed += 1
            line = f"FAILED, {error}"
        print(f"{name:26} {time.monotonic() - started:4.0f} s  {line[:200]}", flush=True)
    sys.exit(f"{failed} of {len(chosen)} were not noticed" if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
