"""From the arguments of a caller to what the kernels take per token: flat, of one dtype, weighted.

Masked entries may hold anything, before and after.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ._ops import ops_of
from .aggregation import sequence_index, token_weights
from .config import IGNORE_INDEX, BAPOConfig, LossAggMode
from .inputs import as_numbers, bounds_are_valid

_MODES: tuple[str, ...] = get_args(LossAggMode)
# Of the mode's mean: the argument that holds its divisor.
_DIVISORS = {"token-mean": "batch_num_tokens", "token-sum": None}


def divisor_name(mode: str) -> str | None:
    """The normaliser that a mode of aggregation takes: of tokens, of sequences, or none."""
    return _DIVISORS.get(mode, "global_batch_size")


class Arguments(NamedTuple):
    """Checked arguments of a call, as the caller has them.

    Attributes:
        tokens: the labels, or the log-probs where these are given.
        values: what the kernels take as float32, by name; the advantages first.
        live: skip the tokens without advantage.
        weighted: weights are wanted; the numbers below are for them alone.
        divisor: of the mode's mean; ``None``: it is counted.
        bounds: float32 ``[2]``, not checked yet.
        own_bounds: the last two values are the bounds of each token.
    """

    tokens: Tensor
    values: dict[str, Tensor]
    response_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    live: bool = False
    weighted: bool = False
    config: BAPOConfig = BAPOConfig()
    dp_size: int = 1
    divisor: float | Tensor | None = None
    bounds: Tensor | None = None
    own_bounds: bool = False


class TokenInputs(NamedTuple):
    """Flat tensors per token, as :class:`bapo_kernels.call.Call` has them."""

    unmasked: Tensor
    counted: Tensor
    labels: Tensor | None
    weights: Tensor | None
    values: dict[str, Tensor]
    ticket: Tensor | None
    bounds: Tensor | None = None


def token_inputs(backend: str, given: Arguments) -> TokenInputs:
    """What a backend takes per token. Wrong values on the device make weights or advantages NaN."""
    return _in_pytorch(given) if backend == "reference" else _by_kernel(backend, given)


def _by_kernel(backend: str, given: Arguments) -> TokenInputs:
    """One operator: at most three launches."""
    tokens = _matrix(given.tokens, given.tokens)
    N, device = tokens.numel(), tokens.device
    unmasked = torch.empty(N, dtype=torch.bool, device=device)
    counted = torch.empty_like(unmasked) if given.live else None
    has_labels = not tokens.is_floating_point()
    labels = torch.empty(N, dtype=torch.int64, device=device) if has_labels else None
    weights = torch.empty(N, dtype=torch.float64, device=device) if given.weighted else None
    flat = torch.empty((len(given.values), N), dtype=torch.float32, device=device)
    ticket = torch.empty(1, dtype=torch.int32, device=device) if given.weighted else None
    on_device = isinstance(given.divisor, Tensor)
    config = given.config
    ops_of(backend).prepare(
        tokens,
        _mask(given.response_mask, given.tokens),
        [_matrix(value, given.tokens) for value in given.values.values()],
        given.cu_seqlens,
        _MODES.index(config.loss_agg_mode),
        given.dp_size,
        config.loss_scale_factor,
        None if on_device else given.divisor,
        given.divisor if on_device else None,
        given.bounds,
        given.own_bounds,
        given.live,
        unmasked,
        counted,
        labels,
        weights,
        flat,
        ticket,
    )
    by_name, bounds = dict(zip(given.values, flat.unbind(), strict=True)), given.bounds
    if given.own_bounds:
        del by_name["lower"], by_name["upper"]
        bounds = flat[-2:]
    counted = unmasked if counted is None else counted
    return TokenInputs(unmasked, counted, labels, weights, by_name, ticket, bounds)


def _matrix(values: Tensor, like: Tensor) -> Tensor:
    """``[rows, columns]`` as the operator takes it; a view of up to two dimensions.

    Values of packed sequences that are not per token stay ``[B]``. The operator has no derivative.
    """
    values = as_numbers(values.detach() if values.requires_grad else values)
    if values.ndim == 2 or values.shape != like.shape:
        return values
    columns = like.shape[-1] if like.ndim else 1
    return values.reshape(like.shape[:-1].numel(), columns)


def _mask(response_mask: Tensor | None, like: Tensor) -> Tensor | None:
    if response_mask is None:
        return None
    if as_numbers(response_mask) is not response_mask:  # converted, 0.5 would be 0
        response_mask = response_mask != 0
    return _matrix(response_mask, like)


def _in_pytorch(given: Arguments) -> TokenInputs:
    """The same, also in float64."""
    tokens, config = given.tokens, given.config
    has_labels = not tokens.is_floating_point()
    dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    unmasked = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
    if has_labels:
        unmasked = tokens != IGNORE_INDEX
    if given.response_mask is not None:
        unmasked = unmasked & (given.response_mask != 0)
    offsets = rising = None
    if given.cu_seqlens is not None:
        N = tokens.shape[0]
        offsets, rising = _offsets_inside(given.cu_seqlens.long(), N)
        positions = torch.arange(N, device=tokens.device)
        unmasked = unmasked & ((positions < offsets[-1]) | ~rising)
    values = {
        name: _spread(value.detach().to(dtype), tokens, offsets)
        for name, value in given.values.items()
    }
    if rising is not None:
        values["advantages"] = torch.where(rising, values["advantages"], torch.nan)
    bounds = given.bounds
    if given.own_bounds:
        bounds = torch.stack((values.pop("lower"), values.pop("upper")))
    weights = None
    if given.weighted:
        divisor = given.divisor
        if isinstance(divisor, Tensor):
            divisor = torch.where(divisor > 0, divisor.double(), torch.nan)
        weights = token_weights(
            unmasked,
            config,
            cu_seqlens=offsets,
            batch_num_tokens=divisor,
            global_batch_size=divisor,
            dp_size=given.dp_size,
        )
        if rising is not None:
            weights = torch.where(rising, weights, torch.nan)
        if bounds is not None:
            weights = torch.where(bounds_are_valid(*bounds.unbind()), weights, torch.nan)
        weights = torch.where(unmasked, weights, 0.0).reshape(-1)
    values = {name: value.reshape(-1).contiguous() for name, value in values.items()}
    counted = unmasked = unmasked.reshape(-1)
    if given.live:
        counted = unmasked & (values["advantages"] != 0)
    labels = tokens.long().reshape(-1) if has_labels else None
    if bounds is not None:
        bounds = bounds.flatten(1) if given.own_bounds else bounds
    return TokenInputs(unmasked, counted, labels, weights, values, None, bounds)


def _offsets_inside(cu_seqlens: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Offsets cut to ``N`` tokens, and whether they rose from 0 to at most that, on the device."""
    steps = cu_seqlens.diff(append=cu_seqlens.new_full((1,), N))
    return cu_seqlens.clamp(0, N), (steps >= 0).all() & (cu_seqlens[0] == 0)


def _spread(values: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Values per token, of those per token or per sequence."""
    if values.shape == like.shape:
        return values
    assert cu_seqlens is not None
    B = cu_seqlens.shape[0] - 1
    return values[sequence_index(cu_seqlens, like.shape[0]).clamp(max=B - 1)]
