"""Arguments of a call, and the oracle in PyTorch of what the operator ``prepare`` makes of them."""

from typing import get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bapo_kernels import BAPOConfig
from bapo_kernels.config import IGNORE_INDEX, LossAggMode
from bapo_kernels.core.arguments.prepare import prepared
from bapo_kernels.core.arguments.together import Arguments
from bapo_kernels.core.operators import FIELDS

MODES = get_args(LossAggMode)


def arguments_of(labels, fields, mask=None, config=None, **options):
    return Arguments(labels, fields, config or BAPOConfig(), mask, weighted=True, **options)


def padded_arguments(shape, mode, live):
    """Random arguments of a call, half of whose tokens are unmasked; some rows are empty."""
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    labels = torch.randint(0, 9, shape, generator=g)
    labels[torch.rand(shape, generator=g) < 0.2] = IGNORE_INDEX
    mask = torch.rand(shape, generator=g) < 0.6
    if len(shape) >= 2:
        mask[::3] = False
    fields = {name: torch.randn(shape, generator=g) for name in ("advantages", "old_log_probs")}
    fields["advantages"] *= torch.rand(shape, generator=g) < 0.7
    scale = 5.0 if mode == "seq-mean-token-sum-norm" else None
    config = BAPOConfig(loss_agg_mode=mode, loss_scale_factor=scale)
    return arguments_of(labels, fields, mask, config, statistics="live" if live else "all")


def packed_arguments(N, offsets, mode, per_sequence):
    """The same for packed tokens, with values per token, or per sequence where they may be."""
    given = padded_arguments((N,), mode, False)
    offsets = torch.tensor(offsets, dtype=torch.int32)
    if per_sequence:
        g = torch.Generator().manual_seed(N)
        for name in ("advantages", "temperatures"):
            given.fields[name] = torch.randn(offsets.numel() - 1, generator=g)
    return given._replace(cu_seqlens=offsets)


def expected_of(given):
    """Plain PyTorch; the sequences one after the other."""
    like, config = given.labels_or_log_probs, given.config
    N, K = like.numel(), like.shape[:-1].numel()
    columns = like.shape[-1] if like.ndim else 1
    sequence, valid = torch.arange(N) // max(columns, 1), True
    if given.cu_seqlens is not None:
        offsets = given.cu_seqlens.tolist()
        valid = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= N
        K = len(offsets) - 1
        sequence = torch.bucketize(torch.arange(N), given.cu_seqlens[1:].clamp(0, N), right=True)
    labels = None if like.is_floating_point() else like.long().reshape(N)
    unmasked = torch.ones(N, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
    if given.response_mask is not None:
        unmasked = unmasked & (given.response_mask.reshape(N) != 0)
    if valid:
        unmasked = unmasked & (sequence < K)

    fields = {}
    for name, values in given.fields.items():
        of_tokens = values.shape == like.shape
        spread = values.reshape(N) if of_tokens else values[sequence.clamp(max=K - 1)]
        fields[name] = spread.float()
    if not valid:
        fields["advantages"] = torch.full((N,), torch.nan)
    counted = unmasked & (fields["advantages"] != 0) if given.is_live() else unmasked

    counts = torch.zeros(K + 1, dtype=torch.int64).index_add_(0, sequence, unmasked.long())[:K]
    mode, divisor = config.loss_agg_mode, given.divisor
    counted_here = unmasked.sum() if mode == "token-mean" else (counts > 0).sum()
    if divisor is None:
        divisor = counted_here.clamp(min=1)
    elif isinstance(divisor, Tensor):
        divisor = torch.where((divisor > 0) & (divisor < torch.inf), divisor.double(), torch.nan)
    weights = torch.full((N,), float(given.dp_size), dtype=torch.float64)
    if mode != "token-sum":
        weights = weights / divisor
    if mode == "seq-mean-token-mean":
        weights = weights / torch.cat([counts, counts.new_ones(1)])[sequence].clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        weights = weights / (config.loss_scale_factor or columns)
    bounds = given.bounds
    if "lower" in fields:
        bounds = fields["lower"], fields["upper"]
    if bounds is not None:
        weights = torch.where((bounds[0] >= 0) & (bounds[0] <= bounds[1]), weights, torch.nan)
    weights = torch.where(unmasked, weights if valid else weights * torch.nan, 0.0)
    of_call = dict(unmasked=unmasked, counted=counted, labels=labels, weights=weights)
    return of_call, {name: fields.get(name) for name in FIELDS}


def check_prepared(given, backend, device="cpu"):
    """What the operator makes is the oracle's, to the bit; returns the call."""
    moved = tree_map_only(Tensor, lambda value: value.to(device), given._asdict())
    call = prepared(backend, given._replace(**moved))
    assert call.ticket.item() == 0
    of_call, fields = expected_of(given)
    got = [getattr(call, name) for name in of_call] + [call.field(name) for name in fields]
    for mine, true in zip(got, (*of_call.values(), *fields.values()), strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            torch.testing.assert_close(mine.cpu(), true, rtol=0, atol=0, equal_nan=True)
    for name, true in fields.items():
        if true is not None:
            assert torch.equal(
                call.field(name).cpu().signbit()[true == 0], true.signbit()[true == 0]
            )
    return call
