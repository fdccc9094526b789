"""slime 0.3: ``--loss-type custom_loss`` on the raw, packed, vocabulary-parallel logits.

Set ``--custom-loss-function-path bapo_kernels.integrations.slime.bapo_loss_function``. The options
``bapo_preset`` and ``bapo_options`` belong in the file of ``--custom-config-path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import require
from ..config import IGNORE_INDEX
from ..functional import bapo_loss
from . import config_of, names_of_metrics

_OWNERS = dict(
    loss_agg_mode="slime's reduction",
    loss_scale_factor="slime's reduction",
    clip_ratio_c="eps_clip_c",
    temperature="rollout_temperature",
    kl_loss_coef="use_kl_loss, which must be False",
    kl_loss_type="use_kl_loss, which must be False",
    entropy_coef="slime's entropy_coef, which must be 0",
)
_METRICS = ("pg_clipfrac", "ppo_kl", "bapo_clip_low", "bapo_clip_high", "bapo_pos_share")


def bapo_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a micro-batch, in one pass over ``logits [1, T, V/TP]``.

    ``sum_of_sample_mean`` is linear in the values per token, so its gradient is the weight of every
    response token. These weights replace slime's reduction. The search covers the tokens of this
    rank alone, because slime's ranks may have different numbers of micro-batches.

    Raises:
        ValueError: context parallelism is on, an option of slime is set that would be ignored, or
            ``bapo_options`` has an option that slime decides.
    """
    from megatron.core import mpu

    _check_options(args, mpu.get_context_parallel_world_size())
    T = logits.shape[1]
    labels, index = _labels(batch, T, logits.device)
    with torch.enable_grad():
        ones = torch.ones(index.numel(), device=logits.device, requires_grad=True)
        (weights,) = torch.autograd.grad(sum_of_sample_mean(ones), ones)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(T, device=logits.device).index_copy(0, index, values.float())

    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    rollout = batch.get("rollout_log_probs")
    config = config_of(
        getattr(args, "bapo_preset", "paper"),
        getattr(args, "bapo_options", None),
        _OWNERS,
        "bapo_",
        loss_agg_mode="token-sum",
        clip_ratio_c=getattr(args, "eps_clip_c", None),
        temperature=getattr(args, "rollout_temperature", 1.0),
    )
    cu_seqlens = None
    if config.ratio_level == "sequence":
        ends = torch.tensor([0, *batch["total_lengths"]]).cumsum(0)
        cu_seqlens = ends.to(logits.device)
    tensor_group = None
    if mpu.get_tensor_model_parallel_world_size() > 1:
        tensor_group = mpu.get_tensor_model_parallel_group()
    out = bapo_loss(
        logits[0],
        labels,
        spread(torch.cat(old)) if old else None,
        spread(torch.cat(batch["advantages"])),
        spread(torch.cat(list(batch["loss_masks"]))),
        config=config,
        cu_seqlens=cu_seqlens,
        rollout_log_probs=spread(torch.cat(rollout)) if rollout else None,
        rollout_is_weights=spread(weights),
        vocab_group=tensor_group,
    )
    # slime divides what is logged by the number of samples, as it does with the loss.
    scale = sum_of_sample_mean(torch.ones_like(ones.detach()))
    entropy = torch.zeros((), device=logits.device)
    if out.entropy is not None:
        entropy = sum_of_sample_mean(out.entropy.detach()[index])
    log = dict(loss=out.loss.detach(), pg_loss=out.metrics["pg_loss"], entropy_loss=entropy)
    names = names_of_metrics(config, _METRICS)
    return out.loss, log | {name: out.metrics[name] * scale for name in names}


def _check_options(args: Any, context_parallel_size: int) -> None:
    for name in ("use_kl_loss", "use_tis", "use_opsm"):
        require(not getattr(args, name, False), name, "be False with BAPO", True)
    entropy_coef = getattr(args, "entropy_coef", 0.0)
    require(not entropy_coef, "entropy_coef", "be 0 with BAPO", entropy_coef)
    name, rule = "context_parallel_size", "be 1 with BAPO"
    require(context_parallel_size == 1, name, rule, context_parallel_size)


def _labels(batch: dict[str, Any], T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Labels ``[T]`` of the packed rows, and the rows that predict response tokens."""
    labels = torch.full((T,), IGNORE_INDEX, dtype=torch.long, device=device)
    rows, end = [], 0
    lengths = zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    )
    for tokens, total, response in lengths:
        end += total
        at = torch.arange(end - response - 1, end - 1, device=device)
        labels[at] = tokens[-response:].to(labels)
        rows.append(at)
    return labels, torch.cat(rows)
