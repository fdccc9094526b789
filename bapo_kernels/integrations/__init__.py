"""Adapters, a file a framework; nothing here is imported with ``bapo_kernels``."""

from __future__ import annotations

import importlib
from typing import Any

from ..config import BAPOConfig


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


def config_of(preset: str, /, **options: Any) -> BAPOConfig:
    """A preset by name; options that are ``None`` are the preset's."""
    if preset not in ("paper", "recipe"):
        raise ValueError(f"preset must be 'paper' or 'recipe', got {preset!r}")
    given = {name: value for name, value in options.items() if value is not None}
    config: BAPOConfig = getattr(BAPOConfig, preset)(**given)
    return config
