"""Loss and gradients from logits, beside a copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from .cases import POLICIES, REAL, TARGETS, Case
from .methods import cross_entropies, liger, pytorch, trl, verl
from .methods.method import Method
from .methods.ours import ours, row_passes
from .methods.yardsticks import COPY

CPU = "Qwen3-0.6B", "Llama-3.2-1B", "Gemma-3-1B", "DeepSeek-V3", "gpt-oss-20b"
GPU = "Qwen3-8B", "Llama-3-8B", "Gemma-3-12B", "DeepSeek-V3", "gpt-oss-20b"
# PyTorch last, because compiling it takes longest.
BASELINES = [
    *trl.LOGITS,
    *liger.LOGITS,
    *verl.LOGITS,
    *cross_entropies.LOGITS,
    *pytorch.CROSS_ENTROPY,
]


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    models, N, sweep = (CPU, 256, (64, 512)) if device == "cpu" else (GPU, 8_192, (1_024, 24_576))
    mine = [COPY, *ours(device, "", "in place")]
    everyone = [*mine, *BASELINES]
    for model in models:
        yield Case.of("logits", "loss", model, N), everyone
    loss = partial(Case.of, "logits", "loss", models[0], N)
    yield loss(dtype="float32"), everyone
    for dtype in ("bfloat16", "float32"):
        yield loss(dtype=dtype, profile=REAL), everyone
    for policy in POLICIES:
        others = [liger.GRPO["logits"], *BASELINES] if policy == "clip" else []
        yield Case.of("logits", policy, models[0], N), [*mine, *others]
    yield loss(layout="zero advantage"), [*mine, *ours(device, "live"), *BASELINES]
    for n in sweep:
        yield Case.of("logits", "loss", models[0], n, sweep="N"), everyone
    for V in (8_192, 32_768, 65_536, 262_144):
        yield replace(loss(), model="any", V=V, sweep="V"), everyone
    for layout, others in {"dense": row_passes(device), "mixed": ours(device, "live")}.items():
        yield loss(layout=layout, data="on-policy", sweep=TARGETS), [*mine, *others]


def test_logits(measure):
    measure()
