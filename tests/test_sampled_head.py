"""Gradients of a head from samples, with the seeds of the reference: kernels draw the same sets."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import needs_native, real_in_turns
from sample_operators import *  # noqa: F403 - its tests
from test_linear import CONFIGS, DTYPES, build, check, problem, staleness_of

from bapo_kernels.core.operators import ops_of

pytestmark = needs_native


@pytest.fixture
def ops():
    return SimpleNamespace(**vars(ops_of("cpu")), shapes=((40, 30_011),))


CASES = [(torch.float32, *of) for of in product(CONFIGS, [False, True])]
CASES += [(dtype, "entropy", True) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("dtype", "name", "frozen"), CASES)
def test_options(same_seeds, dtype, name, frozen):
    """Logits of half precision would be rounded, and have other sets."""
    real = real_in_turns(CONFIGS, name, frozen)
    given = problem(dtype, "cpu", build(name), staleness_of(dtype), real=real)
    for C, chunk_tokens, sets in ((16, 5, "all"), (100, None, "live")):
        options = dict(chunk_tokens=chunk_tokens, logits_dtype=torch.float32, frozen=frozen)
        check(*given, "cpu", sets, gradient_samples=C, **options)
