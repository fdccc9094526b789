"""A micro-batch of slime, its loss in float64, and stand-ins of Megatron and slime."""

import sys
from argparse import Namespace
from types import ModuleType

import torch

from bapo_kernels import reference

V, TEMPERATURE = 33, 0.8
PADDING = 5  # rows at the end: slime has multiples of 128
DENOMINATORS = [3.0, 2.0, 9.0]  # of the rollouts, not of the samples


def stand_in(monkeypatch, name, **functions):
    """Imports find a module with these functions, and its parents."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def arguments(**options):
    """As slime's parser has them by default, at the temperature of the case."""
    defaults = dict(
        advantage_estimator="grpo", allgather_cp=False, calculate_per_token_loss=False,
        custom_pg_loss_reducer_function_path=None, custom_tis_function_path=None, entropy_coef=0.0,
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, get_mismatch_metrics=False,
        log_probs_chunk_size=-1, on_policy=False, rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0, use_kl_loss=False, use_opsm=False, use_rollout_logprobs=False,
        use_tis=False, use_unbiased_kl=False,
    )  # fmt: skip
    return Namespace(**(defaults | options))


def megatron(monkeypatch, size=1, rank=0, group=None, tensor_group=None):
    """``megatron.core.mpu`` with context parallelism or tensor parallelism."""
    mpu = Namespace(
        get_context_parallel_world_size=lambda: size,
        get_context_parallel_rank=lambda: rank,
        get_context_parallel_group=lambda: group,
        get_tensor_model_parallel_world_size=lambda: 2 if tensor_group else 1,
        get_tensor_model_parallel_group=lambda: tensor_group,
    )
    stand_in(monkeypatch, "megatron.core", mpu=mpu)


def slime(monkeypatch, reduction):
    """The functions of slime that the adapter calls, from their formulas."""
    parts = {
        "utils.ppo_utils": dict(compute_approx_kl=approx_kl, compute_opsm_mask=opsm),
        "utils.misc": dict(load_function=lambda path: globals()[path.split(".")[1]]),
        "backends.megatron_utils.loss": dict(vanilla_tis_function=truncated),
        "backends.megatron_utils.cp_utils": dict(get_sum_of_sample_mean=reduction),
    }
    for name, functions in parts.items():
        stand_in(monkeypatch, f"slime.{name}", **functions)


def approx_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio=None):
    d = log_probs - log_probs_base
    kl = {"k1": d, "k2": d**2 / 2}.get(kl_loss_type, torch.exp(-d) - 1 + d)
    kl = kl if importance_ratio is None else importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


def opsm(args, full_log_probs, full_old_log_probs, advantages, loss_masks):
    samples = zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True)
    drops = [
        ((mean(old - logp, mask) > args.opsm_delta) & (A < 0)).float()
        for logp, old, A, mask in samples
    ]
    shares = zip(drops, loss_masks, strict=True)
    return 1 - torch.cat(drops), sum(drop.sum() / mask.sum().clamp(min=1) for drop, mask in shares)


def mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def truncated(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    factors = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * factors, loss_masks, {"tis": ratio, "tis_clipfrac": (factors != ratio).float()}


def rejecting(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    """A correction with rejection: the first token of every response."""
    pg_loss, masks, metrics = truncated(
        args, pg_loss, train_log_probs, rollout_log_probs, loss_masks
    )
    kept = [mask.clone() for mask in masks]
    for mask in kept:
        mask[:1] = 0
    return pg_loss, kept, metrics


def sums(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """A reducer of the policy term alone."""
    mask = torch.cat(loss_masks)
    return lambda x: (x * mask).sum() / 7


def case(prompts=(3, 1, 2)):
    """Three samples packed, with responses of 4, 2 and 5 tokens, and rows of padding."""
    g = torch.Generator().manual_seed(4)
    responses = [4, 2, 5]
    totals = [sum(lengths) for lengths in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(0, V, (n,), generator=g) for n in totals]
    logits = 3 * torch.randn(1, sum(totals), V, generator=g)
    logits = torch.cat([logits, torch.full((1, PADDING, V), 7.0)], 1)
    ends = torch.tensor(totals).cumsum(0).tolist()
    rows = [torch.arange(e - r - 1, e - 1) for e, r in zip(ends, responses, strict=True)]
    labels = [t[-r:] for t, r in zip(tokens, responses, strict=True)]
    logp = [
        reference.log_probs(logits[0, i].double(), label, temperature=TEMPERATURE)[0]
        for i, label in zip(rows, labels, strict=True)
    ]
    masks = [torch.ones(r) for r in responses]
    masks[2][1] = 0

    def near(scale, shifts=(-0.5, 0.0, 0.2)):  # ratios above and below 1
        moved = zip(logp, shifts, strict=True)
        return [(x + d + scale * torch.randn(len(x), generator=g)).float() for x, d in moved]

    A = [torch.full((r,), A) for r, A in zip(responses, (1.0, -0.9, -0.6), strict=True)]
    batch = dict(
        unconcat_tokens=tokens, total_lengths=totals, response_lengths=responses, loss_masks=masks,
        log_probs=near(0.4), advantages=A, rollout_log_probs=None,
        rollout_mask_sums=[torch.tensor(n) for n in DENOMINATORS],
    )  # fmt: skip
    off_policy = dict(rollout_log_probs=near(0.6), ref_log_probs=near(0.3))
    return batch, off_policy, logits, rows, labels
