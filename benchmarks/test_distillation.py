"""Several labels per row: log-probs, and divergences from a teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from .cases import DISTILLATION, Case
from .methods import liger, pytorch, trl, verl
from .methods.method import Method
from .methods.ours import from_log_probs, ours
from .methods.yardsticks import COPY, ONE_LABEL, THREE, TWO


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    if device == "cuda":
        for N, model in itertools.product((4_096, 16_384), ("Qwen3-8B", "Llama-3-8B")):
            yield from _of(device, model, N, ("bfloat16",), (8, 64))
        return
    for N, most in ((256, (8, 64, 256)), (2_048, (64,))):
        # Products of half precision take minutes on a CPU without instructions for it.
        yield from _of(device, "Qwen3-0.6B", N, ("bfloat16", "float32"), most)


def _of(
    device: str, model: str, N: int, dtypes: tuple[str, ...], most: tuple[int, ...]
) -> Iterator[tuple[Case, list[Method]]]:
    """From hidden states, in the last of the dtypes."""
    of = partial(Case.of, model=model, N=N, sweep=DISTILLATION)
    some = [*from_log_probs(device), pytorch.OF_TOP_K, verl.TOP_K]
    for dtype in dtypes:
        yield of("logits", "vjp", dtype=dtype, K=64), [COPY, ONE_LABEL, *some]
    of = partial(of, "hidden", dtype=dtypes[-1])
    yield of("loss + forward_kl_topk", K=64), [THREE, *ours(device, "two passes"), *some]
    for frozen, yardstick in ((False, THREE), (True, TWO)):
        for K in most:
            yield of("forward_kl_topk", frozen=frozen, K=K), [yardstick, *some, trl.TOP_K]
        yield of("forward_kl", frozen=frozen), [yardstick, trl.WHOLE, *liger.WHOLE]


def test_distillation(measure):
    measure()
