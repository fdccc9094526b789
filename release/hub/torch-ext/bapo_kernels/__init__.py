"""bapo_kernels from the kernels hub: the names of the package, and its losses as layers."""

from . import layers, package
from .package import *  # noqa: F403

__all__ = [*package.__all__, "layers"]
