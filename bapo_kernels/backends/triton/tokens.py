"""The fields of tokens by name, as kernels load them from ``tokens`` [fields, N].

May import ``core.operators`` alone. The order of its FIELDS gives the places, as in C++: with
another order a kernel reads the wrong field.
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
    """The bits of fields in ``present``; those that a kernel does not read must not compile it."""
    return sum(1 << field.value for field in fields)


@triton.constexpr_function
def has(field, present):
    """Whether the tokens have this field."""
    return present >> field & 1 == 1


@triton.jit
def load_field(token, FIELD: tl.constexpr):
    """Loads a field in float64; ``token``: (tokens, int64 N, index, mask) of one or a block."""
    tokens, N, index, mask = token
    return tl.load(tokens + FIELD * N + index, mask, other=0.0).to(tl.float64)
