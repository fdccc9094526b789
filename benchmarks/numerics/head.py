"""Errors of log-probs from bfloat16 hidden states, by how the head makes its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from bapo_kernels import linear_log_probs, reference

from ..methods.trl import selective_log_softmax
from ..records import Record
from .errors import Rows, error_of, known, labels_of

N, V = 16, 151_936
WIDTHS = (1_024, 4_096)
PART = 8_192  # columns of the vocabulary that exist in float64 at a time


class Inputs(NamedTuple):
    """Hidden states ``[N, H]`` and weight ``[V, H]`` in bfloat16, logits in float64, labels."""

    hidden: Tensor
    weight: Tensor
    logits: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, N: int, V: int, H: int) -> Inputs:
        """Logits have a standard deviation of 3."""
        g = torch.Generator().manual_seed(H)
        hidden = torch.randn(N, H, generator=g).bfloat16()
        weight = torch.empty(V, H, dtype=torch.bfloat16)
        for rows in weight.split(PART):
            rows.copy_(3 * H**-0.5 * torch.randn(rows.shape, generator=g))
        logits = [hidden.double() @ rows.double().T for rows in weight.split(PART)]
        whole = torch.cat(logits, -1)
        return cls(hidden, weight, whole, labels_of(whole, g))


def ours(inputs: Inputs, logits_dtype: torch.dtype | None) -> Tensor:
    factors = inputs.hidden, inputs.weight, inputs.labels
    return linear_log_probs(*factors, logits_dtype=logits_dtype, backend="cpu")[0]


def narrow_product(inputs: Inputs) -> Tensor:
    """Rounds the logits to bfloat16; the softmax is in float32."""
    return _log_softmax(F.linear(inputs.hidden, inputs.weight).float(), inputs.labels)


def wide_product(inputs: Inputs) -> Tensor:
    """Of bfloat16 numbers, summed and kept in float32.

    A GPU takes the bfloat16 operands (``torch.mm`` with ``out_dtype``). Here they are converted,
    which loses nothing; only the order of the sums is another.
    """
    return _log_softmax(F.linear(inputs.hidden.float(), inputs.weight.float()), inputs.labels)


def cast_head(inputs: Inputs) -> Tensor:
    """A float32 head with the log-probs of TRL's trainer."""
    logits = F.linear(inputs.hidden.float(), inputs.weight.float())
    return selective_log_softmax(Rows((logits,), inputs.labels))  # type: ignore[arg-type]


def _log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None]).squeeze(-1)


def heads() -> dict[str, Callable[[Inputs], Tensor]]:
    """Those that can be computed here, by name."""
    found = {
        "bapo_kernels cpu": partial(ours, logits_dtype=None),
        "bapo_kernels cpu, float32 logits": partial(ours, logits_dtype=torch.float32),
        "bfloat16 product, then float32": narrow_product,
        "prime-rl fp32 head, log_softmax": wide_product,
    }
    if any(method.name.startswith("TRL") for method in known("logits")):
        found["TRL cast_lm_head_to_fp32"] = cast_head
    return found


def errors_of_heads(inputs: Inputs) -> dict[str, dict[str, list[float] | None]]:
    """By head, the largest and the relative error of its log-probs."""
    truth = reference.log_probs(inputs.logits, inputs.labels, return_entropy=False)[0]
    return {
        name: {"log_probs": error_of(function(inputs), truth)} for name, function in heads().items()
    }


def measure_heads() -> Iterator[Record]:
    """One record per width of the head."""
    for H in track(WIDTHS, "heads"):
        fields = {"part": "head", "dtype": "bfloat16", "V": V, "N": N, "H": H}
        yield {**fields, "errors": errors_of_heads(Inputs.draw(N, V, H)), "budget": {}}
