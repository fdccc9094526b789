"""The head of a language model within PEFT: copied, merged, disabled, or with LoRA.

May import the checks alone. An adapter that is not refused must be exactly what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import is_dtensor, require

OTHERWISE = " (otherwise take bapo_loss on the model's own logits; in TRL bapo_head='trl')"
_RULE = (
    "have no adapter of its own but plain LoRA: "
    "merge it, disable it, or leave it out of target_modules" + OTHERWISE
)
_BLOCK = 1024  # rows of the head that fit into the caches of a CPU
_LORA = "peft.tuners.lora.layer.Linear"
# Hooks from these modules move weights and activations, and do not change their values.
_MOVERS = ("torch.distributed.", "deepspeed.", "trl.models.activation_offloading")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def kind_of(layer: Any) -> str:
    """The name of the class, for messages."""
    return f"{type(layer).__module__}.{type(layer).__name__}"


def hooks_of(layer: torch.nn.Module) -> list[Any]:
    """The hooks of a module that may change the values of its forward or backward."""
    hooks = [hook for name in _HOOKS for hook in getattr(layer, name).values()]
    return [h for h in hooks if not str(getattr(h, "__module__", "")).startswith(_MOVERS)]


def without_adapters(layer: Any) -> Any:
    """Unwraps a layer from PEFT; raises if its wrappers do more than :func:`adapted`."""
    copies = getattr(layer, "modules_to_save", None)
    if copies is not None:
        active = [] if layer.disable_adapters else layer.active_adapters
        return copies[active[0]] if active and active[0] in copies else layer.original_module
    if not hasattr(layer, "base_layer"):
        return layer
    # Forward unmerges an adapter that is disabled.
    if layer.disable_adapters == layer.merged:
        kind = kind_of(layer)
        got = f"{kind} around {kind_of(layer.get_base_layer())}"
        require(kind == _LORA and not layer.merged, "lm_head", _RULE, got)
        reason = _more_than_lora(layer)
        require(not reason, "lm_head", _RULE, f"{kind} {reason}")
    return layer.get_base_layer()


def adapted(layer: Any, weight: Tensor) -> Tensor:
    """``weight + sum scaling*(B @ A)`` over the active LoRA adapters of a layer, if it has any.

    The sum is in float32, and is rounded once to the dtype of ``weight``. Gradients flow to A, B
    and ``weight``.
    """
    names = _active(layer)
    if not names:
        return weight
    downs, ups = ([part[name].weight for name in names] for part in (layer.lora_A, layer.lora_B))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        scaled = [layer.scaling[name] * B.to(dtype) for name, B in zip(names, ups, strict=True)]
        A = torch.cat([down.to(dtype) for down in downs])
        adapted: Tensor = _Adapted.apply(weight, torch.cat(scaled, 1), A)
        return adapted


class _Adapted(torch.autograd.Function):
    """``weight + B @ A``, summed in the dtype of A and B and rounded once, block by block."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, B: Tensor, A: Tensor) -> Tensor:
        ctx.save_for_backward(B, A)
        result = torch.empty_like(weight)
        for block in _blocks(weight):
            result[block] = torch.addmm(weight[block].to(A.dtype), B[block], A)
        return result

    @staticmethod
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, A = ctx.saved_tensors
        dB, dA = torch.empty_like(B), torch.zeros_like(A)
        with torch.autocast(dweight.device.type, enabled=False):
            for block in _blocks(dweight):
                rows = dweight[block].to(A.dtype)
                dB[block] = rows @ A.T
                dA += B[block].T @ rows
        return dweight, dB, dA


def _blocks(weight: Tensor) -> Iterator[slice]:
    """The blocks of rows to convert at once; one where a compiler would unroll the loop."""
    V = weight.shape[0]
    size = V if torch.compiler.is_compiling() else _BLOCK * 16 if weight.is_cuda else _BLOCK
    for begin in range(0, V, size):
        yield slice(begin, begin + size)


def _active(layer: Any) -> list[str]:
    """The names of the adapters that forward adds to the output of the base layer."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _more_than_lora(layer: Any) -> str:
    """Describes what forward does besides ``base(x) + sum scaling*B(A(x))``; empty if nothing."""
    if layer.base_layer is not layer.get_base_layer():
        return "around another adapter"
    if "forward" in vars(layer) or hooks_of(layer):
        return "with hooks or another forward"
    for name in _active(layer):
        parts = layer.lora_A[name], layer.lora_B[name]
        dropout = layer.lora_dropout[name]
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None or layer.use_dora.get(name):
            return f"with {'DoRA' if variant is None else type(variant).__name__}"
        if type(dropout) is not torch.nn.Identity and (dropout.training and dropout.p > 0):
            return f"with a dropout of {dropout.p} in training mode"
        if any(part.bias is not None for part in parts):
            return "with lora_bias"
        if any(is_dtensor(part.weight) for part in (*parts, layer.base_layer)):
            return "with sharded weights"
        if any(
            type(part) is not torch.nn.Linear or "forward" in vars(part) or hooks_of(part)
            for part in parts
        ):
            return "whose A and B are more than linear layers"
    return ""
