"""The operators on samples: cases, what each must make of them in float64, and the tests.

As in ``set_operators.py``, a file that imports the tests has a fixture ``ops``; its ``shapes`` are
of logits that are aligned, and of some that are not.
"""

import math
from itertools import product

import pytest
import torch
from accuracy import assert_rounded, assert_same
from cuda_on_host.emulated import SEEDS
from operands import call, tokens_of
from set_operators import DTYPES, LEFT, left, results_of, spread

from bapo_kernels.config import BAPOConfig
from bapo_kernels.core.head import sampled
from bapo_kernels.reference import sampled as reference_sampled
from bapo_kernels.reference.sampled import row_seeds, sample, uniforms
from bapo_kernels.tools.real_rows import real_rows

LN2 = math.log(2.0)
OF_EXP = 50  # roundings: 2^t has those of t, which is down to -50
TRANSFORMS = {
    "T=1": (1.0, {}),
    "T=0.6": (0.6, {}),
    "soft cap": (1.0, dict(final_logit_softcapping=30.0)),
    "scale": (0.3, dict(temperature=1.3, logit_scale=0.9)),
    "temperatures": (1.0, dict(temperature=(0.6, 1.0, 1.7))),  # of rows, in turns
}


def of_labels_alone(labels):
    return row_seeds(torch.zeros(len(labels), 2).double(), labels)


def x_of(logits, final_logit_softcapping=math.inf, temperature=1.0, logit_scale=1.0):
    x = logits.double() * logit_scale
    if final_logit_softcapping < math.inf:
        x = final_logit_softcapping * torch.tanh(x / final_logit_softcapping)
    return x / (
        in_turns(temperature, logits)[:, None] if type(temperature) is tuple else temperature
    )


def in_turns(temperatures, rows):
    return torch.tensor(temperatures).repeat(len(rows))[: len(rows)]


@pytest.fixture
def same_seeds(monkeypatch):
    """Those of labels alone: statistics have other last bits in float64."""
    for module in (sampled, reference_sampled):
        monkeypatch.setattr(module, "row_seeds", lambda _, labels: of_labels_alone(labels))


class Drawn:
    """Samples of rows of logits, or of the columns of a shard: ``kept``, bool, and what of them.

    ``found``: log-probs, entropy and stats, of whole rows; others are NaN where nothing is kept.
    """

    def __init__(self, ops, logits, labels, C, shard=None, places=None, **transform):
        n, V = logits.shape
        self.tokens, self.present = None, 0
        if type(transform.get("temperature")) is tuple:
            temperatures = in_turns(transform.pop("temperature"), logits)
            self.tokens, self.present = tokens_of(n, temperatures=temperatures)
        self.options = [*map(float, BAPOConfig(**transform).options)]
        self.found = results_of(n) | dict(log_probs=left(*labels.shape, dtype=torch.float64))
        known = dict(options=self.options, tokens=self.tokens, present=self.present, labels=labels)
        known["counted"] = torch.ones(n, dtype=torch.bool)
        call(ops, "row_statistics", known, logits=logits[None], **self.found)
        p = self.found["log_probs"].exp().nan_to_num(0.0)
        self.beside = 1.0 - torch.where(sampled.repeats(labels), 0.0, p).sum(1)
        first, end = shard or (0, V)
        places = places or min(V, 2 * C + 512) + labels.shape[1]
        self.counts, self.ids = left(n).int(), left(n, places).int()
        self.values, self.drawn = left(n, places), left(n, 4, dtype=torch.float64)
        span = None if shard is None else torch.tensor([first, V])
        known |= dict(shard=span, seeds=of_labels_alone(labels), gradient_samples=C)
        known |= self.found | dict(labels=labels.sort(1)[0] - first, beside=self.beside)
        made = dict(counts=self.counts, ids=self.ids, values=self.values, drawn=self.drawn)
        call(ops, "sample_rows", known, logits=logits[None, :, first:end], **made)
        self.kept, self.logits = torch.zeros(n, V, dtype=torch.bool), left(n, V)
        for row, count in enumerate(self.counts.tolist()):
            columns = self.ids[row, :count].long()
            assert ((first <= columns) & (columns < end)).all()
            assert (columns.diff() > 0).all()
            assert (self.values[row, count:] == LEFT).all()
            self.kept[row, columns], self.logits[row, columns] = True, self.values[row, :count]


def check_samples(ops, logits, labels, C, **transform):
    """But for ids within rounding of their border, at most 1 in 10,000 of those that are kept."""
    got = Drawn(ops, logits, labels, C, **transform)
    kept, log_p = got.kept, x_of(logits, **transform).log_softmax(1)
    t, part, shift, mass = (x.float() for x in (got.drawn / got.found["stats"][:, 1:]).unbind(1))
    assert_same(got.logits[kept], logits[kept].float())
    expected = sample(log_p, labels, of_labels_alone(labels), C)
    assert (kept != expected.kept).sum() <= 1e-4 * expected.kept.sum()

    known = labels.where(labels >= 0, labels[:, :1])
    p, is_label = log_p.exp(), torch.zeros_like(kept).scatter(1, known, True)
    beside = torch.where(is_label, 0.0, p)
    assert_rounded(t, beside.sum(1) / C, 2_000)  # 1 - p of the labels has lost ten bits
    is_small = (beside < t[:, None]) & ~is_label
    small, is_drawn = torch.where(is_small, p, 0.0), is_small & kept
    assert_rounded(mass, small.sum(1), OF_EXP)
    count = is_drawn.sum(1)
    some = ~(kept != expected.kept).any(1) & (count > 0)
    assert some.sum() >= len(labels) / 2, count
    assert_rounded(part[some], (small.sum(1) / count)[some], OF_EXP)
    log_ratio = (log_p - (p * log_p).sum(1, keepdim=True)).where(log_p > -torch.inf, 0.0)
    dentropy = -part[:, None] * log_ratio - LN2 * shift[:, None]
    for row in some.nonzero():
        of = is_drawn[row]
        assert_rounded(dentropy[row][of].float(), expected.dentropy[row][of], OF_EXP, 20 * t[row])
    check_gradient(ops, got, logits, labels, expected, some, t[:, None], **transform)


def check_gradient(ops, got, logits, labels, expected, some, t, **transform):
    """Of a log-prob of each label, and of the entropy, in the samples' entries."""
    n, K = labels.shape
    g = torch.Generator().manual_seed(4)
    dlog_probs = torch.randn(n, K, generator=g).double()
    columns, dlog_probs = labels.clamp(0), dlog_probs.masked_fill(labels < 0, 0.0)
    dentropy = 0.3 * torch.randn(n, generator=g).double()
    offsets = torch.nn.functional.pad(got.counts.long().cumsum(0), (1, 0))
    positions = (got.kept.cumsum(1).gather(1, columns) - 1).masked_fill(labels < 0, -100)
    known = got.found | dict(offsets=offsets, labels=positions, drawn=got.drawn)
    known |= dict(options=got.options, tokens=got.tokens, present=got.present)
    known |= dict(dlog_probs=dlog_probs, dentropy=dentropy)
    values, dvalues = logits[got.kept].float(), left(got.kept.sum())
    call(ops, "row_gradient", known, logits=values, dlogits=dvalues)
    z = logits.double().requires_grad_()
    (slope,) = torch.autograd.grad(x_of(z, **transform).sum(), z)
    total, d = dlog_probs.sum(1, keepdim=True), dentropy[:, None]
    truth = torch.zeros_like(z).scatter_add(1, columns, dlog_probs)
    size = truth.abs() + total.abs() * expected.p + d.abs() * (expected.dentropy.abs() + 20 * t)
    truth = truth - total * expected.p + d * expected.dentropy
    here = some[got.kept.nonzero()[:, 0]]
    truth, size = ((x * slope)[got.kept][here] for x in (truth, size.detach()))
    assert_rounded(dvalues[here], truth.detach(), 2 * OF_EXP, size)


def case(ops, shape, dtype, T=1.0, K=3):
    """Logits and labels, of which one repeats and one is none in some rows."""
    logits, drawn = real_rows((shape[0],), shape[1], T)
    labels = torch.stack([drawn, drawn, drawn.flip(0), drawn.roll(1)], 1)[:, :K].clone()
    labels[1::2, 3:] = -100
    return spread(logits.to(dtype), 8)[0], labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("C", "K"), [(16, 4), (600, 1)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_samples_and_their_gradients_are_those_of_the_reference(ops, dtype, C, K, name):
    T, transform = TRANSFORMS[name]
    shapes = ops.shapes
    for ops.seed, shape in product(SEEDS, shapes):
        check_samples(ops, *case(ops, shape, dtype, T, K), C, **transform)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_edges(ops, dtype):
    """A certain label, NaN, a label of which 1 - p is mostly rounding, -inf; too few places."""
    ops.seed = SEEDS[0]
    logits, labels = case(ops, (4, ops.shapes[0][1]), dtype, K=2)
    logits[0, labels[0, 0]] += 200
    logits[1, 7] = torch.nan
    logits[2:] = torch.linspace(-1, 1, logits.shape[1])
    logits[2, labels[2, 0]], logits[3, ::3] = 18, -torch.inf
    C, seeds = 64, of_labels_alone(labels)
    got = Drawn(ops, logits, labels, C)
    alone = torch.zeros_like(got.kept).scatter(1, labels, True)
    assert_same(got.kept[:2], alone[:2])
    assert not got.drawn[:2].any()
    expected = sample(logits.double().log_softmax(1), labels, seeds, C)
    assert_same(got.kept[2:], expected.kept[2:])
    t, p = got.drawn[:, 0] / got.found["stats"][:, 1], logits.double().softmax(1)
    assert got.beside[2] < 2**-10
    assert_rounded(t[2].float(), torch.where(alone, 0.0, p)[2].sum() / C, OF_EXP)

    few = Drawn(ops, logits, labels, C, places=20)
    assert few.counts.tolist() == [*got.counts[:2], 20, 20]
    assert few.values[2:, 0].isnan().all()
    assert_same(few.ids[2:], got.ids[2:, :20])
    assert_same(few.values[2:, 1:], got.values[2:, 1:20])


def sample_of(ops, logits, beside, sum_2t, seed=1, C=8):
    """Count, ids and drawn of one row, for statistics that it need not have; its label is 7."""
    stats, made = torch.tensor([0.0, sum_2t]).double(), (torch.empty(1).int(), torch.empty(1, 20))
    made = made[0], made[1].int(), made[1], torch.empty(4).double()
    names = ("counts", "ids", "values", "drawn")
    known = dict(labels=torch.tensor([7]), stats=stats, beside=torch.tensor([beside]).double())
    known |= dict(seeds=torch.tensor([seed]).int(), gradient_samples=C)
    call(
        ops, "sample_rows", known, logits=logits[None, None], **dict(zip(names, made, strict=True))
    )
    return int(made[0]), made[1][0], made[3].tolist()


def test_the_largest_hash_keeps_what_is_equal_to_the_threshold(ops):
    """Whose border is the threshold itself; 2^t of all ids is."""
    seed, id = -1508640499, 5
    assert uniforms(torch.tensor([seed]), torch.tensor([id])) == 1 - 2.0**-25
    count, ids, drawn = sample_of(ops, torch.zeros(20), 1.0, 8.0, seed)
    assert ids[:count].tolist() == [*range(20)]
    assert drawn == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sum_2t", [math.nan, math.inf, 2.0**-120])
def test_labels_alone(ops, sum_2t):
    """Of rows that are not finite, and where borders would be denormals."""
    count, ids, drawn = sample_of(ops, torch.zeros(300), 1.0, sum_2t)
    assert (count, ids[0]) == (1, 7)
    assert drawn == [0.0] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_draw_by_the_ids_of_the_whole_vocabulary(ops, dtype):
    """And by its threshold: what they keep is what the whole row keeps there."""
    logits, labels = case(ops, ops.shapes[0], dtype)
    whole = Drawn(ops, logits, labels, 64)
    ops.seed = SEEDS[0]  # another schedule
    assert_same(Drawn(ops, logits, labels, 64).drawn, whole.drawn)
    for shard in ((0, 1_999), (1_999, logits.shape[1])):
        part, columns = Drawn(ops, logits, labels, 64, shard), slice(*shard)
        assert_same(part.logits[:, columns], whole.logits[:, columns])
