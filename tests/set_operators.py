"""The operators on sampling masks: cases, what each must make of them in float64, and the checks.

``ops`` has the operators of ``operators.SCHEMAS`` for CPU tensors.
"""

import math
from typing import NamedTuple

import torch
from helpers import assert_within_budget
from torch import Tensor

from bapo_kernels.config import SURROGATES, BAPOConfig
from bapo_kernels.core.operators import FIELDS
from bapo_kernels.tools.budget import largest

OPERATORS = {
    "find_labels",
    "gather_sets",
    "multiply_sets",
    "scatter_sets",
    "head_sets_pass",
    "sets_dhidden",
    "sets_dweight",
}
LEFT = 777.0  # what is in an output before; where it stays, nothing was written
OUTSIDE, NO_TOKEN = -1, -2


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
    def csr(self):
        return self.token_ids, self.offsets

    def place(self):
        """The argument ``shard`` of the operators."""
        return None if self.shard is None else torch.tensor([self.shard[0], self.V])

    def of_row(self, n):
        """(begin, end), or None where the offsets break their rule."""
        begin, end = self.offsets[n : n + 2].tolist()
        whole = self.offsets[0] == 0 and self.offsets[-1] == self.K
        return (begin, end) if whole and 0 <= begin <= end <= self.K else None

    def absent(self, n):
        part = self.of_row(n)
        return part is not None and part[0] == part[1]

    def column(self, begin, k):
        """The column here of an id; what stands for its logit if it has none."""
        ids = self.token_ids
        if not 0 <= ids[k] < self.V or (k > begin and ids[k - 1] >= ids[k]):
            return math.nan
        column = int(ids[k]) - (self.shard[0] if self.shard else 0)
        return column if 0 <= column < self.columns else -math.inf

    def entries(self, n):
        """(k, column) of a row."""
        begin, end = self.of_row(n) or (0, 0)
        return [(k, self.column(begin, k)) for k in range(begin, end)]


SIZES = (0, 1, 2, 31, 32, 33, 5, 600, 0, 1_025, 1_024, 64, 3, 1_300, 7)
V = 1_300


def random_sets(sizes=SIZES, V=V, shard=None):
    g = torch.Generator().manual_seed(sum(sizes))
    ids = [torch.randperm(V, generator=g)[:size].sort().values for size in sizes]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return Sets(torch.cat(ids).int(), offsets, V, shard)


def head_sets():
    """Fewer ids, as the products with a head are slow here."""
    return random_sets((0, 1, 2, 31, 32, 33, 5, 0, 70, 130, 64, 3, 7, 4), V=130)


# Those from 512 on are shared among blocks, in pieces of 256 of which the last has the rest.
LONG = (511, 512, 767, 1_100)


def long_sets():
    return random_sets((3, *LONG, 0, 2), V=1_100)


def popular_ids():
    """An id in as many sets."""
    ids = (torch.arange(max(LONG))[:, None] < torch.tensor(LONG)).nonzero()
    offsets = torch.searchsorted(ids[:, 0].contiguous(), torch.arange(max(LONG) + 1))
    return Sets(ids[:, 1].int(), offsets, V=len(LONG) + 1)


def broken_sets():
    """By name: ids and offsets that break their rules, one at a time."""
    sets = random_sets((4, 0, 9, 5, 40), V=60)
    broken = {}
    for name, at, value in (
        ("an id too large", 6, 60),
        ("a huge id", 6, 2**31 - 1),
        ("a negative id", 7, -1),
        ("an id too large at the end", 57, 60),
        ("a repeated id", 6, sets.token_ids[5].item()),
        ("descending ids", 6, 0),
    ):
        ids = sets.token_ids.clone()
        ids[at] = value
        broken[name] = sets._replace(token_ids=ids)
    for name, at, value in (
        ("a first offset", 0, 1),
        ("a negative offset", 2, -3),
        ("offsets that fall", 3, 1),
        ("an offset too large", 3, 1 << 40),
        ("a last offset too small", 5, 57),
        ("a last offset too large", 5, 59),
    ):
        offsets = sets.offsets.clone()
        offsets[at] = value
        broken[name] = sets._replace(offsets=offsets)
    return broken


def labels_of(sets):
    """Most of them in their set; some outside of it, if it is not whole, and some no token."""
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(0, sets.V, (sets.N,), generator=g)
    for n in range(sets.N):
        begin, end = sets.of_row(n) or (0, 0)
        if n % 5 == 4:
            ids = set(sets.token_ids[begin:end].tolist())
            labels[n] = min(set(range(sets.V)) - ids, default=0)
        elif begin < end:
            labels[n] = sets.token_ids[(begin, end - 1, (begin + end) // 2)[n % 3]]
    labels[10::14] = -100
    labels[14::20] = sets.V
    return labels


def positions_of(sets, labels):
    positions = []
    for n, label in enumerate(labels.tolist()):
        if sets.of_row(n) is None or not 0 <= label < sets.V:
            positions.append(NO_TOKEN)
            continue
        begin, end = sets.of_row(n)
        ids = sets.token_ids[begin:end].tolist()
        positions.append(ids.index(label) if label in ids else OUTSIDE)
    return torch.tensor(positions, dtype=torch.int64)


def counted_rows(sets, every=4):
    counted = torch.ones(sets.N, dtype=torch.bool)
    counted[every - 1 :: every] = False
    return counted


def check_find_labels(ops, sets, labels):
    positions = torch.full((sets.N,), 999)
    ops.find_labels(labels, *sets.csr, sets.V, positions)
    for n, (got, expected) in enumerate(zip(positions, positions_of(sets, labels), strict=True)):
        columns = [column for _, column in sets.entries(n)]
        unordered = any(map(math.isnan, columns))  # a row of NaN, whose label may not be found
        if sets.absent(n):
            assert got == 999, "left alone"
        else:
            assert got == expected or (unordered and got == OUTSIDE)


def spread(rows, gap=3):
    """The same rows in other memory, which need not be aligned; NaN between them."""
    memory = torch.full((*rows.shape[:-1], rows.shape[-1] + gap), torch.nan, dtype=rows.dtype)
    view = memory[..., 1 : rows.shape[-1] + 1]
    return view.copy_(rows), memory


def check_move(ops, sets, dtype):
    """From logits to values, and back into rows of zeros; in batches, with other rows between."""
    g = torch.Generator().manual_seed(1)
    counted = counted_rows(sets)
    batches = 3 if sets.N % 3 == 0 else 1
    shape = batches, sets.N // batches + 1, sets.columns
    logits = spread(torch.randn(shape, generator=g).to(dtype))[0][:, :-1]
    values = torch.full((sets.K,), LEFT)
    ops.gather_sets(logits, counted, *sets.csr, sets.place(), values)
    dvalues = torch.randn(sets.K, generator=g)
    whole, memory = spread(torch.zeros(shape, dtype=dtype))
    dlogits = whole[:, :-1]
    ops.scatter_sets(dvalues, counted, *sets.csr, sets.place(), dlogits)

    expected, gradient = torch.full((sets.K,), LEFT), torch.zeros_like(logits).flatten(0, 1)
    assert not whole[:, -1].any()
    rows = logits.flatten(0, 1)
    for n in counted.nonzero().flatten().tolist():
        for k, column in sets.entries(n):
            if math.isfinite(column):
                expected[k] = rows[n, column]
                gradient[n, column] = dvalues[k].to(dtype)
            else:
                expected[k] = column
    assert torch.equal(values.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(dlogits.flatten(0, 1), gradient)
    assert memory[..., [0, -1, -2]].isnan().all(), "outside of the rows"


class Options(NamedTuple):
    """Of the loss, and what is done to logits."""

    softcap: float | None = None
    temperature: float = 1.0
    logit_scale: float = 1.0
    per_row: bool = False  # temperatures, KL term and importance weights of every row
    entropy_coef: float = 0.0
    clip_ratio_c: float | None = None
    surrogate: int = SURROGATES["clip"]

    def numbers(self):
        """As the operators take them."""
        options = BAPOConfig().options._replace(
            surrogate=float(self.surrogate),
            clip_ratio_c=self.clip_ratio_c or math.inf,
            kl_loss_coef=0.1 if self.per_row else 0.0,
            entropy_coef=self.entropy_coef,
            temperature=self.temperature,
            logit_scale=self.logit_scale,
            softcap=self.softcap or math.inf,
        )
        return [*GRIDS, *options[len(GRIDS) :]]


PLAIN = Options()
ALL = Options(9.0, 0.8, 1.1, True, 0.01, 3.0)
OPTIONS = {"plain": PLAIN, "softcap": Options(9.0, 0.8), "all options": ALL}
GRIDS = [0.6, 0.9, 0.05, 1.2, 3.0, 0.1]  # start, maximum, step of the lower and of the upper grid


class Tokens(NamedTuple):
    """What the loss of a row takes; the values of its set, and the position of its label."""

    values: Tensor
    positions: Tensor
    counted: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    is_weights: Tensor | None
    ref_log_probs: Tensor | None
    temperatures: Tensor | None

    def fields(self):
        """The tensor of fields, NaN where they are absent, and the bits of those present."""
        given = {
            "advantages": self.advantages,
            "old_log_probs": self.old_log_probs,
            "rollout_is_weights": self.is_weights,
            "ref_log_probs": self.ref_log_probs,
            "temperatures": self.temperatures,
        }
        present = [name for name, values in given.items() if values is not None]
        tokens = torch.full((len(FIELDS), self.counted.numel()), torch.nan)
        for name in present:
            tokens[FIELDS.index(name)] = given[name]
        return tokens, sum(1 << FIELDS.index(name) for name in present)


def tokens_of(sets, values, options):
    """Behaviour log-probs lie around the log-probs, so that some rows are undecided."""
    g = torch.Generator().manual_seed(3)
    uniform = torch.rand(sets.N, 3, generator=g)
    tokens = Tokens(
        values,
        positions_of(sets, labels_of(sets)),
        counted_rows(sets),
        torch.zeros(sets.N),
        torch.randn(sets.N, generator=g),
        torch.rand(sets.N, generator=g, dtype=torch.float64),
        uniform[:, 0] + 0.5 if options.per_row else None,
        -3 * uniform[:, 1] if options.per_row else None,
        uniform[:, 2] + 0.5 if options.per_row else None,
    )
    log_probs = statistics(sets, tokens, options, torch.float64)[0]
    # Kept, undecided and clipped, of either sign; none at a bound, where rounding decides.
    ratios = torch.tensor([1.0, 1.8, 0.7, 4.0, 0.3]).repeat(sets.N)[: sets.N]
    old = log_probs.nan_to_num(0.0, neginf=-20.0).float() - ratios.log()
    advantages = tokens.advantages.abs() * torch.where(ratios < 1, -1, 1)
    advantages[5::9] = 0.0
    return tokens._replace(old_log_probs=old, advantages=advantages)


class Row(NamedTuple):
    """The distribution over one set, in one dtype."""

    log_p: Tensor
    slope: Tensor  # d x/d z
    log_prob: Tensor
    entropy: Tensor
    position: int

    @classmethod
    def of(cls, z, position, T, scale, softcap, dtype):
        z = z.to(dtype)
        capped = torch.tanh(z * scale / (softcap or 1.0))
        forbidden = z == -torch.inf
        x = z * scale / T if softcap is None else softcap * capped / T
        x = torch.where(forbidden, -torch.inf, x)
        slope = scale / T * (1 - capped**2 if softcap else torch.ones_like(z))
        log_p = x.log_softmax(0)
        terms = log_p.exp() * log_p
        # Of a row whose values are all -inf, there is no distribution.
        entropy = -torch.where(forbidden & ~forbidden.all(), 0.0, terms).sum()
        if 0 <= position < z.numel():
            log_prob = log_p[position]
        else:
            outside = position == OUTSIDE and not z.isnan().any()
            log_prob = torch.tensor(-torch.inf if outside else torch.nan, dtype=dtype)
        if z.numel() == 0:
            entropy = torch.tensor(torch.nan, dtype=dtype)
        return cls(log_p, torch.where(forbidden, 0.0, slope), log_prob, entropy, position)

    def gradient(self, dlog_prob, dentropy):
        if dlog_prob == 0 and dentropy == 0:
            return torch.zeros_like(self.log_p)
        p = self.log_p.exp()
        label = torch.zeros_like(p)
        if 0 <= self.position < p.numel():
            label[self.position] = 1
        dx = dlog_prob * (label - p)
        if dentropy != 0:
            of_entropy = -p * (self.log_p + self.entropy)
            dx += dentropy * torch.where(self.log_p == -torch.inf, 0.0, of_entropy)
        return dx * self.slope


def row_of(sets, tokens, options, n, dtype):
    begin, end = sets.of_row(n) or (0, 0)
    T, temperatures = options.temperature, tokens.temperatures
    T = T if temperatures is None else temperatures[n].to(dtype)
    position = tokens.positions[n].item() if sets.of_row(n) else NO_TOKEN
    return Row.of(
        tokens.values[begin:end], position, T, options.logit_scale, options.softcap, dtype
    )


def statistics(sets, tokens, options, dtype):
    """Log-probs and entropies; 0 of rows that are not counted, LEFT of those without a set."""
    log_probs, entropy = torch.full((2, sets.N), LEFT, dtype=dtype)
    for n in range(sets.N):
        if sets.absent(n):
            continue
        log_probs[n] = entropy[n] = 0.0
        if tokens.counted[n]:
            row = row_of(sets, tokens, options, n, dtype)
            log_probs[n], entropy[n] = row.log_prob, row.entropy
    return log_probs, entropy


def dlog_prob(tokens, options, n, log_prob, bounds):
    """d loss / d log_prob of a token, without its weight."""
    A, old = tokens.advantages[n].double(), tokens.old_log_probs[n].double()
    delta = log_prob.double() - old
    r = delta.clamp(-20, 20).exp()
    high = bounds[1] if A > 0 else options.clip_ratio_c or math.inf
    low = bounds[0] if A < 0 else -math.inf
    passes = A != 0 and abs(delta) <= 20 and low <= r <= high
    g = -r * A if passes or r.isnan() else torch.zeros(())
    if not options.per_row:
        return g
    d = tokens.ref_log_probs[n].double() - log_prob.double()
    inside = abs(d) < 20 and torch.expm1(d) - d <= 10
    return g * tokens.is_weights[n].double() + 0.1 * (-torch.expm1(d) if inside else 0.0)


def decisions(sets, tokens, options, dtype, bounds=None):
    """(undecided, dlog_probs, dentropy) of every row."""
    ends = (bounds, bounds) if bounds else ((GRIDS[0], GRIDS[3]), (GRIDS[1], GRIDS[4]))
    undecided = torch.zeros(sets.N, dtype=torch.uint8)
    dlog_probs, dentropy = torch.zeros(2, sets.N, dtype=torch.float64)
    log_probs, _ = statistics(sets, tokens, options, dtype)
    for n in range(sets.N):
        if sets.absent(n) or not tokens.counted[n]:
            continue
        first, last = (dlog_prob(tokens, options, n, log_probs[n], end) for end in ends)
        undecided[n] = bool(first != last) and not first.isnan()
        dlog_probs[n] = tokens.weights[n] * first
        dentropy[n] = -tokens.weights[n] * options.entropy_coef
    return undecided, dlog_probs, dentropy


def gradients(sets, tokens, options, dtype, rows, dlog_probs, dentropy):
    """Of the values of these rows; LEFT in others."""
    dvalues = torch.full((sets.K,), LEFT, dtype=dtype)
    for n in rows:
        begin, end = sets.of_row(n) or (0, 0)
        row = row_of(sets, tokens, options, n, dtype)
        dvalues[begin:end] = row.gradient(dlog_probs[n].to(dtype), dentropy[n].to(dtype))
    return dvalues


def check(name, got, compute, operand=0.0):
    """``got`` is in float32; ``compute(dtype)`` makes the truth."""
    same, truth = compute(torch.float32), compute(torch.float64)
    here = (truth == LEFT).logical_or(truth == 0)
    assert torch.equal(got[here].double(), truth[here]), f"{name}: zeros, or what is left alone"
    # Rows are compared together, so that float32 is not exact by luck.
    assert_within_budget(name, got[~here], same[~here], truth[~here], operand=operand)


class Outputs(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, N):
        return cls(*(torch.full(shape, LEFT).double() for shape in ((N,), (N,), (N, 2))))

    def check(self, sets, tokens, options):
        size = largest_log_p(sets, tokens, options)
        for index, name in enumerate(("log_probs", "entropy")):
            got = getattr(self, name).float()
            check(
                name,
                got,
                lambda dtype, index=index: statistics(sets, tokens, options, dtype)[index],
                operand=size,
            )
        skipped = [n for n in range(sets.N) if not tokens.counted[n] and not sets.absent(n)]
        assert self.stats[skipped].tolist() == [[0.0, 1.0]] * len(skipped)
        absent = [n for n in range(sets.N) if sets.absent(n)]
        assert (self.stats[absent] == LEFT).all()


def largest_log_p(sets, tokens, options):
    largest = 1.0
    for n in range(sets.N):
        log_p = row_of(sets, tokens, options, n, torch.float64).log_p
        log_p = log_p[log_p.isfinite()]
        if log_p.numel():
            largest = max(largest, log_p.abs().max().item())
    return largest


def run_pass(ops, name, sets, tokens, options, inputs, outputs, bounds=None, more=()):
    """``row_pass_`` or ``head_sets_pass``; returns ``undecided``."""
    undecided = torch.full((sets.N,), 9, dtype=torch.uint8)
    getattr(ops, name)(
        *inputs,
        sets.offsets,
        tokens.positions,
        tokens.counted,
        tokens.weights,
        *tokens.fields(),
        None if bounds is None else torch.tensor(bounds),
        options.numbers(),
        *outputs,
        undecided,
        *more,
    )
    return undecided


def check_statistics(ops, sets, values, options):
    tokens, outputs = tokens_of(sets, values, options), Outputs.empty(sets.N)
    arguments = tokens.positions, tokens.counted, *tokens.fields(), options.numbers()
    ops.row_statistics(values, sets.offsets, *arguments, *outputs)
    outputs.check(sets, tokens, options)
    return tokens, outputs


def check_pass(ops, sets, values, options, bounds=None):
    """Both passes, then the gradient of some rows with coefficients that are known by then."""
    tokens, alone = check_statistics(ops, sets, values, options)
    outputs, got = Outputs.empty(sets.N), values.clone()
    undecided = run_pass(ops, "row_pass_", sets, tokens, options, (got,), outputs, bounds)
    for one, both in zip(alone, outputs, strict=True):
        assert torch.equal(one.nan_to_num(9), both.nan_to_num(9))
    expected, *coefficients = decisions(sets, tokens, options, torch.float64, bounds)
    assert undecided.tolist() == expected.tolist()
    present = [n for n in range(sets.N) if not sets.absent(n)]
    decided = [n for n in present if not undecided[n]]
    size = largest_log_p(sets, tokens, options)
    # The largest entry of a gradient, whose factor has the error of the log-prob.
    operand = size * largest(coefficients[0].nan_to_num())

    def check_gradient(name, rows, got, coefficients_of):
        untouched = ~values_of_rows(sets, rows)
        assert torch.equal(got[untouched].nan_to_num(9), values[untouched].nan_to_num(9)), name
        got[untouched] = LEFT

        def expected(dtype):
            return gradients(sets, tokens, options, dtype, rows, *coefficients_of(dtype))

        check(name, got, expected, operand=operand)

    def decided_coefficients(dtype):
        return decisions(sets, tokens, options, dtype, bounds)[1:]

    check_gradient("gradient", decided, got, decided_coefficients)

    only = tokens.counted & ((undecided != 0) | (torch.arange(sets.N) % 3 == 0))
    some = [n for n in present if only[n]]
    for inplace in (True, False):
        dvalues = values.clone()
        arguments = (
            sets.offsets,
            tokens.positions,
            outputs.stats,
            outputs.entropy,
            *coefficients,
            only.to(torch.uint8),
            *tokens.fields(),
            options.numbers(),
        )
        if inplace:
            ops.row_gradient_(dvalues, *arguments)
        else:
            ops.row_gradient(values, *arguments, dvalues)
        check_gradient("gradient of some", some, dvalues, lambda dtype: coefficients)
    return undecided


def values_of_rows(sets, rows):
    """Which values are of these rows."""
    mask = torch.zeros(sets.K, dtype=torch.bool)
    for n in rows:
        begin, end = sets.of_row(n) or (0, 0)
        mask[begin:end] = True
    return mask


def values_of(sets):
    """Logits of every set, and what stands for ids without a column."""
    g = torch.Generator().manual_seed(2)
    values = 3 * torch.randn(sets.K, generator=g)
    for n in range(sets.N):
        for k, column in sets.entries(n):
            if not math.isfinite(column):
                values[k] = column
    return values


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def head_of(sets, H, dtype, shift):
    """With ``shift``, no row starts at a multiple of 16 bytes, and NaN lies between rows."""
    g = torch.Generator().manual_seed(H)
    size = (2.5 / max(1, H) ** 0.5) ** 0.5
    hidden = (size * torch.randn(sets.N, H, generator=g)).to(dtype)
    weight = (size * 2 * torch.randn(sets.columns, H, generator=g)).to(dtype)
    if shift:
        hidden, weight = spread(hidden)[0], spread(weight)[0]
    return Head(hidden, weight, torch.randn(sets.columns, generator=g) if shift else None)


def products(sets, head, counted, dtype):
    values = torch.full((sets.K,), LEFT, dtype=dtype)
    for n in counted.nonzero().flatten().tolist():
        for k, column in sets.entries(n):
            if math.isfinite(column):
                product = head.hidden[n].to(dtype) @ head.weight[column].to(dtype)
                values[k] = product + (0.0 if head.bias is None else head.bias[column].to(dtype))
            else:
                values[k] = column
    return values


def check_multiply(ops, sets, head):
    counted = counted_rows(sets)
    values = torch.full((sets.K,), LEFT)
    ops.multiply_sets(*head, counted, *sets.csr, sets.place(), values)
    check("values", values, lambda dtype: products(sets, head, counted, dtype))
    return values


def check_dhidden(ops, sets, head, dtype):
    g = torch.Generator().manual_seed(6)
    dvalues = torch.randn(sets.K, generator=g)
    for n in range(0, sets.N, 4):
        begin, end = sets.of_row(n) or (0, 0)
        dvalues[begin:end] = 0.0
    only = torch.arange(sets.N) % 5 != 2
    for flags in (None, only.to(torch.uint8)):
        dhidden, memory = spread(torch.full(head.hidden.shape, LEFT, dtype=dtype))
        ops.sets_dhidden(dvalues, head.weight, *sets.csr, sets.place(), flags, dhidden)

        def expected(kind, flags=flags):
            truth = torch.full(head.hidden.shape, LEFT, dtype=kind)
            for n in range(sets.N):
                if sets.absent(n) or (flags is not None and not flags[n]):
                    continue
                here = [(k, c) for k, c in sets.entries(n) if math.isfinite(c)]
                rows = head.weight[[c for _, c in here]].to(kind)
                truth[n] = dvalues[[k for k, _ in here]].to(kind) @ rows
            return truth

        # One rounding at the end, after sums in float32.
        assert memory[..., [0, -1, -2]].isnan().all(), "outside of the rows"
        check_rounded("dhidden", dhidden, expected)


def check_rounded(name, got, compute):
    same, truth = compute(torch.float32).to(got.dtype), compute(torch.float64)
    left = torch.tensor(LEFT).to(got.dtype)
    here = (truth == LEFT) | (truth == 0)
    expected = torch.where(truth == LEFT, left, 0)[here]
    assert torch.equal(got[here], expected.to(got.dtype)), f"{name}: what is left alone"
    assert_within_budget(name, got[~here], same[~here], truth[~here])


class Segments(NamedTuple):
    order: Tensor
    rows: Tensor
    segments: Tensor


def segments_of(sets):
    row_of_value = torch.arange(sets.N).repeat_interleave(sets.offsets.diff())
    order = sets.token_ids.argsort(stable=True)
    starts = torch.searchsorted(sets.token_ids[order].contiguous(), torch.arange(sets.V + 1).int())
    return Segments(order, row_of_value[order].int(), starts)


def check_dweight(ops, sets, head, dtype, given=None):
    given = given or segments_of(sets)
    g = torch.Generator().manual_seed(7)
    dvalues = torch.randn(sets.K, generator=g)
    dvalues[::3] = 0.0
    before = torch.randn(sets.V, head.weight.shape[1], generator=g).to(dtype)
    bias_before = torch.randn(sets.V, generator=g)

    def parts(v):
        begin, end = (min(max(0, s), sets.K) for s in given.segments[v : v + 2].tolist())
        pairs = zip(given.order[begin:end].tolist(), given.rows[begin:end].tolist(), strict=True)
        return [(k, n) for k, n in pairs if 0 <= k < sets.K and 0 <= n < sets.N]

    def expected(kind, add):
        truth = before.to(kind) if add else torch.zeros(before.shape, dtype=kind)
        for v in range(sets.V):
            pairs = parts(v)
            rows = head.hidden[[n for _, n in pairs]].to(kind)
            truth[v] += dvalues[[k for k, _ in pairs]].to(kind) @ rows
        return truth

    def expected_bias(kind):
        sums = [dvalues[[k for k, _ in parts(v)]].to(kind).sum() for v in range(sets.V)]
        return bias_before.to(kind) + torch.stack(sums)

    for add in (False, True):
        dweight, memory = spread(before if add else torch.full(before.shape, LEFT, dtype=dtype))
        dbias = bias_before.clone() if add else None
        ops.sets_dweight(dvalues, head.hidden, *given, add, dweight, dbias)
        assert memory[..., [0, -1, -2]].isnan().all(), "outside of the rows"
        check_rounded("dweight", dweight, lambda kind, add=add: expected(kind, add))
        if add:
            check("dbias", dbias, expected_bias)


def check_head_pass(ops, sets, head, options, dtype):
    """The bits of the three operators that it does the work of."""
    counted = counted_rows(sets)
    values = torch.full((sets.K,), LEFT)
    ops.multiply_sets(*head, counted, *sets.csr, None, values)
    tokens = tokens_of(sets, values, options)
    outputs, expected_outputs = Outputs.empty(sets.N), Outputs.empty(sets.N)
    dvalues = values.clone()
    expected = run_pass(ops, "row_pass_", sets, tokens, options, (dvalues,), expected_outputs)
    dhidden, expected_dhidden = (torch.full(head.hidden.shape, LEFT, dtype=dtype) for _ in "12")
    decided = (expected == 0).to(torch.uint8)
    ops.sets_dhidden(dvalues, head.weight, *sets.csr, None, decided, expected_dhidden)

    got = torch.full((sets.K,), LEFT)
    undecided = run_pass(
        ops,
        "head_sets_pass",
        sets,
        tokens,
        options,
        (*head, sets.token_ids),
        outputs,
        more=(got, dhidden),
    )
    assert undecided.tolist() == expected.tolist()
    for mine, other in zip(
        (*outputs, got, dhidden), (*expected_outputs, dvalues, expected_dhidden), strict=True
    ):
        assert torch.equal(mine.nan_to_num(9), other.nan_to_num(9))
    return undecided
