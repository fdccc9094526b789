"""The arguments of a call as the caller has them, checked together.

Imports the checks of ``single`` and ``ranks``, and the data of a call. Nothing is read on the host.
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
from . import single
from .ranks import check_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LossOptions, RowOptions, SoftmaxOptions


class Arguments(NamedTuple):
    """Checked arguments of a call, as the caller has them.

    Attributes:
        labels_or_log_probs: the labels, or the log-probs where these are given.
        fields: what the kernels take per token as float32, by name.
        divisor: of the mode's mean; ``None``: it is counted.
        bounds: float32 ``[2]``, of all tokens.
        labels: ``[..., K]``, where each token has several.
        weighted: weights of the aggregation are wanted; ``dp_size`` and ``divisor`` are for these.
    """

    labels_or_log_probs: Tensor
    fields: dict[str, Tensor]
    config: BAPOConfig
    response_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    statistics: Statistics = "all"
    dp_size: int = 1
    divisor: float | Tensor | None = None
    bounds: Tensor | None = None
    sampling_mask: SamplingMask | None = None
    labels: Tensor | None = None
    weighted: bool = False
    process_group: dist.ProcessGroup | None = None
    vocab_group: dist.ProcessGroup | None = None

    def is_live(self) -> bool:
        """Whether tokens that cannot change the loss are skipped."""
        needs_all = self.config.kl_loss_coef or self.config.entropy_coef
        return self.statistics == "live" and not needs_all

    def adds_up(self) -> bool:
        """Whether the losses of the calls of a batch add up to that of the batch."""
        return self.divisor is not None or self.config.loss_agg_mode == "token-sum"

    def sequences(self) -> Sequences:
        """The sequences of the tokens, whether or not the ratio is theirs."""
        length = self.labels_or_log_probs.shape[-1] if self.labels_or_log_probs.ndim else 1
        return Sequences(length, self.cu_seqlens)

    def unmasked(self) -> Tensor:
        """bool, in the shape of the tokens; for checks, since the kernels find out themselves."""
        unmasked = torch.ones_like(self.labels_or_log_probs, dtype=torch.bool)
        if not self.labels_or_log_probs.is_floating_point():
            unmasked = self.labels_or_log_probs != IGNORE_INDEX
        if self.response_mask is not None:
            unmasked = unmasked & (self.response_mask != 0)
        if self.cu_seqlens is not None:
            ids = self.sequences().sequence_ids(len(self.labels_or_log_probs))
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
        search, shards = self.process_group if searches else None, self.vocab_group
        if search is not None or shards is not None:
            compared = search, shards, lambda: in_common | self._facts()
            check_ranks(function, backend, self.config, self.labels_or_log_probs, *compared)

    def _facts(self) -> dict[str, Any]:
        """All members by the names that users know, but for those that are compared apart."""
        facts: dict[str, Any] = {
            "shape": self.labels_or_log_probs.shape,
            "the unmasked tokens": self.unmasked(),
        }
        facts |= self._asdict() | {name: self.field(name) for name in FIELDS}
        facts["labels"] = self.labels_or_log_probs if self.labels is None else self.labels
        facts["the normalisers"] = self.divisor
        facts["sampling_mask"] = getattr(self.sampling_mask, "token_ids", None)
        apart = {"labels_or_log_probs", "fields", "config", "response_mask", "divisor", "weighted"}
        apart |= {"process_group", "vocab_group"}
        return {name: value for name, value in facts.items() if name not in apart}


def log_probs_arguments(
    labels: Tensor, several: bool = False, **options: Unpack[SoftmaxOptions]
) -> Arguments:
    """Checks the arguments of log-probs and entropy of these labels, without a loss.

    Args:
        several: labels are ``[..., K]``.
    """
    like = labels
    if several:  # a row is masked where all its labels are
        labels = labels.long()
        # Inductor 2.13 fuses `labels == -100` with the caller's, and reads log-probs too early.
        like = torch.where((labels - IGNORE_INDEX).any(-1), 0, IGNORE_INDEX)
    temperature, mask = options.get("temperature", 1.0), options.get("sampling_mask")
    config = BAPOConfig(
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        logit_scale=options.get("logit_scale", 1.0),
        final_logit_softcapping=options.get("final_logit_softcapping"),
    )
    single.check_sampling_mask(mask, like)
    group = options.get("vocab_group")
    check_group("vocab_group", group)
    fields = {}
    if isinstance(temperature, Tensor):
        fields["temperatures"] = single.checked_temperature(temperature, like)
    given = Arguments(like, fields, config, sampling_mask=mask, vocab_group=group)
    return given._replace(labels=labels) if several else given


def loss_arguments(
    like: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None,
    *,
    for_search: bool = False,
    **options: Unpack[RowOptions],
) -> Arguments:
    """Checks the arguments of a loss.

    Offsets on a GPU and normalisers in a tensor are not read: those that break their rule make the
    loss NaN.

    Args:
        like: the labels, or log-probs where those are given.
        for_search: only contributions to the search are needed, no loss.
    """
    mask, vocab_group = options.get("sampling_mask"), options.get("vocab_group")
    statistics, process_group = options.get("statistics", "all"), options.get("process_group")
    single.check_sampling_mask(mask, like)
    if not for_search:
        if statistics not in ("all", "live"):
            refuse("statistics", "be 'all' or 'live'", repr(statistics))
        check_group("process_group", process_group)
        check_group("vocab_group", vocab_group)
    config = single.config_or_default(options.get("config"))
    temperature = options.get("temperature")
    if not (temperature is None or isinstance(temperature, Tensor)):
        config = single.at_temperature(config, temperature)
    cu_seqlens = options.get("cu_seqlens")
    single.check_mask(like, response_mask)
    if cu_seqlens is not None:
        single.check_offsets(like, cu_seqlens)
    single.check_ratio_level(like, config, cu_seqlens)
    divisor = None if for_search else _divisor(like, config, options)
    fields = {"advantages": single.checked_advantages(advantages, like, cu_seqlens)}
    for name, value in (
        ("old_log_probs", old_log_probs),
        ("rollout_log_probs", options.get("rollout_log_probs")),
        ("rollout_is_weights", options.get("rollout_is_weights")),
        ("ref_log_probs", options.get("ref_log_probs")),
    ):
        if value is not None:
            single.check_per_token(name, value, like)
            fields[name] = value
    if isinstance(temperature, Tensor):
        fields["temperatures"] = single.checked_temperature(temperature, like, cu_seqlens)
    bounds = None
    if (given := options.get("bounds")) is not None:
        lower, upper = single.checked_bounds(given, like, config, cu_seqlens)
        if lower.ndim:
            fields |= {"lower": lower, "upper": upper}
        else:
            bounds = torch.stack((lower, upper))
    elif not config.has_bounds:
        bounds = bounds_tensor(config.options.start(), like)
    first = like, fields, config, response_mask, cu_seqlens, statistics
    others = options.get("dp_size", 1), divisor, bounds, mask, None, not for_search
    return Arguments(*first, *others, process_group, vocab_group)


def token_arguments(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None,
    *,
    entropy: Tensor | None = None,
    for_search: bool = False,
    **options: Unpack[LossOptions],
) -> Arguments:
    """Checks the arguments of a loss on given log-probs, or of a search alone."""
    if for_search and not torch.compiler.is_compiling():
        given = dict(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
        _check_not_mapped(given | dict(response_mask=response_mask, **options))
    check_floating("log_probs", log_probs)
    needed = not for_search and single.config_or_default(options.get("config")).entropy_coef
    rule = "be given when config.entropy_coef is not 0"
    require(entropy is not None or not needed, "entropy", rule, None)
    if entropy is not None:
        check_like("entropy", entropy, log_probs, "log_probs")
    batch = old_log_probs, advantages, response_mask
    return loss_arguments(log_probs, *batch, for_search=for_search, **options)


def _check_not_mapped(arguments: dict[str, Any]) -> None:
    """Requires tensors that ``torch.func.vmap`` does not map, inside of any other transform."""
    functorch: Any = torch._C._functorch
    for name, value in arguments.items():
        while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
            rule = "not be mapped by torch.func.vmap (call each search in a loop)"
            require(not functorch.is_batchedtensor(value), name, rule, "a mapped tensor")
            value = functorch.get_unwrapped(value)


# The argument that holds the divisor of a mode's mean.
_DIVISORS = {"token-mean": "batch_num_tokens", "token-sum": None}


def _divisor(like: Tensor, config: BAPOConfig, options: RowOptions) -> float | Tensor | None:
    """The divisor of the mean of ``config.loss_agg_mode``, if it is given."""
    single.check_aggregation(like, config, options.get("cu_seqlens"))
    if config.kl_loss_coef and options.get("ref_log_probs") is None:
        refuse("ref_log_probs", "be given when config.kl_loss_coef is not 0", None)
    mode = config.loss_agg_mode
    needed = _DIVISORS.get(mode, "global_batch_size")
    counts = {
        "batch_num_tokens": options.get("batch_num_tokens"),
        "global_batch_size": options.get("global_batch_size"),
    }
    given = {name: single.normaliser(name, value, like) for name, value in counts.items()}
    divisor = None if needed is None else given.pop(needed)
    ignored = [name for name, value in given.items() if value is not None]
    dp_size = count("dp_size", options.get("dp_size", 1))
    if needed is not None and divisor is None and dp_size > 1:
        refuse(needed, f"be given when dp_size > 1 with loss_agg_mode={mode!r}", None)
    if divisor is None and len(ignored) == 1:  # frameworks give both, whatever the mode
        rule = f"be None with loss_agg_mode={mode!r}, which divides by {needed or 'neither count'}"
        refuse(ignored[0], rule, counts[ignored[0]])
    return divisor
