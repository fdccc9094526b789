"""This package: every backend with kernels, and its options that save time or memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bapo_kernels import bapo_linear_loss, bapo_loss, find_clip_bounds, linear_log_probs, log_probs

from ..cases import HEAD, POLICIES, Batch
from ..distillation import forward_kl
from .method import OF_TOP_K, Method, Step, trained


def train(batch: Batch, **options: Any) -> Step:
    """Loss and gradients."""
    function = bapo_loss if batch.case.level == "logits" else bapo_linear_loss
    options |= batch.options | {"sampling_mask": batch.sampling_mask}
    out = function(*batch.inputs, *batch.rest, **options)
    return trained(out.loss, batch)


def train_inplace(batch: Batch, **options: Any) -> Step:
    """The gradient is written over the logits."""
    logits = batch.inputs[0].detach()
    options |= batch.options | {"sampling_mask": batch.sampling_mask}
    out = bapo_loss(logits, *batch.rest, inplace=True, **options)
    return out.loss, (logits,)


def train_in_chunks(batch: Batch, chunks: int, live: bool, **options: Any) -> Step:
    """From hidden states, the counted rows in so many equal chunks, or in one that is smaller."""
    rows, statistics = (batch.active, "live") if live else (batch.unmasked, "all")
    return train(batch, chunk_tokens=-(-rows // chunks), statistics=statistics, **options)


def probs(batch: Batch, backend: str) -> Tensor:
    """Log-probs; the entropy is computed with them."""
    function = log_probs if batch.case.level == "logits" else linear_log_probs
    options = {"backend": backend, "sampling_mask": batch.sampling_mask}
    return function(*batch.inputs, batch.columns, **options)[0]


def two_passes(batch: Batch, backend: str) -> Step:
    """BAPO's loss, and the distillation from log-probs of its own."""
    assert batch.teacher is not None
    out = bapo_linear_loss(*batch.inputs, *batch.rest, backend=backend, **batch.options)
    ids = batch.columns[..., 1:]
    logp = linear_log_probs(*batch.inputs, ids, backend=backend)[0]
    kl = forward_kl(logp, batch.teacher.log_probs.view(ids.shape))
    return trained(out.loss + kl.mean(), batch)


def search(batch: Batch) -> Step:
    """The search alone, by the default backend of the device."""
    return torch.stack(find_clip_bounds(*batch.tokens, config=batch.case.config)), ()


def _of_backend(backend: str, device: str) -> Iterator[Method]:
    name = f"bapo_kernels {backend}"
    runs = {"devices": (device,), "backend": backend, "tasks": ("loss", "log_probs", *POLICIES)}
    for level in ("logits", "hidden"):
        plain = partial(train, backend=backend)
        all_tasks = runs | {"tasks": (*runs["tasks"], *OF_TOP_K)}
        yield Method(name, level, plain, partial(probs, backend=backend), **all_tasks)
        live = partial(train, backend=backend, statistics="live")
        yield Method(f"{name}, live", level, live, live=True, **runs)
    if device == "cuda":
        whole = partial(train, backend=backend, chunk_tokens=2**31)
        once = {"everywhere": False, "holds_logits": True}
        yield Method(f"{name}, one chunk", "hidden", whole, **once, **runs)
    yield from _forms_of_the_head(name, backend, runs)
    apart = runs | {"tasks": OF_TOP_K[2:]}
    yield Method(f"{name}, two passes", "hidden", partial(two_passes, backend=backend), **apart)
    inplace = partial(train_inplace, backend=backend)
    yield Method(f"{name}, in place", "logits", inplace, overwrites=True, **runs)


def _forms_of_the_head(name: str, backend: str, runs: dict[str, Any]) -> Iterator[Method]:
    in_chunks = partial(train_in_chunks, backend=backend, chunks=4)
    for form, live in (("", False), (", live", True)):
        function = partial(in_chunks, live=live)
        yield _form(f"{name}{form}, chunk_tokens = N/4", function, live=live, **runs)
    wide = partial(train, backend=backend, logits_dtype=torch.float32)
    half = {"dtypes": ("bfloat16",), "float32_logits": True}
    yield _form(f"{name}, float32 logits", wide, **half, **runs)
    log_probs_alone = partial(probs, backend=backend)
    yield _form(f"{name}, log-probs, then loss", log_probs=log_probs_alone, **runs)


def _form(name: str, *functions: Any, **options: Any) -> Method:
    return Method(name, "hidden", *functions, sweep=HEAD, **options)


METHODS = [
    *_of_backend("cpu", "cpu"),
    *_of_backend("cuda", "cuda"),
    *_of_backend("triton", "cuda"),
    Method("bapo_kernels", "tokens", search),
]
