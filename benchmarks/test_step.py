"""Steps of a language model, all of whose weights learn: the model, its head and the loss."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from .cases import STEPS, Batch, Case, half
from .methods import cross_entropies, liger, pytorch, trl
from .methods.method import Method
from .methods.ours import ours

MODULE = "benchmarks.smollm2"
HEADS = [
    pytorch.BEFORE,
    *trl.HIDDEN,
    liger.GRPO["hidden"],
    *cross_entropies.HIDDEN,
    *cross_entropies.WITH_ALL_LOGITS,
]


@lru_cache(maxsize=1)
def prepared(batch: Batch) -> tuple[Any, Batch, Callable[[], None]]:
    """The model, its batch, and the forward that fills in its hidden states: once per case."""
    from .smollm2 import smollm2

    model, own = smollm2(batch.case.torch_dtype).to(batch.device), copy.copy(batch)
    length = min(STEPS[batch.case.sweep], batch.labels.numel())
    ids = batch.labels.roll(1).view(-1, length)

    def forward() -> None:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        own.inputs = hidden.view(*batch.labels.shape, -1), model.lm_head.weight

    with torch.no_grad():
        forward()
        own.logp = own.log_probs()
        own.old = own.logp + (batch.old - batch.logp)
    return model, own, forward


class TrainingStep:
    """The model forwards and backwards, with a loss or with the mean of its hidden states.

    Attributes:
        head_seconds: what head and loss took of each call, forwards and backwards.
    """

    def __init__(self, batch: Batch, method: Method | None) -> None:
        self.model, self.batch, self.forward = prepared(batch)
        self.method, self.head_seconds = method, list[float]()

    def __call__(self) -> None:
        self.model.zero_grad()
        self.forward()
        hidden, weight = self.batch.inputs
        if self.method is None:
            hidden.float().mean().backward()
        else:
            leaf = hidden.detach().requires_grad_()
            self.batch.inputs = leaf, weight
            began = self.now()
            self.method.step(self.batch)
            self.head_seconds.append(self.now() - began)
            hidden.backward(leaf.grad)
        self.batch.inputs = ()

    def now(self) -> float:
        """Seconds, once everything is done."""
        if self.batch.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    alone = Method("decoder alone", yardstick=partial(TrainingStep, method=None), module=MODULE)
    for sweep, N in zip(STEPS, (64 * 64, 16 * 512), strict=True):
        for dtype in dict.fromkeys(("float32", half("hidden", device))):
            case = Case.of("hidden", "loss", "SmolLM2-135M", N, dtype=dtype, sweep=sweep)
            forms = [""] if dtype == "float32" else ["", "float32 logits"]
            methods = [*HEADS, *ours(device, *forms)]
            steps = [
                replace(m, yardstick=partial(TrainingStep, method=m), module=MODULE)
                for m in methods
            ]
            yield case, [alone, *steps]


def test_step(measure):
    measure()
