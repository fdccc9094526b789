"""Means over sequences in Triton: how they are cut into steps, and what broken offsets do."""

from itertools import pairwise

import pytest
import torch
from accuracy import assert_sums
from helpers import DEVICES, KERNELS
from operands import tokens_of

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS, reason="needs Triton's interpreter or a GPU"
)
DEVICE = DEVICES["triton"]
LENGTHS = (1, 0, 3, 2_047, 2_048, 0, 2_049, 5_000)  # around the tokens of a step


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def log_probs_of(N):
    """Log-probs, which tokens count, and old log-probs; the others hold NaN."""
    g = torch.Generator().manual_seed(N)
    log_probs = -3 * torch.rand(N, generator=g, dtype=torch.float64)
    counted = torch.rand(N, generator=g) < 0.8
    old = (log_probs + 0.4 * torch.randn(N, generator=g)).float()
    return log_probs.where(counted, torch.nan), counted, old.where(counted, torch.nan)


def run(name, log_probs, counted, *more, length=0, cu_seqlens=None, out=None):
    """``out`` after the operator; all of it is on the CPU before and after."""
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(DEVICE)
    out = out.to(DEVICE, copy=True)
    given = log_probs.to(DEVICE), counted.to(DEVICE), *more
    getattr(torch.ops.bapo_kernels_triton, name)(*given, length, cu_seqlens, out)
    return out.cpu()


def log_ratios(log_probs, counted, old, **sequences):
    tokens = tokens_of(log_probs.numel(), DEVICE, old_log_probs=old)
    out = torch.full_like(log_probs, -7.0)
    return run("sequence_log_ratios", log_probs, counted, *tokens, **sequences, out=out)


def with_means(dlog_ratios, counted, dlog_probs, **sequences):
    """``dlog_probs`` after the means were added."""
    return run("add_sequence_means_", dlog_ratios, counted, **sequences, out=dlog_probs)


def expected_means(values, counted, offsets):
    """Of each counted token; 0 of the others."""
    means = torch.zeros_like(values)
    for begin, end in pairwise(offsets.tolist()):
        of_sequence, here = values[begin:end], counted[begin:end]
        means[begin:end][here] = of_sequence[here].sum() / max(1, here.sum().item())
    return means


def check_means(got, values, counted, offsets, before=0.0):
    truth, of = (before + expected_means(x, counted, offsets) for x in (values, values.abs()))
    assert_sums(got, truth, max(LENGTHS), of=of)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(on_policy, dtype):
    """Tokens behind the last one are left alone; offsets may be strided."""
    offsets, N = offsets_of(LENGTHS), sum(LENGTHS) + 9
    log_probs, counted, old = log_probs_of(N)
    log_probs[:1], old[:1], counted[:1] = -1.0, -1.5, True
    cu_seqlens = offsets.to(dtype).repeat_interleave(2)[::2]
    got = log_ratios(log_probs, counted, None if on_policy else old, cu_seqlens=cu_seqlens)
    truth = log_probs - (log_probs if on_policy else old.double())
    check_means(got, truth, counted, offsets)
    assert got[0] == (0.0 if on_policy else 0.5)

    before = torch.full((N,), 0.25, dtype=torch.float64)
    got = with_means(log_probs, counted, before, cu_seqlens=cu_seqlens)
    check_means(got, log_probs, counted, offsets, before)
    assert torch.equal(got[~counted], before[~counted])
    assert torch.equal(got[-9:], before[-9:])


@pytest.mark.parametrize("length", [1, 7, 2_500])
def test_rows_have_the_bits_of_packed_sequences(length):
    """A mean depends on its sequence alone, not on what lies beside it."""
    log_probs, counted, old = log_probs_of(4 * length)
    rows, offsets = log_ratios(log_probs, counted, old, length=length), length * torch.arange(5)
    packed = log_ratios(log_probs, counted, old, cu_seqlens=offsets)
    second = slice(length, 2 * length)
    alone = log_ratios(log_probs[second], counted[second], old[second], length=length)
    assert torch.equal(rows, packed)
    assert torch.equal(rows[second], alone)
    check_means(rows, log_probs - old.double(), counted, offsets)
    zeros = torch.zeros_like(log_probs)
    added = with_means(log_probs, counted, zeros, length=length)
    packed = with_means(log_probs, counted, zeros, cu_seqlens=offsets)
    assert torch.equal(added, packed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_old_log_prob_that_is_not_finite_shows_in_its_sequence_alone(bad):
    log_probs, counted, old = log_probs_of(40)
    old[15], counted[15], log_probs[15] = bad, True, -1.0
    got = log_ratios(log_probs, counted, old, length=10)
    in_second = torch.arange(40) // 10 == 1
    assert torch.equal(got.isnan(), counted & in_second)
    assert not got[~counted].any()


def test_a_forbidden_label_on_policy_makes_the_mean_minus_infinity():
    log_probs = torch.tensor([-1.0, -torch.inf, -2.0, -3.0], dtype=torch.float64)
    got = log_ratios(log_probs, torch.ones(4, dtype=torch.bool), None, length=2)
    assert got.tolist() == [-torch.inf, -torch.inf, 0.0, 0.0]


@pytest.mark.parametrize(
    "offsets", [(3, 6, 12), (0, 900, 5), (-4, 6, 1_000), (9, 2, 5), (0, 0, 0), (-9, -5, -1)]
)
def test_broken_offsets_touch_nothing_foreign(offsets):
    """Every token gets a number, and the memory around them keeps its own."""
    log_probs, counted, old = log_probs_of(12)
    memory = torch.full((52,), -7.0, dtype=torch.float64, device=DEVICE)
    given, tokens = (
        (log_probs.to(DEVICE), counted.to(DEVICE)),
        tokens_of(12, DEVICE, old_log_probs=old),
    )
    of = 0, torch.tensor(offsets, device=DEVICE), memory[20:32]
    torch.ops.bapo_kernels_triton.sequence_log_ratios(*given, *tokens, *of)
    torch.ops.bapo_kernels_triton.add_sequence_means_(*given, *of)
    place = torch.arange(52)
    assert torch.equal((memory != -7).cpu(), (place >= 20) & (place < 32))
    outside = [i for i in range(12) if i < min(offsets) or i >= max(offsets)]
    assert not memory[20:32][outside].any()


def test_no_tokens():
    empty, counted = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    for sequences in dict(length=0), dict(cu_seqlens=torch.tensor([0, 0])):
        assert log_ratios(empty, counted, None, **sequences).shape == (0,)
