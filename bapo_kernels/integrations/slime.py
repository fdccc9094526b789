"""slime 0.3: ``--loss-type custom_loss`` on the raw, packed, vocabulary-parallel logits.

May import public modules, the package's checks, ``slime_tokens``, and slime and Megatron inside of
functions. A host read here would make every micro-batch wait for the device.
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
from . import BOUND_METRICS, CLIP_METRICS, averageable, config_of
from .slime_tokens import ResponseTokens, Weights, corrects, on_device, response_tokens, weights_of

_OWNERS = dict(
    **dict.fromkeys(("loss_agg_mode", "loss_scale_factor"), "slime's reduction"),
    **{name: f"slime's {name}" for name in ("kl_loss_coef", "kl_loss_type", "entropy_coef")},
    clip_ratio_c="eps_clip_c",
    temperature="rollout_temperature",
)
_METRICS = (*CLIP_METRICS[:3], *BOUND_METRICS)


def bapo_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a micro-batch, from ``logits [1, T, V/TP]``.

    ``sum_of_sample_mean`` is linear in the values per token, so its gradient is the weight of every
    response token. These weights replace slime's reduction. The search covers the micro-batch, on
    all context-parallel ranks that share it. Each data-parallel rank decides alone, as their
    numbers of micro-batches may differ.

    One pass makes loss and gradient, unless the loss needs log-probs first (context parallelism,
    KL, entropy, OPSM, a correction without ``log_probs`` in the batch). Backward then reads the
    logits a second time.

    Raises:
        ValueError: ``--rollout-top-p`` is below 1; ``bapo_preset`` or ``bapo_options`` break their
            rules, or name an option that slime decides; or another option of slime breaks a rule of
            :class:`bapo_kernels.BAPOConfig`, such as ``--eps-clip-c`` with CISPO.
    """
    from megatron.core import mpu

    require(args.rollout_top_p == 1, "rollout_top_p", "be 1 with BAPO", args.rollout_top_p)
    tokens = response_tokens(args, batch, logits.shape[1], logits.device)
    values, config = _values(args, batch, tokens), _config(args)
    several = mpu.get_tensor_model_parallel_world_size() > 1
    group = mpu.get_tensor_model_parallel_group() if several else None
    logp = entropy = None
    knows_weights = not corrects(args) or batch.get("log_probs")
    other_terms = args.use_kl_loss or args.entropy_coef or args.use_opsm
    if tokens.group is not None or other_terms or not knows_weights:
        logp, entropy = _log_probs(logits[0], tokens, config, group)
    old = values.get("old_log_probs")
    weights = weights_of(args, batch, tokens, sum_of_sample_mean, logp, old)
    given = values | dict(
        advantages=values["advantages"] * weights.kept,
        response_mask=torch.cat(list(batch["loss_masks"])).float(),
        rollout_is_weights=weights.policy,
    )
    if logp is None:
        T = len(tokens.labels)
        rows = {k: x.new_zeros(T).index_copy(0, tokens.rows, x) for k, x in given.items()}
        options = _options(config, rows, batch["total_lengths"])
        out = bapo_loss(logits[0], tokens.labels, vocab_group=group, **options)
        logp = out.log_probs.detach()[tokens.rows]
        entropy = None if out.entropy is None else out.entropy.detach()[tokens.rows]
    else:
        out = bapo_loss_from_log_probs(logp, **_options(config, given, tokens.lengths))
    assert entropy is not None

    entropy_loss = (weights.others * entropy).sum()
    loss = out.loss - args.entropy_coef * entropy_loss
    log = dict(pg_loss=out.metrics["pg_loss"], entropy_loss=entropy_loss)
    if args.use_kl_loss:
        from slime.utils.ppo_utils import compute_approx_kl

        old = values.get("old_log_probs", logp.detach())
        kl: Tensor = compute_approx_kl(
            logp,
            values["ref_log_probs"],
            kl_loss_type=args.kl_loss_type,
            importance_ratio=(logp - old).exp() if args.use_unbiased_kl else None,
        )
        log["kl_loss"] = (weights.others * kl).sum()
        loss = loss + args.kl_loss_coef * log["kl_loss"]
    # slime divides what is logged by the number of rollouts or tokens, as it does with the loss.
    scale = weights.logged.sum() + _without_tokens(args, batch, tokens)
    averages = averageable(config, out.metrics, _METRICS)
    log |= {name: value * scale for name, value in averages.items()}
    log |= _differences(args, batch, tokens, weights, values, config, logp.detach())
    log |= dict(loss=loss, **weights.log)
    return loss, {name: value.detach() for name, value in log.items()}


def _config(args: Any) -> BAPOConfig:
    """Makes the config of slime's options; GSPO and CISPO are a level and a surrogate here."""
    return config_of(
        getattr(args, "bapo_preset", "paper"),
        getattr(args, "bapo_options", None),
        _OWNERS,
        "bapo_",
        loss_agg_mode="token-sum",
        clip_ratio_c=args.eps_clip_c,
        temperature=args.rollout_temperature,
        surrogate="cispo" if args.advantage_estimator == "cispo" else None,
        ratio_level="sequence" if args.advantage_estimator == "gspo" else None,
    )


def _values(args: Any, batch: dict[str, Any], tokens: ResponseTokens) -> dict[str, Tensor]:
    """The tensors ``[R]`` that the batch has of the response tokens."""
    rollout = batch.get("rollout_log_probs")
    lists = dict(
        advantages=batch["advantages"],
        old_log_probs=rollout if args.use_rollout_logprobs else batch.get("log_probs"),
        rollout_log_probs=rollout,
        ref_log_probs=batch["ref_log_probs"] if args.use_kl_loss else None,
    )
    given = {name: torch.cat(list(value)).float() for name, value in lists.items() if value}
    whole = tokens.whole(torch.stack(list(given.values())), tokens.listed)
    return dict(zip(given, whole, strict=True))


def _log_probs(
    logits: Tensor, tokens: ResponseTokens, config: BAPOConfig, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens, each ``[R]``, with their gradients."""
    made = log_probs(logits, tokens.labels, temperature=config.temperature, vocab_group=group)
    predicting = torch.stack([values[tokens.rows] for values in made if values is not None])
    logp, entropy = tokens.whole(predicting, tokens.predicted)
    return logp, entropy


def _without_tokens(args: Any, batch: dict[str, Any], tokens: ResponseTokens) -> Tensor:
    """The number of samples without weights that slime's number of rollouts or tokens counts.

    Their rollout is masked as a whole, for instance by ``remove_sample``. If it has several
    samples, slime counts it once.
    """
    counts = batch["rollout_mask_sums"]
    if args.calculate_per_token_loss or counts is None:
        counts = [mask.sum() for mask in batch["loss_masks"]]
    masked = (torch.stack(list(counts)) == 0).sum()
    return masked if tokens.group is None else masked / dist.get_world_size(tokens.group)


def _options(config: BAPOConfig, given: dict[str, Tensor], lengths: list[int]) -> dict[str, Any]:
    """The arguments of a loss of this package, for sequences of these lengths."""
    starts = None
    if config.ratio_level == "sequence":
        starts = torch.tensor([0, *lengths], device="cpu").cumsum(0)
        starts = on_device(starts, given["advantages"].device)
    return dict(old_log_probs=None, config=config, cu_seqlens=starts) | given


def _differences(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    weights: Weights,
    values: dict[str, Tensor],
    config: BAPOConfig,
    logp: Tensor,
) -> dict[str, Tensor]:
    """The differences between log-probs that slime logs."""
    old, rollout = values.get("old_log_probs", logp), values.get("rollout_log_probs")
    log_ratios = logp - old
    if config.ratio_level == "sequence":
        log_ratios = tokens.means(log_ratios, batch["loss_masks"])
    log = dict(ppo_kl=-(weights.others * log_ratios).sum())
    if corrects(args):
        # Masked tokens have no log-prob in one pass, and their ratio may be infinite.
        ratios = log_ratios.masked_fill(weights.logged == 0, 0.0).exp()
        log["ois"] = (weights.logged * ratios).sum()
    if rollout is not None:
        trained = logp if args.use_rollout_logprobs else old
        difference = (weights.others * (trained - rollout).abs()).sum()
        log["train_rollout_logprob_abs_diff"] = difference
    return log
