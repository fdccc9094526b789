"""Loss and gradients from logits, beside a copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from .cases import POLICIES, REAL, TARGETS, Case, half
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


def losses_from(
    level: str, device: str, N: int, mine: list[Method], baselines: list[Method]
) -> Iterator[tuple[Case, list[Method]]]:
    """Of all models; then of the first in other dtypes, rows, policies, layouts and sizes."""
    models, sweep = (CPU, (64, 512)) if device == "cpu" else (GPU, (1_024, 24_576))
    everyone, usual = [*mine, *baselines], half(level, device)
    of = partial(Case.of, level, dtype=usual)
    for model in models:
        yield of("loss", model, N), everyone
    loss = partial(of, "loss", models[0], N)
    yield loss(dtype="float32"), everyone
    for dtype in (usual, "float32"):
        yield loss(dtype=dtype, profile=REAL), everyone
    for policy in POLICIES:
        others = [liger.GRPO[level], *baselines] if policy == "clip" else []
        yield of(policy, models[0], N), [*mine, *others]
    yield loss(layout="zero advantage"), [*mine, *ours(device, "live"), *baselines]
    for n in sweep:
        yield of("loss", models[0], n, sweep="N"), everyone
    for V in (8_192, 32_768, 65_536, 262_144):
        dtype = usual if V > 8_192 else "bfloat16"
        yield replace(loss(dtype=dtype), model="any", V=V, sweep="V"), everyone


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    N, mine = 256 if device == "cpu" else 8_192, [COPY, *ours(device, "", "in place")]
    yield from losses_from("logits", device, N, mine, BASELINES)
    model = CPU[0] if device == "cpu" else GPU[0]
    target = partial(Case.of, "logits", "loss", model, N, data="on-policy", sweep=TARGETS)
    yield target(), [*mine, *row_passes(device)]
    yield target(layout="mixed"), [*mine, *ours(device, "live")]


def test_logits(measure):
    measure()
