"""The one-pass search against the paper's loop, bound for bound."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import needs_native

from bapo_kernels import BAPOConfig, ContributionHistogram, find_clip_bounds, reference
from bapo_kernels.bounds import _search_with_tensor_ops, add_contributions, empty_table, search
from bapo_kernels.config import bound_grid
from bapo_kernels.inputs import token_inputs

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
    dict(target=0.0),
    dict(target=1.0),  # never met
]


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
    """P = 2*min(r, c_high), N = 3*max(r, c_low); share .4 wants P >= 2."""
    logp = torch.tensor([1.5, 1.0]).log()
    A = torch.tensor([2.0, -3.0])
    config = BAPOConfig(token_weight="uniform", target=0.48)
    bounds = find_clip_bounds(logp, torch.zeros(2), A, config=config)
    # 2*c_high >= .48*(2*c_high + 3)  <=>  c_high >= 1.3846
    assert bounds.upper.item() == pytest.approx(1.4)
    assert bounds.lower.item() == pytest.approx(0.6)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_ratios_exactly_on_grid_points(contribution):
    """On-policy every ratio is 1; with 1 on both grids its token counts on the inclusive side."""
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


@needs_native
def test_tensor_ops_equal_kernels():
    """Without the native library the search runs on tensor ops: the same table and bounds."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        for variant in VARIANTS:
            config = BAPOConfig(**variant)
            logp, old, A, mask = random_case(g)
            tokens = token_inputs(
                logp,
                "log_probs",
                config,
                old_log_probs=old,
                advantages=A,
                response_mask=mask,
                weighted=False,
            )
            tables = [empty_table(config, "cpu") for _ in range(2)]
            add_contributions("kernels", tables[0], logp, tokens, config)
            add_contributions("reference", tables[1], logp, tokens, config)
            torch.testing.assert_close(*tables, rtol=1e-12, atol=0)
            bounds, shares = search(tables[0], config)
            other_bounds, other_shares = _search_with_tensor_ops(tables[0], config)
            assert torch.equal(bounds, other_bounds)
            assert torch.equal(shares, other_shares)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_bad_old_log_prob_leaves_the_start_bounds(bad, sign, contribution):
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

    def test_solve_may_be_repeated_and_forgets_nothing(self):
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

    def test_another_config_is_refused(self):
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


def _rank(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    g = torch.Generator().manual_seed(0)
    logp, old, A = (torch.randn(30, generator=g) for _ in range(3))
    pieces = [slice(0, 21), slice(21, 30), slice(30, 30)]  # unequal counts, one rank empty
    mine = [t[pieces[rank]] for t in (logp, old, A)]
    bounds = find_clip_bounds(*mine, process_group=dist.group.WORLD)
    subgroup = dist.new_group([0, 1])
    inner = find_clip_bounds(*mine, process_group=subgroup) if rank < 2 else None
    alone = find_clip_bounds(*mine)
    results[rank] = [None if b is None else [x.item() for x in b] for b in (bounds, inner, alone)]
    dist.destroy_process_group()


def test_process_group(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "store"), results), nprocs=3)
        results = dict(results)
    g = torch.Generator().manual_seed(0)
    case = [torch.randn(30, generator=g) for _ in range(3)]
    expected = [b.item() for b in reference.find_clip_bounds(*case)]
    for rank in range(3):
        assert results[rank][0] == expected
    assert results[0][1] == results[1][1] == expected
    first = [t[:21] for t in case]
    assert results[0][2] == [b.item() for b in reference.find_clip_bounds(*first)]
    assert results[2][2] == pytest.approx([0.6, 1.2])
