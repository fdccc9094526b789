"""TRL: the head that a trainer gives to its model, and the sampling masks of rollouts.

May import public modules, the package's checks and TRL. The head must stay in the model's forward:
only there do wrappers (DDP, FSDP, autocast) have weights ready and synchronise gradients.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ..checks import require, warn_once
from ..lm_head import LMHead
from ..sampling_mask import SamplingMask

KEY = "sampling_mask"  # in the output of rollout_func, and in the inputs of the loss


def add_head(model: Any, args: Any) -> LMHead | None:
    """Lets ``model(..., bapo_head=f, bapo_tokens=T)`` return ``f(hidden states, weight, bias=b)``.

    Returns:
        The head of the model; ``None`` if TRL's own head computes the log-probs.
    """
    if args.bapo_head == "trl":
        return None
    layer, float32 = model.get_output_embeddings(), args.cast_lm_head_to_fp32
    # TRL's forward multiplies in float32, as _replace_forward does.
    cast = vars(layer).pop("forward", None) if float32 else None
    try:
        head = LMHead.of(model)
        _replace_forward(head, float32)
        return head
    except ValueError as refusal:
        if args.bapo_head is not None:
            raise
        warn_once(f"bapo_head is 'trl', which is slower: {refusal}")
        return None
    finally:
        if cast is not None:
            layer.forward = cast


def _replace_forward(head: LMHead, float32: bool) -> None:
    model: Any = head.model
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *inputs: Any, bapo_head: Any = None, bapo_tokens: int = 0, **options: Any
    ) -> Any:
        if bapo_head is None:
            return original(*inputs, **options)
        states = head.decoder(*inputs, use_cache=False, **options).last_hidden_state
        layer = self.get_output_embeddings() if float32 else head
        weight, bias = layer.weight, layer.bias  # once: LoRA is summed at each use
        hidden = states[:, -bapo_tokens - 1 : -1].to(weight.device)
        context = nullcontext()
        if float32:
            hidden = hidden.float()
            context = torch.autocast(hidden.device.type, enabled=False)  # type: ignore[assignment]
        with context:
            return bapo_head(hidden, weight, bias=bias)

    model.forward = types.MethodType(forward, model)


class TrainerWithSamplingMasks(GRPOTrainer):
    """Scores completions over the sets that ``rollout_func`` returned, and gives them to the loss.

    TRL itself asks no sampler for sets. It shuffles and splits lists like tensors, so there is one
    mask per completion: a single one would stay behind.
    """

    rollout_func: Any
    _log_probs: Callable[..., Any]  # scores the completions of a micro-batch over its sets

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._masks: list[SamplingMask] | None = None  # while completions are scored: one for each
        if self.rollout_func is not None:
            self.rollout_func = functools.partial(self._rollout, self.rollout_func)

    def _rollout(self, function: Callable[..., Any], prompts: list[Any], trainer: Any) -> Any:
        """The user's rollout without its sets, which are kept here."""
        output = dict(function(prompts, trainer))
        sets = output.pop(KEY, None)
        if sets is not None:
            require(not self.tools, KEY, "not be given where TRL calls tools", "one")
            masks = _masks_of(sets, output["completion_ids"])
            self._masks = [mask.to(self.accelerator.device) for mask in masks]
        return output

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self._masks is not None:
            made[KEY] = _padded(self._masks, made["completion_ids"].shape[1])
            self._masks = None
        return made

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Scores completions by the policy or the reference policy, over their sets if any."""
        if self._masks is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **options
            )
        masks = _padded(self._masks, logits_to_keep)
        size, T = batch_size or len(masks), logits_to_keep
        scored = []
        for i in range(0, len(masks), size):
            ids, attention = input_ids[i : i + size], attention_mask[i : i + size]
            inputs = options | {
                "prompt_ids": ids[:, :-T],
                "prompt_mask": attention[:, :-T],
                "completion_ids": ids[:, -T:],
                "completion_mask": attention[:, -T:],
                KEY: masks[i : i + size],
            }
            scored.append(self._log_probs(model, inputs)[0])
        return torch.cat(scored), None, None


def mask_of(inputs: dict[str, Any]) -> SamplingMask | None:
    """The sampling mask of the completions of a micro-batch."""
    masks = inputs.get(KEY)
    return None if masks is None else SamplingMask.cat(masks)


def _masks_of(sets: Sequence[Any], completions: Sequence[Sequence[int]]) -> list[SamplingMask]:
    """A mask for each completion, with a row for each of its tokens."""
    rule = f"have a list of sets for each of the {len(completions)} completions"
    require(len(sets) == len(completions), KEY, rule, len(sets))
    for i, (rows, ids) in enumerate(zip(sets, completions, strict=True)):
        rule = f"have a set for each of the {len(ids)} tokens of the completion"
        require(len(rows) == len(ids), f"{KEY}[{i}]", rule, len(rows))
    return [SamplingMask.from_lists(rows) for rows in sets]


def _padded(masks: list[SamplingMask], length: int) -> list[SamplingMask]:
    """Extends every mask to ``length`` rows; those added have no set."""
    none = SamplingMask.from_lists([[]] * length, masks[0].offsets.device)
    return [SamplingMask.cat([mask, none[len(mask) :]]) for mask in masks]
