"""This package: every backend with kernels, and its options that save time or memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bapo_kernels import bapo_linear_loss, bapo_loss, find_clip_bounds, linear_log_probs, log_probs

from ..cases import Batch
from ..distillation import forward_kl
from .method import Method, Step, trained
from .yardsticks import row_pass

BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}  # by device


def train(batch: Batch, **options: Any) -> Step:
    """Loss and gradients."""
    function = bapo_loss if batch.case.level == "logits" else bapo_linear_loss
    options |= {"config": batch.case.config, "sampling_mask": batch.sampling_mask}
    return trained(function(*batch.inputs, *batch.rest, **options).loss, batch)


def train_inplace(batch: Batch, **options: Any) -> Step:
    """The gradient is written over the logits."""
    logits = batch.inputs[0].detach()
    options |= {"config": batch.case.config, "sampling_mask": batch.sampling_mask}
    return bapo_loss(logits, *batch.rest, inplace=True, **options).loss, (logits,)


def train_in_chunks(batch: Batch, live: bool = False, **options: Any) -> Step:
    """From hidden states, the counted rows in four equal chunks."""
    rows, statistics = (batch.active, "live") if live else (batch.unmasked, "all")
    return train(batch, chunk_tokens=-(-rows // 4), statistics=statistics, **options)


def probs(batch: Batch, backend: str, **options: Any) -> Tensor:
    """Log-probs of the columns; the entropy is computed with them."""
    function = log_probs if batch.case.level == "logits" else linear_log_probs
    options |= {"backend": backend, "sampling_mask": batch.sampling_mask}
    return function(*batch.inputs, batch.columns, **options)[0]


def two_passes(batch: Batch, backend: str) -> Step:
    """BAPO's loss, and the distillation from log-probs of its own."""
    assert batch.teacher is not None
    config, ids = batch.case.config, batch.columns[..., 1:]
    out = bapo_linear_loss(*batch.inputs, *batch.rest, backend=backend, config=config)
    logp = linear_log_probs(*batch.inputs, ids, backend=backend)[0]
    kl = forward_kl(logp, batch.teacher.log_probs.view(ids.shape))
    return trained(out.loss + kl.mean(), batch)


def search(batch: Batch) -> Step:
    """The search alone, by the default backend of the device."""
    return torch.stack(find_clip_bounds(*batch.tokens, config=batch.case.config)), ()


# By what the name of a method ends with.
LOSSES: dict[str, Callable[..., Step]] = {
    "": train,
    "live": partial(train, statistics="live"),
    "in place": train_inplace,
    "one chunk": partial(train, chunk_tokens=2**31),
    "chunk_tokens = N/4": train_in_chunks,
    "live, chunk_tokens = N/4": partial(train_in_chunks, live=True),
    "float32 logits": partial(train, logits_dtype=torch.float32),
    "gradient_samples = 2048": partial(train, gradient_samples=2_048),
    "two passes": two_passes,
}


def ours(device: str, *forms: str) -> list[Method]:
    """Loss and gradients by every backend, in each of the forms."""
    return [
        Method(
            f"bapo_kernels {backend}" + (f", {form}" if form else ""),
            partial(LOSSES[form], backend=backend),
            devices=(device,),
            overwrites=form == "in place",
            live=form.startswith("live"),
            samples=2_048 if "samples" in form else None,
            backend=backend,
        )
        for form in forms
        for backend in BACKENDS[device]
    ]


def from_log_probs(device: str, form: str = "", samples: int | None = None) -> list[Method]:
    """Log-probs of the columns, from which the task is computed."""
    options = {} if samples is None else {"gradient_samples": samples}
    return [
        Method(
            f"bapo_kernels {backend}{form}",
            log_probs=partial(probs, backend=backend, **options),
            devices=(device,),
            samples=samples,
            backend=backend,
        )
        for backend in BACKENDS[device]
    ]


def row_passes(device: str) -> list[Method]:
    """The first pass alone of each backend."""
    return [
        Method(f"{mine.name}, row pass alone", yardstick=partial(row_pass, method=mine))
        for mine in ours(device, "")
    ]
