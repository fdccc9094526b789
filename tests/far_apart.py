"""Operators on operands with more than 2**31 elements, of which memory holds the few that count."""

import mmap
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from accuracy import assert_same
from cuda_on_host.emulated import CALLERS
from operands import call, names_of
from ptx import executor
from set_operators import (
    PLAIN,
    Pass,
    check_dhidden,
    check_dweight,
    check_move,
    check_multiply,
    check_statistics,
    counted_rows,
    head_of,
    left,
    popular_ids,
    random_sets,
    run_pass,
    values_of,
)

FAR = 2**31
FRONT = 8  # rows before the others; the first of them has a set of FAR values
MATRICES = {"hidden", "weight", "logits", "dlogits", "dhidden", "dweight"}
VALUES = {"token_ids", "values", "dvalues", "logits", "dlogits"}
OF_ROWS = {"counted", "labels", "only", "hidden", "logits", "dlog_probs", "stats", "entropy"}
OF_ROWS |= {"log_probs", "weights", "undecided"}


def reserved(count, dtype):
    """As ``torch.empty``; pages take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags), dtype=dtype)


def far_rows(name, x):
    """Of a matrix a copy whose rows lie so far apart that the last one begins beyond FAR."""
    if name not in MATRICES or x.ndim == 1 or x.numel() == 0:
        return x, x
    rows = x.flatten(0, -2)
    aligned = x.data_ptr() % 16 == 0 and x.stride(-2) * x.itemsize % 16 == 0
    stride = FAR // max(1, len(rows) - 1) // 8 * 8 + (8 if aligned else 9)
    far = reserved(stride * len(rows), x.dtype).as_strided(rows.shape, (stride, 1))
    far = far.copy_(rows).unflatten(0, x.shape[:-1])
    return far, far


def far_values(name, x):
    """Of what belongs to sets a copy behind those of FRONT rows, of which none is counted."""
    if name == "offsets":
        return torch.cat([x[:1], x.new_full((FRONT - 1,), FAR), FAR + x]), x
    elif name in VALUES and x.ndim == 1:
        copy = reserved(FAR + len(x), x.dtype)
        copy[FAR:] = x
    elif name == "tokens":
        return torch.cat([x[:, :1].expand(-1, FRONT), x], 1), x
    elif name in OF_ROWS:
        copy = torch.cat([x.new_zeros(FRONT, *x.shape[1:]), x])
    else:
        return x, x
    return copy, copy[len(copy) - len(x) :]


class FarApart:
    """These operators with what ``far`` makes of their operands, in ``blocks`` of a grid."""

    def __init__(self, ops, far, blocks=None):
        self.ops, self.far, self.blocks = ops, far, blocks

    def __getattr__(self, operator):
        def run(*arguments):
            names = names_of(operator)
            given = dict(zip(names, arguments, strict=True))
            given = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
            copies = {name: self.far(name, x) for name, x in given.items()}
            parts = [x for copy, x in copies.values() if copy.untyped_storage().nbytes() > FAR]
            windows = [row for part in parts for row in part.reshape(-1, part.shape[-1])]
            handed = [copies.get(n, [x])[0] for n, x in zip(names, arguments, strict=True)]
            with patch.multiple(executor, windows=windows, blocks=self.blocks):
                getattr(self.ops, operator)(*handed)
            for name, x in given.items():
                x.copy_(copies[name][1])

        return run


def ends(blocks):
    """The blocks of a grid that have work: of those for FAR values none does in the middle."""
    return range(blocks) if blocks < 10_000 else [*range(64), *range(blocks - 64, blocks)]


def check_far_apart(ops, blocks_of_front):
    """Operators on sets; so many blocks of a pass over sets have the rows of FRONT."""
    sets, popular = random_sets((5, 0, 600, 33, 2)), popular_ids((3, 520))
    far = FarApart(ops, far_rows)
    for dtype, H, margin in ((torch.bfloat16, 72, 0), (torch.float32, 65, 1)):
        head = head_of(sets, dtype, H, margin)
        check_move(far, sets, dtype)
        check_multiply(far, sets, head)
        check_dhidden(far, sets, head, dtype)
        check_dweight(far, popular, head_of(popular, dtype, H, margin), dtype)
    far, case = FarApart(ops, far_values, ends), Pass(sets, values_of(sets), PLAIN)
    check_multiply(far, sets, head)
    known = case.known | check_statistics(far, case)
    known |= dict(dlog_probs=case.weights, only=counted_rows(sets).to(torch.uint8))
    without_front = FarApart(ops, far_values, lambda blocks: range(blocks_of_front, blocks))
    gradients, passes = [], []
    for near_or_far, pass_ops in ((ops, ops), (far, without_front)):
        dlogits, dvalues = left(sets.K), case.values.clone()
        call(near_or_far, "row_gradient", known, logits=case.values, dlogits=dlogits)
        run_pass(pass_ops, "row_pass_", case.known, logits=dvalues)
        gradients.append(dlogits), passes.append(dvalues)
    assert_same(*gradients)
    assert_same(*passes)


@contextmanager
def rows_far_apart(ops_of):
    """Calls hand over logits whose rows lie far apart."""
    with ExitStack() as stack:
        for module in CALLERS:
            far = patch.object(module, "ops_of", lambda name: FarApart(ops_of(name), far_rows))
            stack.enter_context(far)
        yield
