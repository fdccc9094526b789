"""The suite on pytest-benchmark: ``pytest benchmarks``, a test per case and method.

A file has ``cases(device)``, pairs of a case and its methods, the yardstick first. When the first
test of a case runs, all of its methods that were selected are timed in turns; each test then gives
its samples to the plugin.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tabulate import tabulate

from bapo_kernels.debug import instruction_set

from .cases import SEQUENCES, Case
from .group import Group
from .methods.method import Method
from .records import environment

SIZES = {"tokens": "N", "vocab": "V", "hidden": "H", "dtype": "dtype"}
DTYPES = "float32", "bfloat16", "float16"
GROUP, BEGAN = pytest.StashKey[tuple[Case | None, Group | None]](), pytest.StashKey[float]()
YARDSTICKS, SHOWN = pytest.StashKey[dict[Case, Method]](), pytest.StashKey[dict[str, list[Any]]]()


class Samples:
    """A timer that a sample moves on."""

    __name__ = "in turns"  # in the JSON

    def __init__(self) -> None:
        self.now, self.left = 0.0, iter([0.0])

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def reset(self) -> None:
        """Keeps the time short, and so exact."""
        self.now = 0.0

    def next(self) -> None:
        """Lets the time of a sample pass."""
        self.now = next(self.left)


timer = Samples()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bapo_kernels")
    for name in SIZES:
        kind = {"choices": DTYPES} if name == "dtype" else {"type": int}
        group.addoption(f"--{name}", help="replaces that of the cases", **kind)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group.addoption("--device", choices=["cpu", "cuda"], default=device)
    group.addoption("--minutes", type=float, default=math.inf, help="start no case after this time")


def pytest_configure(config: pytest.Config) -> None:
    tokens, device = config.getoption("tokens"), config.getoption("device")
    if tokens is not None and (tokens < 1 or tokens % SEQUENCES):
        raise pytest.UsageError(f"--tokens must be a multiple of {SEQUENCES}, got {tokens}")
    if device == "cuda" and not (torch.cuda.is_available() or config.option.collectonly):
        raise pytest.UsageError("--device must be one that torch can use, got 'cuda'")
    config.stash[BEGAN], config.stash[GROUP] = time.monotonic(), (None, None)
    config.stash[YARDSTICKS], config.stash[SHOWN] = {}, {}
    # torch.compile warns of every graph break, and has a shape for every case.
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    torch._dynamo.config.cache_size_limit = 1_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = {field: metafunc.config.getoption(name) for name, field in SIZES.items()}
    found: dict[Case, dict[str, Method]] = {}
    for case, methods in metafunc.module.cases(metafunc.config.getoption("device")):
        found.setdefault(case.resized(**given), {}).update({m.name: m for m in methods})
    stash = metafunc.config.stash[YARDSTICKS]
    stash |= {case: next(iter(methods.values())) for case, methods in found.items()}
    tests = [
        pytest.param(
            case,
            method,
            id=f"{method.name}, {case.short_title}".replace(",", "").replace(" ", "-"),
            marks=pytest.mark.benchmark(group=case.title, timer=timer),
        )
        for case, methods in found.items()
        for method in methods.values()
    ]
    metafunc.parametrize(("case", "method"), tests)


def pytest_runtest_setup(item: pytest.Item) -> None:
    method = item.callspec.params["method"]
    if why := method.why_not(item.config.getoption("device")):
        pytest.skip(why)


@pytest.fixture
def measure(
    request: pytest.FixtureRequest, case: Case, method: Method, benchmark: Any
) -> Callable[[], None]:
    """Checks the method, and gives its samples to the plugin."""

    def run() -> None:
        group = _group_of(case, request, benchmark.enabled)
        benchmark.extra_info |= group.facts[method.name]
        if method.name in group.failures:
            raise group.failures[method.name]
        samples = group.samples.get(method.name, [0.0])
        timer.left = iter(samples)
        benchmark.pedantic(timer.next, setup=timer.reset, rounds=len(samples))
        if benchmark.enabled:
            request.config.stash[SHOWN].setdefault(case.title, []).append(benchmark)

    return run


def _group_of(case: Case, request: pytest.FixtureRequest, timed: bool) -> Group:
    """That of the case, made when its first test asks for it; the last one is let go."""
    stash, device = request.config.stash, request.config.getoption("device")
    if case != stash[GROUP][0]:
        stash[GROUP] = None, None
        minutes = request.config.getoption("minutes")
        if time.monotonic() - stash[BEGAN] > 60 * minutes:
            pytest.skip(f"{minutes:g} minutes are over")
        own = (i.callspec.params for i in request.session.items if hasattr(i, "callspec"))
        methods = [p["method"] for p in own if p.get("case") == case]
        # The yardstick is timed even if it was not selected.
        methods = list(dict.fromkeys([stash[YARDSTICKS][case], *methods]))
        methods = [m for m in methods if m.why_not(device) is None]
        # The capability of PyTorch may be limited by ATEN_CPU_CAPABILITY, and ours then is, too.
        limited = torch.backends.cpu.get_cpu_capability() == "AVX2"
        with instruction_set("avx2") if limited else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stash[GROUP] = case, Group(case, methods, device, timed)
    return stash[GROUP][1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables of what the plugin's own do not have."""
    for title, benchmarks in terminalreporter.config.stash[SHOWN].items():
        rows = [_shown(each.extra_info, each.stats["median"]) for each in benchmarks]
        rows.sort(key=lambda row: row["ms"])
        terminalreporter.write_line("")
        table = tabulate(rows, headers="keys", floatfmt=".3g", disable_numparse=[0])
        terminalreporter.write_line(f"{title}\n{table}")


def _shown(facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "": facts["method"],
        "ms": 1e3 * seconds,
        f"x {facts.get('yardstick', '')}": facts.get("multiple"),
        "GB/s": facts.get("GB_per_s"),
        "TFLOP/s": facts.get("TFLOP_per_s"),
        "peak MiB": facts["peak_bytes"] / 2**20 if "peak_bytes" in facts else None,
        "error": max(facts.get("value_error", 0.0), facts.get("gradient_error", 0.0)) or None,
        "targets": "; ".join(map(_judged, facts["targets"], facts["targets"].values())),
    }


def _judged(name: str, target: dict[str, Any]) -> str:
    word = "met" if target["met"] else "missed"
    return f"{target['ratio']:.3g} {name}, at most {target['most']:g}: {word}"


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """Without the name of the machine."""
    facts = environment(config.getoption("device"))
    del facts["date"], facts["commit"]
    return facts | {"processor": facts.pop("machine")}


def pytest_benchmark_generate_commit_info(config: pytest.Config) -> dict[str, Any]:
    """Also of a copy without history (``records.commit``)."""
    facts = environment()
    return {"id": facts["commit"], "time": facts["date"]}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Samples are kept by ``--benchmark-save-data`` alone; the parameters are in ``extra_info``."""
    for benchmark in output_json["benchmarks"]:
        benchmark["params"] = None
        if not config.getoption("benchmark_save_data"):
            benchmark["stats"].pop("data", None)
