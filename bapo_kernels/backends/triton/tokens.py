"""The fields of tokens by name, as kernels load them from ``tokens`` [fields, N].

Imports ``core.operators`` alone. The places follow from the order of its FIELDS, which C++ has too:
in another order a kernel would take one number of a token for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.operators import FIELDS

ADVANTAGES = tl.constexpr(FIELDS.index("advantages"))
OLD_LOG_PROBS = tl.constexpr(FIELDS.index("old_log_probs"))
ROLLOUT_LOG_PROBS = tl.constexpr(FIELDS.index("rollout_log_probs"))
ROLLOUT_IS_WEIGHTS = tl.constexpr(FIELDS.index("rollout_is_weights"))
REF_LOG_PROBS = tl.constexpr(FIELDS.index("ref_log_probs"))
TEMPERATURES = tl.constexpr(FIELDS.index("temperatures"))
LOWER = tl.constexpr(FIELDS.index("lower"))
UPPER = tl.constexpr(FIELDS.index("upper"))


def bits(*fields: tl.constexpr) -> int:
    """As in ``present``; those that a kernel does not read must not compile it again."""
    return sum(1 << field.value for field in fields)


@triton.constexpr_function
def has(field, present):
    """Whether the tokens have this field."""
    return present >> field & 1 == 1


@triton.jit
def load_field(token, FIELD: tl.constexpr):
    """In float64. A token, or a block of them, is ``(tokens, N, index, mask)`` with int64 N."""
    tokens, N, index, mask = token
    return tl.load(tokens + FIELD * N + index, mask, other=0.0).to(tl.float64)
