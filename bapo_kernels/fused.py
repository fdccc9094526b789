"""The kernels of a loss, one after the other; nothing is read on the host in between."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import sequences, sets
from ._ops import ops_of
from .bounds import search_of_call
from .call import Call
from .config import grids_of, policy_options_of, target_of
from .inputs import as_rows
from .memory import empty_gradient
from .output import REPORT, BAPOOutput, ClipBounds


class RowStatistics(NamedTuple):
    """What the first pass finds for each row, in float64; ``stats`` is private to a backend."""

    log_probs: Tensor
    entropy: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, N: int, device: torch.device) -> RowStatistics:
        """Uninitialised, for ``N`` rows."""
        log_probs = torch.empty(N, dtype=torch.float64, device=device)
        return cls(log_probs, torch.empty_like(log_probs), log_probs.new_empty((N, 2)))

    def at(self, rows: Tensor) -> RowStatistics:
        """Of some rows."""
        return RowStatistics(*(values[rows] for values in self))


class Coefficients(NamedTuple):
    """Of each row: d loss / d log-prob and d loss / d entropy (``None``: 0)."""

    dlog_probs: Tensor
    dentropy: Tensor | None

    def at(self, rows: Tensor) -> Coefficients:
        """Of some rows."""
        return Coefficients(
            self.dlog_probs[rows], None if self.dentropy is None else self.dentropy[rows]
        )

    def without(self, rows: Tensor) -> Coefficients:
        """0 in the rows of bool ``[N]``."""
        dentropy = self.dentropy
        dentropy = None if dentropy is None else dentropy.masked_fill(rows, 0.0)
        return Coefficients(self.dlog_probs.masked_fill(rows, 0.0), dentropy)

    def has_gradient(self) -> Tensor:
        """bool ``[N]``: the gradient of a row is not surely zero."""
        some = self.dlog_probs != 0
        return some if self.dentropy is None else some | (self.dentropy != 0)


def row_statistics(call: Call, logits: Tensor, values: Tensor | None = None) -> RowStatistics:
    """First pass over each counted row; of whole rows also where each rank has a shard of them.

    Args:
        values: of the sets of the call, if it has any.
    """
    assert call.labels is not None
    found = RowStatistics.empty(call.labels.numel(), logits.device)
    columns, counted = call.label_columns, call.without_sets().counted
    ops_of(call.backend).row_statistics(logits, columns, counted, *call.transform, *found)
    if values is not None:
        sets.statistics(call, values, found)
    return of_all_ranks(call, found)


def of_all_ranks(call: Call, found: RowStatistics) -> RowStatistics:
    """The statistics of counted rows of which each rank has a shard."""
    if call.shard is None:
        return found
    assert call.labels is not None
    return RowStatistics(
        *call.shard.combine(call.labels, call.label_columns, call.counted, *found, call.transform)
    )


def row_pass(call: Call, logits: Tensor, out: Tensor | None) -> tuple[RowStatistics, Tensor]:
    """Both passes over each counted row; the second makes the gradient where it is decided.

    Args:
        out: where the gradients go; ``None``: over the logits.

    Returns:
        The statistics, and uint8 ``[N]``: 1 where a row is undecided and has no gradient yet.
    """
    assert call.labels is not None
    found = RowStatistics.empty(call.labels.numel(), logits.device)
    undecided = torch.empty_like(found.log_probs, dtype=torch.uint8)
    arguments = call.labels, *call.of_row_pass, *found, undecided
    if out is None:
        ops_of(call.backend).row_pass_(logits, *arguments)
    else:
        ops_of(call.backend).row_pass(logits, *arguments, out)
    return found, undecided


def row_gradient(
    call: Call,
    logits: Tensor,
    found: RowStatistics,
    coefficients: Coefficients,
    out: Tensor | None,
    only: Tensor | None = None,
) -> None:
    """Second pass over rows whose coefficients are known; those of rows with a set are 0 here.

    Args:
        out: where the gradients go; ``None``: over the logits.
        only: uint8 ``[N]``, the rows it is about; ``None``: all.
    """
    if only is None and call.sets is not None:
        coefficients = coefficients.without(call.sets.present)
    arguments = call.label_columns, found.stats, found.entropy, *coefficients, only, *call.transform
    if out is None:
        ops_of(call.backend).row_gradient_(logits, *arguments)
    else:
        ops_of(call.backend).row_gradient(logits, *arguments, out)


def loss_of_logits(
    call: Call, logits: Tensor, needs_gradient: bool, inplace: bool
) -> tuple[BAPOOutput, Tensor | None]:
    """Row pass, search, loss, and the gradient of the rows that were undecided.

    Where the row pass can decide no row (:attr:`Call.rows_decide`), all are; with given bounds none
    of the others is. The values of sets are gathered before their rows of logits become zeros,
    among which the gradients are scattered at the end.
    """
    rows = as_rows(logits)
    dlogits = out = undecided = undecided_sets = None
    values = None if call.sets is None else sets.gathered(call, rows)
    if inplace:
        dlogits = logits
    elif needs_gradient:
        dlogits = empty_gradient(logits)
        out = as_rows(dlogits)
    if dlogits is None or not call.rows_decide:
        found = row_statistics(call, rows, values)
    else:
        found, undecided = row_pass(call.without_sets(), rows, out)
        if values is not None:
            undecided_sets = sets.both_passes(call, values, found)
    output, coefficients = loss_of_log_probs(call, found.log_probs, found.entropy)
    if dlogits is None:
        return output, None
    if call.bounds is None or not call.rows_decide:
        row_gradient(call, rows, found, coefficients, out, undecided)
        if values is not None:
            sets.to_gradient(call, values, found, coefficients, undecided_sets)
    if values is not None:
        sets.scatter(call, values, rows if out is None else out)
    return output, dlogits


def loss_of_log_probs(
    call: Call, log_probs: Tensor, entropy: Tensor | None
) -> tuple[BAPOOutput, Coefficients]:
    """Search (unless bounds are given) and loss of flat float64 log-probs, with their gradients.

    The outputs per token are in the caller's shape: 0 where masked, NaN where unmasked but skipped.
    """
    call = sequences.with_log_ratios(call, log_probs)
    bounds, masses = call.bounds, None
    if bounds is None:
        bounds, masses = search_of_call(call, log_probs)
    shape = 1 if entropy is None else 2, *call.shape
    outputs = torch.empty(shape, dtype=torch.float32, device=log_probs.device)
    report, coefficients = policy(call, log_probs, entropy, bounds, masses, outputs)
    metrics = dict(zip(REPORT, report.unbind(), strict=True))
    loss = metrics.pop("loss")
    if call.statistics == "all":
        del metrics["live_tokens"]
    if call.sets is not None:
        metrics["label_outside_mask"] = call.sets.labels_outside(call.unmasked)
    shown = outputs.unbind()
    entropy = None if entropy is None else shown[1]
    used = bounds if bounds.ndim == 1 else bounds.view(2, *call.shape)
    used_bounds = ClipBounds(*used.unbind())
    return BAPOOutput(loss, shown[0], entropy, used_bounds, metrics), coefficients


def policy(
    call: Call,
    log_probs: Tensor,
    entropy: Tensor | None,
    bounds: Tensor,
    masses: Tensor | None = None,
    outputs: Tensor | None = None,
) -> tuple[Tensor, Coefficients]:
    """The report of these tokens at these bounds, and the gradients of log-probs and entropy.

    Args:
        outputs: where log-probs and entropies go as the caller gets them.
    """
    config = call.config
    report = torch.empty(len(REPORT), dtype=torch.float32, device=log_probs.device)
    dlog_probs = torch.empty_like(log_probs)
    dentropy = torch.empty_like(log_probs) if config.entropy_coef else None
    spreads = call.log_ratios is not None and config.differentiates_ratio
    dlog_ratios = torch.empty_like(log_probs) if spreads else None
    ops_of(call.backend).policy(
        log_probs,
        entropy,
        call.counted,
        call.old_log_probs,
        call.log_ratios,
        call.advantages,
        call.weights,
        call.rollout_is_weights,
        call.ref_log_probs,
        call.rollout_log_probs,
        bounds,
        masses,
        grids_of(config),
        config.token_weight == "uniform",
        config.contribution == "gradient",
        target_of(config),
        config.target_kind == "ratio",
        *policy_options_of(config),
        call.unmasked if call.statistics == "live" else None,
        call.ticket,
        report,
        dlog_probs,
        dentropy,
        outputs,
        dlog_ratios,
    )
    if dlog_ratios is not None:
        sequences.spread(call, dlog_ratios, dlog_probs)
    return report, Coefficients(dlog_probs, dentropy)
