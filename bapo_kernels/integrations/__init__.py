"""Adapters, one per framework, and what they share; ``import bapo_kernels`` imports none of them.

May import public modules and the package's checks, no framework and no adapter. An option missing
from ``_OF_THE_FRAMEWORK`` would be applied twice, by the framework and by the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..bounds import SEARCH_METRICS
from ..checks import require
from ..config import BAPOConfig, meant

# Frameworks average what they log: the first may be infinite, the second is a flag.
_NOT_AVERAGED = "bapo_pos_neg_ratio", "loss_adds_up"
BOUND_METRICS = (
    *("bapo_clip_low", "bapo_clip_high", "bapo_pos_share"),
    *("bapo_saturated", "bapo_acted"),
)
CLIP_METRICS = ("pg_clipfrac", "pg_clipfrac_pos", "pg_clipfrac_neg", "pg_clipfrac_lower")
DECISION_METRICS = tuple(name for name in SEARCH_METRICS if name not in _NOT_AVERAGED)
OPTIONS = {field.name for field in fields(BAPOConfig)}
# A framework decides these if it computes log-probs itself and adds its own KL and entropy terms.
_OF_THE_FRAMEWORK = (
    "temperature",
    "logit_scale",
    "final_logit_softcapping",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coef",
)


def require_version(package: str, oldest: str) -> Any:
    """Imports a framework if its adapter supports the version.

    Raises:
        ImportError: the framework is not installed, or too old.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{package} must be installed ({oldest} or later), it is absent"
        ) from None
    from packaging.version import Version  # a dependency of every framework here

    if Version(module.__version__) < Version(oldest):
        raise ImportError(f"{package} must be {oldest} or later, got {module.__version__}")
    return module


def left_to(framework: str, **others: str) -> dict[str, str]:
    """The ``owners`` of :func:`config_of`: the framework, and ``others`` for further options."""
    return dict.fromkeys(_OF_THE_FRAMEWORK, framework) | others


def config_of(
    preset: str,
    /,
    options: Any = None,
    owners: Mapping[str, str] | None = None,
    prefix: str = "",
    **decided: Any,
) -> BAPOConfig:
    """Makes the config from a preset, the options of a framework and those of its user.

    Args:
        preset: ``"paper"`` or ``"recipe"``.
        options: the user's options, a dict.
        owners: options that the user may not give, and who decides them.
        prefix: what precedes the names ``preset`` and ``options`` in error messages.
        decided: the framework's options; ``None`` keeps the value of the preset.

    Raises:
        ValueError: the preset or an option does not exist, an option has another owner, or a value
            breaks its rule.
    """
    rule = "be 'paper' or 'recipe'"
    require(preset in ("paper", "recipe"), f"{prefix}preset", rule, repr(preset))
    is_dict = options is None or isinstance(options, Mapping)
    require(is_dict, f"{prefix}options", "be a dict or None", repr(options))
    for name, value in (options or {}).items():
        got = repr(name) + ("" if name in OPTIONS else meant(name))
        require(name in OPTIONS, f"{prefix}options", "name options of BAPOConfig", got)
        owner = (owners or {}).get(name)
        rule = f"be left to {owner}"
        require(owner is None, f"{prefix}options[{name!r}]", rule, repr(value))
    given = {name: value for name, value in decided.items() if value is not None}
    config: BAPOConfig = getattr(BAPOConfig, preset)(**given | dict(options or {}))
    return config


def masked_reduction(
    loss_agg_mode: str,
    mask: Tensor,
    tokens: float | Tensor | None = None,
    samples: float | Tensor | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The ``loss_agg_mode`` and counts of a loss that reduces ``[B, T]`` as ROLL and Trinity do.

    Without ``samples``, a mean over sequences also counts those without an unmasked token.
    ``seq-mean-token-sum-norm`` divides the sum by the padded length alone.
    """
    if loss_agg_mode == "token-mean":
        return loss_agg_mode, dict(batch_num_tokens=tokens)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return "token-mean", dict(batch_num_tokens=mask.shape[-1])
    return loss_agg_mode, dict(global_batch_size=mask.shape[0] if samples is None else samples)


def averageable(
    config: BAPOConfig, metrics: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The named metrics, or all, that can be averaged; without bounds, none of the search."""
    kept = (name for name in names or metrics if name not in _NOT_AVERAGED)
    return {name: metrics[name] for name in kept if config.has_bounds or "bapo_" not in name}


def on_host(
    config: BAPOConfig, metrics: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, float]:
    """The numbers of :func:`averageable`; one read of the device gets all of them."""
    chosen = averageable(config, metrics, names)
    return dict(zip(chosen, torch.stack([*chosen.values()]).tolist(), strict=True))
