"""The operands of an operator: tokens by their fields, and options by their names."""

import torch

from bapo_kernels import BAPOConfig
from bapo_kernels.core.operators import FIELDS


def tokens_of(N, device="cpu", **fields):
    """(tokens, present) with these fields, of which each may be ``None``; the others are NaN."""
    tokens, present = torch.full((len(FIELDS), N), torch.nan, device=device), 0
    for name, values in fields.items():
        if values is not None:
            tokens[FIELDS.index(name)] = values
            present |= 1 << FIELDS.index(name)
    return tokens, present


def options_of(**named):
    """The paper's but for these, as the dispatcher hands them over."""
    return [*map(float, BAPOConfig().options._replace(**named))]
