"""Whether the ranks that share a group make the same call: compared once for each of its functions.

Imports the config and ``distributed``. It is the first collective of a call: without it, ranks that
differ would wait for each other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import BAPOConfig
from ..distributed import gather

# Groups whose ranks have been compared: in a search, and over shards in each function.
_AGREED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_FACTS = 64  # more than there are: ranks that make different calls exchange as much


def check_ranks(
    function: str,
    backend: str | None,
    config: BAPOConfig,
    like: Tensor,
    search: Any,
    shards: Any = None,
    in_common: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Raises on every rank of a group if its ranks differ in their first call; later ones pass.

    One collective of a fixed size, before any other, and a read of the device. The ranks of a
    search must have function and config in common, those of a vocabulary everything.

    Args:
        in_common: by name, what else must be the same on the ranks of ``shards``.
    """
    traced = torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter)
    if traced or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    problem = ""
    for name, group, kind in (("vocab_group", shards, function), ("process_group", search, "")):
        if group is None or (kind in _AGREED.get(group, ()) and function != "check_inputs"):
            continue
        facts: dict[str, Any] = {"function and backend": (function, backend)}
        facts["the result of the check of vocab_group"] = not problem
        facts |= {f"config.{field.name}": getattr(config, field.name) for field in fields(config)}
        if name == "vocab_group":
            facts |= in_common()
        differs = _difference(facts, name, group, like.device)
        if not differs:
            _AGREED.setdefault(group, set()).add(kind)
        problem = problem or differs
    if problem:
        raise ValueError(problem)


def _difference(facts: dict[str, Any], name: str, group: Any, device: torch.device) -> str:
    """The message about the first fact that differs between the ranks of a group, if one does."""
    unmasked = facts.get("the unmasked tokens")
    mine = [_fingerprint(value, unmasked) for value in facts.values()]
    mine += [(0.0, 0.0)] * (_FACTS - len(mine))
    table = gather(torch.tensor(mine, dtype=torch.float64, device=device), group).cpu()
    apart, slack = (table - table[0]).abs()[..., 0], (table + table[0])[..., 1]
    differs = (table != table[0])[..., 0] & ~(apart <= slack)
    ranks = dist.get_process_group_ranks(group)
    for (fact, value), flags in zip(facts.items(), differs.T.tolist(), strict=False):
        if others := [rank for rank, other in zip(ranks, flags, strict=True) if other]:
            here = "" if isinstance(value, Tensor) else f" ({value!r} on this rank)"
            got = f"another on ranks {others} than on rank {ranks[0]}{here}"
            return f"{fact} must be the same on all ranks of {name}, got {got}"
    return ""


def _fingerprint(value: Any, unmasked: Tensor | None) -> tuple[float, float]:
    """A number that differs where values do, and how far rounding may move it."""
    if value is None:
        return math.inf, 0.0
    if not isinstance(value, Tensor):
        return float(zlib.crc32(repr(value).encode())), 0.0
    if unmasked is not None and value.shape == unmasked.shape:
        value = value.where(unmasked, 0)
    value = value.flatten()
    place = torch.arange(1, len(value) + 1, device=value.device)
    if not value.is_floating_point():
        return float((value.long() * (place * place % 65521)).sum() & (2**52 - 1)), 0.0
    value = value.double().nan_to_num(0.0, 1e4, -1e4)
    return float((value * (1 + place.cos())).sum()), 1e-5 * float(value.abs().sum())
