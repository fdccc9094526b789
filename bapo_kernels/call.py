"""What a call is made of: made once from the arguments, taken by everything behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import check_like, check_transforms, count, refuse
from .config import (
    BAPOConfig,
    grids_of,
    policy_options_of,
    starting_bounds_of,
    transform_of,
)
from .distributed import RowTransform, VocabShard, check_ranks
from .inputs import (
    bounds_tensor,
    check_aggregation,
    check_mask,
    check_offsets,
    check_ratio_level,
    checked_advantages,
    checked_bounds,
    checked_temperature,
    config_or_default,
    normaliser,
)
from .output import GivenBounds
from .prepare import Arguments, divisor_name, token_inputs
from .sampling_mask import SamplingMask
from .sequences import Sequences
from .sets import Sets, sets_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Statistics = Literal["all", "live"]


class TokenOptions(TypedDict, total=False):
    """What a loss may be given per token, and the normalisers of its aggregation."""

    cu_seqlens: Tensor | None
    rollout_log_probs: Tensor | None
    rollout_is_weights: Tensor | None
    ref_log_probs: Tensor | None
    batch_num_tokens: float | Tensor | None
    global_batch_size: float | Tensor | None
    dp_size: int


class LossOptions(TokenOptions, total=False):
    """Keyword arguments of every loss; :func:`bapo_kernels.bapo_loss` documents them."""

    config: BAPOConfig | None
    bounds: GivenBounds | None
    statistics: Statistics
    process_group: dist.ProcessGroup | None


class LogitsOptions(LossOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_loss`."""

    temperature: Tensor | None
    sampling_mask: SamplingMask | None
    backend: str | None
    inplace: bool
    vocab_group: dist.ProcessGroup | None


class LinearOptions(LossOptions, total=False):
    """Keyword arguments of :func:`bapo_kernels.bapo_linear_loss`."""

    bias: Tensor | None
    temperature: Tensor | None
    sampling_mask: SamplingMask | None
    backend: str | None
    chunk_tokens: int | None
    logits_dtype: torch.dtype | None
    vocab_group: dist.ProcessGroup | None


@dataclass(eq=False)  # nobody changes it; frozen, it would take three times as long to make
class Call:
    """A checked call of a loss, or of log-probs alone.

    Tensors per token are flat, contiguous and detached, or ``None`` where not given. Masked entries
    may hold anything.

    Attributes:
        shape: of the labels, or of the log-probs where they are given.
        unmasked: bool ``[N]``.
        counted: bool ``[N]``, the tokens that are computed: all unmasked ones, or with
            ``statistics="live"`` those that can change the loss.
        labels: int64 ``[N]``; ``None`` where log-probs are given.
        temperatures: float32 ``[N]``, in the place of ``config.temperature``.
        weights: float64 ``[N]``, of the aggregation.
        ticket: int32 ``[1]``, 0: the scratch memory of ``policy``.
        bounds: float32 ``[2]``, or ``[2, N]`` where each token has its own; ``None``: the call
            searches.
        sequences: where the ratio is that of a sequence; ``None``: it is the token's.
        log_ratios: float64 ``[N]``, of the sequences, once the log-probs are known.
        shard: the columns of the vocabulary that this rank has; ``None``: all.
        sets: the sampling mask; ``None``: every row has the whole vocabulary.
    """

    config: BAPOConfig
    backend: str
    shape: torch.Size
    unmasked: Tensor
    counted: Tensor
    statistics: Statistics = "all"
    labels: Tensor | None = None
    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    ref_log_probs: Tensor | None = None
    temperatures: Tensor | None = None
    weights: Tensor | None = None
    ticket: Tensor | None = None
    bounds: Tensor | None = None
    sequences: Sequences | None = None
    log_ratios: Tensor | None = None
    process_group: dist.ProcessGroup | None = None
    shard: VocabShard | None = None
    sets: Sets | None = None

    def on_ranks(
        self, made_by: tuple[Any, ...], columns: int, vocab_group: Any, sampling_mask: Any
    ) -> Call:
        """With shard and sets, once the ranks are known to make the same call."""
        searching = self.process_group if self.bounds is None else None
        if vocab_group is not None or searching is not None:
            ids = getattr(sampling_mask, "token_ids", None)
            offsets = getattr(self.sequences, "cu_seqlens", None)
            others = dict(sampling_mask=ids, sequences=offsets, counted=None, process_group=None)
            # torch.compile traces vars() in some versions only.
            mine = {name: getattr(self, name) for name in Call.__annotations__}
            check_ranks(made_by, mine | others, self.unmasked, searching, vocab_group)
        if self.backend != "reference":  # which gathers the whole vocabulary itself
            self.shard = VocabShard.of(columns, self.unmasked, vocab_group)
            self.sets = sets_of(sampling_mask, self.labels, self.backend, self.shard or columns)
        return self

    def without_sets(self) -> Call:
        """The same call, in which only the rows that have no set are counted."""
        if self.sets is None:
            return self
        return replace(self, counted=self.counted > self.sets.present, sets=None)

    def at(self, rows: Tensor) -> Call:
        """The same call of some of its tokens that have no set."""
        given = {name: getattr(self, name) for name in _PER_TOKEN}
        of_rows = {name: values[rows] for name, values in given.items() if values is not None}
        bounds = self.bounds
        if bounds is not None and bounds.ndim == 2:
            bounds = bounds[:, rows]
        return replace(self, shape=rows.shape, sets=None, bounds=bounds, **of_rows)

    def with_labels_of(self, rows: Tensor) -> Call:
        """With labels and temperatures of some rows: a second pass takes nothing else per token."""
        assert self.labels is not None
        temperatures = None if self.temperatures is None else self.temperatures[rows]
        return replace(self, labels=self.labels[rows], temperatures=temperatures, sets=None)

    @property
    def rows_decide(self) -> bool:
        """Whether the row pass can make gradients.

        Those of a shard need the sums of the other ranks, those of a sequence its other rows.
        """
        return self.shard is None and self.sequences is None

    @property
    def transform(self) -> RowTransform:
        """Temperature, scale and soft cap of the logits, and the temperatures of the rows."""
        return *transform_of(self.config), self.temperatures

    @property
    def of_row_pass(self) -> tuple[Any, ...]:
        """What operators that pass over rows take between the labels and their results."""
        return (
            self.counted,
            self.old_log_probs,
            self.advantages,
            self.weights,
            self.rollout_is_weights,
            self.ref_log_probs,
            self.bounds,
            grids_of(self.config),
            *policy_options_of(self.config),
            *self.transform,
        )

    @property
    def label_columns(self) -> Tensor:
        """int64 ``[N]``: the label as a column of this rank's logits; -1: another rank has it.

        Of a row with a set, its position in that.
        """
        assert self.labels is not None
        if self.sets is not None:
            return self.sets.positions
        return self.labels if self.shard is None else self.shard.labels(self.labels)


_PER_TOKEN = (
    "unmasked",
    "counted",
    "labels",
    "old_log_probs",
    "advantages",
    "rollout_log_probs",
    "rollout_is_weights",
    "ref_log_probs",
    "temperatures",
    "weights",
)


def log_probs_call(
    labels: Tensor,
    config: BAPOConfig,
    backend: str,
    temperature: Tensor | None,
    made_by: tuple[Any, ...],
    columns: int,
    vocab_group: dist.ProcessGroup | None = None,
    sampling_mask: SamplingMask | None = None,
) -> Call:
    """Log-probs and entropy of these labels, no loss; ``temperature`` in the shape of these."""
    check_transforms(backend)
    given = {} if temperature is None else {"temperatures": temperature}
    per_token = token_inputs(backend, Arguments(labels, given, config=config))
    unmasked = per_token.unmasked
    call = Call(
        config,
        backend,
        labels.shape,
        unmasked,
        unmasked,
        labels=per_token.labels,
        temperatures=per_token.values.get("temperatures"),
    )
    return call.on_ranks(made_by, columns, vocab_group, sampling_mask)


def loss_call(
    like: Tensor,
    backend: str,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None,
    *,
    temperature: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    columns: int = 0,
    vocab_group: dist.ProcessGroup | None = None,
    for_search: bool = False,
    made_by: tuple[Any, ...] = ("",),
    **options: Unpack[LossOptions],
) -> Call:
    """Checks and flattens the arguments of a loss.

    Offsets on a GPU and normalisers in a tensor are not read: those that break their rule make the
    loss NaN.

    Args:
        like: the labels, or log-probs where those are given.
        temperature: per token or per sequence, or 0-dim.
        columns: of the vocabulary, on this rank; ``vocab_group``: the ranks that share out all.
        for_search: only contributions to the search are needed, no loss.
        made_by: the function, and more that the ranks of ``vocab_group`` must have in common.
    """
    like_name = "log_probs" if like.is_floating_point() else "labels"
    config = config_or_default(options.get("config"))
    statistics = options.get("statistics", "all")
    cu_seqlens = options.get("cu_seqlens")
    check_mask(like, like_name, response_mask)
    if cu_seqlens is not None:
        check_offsets(like, like_name, cu_seqlens)
    check_ratio_level(like, like_name, config, cu_seqlens)
    divisor = None
    if not for_search:
        check_transforms(backend)
        divisor = _divisor(like, like_name, config, options)
    values = {"advantages": checked_advantages(advantages, like, like_name, cu_seqlens)}
    for name, value in (
        ("old_log_probs", old_log_probs),
        ("rollout_log_probs", options.get("rollout_log_probs")),
        ("rollout_is_weights", options.get("rollout_is_weights")),
        ("ref_log_probs", options.get("ref_log_probs")),
    ):
        if value is not None:
            check_like(name, value, like, like_name)
            values[name] = value
    if temperature is not None:
        values["temperatures"] = checked_temperature(temperature, like, like_name, cu_seqlens)
    bounds, own_bounds = None, False
    if (given := options.get("bounds")) is not None:
        lower, upper = checked_bounds(given, like, like_name, config, cu_seqlens)
        own_bounds = lower.ndim > 0
        if own_bounds:
            values |= {"lower": lower, "upper": upper}  # the last two
        else:
            bounds = torch.stack((lower, upper))
    elif not config.has_bounds:
        bounds = bounds_tensor(starting_bounds_of(config), like)
    live = statistics == "live" and not (config.kl_loss_coef or config.entropy_coef)
    arguments = Arguments(
        like,
        values,
        response_mask,
        cu_seqlens,
        live=live,
        weighted=not for_search,
        config=config,
        dp_size=options.get("dp_size", 1),
        divisor=divisor,
        bounds=bounds,
        own_bounds=own_bounds,
    )
    per_token = token_inputs(backend, arguments)
    counted, sequences = per_token.counted, None
    if config.ratio_level == "sequence":
        sequences = Sequences(like.shape[-1], cu_seqlens)
        if live:
            counted = per_token.unmasked & sequences.with_any(counted)
    call = Call(
        config=config,
        backend=backend,
        shape=like.shape,
        unmasked=per_token.unmasked,
        counted=counted,
        labels=per_token.labels,
        weights=per_token.weights,
        ticket=per_token.ticket,
        statistics=statistics,
        bounds=per_token.bounds,
        sequences=sequences,
        process_group=options.get("process_group"),
        **per_token.values,  # type: ignore[arg-type]
    )
    return call.on_ranks(made_by, columns, vocab_group, sampling_mask)


def _divisor(
    like: Tensor, like_name: str, config: BAPOConfig, options: Any
) -> float | Tensor | None:
    """What the mean of ``config.loss_agg_mode`` divides by, if it is given."""
    check_aggregation(like, like_name, config, options.get("cu_seqlens"))
    if config.kl_loss_coef and options.get("ref_log_probs") is None:
        refuse("ref_log_probs", "be given when config.kl_loss_coef is not 0", None)
    mode = config.loss_agg_mode
    needed, names = divisor_name(mode), ("batch_num_tokens", "global_batch_size")
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
