"""The specification in plain, differentiable PyTorch: the paper's formulas, line by line.

Every function takes any float dtype: bfloat16 and float16 are computed in float32, the others in
their own dtype. The kernels are tested against the results in float64. The reference shares no
mathematics with them. It is slow, and reads values back at every probe of the search.

Sizes: B sequences, S tokens of a sequence, N tokens, V vocabulary, H hidden size.
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
