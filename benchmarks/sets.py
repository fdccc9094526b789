"""The sampling masks that are measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels import SamplingMask

MEAN_SIZE = 64
LARGEST = 512
SIGMA = 1.0  # of the logarithm of the sizes
# What one set in EVERY has in other layouts, and the layout where an id k is in sets as 1/(k + 1).
LONG = {"long sets": 20_000, "whole vocabularies": 2**30}
EVERY, ZIPF = 256, "Zipf"


def sampling_mask(N: int, V: int, g: torch.Generator, layout: str = "dense") -> SamplingMask:
    """Sets of log-normal sizes, shuffled; the ids of a set are spread evenly over the vocabulary.

    Such ids share neither cache lines nor, with other rows, the rows of the head: sets of tokens
    that follow a text would share many, as those of the layout ``ZIPF`` do.
    """
    device = g.device
    quantiles = (torch.arange(N, device=device) + 0.5) / N
    logarithms = SIGMA * torch.special.ndtri(quantiles) - SIGMA**2 / 2
    sizes = (MEAN_SIZE * logarithms.exp()).round().clamp(1, min(LARGEST, V)).long()
    if layout in LONG:
        sizes[::EVERY] = min(LONG[layout], V)
    sizes = sizes[torch.randperm(N, generator=g, device=device)]
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    rows = torch.arange(N, device=device).repeat_interleave(sizes)
    size = sizes[rows]
    place = torch.arange(len(rows), device=device) - offsets[rows]
    first, end = place * V // size, (place + 1) * V // size  # a range of columns for each id
    share = torch.rand(len(rows), generator=g, device=device, dtype=torch.float64)
    ids = first + (share * (end - first)).long()
    if layout == ZIPF:
        ids = ((V - size + 1) ** ((place + share) / size)).long() - 1 + place
    return SamplingMask(ids.int(), offsets)


def labels_in(mask: SamplingMask, g: torch.Generator) -> Tensor:
    """An id of each set, int64 ``[N]``."""
    share = torch.rand(len(mask), generator=g, device=g.device, dtype=torch.float64)
    return mask.token_ids[mask.offsets[:-1] + (share * mask.offsets.diff()).long()].long()


class Places(NamedTuple):
    """A mask as PyTorch's indexing takes it, int64.

    Attributes:
        ids: ``[K]``, ascending in each set.
        offsets: ``[N + 1]``, of the sets.
        rows: ``[K]``, the row of each id.
        places: ``[K]``, of each id in its set.
        labels: ``[N]``, the places of the labels.
        largest: the size of the largest set.
    """

    ids: Tensor
    offsets: Tensor
    rows: Tensor
    places: Tensor
    labels: Tensor
    largest: int

    @classmethod
    def of(cls, mask: SamplingMask, labels: Tensor) -> Places:
        """Of a mask whose sets have the labels ``[N]``."""
        ids, sizes = mask.token_ids.long(), mask.offsets.diff()
        rows = torch.arange(len(mask), device=ids.device).repeat_interleave(sizes)
        places = torch.arange(len(ids), device=ids.device) - mask.offsets[rows]
        of_labels = places[ids == labels[rows]]
        return cls(ids, mask.offsets, rows, places, of_labels, int(sizes.max()))
