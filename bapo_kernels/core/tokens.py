"""From the log-probs of a call to its loss: search, ratios of sequences, loss of the tokens.

Imports the data of a call, autograd and the operators. The host reads nothing in between. The order
of the operators is the contract of the bits: bounds first, then the loss at these bounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Options
from ..output import REPORT, BAPOOutput, ClipBounds
from .autograd import with_gradients, with_own_version
from .call import Call
from .operators import FIELDS, ops_of


class Coefficients(NamedTuple):
    """d loss / d log-prob of each label, and d loss / d entropy of each row (``None``: 0)."""

    dlog_probs: Tensor
    dentropy: Tensor | None

    def at(self, rows: Tensor) -> Coefficients:
        """The coefficients of some rows."""
        return Coefficients(
            self.dlog_probs[rows], None if self.dentropy is None else self.dentropy[rows]
        )

    def without(self, rows: Tensor) -> Coefficients:
        """The coefficients, but 0 in the rows of bool ``[N]``."""
        dentropy = self.dentropy
        dentropy = None if dentropy is None else dentropy.masked_fill(rows, 0.0)
        masked = rows if self.dlog_probs.ndim == 1 else rows[:, None]
        return Coefficients(self.dlog_probs.masked_fill(masked, 0.0), dentropy)

    def has_gradient(self) -> Tensor:
        """bool ``[N]``: the gradient of a row is not surely zero."""
        some = self.dlog_probs != 0
        some = some if some.ndim == 1 else some.any(1)
        return some if self.dentropy is None else some | (self.dentropy != 0)


def with_log_ratios(call: Call, log_probs: Tensor) -> Call:
    """The call with the log-ratios of its sequences, where the ratio is theirs."""
    if call.sequences is None:
        return call
    log_ratios = torch.empty_like(log_probs)
    ops_of(call.backend).sequence_log_ratios(
        log_probs, call.counted, call.fields, call.present, *call.sequences, log_ratios
    )
    return replace(call, log_ratios=log_ratios)


def search(call: Call, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`solve` for the tokens of a call, whose flat float64 log-probs these are.

    With ``call.process_group`` for those of all its ranks.
    """
    group = call.process_group
    if group is not None:
        table = contributions(call, log_probs, group)
        dist.all_reduce(table, group=group)
        return solve(call.backend, table, call.options)
    result = _empty_result(log_probs.device)
    ops_of(call.backend).search(*_searched(call, log_probs), *result)
    return result


def contributions(call: Call, log_probs: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The table of the tokens of a call, float64 ``[ranks, points]``: zeros but in this rank's row.

    The sum over the ranks then rounds nothing, in whatever order an all-reduce adds.
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    shape = ranks, call.options.points()
    table = torch.empty(shape, dtype=torch.float64, device=log_probs.device)
    ops_of(call.backend).contributions(*_searched(call, log_probs), rank, table)
    return table


def solve(backend: str, table: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Finds where Algorithm 1 stops on the sum of the rows of a table.

    Returns:
        Bounds, float32 ``[2]``; masses, float64 ``[6]``: the positive and the negative mass at the
        bounds, then both at the starting bounds, then both at the last points of the grids.
    """
    result = _empty_result(table.device)
    ops_of(backend).solve(table, options, *result)
    return result


def _searched(call: Call, log_probs: Tensor) -> tuple[object, ...]:
    """The arguments of the operators of the search."""
    return log_probs, call.counted, call.log_ratios, call.fields, call.present, call.options


def _empty_result(device: torch.device) -> tuple[Tensor, Tensor]:
    bounds = torch.empty(2, dtype=torch.float32, device=device)
    return bounds, torch.empty(6, dtype=torch.float64, device=device)


def loss_of_log_probs(
    call: Call, log_probs: Tensor, entropy: Tensor | None
) -> tuple[BAPOOutput, Coefficients]:
    """Search (unless bounds are given) and loss of flat float64 log-probs, with their gradients.

    The outputs per token are in the caller's shape: 0 where masked, NaN where unmasked but skipped.
    """
    call = with_log_ratios(call, log_probs)
    bounds, masses = call.bounds, None
    if call.searches:
        bounds, masses = search(call, log_probs)
    shape = 1 if entropy is None else 2, *call.shape
    outputs = torch.empty(shape, dtype=torch.float32, device=log_probs.device)
    report, coefficients = token_loss(call, log_probs, entropy, bounds, masses, outputs)
    metrics = dict(zip(REPORT, report.unbind(), strict=True))
    loss = metrics.pop("loss")
    if call.statistics == "all":
        del metrics["live_tokens"]
    if not call.adds_up:
        del metrics["loss_adds_up"]
    if call.sets is not None:
        metrics["label_outside_mask"] = call.sets.labels_outside(call.unmasked)
    shown = outputs.unbind()
    if bounds is None:  # tokens have their own
        assert call.fields is not None
        bounds = call.fields[FIELDS.index("lower") :][:2].view(2, *call.shape)
    used_bounds = ClipBounds(*bounds.unbind())
    entropy = None if entropy is None else shown[1]
    return BAPOOutput(loss, shown[0], entropy, used_bounds, metrics), coefficients


class _PerToken(torch.autograd.Function):
    """Outputs per token, with the gradient of the flat float64 values that they show."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shown: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(counted)
        return with_own_version(shown)

    @staticmethod
    def backward(ctx: Any, dshown: Tensor) -> tuple[Tensor, None, None]:
        (counted,) = ctx.saved_tensors
        return torch.where(counted, dshown.reshape(-1).double(), 0.0), None, None


def differentiable_loss(call: Call, log_probs: Tensor, entropy: Tensor | None) -> BAPOOutput:
    """The loss of flat float64 log-probs and entropy; all its outputs have their gradients."""
    with torch.no_grad():
        detached = None if entropy is None else entropy.detach()
        output, coefficients = loss_of_log_probs(call, log_probs.detach(), detached)
    per_token = log_probs, entropy
    gradients = [
        made if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad else None
        for tensor, made in zip(per_token, coefficients, strict=True)
    ]
    (loss,) = with_gradients(output.loss, (), call.backend, per_token, gradients)
    shown: Tensor = _PerToken.apply(log_probs, output.log_probs, call.counted)
    if entropy is not None:
        entropy = _PerToken.apply(entropy, output.entropy, call.counted)
    # Dynamo of torch 2.11 cannot return what _replace makes.
    return BAPOOutput(loss, shown, entropy, output.bounds, output.metrics)


def token_loss(
    call: Call,
    log_probs: Tensor,
    entropy: Tensor | None,
    bounds: Tensor | None,
    masses: Tensor | None = None,
    outputs: Tensor | None = None,
) -> tuple[Tensor, Coefficients]:
    """The report of these tokens at these bounds, and the gradients of log-probs and entropy.

    Args:
        bounds: of all tokens; ``None`` where they have their own.
        outputs: where log-probs and entropies go as the caller gets them.
    """
    options = call.options
    report = torch.empty(len(REPORT), dtype=torch.float32, device=log_probs.device)
    dlog_probs = torch.empty_like(log_probs)
    dentropy = torch.empty_like(log_probs) if options.entropy_coef else None
    is_spread = call.log_ratios is not None and options.differentiates_ratio()
    dlog_ratios = torch.empty_like(log_probs) if is_spread else None
    unmasked = call.unmasked if call.statistics == "live" else None
    given = call.weights, call.log_ratios, call.fields, call.present
    results = report, dlog_probs, dentropy, outputs, dlog_ratios
    ops_of(call.backend).token_loss(
        *(log_probs, entropy, call.counted, unmasked, *given),
        *(bounds, masses, options, call.ticket, *results),
    )
    if dlog_ratios is not None:
        assert call.sequences is not None
        gradients = dlog_ratios, call.counted, *call.sequences, dlog_probs
        ops_of(call.backend).add_sequence_means_(*gradients)
    return report, Coefficients(dlog_probs, dentropy)
