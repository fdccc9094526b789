"""Checks of numbers against the error budget, and against a number of roundings.

A check that fails says of what quantity, where, and what was given for the token there: ``inputs``
are tensors by name, whose shape is that of the leading sizes of the quantity.
"""

import math
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from bapo_kernels.tools import budget
from bapo_kernels.tools.budget import EPS, GRADIENTS, TINY, Result, in_some_orders, largest

__tracebackhide__ = True  # a failing test shows its own line


def inputs_of(case) -> dict[str, Tensor | None]:
    names = "label", "old log-prob", "advantage", "mask"
    return dict(zip(names, case.arguments(), strict=True))


def assert_within_budget(name, got, same, truth, operand=0.0, inherited=0.0, inputs=None) -> None:
    """Both numbers come from :func:`error_and_budget`."""
    error, most = budget.error_and_budget(got, same, truth, operand=operand, inherited=inherited)
    assert error <= most, what_is_wrong(name, got, truth, most, inputs)


def assert_quantities(case, got, same, truth, sums=True) -> None:
    """All is within its budget. In ``sums``, roundings of half precision may cancel by luck.

    ``same``: results of the reference, or what makes one.
    """
    if callable(same):
        return with_orders(same, lambda orders: assert_quantities(case, got, orders, truth, sums))
    for name, error, most in budget.quantities(case, got, same, truth):
        if not error <= most and (sums or not name.startswith(("loss", "metric"))):
            values = (budget.values_of(result)[name] for result in (got, truth))
            raise AssertionError(what_is_wrong(name, *values, most, inputs_of(case)))


def assert_as_reference(
    got, expected, dtype=torch.float32, operand=0.0, roundings=0, names=(), inputs=None
) -> None:
    """Tensors, or one, against ``expected(dtype)`` of the reference.

    ``roundings``: further ones of the largest value, in that dtype; ``operand``: of all or of each.
    """
    truth = expected(torch.float64)

    def check(same):
        of_all = [[x] if isinstance(x, Tensor) else x for x in (got, truth, *same)]
        operands = operand if isinstance(operand, tuple) else [operand] * len(of_all[0])
        for n, (size, mine, exact, *theirs) in enumerate(zip(operands, *of_all, strict=True)):
            inherited = roundings * EPS[dtype] * largest(exact[exact.isfinite()])
            name = names[n] if names else f"tensor {n}"
            assert_within_budget(name, mine, theirs, exact, size, inherited, inputs)

    with_orders(partial(expected, dtype), check)


def with_orders(run, check) -> None:
    """Calls ``check`` with the results of the reference in one order of its sums.

    If that fails, in some orders: more of them only widen a budget, so the verdict is theirs.
    """
    with suppress(AssertionError):
        return check([run()])
    check(in_some_orders(run))


def assert_rounded(got, truth, roundings=1, of=None, name="value", inputs=None) -> None:
    """Every number is the true one but for roundings: so many in float32 or float64, of the numbers
    ``of`` or of itself, and one to half precision."""
    truth = torch.as_tensor(truth, dtype=torch.float64).cpu()
    of = (truth if of is None else torch.as_tensor(of, dtype=torch.float64).cpu()).abs()
    allowed = roundings * EPS[torch.promote_types(got.dtype, torch.float32)] * of + TINY[got.dtype]
    if got.dtype.itemsize == 2:
        allowed = allowed + torch.finfo(got.dtype).eps / 2 * truth.abs()
    got, truth = torch.broadcast_tensors(got.detach().cpu(), truth)
    right = (excess(got, truth, allowed) <= 1).all()
    assert right, what_is_wrong(name, got, truth, allowed, inputs)


def assert_sums(got, truth, count, of=None, name="sum", inputs=None) -> None:
    """Of products in float32, or in float64 of terms made by four operations, also in the truth:
    as accurate as where pairs are added, then pairs of sums."""
    added = math.ceil(math.log2(max(1, count)))
    roundings = 2 * (4 + added) if got.dtype == torch.float64 else 2 + added
    assert_rounded(got, truth, roundings, of, name, inputs)


def assert_same(got, expected, name="value") -> None:
    """The same bits, but for the sign of 0: of tensors or absent ones, or of results' gradients and
    loss."""
    if isinstance(got, Result):
        names = *GRADIENTS[: len(got.gradients)], "loss"
        got, expected = ((*result.gradients, result.output.loss) for result in (got, expected))
    elif isinstance(got, Tensor):
        names, got, expected = [name], [got], [expected]
    else:
        names = [f"{name} {n}" for n in range(len(got))]
    for part, mine, other in zip(names, got, expected, strict=True):
        if mine is other is None:
            continue
        assert mine.dtype == other.dtype, f"{part}: {mine.dtype} instead of {other.dtype}"
        assert torch.equal(mine, other), what_is_wrong(part, mine, other)


def excess(got, expected, allowed=None) -> Tensor:
    """The error of every entry as a multiple of what is allowed; without it NaN is an error."""
    got, expected = (x.detach().double().cpu() for x in (got, expected))
    same = got == expected
    if allowed is not None:
        same |= got.isnan() & expected.isnan()
    share = (got - expected).abs() / (0.0 if allowed is None else allowed)
    return share.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)


def what_is_wrong(name, got, expected, allowed=None, inputs=None) -> str:
    if got.shape != expected.shape:
        return f"{name}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    share = excess(got, expected, allowed)
    at = tuple((share == share.max()).nonzero()[0].tolist())
    count = f"{int((share > 1).sum()):,} of {share.numel():,} entries differ"
    text = f"{name}: {count}, {'first' if allowed is None else 'worst'} {at}: "
    text += f"{shown(got[at])} / {expected[at].item():.9g}"
    if allowed is not None:
        text += f", which may differ by {torch.as_tensor(allowed).expand(got.shape)[at]:.3g}"
    given = {k: x for k, x in (inputs or {}).items() if x is not None}
    of_token = [(k, x[at[: x.ndim]]) for k, x in given.items() if x.shape == got.shape[: x.ndim]]
    return "\n  ".join([text, ", ".join(f"{k} {x.item():.9g}" for k, x in of_token)]).rstrip()


def shown(value) -> str:
    """A number; or NaN, and whether memory that nobody has written holds such."""
    if not value.isnan():
        return f"{value.item():.9g}"
    from ptx.executor import POISON

    bits = bytes(value.detach().cpu()[None].view(torch.uint8).tolist())
    filled = torch.are_deterministic_algorithms_enabled()  # as poisoned_memory() does
    unwritten = filled or bits in bytes(POISON) or bits == b"\xff" * len(bits)
    return "NaN of memory that nobody wrote" if unwritten else "NaN"
