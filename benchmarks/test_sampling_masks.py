"""Loss and gradients with a sampling mask, and by ours without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .cases import SAMPLING_MASK, WHOLE_VOCABULARY, Case, half
from .methods import pytorch_sets
from .methods.method import Method
from .methods.ours import ours
from .methods.yardsticks import COPY, THREE, TWO, ZEROS
from .sets import LONG, ZIPF


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    model, N = ("Qwen3-0.6B", 512) if device == "cpu" else ("Qwen3-8B", 8_192)
    heads = ("logits", False), ("hidden", False), ("hidden", True)
    for dtype, (level, frozen) in itertools.product(("bfloat16", "float32"), heads):
        if dtype not in (half(level, device), "float32"):
            continue
        options = {"dtype": dtype, "frozen": frozen}
        mine = ours(device, "", *(["in place"] if level == "logits" else []))
        sampled = [pytorch_sets.SAMPLED] if (level, dtype) == ("hidden", "float32") else []
        zeros = [ZEROS] if level == "logits" else []
        masked = Case.of(level, "loss", model, N, sweep=SAMPLING_MASK, **options)
        yield masked, [COPY, *zeros, *mine, *sampled, *pytorch_sets.SETS]
        whole = Case.of(level, "loss", model, N, sweep=WHOLE_VOCABULARY, **options)
        yield whole, [COPY if level == "logits" else TWO if frozen else THREE, *mine]
    for layout in (*LONG, ZIPF) if device == "cuda" else ():
        options = {"sweep": SAMPLING_MASK, "layout": layout}
        case = Case.of("hidden", "loss", model, N, **options)
        yield case, [COPY, *ours(device, ""), *pytorch_sets.SETS]


def test_sampling_masks(measure):
    measure()
