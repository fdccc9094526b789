"""The arguments of a call as the caller has them, checked together.

Imports the checks of ``inputs`` and the data of a call; ``prepare`` makes a call of them. An
argument that every loss takes stands in ``LossOptions``, one per token in ``TokenOptions`` and
among the ``FIELDS`` of ``operators``, and both in :func:`loss_arguments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import check_floating, check_group, check_like, count, refuse, require
from ...config import IGNORE_INDEX, BAPOConfig
from ...sampling_mask import SamplingMask
from ..call import Sequences, Statistics, bounds_tensor
from ..operators import FIELDS
from .ranks import check_ranks
from .single import (
    check_aggregation,
    check_mask,
    check_offsets,
    check_options,
    check_ratio_level,
    check_sampling_mask,
    checked_advantages,
    checked_bounds,
    checked_temperature,
    config_or_default,
    normaliser,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LossOptions


class Arguments(NamedTuple):
    """Checked arguments of a call, as the caller has them.

    Attributes:
        labels_or_log_probs: the labels, or the log-probs where these are given.
        fields: what the kernels take per token as float32, by name.
        weighted: weights of the aggregation are wanted; ``dp_size`` and ``divisor`` are for these.
        divisor: of the mode's mean; ``None``: it is counted.
        bounds: float32 ``[2]``, of all tokens.
        labels: ``[..., K]``, where each token has several.
    """

    labels_or_log_probs: Tensor
    fields: dict[str, Tensor]
    config: BAPOConfig
    response_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    statistics: Statistics = "all"
    weighted: bool = False
    dp_size: int = 1
    divisor: float | Tensor | None = None
    bounds: Tensor | None = None
    process_group: dist.ProcessGroup | None = None
    vocab_group: dist.ProcessGroup | None = None
    sampling_mask: SamplingMask | None = None
    labels: Tensor | None = None

    def is_live(self) -> bool:
        """Whether tokens that cannot change the loss are skipped."""
        needs_all = self.config.kl_loss_coef or self.config.entropy_coef
        return self.statistics == "live" and not needs_all

    def sequences(self) -> Sequences:
        """Of the tokens, whatever the ratio is of."""
        like = self.labels_or_log_probs
        return Sequences(like.shape[-1] if like.ndim else 1, self.cu_seqlens)

    def unmasked(self) -> Tensor:
        """bool, in the shape of the tokens; for checks, since the kernels find out themselves."""
        like = self.labels_or_log_probs
        unmasked = torch.ones_like(like, dtype=torch.bool)
        if not like.is_floating_point():
            unmasked = like != IGNORE_INDEX
        if self.response_mask is not None:
            unmasked = unmasked & (self.response_mask != 0)
        if self.cu_seqlens is not None:
            ids = self.sequences().sequence_ids(len(like))
            unmasked = unmasked & (ids < len(self.cu_seqlens) - 1)
        return unmasked

    def field(self, name: str) -> Tensor | None:
        """A field in the shape of the tokens; for checks, too."""
        values = self.fields.get(name)
        if values is None or values.shape == self.labels_or_log_probs.shape:
            return values
        ids = self.sequences().sequence_ids(len(self.labels_or_log_probs))
        return values[ids.clamp(max=len(values) - 1)]

    def check_ranks(self, function: str, backend: str, **in_common: Any) -> None:
        """Raises where the ranks of a group differ in their first call.

        Args:
            in_common: what else the ranks of ``vocab_group`` must have in common.
        """
        searches = self.bounds is None and "lower" not in self.fields
        search = self.process_group if searches else None
        if search is not None or self.vocab_group is not None:
            like = self.labels_or_log_probs
            of_call = search, self.vocab_group, lambda: in_common | self._facts()
            check_ranks(function, backend, self.config, like, *of_call)

    def _facts(self) -> dict[str, Any]:
        return {
            "shape": self.labels_or_log_probs.shape,
            "the unmasked tokens": self.unmasked(),
            "labels": self.labels_or_log_probs if self.labels is None else self.labels,
            **{name: self.field(name) for name in FIELDS},
            "the normalisers": self.divisor,
            "dp_size": self.dp_size,
            "bounds": self.bounds,
            "statistics": self.statistics,
            "cu_seqlens": self.cu_seqlens,
            "sampling_mask": getattr(self.sampling_mask, "token_ids", None),
        }


def log_probs_arguments(
    labels: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    final_logit_softcapping: float | None,
    vocab_group: dist.ProcessGroup | None,
    sampling_mask: SamplingMask | None,
    several: bool = False,
) -> Arguments:
    """Checks the arguments of log-probs and entropy of these labels, without a loss.

    Args:
        several: labels are ``[..., K]``.
    """
    ids = None
    if several:
        ids = labels.long()
        # Of a row, whether all its labels are masked.
        labels = torch.where((ids == IGNORE_INDEX).all(-1), IGNORE_INDEX, 0)
    config = BAPOConfig(
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
    )
    check_sampling_mask(sampling_mask, labels)
    check_group("vocab_group", vocab_group)
    fields = {}
    if isinstance(temperature, Tensor):
        fields["temperatures"] = checked_temperature(temperature, labels, "labels")
    groups: Any = dict(vocab_group=vocab_group, sampling_mask=sampling_mask)
    return Arguments(labels, fields, config, **groups, labels=ids)


def loss_arguments(
    like: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None,
    *,
    temperature: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    for_search: bool = False,
    **options: Unpack[LossOptions],
) -> Arguments:
    """Checks the arguments of a loss.

    Offsets on a GPU and normalisers in a tensor are not read: those that break their rule make the
    loss NaN.

    Args:
        like: the labels, or log-probs where those are given.
        temperature: per token or per sequence, or 0-dim.
        for_search: only contributions to the search are needed, no loss.
    """
    like_name = "log_probs" if like.is_floating_point() else "labels"
    check_sampling_mask(sampling_mask, like)
    statistics, process_group = options.get("statistics", "all"), options.get("process_group")
    if not for_search:
        check_options(statistics, process_group, vocab_group)
    config = config_or_default(options.get("config"))
    cu_seqlens = options.get("cu_seqlens")
    check_mask(like, like_name, response_mask)
    if cu_seqlens is not None:
        check_offsets(like, like_name, cu_seqlens)
    check_ratio_level(like, like_name, config, cu_seqlens)
    divisor = None if for_search else _divisor(like, like_name, config, options)
    fields = {"advantages": checked_advantages(advantages, like, like_name, cu_seqlens)}
    for name, value in (
        ("old_log_probs", old_log_probs),
        ("rollout_log_probs", options.get("rollout_log_probs")),
        ("rollout_is_weights", options.get("rollout_is_weights")),
        ("ref_log_probs", options.get("ref_log_probs")),
    ):
        if value is not None:
            check_like(name, value, like, like_name)
            fields[name] = value
    if temperature is not None:
        fields["temperatures"] = checked_temperature(temperature, like, like_name, cu_seqlens)
    bounds = None
    if (given := options.get("bounds")) is not None:
        lower, upper = checked_bounds(given, like, like_name, config, cu_seqlens)
        if lower.ndim:
            fields |= {"lower": lower, "upper": upper}
        else:
            bounds = torch.stack((lower, upper))
    elif not config.has_bounds:
        bounds = bounds_tensor(config.options.start(), like)
    return Arguments(
        like,
        fields,
        config,
        response_mask,
        cu_seqlens,
        statistics=statistics,
        weighted=not for_search,
        dp_size=options.get("dp_size", 1),
        divisor=divisor,
        bounds=bounds,
        process_group=process_group,
        vocab_group=vocab_group,
        sampling_mask=sampling_mask,
    )


def token_arguments(
    log_probs: Tensor,
    *batch: Any,
    entropy: Tensor | None = None,
    for_search: bool = False,
    **options: Unpack[LossOptions],
) -> Arguments:
    """Checks the arguments of a loss on given log-probs, or of a search alone."""
    check_floating("log_probs", log_probs)
    needed = not for_search and config_or_default(options.get("config")).entropy_coef
    rule = "be given when config.entropy_coef is not 0"
    require(entropy is not None or not needed, "entropy", rule, None)
    if entropy is not None:
        check_like("entropy", entropy, log_probs, "log_probs")
    return loss_arguments(log_probs, *batch, for_search=for_search, **options)


# Of the mode's mean: the argument that holds its divisor.
_DIVISORS = {"token-mean": "batch_num_tokens", "token-sum": None}


def _divisor(
    like: Tensor, like_name: str, config: BAPOConfig, options: Any
) -> float | Tensor | None:
    """What the mean of ``config.loss_agg_mode`` divides by, if it is given."""
    check_aggregation(like, like_name, config, options.get("cu_seqlens"))
    if config.kl_loss_coef and options.get("ref_log_probs") is None:
        refuse("ref_log_probs", "be given when config.kl_loss_coef is not 0", None)
    mode = config.loss_agg_mode
    needed = _DIVISORS.get(mode, "global_batch_size")
    names = "batch_num_tokens", "global_batch_size"
    given = {name: normaliser(name, options.get(name), like, like_name) for name in names}
    divisor = None if needed is None else given.pop(needed)
    ignored = [name for name, value in given.items() if value is not None]
    dp_size = count("dp_size", options.get("dp_size", 1))
    if needed is not None and divisor is None and dp_size > 1:
        refuse(needed, f"be given when dp_size > 1 with loss_agg_mode={mode!r}", None)
    if divisor is None and len(ignored) == 1:  # frameworks give both, whatever the mode
        rule = f"be None with loss_agg_mode={mode!r}, which divides by {needed or 'neither count'}"
        refuse(ignored[0], rule, options[ignored[0]])
    return divisor
