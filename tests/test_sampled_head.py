"""Gradients of a head from samples, with the seeds of the reference: kernels draw the same sets."""

import math
from itertools import product

import pytest
import torch
from accuracy import assert_rounded, assert_same
from helpers import DEVICES, needs_native, real_in_turns
from operands import call, options_of, tokens_of
from test_linear import CONFIGS, DTYPES, build, check, problem, staleness_of

from bapo_kernels.config import BAPOConfig
from bapo_kernels.core.head import sampled
from bapo_kernels.core.operators import NAMESPACES
from bapo_kernels.reference import sampled as reference_sampled
from bapo_kernels.reference.sampled import row_seeds, sample, uniforms
from bapo_kernels.tools.real_rows import real_rows

pytestmark = needs_native


LN2 = math.log(2.0)
OF_EXP = 50  # roundings: 2^t has those of t, which is down to -50


def draw(backend, logits, labels, C, seeds, first=0, columns=None, temperatures=None, **transform):
    """Of rows of logits, or of their columns of a shard: kept, bool; the logits there, NaN
    elsewhere; t, part, shift and mass."""
    options = BAPOConfig(**transform).options
    (n, V), whole = logits.shape, columns is None
    tokens, present = tokens_of(n, temperatures=temperatures)
    stats, log_probs = torch.empty(n, 2).double(), torch.empty(labels.shape).double()
    given, counted = (tokens if present else None, present, options), torch.ones(n).bool()
    found = log_probs, stats.new_empty(n), stats
    torch.ops.bapo_kernels.row_statistics(logits[None], None, labels, counted, *given, *found)
    beside = 1.0 - torch.where(sampled.repeats(labels), 0.0, log_probs.exp()).sum(1)
    V, span = (V, None) if whole else (columns, torch.tensor([first, V]))
    places = min(V, 2 * C + 512) + labels.shape[1]
    counts, ids = torch.full((n,), -1).int(), torch.full((n, places), -1).int()
    made = counts, ids, torch.full((n, places), math.nan), torch.full((n, 4), math.nan).double()
    here = logits[None, :, first : first + V], labels.sort(1)[0] - first
    arguments = *here, stats, beside, seeds, span, C, *given, *made
    counts, ids, values, drawn = run_sample_rows(backend, *arguments)
    kept, shown = torch.zeros(n, V, dtype=torch.bool), torch.full((n, V), math.nan)
    for row, count in enumerate(counts.tolist()):
        columns = (ids[row, :count] - first).long()
        assert (columns.diff() > 0).all()
        kept[row, columns], shown[row, columns] = True, values[row, :count]
    return kept, shown, (drawn / stats[:, 1:]).unbind(1)


def run_sample_rows(backend, *arguments):
    """Its results, for arguments on the CPU."""
    moved = [x.to(DEVICES[backend]) if isinstance(x, torch.Tensor) else x for x in arguments]
    getattr(torch.ops, NAMESPACES[backend]).sample_rows(*moved)
    return [result.cpu() for result in moved[-4:]]


def of_labels_alone(labels):
    return row_seeds(torch.zeros(len(labels), 2).double(), labels)


TRANSFORMS = {
    "T=1": (1.0, {}),
    "T=0.6": (0.6, {}),
    "soft cap": (1.0, dict(final_logit_softcapping=30.0)),
    "scale": (0.3, dict(temperature=1.3, logit_scale=0.9)),
    "temperatures": (1.0, dict(temperatures=(0.6, 1.0, 1.7))),
}


def log_p_of(logits, final_logit_softcapping=math.inf, temperature=1.0, logit_scale=1.0):
    x = logits.double() * logit_scale
    if final_logit_softcapping < math.inf:
        x = final_logit_softcapping * torch.tanh(x / final_logit_softcapping)
    return (x / temperature).log_softmax(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [16, 2048])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_sets_are_those_of_the_reference(backend, dtype, C, name):
    """But for ids within rounding of their border, at most 1 in 10,000 of those that are kept."""
    T, transform = TRANSFORMS[name]
    n, V = (40, 30_011) if backend != "triton" else (12, 5_003)
    logits, drawn = real_rows((n,), V, T)
    logits, labels = logits.to(dtype), torch.stack([drawn, drawn, drawn.flip(0)], 1)
    given, scaled = dict(transform), logits
    if temperatures := given.pop("temperatures", None):
        given["temperatures"] = torch.tensor(temperatures).repeat(n)[:n]
        scaled = logits.double() / given["temperatures"][:, None].double()
    seeds = of_labels_alone(labels)
    log_p = log_p_of(scaled, **{} if temperatures else transform)
    kept, values, drawn = draw(backend, logits, labels, C, seeds, **given)
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
    assert some.sum() > n / 2
    assert_rounded(part[some], (small.sum(1) / count)[some], OF_EXP)
    log_ratio = (log_p - (p * log_p).sum(1, keepdim=True)).where(log_p > -torch.inf, 0.0)
    dentropy = -part[:, None] * log_ratio - LN2 * shift[:, None]
    for row in some.nonzero():
        of = is_drawn[row]
        assert_rounded(dentropy[row][of].float(), expected.dentropy[row][of], OF_EXP, 20 * t[row])


def test_parts_of_a_vocabulary_draw_by_its_ids(backend):
    """The set of a shard is that of the whole row in its columns."""
    logits, drawn = real_rows((10,), 4_000)
    logits, labels = logits.float(), torch.stack([drawn, drawn.flip(0)], 1)
    given = backend, logits, labels, 64, of_labels_alone(labels)
    kept, _, _ = draw(*given)
    for first, columns in ((0, 1_500), (1_500, 2_500)):
        here, _, (t, *_) = draw(*given, first=first, columns=columns)
        assert_same(here[t > 0], kept[t > 0, first : first + columns])


def sample_of(backend, logits, stats, beside=1.0, C=8, places=20, seed=1, label=0):
    """Counts, ids, values and drawn of one row, for statistics that it need not have."""
    stats, beside = torch.tensor([stats]).double(), torch.tensor([beside]).double()
    given = torch.tensor([[label]]), stats, beside, torch.tensor([seed]).int(), None, C
    made = torch.empty(1).int(), torch.empty(1, places).int(), torch.empty(1, places)
    given = *given, None, 0, BAPOConfig().options, *made, torch.empty(1, 4).double()
    return run_sample_rows(backend, logits[None, None], *given)


def test_a_row_beyond_its_places_is_nan(backend):
    """Which needs an unlucky seed: here t is too small by far."""
    for V in (3_000, 300):  # of several warps, and of one
        counts, _, values, _ = sample_of(backend, torch.randn(V), (0.0, V), beside=0.01)
        assert counts == 20
        assert values[0, 0].isnan()


def test_the_largest_hash_keeps_what_is_equal_to_the_threshold(backend):
    """Whose border is the threshold itself; 2^t of all ids is."""
    seed, id = -1508640499, 5
    assert uniforms(torch.tensor([seed]), torch.tensor([id])) == 1 - 2.0**-25
    counts, ids, _, drawn = sample_of(backend, torch.zeros(20), (0.0, 8.0), seed=seed)
    assert counts == 20
    assert_same(ids[0], torch.arange(20).int())
    assert drawn[0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sum", [math.nan, math.inf, 2.0**-120])
def test_labels_alone(backend, sum):
    """Of rows that are not finite, and where borders would be denormals."""
    logits = torch.zeros(300)
    counts, ids, values, drawn = sample_of(backend, logits, (0.0, sum), label=7)
    assert (counts, ids[0, 0], values[0, 0]) == (1, 7, 0)
    assert not drawn.any()


def test_a_small_difference_is_summed_instead(backend):
    """1 - p of the label may be rounded to 0."""
    *_, drawn = sample_of(backend, torch.zeros(300), (0.0, 300.0), beside=0.0, label=7)
    assert drawn[0, [0, 3]].tolist() == [299 / 8, 299]


def test_gradients_of_what_was_drawn(backend, device):
    """Below the threshold ``part`` stands for 2^t, and ``part*t + shift`` for t*2^t."""
    n, m, sum_2t, H, drawn = 3, 40, 5.0, 1.3, torch.tensor([0.02, 0.03, -0.2, 0.0]).double()
    z, g = 6 * torch.randn(n, m), torch.tensor([0.5, 0.0, -1.0]).double()
    dentropy, temperatures = torch.tensor([0.3, -2.0, 0.0]).double(), torch.tensor([0.8, 1.0, 2.0])
    stats = torch.tensor([1.0, sum_2t]).double().repeat(n, 1)
    for softcap, with_entropy, heated in product((math.inf, 8.0), (True, False), (True, False)):
        tokens, present = tokens_of(n, temperatures=temperatures if heated else None)
        known = dict(logits=z.flatten(), offsets=torch.arange(n + 1) * m, tokens=tokens)
        known |= dict(labels=torch.full((n,), -1), dlog_probs=g, dlogits=torch.empty(n * m))
        known |= dict(stats=stats, entropy=torch.full((n,), H).double(), drawn=drawn.repeat(n, 1))
        known |= dict(dentropy=dentropy) if with_entropy else {}
        known = {name: value.to(device) for name, value in known.items()}
        options = options_of(softcap=softcap)
        ops = getattr(torch.ops, NAMESPACES[backend])
        call(ops, "row_gradient", known, present=present, options=options)

        capped, y = softcap < math.inf, z.double()
        slope = (1 / temperatures.double() if heated else torch.ones(n).double())[:, None]
        scale, y = (softcap * slope, torch.tanh(y / softcap)) if capped else (slope, y)
        t = (y - 1.0) * scale / LN2
        threshold, part, shift, _ = drawn
        small = t.exp2() < threshold
        e = torch.where(small, part, t.exp2()) / sum_2t
        log_p = LN2 * (e * t + torch.where(small, shift / sum_2t, 0.0)) - e * math.log(sum_2t)
        bonus = -dentropy[:, None] * with_entropy
        terms = torch.stack([bonus * log_p, bonus * H * e, -g[:, None] * e])
        terms *= slope * (1 - y * y if capped else 1)
        of = terms.abs().sum(0) + e * t.abs() * slope
        assert_rounded(known["dlogits"].view(n, m), terms.sum(0), OF_EXP, of)


@pytest.fixture
def same_seeds(monkeypatch):
    """Those of labels alone: statistics have other last bits in float64."""
    for module in (sampled, reference_sampled):
        monkeypatch.setattr(module, "row_seeds", lambda _, labels: of_labels_alone(labels))


CASES = [(torch.float32, *of) for of in product(CONFIGS, [False, True])]
CASES += [(dtype, "entropy", True) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("dtype", "name", "frozen"), CASES)
def test_options(same_seeds, backend, device, dtype, name, frozen):
    """Logits of half precision would be rounded, and have other sets."""
    real = real_in_turns(CONFIGS, name, frozen)
    given = problem(dtype, device, build(name), staleness_of(dtype), real=real)
    for C, chunk_tokens, sets in ((16, 5, "all"), (100, None, "live")):
        options = dict(chunk_tokens=chunk_tokens, logits_dtype=torch.float32, frozen=frozen)
        check(*given, backend, sets, gradient_samples=C, **options)
