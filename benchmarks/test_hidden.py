"""Loss and gradients from hidden states, beside the bare matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from .cases import HEAD, POLICIES, REAL, TARGETS, Case
from .methods import cross_entropies, liger, pytorch, trl, verl
from .methods.method import Method
from .methods.ours import from_log_probs, ours
from .methods.yardsticks import IN_CHUNKS, THREE, TWO
from .test_logits import CPU, GPU

IN_PARTS = [  # hold the logits of a part of the tokens
    *trl.HIDDEN,
    *liger.HIDDEN,
    *verl.HIDDEN,
    *cross_entropies.HIDDEN,
    *pytorch.HIDDEN,
]
BASELINES = [*IN_PARTS, *cross_entropies.WITH_ALL_LOGITS, *pytorch.CROSS_ENTROPY]


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    """Without AVX-512 one product in bfloat16 takes minutes, unless it is small."""
    slow = device == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    for case, methods in _cases(device):
        yield replace(case, dtype="float32") if slow and case.V > 8_192 else case, methods


def _cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    cpu = device == "cpu"
    models, N, sweep = (CPU, 128, (64, 512)) if cpu else (GPU, 8_192, (1_024, 24_576))
    mine = [THREE, *ours(device, "")]
    everyone = [*mine, *BASELINES]
    for model in models:
        yield Case.of("hidden", "loss", model, N), everyone
    loss = partial(Case.of, "hidden", "loss", models[0], N)
    yield loss(dtype="float32"), everyone
    for dtype in ("bfloat16", "float32"):
        yield loss(dtype=dtype, profile=REAL), everyone
    for policy in POLICIES:
        others = [liger.GRPO["hidden"], *BASELINES] if policy == "clip" else []
        yield Case.of("hidden", policy, models[0], N), [*mine, *others]
    yield loss(layout="zero advantage"), [*mine, *ours(device, "live"), *BASELINES]
    for n in sweep:
        yield Case.of("hidden", "loss", models[0], n, sweep="N"), everyone
    for V in (8_192, 32_768, 65_536, 262_144):
        yield replace(loss(), model="any", V=V, sweep="V"), everyone
    many = replace(loss(), N=8_192, H=128, model="any") if cpu else replace(loss(), N=131_072)
    yield replace(many, sweep="many tokens"), [*mine, *IN_PARTS]
    yield loss(sweep=TARGETS), [*mine, *ours(device, "one chunk")]
    yield from _forms_of_the_head(device, models[0], 512 if cpu else N)


def _forms_of_the_head(device: str, model: str, N: int) -> Iterator[tuple[Case, list[Method]]]:
    """Trained and frozen, and with rows of zero advantage."""
    apart = from_log_probs(device, ", log-probs, then loss")
    for dtype in ("bfloat16", "float32"):
        half = dtype == "bfloat16"
        forms = "", "chunk_tokens = N/4", *(["float32 logits"] if half else [])
        mine, wide = [*ours(device, *forms), *apart], [trl.WIDE] if half else []
        case = Case.of("hidden", "loss", model, N, dtype=dtype, sweep=HEAD)
        for products, frozen in ((3, False), (2, True)):
            yardsticks = [TWO if frozen else THREE, IN_CHUNKS[products]]
            yield replace(case, frozen=frozen), [*yardsticks, *mine, *wide, *BASELINES]
        if half:
            live = ours(device, "live", "live, chunk_tokens = N/4")
            yield replace(case, layout="zero advantage"), [THREE, IN_CHUNKS[3], *mine, *live]


def test_hidden(measure):
    measure()
