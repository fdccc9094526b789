"""Checks and forms of single arguments that several public functions take.

Imports the general checks and the public data classes. Users see every message, and tests compare
them word for word; a check that reads values would make every call wait for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...checks import (
    INTEGERS,
    NUMBERS,
    OFFSETS,
    check_device,
    check_dtype,
    check_floating,
    check_like,
    count,
    is_readable,
    number,
    refuse,
    require,
)
from ...config import BAPOConfig
from ...sampling_mask import SamplingMask
from ..call import Products

_PAPER = BAPOConfig()  # made once, since its checks take longer than a tiny loss
_MASK_DTYPES = (torch.bool, *NUMBERS)
_MOST_SAMPLES = 2**16
_SEQUENCE_MODES = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def check_logits(
    logits: Tensor, labels: Tensor, vocab_group: Any = None, several: bool = False
) -> None:
    """``logits [..., V]`` and integer ``labels [...]``; a shard of the vocabulary may be empty.

    ``several``: labels may be ``[..., K]``.
    """
    check_floating("logits", logits)
    if logits.ndim == 0:
        refuse("logits", "have shape (..., V)", logits.shape)
    if logits.shape[-1] == 0 and vocab_group is None:
        refuse("logits", "have V >= 1", logits.shape)
    check_labels(labels, logits, "logits", several)


def check_labels(labels: Tensor, rows: Tensor, rows_name: str, several: bool) -> None:
    """Integer ``labels`` of the rows of a tensor, one or ``several`` of each."""
    check_dtype("labels", labels, INTEGERS, "be integers")
    shape = rows.shape[:-1]
    if several and labels.ndim == rows.ndim:
        fits = labels.shape[:-1] == shape and labels.shape[-1] >= 1
        rule = ("have the leading shape of {} {}, then K >= 1 labels per row", rows_name, shape)
        require(fits, "labels", rule, labels.shape)
    elif labels.shape != shape:
        refuse("labels", ("have the leading shape of {} {}", rows_name, shape), labels.shape)
    check_device("labels", labels, rows, rows_name)


def check_head(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | None,
    logits_dtype: torch.dtype | None,
    chunk_tokens: int | None = None,
    vocab_group: Any = None,
    several: bool = False,
    gradient_samples: int | None = None,
) -> Products:
    """``hidden_states [..., H]``, ``lm_head_weight [V, H]``, ``bias [V]``, ``labels [...]``.

    Args:
        several: labels may be ``[..., K]``.

    Returns:
        Products in the dtype of autocast where it is on, otherwise in that which all three must
        have. Logits have the same, or are float32.
    """
    check_floating("hidden_states", hidden_states)
    check_floating("lm_head_weight", lm_head_weight, sharded=True)
    shape = hidden_states.shape
    has_columns = hidden_states.ndim >= 1 and shape[-1] >= 1
    require(has_columns, "hidden_states", "have shape (..., H) with H >= 1", shape)
    fits = lm_head_weight.ndim == 2 and lm_head_weight.shape[1] == shape[-1]
    rule = ("have shape (V, {}), as hidden_states {} ask for", shape[-1], shape)
    require(fits, "lm_head_weight", rule, lm_head_weight.shape)
    has_rows = lm_head_weight.shape[0] >= 1 or vocab_group is not None
    require(has_rows, "lm_head_weight", "have V >= 1", lm_head_weight.shape)
    if bias is not None:
        check_floating("bias", bias, sharded=True)
        V = lm_head_weight.shape[:1]
        require(bias.shape == V, "bias", ("have shape {}", V), bias.shape)
        check_device("bias", bias, hidden_states, "hidden_states")
    check_device("lm_head_weight", lm_head_weight, hidden_states, "hidden_states")
    if labels is not None:
        check_labels(labels, hidden_states, "hidden_states", several)
    if chunk_tokens is not None:
        count("chunk_tokens", chunk_tokens, "be None or an integer >= 1")
    if gradient_samples is not None:
        integer = f"be None or an integer from 1 to {_MOST_SAMPLES:,}"
        gradient_samples = count("gradient_samples", gradient_samples, integer)
        in_range = gradient_samples <= _MOST_SAMPLES
        require(in_range, "gradient_samples", integer, gradient_samples)
    dtype, device = hidden_states.dtype, hidden_states.device
    # Torch has no autocast of meta tensors; that they have no values is said later.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    else:
        for name, tensor in (("lm_head_weight", lm_head_weight), ("bias", bias)):
            if tensor is not None and tensor.dtype != dtype:
                refuse(name, f"have the dtype of hidden_states {dtype}", tensor.dtype)
    widens = logits_dtype == torch.float32 and dtype != torch.float64
    if not (logits_dtype in (None, dtype) or widens):
        float32 = f"torch.float32 for hidden states of half precision (here {dtype})"
        refuse("logits_dtype", f"be None, or {float32}", logits_dtype)
    return Products(dtype, logits_dtype or dtype, chunk_tokens, gradient_samples)


def check_sampling_mask(mask: SamplingMask | None, labels: Tensor) -> None:
    """``None``, or a set for each of the labels, on their device."""
    if mask is None:
        return
    rule = "be None or a SamplingMask"
    require(isinstance(mask, SamplingMask), "sampling_mask", rule, type(mask).__name__)
    rows = "have {} rows, as many as labels {} have entries", labels.numel(), labels.shape
    require(len(mask) == labels.numel(), "sampling_mask", rows, len(mask))
    check_device("sampling_mask", mask.token_ids, labels, "labels")


def check_inplace(logits: Tensor) -> None:
    """``logits`` may be overwritten with their gradient."""
    base = logits if logits._base is None else logits._base
    rule = "not be a leaf that requires grad, or a view of one, with inplace=True"
    is_leaf = torch.is_grad_enabled() and base.requires_grad and base.is_leaf
    require(not is_leaf, "logits", rule, "such a leaf" if base is logits else "such a view")
    sizes_and_strides = list(zip(logits.shape, logits.stride(), strict=True))
    plain = all(stride > 0 or size <= 1 for size, stride in sizes_and_strides)
    plain = plain and (logits.stride(-1) == 1 or logits.shape[-1] == 1)
    if plain and logits.ndim > 3:
        plain = logits.is_contiguous()
    rule = "have rows without overlap and with stride 1 (beyond 3 dimensions: be contiguous)"
    got = f"shape {tuple(logits.shape)}, strides {logits.stride()}"
    require(plain, "logits", f"{rule} with inplace=True", got)


def config_or_default(config: BAPOConfig | None) -> BAPOConfig:
    """``config``, or the paper's."""
    if config is None:
        return _PAPER
    if not isinstance(config, BAPOConfig):
        refuse("config", "be a BAPOConfig or None", type(config).__name__)
    return config


def at_temperature(config: BAPOConfig, temperature: float) -> BAPOConfig:
    """The config with another temperature; making one takes as long as a third of a small call."""
    temperature = number("temperature", temperature)
    if torch.compiler.is_compiling():
        return replace(config, temperature=temperature)
    return _at_temperature(config, temperature)


@lru_cache(64)
def _at_temperature(config: BAPOConfig, temperature: float) -> BAPOConfig:
    return replace(config, temperature=temperature)


def tokens_name(like: Tensor) -> str:
    """The name of the argument whose shape and device other arguments per token must have."""
    return "log_probs" if like.is_floating_point() else "labels"


# The rule of each side of given bounds, the least and the most.
LIMITS_OF_BOUNDS = {
    "lower": ("be in [0, 1], a bound of the ratio, not an epsilon", 0.0, 1.0),
    "upper": ("be >= 1, a bound of the ratio, not an epsilon", 1.0, math.inf),
}


def checked_bounds(
    bounds: Any, like: Tensor, config: BAPOConfig, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Given bounds: both 0-dim and float32, or both as :func:`checked_advantages` makes them.

    Numbers must keep ``0 <= lower <= 1 <= upper``. The values of tensors are not read.
    """
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    require(is_pair, "bounds", "be a pair (lower, upper)", bounds)
    rule = f"be None with surrogate={config.surrogate!r}, which has no bounds"
    require(config.has_bounds, "bounds", rule, type(bounds).__name__)
    parts = []
    for bound, (side, (rule, least, most)) in zip(bounds, LIMITS_OF_BOUNDS.items(), strict=True):
        name = f"bounds.{side}"
        if not isinstance(bound, Tensor):
            value = number(name, bound)
            require(least <= value <= most, name, rule, value)
            parts.append(torch.full((), value, dtype=torch.float32, device=like.device))
        elif bound.numel() == 1:
            parts.append(_scalar(name, bound, like, "the tokens").float())
        else:
            single = "have one element, or "
            parts.append(_per_token(name, bound, like, cu_seqlens, single).detach())
    lower, upper = parts
    if lower.ndim or upper.ndim:
        lower, upper = (part if part.ndim else part.expand(like.shape) for part in parts)
    return lower, upper


def bounds_are_valid(lower: Tensor, upper: Tensor) -> Tensor:
    """Whether ``0 <= lower <= upper``, of tensors whose values the host does not read."""
    return (lower >= 0) & (lower <= upper)


_UNREAD = (torch.uint16, torch.uint32, torch.uint64)  # by the kernels, which read all other numbers


def as_numbers(values: Tensor) -> Tensor:
    """Converts numbers to a dtype that the kernels read."""
    return values.long() if values.dtype in _UNREAD else values


def _scalar(name: str, given: Tensor, like: Tensor, like_name: str) -> Tensor:
    """One real number as a 0-dim tensor on the device of ``like``, which the host does not read."""
    check_dtype(name, given, NUMBERS, "be a real number")
    require(given.numel() == 1, name, "have one element", given.shape)
    if given.is_cpu and not like.is_cpu:  # a number in host memory goes with tensors of any device
        if torch.compiler.is_compiling():
            return as_numbers(given.detach()).to(like.device, non_blocking=True).reshape(())
        # A copy would wait for the device.
        return torch.full((), float(given), dtype=torch.float64, device=like.device)
    check_device(name, given, like, like_name)
    return as_numbers(given.detach()).reshape(())


def check_mask(like: Tensor, response_mask: Tensor | None) -> None:
    """Real ``response_mask`` with the shape and on the device of ``like``."""
    if response_mask is None:
        return
    rule = "be bool, int, float64, float32, bfloat16 or float16"
    check_dtype("response_mask", response_mask, _MASK_DTYPES, rule)
    if response_mask.shape != like.shape:
        shape = "have the shape of {} {}", tokens_name(like), like.shape
        refuse("response_mask", shape, response_mask.shape)
    check_device("response_mask", response_mask, like, tokens_name(like))


def check_per_token(name: str, values: Any, like: Tensor) -> None:
    """Floating point, one for each token."""
    check_like(name, values, like, tokens_name(like))


def checked_advantages(advantages: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A view in the shape of ``like``; with ``cu_seqlens`` it may be one per sequence."""
    return _per_token("advantages", advantages, like, cu_seqlens)


def checked_temperature(
    temperature: Tensor, like: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """A view as of :func:`checked_advantages`; a 0-dim tensor is the temperature of every token."""
    return _per_token("temperature", temperature, like, cu_seqlens, "be 0-dim, or ")


def _per_token(
    name: str, values: Tensor, like: Tensor, cu_seqlens: Tensor | None = None, single: str = ""
) -> Tensor:
    """A view in the shape of ``like``; with ``cu_seqlens`` it may be one per sequence.

    Args:
        single: the beginning of the rule where one value, then 0-dim, may stand for all tokens.
    """
    check_floating(name, values)
    check_device(name, values, like, tokens_name(like))
    if single and values.ndim == 0:
        return values.expand(like.shape)
    if values.shape == like.shape:
        return values
    text = f"{single}have the shape of {{}} {{}} or one entry per sequence {{}}"
    rule = text, tokens_name(like), like.shape
    if cu_seqlens is not None:
        B = cu_seqlens.shape[0] - 1
        ok = values.ndim == 1 and values.shape[0] == B
        require(ok, name, (*rule, (B,)), values.shape)
        return values
    if like.ndim < 2:
        refuse(name, (*rule, "with cu_seqlens"), values.shape)
    ok = values.ndim == 1 and values.shape[0] == like.shape[0]
    require(ok, name, (*rule, like.shape[:1]), values.shape)
    return values.reshape(-1, *(1 for _ in like.shape[1:])).expand(like.shape)


def check_offsets(like: Tensor, cu_seqlens: Tensor) -> None:
    """``cu_seqlens [B + 1]`` of packed ``[N]`` tokens, which on a CPU rise from 0 to at most N."""
    check_dtype("cu_seqlens", cu_seqlens, OFFSETS, "be int32 or int64")
    ok = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 2
    require(ok, "cu_seqlens", "have shape (B + 1,) with B >= 1", cu_seqlens.shape)
    check_device("cu_seqlens", cu_seqlens, like, tokens_name(like))
    require(like.ndim == 1, tokens_name(like), "have packed shape (N,) with cu_seqlens", like.shape)
    if is_readable(cu_seqlens):
        rising_offsets(cu_seqlens, like.shape[0])


def rising_offsets(cu_seqlens: Tensor, N: int) -> list[int]:
    """Offsets that rise from 0 to at most ``N``. Reads the device."""
    offsets: list[int] = cu_seqlens.tolist()
    rising = offsets[0] == 0 and offsets[-1] <= N and offsets == sorted(offsets)
    require(rising, "cu_seqlens", f"rise from 0 to at most {N}", offsets)
    return offsets


def check_aggregation(like: Tensor, config: BAPOConfig, cu_seqlens: Tensor | None) -> None:
    """The sequences of a mode that is about sequences are known."""
    mode = config.loss_agg_mode
    if mode not in _SEQUENCE_MODES:
        return
    template = "be given for packed {} of shape {} with loss_agg_mode={!r}"
    rule = template, tokens_name(like), like.shape, mode
    require(like.ndim >= 2 or cu_seqlens is not None, "cu_seqlens", rule, None)
    if mode == "seq-mean-token-sum-norm" and cu_seqlens is not None:
        length = "be given for packed input: there is no padded length to take its place"
        require(config.loss_scale_factor is not None, "config.loss_scale_factor", length, None)


def check_search(config: BAPOConfig) -> None:
    """The surrogate has bounds."""
    name, rule = "config.surrogate", "have bounds to search for"
    require(config.has_bounds, name, rule, repr(config.surrogate))


def check_ratio_level(like: Tensor, config: BAPOConfig, cu_seqlens: Tensor | None) -> None:
    """The sequences are known where the ratio is that of a sequence."""
    if config.ratio_level == "sequence":
        rule = "be given for packed {} of shape {} with ratio_level='sequence'"
        known = like.ndim >= 2 or cu_seqlens is not None
        require(known, "cu_seqlens", (rule, tokens_name(like), like.shape), None)


def normaliser(name: str, given: Any, like: Tensor) -> float | Tensor | None:
    """A count of tokens or sequences: a number, or a 0-dim tensor, whose value is not read."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        value = number(name, given)
        require(0 < value < math.inf, name, "be finite and > 0", given)
        return value
    return _scalar(name, given, like, tokens_name(like))
