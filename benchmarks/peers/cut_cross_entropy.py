"""Cut cross-entropy: its Triton kernel without the filter that drops small gradients, and its
form for torch.compile."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..cases import Batch
from . import Peer


def log_probs(batch: Batch, **options: object) -> Tensor:
    """Masked rows are skipped."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(*batch.inputs, batch.ignored_labels, reduction="none", **options)


def _peer(name: str, devices: tuple[str, ...], **options: object) -> Peer:
    function = partial(log_probs, **options)
    package = {"package": "cut-cross-entropy", "module": "cut_cross_entropy"}
    whole = options["impl"] == "torch_compile"
    return Peer(name, "hidden", log_probs=function, devices=devices, holds_logits=whole, **package)


PEERS = [
    _peer("cut-cross-entropy", ("cuda",), impl="cce", filter_eps=None),
    _peer("cut-cross-entropy, compiled", ("cpu", "cuda"), impl="torch_compile"),
]
