"""What the kernels rely on: dtypes, sizes and devices of an operator's arguments.

Friendly messages are left to the public functions; this keeps a direct call of an operator from
reading or writing outside a tensor.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._ops import SCHEMAS
from ...checks import require
from ...output import REPORT
from .launch import MAX_VALUES, grid_sizes

_DTYPES = {
    "labels": torch.int64,
    **dict.fromkeys(("counted", "unmasked"), torch.bool),
    **dict.fromkeys(("undecided", "only"), torch.uint8),
    "ticket": torch.int32,
    **dict.fromkeys(("old_log_probs", "advantages", "ref_log_probs"), torch.float32),
    **dict.fromkeys(("rollout_is_weights", "rollout_log_probs", "temperatures"), torch.float32),
    **dict.fromkeys(("flat", "bounds", "report", "factor", "outputs"), torch.float32),
    **dict.fromkeys(("log_probs", "entropy", "stats", "dlog_probs", "dentropy"), torch.float64),
    **dict.fromkeys(("weights", "table", "masses"), torch.float64),
    **dict.fromkeys(("log_ratios", "dlog_ratios"), torch.float64),
    **dict.fromkeys(("values", "dvalues", "bias", "dbias"), torch.float32),
    **dict.fromkeys(("token_ids", "rows"), torch.int32),
    **dict.fromkeys(("offsets", "shard", "positions", "order", "segments"), torch.int64),
}
_ROWS = ("logits", "dlogits", "x")
_MATRICES = ("hidden", "weight", "dhidden", "dweight")
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of prepare, whose arguments are as the caller has them.
_CALLERS = ("tokens", "response_mask", "values", "cu_seqlens", "device_divisor")
_CALLER_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_SHAPED = (*_ROWS, *_MATRICES, *_CALLERS, "table", "bounds")
_require = partial(require, error=RuntimeError)

_MAX_KNOWN = 4_096
_known: set[tuple[Any, ...]] = set()


class _Places:
    """Positions of an operator's arguments, by what the checks need of them; floats are free."""

    def __init__(self, schema: str) -> None:
        kinds = [argument.rsplit(" ", 1) for argument in schema.split(", ")]
        tensors = [at for at, (kind, _) in enumerate(kinds) if re.fullmatch(_TENSOR, kind)]
        self.names = [name for _, name in kinds]
        self.shaped = [at for at in tensors if self.names[at] in _SHAPED]
        self.flat = [at for at in tensors if at not in self.shaped]
        self.numbers = [
            at for at, (kind, _) in enumerate(kinds) if kind in ("int", "SymInt", "bool")
        ]
        self.lists = [
            at
            for at, (kind, name) in enumerate(kinds)
            if kind.endswith("[]") and name != "coefficients"
        ]
        self.optional = [at for at, (kind, _) in enumerate(kinds) if kind == "float?"]


_TENSOR = r"Tensor(\(\w!\))?\??"
_PLACES = {op: _Places(schema) for op, schema in SCHEMAS.items()}


def check(op: str, arguments: tuple[Any, ...]) -> None:
    """Raises ``RuntimeError`` where an argument is not as the kernel expects it.

    What an earlier call has passed is not checked again.
    """
    places = _PLACES[op]
    signature = (
        op,
        *[
            None if (x := arguments[at]) is None
            else (x.dtype, x.device, x.numel(), x.is_contiguous())
            for at in places.flat
        ],
        *[
            None if (x := arguments[at]) is None else (x.dtype, x.device, x.shape, x.stride())
            for at in places.shaped
        ],
        *[tuple(map(_entry, arguments[at])) for at in places.lists],
        *[arguments[at] for at in places.numbers],
        *[arguments[at] is None for at in places.optional],
    )  # fmt: skip
    if signature in _known:
        return
    _check(op, dict(zip(places.names, arguments, strict=True)))
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known.add(signature)


def _entry(x: Tensor | float) -> Any:
    return (x.dtype, x.device, x.shape) if isinstance(x, Tensor) else x


def _check(op: str, given: dict[str, Any]) -> None:
    first = next(iter(given.values()))
    if op == "prepare":
        _check_callers(given)
    N = _count_of_rows(given)
    if "length" in given and op != "prepare":
        _check_sequences(N, **given)
    counts = {
        "bounds": _count_of_bounds(given, N),
        "masses": 6,
        "report": len(REPORT),
        "factor": 1,
        "stats": 2 * N,
    }
    counts["ticket"] = 1
    counts["outputs"] = N if given.get("entropy") is None else 2 * N
    if op == "prepare":
        counts["flat"] = len(given["values"]) * N
    if "offsets" in given or "segments" in given:
        counts |= _counts_of_sets(given, N)
    if "grids" in given:
        _require(len(given["grids"]) == 6, "grids", "be 6 numbers", len(given["grids"]))
    if "table" in given:
        _check_table(given["table"], given)
        counts["table"] = given["table"].numel()
    for name, value in given.items():
        if not isinstance(value, Tensor) or (op == "prepare" and name in _CALLERS):
            continue
        _require(value.device == first.device, name, f"be on {first.device}", value.device)
        if name == "cu_seqlens":
            continue
        if name in _ROWS:
            _check_rows(name, value, given.get("logits", value))
            continue
        if name in _MATRICES:
            _check_matrix(name, value, given, N)
            continue
        _require(value.dtype == _DTYPES[name], name, f"be {_DTYPES[name]}", value.dtype)
        count = counts.get(name, N)
        size_is_right = value.numel() == count and value.is_contiguous()
        _require(size_is_right, name, f"be contiguous with {count} elements", tuple(value.shape))


def _count_of_rows(given: dict[str, Any]) -> int:
    """Rows of an operator, or the elements of its first argument."""
    rows = given.get("logits", given.get("dlogits"))
    if rows is not None:
        return int(rows.shape[:-1].numel())
    if "offsets" in given:
        return int(given["offsets"].numel()) - 1
    return int(next(iter(given.values())).numel())


def _count_of_bounds(given: dict[str, Any], N: int) -> int:
    """Two for all tokens; the loss of a token may have its own."""
    bounds = given.get("bounds")
    own = "surrogate" in given and bounds is not None and bounds.shape == (2, N)
    return 2 * N if own else 2


def _counts_of_sets(given: dict[str, Any], N: int) -> dict[str, int]:
    """Elements of what an operator on sets takes per id, per column and per row."""
    K = next(given[name].numel() for name in ("token_ids", "values", "dvalues") if name in given)
    head = given.get("weight", given.get("dweight"))
    V = 0 if head is None else head.shape[0]
    per_id = dict.fromkeys(("token_ids", "values", "dvalues", "order", "rows"), K)
    return per_id | {"offsets": N + 1, "shard": 2, "segments": V + 1, "bias": V, "dbias": V}


def _check_matrix(name: str, matrix: Tensor, given: dict[str, Any], N: int) -> None:
    """The hidden states, the head, or their gradients."""
    _require(matrix.dtype in _ROW_DTYPES, name, "be float32, bfloat16 or float16", matrix.dtype)
    operand = given["hidden"] if "hidden" in given else given["weight"]
    dtypes = (operand.dtype, *([torch.float32] if name in ("dhidden", "dweight") else []))
    rule = f"have the dtype {operand.dtype} of its operand" + ", or float32" * (len(dtypes) - 1)
    _require(matrix.dtype in dtypes, name, rule, matrix.dtype)
    unit_stride = matrix.ndim == 2 and (matrix.shape[1] <= 1 or matrix.stride(1) == 1)
    rule = "be a matrix with stride 1 in H"
    _require(unit_stride, name, rule, (tuple(matrix.shape), matrix.stride()))
    H = operand.shape[-1]
    of_rows = name == "dhidden" or (name == "hidden" and "offsets" in given)
    size_is_right = matrix.shape == (N if of_rows else matrix.shape[0], H)
    rule = f"have shape ({N}, {H})" if of_rows else f"have {H} columns"
    _require(size_is_right, name, rule, tuple(matrix.shape))


def _check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    _require(rows.dtype in _ROW_DTYPES, name, "be float32, bfloat16 or float16", rows.dtype)
    if name == "x":
        in_place = rows.is_contiguous() or (rows.ndim <= 3 and rows.stride(-1) == 1)
        rule = "be contiguous, or have at most 3 dimensions and last stride 1"
        _require(in_place, name, rule, (tuple(rows.shape), rows.stride()))
        return
    unit_stride = rows.shape[-1] <= 1 or rows.stride(-1) == 1
    rule = "be [batches, rows, V] with stride 1 in V"
    _require(rows.ndim == 3 and unit_stride, name, rule, (tuple(rows.shape), rows.stride()))
    alike = rows.shape == like.shape and rows.dtype == like.dtype
    rule = f"have the shape and dtype of logits {tuple(like.shape)}, {like.dtype}"
    _require(alike, name, rule, (tuple(rows.shape), rows.dtype))


def _check_table(table: Tensor, given: dict[str, Any]) -> None:
    points = sum(grid_sizes(tuple(given["grids"])))
    is_right = table.ndim == 2 and table.shape[0] >= 1 and table.shape[1] == points
    _require(is_right, "table", f"have shape (ranks, {points})", tuple(table.shape))
    if "rank" in given:
        inside = 0 <= given["rank"] < table.shape[0]
        _require(inside, "rank", f"be in [0, {table.shape[0]})", given["rank"])


def _check_callers(given: dict[str, Any]) -> None:
    """The arguments of ``prepare`` that are as the caller has them."""
    tokens, values, cu_seqlens = given["tokens"], given["values"], given["cu_seqlens"]
    _require(tokens.ndim == 2, "tokens", "be [sequences, tokens]", tuple(tokens.shape))
    _require(len(values) <= MAX_VALUES, "values", f"be at most {MAX_VALUES}", len(values))
    _require(len(values) > 0 or not given["live"], "values", "have advantages with live", 0)
    enough = len(values) > 2 or not given["own_bounds"]
    _require(enough, "values", "have more than the bounds with own_bounds", len(values))
    aggregation = given["aggregation"]
    _require(0 <= aggregation <= 4, "aggregation", "be in 0..4", aggregation)
    has_labels = given["labels"] is None or not tokens.is_floating_point()
    _require(has_labels, "labels", "be None where tokens are log-probs", "a tensor")

    sequences = None
    if cu_seqlens is not None:
        _require(tokens.shape[0] == 1, "tokens", "be one row with cu_seqlens", tokens.shape[0])
        _check_offsets(cu_seqlens)
        sequences = (cu_seqlens.numel() - 1,)
    if given["device_divisor"] is not None:
        elements = given["device_divisor"].numel()
        _require(elements == 1, "device_divisor", "have one element", elements)
    for name in _CALLERS:
        for value in values if name == "values" else [given[name]]:
            if value is None:
                continue
            _require(value.device == tokens.device, name, f"be on {tokens.device}", value.device)
            rule = "be bool, an integer or floating point"
            _require(value.dtype in _CALLER_DTYPES, name, rule, value.dtype)
            if name not in ("response_mask", "values"):
                continue
            per_sequence = name == "values" and value.shape == sequences
            rule = f"have the shape of tokens {tuple(tokens.shape)}"
            _require(per_sequence or value.shape == tokens.shape, name, rule, tuple(value.shape))


def _check_sequences(N: int, length: int, cu_seqlens: Tensor | None, **others: Any) -> None:
    """Rows of tokens, or packed ones."""
    if cu_seqlens is None:
        divides = N == 0 or (length > 0 and N % length == 0)
        _require(divides, "length", f"divide the {N} tokens", length)
    else:
        _check_offsets(cu_seqlens)


def _check_offsets(cu_seqlens: Tensor) -> None:
    is_right = cu_seqlens.ndim == 1 and cu_seqlens.numel() >= 2
    _require(is_right, "cu_seqlens", "have shape (K + 1,)", tuple(cu_seqlens.shape))
    is_integer = cu_seqlens.dtype in (torch.int32, torch.int64)
    _require(is_integer, "cu_seqlens", "be int32 or int64", cu_seqlens.dtype)
