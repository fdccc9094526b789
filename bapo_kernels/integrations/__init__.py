"""Adapters, a file a framework; nothing here is imported with ``bapo_kernels``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..checks import require
from ..config import BAPOConfig

_OPTIONS = {field.name for field in fields(BAPOConfig)}
# Of a loss that gets log-probs from its framework, which adds KL and entropy itself.
_OF_THE_FRAMEWORK = (
    "temperature",
    "logit_scale",
    "final_logit_softcapping",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coef",
)


def require_version(package: str, oldest: str) -> Any:
    """The module of a framework, in a version that its adapter knows.

    Raises:
        ImportError: it is absent, or older.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{package} must be installed ({oldest} or later), it is absent"
        ) from None
    from packaging.version import Version  # every framework here depends on it

    if Version(module.__version__) < Version(oldest):
        raise ImportError(f"{package} must be {oldest} or later, got {module.__version__}")
    return module


def left_to(framework: str, **others: str) -> dict[str, str]:
    """Who decides an option that is not the user's, for :func:`config_of`."""
    return dict.fromkeys(_OF_THE_FRAMEWORK, framework) | others


def config_of(
    preset: str,
    /,
    options: Any = None,
    owners: Mapping[str, str] | None = None,
    prefix: str = "",
    **decided: Any,
) -> BAPOConfig:
    """A preset by name, with what the framework decides and what its user asks for.

    Args:
        options: the user's, a dict.
        owners: options that a user may not give, and who decides them.
        prefix: of ``preset`` and ``options`` in messages.
        decided: the framework's; ``None`` is the preset's.

    Raises:
        ValueError: no such preset or option, an option with an owner, or a bad value.
    """
    rule = "be 'paper' or 'recipe'"
    require(preset in ("paper", "recipe"), f"{prefix}preset", rule, repr(preset))
    is_dict = options is None or isinstance(options, Mapping)
    require(is_dict, f"{prefix}options", "be a dict or None", repr(options))
    for name, value in (options or {}).items():
        require(name in _OPTIONS, f"{prefix}options", "have names of BAPOConfig", repr(name))
        owner = (owners or {}).get(name)
        rule = f"be left to {owner}"
        require(owner is None, f"{prefix}options[{name!r}]", rule, repr(value))
    given = {name: value for name, value in decided.items() if value is not None}
    config: BAPOConfig = getattr(BAPOConfig, preset)(**given | dict(options or {}))
    return config
