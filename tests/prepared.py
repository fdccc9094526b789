"""Arguments of a call as ``prepare`` takes them, and the check of what it makes of them."""

from typing import get_args

import torch
from torch import Tensor

from bapo_kernels import BAPOConfig, prepare
from bapo_kernels.config import IGNORE_INDEX, LossAggMode
from bapo_kernels.prepare import Arguments

MODES = get_args(LossAggMode)


def padded_arguments(shape, mode, live):
    """Random arguments of a call, half of whose tokens are unmasked; some rows are empty."""
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    labels = torch.randint(0, 9, shape, generator=g)
    labels[torch.rand(shape, generator=g) < 0.2] = IGNORE_INDEX
    mask = torch.rand(shape, generator=g) < 0.6
    if len(shape) >= 2:
        mask[::3] = False
    values = {name: torch.randn(shape, generator=g) for name in ("advantages", "old_log_probs")}
    values["advantages"] *= torch.rand(shape, generator=g) < 0.7
    scale = 5.0 if mode == "seq-mean-token-sum-norm" else None
    config = BAPOConfig(loss_agg_mode=mode, loss_scale_factor=scale)
    return Arguments(labels, values, mask, live=live, weighted=True, config=config)


def packed_arguments(N, offsets, mode, per_sequence):
    """The same for packed tokens, with values per token, or per sequence where they may be."""
    given = padded_arguments((N,), mode, False)
    offsets = torch.tensor(offsets, dtype=torch.int32)
    if per_sequence:
        g = torch.Generator().manual_seed(N)
        for name in ("advantages", "temperatures"):
            given.values[name] = torch.randn(offsets.numel() - 1, generator=g)
    return given._replace(cu_seqlens=offsets)


def check_prepared(given, backend, device="cpu"):
    """The kernel's flat inputs are those of plain PyTorch, to the bit; returns them."""
    expected = prepare._in_pytorch(given)
    values = {name: value.to(device) for name, value in given.values.items()}
    moved = {
        name: value.to(device)
        for name, value in given._asdict().items()
        if isinstance(value, Tensor)
    }
    got = prepare.token_inputs(backend, given._replace(**moved, values=values))
    assert got.ticket.item() == 0
    for name in ("unmasked", "counted", "labels", "weights"):
        mine, true = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (true is None)
        if mine is not None:
            assert mine.dtype == true.dtype
            torch.testing.assert_close(mine.cpu(), true, rtol=0, atol=0, equal_nan=True)
    assert list(got.values) == list(given.values)
    for name, mine in got.values.items():
        mine, true = mine.cpu(), expected.values[name].float()
        torch.testing.assert_close(mine, true, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit()[mine == 0], true.signbit()[true == 0])
    return got
