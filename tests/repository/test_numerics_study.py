"""The study of rounding: its arithmetic against independent computations, and its page."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import needs_native

from bapo_kernels import BAPOConfig, ClipBounds, reference
from benchmarks.numerics import decisions, errors, figures, head, page
from benchmarks.records import load

PRESETS = (BAPOConfig.paper(), BAPOConfig.recipe())


def pool():
    g = torch.Generator().manual_seed(0)
    return -6 * torch.rand(200, generator=g, dtype=torch.float64), g


def batches_of(config):
    logp, g = pool()
    return logp, decisions.Batches.draw(config, logp, 12, 40, g)


def test_the_page_has_the_committed_records_of_every_case():
    records, text = load(page.RESULTS), page.PAGE.read_text()
    assert text == page.page()
    assert [n for n in page.blocks(records) if f"<!-- {n} -->" not in text] == []
    found, by_preset = figures.frames(records)
    assert set(by_preset) == {"paper", "recipe"}
    assert sum(r["batches"] for r in by_preset.values()) == 10_000
    at_logits = found[(found.part == "logits") & (found.method == "bapo_kernels cpu")]
    cases = set(zip(at_logits["dtype"], at_logits.V, at_logits.rows, strict=True))
    assert len(cases) == len(errors.DTYPES) * len(errors.VOCABULARIES) * len(errors.ROWS)
    of_head = found[(found.part == "head") & (found.quantity == "log_probs")]
    ours = of_head[of_head.method == "bapo_kernels cpu, float32 logits"]
    assert set(ours.H) == set(head.WIDTHS)
    assert ours.error.max() <= 2e-6, "what the page promises"


@pytest.mark.parametrize(
    ("bits", "dtype"), [(24, torch.float32), (11, torch.float16), (8, torch.bfloat16)]
)
def test_rounding_matches_the_dtype(bits, dtype):
    x = torch.cat([-20 * torch.rand(999, dtype=torch.float64) - 1e-3, -torch.arange(1.0, 9) / 4])
    assert torch.equal(decisions.rounded(x, bits), x.to(dtype).double())
    assert torch.equal(decisions.rounded(x.to(dtype).double(), bits), x.to(dtype).double())


def test_perturbations_reach_half_a_unit_in_both_directions():
    x = -20 * torch.rand(9_999, dtype=torch.float64) - 1e-3
    units = (decisions.perturbed(x, 12, pool()[1]) - x) / decisions.ulp(x, 12)
    assert -0.5 <= units.min() < -0.49
    assert 0.49 < units.max() <= 0.5


def test_the_loop_raises_one_bound_then_the_other():
    grid = dict(ratio_lower_max=0.64, ratio_upper_max=1.35)  # three points below, four above
    upper_first = decisions.visits(BAPOConfig(**grid))
    assert upper_first == ([0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 3, 3])
    lower_first = decisions.visits(BAPOConfig(raise_first="lower", **grid))
    assert lower_first == ([0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3])


@pytest.mark.parametrize("config", PRESETS, ids=("paper", "recipe"))
def test_paths_stop_where_the_loop_stops(config):
    logp, batches = batches_of(config)
    lower, upper = decisions.visits(config)
    at = decisions.stops(batches.path(logp), batches.target)
    assert len(set(at.tolist())) > 5, "the searches must stop at many points"
    for b, k in enumerate(at.tolist()):
        tokens = logp[batches.index[b]], batches.old[b], batches.A[b]
        bounds = ClipBounds(
            torch.tensor(config.lower_grid[lower[k]]), torch.tensor(config.upper_grid[upper[k]])
        )
        asked = replace(config, target=batches.target[b].item())
        assert reference.find_clip_bounds(*tokens, config=asked) == bounds


def test_the_one_pass_search_is_compared_with_the_loop(monkeypatch):
    logp, batches = batches_of(PRESETS[0])
    assert decisions.against_the_loop(batches, logp.float()) == []
    wrong = ClipBounds(torch.tensor(0.6), torch.tensor(9.0))
    monkeypatch.setattr(decisions, "find_clip_bounds", lambda *_, **__: wrong)
    margin = decisions.margins(batches.path(logp.float()), batches.target)
    assert decisions.against_the_loop(batches, logp.float()) == margin.tolist()


def test_stops_and_margins_by_hand():
    """The second row stops at its second point, the third at its last, where nothing is decided.

    The last one is a tie: any smaller value flips it.
    """
    rows = [[0.1, 0.3, 0.2, 0.9], [0.1, 0.5, 0.41, 0.9], [0.1, 0.2, 0.3, 0.41]]
    values, target = (
        torch.tensor([*rows, [0.1, 0.25, 0.5, 0.9]]),
        torch.tensor([0.5, 0.4, 0.4, 0.25]),
    )
    assert decisions.stops(values, target).tolist() == [3, 1, 3, 1]
    margins = torch.tensor([0.2, 0.1, 0.1, 0.0])
    torch.testing.assert_close(decisions.margins(values, target), margins)
    assert decisions.margins(values, target)[3] == 0
    assert decisions.stops(values - 1e-6, target)[3] == 2


def test_flipped_targets_match_a_scan():
    g = torch.Generator().manual_seed(0)
    values = torch.rand(50, 9, generator=g, dtype=torch.float64)
    other = values + 0.2 * torch.randn(values.shape, generator=g, dtype=torch.float64)
    low, high = values[:, 0], values[:, :-1].amax(-1) + 1e-3
    share = decisions.flipped(values, other, low, high)
    steps = 2_000
    found = torch.zeros(50)
    for i in range(steps):
        target = low + (high - low) * (i + 0.5) / steps
        found += decisions.stops(values, target) != decisions.stops(other, target)
    # a scan misses at most one step at each end of an interval, and there are at most 8
    torch.testing.assert_close(share, found.double() / steps, rtol=0, atol=8 / steps)


def test_flips_are_those_of_each_path():
    logp, batches = batches_of(PRESETS[0])
    paths = batches.path(logp), batches.path(logp - 0.5)
    assert decisions.flips([batches], [paths[0]], logp)["observed"] == 0
    found = decisions.flips([batches], [paths[0]], logp - 0.5)
    before, after = (
        [
            next((k for k, q in enumerate(row[:-1]) if q >= t), len(row) - 1)
            for row, t in zip(path.tolist(), batches.target.tolist(), strict=True)
        ]
        for path in paths
    )
    assert found["observed"] == sum(a != b for a, b in zip(before, after, strict=True)) > 0
    assert 0 < found["all_targets"] <= len(batches.target)


def test_errors_by_hand():
    truth, got = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.5])
    assert errors.error_of(got, truth) == [0.5, 0.125]
    assert errors.error_of(got, truth, norm=2) == pytest.approx([0.5, 0.1])
    assert errors.error_of(got.log() * math.inf, truth) is None


def test_every_kind_of_rows_makes_a_valid_case():
    """Labels are allowed, and every ratio is far from every bound."""
    for make in errors.ROWS.values():
        z = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
        case = errors.case_of(make(z), torch.Generator().manual_seed(1))
        logp = reference.log_probs(case.logits.double(), case.labels)[0]
        assert logp.isfinite().all()
        log_ratio = logp - case.old_log_probs
        config = case.options["config"]
        for bound in (*config.lower_grid, *config.upper_grid):
            assert (log_ratio - math.log(bound)).abs().min() > 0.1


@needs_native
def test_float32_logits_of_bfloat16_hidden_states():
    """No further than 2e-6 from float64; bfloat16 logits are a thousand times as wrong."""
    found = head.errors_of_heads(head.Inputs.draw(4, head.V, 64))
    error = {name: errors["log_probs"][0] for name, errors in found.items()}
    assert error["bapo_kernels cpu, float32 logits"] <= 2e-6
    assert error["bapo_kernels cpu"] > 1e-3
    assert error["bfloat16 product, then float32"] > 1e-3
    assert error["prime-rl fp32 head, log_softmax"] < 1e-4
