"""Rows of a language model, for any vocabulary and temperature. Imports torch alone.

``real_rows.pt`` has the sorted logits of 40 rows of SmolLM2-135M-Instruct (Apache-2.0), at some
ranks; the first few are from peaked to flat, too. ``benchmarks/real_rows.py`` made it.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("real_rows.pt")


def real_rows(
    shape: tuple[int, ...], V: int, temperature: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits ``[..., V]`` divided by the temperature, in float64, and a label drawn from each row.

    Interpolated over the logarithm of the rank: in any vocabulary they reach as far down.
    """
    g = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        ranks, table = (values.double() for values in torch.load(TABLE, weights_only=True))
        at = torch.arange(1, V + 1).double().log() * (ranks[-1].log() / math.log(max(V, 2)))
        known = ranks.log()
        right = torch.searchsorted(known, at).clamp(1, len(known) - 1)
        share = (at - known[right - 1]) / (known[right] - known[right - 1])
        rows = torch.lerp(table[:, right - 1], table[:, right], share) / temperature
        orders = (torch.randperm(V, generator=g) for _ in range(math.prod(shape)))
        logits = torch.stack([rows[n % len(rows)][order] for n, order in enumerate(orders)])
        labels = torch.multinomial(logits.softmax(-1), 1, generator=g)
    return logits.view(*shape, V), labels.view(shape)


def real_head(
    shape: tuple[int, ...],
    V: int,
    H: int,
    temperature: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, at most H, and a head ``[V, H]`` of a dtype with these logits; the labels."""
    logits, labels = real_rows(shape, V, temperature, seed)
    columns = logits.new_empty(H, labels.numel()).normal_(generator=torch.Generator())
    hidden = torch.linalg.qr(columns)[0].T  # orthonormal rows
    weight = logits.new_empty(V, H, dtype=dtype)
    for part, columns in zip(weight.split(8192), logits.view(-1, V).split(8192, 1), strict=True):
        part.copy_(columns.T @ hidden)  # as a whole it would be large in float64
    return hidden.reshape(*shape, H), weight, labels
