"""The metrics of many calls as those of their batch, for a log.

Imports the checks and the results. A mean over calls or ranks would count a call of padding, whose
means are 0, like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import check_group, count, require
from .output import BAPOOutput

_LOSSES = ("loss", "pg_loss", "kl_loss")
_COUNTS = (
    *("tokens", "tokens_pos", "tokens_neg", "live_tokens", "label_outside_mask"),
    *("gradient_entries", "gradient_noise"),
)


@torch.no_grad()
def mean_metrics(
    outputs: Sequence[BAPOOutput | Mapping[str, Tensor]],
    process_group: dist.ProcessGroup | None = None,
    dp_size: int = 1,
) -> dict[str, Tensor]:
    """The metrics of a batch from those of its micro-batches, on all ranks.

    Means over tokens are weighted with ``tokens`` (with ``live_tokens`` where these alone are
    counted), ``pg_clipfrac_pos`` and ``pg_clipfrac_neg`` with ``tokens_pos`` and ``tokens_neg``;
    counts, ``gradient_entries`` and ``gradient_noise`` add up. ``loss``, ``pg_loss`` and
    ``kl_loss`` add up too if the calls had the counts of the whole batch (``batch_num_tokens``,
    ``global_batch_size``), or with ``"token-sum"``; otherwise they are weighted with ``tokens``.
    Bounds and shares are means, too (a ratio of masses is infinite where one is): the decision's
    where all calls have one. With the scopes ``"step"`` and ``"lagged"`` its shares are in
    :attr:`ClipBoundSearch.metrics`: ``mean_metrics(outputs) | search.metrics``.

    Args:
        outputs: of at least one call on every rank, each an output or its ``metrics`` (without
            ``loss``). All have the same metrics.
        process_group: the data-parallel ranks, which may have other numbers of calls: one
            all-reduce, in float64. ``None``: this rank alone.
        dp_size: what the losses were called with, and are divided by here.

    Returns:
        float32 0-dim tensors on the device of the outputs. The host reads nothing.

    Raises:
        ValueError: an argument breaks its rule.

    Examples:
        >>> def call(A):
        ...     A = torch.tensor(A)
        ...     return bapo_loss_from_log_probs(torch.zeros_like(A), None, A)
        >>> calls = call([1.0]), call([-1.0, -1.0, -1.0])
        >>> metrics = mean_metrics(calls)
        >>> metrics["loss"], metrics["tokens_neg"]  # (-1 + 3)/4
        (tensor(0.5000), tensor(3.))
    """
    check_group("process_group", process_group)
    dp_size = count("dp_size", dp_size)
    is_list = not isinstance(outputs, (BAPOOutput, Mapping))
    require(is_list, "outputs", "be a list", type(outputs).__name__)
    calls = [
        {"loss": each.loss, **each.metrics} if isinstance(each, BAPOOutput) else dict(each)
        for each in outputs
    ]
    require(len(calls) > 0, "outputs", "have the output of a call", "none")
    names = [name for name in calls[0] if name != "loss_adds_up"]
    require("tokens" in names, "outputs", "have the metric 'tokens'", names)
    for each in calls:
        different = sorted(each.keys() ^ calls[0].keys())
        got = f"{different} in some only"
        require(len(different) == 0, "outputs", "have the same metrics", got)
    of_means = "live_tokens" if "live_tokens" in names else "tokens"
    weights = dict.fromkeys(_LOSSES, "tokens")
    weights |= {"pg_clipfrac_pos": "tokens_pos", "pg_clipfrac_neg": "tokens_neg"}
    by = [names.index(weights.get(name, of_means)) for name in names]
    values = torch.stack([torch.stack([each[name] for name in names]) for each in calls]).double()
    weight = values[:, by]
    weighted = torch.where(weight > 0, values * weight, 0.0)  # a ratio of masses may be infinite
    sums = torch.stack([weighted, weight, values, torch.ones_like(values)]).sum(1)
    if process_group is not None:
        dist.all_reduce(sums, group=process_group)
    weighted, weight, added, number = sums.unbind()
    means = torch.where(weight > 0, weighted / weight, added / number)
    adds_up = _COUNTS + (_LOSSES if "loss_adds_up" in calls[0] else ())
    result = {}
    for name, total, mean in zip(names, added, means, strict=True):
        value = total if name in adds_up else mean
        result[name] = (value / dp_size if name in _LOSSES else value).float()
    return result
