"""verl: its log-probs of logits, its chunked head in torch operations, and its Triton head."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch.nn.functional as F
from torch import Tensor

from ..cases import Batch
from .method import Method


def _import_verl() -> None:
    """Also without ray, which verl imports at once, and these functions do not need."""
    if "verl" in sys.modules or find_spec("ray") is not None:
        return
    sys.modules["ray"] = MagicMock()
    try:
        import verl  # noqa: F401
    finally:
        del sys.modules["ray"]  # or other packages take it for the real one


def logits(batch: Batch) -> Tensor:
    """``logprobs_from_logits``: flash-attn's kernel where it is installed."""
    _import_verl()
    from verl.utils.torch_functional import logprobs_from_logits

    return logprobs_from_logits(batch.inputs[0], batch.labels, inplace_backward=False)


def chunked_head(batch: Batch) -> Tensor:
    """``FusedLinearForPPO``: what ``use_fused_kernels`` with the torch backend selects."""
    _import_verl()
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO()(*batch.inputs, batch.labels)[0]


def triton_head(batch: Batch) -> Tensor:
    """``linear_cross_entropy``: what the Triton backend of the same option selects."""
    _import_verl()
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden, weight = batch.inputs
    flat = hidden.flatten(0, -2), weight, batch.labels.flatten()
    return linear_cross_entropy(*flat, 1.0, "none")[0]


def top_k(batch: Batch) -> Tensor:
    """``_chunked_topk_log_probs``, of all logits; its result is in their dtype."""
    _import_verl()
    from verl.trainer.distillation.fsdp.losses import _chunked_topk_log_probs

    logits = batch.inputs[0] if len(batch.inputs) == 1 else F.linear(*batch.inputs)
    return _chunked_topk_log_probs(logits, batch.columns)


VERL = {"package": "verl"}
LOGITS = [Method("verl logprobs_from_logits", log_probs=logits, **VERL)]
HIDDEN = [
    Method("verl chunked head", log_probs=chunked_head, **VERL),
    Method("verl Triton head", log_probs=triton_head, devices=("cuda",), **VERL),
]
TOP_K = Method("verl top-K log-probs", log_probs=top_k, **VERL)
