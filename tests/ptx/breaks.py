"""Breaks the compiled Triton kernels, one place at a time, and reports which check notices.

    TRITON_PTX=80 python tests/ptx/breaks.py [--only KERNELS] [--kinds KINDS] [--most N]

The tests run once unbroken. Then each break runs those that execute what it changes, the fastest
first, until one fails. Its place is the n-th statement of a kind that Triton makes of one place in
the source, in all variants of the kernel. There are no fences to weaken: Triton emits none. What
survives shows that the tests lack a case, or that nothing depends on the statement.
"""

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from forked import in_fork  # noqa: E402  (a fork has all that was compiled)

from ptx import backend, executor  # noqa: E402, F401  (the first has Triton's tests use it)

NAMES = "test_(triton_[rs].*|prepare|search|log_probs|policies|loss|sampling_mask|linear)"
FILES = [str(file) for file in TESTS.glob("*.py") if re.fullmatch(NAMES, file.stem)]
LABEL = "label's load behind the barrier"  # in the source of the row pass
MOVED = r"(\n +)(tl\.debug_barrier.*)", r"\1\2\1z = row_math.label_logit(row, label, V)"
# Patterns of statements, and what takes their place.
BREAKS = {
    "barrier left out": (r"\bbar\.sync\s+0;", ""),
    "atomic orders nothing": (r"(\batom\.\S*)acq_rel", r"\1relaxed"),
    "atomic only releases": (r"(\batom\.\S*)acq_rel", r"\1release"),
    "atomic only acquires": (r"(\batom\.\S*)acq_rel", r"\1acquire"),
    "atomic of its block alone": (r"(\batom\.global\.)gpu", r"\1cta"),
    "warp returns": (r"reqntid (?!32\b)[^$]*\S+:", r"\g<0> setp.lt.u32 %p0, %tid.x, 32; @%p0 ret;"),
    LABEL: (r"\A(?=[\s\S]*\.entry _row_pass_kernel\()", ""),
    "load without its mask": (r"@!?%p\d+ (ld\.global)", r"\1"),
    "store without its mask": (r"@!?%p\d+ (st\.global)", r"\1"),
    "store left out": (r"(?:@!?%p\d+ )?\bst\.global[^;]*;", ""),
    "comparison, or equal": (r"(\bsetp\.[lg])t(\.[su]\d\d)", r"\1e\2"),
    "comparison, not equal": (r"(\bsetp\.[lg])e(\.[su]\d\d)", r"\1t\2"),
}
CHECKS = r"ExecutionError: .*?(race|never written|no tensor|bounds|misaligned|wait|mask|end)"
CHECKS += "|^does not (end)|^takes the (process)"  # of in_fork


class Breaks:
    """A plugin of pytest, in the place of its loop over tests."""

    def __init__(self, options):
        self.options, self.failure = options, ""
        self.texts, self.changed, load = set(), {}, executor.load
        executor.load = lambda text: self.texts.add(text) or load(self.changed.get(text, text))

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failure:
            first = re.search(r"^E +(.*)", report.longreprtext, re.MULTILINE)[1]
            self.failure = f"{report.nodeid.split('::')[-1]}: {first}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        self.tests = sorted(map(self.unbroken, session.items), key=lambda test: test[0])
        kernels = defaultdict(set)
        for text in set().union(*[texts for _, _, texts in self.tests]):
            kernels[re.search(r"\.entry\s+(\w+)\(", text)[1]].add(text)
        for kernel in filter(re.compile(self.options.only).search, sorted(kernels)):
            for kind in filter(re.compile(self.options.kinds).search, BREAKS):
                self.break_all(kernel, kind, kernels[kernel])
        return True

    def unbroken(self, item):
        """The seconds of a test, the test, and the texts of the kernels that it executes."""
        self.texts, begin = set(), time.perf_counter()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        assert not self.failure, f"unbroken: {self.failure}"
        return time.perf_counter() - begin, item, frozenset(self.texts)

    def break_all(self, kernel, kind, texts):
        places, checks = defaultdict(list), Counter()
        for text in texts:
            counts = Counter()
            for at in re.finditer(BREAKS[kind][0], text):
                source = text[: at.start()].rpartition(".loc")[2].partition("// ")[2].split("\n")[0]
                counts[source] += 1
                places[f"{source} {counts[source]}"].append(at)
        tried = min(len(places), self.options.most or len(places))
        for i in range(tried):  # spread evenly
            place = sorted(places)[(2 * i + 1) * len(places) // (2 * tried)]
            begin = time.perf_counter()
            failure = in_fork(partial(self.run, kind, places[place]), 600)
            check = re.search(CHECKS, failure)
            check = check[check.lastindex] if check else "wrong numbers" if failure else "SURVIVED"
            checks[check] += 1
            where = f"{kernel}, {kind}, {place}, {time.perf_counter() - begin:.1f} s"
            print(f"{where}: {check}: {failure}", flush=True)
        print(f"= {kernel}, {kind}, {tried} of {len(places)}: {dict(checks)}", flush=True)

    def run(self, kind, places):
        for place in places:
            text, begin, end = place.string, *place.span()
            self.changed[text] = text[:begin] + place.expand(BREAKS[kind][1]) + text[end:]
        if kind == LABEL:
            from bapo_kernels.backends.triton import row_pass

            for kernel in (row_pass._kernel_of_rows, row_pass._kernel_of_sets):
                kernel._function._unsafe_update_src(re.sub(*MOVED, kernel._function.src))
                kernel._function.device_caches.clear()
                kernel.compiled.clear()
        for _, item, texts in self.tests:
            if texts & self.changed.keys() and not self.failure:
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.failure


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a pattern of kernels")
    parser.add_argument("--kinds", default="", help="a pattern of kinds")
    parser.add_argument("--most", type=int, help="places of a kernel and kind, else all")
    breaks = Breaks(parser.parse_args())
    torch.set_num_threads(1)  # threads do not outlive a fork
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*quiet, "-k", "triton", "-m", "not slow", *FILES], [breaks]))
