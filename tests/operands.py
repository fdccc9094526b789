"""The operands of an operator: tokens by their fields, options and arguments by their names."""

from types import MappingProxyType

import torch

from bapo_kernels import BAPOConfig
from bapo_kernels.core.operators import FIELDS, SCHEMAS


def names_of(operator):
    """Of its arguments."""
    return [argument.split()[-1] for argument in SCHEMAS[operator].split(", ")]


def call(ops, operator, known=MappingProxyType({}), /, **given):
    """Calls an operator with what is given or else known, of which it takes what it has names for.

    What is neither is absent: ``None``, no fields of tokens, and the paper's options.
    """
    names = names_of(operator)
    assert given.keys() <= {*names}, f"{operator} takes {names}"
    arguments = {"present": 0, "options": options_of(), **known, **given}
    getattr(ops, operator)(*map(arguments.get, names))


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
