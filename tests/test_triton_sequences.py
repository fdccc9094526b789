"""Means over sequences in Triton: how they are cut into steps, and what broken offsets do."""

from itertools import pairwise

import pytest
import torch
from accuracy import assert_same, assert_sums
from helpers import DEVICES, KERNELS
from operands import call, tokens_of

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS, reason="needs Triton's interpreter or a GPU"
)
DEVICE, OPS = DEVICES["triton"], torch.ops.bapo_kernels_triton
LENGTHS = (1, 0, 3, 2_047, 2_048, 0, 2_049, 5_000)  # around the tokens of a step


def log_probs_of(N):
    """Log-probs, which tokens count, and old log-probs; the others hold NaN."""
    g = torch.Generator().manual_seed(N)
    log_probs = -3 * torch.rand(N, generator=g, dtype=torch.float64)
    counted = torch.rand(N, generator=g) < 0.8
    old = (log_probs + 0.4 * torch.randn(N, generator=g)).float()
    both = (x.where(counted, torch.nan).to(DEVICE) for x in (log_probs, old))
    return next(both), counted.to(DEVICE), next(both)


def log_ratios(log_probs, counted, old, **sequences):
    out = sequences.setdefault("log_ratios", torch.full_like(log_probs, -7.0))
    tokens, present = tokens_of(log_probs.numel(), DEVICE, old_log_probs=old)
    known = dict(length=0, counted=counted, tokens=tokens, present=present)
    call(OPS, "sequence_log_ratios", known, log_probs=log_probs, **sequences)
    return out


def with_means(dlog_ratios, counted, dlog_probs, **sequences):
    """``dlog_probs`` after the means were added."""
    known = dict(length=0, counted=counted, dlog_probs=dlog_probs)
    call(OPS, "add_sequence_means_", known, dlog_ratios=dlog_ratios, **sequences)
    return dlog_probs


def check_means(got, values, counted, offsets, before=0.0):
    """Of each counted token; 0 of the others."""
    truth, of = torch.zeros(2, len(values), dtype=torch.float64, device=DEVICE)
    for begin, end in pairwise(offsets.tolist()):
        here = counted[begin:end]
        for means, x in ((truth, values), (of, values.abs())):
            means[begin:end][here] = x[begin:end][here].sum() / max(1, here.sum().item())
    assert_sums(got, before + truth, max(LENGTHS), of=before + of)


@pytest.mark.parametrize(("on_policy", "dtype"), [(False, torch.int64), (True, torch.int32)])
def test_packed_sequences(on_policy, dtype):
    """Tokens behind the last one are left alone; offsets may be strided."""
    offsets, N = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0), sum(LENGTHS) + 9
    log_probs, counted, old = log_probs_of(N)
    log_probs[:1], old[:1], counted[:1] = -1.0, -1.5, True
    cu_seqlens = offsets.to(dtype).repeat_interleave(2)[::2]
    got = log_ratios(log_probs, counted, None if on_policy else old, cu_seqlens=cu_seqlens)
    truth = log_probs - (log_probs if on_policy else old.double())
    check_means(got, truth, counted, offsets)
    assert got[0] == (0.0 if on_policy else 0.5)

    before = torch.full_like(log_probs, 0.25)
    got = with_means(log_probs, counted, before.clone(), cu_seqlens=cu_seqlens)
    check_means(got, log_probs, counted, offsets, before)
    untouched = ~counted
    untouched[-9:] = True
    assert_same(got[untouched], before[untouched])


@pytest.mark.parametrize("length", [1, 7, 2_500])
def test_rows_have_the_bits_of_packed_sequences(length):
    """A mean depends on its sequence alone, not on what lies beside it."""
    tokens = log_probs, counted, old = log_probs_of(4 * length)
    offsets, second = length * torch.arange(5, device=DEVICE), slice(length, 2 * length)
    rows = log_ratios(*tokens, length=length)
    check_means(rows, log_probs - old.double(), counted, offsets)
    assert_same(rows, log_ratios(*tokens, cu_seqlens=offsets))
    assert_same(rows[second], log_ratios(*(x[second] for x in tokens), length=length))
    added, packed = (
        with_means(log_probs, counted, torch.zeros_like(log_probs), **sequences)
        for sequences in (dict(length=length), dict(cu_seqlens=offsets))
    )
    assert_same(added, packed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_sequence_alone(bad):
    """A forbidden label on policy, too: its mean is minus infinity."""
    log_probs, counted, old = log_probs_of(40)
    old[15], counted[15], log_probs[15] = bad, True, -1.0
    in_second = torch.arange(40, device=DEVICE) // 10 == 1
    got = log_ratios(log_probs, counted, old, length=10)
    assert_same(got.isnan(), counted & in_second)
    log_probs[15] = -torch.inf
    got = log_ratios(log_probs, counted, None, length=10)
    assert_same(got == -torch.inf, counted & in_second)
    assert not got[~(counted & in_second)].any()


@pytest.mark.parametrize(
    "offsets", [(3, 6, 12), (0, 900, 5), (-4, 6, 1_000), (9, 2, 5), (0, 0, 0), (-9, -5, -1)]
)
def test_broken_offsets_touch_nothing_foreign(offsets):
    """Every token gets a number, and the memory around them keeps its own."""
    log_probs, counted, old = log_probs_of(12)
    memory = torch.full((52,), -7.0, dtype=torch.float64, device=DEVICE)
    out, cu_seqlens = memory[20:32], torch.tensor(offsets, device=DEVICE)
    log_ratios(log_probs, counted, old, cu_seqlens=cu_seqlens, log_ratios=out)
    with_means(log_probs, counted, out, cu_seqlens=cu_seqlens)
    assert (memory != -7).nonzero().flatten().tolist() == [*range(20, 32)]
    assert not any(out[i] for i in range(12) if not min(offsets) <= i < max(offsets))


def test_no_tokens():
    empty, counted = torch.empty(2, 0, dtype=torch.float64, device=DEVICE)
    for sequences in dict(length=0), dict(cu_seqlens=torch.tensor([0, 0], device=DEVICE)):
        assert log_ratios(empty, counted.bool(), None, **sequences).shape == (0,)
