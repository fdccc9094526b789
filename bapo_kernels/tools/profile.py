"""Where the time of a call goes; ``python -m bapo_kernels profile`` prints it.

The parts of a call are self times of operators on a CPU and times of kernels on a GPU; the last
part is the remaining time. Bytes are those that the algorithm must move: rows of logits that are
read and rows of the gradient that are written. May import anything of the package: it names the
kernels, and one that is renamed there alone is counted among other operators.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from ..backends import choose
from ..config import BAPOConfig
from ..core import gemm
from ..core.call import Statistics
from ..core.operators import NATIVE, TRITON
from ..functional import bapo_loss, log_probs
from ..linear import bapo_linear_loss, linear_log_probs
from ..output import BAPOOutput
from .row_classes import row_classes

CALLS = 5
STALENESS = 0.1  # of the log-probs: a few per cent of the rows are undecided
LEAST_SHARE = 0.01  # of a call: shorter torch operators are summed up
PRODUCTS, OTHERS, OUTSIDE = "matrix products", "other torch operators", "outside of operators"
_KERNELS = (
    "row_pass|row_gradient|prepare|search|contributions|table|solve|token_loss|scale|sequence_mean|"
    "find_labels|gather_sets|move_sets|multiply_sets|scatter_sets|sets"
)
_OURS = re.compile(rf"(?:{NATIVE}|{TRITON})::(\w+)|\b(_?(?:{_KERNELS})(?:_\w+)?_kernel)\b")
_PRODUCT = re.compile(r"aten::(mm|bmm|addmm_?|matmul|linear)$|gemm|cutlass|nvjet|splitk", re.I)


@dataclass(frozen=True)
class Part:
    """A part of a call: its milliseconds, and the bytes that a pass over rows moves."""

    name: str
    ms: float
    bytes: int | None = None


@dataclass(frozen=True)
class Profile:
    """Median times in milliseconds.

    Attributes:
        parts: of a call under the profiler; they add up to ``profiled``.
        profiled: wall time of a call under the profiler.
        wall: wall time of a call without the profiler.
        copy: a copy of a tensor of the logits' size.
        gemms: the three matrix products of all rows alone; ``None`` from logits.
    """

    parts: list[Part]
    profiled: float
    wall: float
    copy: float
    gemms: float | None


class Workload:
    """Tokens of a slightly older policy, and a call on them, from logits or from hidden states.

    Args:
        backend: defaults to the first that can run on the device.
        hidden: hidden size; with ``None`` the call starts from logits.
        masked, idle: shares of the tokens that are masked, and that have no advantage.

    Raises:
        ValueError: the named backend cannot run, or ``inplace`` with hidden states.
    """

    def __init__(
        self,
        *,
        device: str,
        backend: str | None = None,
        tokens: int,
        vocab: int,
        hidden: int | None = None,
        dtype: torch.dtype,
        masked: float = 0.0,
        idle: float = 0.0,
        statistics: Statistics = "all",
        inplace: bool = False,
    ) -> None:
        if inplace and hidden:
            raise ValueError("inplace must be False for hidden states, got True")
        N, V, g = tokens, vocab, torch.Generator(device).manual_seed(0)
        random: dict[str, Any] = dict(generator=g, device=device)
        self.logits = torch.empty(N, V, dtype=dtype, device=device)
        self.backend = choose(backend, self.logits, "logits")
        self.statistics, self.inplace, self.of_hidden = statistics, inplace, bool(hidden)
        options: dict[str, Any] = dict(backend=self.backend, statistics=statistics)
        labels = torch.randint(V, (N,), **random)
        self.loss: Callable[..., BAPOOutput]
        if hidden:
            states = torch.randn(N, hidden, **random).to(dtype)
            weight = (torch.randn(V, hidden, **random) * hidden**-0.5).to(dtype)
            logp, _ = linear_log_probs(states, weight, labels, backend=self.backend)
            self.leaves = [states.requires_grad_(), weight.requires_grad_()]
            self.loss = partial(bapo_linear_loss, **options)
        else:
            for rows in self.logits.split(64):
                rows.normal_(0, 3, generator=g)
            logp, _ = log_probs(self.logits, labels, backend=self.backend)
            self.leaves = [self.logits.clone().requires_grad_(not inplace)]
            self.loss = partial(bapo_loss, inplace=inplace, **options)
        self.old = logp + STALENESS * torch.randn(N, **random)
        A = torch.randn(N, **random)
        self.advantages = torch.where(torch.rand(N, **random) < idle, 0.0, A)
        self.mask = torch.rand(N, **random) >= masked
        self.arguments = labels, self.old, self.advantages, self.mask

    def prepare(self) -> None:
        """Restores logits that a gradient has overwritten; not part of the timed call."""
        if self.inplace:
            self.leaves[0].copy_(self.logits)

    def call(self) -> BAPOOutput:
        """Computes the loss and its gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        output = self.loss(*self.leaves, *self.arguments)
        if not self.inplace:
            output.loss.backward()
        return output

    def gemms(self) -> None:
        """The three matrix products alone, as the loss makes them: logits, and both gradients."""
        states, weight = (leaf.detach() for leaf in self.leaves)
        logits = torch.empty_like(self.logits)
        gemm.multiply(states, weight, None, logits)
        gemm.hidden_gradient(logits, weight, weight.dtype)
        gemm.add_weight_gradient(torch.empty_like(weight), logits, states, first=True)

    def bytes_moved(self) -> dict[str, int]:
        """By the pass over all rows, and by the one that writes undecided rows."""
        self.prepare()
        output, config, A = self.call(), BAPOConfig(), self.advantages
        counted = self.mask if self.statistics == "all" else self.mask & (A != 0)
        tokens = output.log_probs, self.old, A, counted, config
        undecided = row_classes(*tokens).undecided
        kept = undecided & row_classes(*tokens, bounds=output.bounds).kept
        n, u, k = (int(rows.sum()) for rows in (counted, undecided, kept))
        N, row = len(A), self.logits.shape[1] * self.logits.element_size()
        if self.of_hidden:  # logits of counted rows alone; again those of undecided, then kept ones
            return {"row_pass": (2 * n - u) * row, "row_gradient": 2 * k * row}
        return {"row_pass": (n + N - u) * row, "row_gradient": (u + k) * row}


def run(
    workload: Workload,
    trace: Path | None = None,
    tell: Callable[[str, float], None] = lambda name, ms: None,
) -> Profile:
    """Times the call, a copy and the matrix products, then the parts of the call.

    Args:
        trace: a file for chrome://tracing.
        tell: receives each time that is measured without the profiler.
    """
    moved = workload.bytes_moved()
    wall = _median(workload.call, workload.prepare)
    tell("a call without the profiler", wall)
    copy = _copy(workload.logits)
    tell("copying a tensor of the logits' size", copy)
    gemms = None
    if workload.of_hidden:
        gemms = _median(workload.gemms)
        tell("the three matrix products alone", gemms)
    profiled, profiler = _profiled(workload)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    parts = [
        Part(name, ms, next((moved[rows] for rows in moved if rows in name), None))
        for name, ms in _times(profiler, profiled, workload.logits.is_cuda).items()
    ]
    return Profile(parts, profiled, wall, copy, gemms)


def _copy(tensor: torch.Tensor) -> float:
    target = torch.empty_like(tensor)
    return _median(lambda: target.copy_(tensor))


def _median(call: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    walls = []
    for _ in range(CALLS):
        prepare()
        walls.append(_wall(call))
    return median(walls)


def _wall(call: Callable[[], Any]) -> float:
    """Milliseconds until the device has finished."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return 1e3 * (time.perf_counter() - start)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _profiled(workload: Workload) -> tuple[float, profile]:
    """Wall time and profile of the call whose wall time is the median."""
    activities = [ProfilerActivity.CPU]
    if workload.logits.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    calls = []
    for _ in range(1 + CALLS):
        workload.prepare()
        with profile(activities=activities) as profiler:
            wall = _wall(workload.call)
        calls.append((wall, profiler))
    warm = calls[1:]  # the first profile of a process takes longer
    return sorted(warm, key=lambda call: call[0])[CALLS // 2]


def _times(profiler: profile, wall: float, on_gpu: bool) -> dict[str, float]:
    """Our operators, matrix products, long torch operators, all other operators, and the rest."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    parts: Counter[str] = Counter()
    others = 0.0
    for event in profiler.key_averages():
        if event.device_type != device:
            continue
        ms = 1e-3 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        ours = _OURS.search(event.key)
        if ours:
            parts[ours[1] or ours[2]] += ms
        elif _PRODUCT.search(event.key):
            parts[PRODUCTS] += ms
        elif ms >= LEAST_SHARE * wall:
            parts[event.key] += ms
        else:
            others += ms
    rest = wall - others - parts.total()
    return dict(parts.most_common()) | {OTHERS: others, OUTSIDE: rest}
