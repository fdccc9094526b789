"""The Triton operators on sampling masks, against their formulas in float64."""

import math

import pytest
import torch
from helpers import DEVICES, INTERPRETED, KERNELS, PTX
from operands import options_of, tokens_of
from torch import nan

from bapo_kernels import BAPOConfig
from bapo_kernels.config import SURROGATES
from bapo_kernels.core.operators import torch_ops_of

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS, reason="needs Triton's interpreter or a GPU"
)
DEVICE = DEVICES["triton"]
V = 700
# Around the widths of blocks; none, and everything.
SIZES = (1, 0, 2, 31, 32, 33, 600, V)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = torch.finfo(torch.float32).eps
PAPER = BAPOConfig().options


def ops():
    return torch_ops_of("triton")


def rand(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)


def poison(*shape, dtype=torch.float32):
    return torch.full(shape, nan, dtype=dtype, device=DEVICE)


class Sets:
    """Sets of these sizes, with a label in each."""

    def __init__(self, sizes=SIZES, vocab=V, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.ids = [torch.randperm(vocab, generator=g)[:size].sort().values for size in sizes]
        self.token_ids = torch.cat(self.ids).int().to(DEVICE)
        self.offsets = torch.tensor([0, *sizes]).cumsum(0).to(DEVICE)
        self.N, self.K = len(sizes), sum(sizes)
        positions = [int(torch.randint(max(1, size), (), generator=g)) for size in sizes]
        self.positions = torch.tensor(
            [p if s else -1 for p, s in zip(positions, sizes, strict=True)], device=DEVICE
        )
        self.counted = torch.ones(self.N, dtype=torch.bool, device=DEVICE)
        self.csr = self.token_ids, self.offsets

    def rows(self, values):
        """Of values in CSR order, those of every row."""
        return values.cpu().split(self.offsets.diff().tolist())


def truth(z, position, scale=1.0, softcap=None, g=1.0, bonus=0.0):
    """Log-prob, entropy and the gradient of g*log-prob - bonus*entropy of a row, in float64."""
    z = z.double().requires_grad_()
    y = z if softcap is None else softcap * torch.tanh(z / softcap)
    x = (y * scale)[z > -math.inf]
    p = (x - x.logsumexp(0)).exp()
    entropy = x.logsumexp(0) - (p * x).sum()
    label = y[position] * scale if position >= 0 else torch.zeros(())
    (gradient,) = torch.autograd.grad(g * (label - x.logsumexp(0)) - bonus * entropy, z)
    logp = label - x.logsumexp(0) if position >= 0 else torch.tensor(-math.inf)
    return logp.item(), entropy.item(), gradient


def check_row(got, expected, size=1.0):
    """Exponents reach 40, and exp has the relative error of their rounding."""
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol=80 * EPS, atol=80 * EPS * size / max(1, len(expected))
    )


WITHOUT_FIELDS = (None, 0, options_of())  # of the tokens


def statistics(sets, values, tokens_and_options=WITHOUT_FIELDS):
    results = poison(sets.N, dtype=torch.float64), poison(sets.N, dtype=torch.float64)
    results = *results, poison(sets.N, 2, dtype=torch.float64)
    rows = values, sets.offsets, sets.positions, sets.counted
    ops().row_statistics(*rows, *tokens_and_options, *results)
    return results


@pytest.mark.parametrize("rows", [1, 128, 150])
def test_positions_of_labels(rows):
    sets = Sets([k % 6 for k in range(rows)], 8, seed=rows)
    labels = [(7 * k) % 12 - 2 for k in range(rows)]
    found = torch.full((rows,), 7, device=DEVICE)
    ops().find_labels(torch.tensor(labels, device=DEVICE), *sets.csr, 8, found)
    expected = [
        7 if not ids else -2 if not 0 <= label < 8 else ids.index(label) if label in ids else -1
        for label, ids in zip(labels, [ids.tolist() for ids in sets.ids], strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 600])
def test_every_position_is_found(size):
    sets = Sets([size])
    found = poison(1).long()
    for place in {0, size // 2, size - 1}:
        ops().find_labels(sets.ids[0][place].to(DEVICE)[None], *sets.csr, V, found)
        assert found.item() == place


@pytest.mark.parametrize("shard", [None, (0, 900), (100, 900), (900 - V, 900)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_from_logits_and_gradients_go_there(dtype, shard):
    total = V if shard is None else shard[1]
    first = 0 if shard is None else shard[0]
    sets = Sets((1, 0, 2, 33, 300, 5), total)
    sets.counted[3] = False
    shard = None if shard is None else torch.tensor(shard, device=DEVICE)
    logits = rand(3, 2, V + 3, dtype=dtype).transpose(0, 1)[..., 3:]  # of 2 batches, strided
    values, dlogits = poison(sets.K), torch.zeros_like(logits)
    ops().gather_sets(logits, sets.counted, *sets.csr, shard, values)
    gradients = rand(sets.K)
    ops().scatter_sets(gradients, sets.counted, *sets.csr, shard, dlogits)
    rows, expected = logits.reshape(-1, V).cpu(), torch.zeros(6, V, dtype=dtype)
    for row, ids in enumerate(sets.ids):
        if not sets.counted[row]:
            assert sets.rows(values)[row].isnan().all()
            continue
        here = (ids >= first) & (ids < first + V)
        columns = ids[here] - first
        assert torch.equal(sets.rows(values)[row][here], rows[row, columns].float())
        assert (sets.rows(values)[row][~here] == -math.inf).all()
        expected[row, columns] = sets.rows(gradients)[row][here].to(dtype)
    assert torch.equal(dlogits.reshape(-1, V).cpu(), expected)


TRANSFORMS = {
    "plain": (1.0, 1.0, None, False),
    "temperature": (0.7, 1.3, None, False),
    "softcap": (0.7, 1.0, 3.0, False),
    "temperatures": (1.0, 1.0, None, True),
    "temperatures, softcap": (1.0, 1.0, 3.0, True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_statistics_and_gradient(name):
    """The whole row pass in two operators; a label in no place of its set; forbidden ids."""
    temperature, scale, softcap, per_row = TRANSFORMS[name]
    sets = Sets((*SIZES, 5))
    sets.positions[-1] = -1
    values = 4 * rand(sets.K)
    values[[5, 40]] = -math.inf
    T = 0.5 + rand(sets.N).abs() if per_row else None
    options = options_of(temperature=temperature, logit_scale=scale, softcap=softcap or math.inf)
    given = *tokens_of(sets.N, DEVICE, temperatures=T), options
    logp, entropy, stats = statistics(sets, values, given)
    g, bonus = rand(2, sets.N).double()
    for dentropy in (None, -bonus):
        dvalues = poison(sets.K)
        arguments = sets.offsets, sets.positions, stats, entropy, g, dentropy, None, *given
        ops().row_gradient(values, *arguments, dvalues)
        in_place = values.clone()
        ops().row_gradient_(in_place, *arguments)
        assert torch.equal(in_place, dvalues)
        for row, (z, dz) in enumerate(zip(sets.rows(values), sets.rows(dvalues), strict=True)):
            if len(z) == 0:
                assert logp[row].isnan()
                assert stats[row].isnan().all()
                continue
            factor = scale / (T[row].item() if per_row else temperature)
            true = truth(
                *(z, sets.positions[row].item(), factor, softcap, g[row].item()),
                0.0 if dentropy is None else bonus[row].item(),
            )
            check_row(
                torch.stack([logp[row], entropy[row]]), torch.tensor(true[:2], dtype=torch.float64)
            )
            check_row(dz, true[2])


def test_a_set_of_one_is_certain():
    sets = Sets((1, 1))
    logp, entropy, stats = statistics(sets, rand(2))
    assert logp.tolist() == entropy.tolist() == [0.0, 0.0]
    assert stats[:, 1].tolist() == [1.0, 1.0]


def test_only_flagged_rows_get_a_gradient():
    sets = Sets(tuple(1 + k % 3 for k in range(200)))
    values = rand(sets.K)
    _, entropy, stats = statistics(sets, values)
    only = (torch.arange(sets.N) % 67 == 1).to(torch.uint8).to(DEVICE)
    g = rand(sets.N).double()
    g[1] = 0.0
    dvalues = poison(sets.K)
    known = sets.positions, stats, entropy, g, None, only
    ops().row_gradient(values, sets.offsets, *known, *WITHOUT_FIELDS, dvalues)
    for row, dz in enumerate(sets.rows(dvalues)):
        assert dz.isfinite().all() if only[row] else dz.isnan().all()
    assert not sets.rows(dvalues)[1].any()


# ratio, advantage -> coefficient of the advantage's gradient, undecided
CLASSES = {
    (1.0, 1.0): (-1.0, False),
    (2.0, 1.0): (None, True),
    (4.0, 1.0): (0.0, False),
    (0.95, -1.0): (0.95, False),
    (0.7, -1.0): (None, True),
    (0.5, -1.0): (0.0, False),
    (5.0, -1.0): (0.0, False),  # the dual clip
    (1.0, 0.0): (0.0, False),
}


def derivative(surrogate, r, A, lower, upper):
    """Of a token's policy term; the dual clip is at 3."""
    if surrogate == "cispo":
        return -min(max(r, lower), upper) * A
    if surrogate == "sapo":
        gate = 1 / (1 + math.exp(-TAU[A > 0] * (r - 1)))
        return -4 * A * gate * (1 - gate) * r
    passes = r <= upper if A > 0 else lower <= r <= 3.0
    return -r * A if passes else 0.0


TAU = {True: 0.7, False: 1.6}


class Pass:
    """A row of every class, and one without a set, one masked, one with a label outside."""

    def __init__(self, everything, surrogate="clip"):
        self.surrogate = surrogate
        self.classes = [*CLASSES, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
        self.sets = Sets((3, 40, 1, 33, 7, 64, 9, 5, 0, 6, 8))
        self.sets.counted[9] = False
        self.sets.positions[10] = -1
        self.values = 3 * rand(self.sets.K)
        N = self.sets.N
        self.true = [
            truth(z, p) if len(z) else (0.0, 0.0, None)
            for z, p in zip(self.sets.rows(self.values), self.sets.positions.tolist(), strict=True)
        ]
        old = [
            max(true[0], -20.0) - math.log(ratio)
            for true, (ratio, _) in zip(self.true, self.classes, strict=True)
        ]
        self.old = torch.tensor(old, device=DEVICE)
        self.A = torch.tensor([A for _, A in self.classes], device=DEVICE)
        self.weights = rand(N).abs().double()
        self.is_weights = rand(N).abs() if everything else None
        self.ref = self.old - 0.5 if everything else None
        self.kl, self.bonus = (0.1, 0.02) if everything else (0.0, 0.0)
        self.options = options_of(
            surrogate=SURROGATES[surrogate],
            clip_ratio_c=3.0,
            sapo_tau_pos=TAU[True],
            sapo_tau_neg=TAU[False],
            kl_loss_coef=self.kl,
            kl_loss_type=0,
            entropy_coef=self.bonus,
        )
        self.results = [poison(N, dtype=torch.float64) for _ in range(2)]
        self.results += [poison(N, 2, dtype=torch.float64)]
        self.undecided = torch.full((N,), 7, dtype=torch.uint8, device=DEVICE)

    def arguments(self, bounds=None):
        """From the offsets on; bounds of all rows, or ``[2, N]`` of each."""
        own = (None, None) if bounds is None or bounds.ndim == 1 else bounds
        tokens = tokens_of(
            self.sets.N,
            DEVICE,
            advantages=self.A,
            old_log_probs=self.old,
            rollout_is_weights=self.is_weights,
            ref_log_probs=self.ref,
            lower=own[0],
            upper=own[1],
        )
        sets = self.sets.offsets, self.sets.positions, self.sets.counted, self.weights
        bounds = None if own[0] is not None else bounds
        return *sets, *tokens, bounds, self.options, *self.results, self.undecided

    def expected(self, row, bounds):
        """Coefficient of the policy term, and whether it is undecided."""
        (r, A), at_label = self.classes[row], self.sets.positions[row] != -1
        if self.surrogate == "clip" and not isinstance(bounds, torch.Tensor):
            factor, undecided = CLASSES[r, A]
            if bounds is not None and undecided:  # these bounds let the token pass
                factor, undecided = -r * A, False
            return factor if at_label else 0.0, undecided
        if not at_label:
            r = math.exp(-20.0)
        ends = [PAPER.start, PAPER.maximum]
        if bounds is not None:
            ends = [bounds[:, row].tolist()]
        found = [derivative(self.surrogate, r, A, *end) for end in ends]
        is_constant = not at_label and self.surrogate != "cispo"  # because the ratio is clamped
        return 0.0 if is_constant else found[0], not is_constant and len(set(found)) > 1

    def check(self, values, bounds=None):
        logp, entropy, stats = self.results
        for row, (z, dz) in enumerate(
            zip(self.sets.rows(self.values), self.sets.rows(values), strict=True)
        ):
            factor, undecided = self.expected(row, bounds)
            if len(z) == 0 or not self.sets.counted[row]:
                results = [logp[row], entropy[row], *stats[row]]
                assert all(x.isnan() for x in results) if len(z) == 0 else results == [0, 0, 0, 1]
                assert self.undecided[row] == 0
                assert not dz.any()
                continue
            of_row = torch.tensor(self.true[row][:2], dtype=torch.float64)
            check_row(torch.stack([logp[row], entropy[row]]), of_row)
            assert self.undecided[row] == undecided
            if undecided:
                assert torch.equal(dz, z)
                continue
            is_weight = 1.0 if self.is_weights is None else self.is_weights[row].item()
            weight = self.weights[row].item()
            g = weight * (factor * is_weight + self.kl)  # the derivative of this KL term is 1
            position = self.sets.positions[row].item()
            _, _, gradient = truth(z, position, g=g, bonus=weight * self.bonus)
            check_row(dz, gradient, weight)
            assert g or self.bonus or not dz.any()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("bounds", [None, (0.65, 2.5)])
def test_pass(everything, bounds):
    case = Pass(everything)
    values = case.values.clone()
    given = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    ops().row_pass_(values, *case.arguments(given))
    case.check(values, bounds)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("own", [False, True])
def test_pass_of_surrogates(surrogate, own, everything):
    """With bounds of each row those of its neighbours would let it pass where its own do not."""
    case = Pass(everything, surrogate)
    values, bounds = case.values.clone(), None
    if own:
        odd = torch.arange(case.sets.N, device=DEVICE) % 2
        bounds = torch.stack([0.75 - 0.3 * odd, 4.5 - 3.0 * odd])
    ops().row_pass_(values, *case.arguments(bounds))
    case.check(values, bounds)
    found = [case.expected(row, bounds)[1] for row in range(case.sets.N)]
    assert any(found) == (surrogate != "sapo" and not own)


def matrices(sets, dtype, H, vocab=V):
    """Hidden states and a head, in wider memory; the head in float64 too."""
    hidden, weight = rand(sets.N, H + 8, dtype=dtype)[:, :H], rand(vocab, H + 8, dtype=dtype)[:, :H]
    return hidden, weight, weight.double().cpu()


def check_sum(got, expected, magnitude):
    """Sums of float32: a few roundings of the sum of magnitudes, and one of the result's dtype."""
    error = (got.double().cpu() - expected).abs()
    last = torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 0.0
    assert (error <= 8 * EPS * magnitude + last * expected.abs()).all()


@pytest.mark.parametrize(
    ("dtype", "H", "bias", "shard"),
    [
        (torch.float32, 40, False, None),
        (torch.float32, 520, True, (200, 1_000)),
        (torch.bfloat16, 1_030, True, None),
        (torch.float16, 1, False, (0, 1_000)),
    ],
)
def test_products(dtype, H, bias, shard):
    """Values from the head, and the gradients of hidden states from those of values."""
    sets = Sets((1, 0, 16, 2, 17, 130), V if shard is None else shard[1])
    sets.counted[3] = False
    hidden, weight, W = matrices(sets, dtype, H)
    b = rand(V) if bias else None
    first = 0 if shard is None else shard[0]
    device_shard = None if shard is None else torch.tensor(shard, device=DEVICE)
    values, dvalues = poison(sets.K), rand(sets.K)
    ops().multiply_sets(hidden, weight, b, sets.counted, *sets.csr, device_shard, values)
    only = torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.uint8, device=DEVICE)
    flagged, everywhere = (poison(sets.N, H, dtype=d) for d in (dtype, torch.float32))
    head = weight, *sets.csr, device_shard
    ops().sets_dhidden(dvalues, *head, only, flagged)
    ops().sets_dhidden(dvalues, *head, None, everywhere)
    assert flagged[[1, 4]].isnan().all()
    assert everywhere[1].isnan().all()
    for row, ids in enumerate(sets.ids):
        if len(ids) == 0:
            continue
        here = (ids >= first) & (ids < first + V)
        rows, h = W[ids[here] - first], hidden[row].double().cpu()
        got = sets.rows(values)[row]
        if sets.counted[row]:
            of_bias = b.cpu().double()[ids[here] - first] if bias else torch.zeros(())
            size = rows.abs() @ h.abs() + of_bias.abs()
            check_sum(got[here], rows @ h + of_bias, size)
            assert (got[~here] == -math.inf).all()
        else:
            assert got.isnan().all()
        dz = sets.rows(dvalues)[row][here].double()
        for dhidden in (flagged, everywhere) if only[row] else (everywhere,):
            check_sum(dhidden[row], dz @ rows, dz.abs() @ rows.abs())


def test_programs_that_stride_over_rows_find_every_wanted_one():
    n = 200 if INTERPRETED else 1_100 if PTX else 70_000  # programs read 64 flags, then the others
    sets = Sets((2,) * n)
    _, weight, _ = matrices(sets, torch.float32, 5)
    only = torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    only[[0, 7, n // 2, n - 1]] = 1
    some, everywhere = poison(n, 5), poison(n, 5)
    dvalues = rand(sets.K)
    ops().sets_dhidden(dvalues, weight, *sets.csr, None, only, some)
    ops().sets_dhidden(dvalues, weight, *sets.csr, None, None, everywhere)
    assert some[only == 0].isnan().all()
    assert torch.equal(some[only != 0], everywhere[only != 0])


def test_rows_of_the_head_times_zero_are_not_read():
    sets, weight = Sets((2, 3)), poison(V, 5)
    weight[sets.ids[1]] = rand(3, 5)
    dvalues, dhidden = rand(5), poison(2, 5)
    dvalues[:2] = 0.0
    weight[sets.ids[0]] = nan
    dvalues[2:][torch.isin(sets.ids[1], sets.ids[0])] = 0.0
    ops().sets_dhidden(dvalues, weight, *sets.csr, None, None, dhidden)
    assert not dhidden[0].any()
    assert dhidden[1].isfinite().all()
    assert dhidden[1].any()


def by_columns(sets, vocab):
    """Order, rows and segments of the ids of all sets, sorted by column."""
    rows = torch.repeat_interleave(torch.arange(sets.N, device=DEVICE), sets.offsets.diff())
    ids, order = sets.token_ids.long().sort(stable=True)
    segments = torch.searchsorted(ids, torch.arange(vocab + 1, device=DEVICE))
    return order, rows[order].int(), segments


@pytest.mark.parametrize(
    ("dtype", "out", "add", "bias"),
    [
        (torch.float32, torch.float32, False, True),
        (torch.bfloat16, torch.float32, True, True),
        (torch.float16, torch.float16, False, False),
        (torch.bfloat16, torch.bfloat16, True, False),
    ],
)
def test_gradient_of_the_head(dtype, out, add, bias):
    """Columns in no set, in one, and in more than are summed at once."""
    sets = Sets((3,) * 10 + (1,) * 140, 6)
    H = 520 if bias else 9
    hidden, dweight, before = matrices(sets, dtype, H, 6)
    sets.token_ids[::2] = 2
    sets.token_ids[sets.token_ids == 4] = 3
    dweight = dweight.to(out) if add else poison(6, H, dtype=out)
    dbias = rand(6) if bias else None
    before_bias = dbias.clone() if bias else None
    dvalues = rand(sets.K)
    order, rows, segments = by_columns(sets, 6)
    assert segments.diff().max() > 65
    assert segments.diff().min() == 0
    ops().sets_dweight(dvalues, hidden, order, rows, segments, add, dweight, dbias)
    full, size = torch.zeros(2, 6, H, dtype=torch.float64)
    of_bias = torch.zeros(6, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(sets.N), sets.offsets.diff().cpu())
    for k, (id, row) in enumerate(zip(sets.token_ids.tolist(), owner.tolist(), strict=True)):
        term = dvalues[k].double().cpu() * hidden[row].double().cpu()
        full[id] += term
        size[id] += term.abs()
        of_bias[id] += dvalues[k].double().cpu()
    check_sum(dweight, full + before * add, size + before.abs() * add)
    if bias:
        torch.testing.assert_close(dbias.cpu(), (of_bias + before_bias.cpu()).float())


@pytest.mark.parametrize("add", [False, True])
def test_gradient_of_popular_ids(add):
    """Columns of less and of more than two pieces; ids of other ranks come first and last."""
    counts, H = (300, 511, 512, 767, 1_100, 2), 40
    rows = torch.cat([torch.arange(count) for count in counts]).to(DEVICE)
    ends = torch.tensor(counts).cumsum(0)
    hidden, dvalues = rand(max(counts), H), rand(len(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    dweight, dbias = (rand(4, H), rand(4)) if add else (poison(4, H), torch.zeros(4).to(DEVICE))
    before = torch.cat([dweight if add else 0 * hidden[:4], dbias[:, None]], 1).double().cpu()
    given = order, rows.int(), ends[:-1].to(DEVICE)
    ops().sets_dweight(dvalues, hidden, *given, add, dweight, dbias)
    of_bias = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
    terms = (dvalues[order, None] * of_bias[rows]).double().cpu()
    for v, of_column in enumerate(terms.split(counts)[1:-1]):
        got, size = torch.cat([dweight[v], dbias[v, None]]), of_column.abs().sum(0)
        check_sum(got, of_column.sum(0) + before[v], size + before[v].abs())


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_pass(dtype, everything):
    """The three operators in one; a row without a set or undecided keeps its hidden gradient."""
    case = Pass(everything)
    sets, H = case.sets, 33
    hidden, weight, W = matrices(sets, dtype, H)
    bias = rand(V) if everything else None
    values, dhidden = poison(sets.K), poison(sets.N, H, dtype=dtype)
    given = hidden, weight, bias, sets.token_ids
    ops().head_sets_pass(*given, *case.arguments(), values, dhidden)
    alone = poison(sets.K)
    ops().multiply_sets(hidden, weight, bias, sets.counted, *sets.csr, None, alone)
    again = Pass(everything)
    ops().row_pass_(alone, *again.arguments())
    assert torch.equal(values, alone)
    assert torch.equal(case.undecided, again.undecided)
    for row, dz in enumerate(sets.rows(values)):
        if len(dz) == 0 or case.undecided[row]:
            assert dhidden[row].isnan().all()
            continue
        dz, rows = dz.double(), W[sets.ids[row]]
        check_sum(dhidden[row], dz @ rows, dz.abs() @ rows.abs())
        assert dz.any() or not dhidden[row].any()


BROKEN_OFFSETS = {
    "first": [1, 2, 5, 9],
    "last": [0, 2, 5, 8],
    "beyond": [0, 2, 12, 9],
    "far beyond": [0, 2, 1 << 40, 9],
    "negative": [0, -5, 5, 9],
    "falling": [0, 5, 2, 9],
}


@pytest.mark.parametrize("name", BROKEN_OFFSETS)
def test_broken_offsets(name):
    """The log-probs of the rows are NaN, and their sets empty: nothing foreign is touched."""
    offsets = torch.tensor(BROKEN_OFFSETS[name], device=DEVICE)
    sets = Sets((2, 3, 4))
    sets.offsets, sets.csr = offsets, (sets.token_ids, offsets)
    all_rows = name in ("first", "last")
    broken = [
        all_rows or not 0 <= begin <= end <= 9
        for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)
    ]
    found = poison(3).long()
    ops().find_labels(sets.token_ids[:3].long(), *sets.csr, V, found)
    assert [position == -2 for position in found.tolist()] == broken
    logits, values = rand(1, 3, V), poison(9)
    hidden, weight = rand(3, 5), rand(V, 5)
    dhidden = torch.zeros(3, 5, device=DEVICE)
    ops().gather_sets(logits, sets.counted, *sets.csr, None, values)
    ops().multiply_sets(hidden, weight, None, sets.counted, *sets.csr, None, values)
    results = [torch.full((3, n), 7.0, dtype=torch.float64, device=DEVICE) for n in (1, 1, 2)]
    undecided = torch.full((3,), 7, dtype=torch.uint8, device=DEVICE)
    weights = torch.ones(3, dtype=torch.float64, device=DEVICE)
    inputs = torch.zeros_like(found), sets.counted, weights
    tokens = tokens_of(3, DEVICE, advantages=hidden[:, 0])
    ops().row_pass_(values, offsets, *inputs, *tokens, None, options_of(), *results, undecided)
    ops().scatter_sets(values, sets.counted, *sets.csr, None, logits)
    ops().sets_dhidden(values, weight, *sets.csr, None, None, dhidden)
    is_broken = torch.tensor(broken, device=DEVICE)
    assert all(x[is_broken].isnan().all() for x in results[:2])
    assert undecided.tolist() == [0, 0, 0]
    assert not dhidden[is_broken].any()


def test_broken_ids():
    """Such an id has the value NaN, and with it its row; no column is read or written for it."""
    sets = Sets((4, 4, 4, 4, 4))
    for k, id in ((1, -1), (7, V), (8, 2**31 - 1), (9, -(2**31))):
        sets.token_ids[k] = id
    sets.token_ids[14] = sets.token_ids[13]
    broken = torch.zeros(20, dtype=torch.bool, device=DEVICE)
    broken[[1, 7, 8, 9, 14]] = True
    logits, weight = rand(1, 5, V), rand(V, 5)
    gathered, products, dlogits = poison(20), poison(20), torch.zeros(1, 5, V, device=DEVICE)
    ops().gather_sets(logits, sets.counted, *sets.csr, None, gathered)
    ops().multiply_sets(rand(5, 5), weight, None, sets.counted, *sets.csr, None, products)
    ops().scatter_sets(torch.ones(20, device=DEVICE), sets.counted, *sets.csr, None, dlogits)
    sets.positions[0] = -1  # where a label in no set would have a log-prob of -inf
    for values in (gathered, products):
        assert torch.equal(values.isnan(), broken)
        logp, entropy, _ = statistics(sets, values)
        assert logp.isnan().tolist() == entropy.isnan().tolist() == [True] * 4 + [False]
    assert dlogits.sum().item() == 20 - 5
    dhidden = poison(5, 5)
    ops().sets_dhidden(gathered, weight, *sets.csr, None, None, dhidden)
    assert dhidden.isfinite().all(1).tolist() == [False] * 4 + [True]


def test_broken_ids_at_every_place():
    """The first id that is no token, and one that stands twice."""
    n = 34 if INTERPRETED else 130
    sets = Sets((n,) * 2 * n)
    beyond, twice = ids = sets.token_ids.view(2, n, n)
    beyond.fill_diagonal_(V)
    twice.diagonal()[1:] = twice.diagonal(-1)
    before = torch.nn.functional.pad(ids[..., :-1], (1, 0), value=-1)
    broken = ((ids >= V) | (ids <= before)).flatten()
    gathered, products = poison(sets.K), poison(sets.K)
    ops().gather_sets(rand(1, sets.N, V), sets.counted, *sets.csr, None, gathered)
    assert torch.equal(gathered.isnan(), broken)
    ops().multiply_sets(rand(sets.N, 5), rand(V, 5), None, sets.counted, *sets.csr, None, products)
    assert torch.equal(products.isnan(), broken)


def test_the_last_token_at_every_place():
    sets = Sets(range(1, 35 if INTERPRETED else 131))
    sets.token_ids[sets.offsets[1:] - 1] = V - 1
    gathered, products = poison(sets.K), poison(sets.K)
    ops().gather_sets(rand(1, sets.N, V), sets.counted, *sets.csr, None, gathered)
    ops().multiply_sets(rand(sets.N, 5), rand(V, 5), None, sets.counted, *sets.csr, None, products)
    assert gathered.isfinite().all()
    assert products.isfinite().all()


def test_sets_of_every_size():
    """Behind each comes a higher id, of the next."""
    sets, (hidden, weight) = Sets(range(1, 35)), (rand(34, 5), rand(V, 5))
    sets.token_ids.copy_(torch.arange(sets.K))
    place = (
        torch.repeat_interleave(torch.arange(34), sets.offsets.diff().cpu()),
        torch.arange(sets.K),
    )
    logits, values, dvalues = rand(1, 34, V), poison(sets.K), rand(sets.K)
    dlogits, dhidden = torch.zeros_like(logits), poison(34, 5)
    ops().gather_sets(logits, sets.counted, *sets.csr, None, values)
    assert torch.equal(values, logits[0][place])
    ops().scatter_sets(dvalues, sets.counted, *sets.csr, None, dlogits)
    expected = torch.zeros_like(dlogits[0])
    expected[place] = dvalues
    assert torch.equal(dlogits[0], expected)
    ops().multiply_sets(hidden, weight, None, sets.counted, *sets.csr, None, values)
    torch.testing.assert_close(values, (hidden @ weight.T)[place])
    ops().sets_dhidden(dvalues, weight, *sets.csr, None, None, dhidden)
    torch.testing.assert_close(dhidden, expected @ weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_every_length(dtype):
    """The last number of a row of the head, and of the last hidden state, at every place."""
    for H in [128 * k + i for k in range(4) for i in range(1, 9)]:
        sets, x = Sets((1,), 1), rand(2, 1, H, dtype=dtype)
        dvalues, values, dhidden, dweight = rand(1), poison(1), poison(1, H), poison(1, H)
        ops().multiply_sets(*x, None, sets.counted, *sets.csr, None, values)
        ops().sets_dhidden(dvalues, x[1], *sets.csr, None, None, dhidden)
        ops().sets_dweight(dvalues, x[0], *by_columns(sets, 1), False, dweight, None)
        torch.testing.assert_close(values, x.float().prod(0).sum(1))
        torch.testing.assert_close(dhidden, dvalues * x[1])
        torch.testing.assert_close(dweight, dvalues * x[0])
        ops().sets_dweight(dvalues, x[0], *by_columns(sets, 1), True, dweight, None)
        torch.testing.assert_close(dweight, 2 * dvalues * x[0])


def test_the_columns_of_a_rank_begin_and_end_at_every_place():
    n = 34 if INTERPRETED else 130
    sets, shard = Sets((n,) * 2 * n), torch.tensor([n, 3 * n], device=DEVICE)
    place = torch.arange(n, device=DEVICE)
    columns = torch.cat((place - place[:, None], place - place[:, None] + n))
    sets.token_ids.copy_((columns + n).flatten())
    here, columns = (columns >= 0) & (columns < n), columns.clamp(0, n - 1)
    logits, values = rand(1, 2 * n, n), poison(2 * n, n)
    dvalues, dlogits = rand(2 * n, n), torch.zeros_like(logits)
    ops().gather_sets(logits, sets.counted, *sets.csr, shard, values.view(-1))
    ops().scatter_sets(dvalues.view(-1), sets.counted, *sets.csr, shard, dlogits)
    assert torch.equal(values, torch.where(here, logits[0].gather(1, columns), -math.inf))
    added = torch.zeros_like(dlogits[0]).scatter_add(1, columns, torch.where(here, dvalues, 0.0))
    assert torch.equal(dlogits[0], added)
    hidden, weight, dhidden = rand(2 * n, 5), rand(n, 5), poison(2 * n, 5)
    some = torch.cat((place, place)) < 34  # products take eight ids at once
    ops().multiply_sets(hidden, weight, None, some, *sets.csr, shard, values.view(-1))
    ops().sets_dhidden(dvalues.view(-1), weight, *sets.csr, shard, some.to(torch.uint8), dhidden)
    products = torch.where(here, (hidden @ weight.T).gather(1, columns), -math.inf)
    torch.testing.assert_close(values[some], products[some])
    torch.testing.assert_close(dhidden[some], (dlogits[0] @ weight)[some])


def test_gradient_of_the_bias_alone():
    sets = Sets((2, 3), 6)
    nothing, dbias, dvalues = rand(2, 0), torch.zeros(6, device=DEVICE), rand(5)
    ops().sets_dweight(dvalues, nothing, *by_columns(sets, 6), False, rand(6, 0), dbias)
    expected = torch.zeros(6, device=DEVICE).index_add_(0, sets.token_ids.long(), dvalues)
    torch.testing.assert_close(dbias, expected)


def test_broken_segments_are_cut():
    dvalues, hidden = poison(60)[20:40].copy_(rand(20)), rand(3, 5)
    order = torch.tensor([0, 99, -1, *[20] * 8, *[1] * 9], device=DEVICE)
    rows = torch.tensor([*[1] * 11, 5, *[3] * 8], dtype=torch.int32, device=DEVICE)
    segments = torch.tensor([-7, 99, 2, 4], device=DEVICE)
    dweight, dbias = poison(3, 5), torch.zeros(3, device=DEVICE)
    ops().sets_dweight(dvalues, hidden, order, rows, segments, False, dweight, dbias)
    torch.testing.assert_close(dweight[0], dvalues[0] * hidden[1])
    assert not dweight[1:].any()


def test_rows_alone_have_the_bits_of_a_batch():
    sets = Sets((33, 5, 300))
    hidden, weight, _ = matrices(sets, torch.bfloat16, 520)

    def everything(sets, hidden):
        values, dhidden = poison(sets.K), poison(sets.N, 520)
        ops().multiply_sets(hidden, weight, None, sets.counted, *sets.csr, None, values)
        results = statistics(sets, values)
        ops().sets_dhidden(values, weight, *sets.csr, None, None, dhidden)
        return values, *results, dhidden

    together, again = everything(sets, hidden), everything(sets, hidden)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    alone = Sets((300,))
    alone.token_ids.copy_(sets.token_ids[38:])
    alone.positions.copy_(sets.positions[2:])
    of_last = everything(alone, hidden[2:])
    assert torch.equal(of_last[0], together[0][38:])
    for one, all_rows in zip(of_last[1:], together[1:], strict=True):
        assert torch.equal(one[0], all_rows[2])


def test_statistics_of_a_long_set_stay_accurate():
    """Terms that are equal, so that the roundings of their sum add up."""
    size = 30_000 if INTERPRETED else 150_000
    sets, values = Sets((size,), size), torch.zeros(size, device=DEVICE)
    values[7] = 0.37
    logp, entropy, _ = statistics(sets, values)
    true = truth(values.cpu(), sets.positions.item())
    torch.testing.assert_close(logp.item(), true[0], rtol=0, atol=EPS)
    torch.testing.assert_close(entropy.item(), true[1], rtol=0, atol=EPS)


def test_sums_over_a_long_set_stay_accurate():
    """Terms of one sign, whose float32 sum would be off by more than the last rounding."""
    size = 4_000
    sets, terms = Sets((size,), size, seed=2), 1 + rand(size, 1, seed=2).abs()
    dhidden = poison(1, 1)
    ops().sets_dhidden(terms.view(-1), terms, *sets.csr, None, None, dhidden)
    expected = (terms[sets.token_ids.long()].double() * terms.double()).sum()
    torch.testing.assert_close(dhidden.item(), expected.item(), rtol=EPS, atol=0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("offsets", lambda x: x.int(), "offsets must be torch.int64"),
        ("token_ids", lambda x: x.long(), "token_ids must be torch.int32"),
        ("values", lambda x: x[1:], "values must be contiguous with 9 elements"),
        ("counted", lambda x: x[1:], "counted must be contiguous with 3 elements"),
        ("hidden", lambda x: x[1:], r"hidden must have shape \(3, 5\)"),
        ("weight", lambda x: x.bfloat16(), "weight must have the dtype torch.float32"),
        ("weight", lambda x: x[:, 1:], "weight must have 5 columns"),
        ("weight", lambda x: x.t().contiguous().t(), "weight must be a matrix with stride 1 in H"),
        ("shard", lambda x: x[1:], "shard must be contiguous with 2 elements"),
        ("bias", lambda x: x[1:], f"bias must be contiguous with {V} elements"),
    ],
)
def test_arguments_are_checked(name, wrong, message):
    sets = Sets((2, 3, 4))
    arguments = {
        "hidden": rand(3, 5),
        "weight": rand(V, 5),
        "bias": rand(V),
        "counted": sets.counted,
        "token_ids": sets.token_ids,
        "offsets": sets.offsets,
        "shard": torch.tensor([0, V], device=DEVICE),
        "values": poison(9),
    }
    arguments[name] = wrong(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        ops().multiply_sets(*arguments.values())
