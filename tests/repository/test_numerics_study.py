"""The study of rounding: its arithmetic against independent computations, and its page."""

import math

import pytest
import torch
from helpers import assert_within_budget, needs_native

from bapo_kernels import BAPOConfig, ClipBounds, reference
from benchmarks.numerics import decisions, errors, figures, head, page
from benchmarks.records import load


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


def test_rounding_matches_the_dtypes_and_perturbations_reach_half_a_unit():
    x = -20 * torch.rand(999, dtype=torch.float64) - 1e-3
    x = torch.cat([x, -torch.arange(1, 9, dtype=torch.float64) / 4])
    for bits, dtype in ((24, torch.float32), (11, torch.float16), (8, torch.bfloat16)):
        assert torch.equal(decisions.rounded(x, bits), x.to(dtype).double())
    g = torch.Generator().manual_seed(0)
    units = (decisions.perturbed(x, 12, g) - x) / decisions.ulp(x, 12)
    assert -0.5 <= units.min() < -0.49
    assert 0.49 < units.max() <= 0.5


@pytest.mark.parametrize(
    "config",
    [BAPOConfig.paper(), BAPOConfig.paper(raise_first="lower"), BAPOConfig.recipe()],
    ids=["paper", "lower first", "recipe"],
)
def test_the_one_pass_search_is_compared_with_the_loop(monkeypatch, config):
    """Which raises an AssertionError if a path does not stop where the loop does."""
    g = torch.Generator().manual_seed(0)
    logp = -6 * torch.rand(200, generator=g, dtype=torch.float64)
    batches = decisions.Batches.draw(config, logp, 12, 40, g)
    path, target = batches.path(logp.float()), batches.target
    assert len(set(decisions.stops(path, target).tolist())) > 5, "they must stop at many points"
    assert decisions.against_the_loop(batches, logp.float()) == []
    assert decisions.flips([batches], [path], logp.float())["observed"] == 0
    other = logp.float() - 0.5
    differ = decisions.stops(path, target) != decisions.stops(batches.path(other), target)
    found = decisions.flips([batches], [path], other)
    assert found["observed"] == differ.sum() > 0
    assert 0 < found["all_targets"] <= len(target)
    wrong = ClipBounds(torch.tensor(0.6), torch.tensor(9.0))
    monkeypatch.setattr(decisions, "find_clip_bounds", lambda *_, **__: wrong)
    margin = decisions.margins(path, target)
    assert decisions.against_the_loop(batches, logp.float()) == margin.tolist()


def test_margins_by_hand():
    """The second row stops at its second point, the third at its last, where nothing is decided.

    The last one is a tie: any smaller value flips it.
    """
    rows = [[0.1, 0.3, 0.2, 0.9], [0.1, 0.5, 0.41, 0.9], [0.1, 0.2, 0.3, 0.41]]
    values = torch.tensor([*rows, [0.1, 0.25, 0.5, 0.9]])
    target = torch.tensor([0.5, 0.4, 0.4, 0.25])
    assert decisions.stops(values, target).tolist() == [3, 1, 3, 1]
    margins = torch.tensor([0.2, 0.1, 0.1, 0.0])
    operand = values.max().item()
    assert_within_budget("margins", decisions.margins(values, target), margins, margins, operand)
    assert decisions.stops(values - 1e-6, target)[3] == 2


def test_flipped_targets_match_a_scan():
    g = torch.Generator().manual_seed(0)
    values = torch.rand(50, 9, generator=g, dtype=torch.float64)
    other = values + 0.2 * torch.randn(values.shape, generator=g, dtype=torch.float64)
    low, high = values[:, 0], values[:, :-1].amax(-1) + 1e-3
    share, steps = decisions.flipped(values, other, low, high), 2_000
    found = torch.zeros(50, dtype=torch.float64)
    for i in range(steps):
        target = low + (high - low) * (i + 0.5) / steps
        found += decisions.stops(values, target) != decisions.stops(other, target)
    # a scan misses at most one step at each end of an interval, and there are at most 8
    torch.testing.assert_close(share, found / steps, rtol=0, atol=8 / steps)


def test_errors_by_hand():
    truth, got = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.5])
    assert errors.error_of(got, truth) == [0.5, 0.125]
    assert errors.error_of(got, truth, norm=2) == [0.5, 0.1]
    assert errors.error_of(got.log() * math.inf, truth) is None


def test_ratios_of_every_kind_of_rows_are_far_from_every_bound():
    for make in errors.ROWS.values():
        z = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
        case = errors.case_of(make(z), torch.Generator().manual_seed(1))
        logp, _ = reference.log_probs(case.logits.double(), case.labels)
        assert logp.isfinite().all()
        config = case.options["config"]
        bounds = torch.tensor([*config.lower_grid, *config.upper_grid]).log()
        assert (logp - case.old_log_probs - bounds[:, None]).abs().min() > 0.1


@needs_native
def test_float32_logits_of_bfloat16_hidden_states():
    """No further than 2e-6 from float64; bfloat16 logits are a thousand times as wrong."""
    found = head.errors_of_heads(head.Inputs.draw(4, head.V, 64))
    error = {name: errors["log_probs"][0] for name, errors in found.items()}
    assert error["bapo_kernels cpu, float32 logits"] <= 2e-6
    assert error["bapo_kernels cpu"] > 1e-3
    assert error["bfloat16 product, then float32"] > 1e-3
    assert error["prime-rl fp32 head, log_softmax"] < 1e-4
