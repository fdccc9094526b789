"""The CUDA kernels on sampling masks, run on the CPU (tests/cuda_on_host)."""

import shutil
import sys
from itertools import product

import pytest
import set_operators as cases
import torch
from cuda_on_host.emulated import SEEDS
from helpers import case_with_sets, check_with_sets, needs_native, per_token
from launches import LAUNCHES
from test_linear import CONFIGS, build
from test_sampling_mask import check_hidden, hidden_case

from bapo_kernels import BAPOConfig, ClipBounds

pytest_plugins = ("cuda_on_host.fixtures",)
pytestmark = [
    needs_native,
    pytest.mark.xdist_group("on_host"),  # one worker builds the library
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="its fibers need Linux"),
    pytest.mark.parametrize("on_host", ["H100"], indirect=True),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Elements of a hidden state, and whether its address is odd; several slices of a row, and a part
# of a vector.
HIDDEN = {"short": (72, False), "long": (1_104, False), "unaligned": (65, True), "tiny": (3, True)}


def test_positions_of_labels(on_host, library):
    for sets in (cases.random_sets(), *cases.broken_sets().values()):
        cases.check_find_labels(library, sets, cases.labels_of(sets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sets_of_logits(on_host, library, dtype):
    for sets in (cases.random_sets(), cases.random_sets(shard=(400, 300))):
        cases.check_move(library, sets, dtype)


@pytest.mark.parametrize("options", cases.OPTIONS)
@pytest.mark.parametrize("bounds", [None, (0.65, 1.4)])
def test_passes_over_sets(on_host, library, options, bounds):
    sets = cases.random_sets()
    values = cases.values_of(sets)
    for seed in SEEDS:
        library.schedule(seed)
        undecided = cases.check_pass(library, sets, values, cases.OPTIONS[options], bounds)
        assert undecided.sum() == (4 if bounds is None else 0)


@pytest.mark.parametrize("name", cases.broken_sets())
def test_broken_sets(on_host, library, name):
    """Rows that break a rule are NaN, and no other; nothing is written outside of a set."""
    sets = cases.broken_sets()[name]
    values = cases.values_of(sets)
    tokens, outputs = cases.check_statistics(library, sets, values, cases.ALL)
    assert outputs.log_probs[tokens.counted].isnan().any()
    if name == "offsets that fall":
        return  # the sets of other rows overlap
    cases.check_pass(library, sets, values, cases.ALL)
    cases.check_move(library, sets, torch.bfloat16)
    head = cases.head_of(sets, 72, torch.bfloat16, False)
    cases.check_multiply(library, sets, head)
    cases.check_head_pass(library, sets, head, cases.ALL, torch.bfloat16)


@pytest.mark.parametrize("options", cases.OPTIONS)
def test_sets_in_shards(on_host, library, options):
    """An id of another rank is forbidden here, and has no gradient; others have that of all ids."""
    options, whole = cases.OPTIONS[options], cases.random_sets()
    shard = whole._replace(shard=(400, 300))
    values = cases.values_of(whole)
    here = cases.values_of(shard).isfinite()
    parts = torch.where(here, values, -torch.inf)
    cases.check_statistics(library, shard, parts, options)

    tokens, outputs = cases.check_statistics(library, whole, values, options)
    coefficients = cases.decisions(whole, tokens, options, torch.float64)[1:]
    gradients = [torch.full((whole.K,), cases.LEFT) for _ in "12"]
    for given, dvalues in zip((values, parts), gradients, strict=True):
        arguments = whole.offsets, tokens.positions, outputs.stats, outputs.entropy, *coefficients
        numbers = options.numbers()
        library.row_gradient(given, *arguments, None, *tokens.fields(), numbers, dvalues)
    finite = torch.stack(gradients).isfinite().all(0)
    assert finite[here].any()
    expected = torch.where(here, gradients[0], 0.0)
    assert torch.equal(gradients[1][finite], expected[finite])


@pytest.mark.parametrize("size", [2, 33, 1_100])
@pytest.mark.parametrize("gap", [6.9, 16.0])
def test_gradient_at_a_likely_label_of_a_set(on_host, library, size, gap):
    """1 - p keeps its digits."""
    values = torch.full((size,), -torch.inf)
    values[size // 2 - 1], values[size // 2] = 0.0, gap
    sets = cases.Sets(torch.arange(size).int(), torch.tensor([0, size]), size)
    one, outputs = torch.ones(1), cases.Outputs.empty(1)
    tokens = cases.Tokens(
        values,
        torch.tensor([size // 2]),
        torch.tensor([True]),
        None,
        one,
        one.double(),
        *[None] * 3,
    )
    got = values.clone()
    cases.run_pass(library, "row_pass_", sets, tokens, cases.PLAIN, (got,), outputs)
    p = values.double().softmax(0)
    expected = p.clone()
    expected[size // 2] = -p[size // 2 - 1]
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_a_set_of_a_whole_vocabulary(on_host, library):
    """Sums of many terms are as accurate as those of few."""
    size = 12_001
    sets = cases.random_sets((3, size), V=size)
    values = cases.values_of(sets)
    cases.check_pass(library, sets, values, cases.Options(entropy_coef=0.01))
    head = cases.head_of(sets, 8, torch.float32, False)
    cases.check_dhidden(library, sets, head._replace(weight=head.weight.abs()), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_products_with_the_head(on_host, library, dtype, hidden):
    whole = cases.head_sets()
    H, shift = HIDDEN[hidden]
    for seed in SEEDS:
        library.schedule(seed)
        for sets in (whole, whole._replace(shard=(40, 50))):
            head = cases.head_of(sets, H, dtype, shift)
            cases.check_multiply(library, sets, head)
            for kind in {dtype, torch.float32}:
                cases.check_dhidden(library, sets, head, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_gradient_of_the_head_from_sets(on_host, library, dtype, hidden):
    sets = cases.head_sets()
    H, shift = HIDDEN[hidden]
    head = cases.head_of(sets, H, dtype, shift)
    for seed, kind in product(SEEDS, {dtype, torch.float32}):
        library.schedule(seed)
        cases.check_dweight(library, sets, head, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", ["short", "unaligned", "tiny"])
def test_long_sets_and_popular_ids(on_host, library, dtype, hidden):
    H, shift = HIDDEN[hidden]
    for seed in SEEDS:
        library.schedule(seed)
        sets = cases.long_sets()
        head = cases.head_of(sets, H, dtype, shift)
        cases.check_multiply(library, sets, head)
        cases.check_head_pass(library, sets, head, cases.PLAIN, dtype)
        cases.check_dhidden(library, sets, head, dtype)
        sets = cases.popular_ids()
        cases.check_dweight(library, sets, cases.head_of(sets, H, dtype, shift), dtype)


def test_segments_that_break_their_rules(on_host, library):
    sets = cases.head_sets()
    head = cases.head_of(sets, 72, torch.float32, False)
    order, rows, segments = (x.clone() for x in cases.segments_of(sets))
    order[[3, 40]] = torch.tensor([-1, sets.K])
    rows[5:8], rows[60:64] = -1, 2**31 - 1
    segments[[0, 7, -1]] = torch.tensor([-5, 1 << 40, sets.K + 9])
    cases.check_dweight(library, sets, head, torch.float32, cases.Segments(order, rows, segments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_pass_from_hidden_states(on_host, library, dtype, hidden):
    sets = cases.head_sets()
    H, shift = HIDDEN[hidden]
    head = cases.head_of(sets, H, dtype, shift)
    for seed, options in product(SEEDS, (cases.PLAIN, cases.ALL)):
        library.schedule(seed)
        assert cases.check_head_pass(library, sets, head, options, dtype).any()


def test_a_row_of_sets_alone_has_the_bits_of_a_batch(on_host, library):
    sets = cases.long_sets()
    head = cases.head_of(sets, 72, torch.bfloat16, False)

    def products(hidden, ids, offsets):
        """Values, and what they would be as gradients make of the hidden states'."""
        values, dhidden = torch.full((ids.numel(),), cases.LEFT), torch.zeros_like(hidden)
        counted = torch.ones(hidden.shape[0], dtype=torch.bool)
        library.multiply_sets(hidden, *head[1:], counted, ids, offsets, None, values)
        library.sets_dhidden(values, head.weight, ids, offsets, None, None, dhidden)
        return values, dhidden

    values, dhidden = products(head.hidden, *sets.csr)
    for n in (0, 2, 4):
        begin, end = sets.of_row(n)
        ids, offsets = sets.token_ids[begin:end].clone(), torch.tensor([0, end - begin])
        alone = products(head.hidden[n : n + 1], ids, offsets)
        assert torch.equal(alone[0], values[begin:end])
        assert torch.equal(alone[1][0], dhidden[n])


def test_a_column_alone_has_the_bits_of_a_batch(on_host, library):
    sets, H = cases.popular_ids(), 520  # more than a block adds of parts
    hidden = cases.head_of(sets, H, torch.float32, False).hidden
    dvalues = torch.randn(sets.K, generator=torch.Generator().manual_seed(8))
    order, rows, segments = cases.segments_of(sets)

    def gradient(order, rows, segments, columns):
        dweight, dbias = torch.zeros(columns, H), torch.zeros(columns)
        given = dvalues[order], hidden, torch.arange(len(order)), rows, segments
        library.sets_dweight(*given, False, dweight, dbias)
        return torch.cat([dweight, dbias[:, None]], 1)

    whole = gradient(order, rows, segments, sets.V)
    others_elsewhere = gradient(order, rows, segments[1:].clone(), sets.V - 1)
    assert torch.equal(others_elsewhere, whole[1:])
    for v in range(sets.V):
        begin, end = segments[v : v + 2].tolist()
        given = order[begin:end], rows[begin:end].clone(), torch.tensor([0, end - begin])
        assert torch.equal(gradient(*given, 1)[0], whole[v])
        terms = hidden[rows[begin:end].long()].double()
        expected = dvalues[order[begin:end]].double() @ terms
        torch.testing.assert_close(whole[v, :-1].double(), expected, rtol=1e-4, atol=1e-5)


def test_launches_of_sets(on_host, library):
    launches = {}

    class Counted:
        def __getattr__(self, name):
            def run(*arguments):
                library.stream(7, 0)
                getattr(library, name)(*arguments)
                assert library.launched_on(7)
                launches[name] = max(launches.get(name, 0), library.launches())

            return run

    ops, sets = Counted(), cases.random_sets((2, 0, 520, 3), V=600)
    head = cases.head_of(sets, 8, torch.float32, False)
    cases.check_find_labels(ops, sets, cases.labels_of(sets))
    cases.check_move(ops, sets, torch.float32)
    cases.check_pass(ops, sets, cases.values_of(sets), cases.PLAIN)
    cases.check_dweight(ops, sets, head, torch.float32)
    cases.check_head_pass(ops, sets, head, cases.PLAIN, torch.float32)
    assert launches.keys() >= cases.OPERATORS
    assert launches == {name: LAUNCHES[name] for name in launches}


def test_no_rows_no_sets(on_host, library):
    sets = cases.Sets(torch.zeros(0).int(), torch.zeros(1).long(), 10)
    for some in (sets, sets._replace(offsets=torch.zeros(4).long())):
        cases.check_move(library, some, torch.float32)
        cases.check_pass(library, some, torch.zeros(0), cases.PLAIN)
        head = cases.head_of(some, 8, torch.float32, False)
        cases.check_head_pass(library, some, head, cases.PLAIN, torch.float32)
        cases.check_dweight(library, some, head, torch.float32)
    sets = cases.popular_ids()  # none of which is in this shard
    given = torch.zeros(sets.K), torch.zeros(sets.N, 8), *cases.segments_of(sets)
    library.sets_dweight(*given[:-1], given[-1][:1], False, torch.zeros(0, 8), torch.zeros(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_with_sampling_masks(on_host, library, dtype, name):
    """The public functions, from logits and from hidden states, against the reference."""
    config, outside = build(name), name not in ("k1", "k2")
    kl = dict(ref_log_probs=per_token()) if config.kl_loss_coef else {}
    case, mask = case_with_sets(dtype=dtype, config=config, outside=outside, **kl)
    check_with_sets(case, mask, "cpu")
    problem = hidden_case(dtype, "cpu", config, outside)
    if dtype != torch.float32:
        problem[1].old_log_probs = None  # ratios of rounded logits may be on either side of a bound
    check_hidden(problem, "cpu")


OWN_BOUNDS = ClipBounds(per_token(seed=4, low=0.6, high=1.0), per_token(seed=5, low=1.0, high=1.6))
POLICIES = {
    "clip, own bounds": ({}, dict(bounds=OWN_BOUNDS)),
    "cispo": (dict(surrogate="cispo", target=0.5), {}),
    "cispo, own bounds": (dict(surrogate="cispo"), dict(bounds=OWN_BOUNDS)),
    "sapo": (dict(surrogate="sapo", sapo_tau_neg=2.0), {}),
    "mask": (dict(surrogate="mask", target=0.5), {}),
    "sequence": (dict(ratio_level="sequence", target=0.5), {}),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_with_sampling_masks(on_host, library, policy):
    config, options = POLICIES[policy]
    case, mask = case_with_sets(config=BAPOConfig(**config), outside=False, **options)
    check_with_sets(case, mask, "cpu")
