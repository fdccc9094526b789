"""The section on sampling masks of ``docs/internals/benchmarks.md``."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from .cases import SAMPLING_MASK
from .plot import LEVELS
from .tables import machine, markdown, number

INTRODUCTION = """{N:,} tokens, hidden states of {H:,}, V = {V:,}; {machine}

The set of a token has its label in it and {mean:.1f} ids on average, at most 512; the sizes are
log-normal. The ids of a set are spread over the vocabulary: few share a cache line, and few sets
share a row of the head. `masked_fill` materialises the logits of the whole vocabulary and writes
-inf outside of the sets; `gather` indexes the logits, or the rows of the head, by the ids of the
sets; `sampled_addmm` computes the entries of the logits that a sparse matrix names, and takes
float32 only. None of the packages measured on this page takes a sampling mask. In the rows "whole
vocabulary" our loss has no sampling mask, and neither have the old log-probs. `copy` is of the
logits, or of the head; `zeros` overwrites the logits.

The floor, for K ids in all and b bytes per element: from logits, zeros for the gradient, `N*V*b`
bytes, and for each id a line of 64 bytes read and another one written. From hidden states, `6*K*H`
FLOPs, or `4*K*H` with a frozen head, and `K*H*b` bytes of the head; with a trained head also
`K*H*b` bytes of hidden states, and `V*H*b` for its gradient. What gradients take is counted only
for tokens that have one. Nothing is assumed to stay in a cache from one set to the next. Peak
memory is above inputs and gradients.
"""


def of_masks(device: str, frame: pd.DataFrame) -> Iterator[str]:
    """The section: a table per level."""
    frame = frame[frame.layout == "dense"]
    masked = frame[frame.sweep == SAMPLING_MASK]
    yield f"### Sampling masks, {device}\n"
    first = masked.iloc[0]
    sizes = dict(N=first.N, H=first.H, V=first.V, mean=first.shares["allowed"] * first.V)
    yield INTRODUCTION.format(machine=machine(frame), **sizes)
    for level in masked.level.unique():
        yield f"Loss and gradients {LEVELS[level]}:\n"
        yield table(frame[frame.level == level]) + "\n"


def table(frame: pd.DataFrame) -> str:
    """Every method by dtype and head, fastest first."""
    cases = frame.groupby(["dtype", "frozen"], sort=False)
    rows = pd.concat([_of_case(of_case) for _, of_case in cases])
    return markdown(rows if frame.frozen.any() else rows.drop(columns="head"))


def _of_case(frame: pd.DataFrame) -> pd.DataFrame:
    with_mask, ours = frame.sweep == SAMPLING_MASK, frame.method.str.startswith("bapo")
    whole = frame[ours & ~with_mask].set_index("method").ms
    best = frame[with_mask & frame.method.str.startswith("PyTorch")].ms.min()
    mine = frame.ms.where(ours & with_mask)
    moves, computes = frame.bytes > 0, frame.flops > 0
    columns = {
        "dtype": frame["dtype"],
        "head": frame.frozen.map({True: "frozen", False: "trained"}),
        "ms": frame.ms.map(number),
        "x faster than the whole vocabulary": (frame.method.map(whole) / mine).map(number),
        "x faster than the best baseline": (best / mine).map(number),
        "floor, MB": (frame.bytes / 1e6).where(moves).map(number),
        "floor, GFLOP": (frame.flops / 1e9).where(computes).map(number),
        "ms at the rate of the copy": (frame.share * frame.ms).where(moves).map(number),
        "peak MiB": ((frame.peak_bytes - frame.gradient_bytes) / 2**20).map(number),
    }
    names = frame.method.where(with_mask, frame.method + ", whole vocabulary")
    shown = frame[with_mask | ours].sort_values("ms").index
    return pd.DataFrame(columns).loc[shown].set_index(names[shown])
