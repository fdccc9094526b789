"""Log-probs without gradients, from logits and from hidden states."""

from __future__ import annotations

from collections.abc import Iterator

from .cases import TARGETS, Case, half
from .methods.method import Method
from .methods.ours import from_log_probs
from .methods.yardsticks import COPY, THREE
from .test_hidden import BASELINES as OF_HIDDEN
from .test_logits import BASELINES as OF_LOGITS


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    model, tokens = ("Qwen3-0.6B", (256, 128)) if device == "cpu" else ("Qwen3-8B", (8_192, 8_192))
    mine = from_log_probs(device)
    logits, hidden = (
        Case.of(level, "log_probs", model, N, dtype=half(level, device))
        for level, N in zip(("logits", "hidden"), tokens, strict=True)
    )
    yield logits, [COPY, *mine, *OF_LOGITS]
    yield hidden, [THREE, *mine, *OF_HIDDEN]
    yield Case.of("logits", "log_probs", model, tokens[0], sweep=TARGETS), [COPY, *mine]


def test_log_probs(measure):
    measure()
