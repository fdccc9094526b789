"""TRL: its chunked head, its Triton log-probs, and the log-probs of its older trainers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..cases import Batch
from .method import Method, Step, trained

CHUNK = 8_192  # columns of a tile, TRL's default


def chunked_head(batch: Batch, cast: bool = False) -> Tensor:
    """``ChunkedLogProbFunction``; masked rows are removed beforehand, as in TRL's trainer.

    ``cast`` is what ``cast_lm_head_to_fp32`` does, with a cast of the weight in each call.
    """
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight = (leaf.float() if cast else leaf for leaf in batch.inputs)
    hidden, labels = hidden.flatten(0, -2), batch.labels.flatten()
    mask = None if batch.mask is None else batch.mask.flatten()
    if mask is not None:
        hidden, labels = hidden[mask], labels[mask]
    logp = ChunkedLogProbFunction.apply(
        hidden, weight, None, labels, 1.0, CHUNK, None, 1.0, ("entropy",)
    )[0]
    if mask is None:
        return logp
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


def triton_kernel(batch: Batch) -> Tensor:
    """``selective_log_softmax_and_entropy``."""
    from trl.kernels import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy(batch.inputs[0], batch.labels, 1.0, batch.mask)[0]


def selective_log_softmax(batch: Batch) -> Tensor:
    """``selective_log_softmax``: torch operations, one row at a time for 16-bit logits."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(batch.inputs[0], batch.labels)


def top_k_kl(batch: Batch) -> Step:
    """``_chunked_jsd_loss`` of ``AsyncDistillationTrainer``; in its own choice of chunks."""
    from trl.experimental.async_distillation import async_distillation_trainer as trainer

    teacher, (hidden, weight) = batch.teacher, batch.inputs
    assert teacher is not None
    targets = teacher.ids, teacher.log_probs, torch.ones_like(teacher.ids, dtype=torch.bool)
    transform, beta, temperature = (1.0, None), 0.0, 1.0
    chunk = trainer._CHUNKED_LM_HEAD_CHUNK_SIZE
    head, options = (hidden.flatten(0, -2), weight, None), (beta, temperature, True, None, 1)
    loss = trainer._chunked_jsd_loss(*head, *transform, *targets, *options, chunk)[0]
    return trained(loss / batch.case.N, batch)


def divergence(batch: Batch) -> Step:
    """``ChunkedDivergenceFunction`` of ``DistillationTrainer``: over the whole vocabulary."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    teacher, (hidden, weight) = batch.teacher, batch.inputs
    assert teacher is not None
    of_teacher = teacher.hidden_states, weight.detach(), None
    heads = hidden.flatten(0, -2), weight, None, *of_teacher
    return trained(ChunkedDivergenceFunction.apply(*heads, 0.0)[0].mean(), batch)


TRL = {"package": "trl"}
LOGITS = [
    Method("TRL selective_log_softmax", log_probs=selective_log_softmax, **TRL),
    Method("TRL Triton", log_probs=triton_kernel, devices=("cuda",), **TRL),
]
HIDDEN = [Method("TRL chunked head", log_probs=chunked_head, **TRL)]
CAST = partial(chunked_head, cast=True)
WIDE = Method("TRL chunked head, cast to float32", log_probs=CAST, **TRL)  # of bfloat16
TOP_K = Method("TRL top-K distillation", top_k_kl, **TRL)
WHOLE = Method("TRL divergence", divergence, **TRL)
