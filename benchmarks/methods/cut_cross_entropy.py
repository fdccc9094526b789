"""Cut cross-entropy: its Triton kernel without gradient filtering, and its compiled version."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..cases import Batch
from .method import Method


def log_probs(batch: Batch, **options: object) -> Tensor:
    """Masked rows are skipped."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(*batch.inputs, batch.ignored_labels, reduction="none", **options)


def _method(name: str, devices: tuple[str, ...], **options: object) -> Method:
    function = partial(log_probs, **options)
    package = {"package": "cut-cross-entropy", "module": "cut_cross_entropy"}
    whole = options["impl"] == "torch_compile"
    options = {"devices": devices, "holds_logits": whole}
    return Method(name, "hidden", log_probs=function, **options, **package)


METHODS = [
    _method("cut-cross-entropy", ("cuda",), impl="cce", filter_eps=None),
    _method("cut-cross-entropy, compiled", ("cpu", "cuda"), impl="torch_compile"),
]
