"""Breaks the synchronisation of the CUDA kernels, one place at a time, and reports what notices.

    python tests/cuda_on_host/breaks.py [--seeds N] [--only PATTERN]

Each break of breaks.diff is applied to a copy of csrc, on which the tests of the emulation run. A
break that survives shows that these tests miss something.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import helpers  # noqa: F401  (slow, so once for all breaks)
from cuda_on_host.build import HOST, KERNELS, ROOT, build, compile_kernels, link
from forked import first_failure, in_fork

TESTS = {
    "sampling_sets.cu": "test_sets_on_host.py",
    "head_sampling_sets.cu": "test_sets_on_host.py",
    "sampling_set_row.cuh": "test_sets_on_host.py",
}
MOST_SECONDS = 1_200  # of the tests under a break
# The units to compile again where a break is in a header.
INCLUDED_BY = {
    "row_math.cuh": ["row_pass_cluster.cu"],
    "cluster_plan.h": ["row_pass_cluster.cu"],
    "sampling_set_row.cuh": ["sampling_sets.cu", "head_sampling_sets.cu"],
    "../sequences.h": ["sequences.cu"],
    "../tokens.h": [f"{unit}.cu" for unit in KERNELS],
    "../policy_math.h": [f"{unit}.cu" for unit in KERNELS],
}


class Break(NamedTuple):
    """A change of a file, by its path from csrc/cuda: lines, and what takes their place."""

    name: str
    file: str
    hunks: list[tuple[list[str], list[str]]]

    @classmethod
    def parsed(cls, text):
        title, _, body = text.partition("\n")
        file, _, name = title.partition(": ")
        hunks = []
        for part in body.split("@@\n"):
            lines = [(line[0], line[1:].strip()) for line in part.splitlines()]
            hunks.append(tuple([line for sign, line in lines if sign != other] for other in "+-"))
        return cls(name, file, hunks)

    def applied(self, text):
        """The broken text; raises where a line to break is not there, or more than once."""
        lines = text.splitlines()
        for old, new in self.hunks:
            stripped = [line.strip() for line in lines]
            places = [i for i in range(len(lines)) if stripped[i : i + len(old)] == old]
            if len(places) != 1:
                raise ValueError("\n".join([f"found {len(places)} times, not once:", *old]))
            lines[places[0] : places[0] + len(old)] = new
        return "\n".join(lines) + "\n"


def all_breaks():
    _, *parts = re.split(r"^=== ", (HOST / "breaks.diff").read_text(), flags=re.MULTILINE)
    return [Break.parsed(part) for part in parts]


def tests_of(each):
    return TESTS.get(each.file, "test_cuda_on_host.py")


def verdict(library, tests, seeds):
    """The first test that fails, and why, or "SURVIVED"."""

    def failure():
        of_seeds = {"EMULATE_FIRST": "1", "EMULATE_SEEDS": str(seeds)}
        os.environ |= {"EMULATE_LIBRARY": str(library), **of_seeds}
        return first_failure("-k", "not breaks", str(ROOT / "tests" / tests))

    found = in_fork(failure, MOST_SECONDS)
    return f"died: {found.partition('::')[2] or found}" if found else "SURVIVED"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="a pattern of files and names")
    options = parser.parse_args()
    survivors = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build(folder)
        chosen = [each for each in all_breaks() if re.search(options.only, str(each[:2]))]
        for tests in sorted({tests_of(each) for each in chosen}):
            result = verdict(folder / "cuda_on_host.so", tests, options.seeds)
            if result != "SURVIVED":
                sys.exit(f"unbroken: {result}")
        for each in chosen:
            broken = folder / "broken"
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(ROOT / "csrc", broken / "csrc")
            source = broken / "csrc/cuda" / each.file
            source.write_text(each.applied(source.read_text()))
            for ptx in folder.glob("*.ptx"):
                shutil.copy(ptx, broken)
            objects = {path.stem: path for path in folder.glob("*.o")}
            for unit in INCLUDED_BY.get(each.file, [each.file]):
                unit = broken / "csrc/cuda" / unit
                objects[unit.stem] = compile_kernels(unit, broken, broken / "csrc")
            link(objects.values(), broken / "cuda_on_host.so")
            result = verdict(broken / "cuda_on_host.so", tests_of(each), options.seeds)
            print(f"{each.name:50} {result}", flush=True)
            survivors += [each.name] if result == "SURVIVED" else []
    sys.exit(f"SURVIVED: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
