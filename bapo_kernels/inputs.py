"""Arguments of the public functions: checked, then flattened to one entry a token."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .aggregation import sequence_index, token_weights
from .config import IGNORE_INDEX, BAPOConfig
from .output import ClipBounds

_SEQUENCE_MODES = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@dataclass(frozen=True)
class TokenInputs:
    """Flat, contiguous, detached; ``None`` where not given. Masked entries may hold anything."""

    live: Tensor
    advantages: Tensor
    old: Tensor | None
    rollout: Tensor | None
    is_weights: Tensor | None
    ref: Tensor | None
    weights: Tensor | None  # of the aggregation, float64; None where no loss is asked for

    def at(self, rows: Tensor) -> TokenInputs:
        """Those of some tokens."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: v[rows] for k, v in given.items() if v is not None})


def require(ok: bool, name: str, rule: str, got: Any) -> None:
    """Raises ``ValueError`` with name, rule and the value got."""
    if not ok:
        raise ValueError(f"{name} must {rule}, got {got}")


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor; does not import what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_floating(name: str, tensor: Tensor, sharded: bool = False) -> None:
    """``tensor`` is a floating-point tensor of this rank, or may be ``sharded`` over many."""
    require(isinstance(tensor, Tensor), name, "be a tensor", type(tensor).__name__)
    rule = "be a local tensor (.to_local() or .full_tensor())"
    require(sharded or not is_dtensor(tensor), name, rule, "a DTensor")
    require(tensor.is_floating_point(), name, "be floating point", tensor.dtype)
    require(tensor.layout == torch.strided, name, "be a dense tensor", tensor.layout)


def check_logits(logits: Tensor, labels: Tensor, vocab_group: Any = None) -> None:
    """``logits [..., V]`` and integer ``labels [...]``; a shard of the vocabulary may be empty."""
    check_floating("logits", logits)
    require(logits.ndim >= 1, "logits", "have shape (..., V)", tuple(logits.shape))
    some = logits.shape[-1] >= 1 or vocab_group is not None
    require(some, "logits", "have V >= 1", tuple(logits.shape))
    check_labels(labels, logits, "logits")


def check_labels(labels: Tensor, rows: Tensor, rows_name: str) -> None:
    """Integer ``labels`` of the rows of a tensor."""
    require(isinstance(labels, Tensor), "labels", "be a tensor", type(labels).__name__)
    require(labels.layout == torch.strided, "labels", "be a dense tensor", labels.layout)
    is_integer = not (
        labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool
    )
    require(is_integer, "labels", "be integers", labels.dtype)
    rule = f"have the leading shape of {rows_name} {tuple(rows.shape[:-1])}"
    require(labels.shape == rows.shape[:-1], "labels", rule, tuple(labels.shape))
    _check_device("labels", labels, rows, rows_name)


def check_head(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk_tokens: int | None,
    vocab_group: Any = None,
) -> None:
    """``hidden_states [..., H]``, ``lm_head_weight [V, H]``, ``bias [V]``, ``labels [...]``."""
    check_floating("hidden_states", hidden_states)
    check_floating("lm_head_weight", lm_head_weight, sharded=True)
    shape = tuple(hidden_states.shape)
    require(hidden_states.ndim >= 1, "hidden_states", "have shape (..., H)", shape)
    fits = lm_head_weight.ndim == 2 and lm_head_weight.shape[1] == shape[-1]
    rule = f"have shape (V, {shape[-1]}), as hidden_states {shape} ask for"
    require(fits, "lm_head_weight", rule, tuple(lm_head_weight.shape))
    V = lm_head_weight.shape[0]
    some = V >= 1 or vocab_group is not None
    require(some, "lm_head_weight", "have V >= 1", tuple(lm_head_weight.shape))
    if bias is not None:
        check_floating("bias", bias, sharded=True)
        require(bias.shape == (V,), "bias", f"have shape ({V},)", tuple(bias.shape))
        _check_device("bias", bias, hidden_states, "hidden_states")
    _check_device("lm_head_weight", lm_head_weight, hidden_states, "hidden_states")
    check_labels(labels, hidden_states, "hidden_states")
    is_count = chunk_tokens is None or (isinstance(chunk_tokens, int) and chunk_tokens >= 1)
    require(is_count, "chunk_tokens", "be None or an integer >= 1", repr(chunk_tokens))


def _check_device(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    rule = f"be on the device of {like_name} ({like.device})"
    require(tensor.device == like.device, name, rule, tensor.device)


def as_rows(logits: Tensor) -> Tensor:
    """``[B, S, V]`` with stride 1 in the last dimension; a view wherever there is one."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.ndim <= 3:
        return logits[(None,) * (3 - logits.ndim)]
    return logits.flatten(0, -3)


def config_or_default(config: BAPOConfig | None) -> BAPOConfig:
    """``config``, or the paper's."""
    if config is None:
        return BAPOConfig()
    rule = "be a BAPOConfig or None"
    require(isinstance(config, BAPOConfig), "config", rule, type(config).__name__)
    return config


def check_options(statistics: str, process_group: Any = None, vocab_group: Any = None) -> None:
    """Options that are not tensors."""
    require(statistics in ("all", "live"), "statistics", "be 'all' or 'live'", repr(statistics))
    check_group("process_group", process_group)
    check_group("vocab_group", vocab_group)


def check_group(name: str, group: Any) -> None:
    """``group`` is ``None`` or a process group of this rank."""
    if group is None:
        return
    ok = dist.is_available() and isinstance(group, dist.ProcessGroup)
    rule = "be None or a torch.distributed.ProcessGroup that this rank is in (mesh.get_group())"
    require(ok, name, rule, type(group).__name__)


def bounds_tensor(bounds: ClipBounds | tuple[Any, Any], like: Tensor) -> Tensor:
    """Given bounds as float32 ``[2]`` on the device of ``like``."""
    require(
        isinstance(bounds, (tuple, list)) and len(bounds) == 2,
        "bounds",
        "be a pair (lower, upper)",
        bounds,
    )
    parts = []
    for name, bound in zip(("bounds.lower", "bounds.upper"), bounds, strict=True):
        if isinstance(bound, Tensor):
            require(bound.numel() == 1, name, "have one element", tuple(bound.shape))
            _check_device(name, bound, like, "the tokens")
            parts.append(bound.detach().float().reshape(()))
        else:
            is_bound = isinstance(bound, (int, float)) and bound >= 0
            require(is_bound, name, "be a number >= 0 or a tensor", repr(bound))
            parts.append(torch.full((), bound, dtype=torch.float32, device=like.device))
    if not isinstance(bounds[0], Tensor) and not isinstance(bounds[1], Tensor):
        require(0 <= bounds[0] <= bounds[1], "bounds", "have 0 <= lower <= upper", tuple(bounds))
    return torch.stack(parts)


def token_inputs(
    like: Tensor,
    like_name: str,
    config: BAPOConfig,
    *,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    weighted: bool = True,
) -> TokenInputs:
    """Checks and flattens what the loss takes a token; ``like`` is the labels or log-probs."""
    shape = like.shape
    N = like.numel()
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def flat(name: str, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        check_floating(name, values)
        rule = f"have the shape of {like_name} {tuple(shape)}"
        require(values.shape == shape, name, rule, tuple(values.shape))
        _check_device(name, values, like, like_name)
        return values.detach().to(dtype).reshape(-1).contiguous()

    _check_offsets(like, like_name, cu_seqlens)
    if weighted:
        _check_aggregation(like, like_name, config, cu_seqlens)
        _check_normalisers(config, batch_num_tokens, global_batch_size, dp_size)
        rule = "be given when config.kl_loss_coef is not 0"
        require(ref_log_probs is not None or not config.kl_loss_coef, "ref_log_probs", rule, None)

    offsets_are_right = None
    if cu_seqlens is not None:
        cu_seqlens, offsets_are_right = _inside(cu_seqlens.long(), N)
    live = _live(like, like_name, response_mask)
    weights = None
    if weighted:
        weights = token_weights(
            live,
            config,
            cu_seqlens=cu_seqlens,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            dp_size=dp_size,
        )
        weights = weights.expand(shape).reshape(N).contiguous()
    spread = _spread_advantages(advantages, like, like_name, cu_seqlens)
    if offsets_are_right is not None:
        spread = torch.where(offsets_are_right, spread, torch.nan)
    return TokenInputs(
        live=live.reshape(-1).contiguous(),
        advantages=spread.detach().to(dtype).reshape(-1).contiguous(),
        old=flat("old_log_probs", old_log_probs),
        rollout=flat("rollout_log_probs", rollout_log_probs),
        is_weights=flat("rollout_is_weights", rollout_is_weights),
        ref=flat("ref_log_probs", ref_log_probs),
        weights=weights,
    )


def _live(like: Tensor, like_name: str, response_mask: Tensor | None) -> Tensor:
    live = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if not like.is_floating_point():
        live = like != IGNORE_INDEX
    if response_mask is None:
        return live
    require(isinstance(response_mask, Tensor), "response_mask", "be a tensor", type(response_mask))
    is_dense = response_mask.layout == torch.strided
    require(is_dense, "response_mask", "be a dense tensor", response_mask.layout)
    rule = f"have the shape of {like_name} {tuple(like.shape)}"
    require(response_mask.shape == like.shape, "response_mask", rule, tuple(response_mask.shape))
    _check_device("response_mask", response_mask, like, like_name)
    is_real = not response_mask.is_complex()
    require(is_real, "response_mask", "be bool, int or float", response_mask.dtype)
    return live & (response_mask != 0)


def _spread_advantages(
    advantages: Tensor, like: Tensor, like_name: str, cu_seqlens: Tensor | None
) -> Tensor:
    check_floating("advantages", advantages)
    _check_device("advantages", advantages, like, like_name)
    if advantages.shape == like.shape:
        return advantages
    got = tuple(advantages.shape)
    if cu_seqlens is not None:
        B = cu_seqlens.numel() - 1
        rule = f"have shape {tuple(like.shape)} or one entry a sequence ({B},)"
        require(got == (B,), "advantages", rule, got)
        index = sequence_index(cu_seqlens, like.numel()).clamp(max=B - 1)
        return advantages[index]
    rule = f"have the shape of {like_name} {tuple(like.shape)}"
    if like.ndim >= 2:
        rule += f" or one entry a sequence ({like.shape[0]},)"
    require(like.ndim >= 2 and got == (like.shape[0],), "advantages", rule, got)
    return advantages.reshape(-1, *(1 for _ in like.shape[1:])).expand(like.shape)


def _check_offsets(like: Tensor, like_name: str, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    require(isinstance(cu_seqlens, Tensor), "cu_seqlens", "be a tensor", type(cu_seqlens))
    ok = cu_seqlens.ndim == 1 and cu_seqlens.numel() >= 2
    require(ok, "cu_seqlens", "have shape (B + 1,) with B >= 1", tuple(cu_seqlens.shape))
    is_integer = cu_seqlens.dtype in (torch.int32, torch.int64)
    require(is_integer, "cu_seqlens", "be int32 or int64", cu_seqlens.dtype)
    _check_device("cu_seqlens", cu_seqlens, like, like_name)
    rule = f"come with packed {like_name} of shape (N,)"
    require(like.ndim == 1, "cu_seqlens", rule, f"{like_name} of shape {tuple(like.shape)}")


def _inside(cu_seqlens: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Offsets cut to ``N`` tokens, and whether they rose from 0 to at most that, on the device."""
    steps = cu_seqlens.diff(append=cu_seqlens.new_full((1,), N))
    return cu_seqlens.clamp(0, N), (steps >= 0).all() & (cu_seqlens[0] == 0)


def _check_aggregation(
    like: Tensor, like_name: str, config: BAPOConfig, cu_seqlens: Tensor | None
) -> None:
    if config.loss_agg_mode not in _SEQUENCE_MODES:
        return
    mode = config.loss_agg_mode
    shape = tuple(like.shape)
    rule = f"be given for packed {like_name} of shape {shape} with loss_agg_mode={mode!r}"
    require(like.ndim >= 2 or cu_seqlens is not None, "cu_seqlens", rule, None)
    if mode == "seq-mean-token-sum-norm" and cu_seqlens is not None:
        rule = "be given for packed input: there is no padded length to take its place"
        require(config.loss_scale_factor is not None, "config.loss_scale_factor", rule, None)


def _check_normalisers(
    config: BAPOConfig,
    batch_num_tokens: float | Tensor | None,
    global_batch_size: float | Tensor | None,
    dp_size: int,
) -> None:
    require(isinstance(dp_size, int) and dp_size >= 1, "dp_size", "be an integer >= 1", dp_size)
    given = {"batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    for name, value in given.items():
        if isinstance(value, Tensor):
            require(value.numel() == 1, name, "have one element", tuple(value.shape))
        elif value is not None:
            is_count = isinstance(value, (int, float)) and value > 0
            require(is_count, name, "be > 0", repr(value))
    mode = config.loss_agg_mode
    needed = {"token-mean": "batch_num_tokens", "token-sum": None}.get(mode, "global_batch_size")
    if needed is not None and dp_size > 1:
        rule = f"be given when dp_size > 1 with loss_agg_mode={mode!r}"
        require(given[needed] is not None, needed, rule, None)
