"""Checks of numbers against the error budget, and against a number of roundings."""

import math
from functools import partial

import torch
from torch import Tensor

from bapo_kernels.tools import budget
from bapo_kernels.tools.budget import EPS, TINY, in_some_orders, largest


def assert_within_budget(name, got, same, truth, operand=0.0, inherited=0.0) -> None:
    """Both numbers come from :func:`error_and_budget`."""
    error, most = budget.error_and_budget(got, same, truth, operand=operand, inherited=inherited)
    assert error <= most, f"{name}: error {error:.3e} over budget {most:.3e}"


def assert_quantities(case, got, same, truth, sums=True) -> None:
    """All is within its budget. In ``sums``, roundings of half precision may cancel by luck."""
    for name, error, most in budget.quantities(case, got, same, truth):
        if sums or not name.startswith(("loss", "metric")):
            assert error <= most, f"{name}: error {error:.3e} over budget {most:.3e}"


def assert_as_reference(got, expected, dtype=torch.float32, operand=0.0, roundings=0) -> None:
    """Tensors, or one, against ``expected(dtype)`` of the reference.

    ``roundings``: further ones of the largest value, in that dtype; ``operand``: of all or of each.
    """
    same, truth = in_some_orders(partial(expected, dtype)), expected(torch.float64)
    of_all = [[x] if isinstance(x, Tensor) else x for x in (got, truth, *same)]
    operands = operand if isinstance(operand, tuple) else [operand] * len(of_all[0])
    for n, (size, mine, exact, *theirs) in enumerate(zip(operands, *of_all, strict=True)):
        inherited = roundings * EPS[dtype] * largest(exact[exact.isfinite()])
        assert_within_budget(f"tensor {n}", mine, theirs, exact, size, inherited)


def assert_rounded(got, truth, roundings=1, of=None) -> None:
    """Every number is the true one but for roundings: so many in float32 or float64, of the numbers
    ``of`` or of itself, and one to half precision."""
    got64, truth = got.double().cpu(), torch.as_tensor(truth, dtype=torch.float64).cpu()
    of = (truth if of is None else torch.as_tensor(of, dtype=torch.float64).cpu()).abs()
    allowed = roundings * EPS[torch.promote_types(got.dtype, torch.float32)] * of + TINY[got.dtype]
    if got.dtype.itemsize == 2:
        allowed = allowed + torch.finfo(got.dtype).eps / 2 * truth.abs()
    same = (got64 == truth) | (got64.isnan() & truth.isnan())
    share = ((got64 - truth).abs() / allowed).masked_fill(same, 0.0)
    assert (share <= 1).all(), f"{share.max():.3g} times the error of these roundings"


def assert_sums(got, truth, count, of=None) -> None:
    """Of products in float32, or in float64 of terms made by four operations, also in the truth:
    as accurate as where pairs are added, then pairs of sums."""
    added = math.ceil(math.log2(max(1, count)))
    assert_rounded(got, truth, 2 * (4 + added) if got.dtype == torch.float64 else 2 + added, of)
