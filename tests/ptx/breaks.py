"""Breaks the compiled Triton kernels, one place at a time, and reports what notices.

    TRITON_PTX=80 python tests/ptx/breaks.py [--only KERNELS] [--kinds BREAKS]

A break is a change of one statement of PTX: a barrier that is left out, an atomic that orders
nothing, a comparison that is off by one, a warp that returns at once. One that survives shows that
the tests miss something, or that nothing depends on it, as on many comparisons with a rounded size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from ptx import backend, executor  # noqa: E402, F401  (the first has Triton's tests use it)

MOST_SECONDS = 300
# What runs each kernel.
RUNS = {
    "_row_pass_kernel": "test_triton_rows.py",
    "_row_gradient_kernel": "test_triton_rows.py",
    "_scale_kernel": "test_triton_rows.py",
    "_sequence_mean_kernel": "test_triton_sequences.py",
    "_prepare_kernel": "test_prepare.py",
    "_policy_kernel": "test_policies.py",
    "_contributions_kernel": "test_search.py",
    "_table_kernel": "test_search.py",
    "_solve_kernel": "test_search.py",
    "_multiply_sets_kernel": "test_triton_sets.py",
    "_sets_dhidden_kernel": "test_triton_sets.py",
    "_sets_dweight_kernel": "test_triton_sets.py",
}
# Patterns of statements, and what takes their place.
BREAKS = {
    "barrier left out": (r"\bbar\.sync\s+0;", ""),
    "atomic that orders nothing": (r"(\batom\.global\.gpu\.)acq_rel", r"\1relaxed"),
    "comparison off by one": (r"(\bsetp\.)(lt|le|gt|ge)(\.[su]\d\d)", None),
    "warp that returns at once": (r"\$L__func_begin0:", "setp.ge.u32 %p0, %tid.x, 32; @%p0 ret;"),
}
OFF_BY_ONE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


class Break(NamedTuple):
    kernel: str
    kind: str
    index: int  # of the statement among those of the kind

    def applied(self, ptx: str) -> str | None:
        """The broken text; None if it has no such statement."""
        pattern, by = BREAKS[self.kind]
        found = list(re.finditer(pattern, ptx))
        if self.index >= len(found):
            return None
        place = found[self.index]
        if by is None:
            by = rf"\g<1>{OFF_BY_ONE[place[2]]}\g<3>"
        return ptx[: place.start()] + place.expand(by) + ptx[place.end() :]


class FirstFailure:
    """A plugin of pytest."""

    text: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.text is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.text = (crash.message if crash else str(report.longrepr)).splitlines()[0]


def run_tests(
    each: Break | None, tests: str, answer: multiprocessing.connection.Connection
) -> None:
    """Answers with the message of the first failure, and how often the break was in place."""
    load, applied = executor.load, 0

    def load_broken(ptx: str) -> executor.Loaded:
        nonlocal applied
        if each is not None and re.search(rf"\.entry\s+{each.kernel}\(", ptx):
            broken = each.applied(ptx)
            applied += broken is not None
            ptx = broken or ptx
        return load(ptx)

    executor.load = load_broken
    failure = FirstFailure()
    options = [
        "-x",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-k",
        "triton",
        "-m",
        "not slow",
    ]
    pytest.main([*options, str(TESTS / tests)], plugins=[failure])
    answer.send((failure.text, applied))


def verdict(each: Break | None, tests: str) -> tuple[str | None, int]:
    """Of a fork, which has all imports."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(each, tests, sends))
    process.start()
    sends.close()
    try:
        return receives.recv() if receives.poll(MOST_SECONDS) else ("does not end", 1)
    except EOFError:
        return "takes the process with it", 1
    finally:
        process.kill()


def breaks_of(kernel: str, kinds: str) -> Iterator[tuple[Break, str | None]]:
    """With what notices each; the variants of a kernel are broken at the same place together."""
    for kind in filter(re.compile(kinds).search, BREAKS):
        for index in range(1_000):
            each = Break(kernel, kind, index)
            failure, applied = verdict(each, RUNS[kernel])
            if not applied:
                break
            yield each, failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a pattern of kernels")
    parser.add_argument("--kinds", default="", help="a pattern of breaks")
    options = parser.parse_args()
    chosen = [kernel for kernel in RUNS if re.search(options.only, kernel)]
    for tests in sorted({RUNS[kernel] for kernel in chosen}):
        if (failure := verdict(None, tests)[0]) is not None:
            sys.exit(f"unbroken: {tests}: {failure}")
    for kernel in chosen:
        counts: dict[str, Counter[str]] = {}
        for each, failure in breaks_of(kernel, options.kinds):
            print(f"{kernel}, {each.kind} {each.index}: {failure or 'SURVIVED'}", flush=True)
            counts.setdefault(each.kind, Counter())["died" if failure else "survived"] += 1
        for kind, count in counts.items():
            print(f"{kernel}, {kind}: {dict(count)}", flush=True)


if __name__ == "__main__":
    main()
