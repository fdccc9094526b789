"""The predicted time of a loss with its backward, as a sum of parts to lay a profile beside."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cuda import Row
from .gpus import GPU
from .model import CASES

VOCABULARY, BYTES = 151_936, 2
# Seconds in every case: from the end of a kernel to the first instruction of the next; to memory
# under load, with the arithmetic that waits for it; to begin and end a launch of clusters.
BETWEEN_LAUNCHES = 1.5e-6, 1.0e-6, 2.5e-6
ROUND_TRIP = 0.7e-6, 0.5e-6, 1.0e-6
CLUSTERS = 4e-6, 3e-6, 5e-6


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

    def seconds(self, tokens: int, gpu: GPU, case: int) -> float:
        waits = self.launches * BETWEEN_LAUNCHES[case] + self.round_trips * ROUND_TRIP[case]
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


ROW = functools.cache(Row)


@functools.cache
def of_a_row(gpu: GPU, case: int) -> float:
    return ROW(gpu.arch, VOCABULARY).predict(gpu, CASES[case]).over_copy


def row_pass(tokens: int, gpu: GPU, case: int) -> float:
    """By the model, in whole rounds of the clusters; at best the last one takes as its rows do."""
    plan = ROW(gpu.arch, VOCABULARY).plan(gpu)
    clusters = gpu.multiprocessors * plan.blocks // max(plan.cluster, 1)
    rounds = math.ceil(tokens / clusters)
    if CASES[case].boost:
        rounds = max(1, tokens / clusters)
    start = (CLUSTERS if plan.cluster else BETWEEN_LAUNCHES)[case]
    return start + of_a_row(gpu, case) * copy(rounds * clusters, gpu)


def copy(tokens: float, gpu: GPU) -> float:
    return 2 * tokens * VOCABULARY * BYTES / gpu.copy


def over_copy(tokens: int, gpu: GPU) -> str:
    """Of the row pass alone."""
    return ranged([row_pass(tokens, gpu, case) / copy(tokens, gpu) for case in range(3)])


def predicted(tokens: int, gpu: GPU) -> dict[str, str]:
    """Microseconds of every part."""
    times = []
    for case in range(3):
        beside = {part.name: part.seconds(tokens, gpu, case) for part in parts(tokens)}
        both = {"row pass": row_pass(tokens, gpu, case), **beside}
        times.append(both | {"all": sum(both.values())})
    found = {name: ranged([1e6 * each[name] for each in times], 1, " us") for name in times[0]}
    bytes_alone = copy(tokens, gpu)
    beside_rows = [100 * (1 - each["row pass"] / each["all"]) for each in times]
    return found | {
        "copy": f"{1e6 * bytes_alone:,.1f} us",
        "all : copy": ranged([each["all"] / bytes_alone for each in times]),
        "beside the row pass": ranged(beside_rows, 1, " %"),
    }


def ranged(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """What is predicted, and its range."""
    first, least, most = (f"{v:,.{digits}f}" for v in (values[0], min(values), max(values)))
    return f"{first}{unit} ({least}-{most})"
