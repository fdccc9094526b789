"""Loss and gradients under tensor parallelism: megatron-core's output layer against ``FusedHead``.

``python -m benchmarks.megatron_step`` gives two processes (gloo) the same hidden states and each
half of a vocabulary of 151,936. Every method runs in separate processes, which gives its own peak
memory, and is timed only after its loss and gradients have passed a check against float64.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import Tensor

from bapo_kernels import (
    BAPOConfig,
    bapo_linear_loss,
    bapo_loss_from_log_probs,
    linear_log_probs,
    reference,
)

from .console import digits, spread, table, wide_console
from .gate import distance, raise_above, tolerance
from .records import append, environment
from .timing import resident_MiB, summary

RESULTS = Path(__file__).parent / "results" / "megatron.jsonl"
CONFIG = BAPOConfig.paper()
RANKS, REPETITIONS = 2, 7


@dataclass(frozen=True)
class Case:
    """Every token is unmasked and has an advantage, so no row is skipped."""

    V: int = 151_936
    H: int = 512
    B: int = 4
    S: int = 512
    dtype: str = "float32"

    def weight(self, rank: int) -> Tensor:
        """The rows of the head that a rank has."""
        g = torch.Generator().manual_seed(1 + rank)
        # Logits of standard deviation 0.3: every log-prob is near -log V.
        rows = torch.randn(self.V // RANKS, self.H, generator=g).mul_(0.3 / self.H**0.5)
        return rows.to(getattr(torch, self.dtype))

    def batch(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states ``[S, B, H]``; labels, old log-probs and advantages ``[B, S]``."""
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.S, self.B, self.H, generator=g).to(getattr(torch, self.dtype))
        labels = torch.randint(0, self.V, (self.B, self.S), generator=g)
        uniform = -torch.tensor(float(self.V)).log()
        old = uniform + 0.3 * torch.randn(self.B, self.S, generator=g)
        return hidden, (labels, old, torch.randn(self.B, self.S, generator=g))


SMALL = Case(V=1_000, H=64, B=2)  # two chunks where they have 512 tokens


def by_cross_entropy(layer: Any, hidden: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
    """As a ``GPTModel`` computes its loss from labels."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, _ = layer(hidden)
    losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
    return bapo_loss_from_log_probs(-losses.transpose(0, 1), *others, config=CONFIG).loss


def by_head(layer: Any, hidden: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
    return in_head(layer, hidden, bapo_linear_loss, *arguments, config=CONFIG, **options).loss


def by_log_probs(layer: Any, hidden: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
    log_probs, _ = in_head(layer, hidden, linear_log_probs, labels)
    return bapo_loss_from_log_probs(log_probs, *others, config=CONFIG).loss


def in_head(layer: Any, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
    from bapo_kernels.integrations.megatron import FusedHead

    head = FusedHead(*arguments, **options)
    of_model = dict(output_layer=layer, output_weight=None, config=layer.config)
    return head(hidden_states=hidden, **of_model)


METHODS: dict[str, Callable[..., Tensor]] = {
    "vocab_parallel_cross_entropy": by_cross_entropy,
    "FusedHead, bapo_linear_loss": by_head,
    "FusedHead, bapo_linear_loss, chunk_tokens=512": partial(by_head, chunk_tokens=512),
    "FusedHead, linear_log_probs": by_log_probs,
}


def step_of(name: str, case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """A step of a method with its inputs: loss, gradients of hidden states and weight."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=RANKS,
        params_dtype=getattr(torch, case.dtype),
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    layer = ColumnParallelLinear(
        case.H, case.V, config=config, init_method=torch.nn.init.zeros_, bias=False
    )
    layer.weight.data = case.weight(dist.get_rank())
    hidden, arguments = case.batch()
    hidden.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        hidden.grad = layer.weight.grad = None
        loss = METHODS[name](layer, hidden, *arguments)
        loss.backward()
        return loss.detach(), hidden.grad, layer.weight.grad

    return step


def check(name: str, case: Case) -> None:
    """Compares with the reference in float64, of the whole head.

    Raises:
        WrongAnswerError: the loss or a gradient is off.
    """
    hidden, (labels, *others) = case.batch()
    whole = torch.cat([case.weight(rank) for rank in range(RANKS)])
    leaves = [x.double().requires_grad_() for x in (hidden.transpose(0, 1), whole)]
    loss = reference.bapo_linear_loss(*leaves, labels, *others, config=CONFIG).loss
    loss.backward()
    dhidden, dweight = (leaf.grad for leaf in leaves)
    expected = loss.detach(), dhidden.transpose(0, 1), dweight.chunk(RANKS)[dist.get_rank()]
    most = tolerance(getattr(torch, case.dtype))
    for got, truth, what in zip(
        step_of(name, case)(), expected, ("loss", "gradient of hidden", "of weight"), strict=True
    ):
        raise_above(most, f"{name}: {what}", distance(got, truth))


def measure(name: str, case: Case) -> dict[str, Any]:
    """Milliseconds of each step and memory of this rank, whose process has run nothing else."""
    check(name, replace(SMALL, dtype=case.dtype))
    step = step_of(name, case)
    before = resident_MiB()
    times = []
    for _ in range(1 + REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return summary(times[1:]) | {"peak_MiB": peak, "grown_MiB": peak - before}


def of_rank(rank: int, folder: str, name: str, case: Case) -> dict[str, Any]:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(RANKS)
    return measure(name, case)


def run(name: str, case: Case) -> dict[str, Any]:
    """One record: the slower rank's times and the larger rank's memory."""
    import megatron.core

    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(RANKS, mp_context=spawn) as ranks,
    ):
        started = [ranks.submit(of_rank, rank, folder, name, case) for rank in range(RANKS)]
        answers = [each.result() for each in started]
    slower = max(answers, key=lambda found: found["ms"])
    memory = {key: max(found[key] for found in answers) for key in ("peak_MiB", "grown_MiB")}
    return {
        "case": f"Megatron's head: {name}",
        **vars(case),
        "ranks": RANKS,
        "threads": 1,
        "megatron": megatron.core.__version__,
        **slower,
        **memory,
    }


def main(out: Path = RESULTS) -> None:
    """Runs every method, prints a table, and appends records to a file of JSON lines."""
    cases = [Case(dtype=dtype) for dtype in ("float32", "bfloat16")]
    pairs = [(name, case) for case in cases for name in METHODS]
    records = [run(*pair) for pair in track(pairs, "methods")]
    size = f"{cases[0].B} x {cases[0].S} tokens, V = {cases[0].V:,}, H = {cases[0].H}"
    columns = "", "dtype", "ms", "20 % .. 80 %", "peak MiB", "beyond inputs"
    rows = []
    for r in records:
        memory = digits(r["peak_MiB"]), digits(r["grown_MiB"])
        rows.append((r["case"].split(": ")[1], r["dtype"], digits(r["ms"]), spread(r), *memory))
    wide_console().print(table(f"Loss and gradients of {size}, {RANKS} ranks", columns, rows))
    append(out, [{**environment(), **record} for record in records])


if __name__ == "__main__":
    typer.run(main)
