"""The search alone, beside the paper's loop."""

from __future__ import annotations

from collections.abc import Iterator

from .cases import SEARCHES, Case
from .methods import pytorch
from .methods.method import Method
from .methods.ours import search

OURS = Method("bapo_kernels", search)


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    for N in (8_192, 131_072, 1_048_576):
        for end in SEARCHES:
            case = Case("tokens", "search", end, N, 1, 1, "float32", data="very stale")
            yield case, [OURS, pytorch.LOOP]


def test_search(measure):
    measure()
