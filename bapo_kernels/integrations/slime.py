"""slime 0.3: ``--loss-type custom_loss`` on the raw, packed, vocabulary-parallel logits.

``--custom-loss-function-path bapo_kernels.integrations.slime.bapo_loss_function``; options in the
file of ``--custom-config-path``: ``bapo_preset``, ``bapo_options``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import require
from ..config import IGNORE_INDEX
from ..functional import bapo_loss
from . import config_of

_OWNERS = dict(
    loss_agg_mode="slime's reduction",
    loss_scale_factor="slime's reduction",
    clip_ratio_c="eps_clip_c",
    temperature="rollout_temperature",
    kl_loss_coef="use_kl_loss, which must be False",
    kl_loss_type="use_kl_loss, which must be False",
    entropy_coef="slime's entropy_coef, which must be 0",
)


def bapo_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a micro-batch, one pass over ``logits [1, T, V/TP]``.

    ``sum_of_sample_mean`` is linear, so it is known by its gradient: the weight of every response
    token, which takes the place of slime's reduction. The search is this rank's (slime's ranks have
    unequal micro-batches).

    Raises:
        ValueError: context parallelism, an option of slime that would be left out, or one of
            ``bapo_options`` that slime decides.
    """
    from megatron.core import mpu

    for name in ("use_kl_loss", "use_tis", "use_opsm"):
        require(not getattr(args, name, False), name, "be False with BAPO", True)
    entropy_coef = getattr(args, "entropy_coef", 0.0)
    require(not entropy_coef, "entropy_coef", "be 0 with BAPO", entropy_coef)
    context = mpu.get_context_parallel_world_size()
    require(context == 1, "context_parallel_size", "be 1 with BAPO", context)

    T = logits.shape[1]
    labels = torch.full((T,), IGNORE_INDEX, dtype=torch.long, device=logits.device)
    rows, end = [], 0
    lengths = zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    )
    for tokens, total, response in lengths:
        end += total
        at = torch.arange(end - response - 1, end - 1, device=logits.device)
        labels[at] = tokens[-response:].to(labels)
        rows.append(at)
    index = torch.cat(rows)

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
        rollout_log_probs=spread(torch.cat(rollout)) if rollout else None,
        rollout_is_weights=spread(weights),
        vocab_group=tensor_group,
    )
    zero = torch.zeros((), device=logits.device)
    # slime divides what is logged by the number of samples, as it does with the loss.
    scale = sum_of_sample_mean(torch.ones_like(ones.detach()))
    log = {
        "loss": out.loss.detach(),
        "pg_loss": out.metrics["pg_loss"],
        "entropy_loss": zero
        if out.entropy is None
        else sum_of_sample_mean(out.entropy.detach()[index]),
    }
    for name in ("pg_clipfrac", "ppo_kl", "bapo_clip_low", "bapo_clip_high", "bapo_pos_share"):
        log[name] = out.metrics[name] * scale
    return out.loss, log
