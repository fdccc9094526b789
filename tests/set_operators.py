"""The operators on sampling masks: cases, what each must make of them in float64, and the tests.

A file that imports the tests has a fixture ``ops``: the operators of ``operators.SCHEMAS`` for CPU
tensors, with ``sizes`` for the tests. They set its ``seed``, that of an emulated GPU's schedule.
"""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from accuracy import assert_rounded, assert_same, assert_sums, assert_within_budget
from cuda_on_host.emulated import SEEDS
from operands import call, tokens_of
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.config import SURROGATES
from bapo_kernels.core.operators import SCHEMAS
from bapo_kernels.tools.budget import largest

OPERATORS = {"find_labels", "sample_rows", *(name for name in SCHEMAS if "sets" in name)}
LEFT = 777.0  # what is in an output before; where it stays, nothing was written
OUTSIDE, NO_TOKEN = -1, -2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def left(*shape, dtype=torch.float32):
    return torch.full(shape, LEFT, dtype=dtype)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Sets(NamedTuple):
    """Sampling masks of rows, over a vocabulary of which a shard may be here."""

    token_ids: Tensor
    offsets: Tensor
    V: int
    shard: tuple[int, int] | None = None  # first column, and how many are here

    @property
    def N(self):
        return self.offsets.numel() - 1

    @property
    def K(self):
        return self.token_ids.numel()

    @property
    def columns(self):
        return self.V if self.shard is None else self.shard[1]

    @property
    def known(self):
        """Arguments of operators."""
        shard = None if self.shard is None else torch.tensor([self.shard[0], self.V])
        return dict(token_ids=self.token_ids, offsets=self.offsets, vocab=self.V, shard=shard)

    def is_broken(self, n):
        """Whether the offsets break their rule."""
        begin, end = self.offsets[n : n + 2].tolist()
        whole = self.offsets[0] == 0 and self.offsets[-1] == self.K
        return not (whole and 0 <= begin <= end <= self.K)

    def of_row(self, n):
        """Which values a row has; none if it is broken."""
        return slice(0, 0) if self.is_broken(n) else slice(*self.offsets[n : n + 2].tolist())

    def ids(self, n):
        return self.token_ids[self.of_row(n)].tolist()

    def of_rows(self, rows):
        mask = torch.zeros(self.K, dtype=torch.bool)
        for n in rows:
            mask[self.of_row(n)] = True
        return mask

    def present(self):
        """The rows that have a set, or should."""
        sizes = self.offsets.diff().tolist()
        return [n for n in range(self.N) if self.is_broken(n) or sizes[n] > 0]

    def entries(self, rows):
        """(row, value, column); in the place of the column what stands for a logit without one."""
        first = self.shard[0] if self.shard else 0
        for n in rows:
            before = -1
            for k, id in enumerate(self.ids(n), self.of_row(n).start):
                column = id - first if 0 <= id - first < self.columns else -math.inf
                yield n, k, column if 0 <= id < self.V and before < id else math.nan
                before = id


OF_WARPS = (0, 1, 2, 31, 32, 33, 5)
OTHERS = (7, 3, 9, 40, 2, 6, 8, 17, 3, 4)  # so many that there is a row of every class
SIZES = (*OF_WARPS, 600, 0, 1_025, 1_024, 64, 3, 1_300, *OTHERS)
FEW_IDS = (*OF_WARPS, 64, 0, 130, 128, 64, 3, 700, *OTHERS)  # a vocabulary of 700


def random_sets(sizes=SIZES, V=None, shard=None):
    """Without a V the largest is the whole vocabulary."""
    g, V = torch.Generator().manual_seed(sum(sizes)), V or max(sizes)
    ids = [torch.randperm(V, generator=g)[:size].sort().values for size in sizes]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return Sets(torch.cat(ids).int(), offsets, V, shard)


def popular_ids(counts):
    """Ids, each in as many sets."""
    ids = (torch.arange(max(counts))[:, None] < torch.tensor(counts)).nonzero()
    offsets = torch.searchsorted(ids[:, 0].contiguous(), torch.arange(max(counts) + 1))
    return Sets(ids[:, 1].int(), offsets, V=len(counts) + 1)


# One place at a time, and what it has instead; None is the id before.
BROKEN_IDS = {
    "too large": (6, 60),
    "huge": (6, 2**31 - 1),
    "negative": (7, -1),
    "least": (7, -(2**31)),
    "too large at the end": (57, 60),
    "repeated": (6, None),
    "descending": (6, 0),
}
BROKEN_OFFSETS = {
    "first": (0, 1),
    "negative": (2, -3),
    "falling": (3, 1),
    "too large": (3, 60),
    "far too large": (3, 1 << 40),
    "last too small": (5, 57),
    "last too large": (5, 59),
}


def labels_of(sets):
    """Most of them in their set; some outside of it, if it is not whole, and some no token."""
    labels = torch.randint(0, sets.V, (sets.N,), generator=torch.Generator().manual_seed(5))
    for n in range(sets.N):
        ids = sets.ids(n)
        if n % 5 == 4:
            labels[n] = min(set(range(sets.V)).difference(ids), default=0)
        elif ids:
            labels[n] = ids[(0, -1, len(ids) // 2)[n % 3]]
    labels[10::14] = -100
    labels[14::20] = sets.V
    return labels


def positions_of(sets, labels):
    def position(n, label):
        if label == -100:
            return label
        if sets.is_broken(n) or not 0 <= label < sets.V:
            return NO_TOKEN
        return sets.ids(n).index(label) if label in sets.ids(n) else OUTSIDE

    of_rows = labels.view(sets.N, labels[:1].numel()).tolist()
    positions = [position(n, label) for n, of_row in enumerate(of_rows) for label in of_row]
    return torch.tensor(positions, dtype=torch.int64).view(labels.shape)


def counted_rows(sets):
    return torch.arange(sets.N) % 4 != 3


def check_find_labels(ops, sets, labels):
    positions = torch.full(labels.shape, 999)
    call(ops, "find_labels", sets.known, labels=labels, positions=positions)
    present = sets.present()
    for n, (got, expected) in enumerate(zip(positions, positions_of(sets, labels), strict=True)):
        unordered = any(math.isnan(column) for *_, column in sets.entries([n]))
        if n not in present:
            assert (got == 999).all(), "left alone"
        else:  # the label of a row of NaN may not be found
            assert ((got == expected) | (unordered & (got == OUTSIDE))).all()


def spread(rows, margin=1):
    """The same rows in other memory, not aligned if the margin is 1; NaN lies between them."""
    memory = pad(rows, (margin, 3 * margin), value=torch.nan)
    return memory[..., margin : -3 * margin], memory


def check_margins(rows, memory):
    outside = memory.clone()
    outside.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(torch.nan)
    assert outside.isnan().all(), "outside of the rows"


def check_move(ops, sets, dtype, counted=None):
    """From logits to values, and back into rows of zeros; in batches, with other rows between."""
    counted = counted_rows(sets) if counted is None else counted
    batches = 3 if sets.N % 3 == 0 else 1
    shape = batches, sets.N // batches + 1, sets.columns
    logits = spread(rand(*shape, seed=1).to(dtype))[0][:, :-1]
    values, dvalues = left(sets.K), rand(sets.K, seed=2)
    known = sets.known | dict(counted=counted)
    call(ops, "gather_sets", known, logits=logits, values=values)
    whole, memory = spread(torch.zeros(shape, dtype=dtype))
    dlogits = whole[:, :-1]
    call(ops, "scatter_sets", known, dvalues=dvalues, dlogits=dlogits)

    expected, gradient = left(sets.K), torch.zeros_like(logits).flatten(0, 1)
    assert not whole[:, -1].any()
    rows = logits.flatten(0, 1)
    for n, k, column in sets.entries(counted.nonzero().flatten().tolist()):
        expected[k] = column
        if math.isfinite(column):
            expected[k], gradient[n, column] = rows[n, column], dvalues[k].to(dtype)
    assert_same(values.nan_to_num(9), expected.nan_to_num(9))
    assert_same(dlogits.flatten(0, 1), gradient)
    check_margins(whole, memory)


ALL = BAPOConfig(entropy_coef=0.01, clip_ratio_c=3.0, kl_loss_coef=0.1, kl_loss_type="k3")
ALL = replace(ALL, final_logit_softcapping=9.0, temperature=0.8, logit_scale=1.1)
PLAIN = BAPOConfig()
OF_LOSS = BAPOConfig(clip_ratio_c=3.0, sapo_tau_pos=0.7, sapo_tau_neg=1.6)
EVERYTHING = replace(OF_LOSS, entropy_coef=0.02, kl_loss_coef=0.1, kl_loss_type="k1")
# And whether each row has a temperature.
OPTIONS = {
    "plain": (PLAIN, False),
    "temperature": (BAPOConfig(temperature=0.7, logit_scale=1.3), False),
    "softcap": (BAPOConfig(final_logit_softcapping=9.0, temperature=0.8), False),
    "temperatures": (PLAIN, True),
    "softcap, temperatures": (BAPOConfig(final_logit_softcapping=3.0), True),
    "everything": (EVERYTHING, False),
    "all options": (ALL, True),
}
# Kept, undecided and clipped, of either sign; none at a bound, where rounding decides.
RATIOS = [1.0, 1.8, -0.7, 4.0, -0.3, -0.95, -5.0]  # with the sign of the advantage


class Pass:
    """The loss of rows that are sets: what operators take, and what they must make of it.

    For the reference each row holds the values of its set, then -inf.
    """

    def __init__(self, sets, values, config, temperatures=False, bounds=None, own_bounds=False):
        """Behaviour log-probs lie around the log-probs, so that some rows are undecided."""
        g = torch.Generator().manual_seed(3)
        self.sets, self.values, self.config, self.bounds = sets, values, config, bounds
        uniform = torch.rand(4, sets.N, generator=g)
        self.positions, self.counted = positions_of(sets, labels_of(sets)), counted_rows(sets)
        self.positions[self.positions == -100] = NO_TOKEN  # no counted row has that label
        self.weights = uniform[0].double()
        self.temperatures = uniform[1] + 0.5 if temperatures else None
        has_kl = config.kl_loss_coef > 0
        self.is_weights, self.ref = (uniform[2] + 0.5, -3 * uniform[3]) if has_kl else (None, None)
        of_rows = [torch.arange(sets.K)[sets.of_row(n)] for n in range(sets.N)]
        places = pad_sequence(of_rows, True, sets.K) if of_rows else torch.zeros(0, 0)
        self.places = pad(places, (0, 1), value=sets.K).long()
        self.present = torch.isin(torch.arange(sets.N), torch.tensor(sets.present()))
        ratios = torch.tensor(RATIOS).repeat(sets.N)[: sets.N]
        self.old = self.statistics(torch.float64)[0].nan_to_num(0.0, neginf=-20.0).float()
        self.old -= ratios.abs().log()
        self.A = torch.randn(sets.N, generator=g).abs() * ratios.sign()
        self.A[5::9] = 0.0
        # Those of its neighbours would let a row pass where its own do not.
        odd = torch.arange(sets.N) % 2
        self.own = torch.stack([0.75 - 0.3 * odd, 4.5 - 3.0 * odd]) if own_bounds else None

    @property
    def known(self):
        """Arguments of operators."""
        fields = dict(advantages=self.A, old_log_probs=self.old, temperatures=self.temperatures)
        fields |= dict(rollout_is_weights=self.is_weights, ref_log_probs=self.ref)
        if self.own is not None:
            fields |= dict(lower=self.own[0], upper=self.own[1])
        tokens, present = tokens_of(self.sets.N, **fields)
        return self.sets.known | dict(
            labels=self.positions,
            counted=self.counted,
            weights=self.weights,
            tokens=tokens,
            present=present,
            bounds=None if self.bounds is None else torch.tensor(self.bounds),
            options=[*map(float, self.config.options)],
        )

    def rows(self, values):
        return torch.cat([values, values.new_full((1,), -torch.inf)])[self.places]

    def log_probs(self, rows, positions):
        """And the entropies; the last of a row is a token outside of its set."""
        last = rows.shape[-1] - 1
        labels = positions.where(positions != OUTSIDE, last).where(positions != NO_TOKEN, last + 1)
        options = dict(logit_scale=self.config.logit_scale, temperature=self.temperatures)
        if self.temperatures is None:
            options["temperature"] = self.config.temperature
        softcap = self.config.final_logit_softcapping
        log_probs, entropy = reference.log_probs(
            rows, labels, final_logit_softcapping=softcap, **options
        )
        no_value = (positions == OUTSIDE) & (rows == -torch.inf).all(1)
        return log_probs.masked_fill(no_value, -torch.inf), entropy

    def statistics(self, dtype):
        """Log-probs and entropies; 0 of rows that are not counted, LEFT of those without a set."""
        both = torch.stack(self.log_probs(self.rows(self.values.to(dtype)), self.positions))
        return both.where(self.counted, 0.0).where(self.present, LEFT)

    def dlog_probs(self, log_probs, bounds):
        """d loss / d log_prob of every row at these bounds, without its weight."""
        config = replace(self.config, loss_agg_mode="token-sum", entropy_coef=0.0)
        counted = self.counted & self.present
        options = dict(config=config, rollout_is_weights=self.is_weights, ref_log_probs=self.ref)
        options["bounds"] = bounds if config.has_bounds else None
        batch = self.old, self.A, counted
        loss = reference.bapo_loss_from_log_probs(log_probs, *batch, **options).loss
        (gradient,) = torch.autograd.grad(loss, log_probs)
        return gradient.masked_fill(counted & log_probs.isnan(), torch.nan)

    def decisions(self, dtype):
        """(undecided, dlog_probs, dentropy) of every row."""
        log_probs = self.statistics(dtype)[0].double().requires_grad_()
        given = self.bounds if self.own is None else (*self.own,)
        ends = self.config.options.start(), self.config.options.maximum()
        first, last = (self.dlog_probs(log_probs, given or end) for end in ends)
        undecided = ((first != last) & ~first.isnan()).to(torch.uint8)
        dentropy = -self.weights * self.config.entropy_coef * (self.counted & self.present)
        return undecided, self.weights * first, dentropy

    def gradients(self, dtype, rows, dlog_probs, dentropy):
        """Of the values of these rows; LEFT in others."""
        leaf = self.values.to(dtype, copy=True).requires_grad_()
        both = self.log_probs(self.rows(leaf), self.positions)
        incoming = dlog_probs.to(dtype), dentropy.to(dtype)
        (dvalues,) = torch.autograd.grad(both, leaf, incoming)
        dvalues[~self.sets.of_rows(rows)] = LEFT
        for n in rows:
            if dlog_probs[n].isnan():
                dvalues[self.sets.of_row(n)] = torch.nan
            elif dlog_probs[n] == dentropy[n] == 0:
                dvalues[self.sets.of_row(n)] = 0.0
        return dvalues

    def largest_log_p(self):
        rows = self.rows(self.values.double())
        least = rows.where(rows.isfinite(), torch.inf).argmin(-1)
        log_p = self.log_probs(rows, least)[0]
        return max(1.0, largest(log_p[log_p.isfinite()]))


def check(name, got, compute, operand=0.0):
    """``compute(dtype)`` makes the truth, which is returned with what of it is not rounded."""
    same, truth = compute(torch.float32).to(got.dtype), compute(torch.float64)
    here = (truth == LEFT).logical_or(truth == 0)
    assert torch.equal(got[here], truth[here].to(got.dtype)), f"{name}: zeros, or left alone"
    # Rows are compared together, so that float32 is not exact by luck.
    assert_within_budget(name, got[~here], same[~here], truth[~here], operand=operand)
    return truth, here


def results_of(N):
    """What a pass writes about rows."""
    shapes = dict(log_probs=(N,), entropy=(N,), stats=(N, 2))
    return {name: left(*shape, dtype=torch.float64) for name, shape in shapes.items()}


def run_pass(ops, name, known, **given):
    """``row_pass_`` or ``head_sets_pass``; returns the results, and what is ``undecided``."""
    N = known["counted"].numel()
    results, undecided = results_of(N), torch.full((N,), 9, dtype=torch.uint8)
    call(ops, name, known, **given, **results, undecided=undecided)
    return results, undecided


def assert_same_or_nan(some, others):
    for one, other in zip(some, others, strict=True):
        assert_same(one.nan_to_num(9), other.nan_to_num(9))


def check_statistics(ops, case):
    sets, results = case.sets, results_of(case.sets.N)
    call(ops, "row_statistics", case.known, logits=case.values, **results)
    size = case.largest_log_p()
    for index, name in enumerate(("log_probs", "entropy")):
        got = results[name].float()
        check(name, got, lambda dtype, index=index: case.statistics(dtype)[index], operand=size)
    present = sets.present()
    for n, stats in enumerate(results["stats"].tolist()):
        if n not in present:
            assert stats == [LEFT] * 2
        elif not case.counted[n]:
            assert stats == [0.0, 1.0]
        elif len(sets.ids(n)) == 1 and case.values[sets.of_row(n)].isfinite():
            assert stats[1] == 1.0
    return results


def check_pass(ops, case):
    """Both passes, then the gradient of some rows with coefficients that are known by then."""
    sets, values, got = case.sets, case.values, case.values.clone()
    alone = check_statistics(ops, case)
    results, undecided = run_pass(ops, "row_pass_", case.known, logits=got)
    assert_same_or_nan(alone.values(), results.values())
    expected, *coefficients = case.decisions(torch.float64)
    assert undecided.tolist() == expected.tolist()
    # The largest entry of a gradient, whose factor has the error of the log-prob.
    size = case.largest_log_p()
    operand = size * largest(coefficients[0].nan_to_num())

    def check_gradient(name, rows, got, coefficients_of):
        untouched = ~sets.of_rows(rows)
        assert_same_or_nan([got[untouched]], [values[untouched]])
        got[untouched] = LEFT

        def expected(dtype):
            return case.gradients(dtype, rows, *coefficients_of(dtype))

        truth, _ = check(name, got, expected, operand=operand)
        for n in rows:
            # p, whose exponent is a difference, and products; what cancels is about the mean p.
            exact, weight = truth[sets.of_row(n)], case.weights[n] / max(1, len(sets.ids(n)))
            assert_rounded(got[sets.of_row(n)], exact, 2 * size + 8, exact.abs() + weight)

    decided = [n for n in sets.present() if not undecided[n]]
    check_gradient("gradient", decided, got, lambda dtype: case.decisions(dtype)[1:])

    only = case.counted & ((undecided != 0) | (torch.arange(sets.N) % 3 == 0))
    some = [n for n in sets.present() if only[n]]
    dlog_probs, dentropy = coefficients
    for inplace, is_none in ((True, False), (False, not dentropy.any())):
        dvalues = values.clone()
        target = dict(logits=dvalues) if inplace else dict(logits=values, dlogits=dvalues)
        known = case.known | dict(stats=results["stats"], entropy=results["entropy"])
        known |= dict(dlog_probs=dlog_probs, dentropy=None if is_none else dentropy)
        name = "row_gradient_" if inplace else "row_gradient"
        call(ops, name, known, only=only.to(torch.uint8), **target)
        check_gradient("gradient of some", some, dvalues, lambda dtype: coefficients)
    return undecided


def values_of(sets):
    """Logits of every set, and what stands for ids without a column."""
    values = 3 * rand(sets.K, seed=2)
    for _, k, column in sets.entries(range(sets.N)):
        if not math.isfinite(column):
            values[k] = column
    return values


def head_of(sets, dtype, H, margin=0):
    """In memory with this margin, if it is not 0; with a bias, if rows are not aligned."""
    size = (2.5 / max(1, H) ** 0.5) ** 0.5
    hidden = (size * rand(sets.N, H, seed=H)).to(dtype)
    weight = (size * 2 * rand(sets.columns, H, seed=H + 1)).to(dtype)
    if margin:
        hidden, weight = (spread(x, margin)[0] for x in (hidden, weight))
    bias = rand(sets.columns, seed=H + 2) if margin == 1 else None
    return dict(hidden=hidden, weight=weight, bias=bias, margin=margin)


def multiply(ops, sets, head, counted):
    values = left(sets.K)
    call(ops, "multiply_sets", sets.known | head, counted=counted, values=values)
    return values


def check_multiply(ops, sets, head, counted=None):
    counted = counted_rows(sets) if counted is None else counted

    def products(dtype):
        values = left(sets.K, dtype=dtype)
        for n, k, column in sets.entries(counted.nonzero().flatten().tolist()):
            values[k] = column
            if math.isfinite(column):
                values[k] = head["hidden"][n].to(dtype) @ head["weight"][column].to(dtype)
                values[k] += 0.0 if head["bias"] is None else head["bias"][column].to(dtype)
        return values

    check("values", multiply(ops, sets, head, counted), products)


def check_dhidden(ops, sets, head, dtype):
    dvalues, weight = rand(sets.K, seed=6), head["weight"]
    dvalues[sets.of_rows(range(0, sets.N, 4))] = 0.0
    only = torch.arange(sets.N) % 5 != 2
    for flags in (None, only.to(torch.uint8)):
        dhidden, memory = spread(left(*head["hidden"].shape, dtype=dtype), head["margin"] or 8)
        given = dict(dvalues=dvalues, only=flags, dhidden=dhidden)
        call(ops, "sets_dhidden", sets.known, weight=weight, **given)

        def expected(kind, of=torch.clone, flags=flags):
            truth = left(*head["hidden"].shape, dtype=kind)
            for n in range(sets.N):
                if sets.ids(n) and (flags is None or flags[n]):
                    here = [(k, c) for _, k, c in sets.entries([n]) if math.isfinite(c)]
                    rows = weight[[c for _, c in here]].to(kind)
                    truth[n] = of(dvalues[[k for k, _ in here]].to(kind)) @ of(rows)
            return truth

        check_margins(dhidden, memory)
        check_rounded("dhidden", dhidden, expected)


def check_rounded(name, got, compute):
    """Sums in float32, rounded once; ``compute(dtype, of)`` sums what ``of`` makes of operands."""
    truth, here = check(name, got, compute)
    terms = int(compute(torch.float64, torch.ones_like)[~here].max()) if not here.all() else 0
    of = compute(torch.float64, torch.abs)[~here]
    assert_sums(got[~here], truth[~here], terms, of)


ADD_AND_BIAS = (False, False), (False, True), (True, False), (True, True)


def segments_of(sets):
    """The values by their columns: their order, their rows, and where each column begins."""
    row_of_value = torch.arange(sets.N).repeat_interleave(sets.offsets.diff())
    order = sets.token_ids.argsort(stable=True)
    starts = torch.searchsorted(sets.token_ids[order].contiguous(), torch.arange(sets.V + 1).int())
    return dict(order=order, rows=row_of_value[order].int(), segments=starts)


def check_dweight(ops, sets, head, dtype, given=None, flags=ADD_AND_BIAS):
    given, hidden = given or segments_of(sets), head["hidden"]
    dvalues, _ = spread(rand(sets.K, seed=7), 8)
    dvalues[::3] = 0.0
    before = rand(sets.V, hidden.shape[1], seed=8).to(dtype)
    bias_before = rand(sets.V, seed=9)

    def parts(v):
        """Values and rows of a column."""
        begin, end = (min(max(0, s), sets.K) for s in given["segments"][v : v + 2].tolist())
        pairs = torch.stack([given["order"][begin:end], given["rows"][begin:end].long()])
        return pairs[:, ((pairs >= 0) & (pairs < torch.tensor([[sets.K], [sets.N]]))).all(0)]

    columns = [parts(v) for v in range(sets.V)]

    def expected(kind, of=torch.clone, add=False):
        sums = [of(dvalues[k].to(kind)) @ of(hidden[n].to(kind)) for k, n in columns]
        return torch.stack(sums) + (of(before.to(kind)) if add else 0.0)

    def expected_bias(kind):
        return bias_before.to(kind) + torch.stack([dvalues[k].to(kind).sum() for k, _ in columns])

    for add, has_bias in flags:
        given_before = before if add else torch.full_like(before, LEFT)
        dweight, memory = spread(given_before, head["margin"] or 8)
        dbias = bias_before.clone() if has_bias else None
        outputs = dict(dweight=dweight, dbias=dbias)
        call(ops, "sets_dweight", given, dvalues=dvalues, hidden=hidden, add=add, **outputs)
        check_margins(dweight, memory)
        check_rounded("dweight", dweight, lambda *of, add=add: expected(*of, add=add))
        if has_bias:
            check("dbias", dbias, expected_bias)


def check_head_pass(ops, sets, head, config, temperatures=False):
    """The bits of the three operators that it does the work of."""
    values = multiply(ops, sets, head, counted_rows(sets))
    case, dvalues, got = Pass(sets, values, config, temperatures), values.clone(), left(sets.K)
    case = case.known | head
    expected, undecided = run_pass(ops, "row_pass_", case, logits=dvalues)
    dhidden, expected_dhidden = (torch.full_like(head["hidden"], LEFT) for _ in "12")
    only = (undecided == 0).to(torch.uint8)
    call(ops, "sets_dhidden", case, dvalues=dvalues, only=only, dhidden=expected_dhidden)
    results, found = run_pass(ops, "head_sets_pass", case, values=got, dhidden=dhidden)
    assert_same_or_nan(
        [*results.values(), got, dhidden, found],
        [*expected.values(), dvalues, expected_dhidden, undecided],
    )
    return undecided


def check_broken(ops, which, at, value, overlap=False):
    """Rows that break a rule are NaN, and no other; nothing is written outside of a set."""
    sets = random_sets((4, 0, 9, 5, 40), V=60)
    values = getattr(sets, which)
    values[at] = values[at - 1] if value is None else value
    check_find_labels(ops, sets, labels_of(sets))
    case, head = Pass(sets, values_of(sets), ALL, True), head_of(sets, torch.bfloat16, 72)
    results = check_statistics(ops, case)
    assert results["log_probs"][case.counted].isnan().any()
    check_dhidden(ops, sets, head, torch.float32)
    if not overlap:
        check_pass(ops, case)
        check_move(ops, sets, torch.bfloat16)
        check_multiply(ops, sets, head)
        check_head_pass(ops, sets, head, ALL, True)


# Those from 512 on are shared among blocks, in pieces of 256 of which the last has the rest.
LONG = (511, 512, 767, 1_100)


class Sizes(NamedTuple):
    """Of sets and of what else the tests take."""

    rows: tuple = SIZES
    of_head: tuple = (0, 1, 2, 31, 32, 33, 5, 0, 70, 130, 64, 3, 7, 4)  # products are slow here
    long: tuple = LONG
    whole: tuple = (9_001, 8_192, 8_200)  # those from 8,192 on: among the warps of a block
    vocab: int = 4_300
    H: int = 520  # more than a block adds of parts
    flags_of_no_row: tuple = ADD_AND_BIAS


# Elements of a hidden state, and the margin of its memory: several slices of a row, and a part of a
# vector.
SHORT = (72, 0), (65, 1), (3, 1)
of_short_heads = pytest.mark.parametrize(
    "head", [(of, *x) for of in DTYPES for x in SHORT], ids=str
)
of_heads = pytest.mark.parametrize(
    "head", [(of, *x) for of in DTYPES for x in (*SHORT, (1_104, 8))], ids=str
)


def test_positions_of_labels(ops):
    check_find_labels(ops, random_sets(), labels_of(random_sets()))
    sets = random_sets([k % 6 for k in range(150)], V=8)
    check_find_labels(ops, sets, (7 * torch.arange(150)) % 12 - 2)
    sets = random_sets((4, 0, 9, 40), V=60)
    check_find_labels(ops, sets, torch.arange(-100, 62).repeat(4, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", [None, (0, 300), (400, 300), (1_000, 300)])
def test_sets_of_logits(ops, dtype, shard):
    check_move(ops, random_sets(ops.sizes.rows, shard=shard), dtype)


@pytest.mark.parametrize(
    ("bounds", "options"),
    [*product([None], OPTIONS), *product([(0.65, 1.4)], ["plain", "all options"])],
)
def test_passes_over_sets(ops, options, bounds):
    sets = random_sets(ops.sizes.rows)
    case = Pass(sets, values_of(sets), *OPTIONS[options], bounds)
    for ops.seed in SEEDS:
        assert check_pass(ops, case).sum() == (4 if bounds is None else 0)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize(
    ("config", "own_bounds"), [(EVERYTHING, False), (OF_LOSS, True)], ids=["everything", "loss"]
)
def test_surrogates(ops, surrogate, config, own_bounds):
    sets, dual_clip = random_sets(ops.sizes.rows), 3.0 if surrogate == "clip" else None
    config = replace(config, surrogate=surrogate, clip_ratio_c=dual_clip)
    case = Pass(sets, values_of(sets), config, own_bounds=own_bounds)
    assert check_pass(ops, case).any() == (surrogate != "sapo" and not own_bounds)


@pytest.mark.parametrize("name", BROKEN_IDS)
def test_broken_ids(ops, name):
    check_broken(ops, "token_ids", *BROKEN_IDS[name])


@pytest.mark.parametrize("name", BROKEN_OFFSETS)
def test_broken_offsets(ops, name):
    check_broken(ops, "offsets", *BROKEN_OFFSETS[name], overlap=name == "falling")


@pytest.mark.parametrize("options", OPTIONS)
def test_sets_in_shards(ops, options):
    """An id of another rank is forbidden here, and has no gradient; others have that of all."""
    whole = random_sets(ops.sizes.rows)
    shard = whole._replace(shard=(400, 300))
    values = values_of(whole)
    here = values_of(shard).isfinite()
    parts = torch.where(here, values, -torch.inf)
    check_statistics(ops, Pass(shard, parts, *OPTIONS[options]))

    case = Pass(whole, values, *OPTIONS[options])
    known = case.known | check_statistics(ops, case)
    known |= zip(("dlog_probs", "dentropy"), case.decisions(torch.float64)[1:], strict=True)
    gradients = [left(whole.K) for _ in "12"]
    for logits, dlogits in zip((values, parts), gradients, strict=True):
        call(ops, "row_gradient", known, logits=logits, dlogits=dlogits)
    finite = torch.stack(gradients).isfinite().all(0)
    assert finite[here].any()
    expected = torch.where(here, gradients[0], 0.0)
    assert_same(gradients[1][finite], expected[finite])


@pytest.mark.parametrize("size", [2, 33, 1_100])
@pytest.mark.parametrize("gap", [6.9, 16.0])
def test_gradient_at_a_likely_label(ops, size, gap):
    """1 - p keeps its digits."""
    values = torch.full((size,), -torch.inf)
    values[size // 2 - 1], values[size // 2] = 0.0, gap
    case = Pass(Sets(torch.arange(size).int(), torch.tensor([0, size]), size), values, PLAIN)
    case.old, case.A, case.weights = None, torch.ones(1), torch.ones(1).double()
    case.positions, got = torch.tensor([size // 2]), values.clone()
    run_pass(ops, "row_pass_", case.known, logits=got)
    expected = values.double().softmax(0)
    expected[size // 2] = -expected[size // 2 - 1]
    assert_rounded(got, expected, gap + 4)  # exponent, exp, sum, quotient, and the last one


def test_sets_of_a_whole_vocabulary(ops):
    """Sums of many terms are as accurate as those of few."""
    sets = random_sets((3, *ops.sizes.whole))
    case = Pass(sets, values_of(sets), BAPOConfig(entropy_coef=0.01))
    for ops.seed in SEEDS:
        assert check_pass(ops, case)[1], "its gradient is the work of another operator"
    check_move(ops, sets, torch.bfloat16)
    broken = sets._replace(offsets=sets.offsets.clone())
    broken.offsets[1] = -3
    check_statistics(ops, Pass(broken, case.values, PLAIN))
    head = head_of(sets, torch.float32, 8)
    check_dhidden(ops, sets, head | dict(weight=head["weight"].abs()), torch.float32)


@of_heads
def test_products_with_the_head(ops, head):
    for ops.seed, shard in product(SEEDS, (None, (40, 50))):
        sets = random_sets(ops.sizes.of_head, shard=shard)
        operands = head_of(sets, *head)
        check_multiply(ops, sets, operands)
        for kind in {head[0], torch.float32}:
            check_dhidden(ops, sets, operands, kind)


@of_heads
def test_gradient_of_the_head_from_sets(ops, head):
    sets = random_sets(ops.sizes.of_head)
    for ops.seed, kind in product(SEEDS, {head[0], torch.float32}):
        check_dweight(ops, sets, head_of(sets, *head), kind)


def test_columns_most_of_which_are_in_no_set(ops):
    """Of those of a block several are in one: these lie 4,096 apart."""
    ids = torch.arange(0, ops.sizes.vocab - 1, 64)
    sets = Sets(torch.cat([ids, ids + 1, ids]).int(), len(ids) * torch.arange(4), ops.sizes.vocab)
    check_dweight(
        ops, sets, head_of(sets, torch.float32, 8), torch.float32, flags=ADD_AND_BIAS[1::2]
    )


@of_short_heads
def test_long_sets_and_popular_ids(ops, head):
    sets, popular = random_sets((3, *ops.sizes.long, 0, 2)), popular_ids(LONG)
    operands = head_of(sets, *head)
    for ops.seed in SEEDS:
        check_multiply(ops, sets, operands)
        check_head_pass(ops, sets, operands, PLAIN)
        check_dhidden(ops, sets, operands, head[0])
        check_dweight(ops, popular, head_of(popular, *head), head[0])


def test_segments_that_break_their_rules(ops):
    sets = random_sets(ops.sizes.of_head)
    given = segments_of(sets)
    given["order"][[3, 40, 50]] = torch.tensor([-1, sets.K, sets.K + 9])
    given["rows"][5:8], given["rows"][20:24], given["rows"][60:64] = -1, sets.N, 2**31 - 1
    given["segments"][[0, 7, -1]] = torch.tensor([-5, 1 << 40, sets.K + 9])
    head, flags = head_of(sets, torch.float32, 72), ops.sizes.flags_of_no_row
    check_dweight(ops, sets, head, torch.float32, given, flags)


@of_heads
def test_the_pass_from_hidden_states(ops, head):
    sets = random_sets(ops.sizes.of_head)
    for ops.seed, options in product(SEEDS, ((PLAIN, False), (ALL, True))):
        assert check_head_pass(ops, sets, head_of(sets, *head), *options).any()


@pytest.mark.parametrize(("is_whole", "H"), [(False, 520), (True, 3)])
def test_a_row_of_sets_alone_has_the_bits_of_a_batch(ops, is_whole, H):
    sizes = (ops.sizes.whole[0],) if is_whole else ops.sizes.long
    sets = random_sets((3, 0, *sizes, 2))
    head = head_of(sets, torch.bfloat16, H)

    def everything(sets, rows):
        """Values, their statistics, and gradients of hidden states, as if from these values."""
        of_rows = head | dict(hidden=head["hidden"][rows])
        counted, dhidden = torch.ones(sets.N, dtype=torch.bool), left(sets.N, H)
        values, results = multiply(ops, sets, of_rows, counted), results_of(sets.N)
        known = sets.known | dict(counted=counted, labels=torch.zeros(sets.N).long())
        call(ops, "row_statistics", known, logits=values, **results)
        call(ops, "sets_dhidden", known | of_rows, dvalues=values, dhidden=dhidden)
        return values, *results.values(), dhidden

    together = everything(sets, slice(None))
    assert_same_or_nan(together, everything(sets, slice(None)))
    for n in range(sets.N):
        ids = sets.token_ids[sets.of_row(n)].clone()
        alone = Sets(ids, torch.tensor([0, len(ids)]), sets.V)
        values, *others = everything(alone, slice(n, n + 1))
        assert_same(values, together[0][sets.of_row(n)])
        for one, all_rows in zip(others, together[1:], strict=True):
            assert_same(one[0], all_rows[n])


def test_a_column_alone_has_the_bits_of_a_batch(ops):
    sets, H = popular_ids(LONG), ops.sizes.H
    hidden, dvalues = head_of(sets, torch.float32, H)["hidden"], rand(sets.K, seed=8)
    order, rows, segments = segments_of(sets).values()

    def gradient(order, rows, segments):
        dweight, dbias = torch.zeros(len(segments) - 1, H), torch.zeros(len(segments) - 1)
        known = dict(order=torch.arange(len(order)), rows=rows, segments=segments, add=False)
        given = dict(dvalues=dvalues[order], hidden=hidden, dweight=dweight, dbias=dbias)
        call(ops, "sets_dweight", known, **given)
        return torch.cat([dweight, dbias[:, None]], 1)

    whole = gradient(order, rows, segments)
    others_elsewhere = gradient(order, rows, segments[1:].clone())
    assert_same(others_elsewhere, whole[1:])
    for v in range(sets.V):
        begin, end = segments[v : v + 2].tolist()
        given = order[begin:end], rows[begin:end].clone(), torch.tensor([0, end - begin])
        assert_same(gradient(*given)[0], whole[v])
        terms = dvalues[order[begin:end], None].double() * hidden[rows[begin:end].long()]
        assert_sums(whole[v, :-1], terms.sum(0), end - begin, of=terms.abs().sum(0))


def test_no_rows_no_sets_no_elements(ops):
    sets = Sets(torch.zeros(0).int(), torch.zeros(1).long(), 10)
    for some in (sets, sets._replace(offsets=torch.zeros(4).long())):
        head = head_of(some, torch.float32, 8)
        check_move(ops, some, torch.float32)
        check_pass(ops, Pass(some, torch.zeros(0), PLAIN))
        check_head_pass(ops, some, head, PLAIN)
        check_dweight(ops, some, head, torch.float32)
    sets = random_sets((2, 3), V=6)
    check_dweight(ops, sets, head_of(sets, torch.float32, 0), torch.float32)
    given = segments_of(sets)  # none of whose columns is in this shard
    given |= dict(dvalues=torch.zeros(sets.K), hidden=torch.zeros(sets.N, 8), add=False)
    given |= dict(segments=given["segments"][:1], dweight=torch.zeros(0, 8), dbias=torch.zeros(0))
    call(ops, "sets_dweight", given)
