"""The response tokens of a micro-batch of slime: which rank has them, and what they weigh.

May import public modules, and slime and Megatron inside of functions. Positions must be those of
slime's context parallelism: one that is off gives a token the advantage of another, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..config import IGNORE_INDEX


@dataclass(frozen=True)
class ResponseTokens:
    """Positions in the concatenated response tokens of all samples.

    Attributes:
        lengths: the tokens of each response; their sum is ``R``.
        labels: ``[T]``, one for each of this rank's rows of the logits; -100 in rows that predict
            no response token.
        rows: ``[n]``, the rows that predict one.
        predicted: ``[n]``, the positions of the tokens that these predict.
        listed: ``[m]``, the positions of the tokens in the batch's lists per sample.
        group: the context-parallel ranks; ``None`` if there is one rank.
    """

    lengths: list[int]
    labels: Tensor
    rows: Tensor
    predicted: Tensor
    listed: Tensor
    group: dist.ProcessGroup | None

    def whole(self, values: Tensor, positions: Tensor) -> Tensor:
        """Makes ``[k, R]`` from the values ``[k, ...]`` that each rank has at its positions."""
        empty = values.new_zeros(len(values), sum(self.lengths))
        own = empty.index_copy(1, positions, values)
        summed: Tensor = own if self.group is None else _Sum.apply(own, self.group)
        return summed

    def means(self, values: Tensor, masks: list[Tensor]) -> Tensor:
        """The mean of its response for each token, ``[R]``."""
        samples = zip(values.split(self.lengths), masks, strict=True)
        means = [((x * mask).sum() / mask.sum().clamp(min=1)).expand_as(x) for x, mask in samples]
        return torch.cat(means)

    def weights(self, reduction: Callable[[Tensor], Tensor]) -> Tensor:
        """The weights ``[R]`` of a reduction of slime: its gradient, as it is linear.

        Tokens of other ranks have 0.
        """
        # These replace the hooks of slime's --recompute-loss-function, by which the gradient would
        # recompute the loss function, inside its forward.
        own_hooks = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.enable_grad(), own_hooks:
            ones = torch.ones(len(self.listed), device=self.listed.device, requires_grad=True)
            (weights,) = torch.autograd.grad(reduction(ones), ones)
        empty = weights.new_zeros(sum(self.lengths))
        return empty.index_copy(0, self.listed, weights)


def response_tokens(
    args: Any, batch: dict[str, Any], T: int, device: torch.device
) -> ResponseTokens:
    """The tokens of a micro-batch; this rank has ``T`` rows of its logits.

    With context parallelism a rank has two chunks of every sample, mirror images of each other, and
    lists of the tokens that they predict. With ``allgather_cp`` it has one chunk of all samples
    together, while the lists stay the same.

    The CPU computes the positions, from lengths that it knows: boolean indices on the device would
    make the host wait at every sample.
    """
    from megatron.core import mpu

    size, rank, group = mpu.get_context_parallel_world_size(), 0, None
    if size > 1:
        rank, group = mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()
    lengths = batch["total_lengths"], batch["response_lengths"]
    totals, responses = (torch.tensor(each, device="cpu") for each in lengths)
    chunks = -(-totals // (2 * size)) if size > 1 else totals
    starts = totals.cumsum(0) - totals
    row_starts = starts if size == 1 else 2 * (chunks.cumsum(0) - chunks)

    sample = torch.repeat_interleave(responses)
    before_response = totals - responses.cumsum(0) - 1
    at = torch.arange(len(sample), device="cpu") + before_response[sample]  # predicts the next
    chunk, offset = at // chunks[sample], at % chunks[sample]
    mirrored = chunk == 2 * size - 1 - rank
    mine = (chunk == rank) | mirrored
    row = row_starts[sample] + offset + chunks[sample] * mirrored
    listed = mine.nonzero().flatten()
    if size > 1 and getattr(args, "allgather_cp", False):
        row = starts[sample] + at - rank * T
        mine = (row >= 0) & (row < T)
    predicted = mine.nonzero().flatten()
    label = (starts[sample] + at + 1)[predicted]

    indices = (row[predicted], label, predicted, listed)
    sizes = [len(index) for index in indices]
    rows, label, predicted, listed = on_device(torch.cat(indices), device).split(sizes)
    labels = torch.full((T,), IGNORE_INDEX, dtype=torch.long, device=device)
    labels.index_copy_(0, rows, torch.cat(list(batch["unconcat_tokens"])).to(labels)[label])
    return ResponseTokens(batch["response_lengths"], labels, rows, predicted, listed, group)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies CPU values to the device; the host does not wait."""
    if device.type == "cuda":
        values = values.pin_memory()  # from pageable memory the copy would synchronise
    return values.to(device, non_blocking=True)


class _Sum(torch.autograd.Function):
    """Sums values over ranks whose losses add up, so the gradients add up too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None


class Weights(NamedTuple):
    """The weights of each response token, ``[R]``; 0 where another rank lists the token.

    Attributes:
        policy: weights of the policy term, with the factors of OPSM and of a correction.
        others: weights of the KL and entropy terms; 0 where a correction rejects the token.
        logged: weights for logs of all tokens, rejected ones included.
        kept: 0 for tokens that a correction rejects, of all ranks. With an advantage of 0 they
            leave the search, but stay in the ratio of a sequence, as in slime.
        log: metrics of OPSM and of the correction.
    """

    policy: Tensor
    others: Tensor
    logged: Tensor
    kept: Tensor
    log: dict[str, Tensor]


def corrects(args: Any) -> bool:
    """Whether slime corrects, or measures, the mismatch of its two engines."""
    return bool(args.use_tis or args.get_mismatch_metrics)


def weights_of(
    args: Any,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    reduction: Callable[[Tensor], Tensor],
    log_probs: Tensor | None,
    old_log_probs: Tensor | None,
) -> Weights:
    """The weights that slime's own functions give.

    OPSM and the correction (``use_tis``, or the function at ``custom_tis_function_path``) multiply
    the policy terms by factors. On a policy term of ones, they return the factors.

    Args:
        log_probs: ``[R]``; OPSM needs them, and so does a correction if the batch has none.
        old_log_probs: ``[R]``; default: ``log_probs``.
    """
    from slime.utils.misc import load_function

    lengths, masks = (batch["total_lengths"], batch["response_lengths"]), batch["loss_masks"]
    per_token = args.calculate_per_token_loss
    logged = others = tokens.weights(reduction)
    factors = torch.ones(len(tokens.listed), device=logged.device)
    log: dict[str, Tensor] = {}
    if args.use_opsm:
        from slime.utils.ppo_utils import compute_opsm_mask

        assert log_probs is not None
        old = log_probs if old_log_probs is None else old_log_probs
        factors, log["opsm_clipfrac"] = compute_opsm_mask(
            args=args,
            full_log_probs=log_probs.detach().split(tokens.lengths),
            full_old_log_probs=old.detach().split(tokens.lengths),
            advantages=batch["advantages"],
            loss_masks=masks,
        )
    if corrects(args):
        from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
        from slime.backends.megatron_utils.loss import vanilla_tis_function

        path = args.custom_tis_function_path
        correction = vanilla_tis_function if path is None else load_function(path)
        trained = batch.get("log_probs")
        if not trained:
            assert log_probs is not None
            counts = [len(values) for values in batch["advantages"]]
            trained = log_probs.detach()[tokens.listed].split(counts)
        factors, masks, metrics = correction(
            args=args,
            pg_loss=factors,
            train_log_probs=list(trained),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=masks,
            total_lengths=lengths[0],
            response_lengths=lengths[1],
        )
        log |= {name: reduction(value) for name, value in metrics.items()}
        # Rejected tokens leave the numerators, not the denominators.
        kept = get_sum_of_sample_mean(*lengths, masks, batch["rollout_mask_sums"], per_token)
        others = tokens.weights(kept)
    policy, path = others, getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is not None:
        policy = tokens.weights(load_function(path)(*lengths, masks, per_token))
    policy = policy.index_copy(0, tokens.listed, policy[tokens.listed] * factors.detach())
    return Weights(policy, others, logged, torch.cat(list(masks)).to(others), log)
