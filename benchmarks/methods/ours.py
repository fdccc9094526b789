"""This package: every backend with kernels, and its options that save time or memory."""

from __future__ import annotations

from collections.abc import Iterator
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


def probs(batch: Batch, backend: str) -> Tensor:
    """Log-probs of the columns; the entropy is computed with them."""
    function = log_probs if batch.case.level == "logits" else linear_log_probs
    options = {"backend": backend, "sampling_mask": batch.sampling_mask}
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


def _of_backends(device: str, form: str, function: Any, **options: Any) -> Iterator[Method]:
    role = options.pop("role", "train")
    for name in BACKENDS[device]:
        options |= {"backend": name, role: partial(function, backend=name)}
        yield Method(f"bapo_kernels {name}{form}", devices=(device,), **options)


def losses(device: str, live: bool = False) -> list[Method]:
    """Loss and gradients by every backend; also with the rows of zero advantage left out."""
    found = [*_of_backends(device, "", train)]
    if live:
        found += _of_backends(device, ", live", partial(train, statistics="live"), live=True)
    return found


def in_place(device: str) -> list[Method]:
    """Over the logits."""
    return [*_of_backends(device, ", in place", train_inplace, overwrites=True)]


def one_chunk(device: str) -> list[Method]:
    """From hidden states, all logits at once."""
    return [*_of_backends(device, ", one chunk", partial(train, chunk_tokens=2**31))]


def forms_of_the_head(device: str, dtype: str, live: bool) -> list[Method]:
    """In chunks, with wider logits, and with the loss after the log-probs."""
    found = [*_of_backends(device, ", chunk_tokens = N/4", train_in_chunks)]
    if live:
        in_chunks = partial(train_in_chunks, live=True)
        found += _of_backends(device, ", live, chunk_tokens = N/4", in_chunks, live=True)
    if dtype == "bfloat16":
        wide = partial(train, logits_dtype=torch.float32)
        found += _of_backends(device, ", float32 logits", wide)
    found += _of_backends(device, ", log-probs, then loss", probs, role="log_probs")
    return found


def log_probs_alone(device: str) -> list[Method]:
    """Log-probs of the columns, from which the task is computed."""
    return [*_of_backends(device, "", probs, role="log_probs")]


def apart(device: str) -> list[Method]:
    """A distillation in a pass of its own."""
    return [*_of_backends(device, ", two passes", two_passes)]


def row_passes(device: str) -> list[Method]:
    """The first pass alone of each backend."""
    return [
        Method(f"{ours.name}, row pass alone", yardstick=partial(row_pass, method=ours))
        for ours in losses(device)
    ]
