"""The specification in plain, differentiable PyTorch: the paper's formulas, line by line.

Every function takes any float dtype. bfloat16 and float16 are computed in float32, float32 and
float64 in themselves; run it in float64 for the truth that kernels are tested against. It shares
no mathematics with the kernels, reads values back where the paper's loop does, and is slow.

Sizes: B sequences, S tokens of a sequence, N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import require
from .config import IGNORE_INDEX, LOG_RATIO_LIMIT, RATIO_EPS, BAPOConfig
from .distributed import whole_vocabulary
from .inputs import bounds_tensor, config_or_default, rising_offsets
from .output import BAPOOutput, ClipBounds


def log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``logp = x_label - logsumexp(x)`` and ``H = logsumexp(x) - sum_j p_j x_j``.

    ``x = softcap*tanh(logit_scale*z/softcap)/temperature``, without softcap
    ``logit_scale*z/temperature``. Rows with label -100 are 0 in both outputs.

    Args:
        logits: ``[..., V]``. ``-inf`` forbids a token.
        labels: ``[...]``, integer.
        vocab_group: its ranks have ``logits`` of the vocabulary's parts, which are gathered.

    Examples:
        >>> logits = torch.zeros(1, 4, dtype=torch.float64)
        >>> reference.log_probs(logits, torch.tensor([2]), return_entropy=False)
        (tensor([-1.3863], dtype=torch.float64), None)
    """
    logits = whole_vocabulary(logits, vocab_group, -1)
    V, labels = logits.shape[-1], labels.long()
    live = labels != IGNORE_INDEX
    known = (labels >= 0) & (labels < V)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z.masked_fill(~live[..., None], 0.0)
    forbidden = z == -torch.inf

    x = z * logit_scale
    if final_logit_softcapping is not None:
        x = final_logit_softcapping * torch.tanh(x / final_logit_softcapping)
    x = (x / temperature).masked_fill(forbidden, -torch.inf)

    log_p = torch.log_softmax(x, dim=-1)
    label = torch.where(known, labels, 0)
    logp = log_p.gather(-1, label[..., None]).squeeze(-1)
    logp = torch.where(known, logp, torch.nan)
    entropy = None
    if return_entropy:
        entropy = -(log_p.exp() * log_p.masked_fill(forbidden, 0.0)).sum(-1)
        entropy = torch.where(live, entropy, 0.0)
    return torch.where(live, logp, 0.0), entropy


def linear_log_probs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    return_entropy: bool = True,
    vocab_group: dist.ProcessGroup | None = None,
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
    hidden_states = hidden_states.masked_fill((labels.long() == IGNORE_INDEX)[..., None], 0.0)
    return log_probs(
        _logits(hidden_states, lm_head_weight, bias, vocab_group),
        labels,
        temperature=temperature,
        logit_scale=logit_scale,
        final_logit_softcapping=final_logit_softcapping,
        return_entropy=return_entropy,
    )


def find_clip_bounds(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    rollout_log_probs: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ClipBounds:
    """Algorithm 1 of the paper: widen the bounds until positive tokens carry the target share.

    One bound goes up in steps to its maximum, then the other, while the tested quantity is below
    the target. Sums are float64; every probe reads the device back.

    Examples:
        >>> log_probs, old = torch.tensor([1.5, 1.0]).log(), torch.zeros(2)
        >>> config = BAPOConfig(token_weight="uniform", target=0.48)
        >>> reference.find_clip_bounds(log_probs, old, torch.tensor([2.0, -3.0]), config=config)
        ClipBounds(lower=tensor(0.6000), upper=tensor(1.4000))
    """
    config = config_or_default(config)
    probe = Contributions(
        config,
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        rollout_log_probs,
        process_group,
    )
    bound = {"lower": config.ratio_lower_start, "upper": config.ratio_upper_start}
    step = {"lower": config.ratio_lower_step, "upper": config.ratio_upper_step}
    maximum = {"lower": config.ratio_lower_max, "upper": config.ratio_upper_max}
    order = ("upper", "lower") if config.raise_first == "upper" else ("lower", "upper")
    for side in order:
        while (
            probe.quantity(bound["lower"], bound["upper"]) < config.target
            and bound[side] < maximum[side]
            and step[side] > 0
        ):
            bound[side] = min(bound[side] + step[side], maximum[side])
    return ClipBounds(
        torch.tensor(bound["lower"], dtype=torch.float32, device=log_probs.device),
        torch.tensor(bound["upper"], dtype=torch.float32, device=log_probs.device),
    )


class Contributions:
    """Contributions P and N of a set of tokens at given bounds.

    Examples:
        >>> log_probs, old = torch.tensor([1.5, 1.0]).log(), torch.zeros(2)
        >>> config, A = BAPOConfig(token_weight="uniform"), torch.tensor([2.0, -3.0])
        >>> probe = reference.Contributions(config, log_probs, old, A, None)
        >>> probe.sums(lower=0.6, upper=1.2)
        (2.4, 3.0)
        >>> round(probe.quantity(lower=0.6, upper=1.2), 4)  # 2.4/5.4
        0.4444
    """

    def __init__(
        self,
        config: BAPOConfig,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        response_mask: Tensor | None,
        rollout_log_probs: Tensor | None = None,
        process_group: dist.ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        _check_shapes(
            log_probs,
            old_log_probs=old_log_probs,
            response_mask=response_mask,
            rollout_log_probs=rollout_log_probs,
        )
        live = _live(log_probs, response_mask, cu_seqlens)
        logp = log_probs.detach().double()
        old = _old(logp, old_log_probs).double()
        rollout = old if rollout_log_probs is None else rollout_log_probs.detach().double()
        A = _per_token(advantages, log_probs, cu_seqlens).double()
        uniform = config.token_weight == "uniform"
        w = torch.ones_like(logp) if uniform else rollout.exp()

        self.config, self.group = config, process_group
        self.A, self.w = torch.where(live, A, 0.0), torch.where(live, w, 0.0)
        self.r = torch.where(live, _ratio(logp, old), 1.0)

    def positive(self, upper: float) -> Tensor:
        """P(c_high), a float64 scalar."""
        counted = self.r.clamp(max=upper)
        if self.config.contribution == "gradient":
            counted = torch.where(self.r > upper, 0.0, self.r)
        return torch.where(self.A > 0, self.w * self.A * counted, 0.0).sum()

    def negative(self, lower: float) -> Tensor:
        """N(c_low), a float64 scalar."""
        counted = self.r.clamp(min=lower)
        if self.config.contribution == "gradient":
            counted = torch.where(self.r < lower, 0.0, self.r)
        return torch.where(self.A < 0, self.w * -self.A * counted, 0.0).sum()

    def sums(self, lower: float, upper: float) -> tuple[float, float]:
        """P and N over all ranks of the group."""
        sums = torch.stack([self.positive(upper), self.negative(lower)])
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        P, N = sums.tolist()
        return P, N

    def quantity(self, lower: float, upper: float) -> float:
        """What the search compares with the target; infinite if there is nothing to balance."""
        P, N = self.sums(lower, upper)
        if self.config.target_kind == "ratio":
            return torch.inf if N <= 0 else P / (N + RATIO_EPS)
        return torch.inf if P + N == 0 else P / (P + N)


def bapo_loss_from_log_probs(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
    statistics: Literal["all", "live"] = "all",
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> BAPOOutput:
    """Eq. 8 of the paper on given log-probs, with verl's extra terms and aggregation.

    ``J = min(r*A, clip(r, c_low, c_high)*A)`` and ``l = -J``, capped at ``-A*clip_ratio_c`` for
    A < 0 (dual clip), times the importance weight, ``+ kl_loss_coef*kl - entropy_coef*H``.

    Examples:
        >>> log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        >>> def loss(log_probs):
        ...     A = torch.tensor([1.0, 0.5])
        ...     return reference.bapo_loss_from_log_probs(log_probs, torch.full((2,), -1.1), A).loss
        >>> torch.autograd.gradcheck(loss, log_probs)
        True
    """
    config = config_or_default(config)
    work = torch.promote_types(log_probs.dtype, torch.float32)
    _check_shapes(
        log_probs,
        old_log_probs=old_log_probs,
        response_mask=response_mask,
        entropy=entropy,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
    )
    live = _live(log_probs, response_mask, cu_seqlens)
    A = _per_token(advantages, log_probs, cu_seqlens).detach().to(work)
    A = torch.where(live, A, 0.0)
    given_logp = log_probs.to(work)
    logp = torch.where(live, given_logp, 0.0)
    old = torch.where(live, _old(logp, old_log_probs).to(work), 0.0)

    bounds_given = bounds is not None
    if bounds is not None:
        bounds = ClipBounds(*bounds_tensor(bounds, log_probs).unbind())
    else:
        bounds = find_clip_bounds(
            given_logp,
            old_log_probs,
            A,
            live,
            config=config,
            rollout_log_probs=rollout_log_probs,
            process_group=process_group,
        )
    lower, upper = (bound.to(work) for bound in bounds)

    r = _ratio(logp, old)
    objective = torch.minimum(r * A, torch.clamp(r, lower, upper) * A)
    policy = -objective
    dual_clipped = torch.zeros_like(live)
    if config.clip_ratio_c is not None:
        cap = -A * config.clip_ratio_c
        dual_clipped = (A < 0) & (policy > cap)
        policy = torch.where(dual_clipped, cap, policy)
    if rollout_is_weights is not None:
        policy = policy * torch.where(live, rollout_is_weights.detach().to(work), 0.0)
    kl = torch.zeros_like(logp)
    if ref_log_probs is not None:
        ref = torch.where(live, ref_log_probs.detach().to(work), 0.0)
        kl = _kl(logp, ref, config.kl_loss_type)
    H = torch.zeros_like(logp) if entropy is None else torch.where(live, entropy.to(work), 0.0)

    def aggregate(values: Tensor) -> Tensor:
        return _aggregate(
            values, live, config, cu_seqlens, batch_num_tokens, global_batch_size, dp_size
        )

    token_loss = policy
    if config.kl_loss_coef:
        token_loss = token_loss + config.kl_loss_coef * kl
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * H
    loss = aggregate(token_loss)

    counted = live
    if statistics == "live" and not config.kl_loss_coef and not config.entropy_coef:
        counted = live & (A != 0)
    count = counted.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (torch.where(counted, values.to(work), 0.0).sum() / count).detach()

    log_ratio = torch.clamp(logp - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clipped = ((A > 0) & (r > upper)) | ((A < 0) & (r < lower))
    group = None if bounds_given else process_group
    probe = Contributions(config, given_logp, old_log_probs, A, live, rollout_log_probs, group)
    metrics = {
        "pg_loss": aggregate(policy).detach(),
        "pg_clipfrac": mean(clipped),
        "pg_clipfrac_lower": mean(dual_clipped),
        "ppo_kl": mean(-log_ratio),
        "entropy": mean(H),
        "kl_loss": aggregate(torch.where(counted, kl, 0.0)).detach(),
        **_search_metrics(probe, bounds, searched=not bounds_given),
    }
    if statistics == "live":
        metrics["live_tokens"] = counted.sum()
    metrics = {name: value.to(work) for name, value in metrics.items()}

    def report(values: Tensor) -> Tensor:
        return torch.where(live & ~counted, torch.nan, torch.where(live, values, 0.0))

    return BAPOOutput(
        loss, report(given_logp), None if entropy is None else report(H), bounds, metrics
    )


def bapo_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
    statistics: Literal["all", "live"] = "all",
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
    vocab_group: dist.ProcessGroup | None = None,
) -> BAPOOutput:
    """:func:`log_probs`, then :func:`bapo_loss_from_log_probs`. ``logits``: ``[..., V]``.

    Examples:
        >>> logits = torch.linspace(-2, 2, 20).view(2, 10)
        >>> batch = torch.tensor([3, 4]), torch.tensor([-2.5, -2.0]), torch.tensor([1.0, -1.0])
        >>> loss = bapo_loss(logits, *batch).loss
        >>> truth = reference.bapo_loss(logits.double(), *batch).loss
        >>> bool((loss - truth).abs() < 1e-6)
        True
    """
    config, labels = config_or_default(config), labels.long()
    live = _live(labels, response_mask, cu_seqlens) & (labels != IGNORE_INDEX)
    logp, entropy = log_probs(
        logits,
        torch.where(live, labels, IGNORE_INDEX),
        temperature=config.temperature,
        logit_scale=config.logit_scale,
        final_logit_softcapping=config.final_logit_softcapping,
        vocab_group=vocab_group,
    )
    return bapo_loss_from_log_probs(
        logp,
        old_log_probs,
        advantages,
        live,
        entropy=entropy,
        config=config,
        bounds=bounds,
        statistics=statistics,
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
        process_group=process_group,
    )


def bapo_linear_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    config: BAPOConfig | None = None,
    bounds: ClipBounds | tuple[float, float] | None = None,
    statistics: Literal["all", "live"] = "all",
    cu_seqlens: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    dp_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
    vocab_group: dist.ProcessGroup | None = None,
) -> BAPOOutput:
    """:func:`bapo_loss` of ``hidden_states @ lm_head_weight.T + bias``.

    Examples:
        >>> hidden, weight, labels = torch.eye(2, 4), torch.eye(10, 4), torch.tensor([0, 1])
        >>> out = reference.bapo_linear_loss(hidden, weight, labels, None, torch.ones(2))
        >>> out.loss, out.metrics["pg_clipfrac"]  # on-policy every ratio is 1
        (tensor(-1.), tensor(0.))
    """
    masked = ~_live(labels, response_mask, cu_seqlens) | (labels.long() == IGNORE_INDEX)
    hidden_states = hidden_states.masked_fill(masked[..., None], 0.0)
    return bapo_loss(
        _logits(hidden_states, lm_head_weight, bias, vocab_group),
        labels,
        old_log_probs,
        advantages,
        response_mask,
        config=config,
        bounds=bounds,
        statistics=statistics,
        cu_seqlens=cu_seqlens,
        rollout_log_probs=rollout_log_probs,
        rollout_is_weights=rollout_is_weights,
        ref_log_probs=ref_log_probs,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        dp_size=dp_size,
        process_group=process_group,
    )


def _logits(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    vocab_group: dist.ProcessGroup | None,
) -> Tensor:
    lm_head_weight = whole_vocabulary(lm_head_weight, vocab_group, 0)
    bias = None if bias is None else whole_vocabulary(bias, vocab_group, 0)
    return torch.nn.functional.linear(hidden_states, lm_head_weight, bias)


def _check_shapes(log_probs: Tensor, **given: Tensor | None) -> None:
    for name, values in given.items():
        rule = ("have the shape of log_probs {}", log_probs.shape)
        if values is not None:
            require(values.shape == log_probs.shape, name, rule, values.shape)


def _live(like: Tensor, response_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Unmasked tokens; those behind the last sequence are masked."""
    live = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if cu_seqlens is not None:
        live[rising_offsets(cu_seqlens, like.numel())[-1] :] = False
    return live if response_mask is None else live & (response_mask != 0)


def _per_token(advantages: Tensor, like: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """One advantage per token, from one per token or one a sequence."""
    if advantages.shape == like.shape:
        return advantages
    sequences = like.shape[:1] if cu_seqlens is None else cu_seqlens.diff().shape
    ok = advantages.shape == sequences and (like.ndim >= 2 or cu_seqlens is not None)
    rule = ("have the shape of log_probs {} or one entry a sequence {}", like.shape, sequences)
    require(ok, "advantages", rule, advantages.shape)
    if cu_seqlens is not None:
        packed = advantages.repeat_interleave(cu_seqlens.diff())
        return torch.nn.functional.pad(packed, (0, like.numel() - packed.numel()))
    return advantages.reshape(-1, *(1 for _ in like.shape[1:])).expand(like.shape)


def _old(logp: Tensor, old_log_probs: Tensor | None) -> Tensor:
    """The behaviour policy's log-probs; on-policy those of the policy itself, kept finite."""
    if old_log_probs is not None:
        return old_log_probs.detach()
    return logp.detach().clamp(min=torch.finfo(logp.dtype).min)


def _ratio(logp: Tensor, old: Tensor) -> Tensor:
    r = torch.exp(torch.clamp(logp - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    # An old log-prob that is not finite is bad data; the clamp would hide it.
    return torch.where(torch.isfinite(old), r, torch.nan)


def _kl(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """KL estimators of http://joschu.net/blog/kl-approx.html, k3 clamped as verl does."""
    if kind == "k1":
        return logp - ref
    if kind == "k2":
        return 0.5 * (logp - ref).square()
    delta = torch.clamp(ref - logp, -20.0, 20.0)
    return torch.clamp(delta.exp() - delta - 1.0, -10.0, 10.0)


def _aggregate(
    values: Tensor,
    live: Tensor,
    config: BAPOConfig,
    cu_seqlens: Tensor | None,
    batch_num_tokens: float | Tensor | None,
    global_batch_size: float | Tensor | None,
    dp_size: int,
) -> Tensor:
    """verl's ``agg_loss``, for padded ``[B, S]`` or packed ``[N]`` values."""
    mode = config.loss_agg_mode
    values = torch.where(live, values, 0.0)
    if mode == "token-sum":
        return values.sum() * dp_size
    if mode == "token-mean":
        tokens = live.sum().clamp(min=1)
        if batch_num_tokens is not None:
            tokens = _positive(batch_num_tokens, values.dtype)
        return values.sum() / tokens * dp_size

    if cu_seqlens is not None:
        pieces = list(pairwise(rising_offsets(cu_seqlens, values.numel())))
        sums = torch.stack([values[a:b].sum() for a, b in pieces])
        counts = torch.stack([live[a:b].sum() for a, b in pieces])
    else:
        sums, counts = values.sum(-1), live.sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / counts.clamp(min=1)
    sequences = (counts > 0).sum().clamp(min=1)
    if global_batch_size is not None:
        sequences = _positive(global_batch_size, values.dtype)
    loss = sums.sum() / sequences * dp_size
    if mode == "seq-mean-token-sum-norm":
        loss = loss / (config.loss_scale_factor or max(values.shape[-1], 1))
    return loss


def _positive(count: float | Tensor, dtype: torch.dtype) -> Tensor:
    count = torch.as_tensor(count, dtype=dtype)
    return torch.where(count > 0, count, torch.nan)


def _search_metrics(probe: Contributions, bounds: ClipBounds, searched: bool) -> dict[str, Tensor]:
    config = probe.config
    lower, upper = (float(bound) for bound in bounds)
    if searched:
        lower, upper = _on_grid(lower, config.lower_grid), _on_grid(upper, config.upper_grid)
    P, N = probe.sums(lower, upper)
    P_start, N_start = probe.sums(config.ratio_lower_start, config.ratio_upper_start)
    values = {
        "bapo_pos_share": P / (P + N) if P + N != 0 else 0.0,
        "bapo_pos_share_start": P_start / (P_start + N_start) if P_start + N_start != 0 else 0.0,
        "bapo_pos_neg_ratio": torch.inf if N <= 0 else P / (N + RATIO_EPS),
        "bapo_saturated": float(probe.quantity(lower, upper) < config.target),
    }
    device = bounds.lower.device
    return {
        "bapo_clip_low": bounds.lower,
        "bapo_clip_high": bounds.upper,
        **{k: torch.tensor(v, dtype=torch.float64, device=device) for k, v in values.items()},
    }


def _on_grid(bound: float, grid: list[float]) -> float:
    """The float64 grid point that a float32 bound stands for."""
    return next(point for point in grid if float(torch.tensor(point, dtype=torch.float32)) == bound)
