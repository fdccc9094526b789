"""Times the loss and its gradients on this machine, beside PyTorch's.

May import public modules, the reference, and the tools ``validate``, ``timing``, ``plain`` and
``real_rows``. A wrong kernel is named, not timed.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from logging import ERROR
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._logging import _internal as _logging

from .. import reference
from ..functional import bapo_loss
from ..linear import bapo_linear_loss
from .plain import plain_bapo_loss, plain_log_probs
from .real_rows import real_head, real_rows
from .timing import Timed, clock_of, in_turns
from .validate import Check, checked, in_two_steps, runnable, tasks_at

DISTINCT = 128  # rows at most, which are repeated
OURS = "bapo_kernels"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """What is measured: from logits, or with ``hidden`` from hidden states of that width."""

    tokens: int
    vocab: int
    hidden: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    frozen: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of logits, hidden states and head."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def work(self) -> tuple[float, str]:
        """What no method can do without: logits and gradient once, or the matrix products."""
        if self.hidden:
            products = 2 if self.frozen else 3
            return 2e-12 * products * self.tokens * self.vocab * self.hidden, "TFLOP/s"
        return 2e-9 * self.tokens * self.vocab * self.torch_dtype.itemsize, "GB/s"


@dataclass
class Row:
    """A method: the median of its times, or why there is none, and the checks that failed."""

    name: str
    failed: list[Check]
    why_not: str
    seconds: float | None = None
    peak_bytes: int | None = None


def run(
    sizes: Sizes, backends: Sequence[str] | None = None, tell: Tell = lambda words: None
) -> list[Row]:
    """Checks our kernels, then measures peak memory and time of all methods, in turns.

    ``tell`` receives what is being done. Backends and errors are those of ``validate.runnable``.
    """
    backends, clock = runnable(sizes.device, backends), clock_of(sizes.device)
    failed, head = dict[str, list[Check]](), (bool(sizes.hidden), sizes.frozen)
    for name in backends:
        for task in tasks_at(name, sizes.device, sizes.torch_dtype, sizes.vocab, *head):
            tell(f"{(method := _name(name, task.case))}: check")
            failed[method] = [check for check in checked(task) if not check.passed]
    tell("rows of a language model")
    rows, ready = dict[str, Row](), dict[str, Timed]()
    _logging.set_logs(dynamo=ERROR, inductor=ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of compilers
        for name, timed in _methods(sizes, backends, *_batch(sizes)):
            wrong = failed.get(name, [])
            row = rows[name] = Row(name, wrong, "; ".join(check.words for check in wrong))
            if wrong:
                continue
            try:
                if name.endswith("compiled"):
                    tell(f"{name}: compilation")
                    timed.call()
                tell(f"{name}: peak memory")
                if timed.prepare is not None:
                    timed.prepare()
                row.peak_bytes = clock.peak_bytes(timed.call)
                ready[name] = timed
            except Exception as error:  # the others go on
                row.why_not = _in_words(error)
        times, failures = in_turns(ready, clock, tell)
    for name, samples in times.items():
        rows[name].seconds = median(samples)
    for name, failure in failures.items():
        rows[name].why_not = _in_words(failure)
    return [*rows.values()]


def _name(backend: str, case: str) -> str:
    return f"{OURS} {backend}" + (f", {case}" if case != "loss" else "")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _batch(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Logits, or hidden states and head; labels, old log-probs, advantages and mask."""
    N, V, H, dtype = sizes.tokens, sizes.vocab, sizes.hidden, sizes.torch_dtype
    shape, g = (min(N, DISTINCT, H or N),), torch.Generator().manual_seed(0)
    *made, labels = real_head(shape, V, H, dtype=dtype) if H else real_rows(shape, V)
    leaves = [values.to(sizes.device, dtype) for values in made]
    log_probs: Any = reference.linear_log_probs if H else reference.log_probs
    logp = log_probs(*leaves, labels.to(sizes.device))[0].float().cpu()
    at = torch.arange(N) % len(labels)
    old = logp[at] + 0.1 * torch.randn(N, generator=g)
    advantages = torch.randn(N, generator=g) - 0.2  # the search acts
    leaves[0] = leaves[0][at.to(sizes.device)]
    for leaf in leaves[: 1 if sizes.frozen else 2]:
        leaf.requires_grad_()
    return leaves, [x.to(sizes.device) for x in (labels[at], old, advantages, torch.ones(N))]


def _methods(
    sizes: Sizes, backends: Sequence[str], leaves: list[Tensor], tokens: list[Tensor]
) -> Iterator[tuple[str, Timed]]:
    """The yardstick, PyTorch, and ours."""
    labels, *others = tokens
    first, *weight = (leaf.detach() for leaf in leaves)

    def forget() -> None:
        for leaf in leaves:
            leaf.grad = None

    def trained(loss: Callable[..., Any], graph: bool = False) -> Timed:
        def call() -> None:
            forget()  # a graph captures calls without their preparation
            loss(*leaves).backward()

        return Timed(call, forget, graph)

    def plain(log_probs: Callable[..., Tensor]) -> Timed:
        def loss(*leaves: Tensor) -> Any:
            logits = leaves[0] @ leaves[1].T if weight else leaves[0]
            return plain_bapo_loss(log_probs(logits, labels), *others)[0]

        return trained(loss)

    def ours(function: Callable[..., Any], backend: str) -> Timed:
        loss = partial(function, backend=backend)
        return trained(lambda *leaves: loss(*leaves, *tokens).loss, graph=not weight)

    before = "PyTorch, README's Before", plain(partial(plain_log_probs, temperature=1.0))
    if weight:
        out = first.new_empty(len(first), sizes.vocab), *map(torch.empty_like, (first, *weight))

        def products() -> None:
            logits = torch.mm(first, weight[0].T, out=out[0])
            torch.mm(logits, weight[0], out=out[1])
            if not sizes.frozen:
                torch.mm(logits.T, first, out=out[2])

        yield f"{'two' if sizes.frozen else 'three'} matrix products", Timed(products, graph=True)
        yield before
        for backend in backends:
            yield _name(backend, "loss"), ours(bapo_linear_loss, backend)
            yield _name(backend, "linear_log_probs"), ours(in_two_steps, backend)
        return
    other = torch.empty_like(first)
    copy = partial(other.copy_, first)
    yield "copy of the logits", Timed(copy, graph=True)
    yield before
    yield "PyTorch cross_entropy", plain(_cross_entropy)
    compiled = cache(lambda: torch.compile(_cross_entropy, dynamic=False))  # imports the compiler
    yield "PyTorch cross_entropy, compiled", plain(lambda *arguments: compiled()(*arguments))
    for backend in backends:
        yield _name(backend, "loss"), ours(bapo_loss, backend)
        inplace = partial(bapo_loss, other, *tokens, backend=backend, inplace=True)
        yield _name(backend, "in place"), Timed(inplace, copy, graph=True)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), labels, reduction="none")


def title(sizes: Sizes) -> str:
    """What is measured, and where."""
    H = f", H = {sizes.hidden:,}" if sizes.hidden else ""
    H += ", frozen head" if sizes.frozen else ""
    task = f"N = {sizes.tokens:,}, V = {sizes.vocab:,}{H}, {sizes.dtype}"
    if sizes.device == "cuda":
        place = torch.cuda.get_device_name()
    else:
        file, n = Path("/proc/cpuinfo"), torch.get_num_threads()
        found = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
        name = found[1] if found else platform.machine()
        place = f"{name}, {torch.backends.cpu.get_cpu_capability()}, threads: {n}"
    source = "hidden states" if sizes.hidden else "logits"
    return f"Loss and gradients from {source}, {task}; {place}, torch {torch.__version__}"


def table(sizes: Sizes, rows: Sequence[Row]) -> str:
    """Aligned text; below it why the others were not timed."""
    work, unit = sizes.work
    lines: list[tuple[str, ...]] = [("", "ms", "multiple", unit, "tokens/s", "peak MiB")]
    for row in rows:
        if s := row.seconds:
            numbers = 1e3 * s, s / (rows[0].seconds or nan), work / s, sizes.tokens / s
            memory = _digits(row.peak_bytes / 2**20) if row.peak_bytes else ""
            lines.append((row.name, *map(_digits, numbers), memory))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    return "\n".join(shown + [f"{r.name}: not timed, {r.why_not}" for r in rows if r.why_not])


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 or not value else f"{value:#.3g}"


def draw(sizes: Sizes, rows: Sequence[Row], path: Path) -> None:
    """Bars of time and of peak memory. Needs matplotlib."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.seconds is not None][::-1]
    figure = Figure((11, 1.5 + 0.4 * len(timed)), layout="constrained")
    figure.suptitle(title(sizes), fontsize=9)
    panels = {
        "milliseconds (log scale)": [1e3 * (row.seconds or nan) for row in timed],
        "peak memory, MiB": [(row.peak_bytes or 0) / 2**20 for row in timed],
    }
    colors = ["C0" if row.name.startswith(OURS) else "0.7" for row in timed]
    axes = figure.subplots(1, 2, sharey=True)
    axes[0].set_xscale("log")
    for axis, (words, values) in zip(axes, panels.items(), strict=True):
        bars = axis.barh([row.name for row in timed], values, color=colors)
        axis.bar_label(bars, [*map(_digits, values)], padding=3)
        axis.set_title(words, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
