"""TRL 1.9 and later: ``GRPOTrainer`` with the BAPO loss.

May import public modules, the package's checks and the ``trl_...`` files, which do not import this
one. It overrides private methods of TRL: one that changes its meaning changes the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import require, warn_once
from ..config import IGNORE_INDEX
from ..functional import bapo_loss_from_log_probs
from ..linear import bapo_linear_loss, linear_log_probs
from ..output import BAPOOutput
from ..reference.loss import aggregated
from ..reference.tokens import sequence_mean
from ..scopes import ClipBoundSearch
from . import DECISION_METRICS, require_version

require_version("trl", "1.9")

from trl import GRPOTrainer  # noqa: E402
from trl.trainer.utils import get_config_model_id  # noqa: E402

from .trl_config import BAPOTrainerConfig, bapo_config, check, corrects_kl, needs_log_probs  # noqa: E402
from .trl_head import KEY, TrainerWithSamplingMasks, add_head, mask_of  # noqa: E402

__all__ = ["BAPOTrainer", "BAPOTrainerConfig"]

_SEARCH_FILE = "bapo_search.pt"
# TRL cites it in the model card that it writes.
_PAPER = {
    "id": "2510.18927",
    "title": "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy "
    "Optimization with Adaptive Clipping",
    "citation": """\
@article{xi2025bapo,
    title   = {{BAPO}: Stabilizing Off-Policy Reinforcement Learning for {LLMs} via Balanced Policy
               Optimization with Adaptive Clipping},
    author  = {Xi, Zhiheng and Guo, Xin and Nan, Yang and Zhou, Enyu and Shen, Junrui and Chen,
               Wenxiang and others},
    journal = {arXiv preprint arXiv:2510.18927},
    year    = {2025}
}

"""
    + str(GRPOTrainer._paper["citation"]),
}


class BAPOTrainer(TrainerWithSamplingMasks):
    """``GRPOTrainer`` with the loss of :func:`bapo_kernels.bapo_loss`.

    Raises:
        ValueError: ``args`` is neither ``None`` nor a :class:`BAPOTrainerConfig`, or was later
            changed to values that it refuses.
    """

    _tag_names: ClassVar = [*GRPOTrainer._tag_names, "bapo"]
    _name = "BAPO"
    _paper = _PAPER

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *others: Any, **options: Any
    ) -> None:
        if args is None:  # TRL's default has such a name
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = BAPOTrainerConfig(f"{name.split('/')[-1]}-BAPO")
        rule = "be None or a BAPOTrainerConfig"
        require(isinstance(args, BAPOTrainerConfig), "args", rule, type(args).__name__)
        check(args)  # before a model is loaded
        super().__init__(model, reward_funcs, args, *others, **options)
        self._corrected_kl = corrects_kl(self.args)
        self._lm_head = add_head(self.model, self.args)
        if self._lm_head is not None and self.ref_model is not None:
            add_head(self.accelerator.unwrap_model(self.ref_model), self.args)
        transform = {} if self._lm_head is None else self._lm_head.transform
        self.bapo_config = bapo_config(self.args, **transform)
        ranks = dist.group.WORLD if self.accelerator.num_processes > 1 else None
        self.search = ClipBoundSearch(
            self.bapo_config, self.args.bapo_scope, ranks, self.accelerator.device
        )
        self._known: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        self._calls_left = 0  # micro-batches of the optimizer step that are still to be computed
        self.accelerator.print(self._summary())

    def _summary(self) -> str:
        """What BAPO does in this run, in a line."""
        config, head = self.bapo_config, f"head {self._head({})}"
        if not config.has_bounds:
            return f"BAPO: no search with {config.surrogate}, {head}"
        grids = [
            f"{name} {grid[0]:g} to {grid[-1]:g} in {len(grid) - 1} steps"
            for name, grid in (("c_low", config.lower_grid), ("c_high", config.upper_grid))
        ]
        target = f"{config.target_kind} {config.target:g}"
        return f"BAPO: scope {self.search.scope}, target {target}, {', '.join(grids)}, {head}"

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training, scope = self.model.training, self.args.bapo_scope
        if training:
            if self._calls_left == 0:
                self._calls_left = self.current_gradient_accumulation_steps
                if scope == "step":
                    self._search_step(model)
            self._calls_left -= 1
        counted, aux_loss = inputs, None
        if self._head(inputs) == "fused":
            tokens = dict(labels=inputs["completion_ids"], sampling_mask=mask_of(inputs))
            tokens["gradient_samples"] = self.args.bapo_gradient_samples
            head = partial(bapo_linear_loss, **tokens, **self._arguments(inputs))
            out: BAPOOutput = self._forward(model, inputs, head)
            loss = out.loss
        else:
            log_probs, entropies, aux_loss = self._log_probs(model, inputs)
            counted, chosen = self._counted(log_probs, entropies, inputs)
            detached = None if entropies is None else entropies.detach()
            arguments = self._arguments(counted)
            out = bapo_loss_from_log_probs(log_probs, entropy=detached, **arguments)
            loss = out.loss + self._terms_of_trl(log_probs, entropies, aux_loss, chosen, inputs)
        self._log_metrics(out, model, inputs, aux_loss)
        if training and scope == "lagged":
            self.search.update(out.log_probs, **_tokens(counted))
            if self._calls_left == 0:
                self.search.step()
        return loss

    @property
    def _accumulation_steps(self) -> int:
        """The number of micro-batches whose losses add up; 1 in an evaluation."""
        return int(self.current_gradient_accumulation_steps) if self.model.training else 1

    def _search_step(self, model: Any) -> None:
        """Decides once for all micro-batches of the optimizer step that begins."""
        count = self.args.steps_per_generation
        for i in range(self._calls_left):
            inputs = self._buffered_inputs[(self._step + i) % count]
            with torch.no_grad():
                log_probs, entropies, _ = self._log_probs(model, inputs)
            counted, _ = self._counted(log_probs, entropies, inputs)
            self.search.update(log_probs, **_tokens(counted))
        self.search.step()

    def _head(self, inputs: dict[str, Any]) -> str:
        """The head that the user asked for, or the fastest that is exact for these inputs."""
        asked = self.args.bapo_head
        if self.aux_loss_enabled or any(x is not None for x in self._images(inputs).values()):
            rule = "be None or 'trl' with images or router losses"
            require(asked in (None, "trl"), "bapo_head", rule, repr(asked))
        elif self._lm_head is not None:
            return str(asked or ("log_probs" if needs_log_probs(self.args) else "fused"))
        rule = "not be given with TRL's head (bapo_head='trl', images, router losses)"
        require(inputs.get(KEY) is None, KEY, rule, "one")
        samples = self.args.bapo_gradient_samples
        require(samples is None, "bapo_gradient_samples", rule, samples)
        return "trl"

    def _counted(
        self, log_probs: Tensor, entropies: Tensor | None, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Tensor]:
        """Sets advantages to 0 where TRL drops the policy term; also returns the bonus' mask.

        Neither the loss nor the search then counts these tokens; their other terms stay.
        """
        mask = chosen = _mask(inputs)
        A = inputs["advantages"]
        A = A.unsqueeze(1) if A.ndim == 1 else A
        if self.top_entropy_quantile < 1.0:
            assert entropies is not None, "these options leave only heads that return them"
            least = 1 - self.top_entropy_quantile
            chosen = self.get_high_entropy_mask(entropies.detach(), mask, least)
        kept = chosen
        if self.off_policy_mask_threshold is not None:
            log_probs = log_probs.detach()
            old = inputs.get("old_per_token_logps")
            sampled = inputs.get("sampling_per_token_logps", log_probs if old is None else old)
            threshold = self.off_policy_mask_threshold
            kept = kept * self.get_off_policy_mask(A, log_probs, sampled, mask, threshold)
        return inputs | {"advantages": A * kept}, chosen

    def _terms_of_trl(
        self,
        log_probs: Tensor,
        entropies: Tensor | None,
        aux_loss: Tensor | None,
        chosen: Tensor,
        inputs: dict[str, Any],
    ) -> Tensor:
        """The terms that TRL adds: the KL times the ratio, the entropy bonus, router losses."""
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        terms = log_probs.new_zeros((), dtype=dtype)
        accumulation = self._accumulation_steps
        if self._corrected_kl:
            terms = terms + self.beta * self._kl_with_ratio(log_probs, inputs).to(dtype)
        if self._entropy_bonus_enabled and entropies is not None:
            bonus = (entropies * chosen).sum() / chosen.sum().clamp(min=1)
            entropy = self._last_world_entropy if self.use_adaptive_entropy else -torch.inf
            coefficient = self.entropy_coef if entropy <= self.args.entropy_target else 0.0
            terms = terms - coefficient * bonus / accumulation
        if aux_loss is not None:
            terms = terms + self.router_aux_loss_coef * aux_loss / accumulation
        return terms

    def _kl_with_ratio(self, log_probs: Tensor, inputs: dict[str, Any]) -> Tensor:
        """``r*(exp(d) - d - 1)`` with ``d = ref - log_prob``, aggregated like the loss."""
        unmasked = _mask(inputs) != 0
        old = inputs.get("old_per_token_logps")
        log_ratio = log_probs - (log_probs.detach() if old is None else old)
        if self.bapo_config.ratio_level == "sequence":
            log_ratio = sequence_mean(log_ratio, unmasked, None)
        d = inputs["ref_per_token_logps"] - log_probs
        kl = log_ratio.exp() * (d.exp() - d - 1)
        return aggregated(kl.double(), unmasked, self.bapo_config, **self._counts(inputs))

    def _log_probs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropies and router loss of the completions, by the head of these inputs."""
        if self._head(inputs) == "trl":
            ids, attention = _sequences(inputs)
            log_probs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                ids,
                attention,
                inputs["completion_ids"].shape[1],
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
                **self._images(inputs),
            )
            return log_probs, entropies, aux_loss
        head = partial(
            linear_log_probs,
            labels=inputs["completion_ids"].masked_fill(_mask(inputs) == 0, IGNORE_INDEX),
            temperature=self.bapo_config.temperature,
            logit_scale=self.bapo_config.logit_scale,
            final_logit_softcapping=self.bapo_config.final_logit_softcapping,
            sampling_mask=mask_of(inputs),
            gradient_samples=self.args.bapo_gradient_samples,
        )
        return *self._forward(model, inputs, head), None

    def _images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of TRL's head for images: what it takes besides tokens, by default None."""
        takes = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        optional = [name for name, each in takes.items() if each.default is None]
        return {name: inputs.get(name) for name in optional if name != "batch_size"}

    def _forward(self, model: Any, inputs: dict[str, Any], head: Callable[..., Any]) -> Any:
        """``head(hidden states of the completions, weight, bias=bias)``, in the model's forward."""
        ids, attention = _sequences(inputs)
        with self.accelerator.autocast():
            return model(
                input_ids=ids,
                attention_mask=attention,
                bapo_head=head,
                bapo_tokens=inputs["completion_ids"].shape[1],
            )

    def _arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of both losses other than log-probs or hidden states."""
        is_weights = None
        if self.use_vllm and self.vllm_importance_sampling_correction:
            is_weights = inputs["importance_sampling_ratio"].expand_as(inputs["completion_mask"])
        bounds: Any = self.bapo_config.options.start()
        if self.search.scope != "step" or self.search.metrics or self.model.training:
            bounds = self.search.bounds  # undecided in an evaluation before the first step
        return dict(
            **_tokens(inputs),
            rollout_is_weights=is_weights,
            ref_log_probs=inputs["ref_per_token_logps"] if self.beta else None,
            config=self.bapo_config,
            bounds=bounds,
            process_group=self.search.process_group,
            **self._counts(inputs),
        )

    def _counts(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The normaliser that TRL uses for its loss type."""
        B, accumulation = len(inputs["completion_ids"]), self._accumulation_steps
        if self.loss_type == "bnpo":
            return dict(batch_num_tokens=_mask(inputs).sum().clamp(min=1) * accumulation)
        if self.loss_type == "dr_grpo":
            return dict(batch_num_tokens=B * self.max_completion_length * accumulation)
        if self.loss_type in ("dapo", "cispo"):  # num_items_in_batch is the count of a generation
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if self.model.training:
                tokens = tokens * accumulation / self.args.steps_per_generation
            return dict(batch_num_tokens=tokens)
        return dict(global_batch_size=B * accumulation)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            torch.save(self.search.state_dict(), folder / _SEARCH_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.bapo_config.has_bounds:
            return
        file = Path(checkpoint) / _SEARCH_FILE
        try:
            self.search.load_state_dict(torch.load(file, map_location=self.accelerator.device))
        except (FileNotFoundError, ValueError) as error:
            bounds, why = self.bapo_config.options.start(), getattr(error, "strerror", error)
            warn_once(f"the search starts anew, from the bounds {bounds}: {why} ({file})")

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        if self._known is None:
            return super()._get_per_token_logps_and_entropies(*args, **options)
        known, self._known = self._known, None
        return known

    def _log(self, name: str, value: Tensor) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value.item())

    @torch.no_grad()
    def _log_metrics(
        self, out: BAPOOutput, model: Any, inputs: dict[str, Any], aux_loss: Tensor | None
    ) -> None:
        """Lets TRL's loss log its metrics, over all processes, and logs ``bapo/...``.

        With adaptive entropy, TRL's loss also updates the coefficient for the next step.
        """
        self._known = out.log_probs, out.entropy, aux_loss
        if self.bapo_config.has_bounds:
            lower, upper = (bound.double() for bound in out.bounds)  # exactly these at 1 - epsilon
            self.epsilon_low = 1 - lower
            self.epsilon_high = upper if self.loss_type == "cispo" else upper - 1
        super()._compute_loss(model, inputs)
        if inputs.get(KEY) is not None:
            outside = (_mask(inputs) != 0) & (out.log_probs == -torch.inf)
            count = self.accelerator.reduce(outside.sum().float(), "sum")
            self._log("bapo/label_outside_mask", count)
        if not self.bapo_config.has_bounds:
            return
        # An evaluation, or a micro-batch that decides, logs its own decision.
        decision = (self.model.training and self.search.metrics) or out.metrics
        for name in DECISION_METRICS:
            if not decision[name].isnan():  # as it is before the first decision
                self._log(name.replace("bapo_", "bapo/"), decision[name])


def _sequences(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Prompts and completions, concatenated, and their attention mask."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


def _tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that both loss and search take besides the log-probs."""
    return dict(
        old_log_probs=inputs.get("old_per_token_logps"),
        advantages=inputs["advantages"],
        response_mask=_mask(inputs),
        rollout_log_probs=inputs.get("sampling_per_token_logps"),
    )


def _mask(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
