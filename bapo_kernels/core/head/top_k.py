"""The most probable ids of each row, a chunk of logits at a time.

Imports the head, its sets and rows. Logits are compared as they are: soft cap, scale and
temperature keep their order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import require
from ...config import IGNORE_INDEX
from ..call import Call, Products, SamplingSets
from ..distributed import gather
from ..operators import NATIVE, implement
from ..rows import RowStatistics, statistics_at
from .log_probs import HeadCall
from .sets import add_set_statistics


def top_k(
    call: Call, products: Products, k: int, *parameters: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Float64 log-probs and int64 ids ``[N, k]``, best first; -inf and -100 where there is none."""
    given = k, *parameters, *HeadCall.of(call, products)
    made: tuple[Tensor, Tensor] = getattr(torch.ops, NATIVE).head_top_k(*given)
    return made


def _head_top_k(
    k: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    call, head = HeadCall(*others).restored(hidden, weight, bias)
    V = weight.shape[0] if call.shard is None else int(call.shard.sizes.sum())
    require(k <= V, "k", ("be at most {}, the size of the vocabulary", V), k)
    rows = torch.arange(call.counted.numel(), device=call.counted.device)
    ids = rows.new_full((rows.numel(), k), IGNORE_INDEX)
    call = replace(call, labels=ids)
    found = RowStatistics.zeros(call)
    chunks, memory = head.chunks(rows)
    for chunk in chunks:
        _, logits = head.logits(chunk, memory)
        if call.sets is not None:  # log-probs over sets follow
            logits.masked_fill_(_outside(call.sets, chunk, logits), -torch.inf)
        ids[chunk] = _best(call, logits, k)
        found.put(chunk, statistics_at(call, chunk, logits))
    if call.sets is not None:
        where = ids, call.backend, call.shard or head.weight.shape[0]
        sets = SamplingSets.of(call.sets.token_ids, call.sets.offsets, *where)
        add_set_statistics(replace(call, sets=sets), head, found)
    return found.log_probs.masked_fill(ids == IGNORE_INDEX, -torch.inf), ids


implement("cpu", "head_top_k", _head_top_k, ["CompositeExplicitAutograd"])


def _best(call: Call, logits: Tensor, k: int) -> Tensor:
    """The ids of the largest logits of each row, over all ranks of a shard."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=1)
    if (shard := call.shard) is not None:
        missing = 0, k - ids.shape[1]
        values = F.pad(values.double(), missing, value=-torch.inf)
        mine = torch.stack([values, F.pad(ids + shard.span()[0], missing).double()])
        values, ids = gather(mine, shard.group).permute(1, 2, 0, 3).flatten(2)
        values, places = values.topk(k, dim=1)
        ids = ids.gather(1, places).long()
    return torch.where(values == -torch.inf, IGNORE_INDEX, ids)


def _outside(sets: SamplingSets, rows: Tensor, logits: Tensor) -> Tensor:
    """bool, whether each of the logits of some rows is of an id that is not in the row's set."""
    outside = sets.present[rows, None].repeat(1, logits.shape[1])
    offsets = sets.offsets.contiguous()
    places = torch.arange(sets.token_ids.numel(), device=rows.device)
    row = torch.searchsorted(offsets, places, right=True) - 1 - rows[:1]
    columns = sets.token_ids.long()
    if sets.span is not None:
        columns = columns - sets.span[0]
    here = (row >= 0) & (row < rows.numel()) & (columns >= 0) & (columns < logits.shape[1])
    outside[row[here], columns[here]] = False
    return outside
