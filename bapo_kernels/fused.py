"""The kernels of a loss, one after the other; nothing is read on the host in between."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._ops import ops_of
from .bounds import add_contributions, empty_table, search
from .config import KL_LOSS_TYPES, BAPOConfig, Transform, transform_of
from .distributed import VocabShard
from .inputs import TokenInputs, as_rows
from .output import REPORT, BAPOOutput, ClipBounds


class RowResults(NamedTuple):
    """What a row pass writes for each token; ``stats`` is private to a backend."""

    log_probs: Tensor
    entropy: Tensor
    stats: Tensor
    undecided: Tensor | None  # uint8, 1 where the gradient has to wait for the bounds

    @classmethod
    def empty(cls, N: int, device: torch.device, needs_gradient: bool) -> RowResults:
        """Uninitialised, for ``N`` rows."""
        log_probs = torch.empty(N, dtype=torch.float64, device=device)
        undecided = torch.empty_like(log_probs, dtype=torch.uint8) if needs_gradient else None
        return cls(log_probs, torch.empty_like(log_probs), log_probs.new_empty((N, 2)), undecided)

    @classmethod
    def zeros(cls, N: int, device: torch.device, needs_gradient: bool) -> RowResults:
        """Of rows that are not computed."""
        results = cls.empty(N, device, needs_gradient)
        for result in results:
            if result is not None:
                result.zero_()
        return results


def row_pass(
    backend: str,
    rows: Tensor,
    labels: Tensor,
    counted: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    given: Tensor | None,
    results: RowResults,
    dlogits: Tensor | None,
    inplace: bool,
) -> None:
    """One look at each counted row; the gradient of those that no admissible bounds change."""
    arguments = (
        labels,
        counted,
        tokens.old,
        tokens.advantages,
        tokens.weights,
        tokens.is_weights,
        tokens.ref,
        given,
        config.ratio_lower_start,
        config.ratio_lower_max,
        config.ratio_upper_start,
        config.ratio_upper_max,
        *_policy_options(config),
        *transform_of(config),
        results.log_probs,
        results.entropy,
        results.stats,
    )
    if inplace:
        ops_of(backend).row_pass_(rows, *arguments, results.undecided)
    else:
        ops_of(backend).row_pass(rows, *arguments, dlogits, results.undecided)


def row_statistics(
    backend: str,
    rows: Tensor,
    labels: Tensor,
    counted: Tensor,
    transform: Transform,
    shard: VocabShard | None,
) -> RowResults:
    """One look at each counted row, no gradient; of whole rows also where each rank has a part."""
    no_policy = (None,) * 6 + (0.0,) * 4 + (None, 0.0, 0, 0.0)
    results = RowResults.empty(counted.numel(), rows.device, False)
    log_probs, entropy, stats, _ = results
    here = labels if shard is None else shard.labels(labels)
    ops_of(backend).row_pass(
        rows, here, counted, *no_policy, *transform, log_probs, entropy, stats, None, None
    )
    if shard is None:
        return results
    whole = shard.combine(labels, here, counted, log_probs, entropy, stats, transform)
    return RowResults(*whole, None)


def loss_of_logits(
    logits: Tensor,
    labels: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    backend: str,
    given: Tensor | None,
    counted: Tensor,
    needs_gradient: bool,
    inplace: bool,
    process_group: dist.ProcessGroup | None,
    shard: VocabShard | None,
) -> tuple[BAPOOutput, Tensor | None]:
    """Row pass, search, loss, and the rows that had to wait for the search.

    Of a shard of the vocabulary all rows wait: for the sums of the other ranks.
    """
    rows, flat_labels = as_rows(logits), int64_labels(labels)
    dlogits = dlogit_rows = None
    if needs_gradient:
        dlogits = logits
        if not inplace:
            dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            dlogit_rows = as_rows(dlogits)
    if shard is None:
        results = RowResults.empty(labels.numel(), logits.device, needs_gradient)
        row_pass(
            backend,
            rows,
            flat_labels,
            counted,
            tokens,
            config,
            given,
            results,
            dlogit_rows,
            inplace,
        )
    else:
        transform = transform_of(config)
        results = row_statistics(backend, rows, flat_labels, counted, transform, shard)
    output, dlog_probs, dentropy = loss_of_log_probs(
        results.log_probs, results.entropy, counted, tokens, config, backend, given, process_group
    )
    if needs_gradient and (given is None or shard is not None):
        arguments = (
            flat_labels if shard is None else shard.labels(flat_labels),
            results.stats,
            results.entropy,
            dlog_probs,
            dentropy,
            results.undecided,
        )
        if inplace:
            ops_of(backend).row_gradient_(rows, *arguments, *transform_of(config))
        else:
            ops_of(backend).row_gradient(rows, *arguments, *transform_of(config), dlogit_rows)
    return shaped(output, labels.shape, tokens.live, counted), dlogits


def loss_of_log_probs(
    log_probs: Tensor,
    entropy: Tensor | None,
    counted: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    backend: str,
    given: Tensor | None,
    process_group: dist.ProcessGroup | None,
) -> tuple[BAPOOutput, Tensor, Tensor | None]:
    """Search (unless bounds are given) and loss of flat float64 log-probs, with their gradients."""
    bounds, shares = given, None
    if bounds is None:
        table = empty_table(config, log_probs.device)
        add_contributions(backend, table, log_probs, tokens, config)
        bounds, shares = search(backend, table, config, process_group)
    report, dlog_probs, dentropy = policy(
        backend, log_probs, entropy, counted, tokens, config, bounds, shares
    )
    metrics = dict(zip(REPORT, report.unbind(), strict=True))
    loss = metrics.pop("loss")
    output = BAPOOutput(loss, log_probs, entropy, ClipBounds(*bounds.unbind()), metrics)
    return output, dlog_probs, dentropy


def policy(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    counted: Tensor,
    tokens: TokenInputs,
    config: BAPOConfig,
    bounds: Tensor,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The report of these tokens at these bounds, and the gradients of log-probs and entropy."""
    report = torch.empty(len(REPORT), dtype=torch.float32, device=log_probs.device)
    dlog_probs = torch.empty_like(log_probs)
    dentropy = torch.empty_like(log_probs) if config.entropy_coef else None
    ops_of(backend).policy(
        log_probs,
        entropy,
        counted,
        tokens.old,
        tokens.advantages,
        tokens.weights,
        tokens.is_weights,
        tokens.ref,
        tokens.rollout,
        bounds,
        shares,
        config.ratio_lower_start,
        config.ratio_upper_start,
        config.token_weight == "uniform",
        config.contribution == "gradient",
        config.target,
        config.target_kind == "ratio",
        *_policy_options(config),
        report,
        dlog_probs,
        dentropy,
    )
    return report, dlog_probs, dentropy


def counted_tokens(tokens: TokenInputs, config: BAPOConfig, statistics: str) -> Tensor:
    """Tokens that are computed: all unmasked ones, or those that can change the loss."""
    if statistics == "all":
        return tokens.live
    has_other_terms = bool(config.kl_loss_coef or config.entropy_coef)
    return tokens.live & ((tokens.advantages != 0) | has_other_terms)


def shaped(output: BAPOOutput, shape: torch.Size, live: Tensor, counted: Tensor) -> BAPOOutput:
    """Token outputs in the caller's shape: 0 where masked, NaN where left out."""
    left_out = None if counted is live else live & ~counted
    if left_out is None:
        del output.metrics["live_tokens"]

    def report(values: Tensor) -> Tensor:
        values = torch.where(counted, values.float(), 0.0)
        if left_out is not None:
            values = values.masked_fill(left_out, torch.nan)
        return values.reshape(shape)

    entropy = None if output.entropy is None else report(output.entropy)
    # Dynamo of torch 2.11 cannot return what _replace makes.
    return BAPOOutput(output.loss, report(output.log_probs), entropy, output.bounds, output.metrics)


def int64_labels(labels: Tensor) -> Tensor:
    """Flat; of inference tensors, which autograd does not save, a copy."""
    labels = labels.long().reshape(-1).contiguous()
    eager = not torch.compiler.is_compiling()  # which cannot trace is_inference
    return labels.clone() if eager and labels.is_inference() else labels


def _policy_options(config: BAPOConfig) -> tuple[float | None, float, int, float]:
    kl_loss_type = KL_LOSS_TYPES[config.kl_loss_type]
    return config.clip_ratio_c, config.kl_loss_coef, kl_loss_type, config.entropy_coef
