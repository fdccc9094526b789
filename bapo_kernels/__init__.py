"""Fused kernels for the BAPO policy loss (arXiv 2510.18927).

Imports the public modules, no framework, no Triton, and initialises no CUDA.
"""

from . import debug, distillation, reference
from .backends import available_backends
from .bounds import ContributionHistogram, find_clip_bounds
from .config import BAPOConfig
from .core.memory import empty_cache
from .functional import bapo_loss, bapo_loss_from_log_probs, log_probs
from .linear import bapo_linear_loss, linear_log_probs, linear_top_k
from .lm_head import LMHead
from .metrics import mean_metrics
from .modules import BAPOLinearLoss, BAPOLoss
from .output import BAPOOutput, ClipBounds
from .sampling_mask import SamplingMask
from .scopes import ClipBoundSearch
from .warmup import warm_up

__version__ = "0.1.0"

__all__ = [
    "BAPOConfig",
    "BAPOLinearLoss",
    "BAPOLoss",
    "BAPOOutput",
    "ClipBoundSearch",
    "ClipBounds",
    "ContributionHistogram",
    "LMHead",
    "SamplingMask",
    "available_backends",
    "bapo_linear_loss",
    "bapo_loss",
    "bapo_loss_from_log_probs",
    "debug",
    "distillation",
    "empty_cache",
    "find_clip_bounds",
    "linear_log_probs",
    "linear_top_k",
    "log_probs",
    "mean_metrics",
    "reference",
    "warm_up",
]
