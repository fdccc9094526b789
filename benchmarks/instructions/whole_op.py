"""The predicted time of a loss with its backward, as a sum of parts to lay a profile beside."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from .gpus import GPU, GPUS

VOCABULARY, BYTES = 151_936, 2
TOKENS = (8_192, 1_024)
BETWEEN_LAUNCHES = 1.5e-6  # from the end of a kernel to the first instruction of the next
ROUND_TRIP = 0.7e-6  # to memory under load, with the arithmetic that waits for it
BLOCKS_PER_MULTIPROCESSOR, CLUSTER = 2, 4  # of the row pass at this vocabulary


@dataclass(frozen=True)
class Part:
    """A kernel over tokens, or several: it waits for memory more than it moves bytes."""

    name: str
    launches: int
    round_trips: int  # one after the other, of all its launches
    bytes_per_token: int

    def seconds(self, tokens: int, gpu: GPU) -> float:
        waits = self.launches * BETWEEN_LAUNCHES + self.round_trips * ROUND_TRIP
        return waits + tokens * self.bytes_per_token / gpu.copy


# On-policy, with a search, by the CUDA backend: nothing is undecided, the incoming gradient is 1.
_PARTS = (
    Part("search", 2, 12, 17),
    Part("token_loss", 1, 8, 61),
    Part("row_gradient, no row undecided", 1, 2, 1),
    Part("1 as the incoming gradient", 1, 1, 0),
    Part("scale_ by 1", 1, 2, 0),
)


def parts(tokens: int) -> tuple[Part, ...]:
    """The kernels beside the row pass; one block prepares up to 2,048 tokens in one launch."""
    return Part("prepare", 1 if tokens <= 2_048 else 3, 6, 70), *_PARTS


def row_pass(tokens: int, gpu: GPU, issued: float, exps: float) -> float:
    """The longest of its bytes, its issue slots and its exps, in whole rounds of the clusters."""
    bytes_moved = 2 * BYTES
    share = max(1.0, gpu.issue_share(issued, bytes_moved), gpu.exp_share(exps, bytes_moved))
    clusters = gpu.multiprocessors * BLOCKS_PER_MULTIPROCESSOR // CLUSTER
    rounds = math.ceil(tokens / clusters) * clusters / tokens
    return share * rounds * copy(tokens, gpu)


def copy(tokens: int, gpu: GPU) -> float:
    return 2 * tokens * VOCABULARY * BYTES / gpu.copy


def predicted(arch: str, issued: float, exps: float) -> pd.DataFrame:
    """Microseconds of every part, for each GPU of an architecture and each number of tokens.

    Args:
        issued, exps: per element, of both passes of the row pass.
    """
    columns = {}
    for gpu in (gpu for gpu in GPUS if gpu.arch == arch):
        for tokens in TOKENS:
            rows = row_pass(tokens, gpu, issued, exps)
            beside = {part.name: part.seconds(tokens, gpu) for part in parts(tokens)}
            whole = rows + sum(beside.values())
            times = {"row pass": rows, **beside, "all": whole, "copy": copy(tokens, gpu)}
            column = {name: f"{1e6 * time:,.1f} us" for name, time in times.items()}
            column["all : copy"] = f"{whole / copy(tokens, gpu):.3f}"
            column["beside the row pass"] = f"{100 * sum(beside.values()) / whole:.1f} %"
            columns[f"{gpu.name}, N = {tokens:,}"] = column
    return pd.DataFrame(columns)
