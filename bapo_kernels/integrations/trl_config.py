"""TRL: the options of ``BAPOTrainer``, checked before a model is loaded.

May import public modules, the package's checks and TRL. An option of TRL that ``check`` does not
know is ignored by the loss, so each new one belongs there or in ``bapo_config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checks import require, warn_once
from ..config import BAPOConfig
from . import config_of, require_version

require_version("trl", "1.9")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

# With fewer sequences a decision is noise: the share of n random sequences is off by 0.5/sqrt(n),
# which is 0.09 at 32, and the paper's target is 0.1 away from balance.
MIN_SEQUENCES = 32
_AGGREGATION = {
    **dict.fromkeys(("dapo", "bnpo", "dr_grpo", "cispo"), "token-mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    "luspo": "seq-mean-token-sum",
}
_OWNERS = {
    "loss_agg_mode": "TRL's loss_type",
    "loss_scale_factor": "TRL's loss_type",
    "kl_loss_coef": "TRL's beta",
    "kl_loss_type": "TRL's beta, whose KL is k3",
    "entropy_coef": "TRL's entropy_coef",
    "temperature": "TRL's temperature",
    "clip_ratio_c": "TRL's delta",
    "surrogate": "TRL's loss_type",
    "sapo_tau_pos": "TRL's sapo_temperature_pos",
    "sapo_tau_neg": "TRL's sapo_temperature_neg",
    "ratio_level": "TRL's importance_sampling_level",
    "logit_scale": "the model's config",
    "final_logit_softcapping": "the model's config",
}


@dataclass
class BAPOTrainerConfig(GRPOConfig):
    """``GRPOConfig`` with the options of BAPO; ``epsilon`` and ``epsilon_high`` are not used.

    Args:
        bapo_preset: ``"paper"`` or ``"recipe"``.
        bapo_options: options of the search that differ from the preset (bounds, target, order,
            weights), named as in :class:`bapo_kernels.BAPOConfig`: a dict, or JSON on a command
            line that ``TrlParser`` reads. TRL decides the other options: ``delta`` is the dual clip
            (``None`` takes the preset's), ``beta`` the weight of the KL term,
            ``importance_sampling_level`` the level of the ratio, and ``loss_type`` the surrogate
            (``"cispo"``, ``"sapo"``, otherwise the clip) and its aggregation.
            ``{"surrogate": "mask"}``, which TRL has no name for, replaces the clip.
        bapo_scope: the tokens that decide together: those of the previous optimizer step
            (``"lagged"``, the default), of this step (``"step"``, which takes a forward pass
            without gradient), or of a micro-batch on all processes (``"call"``). ``"call"`` needs
            large micro-batches, because the share in a few sequences is noise. ``loss_type="sapo"``
            has no search, so ``"call"`` is its default and only scope.
        bapo_head: ``"fused"`` (:func:`bapo_kernels.bapo_linear_loss`), ``"log_probs"``
            (:func:`bapo_kernels.linear_log_probs`, then the loss), or ``"trl"`` (TRL's own head);
            default: the first that is exact for the other options.
        bapo_gradient_samples: ``gradient_samples`` of the first two.

    Warns once of settings that give BAPO no effect, or too few sequences for a decision.

    Raises:
        ValueError: an option of TRL has no exact meaning for BAPO, an option of BAPO breaks its
            rule, or TRL decides it.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "bapo_options"]  # noqa: RUF012

    bapo_preset: str = field(default="paper", metadata={"help": "'paper' or 'recipe'"})
    bapo_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "options of BAPOConfig that differ from the preset"}
    )
    bapo_scope: str | None = field(
        default=None, metadata={"help": "'lagged', 'step' or 'call'; default: 'lagged'"}
    )
    bapo_head: str | None = field(
        default=None, metadata={"help": "'fused', 'log_probs' or 'trl'; default: the fastest"}
    )
    bapo_gradient_samples: int | None = field(
        default=None, metadata={"help": "entries that a row's gradient keeps; default: all, exact"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bapo_scope is None:
            self.bapo_scope = "call" if _surrogate(self) == "sapo" else "lagged"
        check(self)
        for message in _warnings(self):
            warn_once(message)


def check(args: Any) -> None:
    """Raises ``ValueError`` for the first option that has no exact meaning for BAPO."""

    def check_option(ok: bool, name: str, rule: str) -> None:
        require(ok, name, f"{rule} with BAPO", repr(getattr(args, name)))

    surrogate, case = _surrogate(args), f" for loss_type={args.loss_type!r}"
    if surrogate == "mask":
        case = " for surrogate='mask'"
    searches, clips = surrogate != "sapo", surrogate == "clip"
    rule = f"be one of {sorted(_AGGREGATION)}"
    if args.loss_type == "vespo":
        rule += " (VESPO's weights are smooth, without bounds to search for: take GRPOTrainer)"
    check_option(args.loss_type in _AGGREGATION, "loss_type", rule)
    levels, level = ("token", "sequence"), args.importance_sampling_level
    check_option(level in levels, "importance_sampling_level", f"be one of {levels}")
    replaces_loss = args.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss")
    rule = "be False before TRL 1.14 (where it replaces the loss)"
    check_option(not replaces_loss, "use_liger_kernel", rule)
    ok = args.delta is None or (clips and args.delta > 1)
    check_option(ok, "delta", "be None or > 1" if clips else f"be None{case}")
    heads: tuple[str | None, ...] = (None, "fused", "log_probs", "trl")
    rule = f"be one of {heads}"
    if names := needs_log_probs(args):
        heads = (None, "log_probs", "trl")
        rule = f"be one of {heads} with {names[0]}"
    check_option(args.bapo_head in heads, "bapo_head", rule)
    scopes = ("lagged", "step", "call") if searches else ("call",)
    rule = f"be one of {scopes}" if searches else f"be 'call'{case} (it has no search)"
    check_option(args.bapo_scope in scopes, "bapo_scope", rule)
    ok = searches or not args.bapo_options
    check_option(ok, "bapo_options", f"be None{case} (it has no search)")
    ok = args.steps_per_generation % args.gradient_accumulation_steps == 0
    rule = "be a multiple of gradient_accumulation_steps with bapo_scope='step'"
    check_option(ok or args.bapo_scope != "step", "steps_per_generation", rule)
    bapo_config(args)


def bapo_config(args: Any, **transform: Any) -> BAPOConfig:
    """Makes the :class:`BAPOConfig` of ``args`` and of the ``transform`` of the logits."""
    surrogate, options = _surrogate(args), args.bapo_options
    if surrogate == "mask":
        options = {name: value for name, value in options.items() if name != "surrogate"}
    return config_of(
        args.bapo_preset,
        options,
        _OWNERS,
        "bapo_",
        loss_agg_mode=_AGGREGATION[args.loss_type],
        kl_loss_coef=0.0 if corrects_kl(args) else args.beta,
        kl_loss_type="k3",
        temperature=args.temperature,
        clip_ratio_c=args.delta,
        surrogate=surrogate,
        sapo_tau_pos=args.sapo_temperature_pos,
        sapo_tau_neg=args.sapo_temperature_neg,
        ratio_level=args.importance_sampling_level,
        **transform,
    )


def _surrogate(args: Any) -> str:
    if args.loss_type in ("cispo", "sapo"):
        return str(args.loss_type)
    options = args.bapo_options
    masks = isinstance(options, Mapping) and options.get("surrogate") == "mask"
    return "mask" if masks else "clip"


def corrects_kl(args: Any) -> bool:
    """Whether TRL multiplies the KL by the ratio: a separate term, as both have a gradient."""
    return bool(args.beta and args.use_bias_correction_kl)


def needs_log_probs(args: Any) -> list[str]:
    """The options in use whose terms, or masks of the policy term, need log-probs or entropies."""
    in_use = {
        "entropy_coef": args.entropy_coef,
        "use_bias_correction_kl": corrects_kl(args),
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
    }
    return [name for name, used in in_use.items() if used]


def _warnings(args: Any) -> Iterator[str]:
    """Warnings about settings that are allowed, but are probably not intended."""
    if _surrogate(args) == "sapo":  # none of them applies without a search
        return
    for name in ("epsilon", "epsilon_high"):
        value = getattr(args, name)
        if value != GRPOConfig.__dataclass_fields__[name].default:
            yield (
                f"{name}={value} is not used, because BAPO searches for its bounds: set "
                "ratio_lower_start, ratio_lower_max, ratio_upper_start, ratio_upper_max in "
                "bapo_options, as ratio bounds (0.8, 1.28), never epsilons (0.2, 0.28)"
            )
    generation = args.steps_per_generation * args.num_iterations
    update = args.gradient_accumulation_steps
    more = "set steps_per_generation=4*gradient_accumulation_steps, say, or num_iterations=4"
    if update % generation == 0:  # where TRL computes no old log-probs
        yield (
            "BAPO cannot act: every ratio is 1, which no bound clips, because "
            f"steps_per_generation*num_iterations ({generation}) divides "
            f"gradient_accumulation_steps ({update}). For more optimizer steps per generation "
            f"{more}"
        )
    if generation == 2 * update and args.bapo_scope == "lagged":
        yield (
            "bapo_scope='lagged' with two optimizer steps per generation decides the second from "
            "the first, where every ratio is 1 and the search stops at its start or at its end: "
            f"{more}, or bapo_scope='step'"
        )
    sequences = args.per_device_train_batch_size * args.world_size
    if args.bapo_scope == "call" and sequences < MIN_SEQUENCES:
        yield (
            "bapo_scope='call' decides from per_device_train_batch_size*processes = "
            f"{sequences} sequences, and the share of positive tokens in fewer than "
            f"{MIN_SEQUENCES} is noise: set bapo_scope='lagged' or 'step', or larger micro-batches"
        )
