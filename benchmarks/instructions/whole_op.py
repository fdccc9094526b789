"""The predicted time of a loss with its backward, as a sum of parts to lay a profile beside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cuda import Row
from .gpus import GPU

VOCABULARY, BYTES = 151_936, 2
BETWEEN_LAUNCHES = 1.5e-6  # from the end of a kernel to the first instruction of the next
ROUND_TRIP = 0.7e-6  # to memory under load, with the arithmetic that waits for it


@dataclass(frozen=True)
class Part:
    """A kernel over tokens, or several: it waits for memory more than it moves bytes.

    Attributes:
        round_trips: one after the other, of all its launches; an estimate by reading the kernels.
    """

    name: str
    launches: int
    round_trips: int
    bytes_per_token: int

    def seconds(self, tokens: int, gpu: GPU) -> float:
        waits = self.launches * BETWEEN_LAUNCHES + self.round_trips * ROUND_TRIP
        return waits + tokens * self.bytes_per_token / gpu.copy


# On-policy, with a search, by the CUDA backend: nothing is undecided, the incoming gradient is 1.
_PARTS = (
    # Of up to 65,536 tokens: one for their loads and two for arithmetic and additions to the bins,
    # one for the partial sums and two for masses and the decision.
    Part("search", 2, 6, 17),
    Part("token_loss", 1, 8, 61),
    Part("row_gradient, no row undecided", 1, 2, 1),
    Part("1 as the incoming gradient", 1, 1, 0),
    Part("scale_ by 1", 1, 2, 0),
)


def parts(tokens: int) -> tuple[Part, ...]:
    """The kernels beside the row pass; one block prepares up to 2,048 tokens in one launch."""
    return Part("prepare", 1 if tokens <= 2_048 else 3, 6, 70), *_PARTS


def row_pass(tokens: int, gpu: GPU, row: Row) -> float:
    """By the model, in whole rounds of the clusters."""
    plan = row.plan(gpu)
    clusters = gpu.multiprocessors * plan.blocks // max(plan.cluster, 1)
    rounds = math.ceil(tokens / clusters) * clusters / tokens
    return row.predict(gpu).over_copy * rounds * copy(tokens, gpu)


def copy(tokens: int, gpu: GPU) -> float:
    return 2 * tokens * VOCABULARY * BYTES / gpu.copy


def predicted(tokens: int, gpu: GPU) -> dict[str, str]:
    """Microseconds of every part."""
    rows = row_pass(tokens, gpu, Row(gpu.arch, VOCABULARY))
    beside = {part.name: part.seconds(tokens, gpu) for part in parts(tokens)}
    whole = rows + sum(beside.values())
    times = {"row pass": rows, **beside, "all": whole, "copy": copy(tokens, gpu)}
    return {name: f"{1e6 * time:,.1f} us" for name, time in times.items()} | {
        "all : copy": f"{whole / times['copy']:.3f}",
        "beside the row pass": f"{100 * sum(beside.values()) / whole:.1f} %",
    }
