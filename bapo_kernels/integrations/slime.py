"""slime 0.3: ``--loss-type custom_loss`` on the raw, packed, vocabulary-parallel logits.

Set ``--custom-loss-function-path bapo_kernels.integrations.slime.bapo_loss_function``. The options
``bapo_preset`` and ``bapo_options`` belong in the file of ``--custom-config-path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import require
from ..config import BAPOConfig
from ..functional import bapo_loss, bapo_loss_from_log_probs, log_probs
from ..output import BAPOOutput
from . import config_of, names_of_metrics
from .slime_tokens import ResponseTokens, response_tokens
from .slime_weights import Weights, corrects, opsm, weights_of

_OWNERS = dict(
    loss_agg_mode="slime's reduction",
    loss_scale_factor="slime's reduction",
    clip_ratio_c="eps_clip_c",
    temperature="rollout_temperature",
    kl_loss_coef="slime's kl_loss_coef",
    kl_loss_type="slime's kl_loss_type",
    entropy_coef="slime's entropy_coef",
)
_METRICS = ("pg_clipfrac", "bapo_clip_low", "bapo_clip_high", "bapo_pos_share")


def bapo_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a micro-batch, from ``logits [1, T, V/TP]``.

    ``sum_of_sample_mean`` is linear in the values per token, so its gradient is the weight of every
    response token. These weights replace slime's reduction. The search covers the micro-batch, on
    all context-parallel ranks that share it; data-parallel ranks may have different numbers of
    micro-batches, so each decides alone.

    Loss and gradient are made in one pass, unless log-probs are needed before the loss (context
    parallelism, KL, entropy, OPSM, a correction without ``log_probs`` in the batch). Backward then
    reads the logits a second time.

    Raises:
        ValueError: the rollout was cut by top-p, or ``bapo_options`` has an option that slime
            decides.
    """
    top_p = getattr(args, "rollout_top_p", 1.0)
    require(top_p == 1.0, "rollout_top_p", "be 1 with BAPO", top_p)
    tokens = response_tokens(args, batch, logits.shape[1], logits.device)
    values = _values(args, batch, tokens)
    config, vocab_group = _config(args), _tensor_group()
    log: dict[str, Tensor] = {}
    if _is_one_pass(args, batch, tokens):
        weights = weights_of(args, batch, tokens, sum_of_sample_mean, None)
        out = _loss_of_logits(logits[0], batch, tokens, values, weights, config, vocab_group)
        logp, loss = out.log_probs[tokens.rows], out.loss
        entropy = torch.zeros_like(logp) if out.entropy is None else out.entropy[tokens.rows]
    else:
        temperature = config.temperature
        of_rows = log_probs(
            logits[0], tokens.labels, temperature=temperature, vocab_group=vocab_group
        )
        of_rank = torch.stack([value[tokens.rows] for value in of_rows if value is not None])
        logp, entropy = tokens.whole(of_rank, tokens.predicted)
        weights = weights_of(args, batch, tokens, sum_of_sample_mean, logp)
        out, loss, log = _loss_of_log_probs(
            args, batch, tokens, values, weights, config, logp, entropy
        )
    logp, logged = logp.detach(), tokens.weights(sum_of_sample_mean)
    log_ratios = logp - values.get("old", logp)
    log = dict(
        loss=loss.detach(),
        pg_loss=out.metrics["pg_loss"],
        entropy_loss=(weights.others * entropy.detach()).sum(),
        ppo_kl=-(weights.others * log_ratios).sum(),
        # slime divides what is logged by the number of samples, as it does with the loss.
        **{name: out.metrics[name] * logged.sum() for name in names_of_metrics(config, _METRICS)},
        **log,
        **weights.log,
    )
    if corrects(args):
        if config.ratio_level == "sequence":
            log_ratios = _means(log_ratios, tokens, batch["loss_masks"])
        log["ois"] = (logged * log_ratios.exp()).sum()
    if "rollout" in values:
        trained = logp if args.use_rollout_logprobs else values.get("old", logp)
        difference = (trained - values["rollout"]).abs()
        log["train_rollout_logprob_abs_diff"] = (weights.others * difference).sum()
    return loss, log


def _means(values: Tensor, tokens: ResponseTokens, masks: list[Tensor]) -> Tensor:
    """For each token the mean of its response."""
    samples = zip(values.split(tokens.lengths), masks, strict=True)
    means = [((x * mask).sum() / mask.sum().clamp(min=1)).expand_as(x) for x, mask in samples]
    return torch.cat(means)


def _config(args: Any) -> BAPOConfig:
    """slime's estimators GSPO and CISPO are a level of the ratio and a surrogate here."""
    estimator = getattr(args, "advantage_estimator", None)
    return config_of(
        getattr(args, "bapo_preset", "paper"),
        getattr(args, "bapo_options", None),
        _OWNERS,
        "bapo_",
        loss_agg_mode="token-sum",
        clip_ratio_c=getattr(args, "eps_clip_c", None),
        temperature=getattr(args, "rollout_temperature", 1.0),
        surrogate="cispo" if estimator == "cispo" else None,
        ratio_level="sequence" if estimator == "gspo" else None,
    )


def _tensor_group() -> dist.ProcessGroup | None:
    from megatron.core import mpu

    if mpu.get_tensor_model_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = mpu.get_tensor_model_parallel_group()
    return group


def _is_one_pass(args: Any, batch: dict[str, Any], tokens: ResponseTokens) -> bool:
    names = ("use_kl_loss", "use_opsm", "entropy_coef")
    terms = any(getattr(args, name, False) for name in names)
    knows_weights = not corrects(args) or bool(batch.get("log_probs"))
    return tokens.group is None and not terms and knows_weights


def _values(args: Any, batch: dict[str, Any], tokens: ResponseTokens) -> dict[str, Tensor]:
    """What the batch has for every response token, each ``[R]``."""
    rollout = batch.get("rollout_log_probs")
    lists = dict(
        advantages=batch["advantages"],
        old=rollout if args.use_rollout_logprobs else batch.get("log_probs"),
        rollout=rollout,
        ref=batch["ref_log_probs"] if getattr(args, "use_kl_loss", False) else None,
    )
    given = {name: torch.cat(list(value)).float() for name, value in lists.items() if value}
    whole = tokens.whole(torch.stack(list(given.values())), tokens.listed)
    return dict(zip(given, whole, strict=True))


def _loss_of_logits(
    logits: Tensor,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    values: dict[str, Tensor],
    weights: Weights,
    config: BAPOConfig,
    vocab_group: dist.ProcessGroup | None,
) -> BAPOOutput:
    of_tokens = values | dict(mask=weights.mask, policy=weights.policy)
    rows = {
        name: value.new_zeros(len(logits)).index_copy(0, tokens.rows, value)
        for name, value in of_tokens.items()
    }
    ends = torch.tensor([0, *batch["total_lengths"]], device=logits.device).cumsum(0)
    return bapo_loss(
        logits,
        tokens.labels,
        rows.get("old"),
        rows["advantages"],
        rows["mask"],
        config=config,
        cu_seqlens=ends if config.ratio_level == "sequence" else None,
        rollout_log_probs=rows.get("rollout"),
        rollout_is_weights=rows["policy"],
        vocab_group=vocab_group,
    )


def _loss_of_log_probs(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    values: dict[str, Tensor],
    weights: Weights,
    config: BAPOConfig,
    logp: Tensor,
    entropy: Tensor,
) -> tuple[BAPOOutput, Tensor, dict[str, Tensor]]:
    """The output of the policy term, the loss with slime's other terms, and what they log."""
    log: dict[str, Tensor] = {}
    old, policy = values.get("old", logp.detach()), weights.policy
    if getattr(args, "use_opsm", False):
        ratios, masks = logp.detach() - old, batch["loss_masks"]
        dropped, log["opsm_clipfrac"] = opsm(args, tokens, ratios, values["advantages"], masks)
        policy = policy.masked_fill(dropped, 0.0)
    ends = torch.tensor([0, *tokens.lengths], device=logp.device).cumsum(0)
    out = bapo_loss_from_log_probs(
        logp,
        values.get("old"),
        values["advantages"],
        weights.mask,
        config=config,
        cu_seqlens=ends if config.ratio_level == "sequence" else None,
        rollout_log_probs=values.get("rollout"),
        rollout_is_weights=policy,
    )
    loss = out.loss - getattr(args, "entropy_coef", 0.0) * (weights.others * entropy).sum()
    if getattr(args, "use_kl_loss", False):
        from slime.utils.ppo_utils import compute_approx_kl

        ratio = (logp - old).exp() if getattr(args, "use_unbiased_kl", False) else None
        kind = args.kl_loss_type
        kl = compute_approx_kl(logp, values["ref"], kl_loss_type=kind, importance_ratio=ratio)
        kl_loss = (weights.others * kl).sum()
        loss, log["kl_loss"] = loss + args.kl_loss_coef * kl_loss, kl_loss.detach()
    return out, loss, log
