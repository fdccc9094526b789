"""Gradients of a head from samples, with the seeds of the reference: kernels draw the same sets."""

import math
from itertools import product

import pytest
import torch
from accuracy import assert_rounded, assert_same
from helpers import needs_native, real_in_turns
from test_linear import CONFIGS, DTYPES, build, check, problem, staleness_of

from bapo_kernels.config import BAPOConfig
from bapo_kernels.core.head import sampled
from bapo_kernels.reference import sampled as reference_sampled
from bapo_kernels.reference.sampled import row_seeds, sample
from bapo_kernels.tools.real_rows import real_rows

pytestmark = needs_native


LN2 = math.log(2.0)
OF_EXP = 50  # roundings: 2^t has those of t, which is down to -50


def draw(logits, labels, C, first=None, seeds=None, **transform):
    """Of rows of logits: kept, bool; the logits there, NaN elsewhere; t, part, shift and mass."""
    options, ops = BAPOConfig(**transform).options, torch.ops.bapo_kernels
    n, V = logits.shape
    stats, log_probs = torch.empty(n, 2).double(), torch.empty(labels.shape).double()
    given, counted = (None, 0, options), torch.ones(n, dtype=torch.bool)
    found = log_probs, stats.new_empty(n), stats
    ops.row_statistics(logits[None], None, labels, counted, *given, *found)
    beside = 1.0 - torch.where(sampled.repeats(labels), 0.0, log_probs.exp()).sum(1)
    places = min(V, 2 * C + 512) + labels.shape[1]
    counts, ids = torch.full((n,), -1).int(), torch.full((n, places), -1).int()
    values, drawn = torch.full((n, places), math.nan), torch.full((n, 4), math.nan).double()
    span = None if first is None else torch.tensor([first, first + V])
    known = labels.sort(1)[0], stats, beside, seeds, span, C
    ops.sample_rows(logits[None], *known, *given, counts, ids, values, drawn)
    kept, shown = torch.zeros(n, V, dtype=torch.bool), torch.full((n, V), math.nan)
    for row, count in enumerate(counts.tolist()):
        columns = (ids[row, :count] - (first or 0)).long()
        assert (columns.diff() > 0).all()
        kept[row, columns], shown[row, columns] = True, values[row, :count]
    return kept, shown, (drawn / stats[:, 1:]).unbind(1)


def of_labels_alone(labels):
    return row_seeds(torch.zeros(len(labels), 2).double(), labels)


TRANSFORMS = {
    "T=1": (1.0, {}),
    "T=0.6": (0.6, {}),
    "soft cap": (1.0, dict(final_logit_softcapping=30.0)),
    "scale": (0.3, dict(temperature=1.3, logit_scale=0.9)),
}


def log_p_of(logits, final_logit_softcapping=math.inf, temperature=1.0, logit_scale=1.0):
    x = logits.double() * logit_scale
    if final_logit_softcapping < math.inf:
        x = final_logit_softcapping * torch.tanh(x / final_logit_softcapping)
    return (x / temperature).log_softmax(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [16, 2048])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_sets_are_those_of_the_reference(dtype, C, name):
    """But for ids within rounding of their border, at most 1 in 10,000 of those that are kept."""
    T, transform = TRANSFORMS[name]
    logits, drawn = real_rows((40,), 30_011, T)
    logits, labels = logits.to(dtype), torch.stack([drawn, drawn, drawn.flip(0)], 1)
    seeds, log_p = of_labels_alone(labels), log_p_of(logits, **transform)
    kept, values, drawn = draw(logits, labels, C, seeds=seeds, **transform)
    t, part, shift, mass = (x.float() for x in drawn)
    assert_same(values[kept], logits[kept].float())
    expected = sample(log_p, labels, seeds, C)
    differs = (kept != expected.kept).any(1)
    assert (kept != expected.kept).sum() <= 1e-4 * expected.kept.sum()

    p, is_label = log_p.exp(), torch.zeros_like(kept).scatter(1, labels, True)
    beside = torch.where(is_label, 0.0, p)
    assert_rounded(t, beside.sum(1) / C, 2_000)  # 1 - p of the labels has lost ten bits
    is_small = (beside < t[:, None]) & ~is_label
    small, is_drawn = torch.where(is_small, p, 0.0), is_small & kept
    assert_rounded(mass, small.sum(1), OF_EXP)
    count = is_drawn.sum(1)
    some = ~differs & (count > 0)
    assert some.sum() > 20
    assert_rounded(part[some], (small.sum(1) / count)[some], OF_EXP)
    log_ratio = (log_p - (p * log_p).sum(1, keepdim=True)).where(log_p > -torch.inf, 0.0)
    dentropy = -part[:, None] * log_ratio - LN2 * shift[:, None]
    for row in some.nonzero():
        of = is_drawn[row]
        assert_rounded(dentropy[row][of].float(), expected.dentropy[row][of], OF_EXP, 20 * t[row])


def test_parts_of_a_vocabulary_draw_by_its_ids():
    """Ids of a shard are those of the whole vocabulary: its set is a part of the whole row's."""
    logits, drawn = real_rows((10,), 5_000)
    logits, labels = logits.float(), drawn[:, None]
    seeds = of_labels_alone(labels)
    kept, _, _ = draw(logits, labels, 64, seeds=seeds)
    here, _, _ = draw(logits, labels, 64, first=10_000, seeds=seeds)
    assert (here != kept).any()


def test_a_row_beyond_its_places_is_nan():
    """Which needs an unlucky seed: here t is too small by far."""
    logits = torch.randn(1, 3_000)
    labels, stats = torch.tensor([[5]]), torch.tensor([[0.0, 3_000.0]]).double()
    beside, seeds = torch.tensor([0.01]).double(), torch.tensor([1]).int()
    counts, ids = torch.empty(1).int(), torch.empty(1, 20).int()
    values, drawn = torch.empty(1, 20), torch.empty(1, 4).double()
    known = labels, stats, beside, seeds, None, 8, None, 0, BAPOConfig().options
    torch.ops.bapo_kernels.sample_rows(logits[None], *known, counts, ids, values, drawn)
    assert counts == 20
    assert values[0, 0].isnan()


@pytest.fixture
def same_seeds(monkeypatch):
    """Those of labels alone: statistics have other last bits in float64."""
    for module in (sampled, reference_sampled):
        monkeypatch.setattr(module, "row_seeds", lambda _, labels: of_labels_alone(labels))


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
