"""Log-probabilities of the labels, and the entropy of their rows.

Imports the other files of the reference and the checks; nothing of the kernels, whose truth it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..checks import count, require
from ..config import IGNORE_INDEX
from ..core.arguments.single import check_head, check_logits
from ..core.arguments.together import log_probs_arguments
from ..core.distributed import local_head, whole_vocabulary
from ..sampling_mask import SamplingMask
from .sampled import with_sampled_gradient
from .sampling_sets import allowed_tokens
from .tokens import per_token

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.arguments.options import SoftmaxOptions


def log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    sampling_mask: SamplingMask | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    gradient_samples: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``logp = x_label - logsumexp(x)`` and ``entropy = logsumexp(x) - sum_j p_j x_j``.

    ``x = softcap*tanh(logit_scale*z/softcap)/temperature``, without softcap
    ``logit_scale*z/temperature``. Rows with label -100 are 0 in both outputs.

    Args:
        logits: ``[..., V]``. ``-inf`` forbids a token.
        labels: ``[...]`` or ``[..., K]``, integer. Of several per row, those that are -100, NaN or
            -inf have no gradient.
        temperature: a number, or a tensor ``[...]``, ``[B]`` for labels ``[B, ...]``, or 0-dim; no
            gradient flows to it. One that is not finite and > 0 makes the log-prob NaN.
        sampling_mask: a set for each of the labels: ``x_j`` is -inf for every ``j`` that is not in
            it, whatever the logit. A set that breaks a rule makes its log-prob and entropy NaN.
        vocab_group: its ranks have ``logits`` of the vocabulary's parts, which are gathered.
        gradient_samples: gradients are those of a sample of each row (``reference.sampled``),
            except of rows with a set.

    Examples:
        >>> logits = torch.zeros(1, 4, dtype=torch.float64)
        >>> reference.log_probs(logits, torch.tensor([2]), return_entropy=False)
        (tensor([-1.3863], dtype=torch.float64), None)
    """
    check_logits(logits, labels, vocab_group, several=True)
    several = labels.ndim == logits.ndim
    log_probs_arguments(
        labels,
        several,
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
        sampling_mask=sampling_mask,
        vocab_group=vocab_group,
    )
    logits = whole_vocabulary(logits, vocab_group, -1)
    V = logits.shape[-1]
    ids = labels.long() if several else labels.long()[..., None]
    given, known = ids != IGNORE_INDEX, (ids >= 0) & (ids < V)
    unmasked = given.any(-1)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z.masked_fill(~unmasked[..., None], 0.0)
    forbidden = z == -torch.inf
    wrong = torch.zeros_like(unmasked)
    if sampling_mask is not None:
        allowed, wrong = allowed_tokens(sampling_mask, unmasked, V)
        z, forbidden = z.masked_fill(~allowed, 0.0), forbidden | ~allowed

    x = z * logit_scale
    if final_logit_softcapping is not None:
        x = final_logit_softcapping * torch.tanh(x / final_logit_softcapping)
    if isinstance(temperature, Tensor):
        T = temperature.detach().to(x.dtype)
        T = per_token(T if T.ndim else T.expand(unmasked.shape), unmasked)
        T = torch.where((T > 0) & T.isfinite(), T, torch.nan)
        temperature = torch.where(unmasked, T, 1.0)[..., None]
    x = (x / temperature).masked_fill(forbidden, -torch.inf)

    log_p = torch.log_softmax(x, dim=-1)
    logp = log_p.gather(-1, torch.where(known, ids, 0))
    if several:
        logp = logp.masked_fill(logp == -torch.inf, -torch.inf)  # without a gradient
    logp = torch.where(known & ~wrong[..., None], logp, torch.nan)
    logp = torch.where(given, logp, 0.0)
    entropy = -(log_p.exp() * log_p.masked_fill(forbidden, 0.0)).sum(-1)
    entropy = torch.where(wrong, torch.nan, entropy)
    entropy = torch.where(unmasked, entropy, 0.0)
    if gradient_samples is not None:
        rows = x.masked_fill(forbidden, 0.0), log_p, torch.where(given, ids, IGNORE_INDEX)
        drawn = with_sampled_gradient(*rows, logp, entropy, gradient_samples)
        exact = torch.zeros_like(unmasked)
        if sampling_mask is not None:
            exact = (sampling_mask.offsets.diff() > 0).view(unmasked.shape)
        logp = torch.where(exact[..., None], logp, drawn[0])
        entropy = torch.where(exact, entropy, drawn[1])
    return logp if several else logp.squeeze(-1), entropy if return_entropy else None


def linear_log_probs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    return_entropy: bool = True,
    logits_dtype: torch.dtype | None = None,
    gradient_samples: int | None = None,
    **options: Unpack[SoftmaxOptions],
) -> tuple[Tensor, Tensor | None]:
    """:func:`log_probs` of ``hidden_states @ lm_head_weight.T + bias``.

    Args:
        hidden_states: ``[..., H]``.
        lm_head_weight: ``[V, H]``, as ``nn.Linear.weight``.
        bias: ``[V]``.

    Examples:
        >>> hidden, weight = torch.ones(2, 4), torch.zeros(10, 4)
        >>> reference.linear_log_probs(hidden, weight, torch.tensor([3, 1]))[1].exp()
        tensor([10.0000, 10.0000])
    """
    vocab_group = options.pop("vocab_group", None)
    parameters = hidden_states, lm_head_weight, bias
    check_head(*parameters, labels, logits_dtype, vocab_group=vocab_group, several=True)
    unmasked = labels.long() != IGNORE_INDEX
    if labels.ndim == hidden_states.ndim:
        unmasked = unmasked.any(-1)
    logits = head_logits(*parameters, unmasked, vocab_group, logits_dtype)
    return log_probs(
        logits,
        labels,
        return_entropy=return_entropy,
        gradient_samples=gradient_samples,
        **options,
    )


def linear_top_k(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    **options: Unpack[SoftmaxOptions],
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of the log-probs of all ids, and these ids; -inf has the id -100.

    Examples:
        >>> weight = torch.tensor([0.0, 2.0, 1.0])[:, None]
        >>> reference.linear_top_k(torch.tensor([[1.0]]), weight, 2)
        (tensor([[-0.4076, -1.4076]]), tensor([[1, 2]]))
    """
    vocab_group = options.pop("vocab_group", None)
    parameters = hidden_states, lm_head_weight, bias
    check_head(*parameters, None, logits_dtype, vocab_group=vocab_group)
    every_row = torch.ones_like(hidden_states[..., 0], dtype=torch.bool)
    logits = head_logits(*parameters, every_row, vocab_group, logits_dtype)
    V = logits.shape[-1]
    require(count("k", k) <= V, "k", ("be at most {}, the size of the vocabulary", V), k)
    every_id = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    logp, _ = log_probs(logits, every_id, return_entropy=False, **options)
    logp, ids = logp.topk(k, dim=-1)
    return logp, ids.masked_fill(logp == -torch.inf, IGNORE_INDEX)


def head_logits(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    unmasked: Tensor,
    vocab_group: dist.ProcessGroup | None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """``hidden_states @ lm_head_weight.T + bias``, of the shards of all ranks.

    In ``logits_dtype``, by default that of the hidden states, to which the gradient is rounded.
    Masked hidden states may hold anything.
    """
    hidden_states = hidden_states.masked_fill(~unmasked[..., None], 0.0)
    weight, bias = local_head(lm_head_weight, bias, vocab_group)
    if not torch.compiler.is_compiling() and weight.is_inference():
        weight = weight.clone()  # which autograd can save
    lm_head_weight = whole_vocabulary(weight, vocab_group, 0)
    if bias is not None:
        bias = whole_vocabulary(bias, vocab_group, 0)
    if logits_dtype is None or logits_dtype == hidden_states.dtype:
        return F.linear(hidden_states, lm_head_weight, bias)
    bias = None if bias is None else bias.to(logits_dtype)
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = F.linear(hidden_states.to(logits_dtype), lm_head_weight.to(logits_dtype), bias)
    rounded: Tensor = _RoundedGradient.apply(logits, hidden_states.dtype)
    return rounded


class _RoundedGradient(torch.autograd.Function):
    """Passes values on, and rounds their gradient to a dtype."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None
