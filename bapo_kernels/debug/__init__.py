"""Debugging aids: checks that read values, a report of the environment, the instruction set.

May import everything below the public functions, and ``bapo_loss``. It may read values, which the
functions that it checks must not.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import available_backends, choose, native
from ..checks import refuse, require
from ..config import IGNORE_INDEX
from ..core.arguments.options import LossOptions, RowOptions
from ..core.arguments.single import (
    LIMITS_OF_BOUNDS,
    check_logits,
    rising_offsets,
)
from ..core.arguments.together import Arguments, loss_arguments
from ..core.distributed import whole_vocabulary
from ..core.head import gemm
from ..core.operators import FIELDS, NATIVE
from ..functional import bapo_loss
from ..reference.sampling_sets import allowed_tokens, outside_of_sets
from ..sampling_mask import SamplingMask, check_rise
from . import alignment

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROWS = 64  # rows of logits checked at a time


class InputSummary(NamedTuple):
    """What :func:`check_inputs` has seen, in numbers that show many a mistake at a glance.

    Attributes:
        tokens, unmasked: how many there are.
        difference: mean ``|log_prob - old_log_prob|`` of at most 512 unmasked tokens, about 0 in a
            first step; ``None`` without ``old_log_probs``.
        log_prob: mean log-prob of their labels.
        positive, negative: unmasked tokens with A > 0 and with A < 0.

    Examples:
        >>> logits, labels = torch.zeros(2, 4), torch.tensor([1, 3])
        >>> debug.check_inputs(logits, labels, torch.full((2,), -1.39), torch.ones(2)).unmasked
        2
    """

    tokens: int
    unmasked: int
    difference: float | None
    log_prob: float
    positive: int
    negative: int

    def __str__(self) -> str:
        """One line."""
        off = "on-policy"
        if self.difference is not None:
            off = f"mean |log_prob - old| {self.difference:.1g}"
            off += " (0 in a first step)" if self.difference > alignment.NEAR else ""
        mask = f"{self.unmasked} of {self.tokens} tokens unmasked"
        signs = f"{self.positive} with A > 0, {self.negative} with A < 0"
        return f"{mask}, {off}, mean log_prob {self.log_prob:.3g}, {signs}"


@torch.no_grad()
def check_inputs(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    backend: str | None = None,
    inplace: bool = False,
    temperature: float | Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    **options: Unpack[LossOptions],
) -> InputSummary:
    """Raises for the first bad value at an unmasked token. Reads the device; for debugging.

    Takes the arguments of :func:`bapo_kernels.bapo_loss`, and raises where that does; ``inplace``
    is ignored. With a group, all its ranks must call, and are compared. Indices refer to the whole
    vocabulary.

    These values are bad, and most of them make the loss NaN:

    - labels outside ``[0, V)``, NaN or +inf logits, and rows in which every logit is -inf;
    - ``batch_num_tokens``, ``global_batch_size`` and temperatures that are not finite and > 0;
    - ``cu_seqlens`` that do not rise from 0 to at most N;
    - bounds that break ``0 <= lower <= 1 <= upper``, such as epsilons;
    - ids of a sampling mask that are repeated or outside ``[0, V)``;
    - other arguments per token that are not finite.

    The loss accepts the following values, but they can only be mistakes:

    - labels that are not in the set of their row in ``sampling_mask``;
    - probabilities in place of logits: 8 or more rows that have no negative entry and sum to 1;
    - log-probs above 0 by more than 0.01, or all of them above 0 (probabilities);
    - importance weights below 0 (their logarithms);
    - masks with values other than 0 and 1, or that leave no token with a label unmasked;
    - unmasked tokens after the last offset of ``cu_seqlens``;
    - 8 or more unmasked tokens whose ``old_log_probs`` are 0 and whose log-probs are below -1 (a
      prompt that is not masked; if all are 0, an inverted mask, or zeros in place of ``None``);
    - ``old_log_probs`` that are off by more than 1 nat in the mean, but fit to 0.02 at 8 or more
      masked tokens (an inverted mask);
    - ``old_log_probs`` that are the same at all tokens of each sequence (their sum or mean);
    - ``old_log_probs`` whose mean distance from the log-probs of ``labels`` is above 0.2 nats, but
      falls below a quarter of that if labels or ``old_log_probs`` shift by one position or by up
      to four sequences of ``[B, S]``, at another temperature (0.5, 0.6, ..., 1.5), without the
      scale and soft cap of ``config``, or with a soft cap of 30. Between 0.02 and 0.2 nats only the
      latter three are tried, and must be 10 standard errors better. An older policy's are far off,
      too, but no such change fits them. At least 8 tokens are compared, and at most 512.

    Returns:
        :class:`InputSummary`; ``print`` shows it as a line.

    Raises:
        ValueError: names the argument, the index and the value.

    Examples:
        >>> print(debug.check_inputs(torch.zeros(2, 4), torch.tensor([1, 3]), None, torch.ones(2)))
        2 of 2 tokens unmasked, on-policy, mean log_prob -1.39, 2 with A > 0, 0 with A < 0
        >>> batch = torch.zeros(2, 4), torch.tensor([1, 4]), None, torch.ones(2)
        >>> bapo_loss(*batch).loss
        tensor(nan)
        >>> debug.check_inputs(*batch)
        Traceback (most recent call last):
        ValueError: labels must be in [0, 4) or -100, got 4 at (1,)
    """
    for unknown in options.keys() - LossOptions.__optional_keys__:
        got = type(options.get(unknown)).__name__
        require(unknown != "mask", "mask", "be called response_mask", got, TypeError)
        raise TypeError(f"check_inputs() got an unexpected keyword argument {unknown!r}")
    check_logits(logits, labels, vocab_group)
    labels = labels.long()
    choose(backend, logits, "logits")
    batch = old_log_probs, advantages, response_mask
    row_options: RowOptions = dict(
        temperature=temperature, sampling_mask=sampling_mask, vocab_group=vocab_group, **options
    )
    arguments = loss_arguments(labels, *batch, **row_options)
    arguments.check_ranks("check_inputs", "reference")
    for name in ("batch_num_tokens", "global_batch_size"):
        if isinstance(count := options.get(name), Tensor):
            value = count.item()
            require(0 < value < torch.inf, name, "be finite and > 0", value)
    logits = whole_vocabulary(logits, vocab_group, -1)
    cu_seqlens = options.get("cu_seqlens")
    V = logits.shape[-1]
    _check_mask(labels, response_mask)
    if cu_seqlens is not None:
        _check_offsets(arguments, cu_seqlens)
    unmasked = arguments.unmasked()
    name = "labels" if response_mask is None else "response_mask"
    require(bool(unmasked.any()) or not unmasked.numel(), name, "leave a token unmasked", "none")
    given = {name: arguments.field(name) for name in FIELDS}
    # Kernels get float32, in which 1e300 is infinite.
    fields = {name: values.float() for name, values in given.items() if values is not None}
    outside = unmasked & ((labels < 0) | (labels >= V))
    _raise_first("labels", f"be in [0, {V}) or {IGNORE_INDEX}", outside, labels)
    if arguments.bounds is not None:
        fields |= zip(LIMITS_OF_BOUNDS, arguments.bounds, strict=True)
    for name, values in fields.items():
        _check_values(name, values, unmasked)
    _check_not_probabilities(logits, unmasked)
    if sampling_mask is not None:
        allowed = _checked_sets(sampling_mask, labels, unmasked, V)
        logits = logits.masked_fill(~allowed, -torch.inf)
    _check_rows(logits, unmasked)
    T = fields["temperatures"].reshape(-1) if "temperatures" in fields else None
    tokens = logits, labels, fields.get("old_log_probs"), T, unmasked, cu_seqlens
    log_prob, difference = alignment.check_alignment(*tokens, arguments.config)
    A = fields["advantages"][unmasked]
    counts = unmasked.numel(), A.numel()
    return InputSummary(*counts, difference, log_prob, int((A > 0).sum()), int((A < 0).sum()))


# Help and editors then show the options by name.
check_inputs.__signature__ = inspect.signature(bapo_loss).replace(  # type: ignore[attr-defined]
    return_annotation="InputSummary"
)


def _check_mask(labels: Tensor, response_mask: Tensor | None) -> None:
    if response_mask is None:
        return
    odd = (response_mask != 0) & (response_mask != 1)
    _raise_first("response_mask", "be 0 (masked) or 1", odd, response_mask)
    labelled = labels != IGNORE_INDEX
    unmasked = labelled & (response_mask != 0)
    inverted = bool(labelled.any() and response_mask.any() and not unmasked.any())
    rule = f"be 1 at some label other than {IGNORE_INDEX}"
    require(not inverted, "response_mask", rule, "0 at all of them: every token is masked")


def _check_offsets(arguments: Arguments, cu_seqlens: Tensor) -> None:
    unmasked = arguments._replace(cu_seqlens=None).unmasked()
    N, end = len(unmasked), rising_offsets(cu_seqlens, len(unmasked))[-1]
    got = f"{end}: tokens {end} to {N - 1} are in no sequence, and are masked"
    require(not unmasked[end:].any(), "cu_seqlens", f"end at {N}", got)


def _check_values(name: str, values: Tensor, unmasked: Tensor) -> None:
    """Checks a field of the tokens, or a bound of all tokens, which is 0-dim."""
    if name in LIMITS_OF_BOUNDS:
        rule, least, most = LIMITS_OF_BOUNDS[name]
        bad = ~((values >= least) & (values <= most))
        _raise_first(f"bounds.{name}", rule, unmasked & bad if bad.ndim else bad, values)
        return
    if name == "temperatures":
        bad = unmasked & ~((values > 0) & values.isfinite())
        _raise_first("temperature", "be finite and > 0", bad, values)
    _raise_first(name, "be finite", unmasked & ~values.isfinite(), values)
    if name.endswith("log_probs"):
        # Rounding can put some log-probs above 0, but not all of them.
        most = 1e-5 if bool((values[unmasked] > 0).all()) else 1e-2
        _raise_first(name, "be log-probs <= 0", unmasked & (values > most), values)
    if name == "rollout_is_weights":
        _raise_first(name, "be >= 0", unmasked & (values < 0), values)


def _checked_sets(mask: SamplingMask, labels: Tensor, unmasked: Tensor, V: int) -> Tensor:
    """Checks the sets, and returns the tokens that they allow, bool ``[..., V]``."""
    name, ids, offsets = "sampling_mask.token_ids", mask.token_ids, mask.offsets
    check_rise(offsets, len(ids))
    rows = torch.arange(len(mask), device=ids.device).repeat_interleave(offsets.diff())
    used = unmasked.reshape(-1)[rows]
    outside = used & ((ids < 0) | (ids >= V))
    _raise_in_set(name, f"be in [0, {V})", outside, ids, rows, labels.shape)
    ids, again = mask._ids, torch.zeros_like(used)  # sorted: repeated ones are neighbours
    again[1:] = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
    _raise_in_set(name, "be distinct in a set", used & again, ids, rows, labels.shape)
    outside = unmasked & outside_of_sets(mask, labels, V)
    every, rule = torch.arange(len(mask), device=ids.device), "be in the sets of sampling_mask"
    _raise_in_set("labels", rule, outside.flatten(), labels.flatten(), every, labels.shape)
    return allowed_tokens(mask, labels, V)[0]


def _raise_in_set(
    name: str, rule: str, bad: Tensor, values: Tensor, rows: Tensor, shape: torch.Size
) -> None:
    """Raises for the first bad value, of a flattened row, and counts the others."""
    places = bad.nonzero().squeeze(1)
    if places.numel():
        index = torch.unravel_index(rows[places[0]], shape)
        others = f" and {places.numel() - 1} more" if places.numel() > 1 else ""
        got = f"{values[places[0]].item()} at {tuple(int(i) for i in index)}{others}"
        refuse(name, rule, got)


def _check_rows(logits: Tensor, unmasked: Tensor) -> None:
    rows, at = logits.reshape(-1, logits.shape[-1]), unmasked.reshape(-1).nonzero().squeeze(1)
    for some, places in zip(at.split(_ROWS), unmasked.nonzero().split(_ROWS), strict=True):
        values = rows[some]
        bad = ~(values < torch.inf)  # NaN too
        for n, column in bad.nonzero()[:1].tolist():
            got = f"{values[n, column].item()} at {(*places[n].tolist(), column)}"
            refuse("logits", "be finite or -inf", got)
        for (n,) in (values == -torch.inf).all(-1).nonzero()[:1].tolist():
            got = f"only -inf at {tuple(places[n].tolist())}"
            refuse("logits", "allow a token in every row", got)


def _check_not_probabilities(logits: Tensor, unmasked: Tensor) -> None:
    rows, at = logits.reshape(-1, logits.shape[-1]), unmasked.reshape(-1).nonzero().squeeze(1)
    if at.numel() < 8 or logits.shape[-1] == 1:  # a few rows of a toy example may look like them
        return
    for some in at.split(_ROWS):
        values = rows[some]
        sums = values.sum(-1, dtype=torch.float32)
        probabilities = (values >= 0).all(-1) & ((sums - 1).abs() < 0.01)
        if not probabilities.all():
            return
    refuse("logits", "be logits", "probabilities: every row adds up to 1")


def _raise_first(name: str, rule: str, bad: Tensor, values: Tensor) -> None:
    for index in bad.nonzero()[:1].tolist():
        place = f" at {tuple(index)}" if index else ""
        refuse(name, rule, f"{values[tuple(index)].item()}{place}")


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Runs the CPU kernels of another instruction set, to test them or to reproduce a result.

    Args:
        name: ``"avx512bf16"``, ``"avx512"``, ``"avx2"`` or ``"portable"``.

    Raises:
        RuntimeError: this processor does not support it.

    Examples:
        >>> with debug.instruction_set("portable"):
        ...     debug.environment()["cpu kernels"]
        'portable'
    """
    ops = getattr(torch.ops, NATIVE)
    in_use = ops.instruction_set("")
    ops.instruction_set(name)
    try:
        yield
    finally:
        ops.instruction_set(in_use)


def environment() -> dict[str, str]:
    """The versions, and for each backend whether it can run here, or why it cannot.

    Examples:
        >>> debug.environment()["backend reference"]
        'available'
    """
    n = torch.get_num_threads()
    threads = "1 thread" if n == 1 else f"{n} threads"
    report = {
        "bapo_kernels": sys.modules[NATIVE].__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}, {threads}",
    }
    info = native.build_info()
    if "native" in info:
        report["native build"] = f"absent: {info['native']}"
    elif info:
        report["native build"] = ", ".join(f"{k}: {v}" for k, v in info.items() if v)
    if native.WHY_NO_CPU is None:
        report["cpu kernels"] = getattr(torch.ops, NATIVE).instruction_set("")
    report["cpu products"] = ", ".join(map(_product, (torch.bfloat16, torch.float16)))
    for name, reason in available_backends().items():
        report[f"backend {name}"] = "available" if reason is None else f"absent: {reason}"
    return report


def _product(dtype: torch.dtype) -> str:
    name, reason = str(dtype).removeprefix("torch."), gemm.why_in_float32(dtype)
    return f"{name} in {name}" if reason is None else f"{name} in float32 ({reason})"
