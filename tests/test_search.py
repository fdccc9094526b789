"""The one-pass search against the loop, bound for bound, and the loop against the printed one."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from helpers import make_case, needs_native, unmasked_tokens
from world import grid

from bapo_kernels import (
    BAPOConfig,
    ClipBoundSearch,
    ContributionHistogram,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    log_probs,
    reference,
)
from bapo_kernels.config import bound_grid
from bapo_kernels.core.arguments import loss_arguments
from bapo_kernels.core.prepare import prepared
from bapo_kernels.core.tokens import contributions, search, solve
from bapo_kernels.reference.search import algorithm_1, contribution_table, solve_table

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

SHARES = "bapo_pos_share", "bapo_pos_share_start", "bapo_pos_share_max"


def random_case(g, dtype=torch.float32):
    """On-policy to very stale, one-sided, empty, masked; some ratios exactly on grid points."""
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
    return logp, old, A, ~mask if side == 5 else mask | (side == 4)


@pytest.mark.parametrize("seed", range(8))
def test_bounds_equal_the_loop(seed):
    """8 x 260 random batches, every variant and both presets."""
    g = torch.Generator().manual_seed(seed)
    configs = [BAPOConfig(**v) for v in VARIANTS] + [BAPOConfig.recipe()]
    moved = 0
    for _ in range(20):
        for config in configs:
            case = random_case(g)
            rollout = -5 * torch.rand(case[0].shape, generator=g)
            options = dict(config=config, rollout_log_probs=rollout if seed % 2 else None)
            got = find_clip_bounds(*case, **options)
            expected = reference.find_clip_bounds(*case, **options)
            assert [b.item() for b in got] == [b.item() for b in expected], config
            moved += got.upper.item() > config.ratio_upper_start
    assert moved > 40, "too few cases search at all"


def printed_loop(config, quantity, exact=float):
    """Algorithm 1 as the paper prints it, lines 9 to 17: a step past the maximum is refused."""
    low, low_max, low_step, high, high_max, high_step = (
        exact(str(value)) for value in config.options[:6]
    )
    while quantity(low, high) < config.target and low + low_step <= low_max:
        if high + high_step <= high_max:
            high += high_step
        else:
            low += low_step
    return low, high


OCTOTHINKER = dict(ratio_lower_start=0.8, ratio_upper_max=2.0, target=0.45)


@pytest.mark.parametrize(
    ("ranges", "printed"),
    [
        (dict(), (0.8800000000000002, 2.999999999999997)),
        (OCTOTHINKER, (0.8800000000000001, 1.9500000000000006)),
    ],
    ids=["paper", "OctoThinker"],
)
def test_the_printed_loop_refuses_the_last_step(ranges, printed):
    """Where the target is never met; in exact arithmetic it ends at the maxima, as ours does."""
    config = BAPOConfig.paper(**ranges)
    ours = algorithm_1(config, lambda *bounds: 0.0)
    assert ours == (config.ratio_lower_max, config.ratio_upper_max)
    assert printed_loop(config, lambda *bounds: 0.0) == printed
    exact = printed_loop(config, lambda *bounds: 0.0, exact=Fraction)
    assert tuple(float(bound) for bound in exact) == ours


def test_the_printed_loop_never_searches_with_a_pinned_lower_bound():
    config = BAPOConfig.paper(ratio_lower_start=0.9)
    assert printed_loop(config, lambda *bounds: 0.0) == (0.9, 1.2)
    assert algorithm_1(config, lambda *bounds: 0.0) == (0.9, 3.0)


def test_bounds_equal_the_printed_loop():
    """In float32, except that a search in vain ends at c_low = 0.88 there and at 0.9 here."""
    g = torch.Generator().manual_seed(0)
    config = BAPOConfig.paper(token_weight="uniform")
    found = {"start": 0, "inside": 0, "in vain": 0}
    for _ in range(400):
        case = random_case(g)
        quantity = reference.Contributions(config, *case).quantity
        lower, upper = (torch.tensor(bound).item() for bound in printed_loop(config, quantity))
        ours = tuple(bound.item() for bound in find_clip_bounds(*case, config=config))
        ended = "in vain" if lower > 0.87 else "inside" if upper > 1.21 else "start"
        found[ended] += 1
        if ended == "in vain":
            lower = torch.tensor(0.9).item()
        assert ours == (lower, upper)
    assert min(found.values()) > 10, found


def test_float64_log_probs():
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        case = random_case(g, torch.float64)
        assert find_clip_bounds(*case) == reference.find_clip_bounds(*case)


@pytest.mark.parametrize(
    ("grid", "points"),
    # the authors' grids; the last step of 1.2 .. 3.0 lands a hair below 3.0
    [((0.6, 0.8, 0.05), 5), ((1.2, 2.0, 0.05), 17), ((0.6, 0.9, 0.02), 16), ((1.2, 3.0, 0.05), 38)],
)
def test_grid_points(grid, points):
    assert len(bound_grid(*grid)) == points
    assert bound_grid(*grid)[-1] == grid[1]


def test_search_by_hand():
    """pos = 2*min(r, c_high) = 2*c_high, neg = 3*max(r, c_low) = 3."""
    logp = torch.tensor([1.5, 1.0]).log()
    A = torch.tensor([2.0, -3.0])
    config = BAPOConfig(token_weight="uniform", target=0.48)
    bounds = find_clip_bounds(logp, torch.zeros(2), A, config=config)
    # 2*c_high >= .48*(2*c_high + 3)  <=>  c_high >= 1.3846
    assert bounds.upper.item() == pytest.approx(1.4)
    assert bounds.lower.item() == pytest.approx(0.6)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_ratios_exactly_on_grid_points(contribution):
    """On-policy every ratio is 1; where 1 is a grid point, its tokens are on the inclusive side."""
    A = torch.tensor([2.0, 1.0, -1.0, -3.0])
    config = BAPOConfig(
        ratio_lower_start=0.5,
        ratio_lower_max=1.0,
        ratio_lower_step=0.25,
        ratio_upper_start=1.0,
        ratio_upper_max=1.5,
        ratio_upper_step=0.25,
        contribution=contribution,
        token_weight="uniform",
    )
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
    for _ in range(1 if copies > 1 else 2 if interpreted else 20):
        for variant in VARIANTS[:4] if copies > 1 else VARIANTS:
            config = BAPOConfig(**variant)
            logp, old, A, mask = (t.repeat(copies)[:most].to(device) for t in random_case(g))
            arguments = loss_arguments(logp, old, A, mask, config=config, for_search=True)
            call = prepared(backend, arguments)
            table = contributions(call, logp.double())
            expected = contribution_table(config, logp, old, A, mask)
            torch.testing.assert_close(table[0], expected, rtol=1e-12, atol=0)
            found = solve(backend, table, config.options)
            for other in (solve_table(config, table[0]), search(call, logp.double())):
                for mine, same in zip(found, other, strict=True):
                    assert torch.equal(mine, same)


def test_highest_share_of_all_points(backend, device, interpreted):
    """Against brute force, where a call searches, where it is given bounds and over two updates."""
    g = torch.Generator().manual_seed(4)
    between = torch.tensor([1.5, 5.0, 0.7, 1.0]).log()  # points of the grids, and outside of them
    signs = torch.tensor([2.0, 1.0, -3.0, -1.0])
    cases = [(between, torch.zeros(4), signs, torch.ones(4))]
    for variant in VARIANTS:
        config = BAPOConfig(**variant)
        for case in cases + [random_case(g) for _ in range(1 if interpreted else 8)]:
            case = [t.to(device) for t in case]
            probe = reference.Contributions(config, *case)
            positive = [probe.positive(point).item() for point in config.upper_grid]
            negative = [probe.negative(point).item() for point in config.lower_grid]
            pairs = [(pos, neg) for pos in positive for neg in negative]
            highest = max(pos / (pos + neg) if pos + neg else 0.0 for pos, neg in pairs)
            options = dict(config=config, backend=backend)
            found = [
                bapo_loss_from_log_probs(*case, bounds=bounds, **options).metrics
                for bounds in (None, (0.7, 1.1))
            ]
            histogram = ContributionHistogram(config)
            for part in zip(*(t.tensor_split(2) for t in case), strict=True):
                histogram.update(*part)
            histogram.solve()
            for metrics in (*found, histogram.metrics):
                assert metrics["bapo_pos_share_max"].item() == pytest.approx(highest, rel=1e-6)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("raise_first", ["upper", "lower"])
def test_a_target_above_the_highest_share_saturates(raise_first, contribution):
    """The converse holds where the search passes through the bounds of the highest share.

    It does not where it raises the lower bound first and the negative mass rises with it: the
    highest share is at the first lower and the last upper point. A highest share of 0 is left out,
    as it may mean that there is nothing to balance.
    """
    g = torch.Generator().manual_seed(5)
    config = BAPOConfig(raise_first=raise_first, contribution=contribution)
    seen = set()
    for _ in range(100):
        case = random_case(g)
        found = bapo_loss_from_log_probs(*case, config=config).metrics
        highest = found["bapo_pos_share_max"].item()
        for target in (0.98 * highest, 1.02 * highest):
            if 0 < target <= 1:
                aimed = replace(config, target=target)
                found = bapo_loss_from_log_probs(*case, config=aimed).metrics
                seen.add((highest < target, found["bapo_saturated"].item() == 1))
    passed_by = {(False, True)} if (raise_first, contribution) == ("lower", "surrogate") else set()
    assert seen == {(True, True), (False, False)} | passed_by


def test_highest_share_of_broken_tokens(backend, device):
    """NaN as in the reference, where only the first point of the grid counts a token's NaN."""
    logp = torch.tensor([1.5, 0.7, 1.0], device=device).log()
    rollout = torch.tensor([0.0, torch.nan, 0.0], device=device)
    A = torch.tensor([2.0, -3.0, -1.0], device=device)
    options = dict(config=BAPOConfig(contribution="gradient"), rollout_log_probs=rollout)
    old = torch.zeros_like(logp)
    for name in (backend, "reference"):
        out = bapo_loss_from_log_probs(logp, old, A, backend=name, **options)
        assert out.metrics["bapo_pos_share_max"].isnan()


def test_the_rows_of_a_table_are_added_in_order(backend, device):
    """As after an all-reduce: 1e16 + 1 - 1e16 is 0, in another order 1."""
    config = BAPOConfig(token_weight="uniform")
    rows = torch.zeros(3, len(config.lower_grid) + len(config.upper_grid), dtype=torch.float64)
    rows[:, -len(config.upper_grid) :] = torch.tensor([[1e16], [1.0], [-1e16]])
    _, masses = solve(backend, rows.to(device), config.options)
    assert masses.tolist() == [0.0] * 6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_bad_old_log_prob_leaves_the_starting_bounds(bad, sign, contribution):
    g = torch.Generator().manual_seed(3)
    logp, old, A = (torch.randn(20, generator=g) for _ in range(3))
    old[7], A[7] = bad, sign
    config = BAPOConfig(target=1.0, contribution=contribution)
    got = find_clip_bounds(logp, old, A, config=config)
    assert got == reference.find_clip_bounds(logp, old, A, config=config)
    assert got.upper.item() == pytest.approx(1.2)


class TestHistogram:
    def batch(self, n=64):
        g = torch.Generator().manual_seed(1)
        old = -3 * torch.rand(4, n, generator=g)
        return old + 0.4 * torch.randn(4, n, generator=g), old, torch.randn(4, n, generator=g)

    def test_micro_batches_equal_one_batch(self):
        logp, old, A = self.batch()
        histogram = ContributionHistogram()
        for row in range(4):
            histogram.update(logp[row], old[row], A[row])
        assert histogram.solve() == find_clip_bounds(logp, old, A)

    def test_solve_may_be_repeated(self):
        histogram = ContributionHistogram().update(*self.batch())
        assert histogram.solve() == histogram.solve()
        lower_first = BAPOConfig(raise_first="lower", target=0.5)
        expected = reference.find_clip_bounds(*self.batch(), config=lower_first)
        assert histogram.solve(lower_first) == expected

    def test_reset(self):
        histogram = ContributionHistogram().update(*self.batch())
        histogram.reset()
        assert [b.item() for b in histogram.solve()] == pytest.approx([0.6, 1.2])

    def test_empty(self):
        assert ContributionHistogram().solve().upper.item() == pytest.approx(1.2)

    def test_sequence_modes_need_no_offsets_to_search(self):
        config = BAPOConfig(loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.1)
        flat = [t.flatten() for t in self.batch()]
        assert find_clip_bounds(*flat, config=config) == find_clip_bounds(*self.batch())

    def test_advantages_per_sequence(self):
        logp, old, _ = self.batch()
        A = torch.tensor([1.0, -1.0, 2.0, -2.0])
        expected = find_clip_bounds(logp, old, A[:, None].expand_as(logp))
        assert ContributionHistogram().update(logp, old, A).solve() == expected

    @pytest.mark.parametrize("target", [None, 0.9])
    def test_metrics_are_those_of_one_call(self, target):
        """All micro-batches together, one-sided, empty and saturated batches among them."""
        g = torch.Generator().manual_seed(2)
        configs = [BAPOConfig(**v) for v in VARIANTS] + [BAPOConfig.recipe()]
        seen = set()
        for _ in range(4):
            for config in configs:
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
                    assert value.item() == pytest.approx(expected[name].item(), rel=1e-6), name
                seen.add((got["bapo_saturated"].item(), got["bapo_pos_neg_ratio"].isinf().item()))
        assert seen >= {(0.0, False), (0.0, True), (1.0, False)}

    def test_config_of_other_grids_is_refused(self):
        histogram = ContributionHistogram().update(*self.batch())
        with pytest.raises(ValueError, match=r"config.ratio_lower_max must .*0\.9.*got 0\.8"):
            histogram.solve(BAPOConfig.recipe())

    @needs_native
    def test_same_bits_for_any_threads(self):
        g = torch.Generator().manual_seed(1)
        case = [torch.randn(50_000, generator=g) for _ in range(3)]
        tables = []
        threads = torch.get_num_threads()
        for count in (1, 2, 4, 1):
            torch.set_num_threads(count)
            tables.append(ContributionHistogram().update(*case).table)
        torch.set_num_threads(threads)
        assert all(torch.equal(tables[0], table) for table in tables)


def search_rank(rank):
    g = torch.Generator().manual_seed(0)
    logp, old, A = (torch.randn(30, generator=g) for _ in range(3))
    # Unequal counts, two ranks empty.
    pieces = [slice(0, 21), slice(21, 30), slice(30, 30), slice(30, 30)]
    mine = [t[pieces[rank]] for t in (logp, old, A)]
    bounds = find_clip_bounds(*mine, process_group=dist.group.WORLD)
    inner = find_clip_bounds(*mine, process_group=grid(2, 2).get_group("tensor"))  # of two ranks
    alone = find_clip_bounds(*mine)
    return [[x.item() for x in b] for b in (bounds, inner, alone)]


@pytest.mark.xdist_group("world")
def test_search_over_a_process_group(worlds):
    results = worlds(4).run(search_rank)
    g = torch.Generator().manual_seed(0)
    case = [torch.randn(30, generator=g) for _ in range(3)]
    expected = [b.item() for b in reference.find_clip_bounds(*case)]
    for rank in range(4):
        assert results[rank][0] == expected
    assert results[0][1] == results[1][1] == expected
    first = [t[:21] for t in case]
    assert results[0][2] == [b.item() for b in reference.find_clip_bounds(*first)]
    assert results[2][2] == pytest.approx([0.6, 1.2])


def equal_to_the_loop(*case, **options):
    got, expected = (f(*case, **options) for f in (find_clip_bounds, reference.find_clip_bounds))
    assert [b.item() for b in got] == [b.item() for b in expected], options


@pytest.mark.parametrize("preset", [BAPOConfig.paper, BAPOConfig.recipe])
@pytest.mark.parametrize("raise_first", ["upper", "lower"])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("kind", [("share", 0.4), ("share", 0.7), ("ratio", 1.0), ("ratio", 3.0)])
def test_presets_in_both_orders_kinds_and_contributions(preset, raise_first, contribution, kind):
    """16 variants of 2 presets, 20 batches each."""
    config = preset(
        raise_first=raise_first, contribution=contribution, target_kind=kind[0], target=kind[1]
    )
    g = torch.Generator().manual_seed(5)
    for _ in range(20):
        equal_to_the_loop(*random_case(g), config=config)


@pytest.mark.parametrize(
    ("lower", "upper"), [((0.6, 0.8, 0.05), (1.2, 2.0, 0.05)), ((0.6, 0.9, 0.02), (1.2, 3.0, 0.05))]
)
def test_every_grid_point_can_be_the_answer(lower, upper):
    """Ratios far outside: pos = c_high, neg = c_low; the target moves the answer over the grid."""
    reached = set()
    for k in range(1, 200):
        config = BAPOConfig(
            *lower,
            *upper,
            target_kind="ratio",
            target=k * 0.0301,
            token_weight="uniform",
            raise_first="lower",
        )
        logp, A = torch.tensor([3.0, -3.0]), torch.tensor([1.0, -1.0])
        equal_to_the_loop(logp, torch.zeros(2), A, config=config)
        reached.add(find_clip_bounds(logp, torch.zeros(2), A, config=config).upper.item())
    assert len(reached) > len(bound_grid(*upper)) // 2


def answers_of_the_loop(logp, old, A, config):
    """The loop's answers for 40 orders of the same tokens."""
    answers = set()
    for seed in range(40):
        order = torch.randperm(len(A), generator=torch.Generator().manual_seed(seed))
        reordered = None if old is None else old[order]
        bounds = reference.find_clip_bounds(logp[order], reordered, A[order], config=config)
        answers.add(tuple(b.item() for b in bounds))
    return answers


def tied_rewards(positive, negative):
    """Rewards of +-1 and equal weights: positive tokens far above c_high, negative ones at r = 1,
    so that the share c_high*positive/(c_high*positive + negative) is .4 at a grid point."""
    A = torch.tensor([1.0] * positive + [-1.0] * negative)
    old = torch.full_like(A, -1.0)
    return old + 5.0 * (A > 0), old, A


@pytest.mark.parametrize(("positive", "negative"), [(4, 18), (6, 18), (8, 18)])
def test_ties_for_which_the_loop_depends_on_the_token_order(positive, negative):
    """The loop's sums round either way there; the search must give one of its answers."""
    case = tied_rewards(positive, negative)
    answers = answers_of_the_loop(*case, BAPOConfig())
    assert len(answers) == 2, "the case must be one that depends on the order"
    assert tuple(b.item() for b in find_clip_bounds(*case)) in answers


def test_mirrored_advantages_at_target_one_half():
    """Pairs +A, -A of equal weight, on-policy: pos and neg sum the same numbers in two orders."""
    config = BAPOConfig(target=0.5)
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        A, logp = torch.rand(19, generator=g) + 0.1, -3 * torch.rand(19, generator=g)
        case = torch.cat([logp, logp]), None, torch.cat([A, -A])
        answers = answers_of_the_loop(*case, config)
        assert tuple(b.item() for b in find_clip_bounds(*case, config=config)) in answers


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["advantage", "log_prob", "rollout"])
def test_values_that_are_not_finite(value, where):
    g = torch.Generator().manual_seed(3)
    logp, old, advantages, rollout = (torch.randn(20, generator=g) for _ in range(4))
    {"advantage": advantages, "log_prob": logp, "rollout": rollout}[where][7] = value
    configs = [BAPOConfig(), BAPOConfig.recipe(), BAPOConfig(raise_first="lower", target=0.8)]
    if value != value:  # with inf the loop itself computes 0*inf for a clipped token
        configs.append(BAPOConfig(contribution="gradient"))
    for config in configs:
        equal_to_the_loop(logp, old, advantages, config=config, rollout_log_probs=rollout)


def test_masked_tokens_may_hold_anything():
    g = torch.Generator().manual_seed(3)
    logp, old, A, rollout = (torch.randn(4, 9, generator=g) for _ in range(4))
    mask = torch.rand(4, 9, generator=g) < 0.5
    config = BAPOConfig(target=0.6)
    expected = find_clip_bounds(logp, old, A, mask, config=config, rollout_log_probs=rollout)
    poisoned = [t.masked_fill(~mask, v) for t, v in zip((logp, old, A, rollout), BAD, strict=True)]
    got = find_clip_bounds(*poisoned[:3], mask, config=config, rollout_log_probs=poisoned[3])
    assert got == expected


BAD = (torch.nan, torch.inf, -torch.inf, torch.nan)


@pytest.mark.parametrize("scope", ["step", "lagged"])
@pytest.mark.parametrize("statistics", ["all", "live"])
def test_step_and_lagged_scopes(scope, statistics):
    """step: no-grad log-probs; lagged: what the calls return, with NaN at inactive tokens."""
    case = make_case((8, 16), 65, staleness=0.4, seed=1)
    unmasked = unmasked_tokens(case)
    histogram = ContributionHistogram()
    for rows in torch.arange(8).chunk(4):
        arguments = [t[rows] for t in case.arguments()]
        if scope == "step":
            with torch.no_grad():
                logp = log_probs(case.logits[rows], case.labels[rows])[0]
        else:
            logp = bapo_loss(case.logits[rows], *arguments, statistics=statistics).log_probs
        histogram.update(logp, arguments[1], arguments[2], unmasked[rows])
    whole = bapo_loss(case.logits, *case.arguments()).bounds
    assert whole.upper > 1.2, "the case must need a search"
    assert histogram.solve() == whole


def test_histogram_on_a_device_before_the_first_update():
    histogram = ContributionHistogram(BAPOConfig.recipe(), device="cpu")
    assert [b.item() for b in histogram.solve()] == pytest.approx([0.6, 1.2])
    assert all(b.dtype == torch.float32 and b.ndim == 0 for b in histogram.solve())


def loss_rank(rank):
    results = {}
    case, tokens = loss_case()
    rows = [slice(0, 3), slice(3, 4)][rank]  # unequal counts
    arguments = [t[rows] for t in case.arguments()]
    for name, bounds in (("searched", None), ("given", (0.7, 1.3))):
        options = dict(bounds=bounds, process_group=dist.group.WORLD, batch_num_tokens=tokens)
        x = case.logits[rows].clone().requires_grad_()
        out = bapo_loss(x, *arguments, **options)
        out.loss.backward()
        true = reference.bapo_loss(case.logits[rows].double(), *arguments, **options)
        metrics = [{k: v.item() for k, v in o.metrics.items()} for o in (out, true)]
        results[name] = (out.loss.item(), *metrics, x.grad)
    search = ClipBoundSearch(scope="step", process_group=dist.group.WORLD)
    unmasked = arguments[3].bool() & (arguments[0] != -100)
    search.update(log_probs(case.logits[rows], arguments[0])[0], *arguments[1:3], unmasked)
    search.step()
    results["step"] = {k: v.item() for k, v in search.metrics.items()}
    empty = [t[:0] for t in case.arguments()] if rank else case.arguments()
    logits = case.logits[:0] if rank else case.logits
    out = bapo_loss(logits, *empty, process_group=dist.group.WORLD)  # one rank without tokens
    results["empty"] = [b.item() for b in out.bounds]
    return results


def loss_case():
    case = make_case((4, 16), 65, staleness=0.4, seed=5, poison=False)
    return case, int(unmasked_tokens(case).sum())


@pytest.fixture(scope="module")
def two_ranks(worlds):
    return worlds(2).run(loss_rank)


@pytest.mark.xdist_group("world")
def test_two_ranks_are_one_batch(two_ranks):
    case, _ = loss_case()
    x = case.logits.clone().requires_grad_()
    whole = bapo_loss(x, *case.arguments())
    whole.loss.backward()
    assert whole.bounds.upper > 1.2, "the case must need a search"
    parts = [two_ranks[rank]["searched"] for rank in (0, 1)]
    assert sum(p[0] for p in parts) == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat([p[3] for p in parts]), x.grad, rtol=1e-6, atol=1e-9)
    for part in parts:
        for name in (*SHARES, "bapo_clip_high"):
            assert part[1][name] == pytest.approx(whole.metrics[name].item(), rel=1e-6)
    assert two_ranks[0]["empty"] == two_ranks[1]["empty"] == [b.item() for b in whole.bounds]


@pytest.mark.xdist_group("world")
def test_metrics_of_a_step_of_two_ranks(two_ranks):
    case, _ = loss_case()
    expected = bapo_loss(case.logits, *case.arguments()).metrics
    assert two_ranks[0]["step"] == two_ranks[1]["step"]
    for name, value in two_ranks[0]["step"].items():
        assert value == pytest.approx(expected[name].item(), rel=1e-5), name


def test_metrics_of_a_search_object():
    """They describe the decision in use, also after a load, and before the first decision."""
    config = BAPOConfig(token_weight="uniform", target=0.48)
    tokens = torch.tensor([1.5, 1.0]).log(), torch.zeros(2), torch.tensor([2.0, -3.0])
    assert ClipBoundSearch(config).metrics == ClipBoundSearch(config, "step").metrics == {}
    search = ClipBoundSearch(config, "lagged")
    start = search.metrics
    assert [v.item() for v in start.values()][:2] == pytest.approx([0.6, 1.2])
    assert all(v.isnan() for v in list(start.values())[2:])
    search.update(*tokens)
    assert all(search.metrics[name] is value for name, value in start.items())
    search.step()
    expected = bapo_loss_from_log_probs(*tokens, config=config).metrics
    saved = ClipBoundSearch(config, "lagged")
    saved.load_state_dict(search.state_dict())
    for of_search in (search.metrics, saved.metrics):
        assert of_search == {name: expected[name] for name in start}
    step = ClipBoundSearch(config, "step")
    step.load_state_dict(ClipBoundSearch(config, "step").state_dict())
    assert step.metrics == {}


@pytest.mark.xdist_group("world")
@pytest.mark.parametrize("name", ["searched", "given"])
@pytest.mark.parametrize("rank", [0, 1])
def test_metrics_of_two_ranks(two_ranks, rank, name):
    """A search covers the group; with bounds= there is no collective: each rank has its own."""
    _, got, expected, _ = two_ranks[rank][name]
    assert got.keys() == expected.keys()
    for metric, value in expected.items():
        assert got[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric


def of_other_grids():
    """Even grids of as many points, whose sums mean something else."""
    other = BAPOConfig(ratio_upper_start=1.4, ratio_upper_max=3.2)
    assert len(other.upper_grid) == len(BAPOConfig().upper_grid)
    return ClipBoundSearch(other, "lagged").state_dict()


BAD_TABLES = {
    "nan": (
        torch.full((54,), torch.nan),
        r"table must have sums that are finite and >= 0, got \[nan",
    ),
    "negative": (-torch.ones(54), r"table must have sums that are finite and >= 0, got \[-1.0\]"),
    "short": (torch.zeros(2), r"table must have shape \(54,\), as the grids .*, got \(2,\)"),
    "list": ([0.0] * 54, "table must be a tensor, got list"),
    "meta": (torch.zeros(54, device="meta"), "device of a histogram must have memory, got meta"),
}
BAD_STATES = {
    "none": (lambda state: None, "state must be what state_dict.. returned, got NoneType"),
    "empty": (lambda state: {}, r"state must be what state_dict.. returned, got \[\]"),
    "scope": (
        lambda state: state | {"scope": "step"},
        "scope must be 'lagged' in the state too, got",
    ),
    "grids": (
        lambda state: of_other_grids(),
        "config.ratio_upper_start must be 1.2 in the state too",
    ),
    "weights": (
        lambda state: state | {"config": {"token_weight": "uniform"}},
        "config.token_weight must be 'rollout_prob' in the state too, got 'uniform'",
    ),
    **{
        name: (lambda state, table=table: state | {"table": table}, message)
        for name, (table, message) in BAD_TABLES.items()
    },
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_is_refused_changes_nothing(name):
    change, message = BAD_STATES[name]
    search = ClipBoundSearch(scope="lagged")
    tokens = torch.tensor([1.5, 1.0]).log(), torch.zeros(2), torch.tensor([2.0, -3.0])
    search.update(*tokens)
    search.step()
    search.update(*tokens)
    before = search.state_dict()
    assert before["table"].any()
    with pytest.raises(ValueError, match=message):
        search.load_state_dict(change(search.state_dict()))
    after = search.state_dict()
    assert torch.equal(before.pop("table"), after.pop("table"))
    assert before == after


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_that_is_refused_is_not_kept(name):
    histogram = ContributionHistogram()
    table, message = BAD_TABLES[name]
    with pytest.raises(ValueError, match=message):
        histogram.load(table)
    assert histogram.table is None


def test_tokens_without_memory_are_refused():
    """They would be lost without a word."""
    tokens = torch.zeros(3, device="meta"), None, torch.ones(3, device="meta")
    for histogram in (ContributionHistogram(), ContributionHistogram(device="cpu")):
        with pytest.raises(ValueError, match="log_probs must have values, got .* meta"):
            histogram.update(*tokens)
    with pytest.raises(ValueError, match="the device of a histogram must have memory, got meta"):
        ClipBoundSearch(scope="step", device="meta")
