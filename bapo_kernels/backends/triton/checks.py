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
from ...config import bound_grid
from ...output import REPORT

_NAMES = {op: re.findall(r"(\w+)(?:,|$)", schema) for op, schema in SCHEMAS.items()}
_DTYPES = {
    "labels": torch.int64,
    "counted": torch.bool,
    "undecided": torch.uint8,
    "only": torch.uint8,
    **dict.fromkeys(("old_log_probs", "advantages", "ref_log_probs"), torch.float32),
    **dict.fromkeys(("rollout_is_weights", "rollout_log_probs"), torch.float32),
    **dict.fromkeys(("bounds", "report", "factor"), torch.float32),
    **dict.fromkeys(("log_probs", "entropy", "stats", "dlog_probs", "dentropy"), torch.float64),
    **dict.fromkeys(("weights", "table", "masses"), torch.float64),
}
_ROWS = ("logits", "dlogits", "x")
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_require = partial(require, error=RuntimeError)


def check(op: str, arguments: tuple[Any, ...]) -> None:
    """Raises ``RuntimeError`` where an argument is not as the kernel expects it."""
    given = dict(zip(_NAMES[op], arguments, strict=True))
    first = arguments[0]
    N = first.shape[:-1].numel() if "logits" in given else first.numel()
    counts = {"bounds": 2, "masses": 4, "report": len(REPORT), "factor": 1, "stats": 2 * N}
    if "grids" in given:
        _require(len(given["grids"]) == 6, "grids", "be 6 numbers", len(given["grids"]))
    if "table" in given:
        grids = given["grids"]
        counts["table"] = len(bound_grid(*grids[:3])) + len(bound_grid(*grids[3:]))
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        _require(value.device == first.device, name, f"be on {first.device}", value.device)
        if name in _ROWS:
            _check_rows(name, value, first)
            continue
        _require(value.dtype == _DTYPES[name], name, f"be {_DTYPES[name]}", value.dtype)
        count = counts.get(name, N)
        size_is_right = value.numel() == count and value.is_contiguous()
        _require(size_is_right, name, f"be contiguous with {count} elements", tuple(value.shape))


def _check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    _require(rows.dtype in _ROW_DTYPES, name, "be float32, bfloat16 or float16", rows.dtype)
    if name == "x":
        return
    unit_stride = rows.shape[-1] <= 1 or rows.stride(-1) == 1
    rule = "be [batches, rows, V] with stride 1 in V"
    _require(rows.ndim == 3 and unit_stride, name, rule, (tuple(rows.shape), rows.stride()))
    alike = rows.shape == like.shape and rows.dtype == like.dtype
    rule = f"have the shape and dtype of logits {tuple(like.shape)}, {like.dtype}"
    _require(alike, name, rule, (tuple(rows.shape), rows.dtype))
