"""The one-pass search against the loop, bound for bound, and the loop against the printed one."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_rounded, assert_same
from helpers import PTX, needs_native
from torch.testing._internal.distributed.fake_pg import FakeStore
from world import grid, resumed

from bapo_kernels import (
    BAPOConfig,
    ClipBoundSearch,
    ContributionHistogram,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    reference,
)
from bapo_kernels.config import bound_grid
from bapo_kernels.core.arguments.prepare import prepared
from bapo_kernels.core.arguments.together import loss_arguments, token_arguments
from bapo_kernels.core.tokens import contributions, search, solve
from bapo_kernels.reference.search import contribution_table, solve_table

VARIANTS = [
    dict(),
    dict(raise_first="lower"),
    dict(target_kind="ratio", target=1.0),
    dict(target_kind="ratio", target=0.5, raise_first="lower"),
    dict(token_weight="uniform"),
    dict(contribution="gradient"),
    dict(contribution="gradient", target_kind="ratio", token_weight="uniform", target=0.9),
    dict(ratio_lower_max=0.6, ratio_upper_max=1.2),  # start = max
    dict(ratio_lower_step=5.0, ratio_upper_step=7.0),  # one step past the range
    dict(ratio_lower_step=0.0),  # a bound that does not move
    dict(ratio_lower_step=0.0, contribution="gradient"),
    dict(ratio_upper_step=0.0),
    dict(target=0.0),
    dict(target=1.0),  # never met
]
CONFIGS = [BAPOConfig(**variant) for variant in VARIANTS] + [BAPOConfig.recipe()]
TOGETHER = [
    preset(raise_first=first, contribution=contribution, target_kind=kind, target=target)
    for preset in (BAPOConfig.paper, BAPOConfig.recipe)
    for first in ("upper", "lower")
    for contribution in ("surrogate", "gradient")
    for kind, target in (("share", 0.4), ("share", 0.7), ("ratio", 1.0), ("ratio", 3.0))
]
# Their search by hand: pos = 2*min(r, c_high) = 2*c_high, neg = 3*max(r, c_low) = 3.
TOKENS = torch.tensor([1.5, 1.0]).log(), torch.zeros(2), torch.tensor([2.0, -3.0])


def random_case(g, dtype=torch.float32):
    """On-policy to very stale, one-sided, empty, masked; some ratios exactly on grid points.

    Masked tokens hold NaN and infinities.
    """
    n = int(torch.randint(0, 40, (), generator=g))
    stale = [0.0, 0.01, 0.3, 2.0][int(torch.randint(4, (), generator=g))]
    old = -5 * torch.rand(n, generator=g, dtype=dtype)
    logp = old + stale * torch.randn(n, generator=g, dtype=dtype)
    grid = torch.tensor(bound_grid(0.6, 0.9, 0.02) + bound_grid(1.2, 3.0, 0.05))
    at = torch.randint(len(grid), (n,), generator=g)
    on_grid = torch.rand(n, generator=g) < 0.2
    logp = torch.where(on_grid, old + grid[at].log().to(dtype), logp)
    A = torch.randn(n, generator=g, dtype=dtype)
    side = int(torch.randint(6, (), generator=g))
    A = {0: A.abs(), 1: -A.abs(), 2: A * (torch.rand(n, generator=g) < 0.5)}.get(side, A)
    mask = torch.rand(n, generator=g) < [0.0, 0.5, 1.0][int(torch.randint(3, (), generator=g))]
    mask = ~mask if side == 5 else mask | (side == 4)
    bad = (logp, torch.nan), (old, torch.inf), (A, -torch.inf)
    return *(values.masked_fill(~mask, value) for values, value in bad), mask


def numbers(bounds):
    return [bound.item() for bound in bounds]


def equal_to_the_loop(*case, **options):
    got, expected = (f(*case, **options) for f in (find_clip_bounds, reference.find_clip_bounds))
    assert numbers(got) == numbers(expected), options
    return got


@pytest.mark.parametrize("seed", range(5))
def test_bounds_equal_the_loop(seed):
    """5 x 396 random batches: every variant, and both presets with every option of the search."""
    g = torch.Generator().manual_seed(seed)
    moved = 0
    for config in 20 * CONFIGS + 3 * TOGETHER:
        case = random_case(g, torch.float64 if seed == 4 else torch.float32)
        rollout = -5 * torch.rand(case[0].shape, generator=g)
        rollout = rollout.masked_fill(~case[-1], torch.nan) if seed % 2 else None
        got = equal_to_the_loop(*case, config=config, rollout_log_probs=rollout)
        moved += got.upper.item() > config.ratio_upper_start
    assert moved > 40, "too few cases search at all"


def printed_loop(config, quantity):
    """Algorithm 1 as the paper prints it, lines 9 to 17: a step past the maximum is refused."""
    low, low_max, low_step, high, high_max, high_step = config.options[:6]
    while quantity(low, high) < config.target and low + low_step <= low_max:
        if high + high_step <= high_max:
            high += high_step
        else:
            low += low_step
    return low, high


def test_bounds_equal_the_printed_loop():
    """In float32, except that a search in vain ends at c_low = 0.88 there and at 0.9 here."""
    g = torch.Generator().manual_seed(0)
    config = BAPOConfig.paper(token_weight="uniform")
    found = {"start": 0, "inside": 0, "in vain": 0}
    for _ in range(400):
        case = random_case(g)
        quantity = reference.Contributions(config, *case).quantity
        lower, upper = printed_loop(config, quantity)
        ended = "in vain" if lower > 0.87 else "inside" if upper > 1.21 else "start"
        found[ended] += 1
        expected = torch.tensor([0.9 if ended == "in vain" else lower, upper])
        assert numbers(find_clip_bounds(*case, config=config)) == expected.tolist()
    assert min(found.values()) > 10, found


def test_search_by_hand():
    config = BAPOConfig(token_weight="uniform", target=0.48)
    bounds = find_clip_bounds(*TOKENS, config=config)
    # 2*c_high >= .48*(2*c_high + 3)  <=>  c_high >= 1.3846
    assert bounds == (0.6, 1.4)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_ratios_exactly_on_grid_points(contribution):
    """On-policy every ratio is 1; where 1 is a grid point, its tokens are on the inclusive side."""
    A = torch.tensor([2.0, 1.0, -1.0, -3.0])
    grids = (0.5, 1.0, 0.25), (1.0, 1.5, 0.25)
    config = BAPOConfig(*grids[0], *grids[1], contribution=contribution, token_weight="uniform")
    histogram = ContributionHistogram(config).update(torch.zeros(4), None, A)
    assert histogram.table.tolist() == [4.0, 4.0, 4.0, 3.0, 3.0, 3.0]


def test_a_table_that_was_tampered_with_is_refused(backend, device):
    """It is an attribute, so anything can be in it."""
    old = torch.zeros(4, device=device)
    histogram = ContributionHistogram().update(torch.rand(4, device=device), old, old + 1)
    histogram.table = histogram.table[::2]
    with pytest.raises(RuntimeError, match="table"):
        histogram.solve()
    with pytest.raises(RuntimeError, match="table"):
        solve(backend, histogram.table[None], histogram.config.options)


@pytest.mark.parametrize("most", [40, 16_400, 36_000])
def test_kernels_find_what_the_reference_finds(backend, device, interpreted, most):
    """In the table of contributions, and in its solution; also of tens of thousands of tokens."""
    copies = 1 if most == 40 else 4_000
    if interpreted and copies > 1:
        pytest.skip("takes half a minute in the interpreter")
    g = torch.Generator().manual_seed(0)
    repeats = 2 if interpreted or PTX else 20
    for variant in VARIANTS[:4] if copies > 1 else repeats * VARIANTS:
        config = BAPOConfig(**variant)
        logp, old, A, mask = (t.repeat(copies)[:most].to(device) for t in random_case(g))
        arguments = loss_arguments(logp, old, A, mask, config=config, for_search=True)
        call = prepared(backend, arguments)
        table = contributions(call, logp.double())
        expected = contribution_table(config, logp, old, A, mask)
        assert_rounded(table[0], expected, 2 * (4 + most))  # exp, products, a sum in any order
        found = solve(backend, table, config.options)
        for other in (solve_table(config, table[0]), search(call, logp.double())):
            assert_same(found, other)
        for target in (0.25, 0.5, 0.75):  # where the search may stop at any point
            aimed = replace(config, target=target)
            found = solve(backend, table, aimed.options)
            assert_same(found, solve_table(aimed, table[0]))


def test_highest_share_of_all_points(backend, device, interpreted):
    """Against brute force, where a call searches, where it is given bounds and over two updates."""
    g = torch.Generator().manual_seed(4)
    between = torch.tensor([1.5, 5.0, 0.7, 1.0]).log()  # points of the grids, and outside of them
    signs = torch.tensor([2.0, 1.0, -3.0, -1.0])
    for variant in VARIANTS:
        config = BAPOConfig(**variant)
        options = dict(config=config, backend=backend)
        cases = [random_case(g) for _ in range(1 if interpreted else 8)]
        for case in [(between, torch.zeros(4), signs, torch.ones(4)), *cases]:
            case = [t.to(device) for t in case]
            probe = reference.Contributions(config, *case)
            positive = [probe.positive(point).item() for point in config.upper_grid]
            negative = [probe.negative(point).item() for point in config.lower_grid]
            pairs = [(pos, neg) for pos in positive for neg in negative]
            highest = max(pos / (pos + neg) if pos + neg else 0.0 for pos, neg in pairs)
            histogram = ContributionHistogram(config)
            for part in zip(*(t.tensor_split(2) for t in case), strict=True):
                histogram.update(*part)
            histogram.solve()
            found = [histogram.metrics]
            for bounds in (None, (0.7, 1.1)):
                found.append(bapo_loss_from_log_probs(*case, bounds=bounds, **options).metrics)
            for metrics in found:
                assert_rounded(metrics["bapo_pos_share_max"], highest)


def test_highest_share_of_broken_tokens(backend, device):
    """NaN as in the reference, where only the first point of the grid counts a token's NaN."""
    logp = torch.tensor([1.5, 0.7, 1.0], device=device).log()
    rollout, A = torch.tensor([[0.0, torch.nan, 0.0], [2.0, -3.0, -1.0]], device=device)
    options = dict(config=BAPOConfig(contribution="gradient"), rollout_log_probs=rollout)
    for name in (backend, "reference"):
        out = bapo_loss_from_log_probs(logp, torch.zeros_like(logp), A, backend=name, **options)
        assert out.metrics["bapo_pos_share_max"].isnan()


def test_the_rows_of_a_table_are_added_in_order(backend, device):
    """As after an all-reduce: 1e16 + 1 - 1e16 is 0, in another order 1."""
    config = BAPOConfig(token_weight="uniform")
    rows = torch.zeros(3, len(config.lower_grid) + len(config.upper_grid), dtype=torch.float64)
    rows[:, -len(config.upper_grid) :] = torch.tensor([[1e16], [1.0], [-1e16]])
    _, masses = solve(backend, rows.to(device), config.options)
    assert masses.tolist() == [0.0] * 6


class TestHistogram:
    def batch(self, n=64):
        g = torch.Generator().manual_seed(1)
        old = -3 * torch.rand(4, n, generator=g)
        return old + 0.4 * torch.randn(4, n, generator=g), old, torch.randn(4, n, generator=g)

    def test_solve_may_be_repeated(self):
        """With another config too, unless its grids differ."""
        histogram = ContributionHistogram().update(*self.batch())
        assert histogram.solve() == histogram.solve() == find_clip_bounds(*self.batch())
        lower_first = BAPOConfig(raise_first="lower", target=0.5)
        expected = reference.find_clip_bounds(*self.batch(), config=lower_first)
        assert histogram.solve(lower_first) == expected
        with pytest.raises(ValueError, match=r"config.ratio_lower_max must .*0\.9.*got 0\.8"):
            histogram.solve(BAPOConfig.recipe())

    @pytest.mark.parametrize("target", [None, 0.9])
    def test_metrics_are_those_of_one_call(self, target):
        """All micro-batches together, one-sided, empty and saturated batches among them."""
        g = torch.Generator().manual_seed(2)
        seen = set()
        for config in 4 * CONFIGS:
            histogram = ContributionHistogram(config)
            assert histogram.metrics == {}
            config = config if target is None else replace(config, target=target)
            whole = random_case(g)
            for part in zip(*(t.tensor_split(3) for t in whole), strict=True):
                histogram.update(*part)
            bounds = histogram.solve(config)
            histogram.reset()  # the metrics stay
            expected = bapo_loss_from_log_probs(*whole, config=config).metrics
            got = histogram.metrics
            assert list(got) == [name for name in expected if name.startswith("bapo_")]
            assert [got["bapo_clip_low"], got["bapo_clip_high"]] == list(bounds)
            for name, value in got.items():
                assert (value.dtype, value.shape) == (torch.float32, ())
                assert_rounded(value, expected[name], 2)  # one on either side
            seen.add((got["bapo_saturated"].item(), got["bapo_pos_neg_ratio"].isinf().item()))
        assert seen >= {(0.0, False), (0.0, True), (1.0, False)}

    @needs_native
    def test_same_bits_for_any_threads(self):
        g = torch.Generator().manual_seed(1)
        case = [torch.randn(50_000, generator=g) for _ in range(3)]
        tables, threads = [], torch.get_num_threads()
        for count in (1, 2, 4, 1):
            torch.set_num_threads(count)
            tables.append(ContributionHistogram().update(*case).table)
        torch.set_num_threads(threads)
        assert_same(tables, tables[:1] * len(tables), "table")


def random_tokens():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(30, generator=g) for _ in range(3)]


def search_rank(rank):
    # Unequal counts, two ranks empty.
    piece = [slice(0, 21), slice(21, 30), slice(30, 30), slice(30, 30)][rank]
    mine = [t[piece] for t in random_tokens()]
    search = ClipBoundSearch(scope="step", process_group=dist.group.WORLD)
    search.update(*mine)
    search.step()
    bounds = find_clip_bounds(*mine, process_group=dist.group.WORLD)
    inner = find_clip_bounds(*mine, process_group=grid(2, 2).get_group("tensor"))  # of two ranks
    alone = find_clip_bounds(*mine)
    metrics = {name: value.item() for name, value in search.metrics.items()}
    return *map(numbers, (bounds, inner, alone, search.bounds)), metrics


@pytest.mark.xdist_group("world")
def test_search_over_a_process_group(worlds):
    whole, inner, alone, of_step, metrics = zip(*worlds(4).run(search_rank), strict=True)
    case = random_tokens()
    expected = numbers(reference.find_clip_bounds(*case))
    assert whole == of_step == (expected,) * 4
    assert inner[:2] == (expected,) * 2
    assert alone[0] == numbers(reference.find_clip_bounds(*(t[:21] for t in case)))
    assert alone[2] == torch.tensor([0.6, 1.2]).tolist()
    of_whole = bapo_loss_from_log_probs(*case).metrics
    for name, value in metrics[0].items():
        assert_rounded(torch.tensor(value), of_whole[name], 2)  # one on either side
    assert metrics == (metrics[0],) * 4


@pytest.mark.parametrize(("positive", "negative"), [(4, 18), (6, 18), (8, 18)])
def test_exact_ties_with_the_target(positive, negative):
    """Loop and search round either way there, on x86 the loop by the order of the tokens.

    Rewards of +-1 and equal weights: positive tokens far above c_high, negative ones at r = 1, so
    that the share c_high*positive/(c_high*positive + negative) is .4 at a grid point.
    """
    A = torch.tensor([1.0] * positive + [-1.0] * negative)
    old = torch.full_like(A, -1.0)
    case = old + 5.0 * (A > 0), old, A
    below, above = (
        numbers(find_clip_bounds(*case, config=BAPOConfig(target=target)))
        for target in (0.4 - 1e-9, 0.4 + 1e-9)
    )
    assert below != above
    for find in (find_clip_bounds, reference.find_clip_bounds):
        assert numbers(find(*case)) in (below, above)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", range(4))  # log-probs, old ones, advantages, those of the rollout
def test_values_that_are_not_finite(value, where):
    in_vain = BAPOConfig(target=1.0)
    configs = [BAPOConfig(), BAPOConfig.recipe(), BAPOConfig(raise_first="lower", target=0.8)]
    configs += [in_vain, replace(in_vain, contribution="gradient")]
    if where != 1 and value == value:  # the loop itself computes 0*inf for a clipped token
        configs.pop()
    for config, sign in itertools.product(configs, (1.0, -1.0)):
        g = torch.Generator().manual_seed(3)
        tokens = [torch.randn(20, generator=g) for _ in range(4)]
        tokens[2][7] = sign
        tokens[where][7] = value
        for rollout in (None, tokens[3]):
            got = equal_to_the_loop(*tokens[:3], config=config, rollout_log_probs=rollout)
            if where == 1 and config.target == 1.0:
                assert got.upper == 1.2, "they are the starting bounds"


def test_metrics_of_a_search_object():
    """They describe the decision in use, also after a load, and before the first decision."""
    config = BAPOConfig(token_weight="uniform", target=0.48)
    assert ClipBoundSearch(config).metrics == ClipBoundSearch(config, "step").metrics == {}
    search = ClipBoundSearch(config, "lagged")
    start = search.metrics
    known = dict(bapo_clip_low=0.6, bapo_clip_high=1.2, bapo_acted=0.0)
    assert {name: v.item() for name, v in start.items() if not v.isnan()} == pytest.approx(known)
    search.update(*TOKENS)
    assert all(search.metrics[name] is value for name, value in start.items())
    search.step()
    expected = bapo_loss_from_log_probs(*TOKENS, config=config).metrics
    saved = ClipBoundSearch(config, "lagged")
    saved.load_state_dict(search.state_dict())
    for of_search in (search.metrics, saved.metrics):
        assert of_search == {name: expected[name] for name in start}
    step = ClipBoundSearch(config, "step")
    step.load_state_dict(dict(scope="step", bounds=None, metrics={}, table=None))  # an earlier one
    assert step.metrics == {}


@pytest.mark.parametrize("scope", ["call", "step", "lagged"])
def test_a_new_search_continues_from_a_checkpoint(scope, tmp_path):
    """Before, in and after a step."""
    search, expected = ClipBoundSearch(scope=scope), ClipBoundSearch(scope=scope)
    for i in range(6):
        search = resumed(search, tmp_path / str(i))
        for each in (search, expected):
            each.step() if i % 3 == 2 else each.update(*TOKENS)
        assert repr(search.state_dict()) == repr(expected.state_dict())


@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_a_search_in_inference_mode(scope):
    """What it keeps are ordinary tensors, which later calls may change and save."""
    expected, search = ClipBoundSearch(scope=scope), ClipBoundSearch(scope=scope)
    expected.update(*TOKENS)
    expected.update(*TOKENS)
    expected.step()
    with torch.inference_mode():
        search.update(*TOKENS)
        search.step()
        search.update(*TOKENS)
        loaded = ClipBoundSearch(scope=scope)
        state = search.state_dict()
        loaded.load_state_dict(state | state.pop("ranks")["0"])  # as before sums had a rank
    log_probs = TOKENS[0].clone().requires_grad_()
    for each in (search, loaded):
        each.update(*TOKENS)
        each.step()
        assert each.bounds == expected.bounds
        out = bapo_loss_from_log_probs(log_probs, *TOKENS[1:], backend="reference", **each.options)
        out.loss.backward()


def test_first_bounds_go_with_tokens_anywhere():
    """They are in host memory; test_compile.py has their type."""
    tokens = [x.to("meta") for x in TOKENS]
    given = token_arguments(*tokens, None, bounds=ClipBoundSearch(scope="lagged").bounds)
    assert given.bounds.device.type == "meta"


def test_a_copy_of_a_search():
    """It decides over the same ranks, and alone."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        search = ClipBoundSearch(scope="lagged", process_group=dist.group.WORLD)
        other = copy.deepcopy(search)
        assert other.process_group is search.process_group
        other.update(*TOKENS)
        assert search.histogram.table is None
    finally:
        dist.destroy_process_group()


# Even grids of as many points, whose sums mean something else.
OTHER_GRIDS = BAPOConfig(ratio_upper_start=1.4, ratio_upper_max=3.2)
BAD_TABLES = {
    r"table must have sums that are finite and >= 0, got \[nan": torch.full((54,), torch.nan),
    r"table must have sums that are finite and >= 0, got \[inf": torch.full((54,), torch.inf),
    r"table must have sums that are finite and >= 0, got \[-1.0\]": -torch.ones(54),
    r"table must have shape \(54,\), as the grids .*, got \(2,\)": torch.zeros(2),
    "table must be a tensor, got list": [0.0] * 54,
    "device of a histogram must have memory, got meta": torch.zeros(54, device="meta"),
}
BAD_STATES = {
    "state must be what state_dict.. returned, got NoneType": lambda state: None,
    r"state must be what state_dict.. returned, got \[\]": lambda state: {},
    "scope must be 'lagged' in the state too, got": lambda state: state | {"scope": "step"},
    "config.ratio_upper_start must be 1.2 in the state too": lambda state: ClipBoundSearch(
        OTHER_GRIDS, "lagged"
    ).state_dict(),
    "config.token_weight must be 'rollout_prob' in the state too, got 'uniform'": lambda state: (
        state | {"config": {"token_weight": "uniform"}}
    ),
    **{
        m: (lambda state, table=table: state | {"ranks": {"0": {"table": table}}})
        for m, table in BAD_TABLES.items()
    },
}


@pytest.mark.parametrize("message", BAD_STATES)
def test_a_state_that_is_refused_changes_nothing(message):
    assert len(OTHER_GRIDS.upper_grid) == len(BAPOConfig().upper_grid)
    search = ClipBoundSearch(scope="lagged")
    search.update(*TOKENS)
    search.step()
    search.update(*TOKENS)
    before = search.state_dict()
    assert before["ranks"]["0"]["table"].any()
    with pytest.raises(ValueError, match=message):
        search.load_state_dict(BAD_STATES[message](search.state_dict()))
    after = search.state_dict()
    assert_same(*(state["ranks"]["0"].pop("table") for state in (before, after)))
    assert before == after
    if message in BAD_TABLES:
        histogram = ContributionHistogram()
        with pytest.raises(ValueError, match=message):
            histogram.load(BAD_TABLES[message])
        assert histogram.table is None


def test_tokens_without_memory_are_refused():
    """They would be lost without a word."""
    tokens = torch.zeros(3, device="meta"), None, torch.ones(3, device="meta")
    for histogram in (ContributionHistogram(), ContributionHistogram(device="cpu")):
        with pytest.raises(ValueError, match="log_probs must have values, got .* meta"):
            histogram.update(*tokens)
    with pytest.raises(ValueError, match="the device of a histogram must have memory, got meta"):
        ClipBoundSearch(scope="step", device="meta")
