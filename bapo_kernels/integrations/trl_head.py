"""TRL: a model whose forward ends in the head that a trainer gives to it.

May import public modules and the package's checks. The head must stay in the forward: wrappers
(DDP, FSDP, autocast) have weights ready and synchronise gradients only there.
"""

from __future__ import annotations

import functools
import types
from contextlib import nullcontext
from typing import Any

import torch

from ..checks import warn_once
from ..lm_head import LMHead


def add_head(model: Any, args: Any) -> LMHead | None:
    """Lets ``model(..., bapo_head=f, bapo_tokens=T)`` return ``f(hidden states, weight, bias=b)``.

    Returns:
        The head of the model; ``None`` if TRL's own head computes the log-probs.
    """
    head = None if args.bapo_head == "trl" else _lm_head(model, args)
    if head is not None:
        _replace_forward(head, args.cast_lm_head_to_fp32)
    return head


def _lm_head(model: Any, args: Any) -> LMHead | None:
    layer = model.get_output_embeddings()
    # TRL's forward multiplies in float32, as _replace_forward does.
    cast = vars(layer).pop("forward", None) if args.cast_lm_head_to_fp32 else None
    try:
        return LMHead.of(model)
    except ValueError as refusal:
        if args.bapo_head is not None:
            raise
        warn_once(f"bapo_head is 'trl', which is slower: {refusal}")
        return None
    finally:
        if cast is not None:
            layer.forward = cast


def _replace_forward(head: LMHead, float32: bool) -> None:
    model: Any = head.model
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *inputs: Any, bapo_head: Any = None, bapo_tokens: int = 0, **options: Any
    ) -> Any:
        if bapo_head is None:
            return original(*inputs, **options)
        states = head.decoder(*inputs, use_cache=False, **options).last_hidden_state
        layer = self.get_output_embeddings() if float32 else head
        weight, bias = layer.weight, layer.bias  # once: LoRA is summed at each use
        hidden = states[:, -bapo_tokens - 1 : -1].to(weight.device)
        context = nullcontext()
        if float32:
            hidden = hidden.float()
            context = torch.autocast(hidden.device.type, enabled=False)  # type: ignore[assignment]
        with context:
            return bapo_head(hidden, weight, bias=bias)

    model.forward = types.MethodType(forward, model)
