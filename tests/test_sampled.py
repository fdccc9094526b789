"""Gradients from a sample of the vocabulary: the mean, the bounds of error and of entries."""

import math

import pytest
import torch
from accuracy import assert_same

from bapo_kernels.reference.sampled import row_seeds, sample, uniforms
from bapo_kernels.tools.real_rows import real_rows

V, LABEL = 300, 7


def just_below(C):
    """An id just below t, beside a tail of which each has 1.76 t."""
    t = 1.0 / C
    p = torch.full((V,), 0.0, dtype=torch.float64)
    tail = int((1.0 - t) / (1.76 * t)) - 1
    p[:tail], p[tail] = 1.76 * t, 0.999 * t
    p[tail + 1 :] = (1.0 - p.sum()) / (V - tail - 1)
    return p.log()


def rows_of(C):
    """log_p of rows: peaked, of a real model, flat, and built to be worst."""
    rank = torch.arange(1, V + 1, dtype=torch.float64)
    rows = torch.stack([-0.7 * rank, real_rows((1,), V)[0][0], 0.0 * rank, just_below(C)])
    shuffled = rows[:, torch.randperm(V, generator=torch.Generator().manual_seed(1))]
    return torch.log_softmax(shuffled, -1)


def samples(log_p, C, seeds, labels=(LABEL,)):
    """The same row with each of the seeds, some at a time."""
    for some in seeds.split(2_000):
        row = log_p.expand(len(some), -1)
        yield sample(row, torch.as_tensor(labels).expand(len(some), -1), some, C)


def some_seeds(count):
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("C", [8, 128])
def test_the_mean_is_the_gradient(row, C):
    """In every decade of p/t, within 4.5 standard errors and the bias of equal shares.

    That is what rows lose in which none of the smaller ids is kept, less than 0.3*t; the shift of
    the entropy's takes it to their mean of ``log p + H`` where only a few are.
    """
    log_p, seeds = rows_of(C)[row], some_seeds(20_000)
    p = log_p.exp()
    log_ratio = log_p - (p * log_p).sum()
    t = (1.0 - p[LABEL]) / C
    is_small = (p < t) & (p > 1e-6 * t)
    of_small = log_ratio[is_small] if is_small.any() else torch.zeros(1)
    of_shift = of_small.max() - of_small.min()
    truths = (p, 0.3 * t), (-p * log_ratio, t * (0.3 * of_small.abs().max() + of_shift))
    decade = (p / t).log10().floor().clamp(-5, 1)
    kept = sums = squares = 0.0
    bins = torch.nn.functional.one_hot((decade + 5).long(), 7).double()
    for made in samples(log_p, C, seeds):
        binned = torch.stack([x @ bins for x in made[1:]])
        sums, squares = sums + binned.sum(1), squares + binned.square().sum(1)
        kept += made.kept.sum().item()
    n = len(seeds)
    mean = sums / n
    error = ((squares / n - mean.square()).clamp(min=0.0) / n).sqrt()
    for found, of_seeds, (truth, bias) in zip(mean, error, truths, strict=True):
        assert ((found - truth @ bins).abs() <= 4.5 * of_seeds + bias * bins.any(0) + 1e-12).all()
    assert kept / n <= C + 1 + 4.5 * math.sqrt(C / n)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("C", [8, 128])
def test_the_error_of_hidden_states(row, C):
    """At most ``(1 - p_L)*max|W_j|*sqrt((1 + 2/C)/C)`` in the mean square, also of a head whose
    rows share a direction of 4 times their spread; the entries add up to those of the row."""
    log_p, seeds = rows_of(C)[row], some_seeds(4_000)
    W = torch.randn(V, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p = log_p.exp()
    for weight in (W, W + 4.0):
        squares = 0.0
        for made in samples(log_p, C, seeds):
            squares += ((made.p - p) @ weight).square().sum().item()
            small = made.kept & (p < (1.0 - p[LABEL]) / C)
            small[:, LABEL] = False
            assert ((made.p.sum(-1) - 1.0).abs()[small.any(-1)] < 1e-12).all()
        largest = weight.norm(dim=1).max().item()
        bound = (1.0 - p[LABEL].item()) * largest * math.sqrt((1.0 + 2.0 / C) / C)
        assert math.sqrt(squares / len(seeds)) <= bound


def test_labels_are_kept_exactly():
    """Several, one of which repeats and one of which is none; beside them t is smaller."""
    log_p = rows_of(8)[1]
    labels, p = torch.tensor([7, 7, 200, -100, V]), log_p.exp()
    (made,) = samples(log_p, 8, some_seeds(500), labels)
    assert_same(made.p[:, [7, 200]], p[[7, 200]].expand(500, -1))
    assert made.kept[:, [7, 200]].all()
    t = (1.0 - p[[7, 200]].sum()) / 8
    large = p >= t
    assert_same(made.p[:, large], p[large].expand(500, -1))


def test_an_id_at_the_threshold_is_kept_exactly():
    """It does not share in the smaller ones: t and 2*t beside two of t/2."""
    found = 0
    for offset in torch.linspace(0.0, 1.0, 50).tolist():
        p = torch.tensor([[0.3, 1.0, 2.0, 0.5, 0.5]]).double() * math.exp(-1.0 - offset)
        log_p = p.log().repeat(20, 1)
        p, label = log_p.exp(), torch.zeros(20, 1).long()
        if (p[:, 1] != p.scatter(1, label, 0.0).sum(1) / 4).any():
            continue  # by a rounding
        found += 1
        assert_same(sample(log_p, label, some_seeds(20), 4).p[:, 1], p[:, 1])
    assert found > 5


def test_a_certain_label_is_kept_alone():
    log_p = torch.full((1, V), -torch.inf, dtype=torch.float64)
    log_p[0, LABEL] = 0.0
    made = sample(log_p, torch.tensor([[LABEL]]), some_seeds(1), 8)
    assert made.kept.nonzero().tolist() == [[0, LABEL]]
    assert made.p[0, LABEL] == 1.0
    assert made.dentropy[0, LABEL] == 0.0


def test_nan_reaches_the_label():
    log_p = torch.full((1, V), torch.nan, dtype=torch.float64)
    made = sample(log_p, torch.tensor([[LABEL]]), some_seeds(1), 8)
    assert made.p[0, LABEL].isnan()


def test_seeds_are_of_all_bits():
    """Of each statistic, and of the first label."""
    statistics = torch.randn(1_000, 2, dtype=torch.float64)
    labels = torch.randint(0, V, (1_000,))
    seeds = row_seeds(statistics, labels)
    assert seeds.dtype == torch.int32
    assert_same(row_seeds(statistics.clone(), torch.stack([labels, labels + 1], 1)), seeds)
    for column in (0, 1):
        other = statistics.clone()
        other.view(torch.int64)[:, column] ^= 1
        assert (row_seeds(other, labels) != seeds).all()
    assert (row_seeds(statistics, labels + 1) != seeds).all()
    for bits in (seeds & 0xFFFF, (seeds >> 16) & 0xFFFF):
        assert abs(bits.double().mean() / 2**16 - 0.5) < 0.05


def test_uniforms_are_independent_of_each_other():
    """Those of neighbouring ids and seeds, whose seeds are random and close."""
    for seeds in (torch.arange(200), some_seeds(200)):
        u = uniforms(seeds[:, None], torch.arange(2_000))
        assert ((u > 0.0) & (u < 1.0)).all()
        rows = torch.corrcoef(u)[~torch.eye(200, dtype=torch.bool)]
        assert rows.abs().max() < 6 / math.sqrt(2_000)
        columns = torch.corrcoef(u.T[:400])[~torch.eye(400, dtype=torch.bool)]
        assert columns.abs().max() < 6 / math.sqrt(200)
