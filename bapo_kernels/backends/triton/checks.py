"""Checks an operator's arguments, so that no kernel reads or writes outside a tensor.

May import ``core.operators``, ``checks``, ``config``, ``output``, ``launch`` and ``tokens``. A call
that has passed is not checked again: a rule may depend on its ``_facts`` alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checks import OFFSETS, require
from ...config import Options
from ...core.operators import FIELDS, SCHEMAS
from ...output import REPORT
from .launch import grid_sizes
from .tokens import ADVANTAGES, LOWER, TEMPERATURES, UPPER, bits

_DTYPES = {
    **dict.fromkeys(("labels", "offsets", "shard", "positions", "order", "segments"), torch.int64),
    **dict.fromkeys(("token_ids", "rows", "ticket"), torch.int32),
    **dict.fromkeys(("seeds", "counts", "ids"), torch.int32),
    **dict.fromkeys(("undecided", "only"), torch.uint8),
    **dict.fromkeys(("counted", "unmasked"), torch.bool),
    **dict.fromkeys(("log_probs", "entropy", "stats", "dlog_probs", "dentropy"), torch.float64),
    **dict.fromkeys(("weights", "table", "masses", "log_ratios", "dlog_ratios"), torch.float64),
    **dict.fromkeys(("beside", "drawn"), torch.float64),
    **dict.fromkeys(("tokens", "bounds", "report", "factor", "outputs"), torch.float32),
    **dict.fromkeys(("logits", "dlogits", "values", "dvalues", "bias", "dbias"), torch.float32),
}
_ROWS = ("logits", "dlogits", "x")
_MATRICES = ("hidden", "weight", "dhidden", "dweight")
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The arguments of prepare with the dtypes and strides of the caller.
_CALLERS = ("labels_or_log_probs", "response_mask", "cu_seqlens", "device_divisor")
_CALLER_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_ADVANTAGE_OPS = "row_pass", "row_pass_", "head_sets_pass", "contributions", "search", "token_loss"
_PER_LABEL = "labels", "positions", "log_probs", "dlog_probs"
_SEVERAL_LABELS = "row_statistics", "row_gradient", "row_gradient_", "find_labels", "sample_rows"
_require = partial(require, error=RuntimeError)

_MAX_KNOWN = 4_096
_known: set[tuple[Any, ...]] = set()
_NAMES = {
    op: [argument.rsplit(" ", 1)[1] for argument in schema.split(", ")]
    for op, schema in SCHEMAS.items()
}


def check(op: str, arguments: tuple[Any, ...]) -> None:
    """Raises ``RuntimeError`` if an argument breaks a rule of the kernel.

    Friendly messages are left to the public functions.
    """
    signature = op, *map(_facts, arguments)
    if signature not in _known:
        _check(op, dict(zip(_NAMES[op], arguments, strict=True)))
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known.add(signature)


def _facts(x: Any) -> Any:
    """All of a tensor but its values. A number like a divisor is free, those of options are not."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.shape, x.stride()
    if isinstance(x, list | tuple):
        return tuple(one if isinstance(one, float) else _facts(one) for one in x)
    return float if isinstance(x, float) else x


def _check(op: str, given: dict[str, Any]) -> None:
    if "options" in given:
        count, numbers = len(given["options"]), len(Options._fields)
        _require(count == numbers, "options", f"be {numbers} numbers", count)
    if op == "prepare":
        _check_prepare(given)
    if "present" in given:
        _check_present(op, given)
    are_sets = op.startswith("row_") and given["offsets"] is not None
    is_of_sets = "drawn" not in given or op == "sample_rows" or are_sets or given["drawn"] is None
    _require(is_of_sets, "drawn", "be of sets", "that of rows")
    counts = _counts(given, are_sets)
    if op in _SEVERAL_LABELS and given["labels"].ndim == 2:
        per_row = given["labels"].shape[1]
        _require(per_row >= 1, "labels", "be one or more per row", per_row)
        counts |= dict.fromkeys(_PER_LABEL, per_row * counts["labels"])
    if "length" in given and given["cu_seqlens"] is None:
        N, length = counts["labels"], given["length"]
        divides = N == 0 or (length > 0 and N % length == 0)
        _require(divides, "length", f"divide the {N} tokens", length)
    if "table" in given:
        _check_table(**given)
    if op == "sample_rows":
        _check_places(given["labels"], given["gradient_samples"], given["ids"], counts)
    device = next(iter(given.values())).device
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        _require(value.device == device, name, f"be on {device}", value.device)
        if name == "cu_seqlens":
            _check_offsets(value)
        elif name in _MATRICES or (name in _ROWS and not are_sets):
            rule = "be float32, bfloat16 or float16"
            _require(value.dtype in _ROW_DTYPES, name, rule, value.dtype)
            if name in _MATRICES:
                _check_matrix(name, value, given, counts)
            else:
                _check_rows(name, value, given.get("logits", value))
        elif op != "prepare" or name not in _CALLERS:
            _require(value.dtype == _DTYPES[name], name, f"be {_DTYPES[name]}", value.dtype)
            rule = f"be contiguous with {counts[name]} elements"
            is_right = value.numel() == counts[name] and value.is_contiguous()
            _require(is_right, name, rule, tuple(value.shape))


def _counts(given: dict[str, Any], are_sets: bool) -> dict[str, int]:
    """The elements of contiguous tensors, from N rows or tokens, K ids and V columns."""
    rows = given.get("logits", given.get("dlogits"))
    if rows is not None and not are_sets:
        N = int(rows.shape[:-1].numel())
    elif given.get("offsets") is not None:
        N = given["offsets"].numel() - 1
    else:
        N = next(iter(given.values())).numel()
    ids = [given[name] for name in ("token_ids", "values", "dvalues", "logits") if name in given]
    head = given.get("weight", given.get("dweight"))
    K, V = ids[0].numel() if ids else 0, 0 if head is None else head.shape[0]
    counts = dict.fromkeys(_DTYPES, N)
    counts |= dict.fromkeys(("token_ids", "order", "rows"), K)
    counts |= dict.fromkeys(("values", "dvalues", "logits", "dlogits"), K)
    counts |= dict(offsets=N + 1, segments=V + 1, bias=V, dbias=V, bounds=2, masses=6, shard=2)
    counts |= dict(stats=2 * N, tokens=len(FIELDS) * N, report=len(REPORT), factor=1, ticket=1)
    counts |= dict(drawn=4 * N)
    counts["outputs"] = N if given.get("entropy") is None else 2 * N
    counts["table"] = given["table"].numel() if "table" in given else 0
    return counts


def _check_present(op: str, given: dict[str, Any]) -> None:
    """Checks that the fields that an operator needs are there, and tokens with them."""
    present, own = given["present"], given["present"] & bits(LOWER, UPPER)
    known = 0 <= present < 1 << len(FIELDS) and own in (0, bits(LOWER, UPPER))
    rule = f"be bits of {len(FIELDS)} fields, with both bounds or none"
    _require(known, "present", rule, present)
    has_advantages = op not in _ADVANTAGE_OPS or present & bits(ADVANTAGES)
    _require(has_advantages, "present", "have the advantages", present)
    has_tokens = given["tokens"] is not None or not present & bits(TEMPERATURES)
    _require(has_tokens, "tokens", "be given with temperatures", None)
    has_bounds = op != "token_loss" or given["bounds"] is not None or own
    _require(has_bounds, "bounds", "be given, of all tokens or of each", None)


def _check_matrix(name: str, matrix: Tensor, given: dict[str, Any], counts: dict[str, int]) -> None:
    """Checks the hidden states, the head, or the gradient of one of them."""
    operand = given["hidden"] if "hidden" in given else given["weight"]
    dtypes = (operand.dtype, *([torch.float32] if name in ("dhidden", "dweight") else []))
    rule = f"have the dtype {operand.dtype} of its operand" + ", or float32" * (len(dtypes) - 1)
    _require(matrix.dtype in dtypes, name, rule, matrix.dtype)
    shape, H = tuple(matrix.shape), operand.shape[-1]
    unit_stride = matrix.ndim == 2 and (shape[1] <= 1 or matrix.stride(1) == 1)
    _require(unit_stride, name, "be a matrix with stride 1 in H", (shape, matrix.stride()))
    if name == "dhidden" or (name == "hidden" and "offsets" in given):
        N = counts["labels"]
        _require(shape == (N, H), name, f"have shape ({N}, {H})", shape)
    _require(shape[1] == H, name, f"have {H} columns", shape)


def _check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    shape, stride = tuple(rows.shape), rows.stride()
    if name == "x":
        in_place = rows.is_contiguous() or (rows.ndim <= 3 and stride[-1] == 1)
        rule = "be contiguous, or have at most 3 dimensions and last stride 1"
        _require(in_place, name, rule, (shape, stride))
        return
    is_right = rows.ndim == 3 and (shape[-1] <= 1 or stride[-1] == 1)
    _require(is_right, name, "be [batches, rows, V] with stride 1 in V", (shape, stride))
    rule = f"have the shape and dtype of logits {tuple(like.shape)}, {like.dtype}"
    alike = rows.shape == like.shape and rows.dtype == like.dtype
    _require(alike, name, rule, (shape, rows.dtype))


def _check_table(table: Tensor, options: list[float], rank: int = 0, **others: Any) -> None:
    points = sum(grid_sizes(options))
    is_right = table.ndim == 2 and table.shape[0] >= 1 and table.shape[1] == points
    _require(is_right, "table", f"have shape (ranks, {points})", tuple(table.shape))
    _require(0 <= rank < table.shape[0], "rank", f"be in [0, {table.shape[0]})", rank)


def _check_places(labels: Tensor, samples: int, ids: Tensor, counts: dict[str, int]) -> None:
    """Checks the places of samples, the same for ids and values."""
    _require(samples >= 1, "gradient_samples", "be positive", samples)
    N, K = counts["seeds"], labels.shape[1] if labels.ndim == 2 else 1
    is_right = ids.ndim == 2 and ids.shape[0] == N and ids.shape[1] >= K
    _require(is_right, "ids", f"have shape ({N}, {K} or more)", tuple(ids.shape))
    counts |= dict.fromkeys(("ids", "values"), ids.numel())


def _check_prepare(given: dict[str, Any]) -> None:
    """Checks the arguments with the dtypes and strides of the caller."""
    first, fields, cu_seqlens = given["labels_or_log_probs"], given["fields"], given["cu_seqlens"]
    name = "labels_or_log_probs"
    _require(first.ndim == 2, name, "be [sequences, tokens]", tuple(first.shape))
    _require(len(fields) == len(FIELDS), "fields", f"be {len(FIELDS)}", len(fields))
    has_tokens = given["tokens"] is not None or all(field is None for field in fields)
    _require(has_tokens, "tokens", "be given with fields", None)
    advantages, lower, upper = (fields[one.value] for one in (ADVANTAGES, LOWER, UPPER))
    has_advantages = advantages is not None or not given["live"]
    _require(has_advantages, "fields", "have advantages with live", None)
    both = (lower is None) == (upper is None)
    _require(both, "fields", "have both bounds or none", "one of them")
    mode = given["options"][Options._fields.index("loss_agg_mode")]
    _require(mode in range(5), "loss_agg_mode", "be in 0..4", mode)
    has_labels = given["labels"] is None or not first.is_floating_point()
    _require(has_labels, "labels", "be None where tokens are log-probs", "a tensor")
    sequences = None
    if cu_seqlens is not None:
        _require(first.shape[0] == 1, name, "be one row with cu_seqlens", first.shape[0])
        _check_offsets(cu_seqlens)
        sequences = (cu_seqlens.numel() - 1,)
    if given["device_divisor"] is not None:
        elements = given["device_divisor"].numel()
        _require(elements == 1, "device_divisor", "have one element", elements)
    callers = [(name, given[name]) for name in _CALLERS] + [("fields", field) for field in fields]
    for name, value in callers:
        if value is None:
            continue
        _require(value.device == first.device, name, f"be on {first.device}", value.device)
        rule = "be bool, an integer or floating point"
        _require(value.dtype in _CALLER_DTYPES, name, rule, value.dtype)
        if name in ("response_mask", "fields"):
            is_right = value.shape in (first.shape, sequences if name == "fields" else None)
            rule = f"have the shape of labels {tuple(first.shape)}"
            _require(is_right, name, rule, tuple(value.shape))


def _check_offsets(cu_seqlens: Tensor) -> None:
    is_right = cu_seqlens.ndim == 1 and cu_seqlens.numel() >= 2
    _require(is_right, "cu_seqlens", "have shape (K + 1,)", tuple(cu_seqlens.shape))
    _require(cu_seqlens.dtype in OFFSETS, "cu_seqlens", "be int32 or int64", cu_seqlens.dtype)
