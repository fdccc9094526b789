"""The results of the public functions.

Imports nothing of the package. REPORT is in the order of ``Report`` in ``csrc/params.h``: in
another, one metric would be shown as another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The report of the kernels, in their order.
REPORT = (
    "loss",
    "pg_loss",
    "pg_clipfrac",
    "pg_clipfrac_pos",
    "pg_clipfrac_neg",
    "pg_clipfrac_lower",
    "ppo_kl",
    "entropy",
    "kl_loss",
    "bapo_clip_low",
    "bapo_clip_high",
    "bapo_pos_share",
    "bapo_pos_share_start",
    "bapo_pos_share_max",
    "bapo_pos_neg_ratio",
    "bapo_saturated",
    "bapo_acted",
    "tokens",
    "tokens_pos",
    "tokens_neg",
    "live_tokens",
    "loss_adds_up",
)


class ClipBounds(NamedTuple):
    """Bounds of the probability ratio: 0-dim float32 tensors on the device of the loss.

    In the argument ``bounds`` each may also be a number, or a tensor per token (``[...]``) or per
    sequence (``[B]``). If one is not the same for all tokens, the output has both per token.
    Bounds must satisfy ``0 <= lower <= 1 <= upper``: 0.8 and 1.2, not the epsilons 0.2 and 0.2. A
    number that breaks this raises. The host does not read the values of tensors: the loss is NaN
    unless ``0 <= lower <= upper`` at every counted token.
    :func:`bapo_kernels.debug.check_inputs` also finds epsilons among them.

    Examples:
        >>> bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2))
        >>> log_probs, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])
        >>> out = bapo_loss_from_log_probs(log_probs, old, torch.ones(2), bounds=bounds)
        >>> out.metrics["pg_clipfrac"]  # the ratios are 1 and 2.72: one of two is above 1.2
        tensor(0.5000)
    """

    lower: torch.Tensor
    upper: torch.Tensor


# The argument ``bounds``.
GivenBounds = ClipBounds | tuple[float | torch.Tensor, float | torch.Tensor]


class BAPOOutput(NamedTuple):
    """The result of a loss: float32, or float64 where the reference runs in float64.

    Attributes:
        loss: 0-dim, differentiable.
        log_probs: in the shape of the labels; 0 at masked tokens, and NaN at unmasked tokens that
            ``statistics="live"`` skips. A backward through them raises if the forward pass has
            already computed the gradient of the loss; otherwise it is supported.
        entropy: as ``log_probs``; ``None`` if it was not computed.
        bounds: the clip bounds that were used, always float32.
        metrics: detached 0-dim tensors. ``pg_loss`` and ``kl_loss`` are aggregated like the
            loss. ``pg_clipfrac`` (with ``surrogate="cispo"`` and ``"mask"``, tokens whose ratio is
            outside the bounds), ``pg_clipfrac_lower`` (dual clip; with ``"mask"``, tokens below the
            lower bound), ``ppo_kl`` and ``entropy`` are means over tokens. ``pg_clipfrac_pos`` and
            ``pg_clipfrac_neg`` are ``pg_clipfrac`` of the tokens with A > 0 and A < 0, or 0.
            ``tokens``, ``tokens_pos`` and ``tokens_neg`` count the unmasked tokens: all, those with
            A > 0, and those with A < 0.
            ``bapo_clip_low`` and ``bapo_clip_high`` are the bounds, or the means of bounds per
            token; without bounds (``surrogate="sapo"``) 0 and infinity. From the positive and the
            negative mass at these bounds, ``bapo_pos_share`` is ``pos/(pos + neg)``, and
            ``bapo_pos_neg_ratio`` is ``pos/(neg + 1e-8)`` (infinite without negative mass).
            ``bapo_pos_share_start`` is the share at the starting bounds of the config, and
            ``bapo_pos_share_max`` the highest in its grids. A share is 0 if both masses are 0.
            ``bapo_saturated`` is 1 if the share, or the ratio of the masses, is below the target.
            ``bapo_acted`` is 1 if the bounds in use, or any of a token, differ from the starting
            bounds of the config: its mean over steps is the share of steps in which BAPO acts.
            After a search in a ``process_group`` the masses are those of all its ranks. With given
            ``bounds`` they are those of this rank, as all other metrics always are.
            ``live_tokens`` counts the tokens that the means cover with ``statistics="live"``.
            ``loss_adds_up`` is there, and 1, if the losses of micro-batches add up to that of their
            batch (:func:`mean_metrics`).
            ``label_outside_mask``, only with a ``sampling_mask``, counts the unmasked tokens whose
            label is not in the set of its row.
            ``gradient_entries`` and ``gradient_noise``, only with ``gradient_samples`` where the
            forward pass computes the gradient: the entries of all rows' samples on this rank, and
            ``sum_n g_n**2*t_n*T_n`` with ``g_n`` the derivative of the loss by a log-prob, ``t_n``
            the probability from which an id is kept, and ``T_n`` that of the ids below. Times
            ``max_j |W_j|**2`` it bounds the variance of the hidden states' gradient that the
            sample adds, without an entropy term.

    Examples:
        >>> out = bapo_loss(torch.zeros(2, 4), torch.tensor([3, -100]), None, torch.ones(2))
        >>> out.loss, out.log_probs
        (tensor(-1.), tensor([-1.3863,  0.0000]))
        >>> out.metrics["entropy"], out.metrics["bapo_pos_share"]
        (tensor(1.3863), tensor(1.))
        >>> print(out)  # doctest: +ELLIPSIS
        loss -1, tokens 1, ppo_kl 0, pg_clipfrac 0, entropy 1.386, bapo_clip_low 0.6, ...
    """

    loss: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    bounds: ClipBounds
    metrics: dict[str, torch.Tensor]

    def __str__(self) -> str:
        """The loss and what to look at first, in a line; waits for the device."""
        names = "tokens", "ppo_kl", "pg_clipfrac", "entropy", "bapo_clip_low", "bapo_clip_high"
        shown = {"loss": self.loss} | {n: self.metrics[n] for n in (*names, "bapo_acted")}
        numbers = torch.stack([*shown.values()]).tolist()
        return ", ".join(f"{n} {x + 0.0:.4g}" for n, x in zip(shown, numbers, strict=True))
