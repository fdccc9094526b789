"""The specification in plain, differentiable PyTorch: the paper's formulas, line by line.

Any float dtype: bfloat16 and float16 are computed in float32. Imports nothing of the kernels, which
are tested against it in float64. It is slow, and reads values back at every probe of the search.
"""

from .loss import bapo_linear_loss, bapo_loss, bapo_loss_from_log_probs
from .search import Contributions, find_clip_bounds
from .softmax import linear_log_probs, linear_top_k, log_probs

__all__ = [
    "Contributions",
    "bapo_linear_loss",
    "bapo_loss",
    "bapo_loss_from_log_probs",
    "find_clip_bounds",
    "linear_log_probs",
    "linear_top_k",
    "log_probs",
]
