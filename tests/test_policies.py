"""Surrogates, ratios of sequences and bounds of tokens: formulas, derivatives, flows, misuse.

Their numbers on every backend are in the tests of the losses, whose options they are;
test_policy_parity.py compares them with TRL and verl.
"""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import (
    assert_within_budget,
    case_with_sets,
    check_with_sets,
    make_case,
    needs_native,
    per_token,
    run_kernel,
    unmasked_tokens,
)
from torch.autograd import gradcheck

from bapo_kernels import (
    BAPOConfig,
    ClipBounds,
    ClipBoundSearch,
    ContributionHistogram,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    debug,
    find_clip_bounds,
    linear_log_probs,
    reference,
)
from bapo_kernels.core.head import Head, HeadGradients

SURROGATES = ["clip", "cispo", "sapo", "mask"]
LEVELS = ["token", "sequence"]
CU = [0, 3, 3, 8, 10]  # of packed tokens, of which two more are behind the last sequence


def policy(surrogate="clip", level="token", **options):
    return BAPOConfig(surrogate=surrogate, ratio_level=level, **options)


def tokens(shape=(3, 5), seed=0, dtype=torch.float64):
    """Log-probs, old ones, advantages and a mask."""
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(shape, generator=g, dtype=dtype)
    old = logp + 0.4 * torch.randn(shape, generator=g, dtype=dtype)
    advantages = torch.randn(shape, generator=g, dtype=dtype)
    return logp, old, advantages, torch.rand(shape, generator=g) < 0.8


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "A", "weight", "is_clipped"),
    [
        (1.1, 2.0, 1.1, 0.0),
        (1.5, 2.0, 1.2, 1.0),
        (0.5, 2.0, 0.8, 1.0),  # clipped from both sides, whatever the sign
        (1.5, -2.0, 1.2, 1.0),
        (0.5, -2.0, 0.8, 1.0),
        (9.0, 0.0, 1.2, 1.0),
    ],
)
def test_cispo_by_hand(backend, device, r, A, weight, is_clipped):
    logp = torch.tensor([-0.7], device=device, requires_grad=True)
    batch = logp.detach() - math.log(r), torch.tensor([A], device=device)
    config = BAPOConfig.fixed(0.8, 1.2, surrogate="cispo")
    out = bapo_loss_from_log_probs(logp, *batch, config=config, backend=backend)
    (g,) = torch.autograd.grad(out.loss, logp)
    assert out.loss.item() == pytest.approx(-weight * A * -0.7)
    assert g.item() == pytest.approx(-weight * A)
    assert out.metrics["pg_clipfrac"] == is_clipped


def test_mask_by_hand(backend, device):
    """Outside of the bounds nothing is left, whatever the sign; an infinite one masks no token."""
    r, upper, kept = torch.tensor(
        [(1.1, 1.2, 1), (1.5, 1.2, 0), (0.5, 1.2, 0), (9.0, math.inf, 1)], device=device
    ).T
    A = torch.tensor([[2.0], [-1.0], [0.5]], device=device)  # each of all four
    r, upper, kept, A = torch.broadcast_tensors(r, upper, kept, A)
    logp = torch.full_like(r, -0.7).requires_grad_()
    options = dict(bounds=(torch.full_like(r, 0.8), upper), backend=backend)
    config = policy("mask", loss_agg_mode="token-sum")
    out = bapo_loss_from_log_probs(logp, -0.7 - r.log(), A, config=config, **options)
    (g,) = torch.autograd.grad(out.loss, logp)
    torch.testing.assert_close(g, -r * A * kept)
    torch.testing.assert_close(out.loss, g.sum())
    assert out.metrics["pg_clipfrac"] == 0.5
    assert out.metrics["pg_clipfrac_lower"] == 0.25


@pytest.mark.parametrize(("A", "tau"), [(2.0, 1.5), (-2.0, 0.7), (0.0, 0.7)])
@pytest.mark.parametrize("r", [0.3, 1.0, 2.5])
def test_sapo_by_hand(backend, device, r, A, tau):
    logp = torch.tensor([-0.7], device=device, requires_grad=True)
    batch = logp.detach() - math.log(r), torch.tensor([A], device=device)
    config = policy("sapo", sapo_tau_pos=1.5, sapo_tau_neg=0.7)
    out = bapo_loss_from_log_probs(logp, *batch, config=config, backend=backend)
    (g,) = torch.autograd.grad(out.loss, logp)
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    assert out.loss.item() == pytest.approx(-A * 4 / tau * gate)
    assert g.item() == pytest.approx(-A * 4 * gate * (1 - gate) * r)
    assert out.bounds == (0, math.inf)
    assert out.metrics["pg_clipfrac"] == out.metrics["bapo_saturated"] == 0


def test_ratio_of_a_sequence_by_hand(backend, device):
    """The mean over three unmasked tokens; the gradient of each is a third of the sum of all."""
    logp = torch.tensor([[-1.0, -2.0, -3.0, torch.nan]], device=device, requires_grad=True)
    old = torch.tensor([[-1.1, -1.9, -3.3, torch.nan]], device=device)
    A = torch.tensor([[1.0, 0.0, 4.0, torch.nan]], device=device)
    config = policy(level="sequence")
    mask = torch.tensor([[1, 1, 1, 0]], device=device)
    out = bapo_loss_from_log_probs(logp, old, A, mask, config=config, backend=backend)
    r = math.exp((0.1 - 0.1 + 0.3) / 3)
    assert out.loss.item() == pytest.approx(-r * 5 / 3)
    (g,) = torch.autograd.grad(out.loss, logp)
    assert g.tolist() == [pytest.approx([-r * 5 / 9] * 3 + [0])]
    assert out.metrics["ppo_kl"].item() == pytest.approx(-0.1)


# ---- derivatives --------------------------------------------------------------------------------

LAYOUTS = {"padded": {}, "packed": dict(cu_seqlens=torch.tensor(CU))}
TERMS = {
    "alone": {},
    "all terms": dict(kl_loss_coef=0.1, entropy_coef=0.01, loss_agg_mode="seq-mean-token-mean"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_gradcheck_of_the_reference(surrogate, level, terms, layout):
    """CISPO holds the ratio constant: there the old log-probs move with the others."""
    shape = (3, 5) if layout == "padded" else (12,)
    logp, old, A, mask = tokens(shape)
    entropy, delta = torch.rand(shape, dtype=torch.float64), old - logp
    more = dict(ref_log_probs=old - 0.1, rollout_is_weights=entropy + 0.5, **LAYOUTS[layout])
    config = policy(surrogate, level, **TERMS[terms])

    def loss(logp, entropy):
        before = logp + delta if surrogate == "cispo" else old
        batch = before, A, mask
        loss = reference.bapo_loss_from_log_probs
        return loss(logp, *batch, entropy=entropy, config=config, **more).loss

    assert gradcheck(loss, (logp.requires_grad_(), entropy.requires_grad_()))


def test_gradient_of_the_clamped_ratio_of_a_sequence(backend, device):
    """A log-ratio beyond 20, of the mean: no gradient, a finite loss."""
    logp = torch.tensor([[0.0, -1.0], [-0.5, -1.0]], device=device, requires_grad=True)
    old = logp.detach() - torch.tensor([[70.0, 0.0], [70.0, -69.9]], device=device)
    A = -torch.ones(2, 2, device=device)
    config = policy(level="sequence", loss_agg_mode="token-sum")
    out = bapo_loss_from_log_probs(logp, old, A, config=config, backend=backend)
    (g,) = torch.autograd.grad(out.loss, logp)
    assert out.loss.item() == pytest.approx(2 * math.exp(20) + 2 * math.exp(0.05))
    assert g[0].tolist() == [0, 0]
    assert g[1].tolist() == pytest.approx([math.exp(0.05)] * 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_forbidden_labels(backend, device, surrogate, level):
    """A log-prob of -inf: a ratio of exp(-20), and a gradient without NaN."""
    case = make_case((2, 4), 33, device=device, poison=False, masked=0.0, idle=0.0)
    place = (0, 1, int(case.labels[0, 1].clamp(min=0)))
    case.labels[0, 1] = place[-1]
    case.logits[place] = -torch.inf
    got = run_kernel(case.with_options(config=policy(surrogate, level)), backend)
    assert got.gradient.isfinite().all()
    assert got.output.log_probs[0, 1] == -torch.inf
    assert got.output.loss.isfinite() == (surrogate != "cispo"), "l = -clip(r)*A*logp is infinite"
    on_policy = replace(case, old_log_probs=None)
    got = run_kernel(on_policy.with_options(config=policy(surrogate, level)), backend)
    assert got.gradient.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_bad_old_log_probs_and_bounds_make_the_loss_nan(backend, device, surrogate, level):
    logp, old, A, _ = (t.float().to(device) for t in tokens())
    mask = torch.ones_like(A)
    mask[0, 0] = 0
    config = policy(surrogate, level)
    for bad in (torch.inf, -torch.inf, torch.nan):
        for place, is_nan in (((0, 0), False), ((1, 2), True)):
            spoiled = old.clone()
            spoiled[place] = bad
            batch = logp, spoiled, A, mask
            loss = bapo_loss_from_log_probs(*batch, config=config, backend=backend).loss
            assert loss.isnan() == is_nan
    if surrogate == "sapo":
        return
    for bad in (-0.1, 1.4, torch.nan):  # the upper bound of the token is 1.3
        for place, is_nan in (((0, 0), False), ((1, 2), True)):
            lower = torch.full_like(A, 0.7)
            lower[place] = bad
            options = dict(config=config, bounds=(lower, torch.full_like(A, 1.3)))
            out = bapo_loss_from_log_probs(logp, old, A, mask, backend=backend, **options)
            assert out.loss.isnan() == is_nan


# ---- sequences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_packed_sequences_are_padded_ones(backend, device, surrogate):
    """Of lengths 3, 0, 5 and 2, and two tokens behind them that are masked."""
    logits, labels = torch.randn(12, 40), torch.randint(0, 40, (12,))
    old, A = -3 * torch.rand(12), torch.tensor([1.0, 7.0, -1.0, 0.5])
    config = policy(surrogate, "sequence", loss_agg_mode="seq-mean-token-mean")
    padded = torch.full((4, 5), -1)
    for row, (a, b) in enumerate(pairwise(CU)):
        padded[row, : b - a] = torch.arange(a, b)
    mask = padded >= 0

    def spread(values):
        return torch.where(mask.view(4, 5, *[1] * (values.ndim - 1)), values[padded], 0)

    leaf = logits.clone().to(device).requires_grad_()
    of_packed = labels.to(device), old.to(device), A.to(device)
    offsets = torch.tensor(CU, device=device)
    out = bapo_loss(leaf, *of_packed, config=config, cu_seqlens=offsets, backend=backend)
    out.loss.backward()
    other = spread(logits).to(device).requires_grad_()
    of_padded = spread(labels).to(device), spread(old).to(device), A.to(device), mask.to(device)
    wanted = bapo_loss(other, *of_padded, config=config, backend=backend)
    wanted.loss.backward()
    torch.testing.assert_close(out.loss, wanted.loss)
    torch.testing.assert_close(spread(leaf.grad.cpu()), other.grad.cpu())
    assert not leaf.grad[10:].any()
    for name, value in wanted.metrics.items():
        torch.testing.assert_close(out.metrics[name], value)


def test_sequences_alone_and_together_have_the_same_bits(backend, device):
    """Of 1,300 tokens, more than a block of any kernel."""
    logp, old, A, _ = (t.float().to(device) for t in tokens((3, 1_300)))
    mask = (torch.rand(3, 1_300) < 0.9).to(device)
    config = policy(level="sequence", loss_agg_mode="token-sum")

    def gradient(rows):
        leaf = logp[rows].clone().requires_grad_()
        batch = old[rows], A[rows], mask[rows]
        options = dict(config=config, bounds=(0.5, 2.0), backend=backend)
        return torch.autograd.grad(bapo_loss_from_log_probs(leaf, *batch, **options).loss, leaf)[0]

    together = gradient(slice(None))
    assert together.any()
    for row in range(3):
        assert torch.equal(gradient(slice(row, row + 1))[0], together[row])
    assert torch.equal(gradient(slice(None)), together)


@pytest.mark.parametrize("offsets", [[0, 5, 3, 12], [2, 6, 12], [0, 6, 40], [0, -9, 12]])
def test_broken_offsets_of_sequences(backend, device, offsets, monkeypatch):
    """They do not rise from 0 to at most 12. As on a GPU, where only the reference reads them."""
    monkeypatch.setattr("bapo_kernels.core.inputs.is_readable", lambda offsets: False)
    logp, old, A, _ = (t.float().to(device) for t in tokens((12,)))
    options = dict(cu_seqlens=torch.tensor(offsets, device=device), config=policy(level="sequence"))
    if backend == "reference":
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            bapo_loss_from_log_probs(logp, old, A, backend=backend, **options)
        return
    assert bapo_loss_from_log_probs(logp, old, A, backend=backend, **options).loss.isnan()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_live_statistics_skip_whole_sequences(backend, device, surrogate):
    """A token without advantage is part of its sequence's ratio, if another one has one."""
    case = make_case((4, 6), 50, device=device, config=policy(surrogate, "sequence"), poison=False)
    case.advantages[1] = 0.0
    case.advantages[2] = torch.tensor([0.0, 0.0, 0.7, 0.0, 0.0, 0.0])
    unmasked = unmasked_tokens(case)
    results = [run_kernel(case, backend, statistics=s) for s in ("all", "live")]
    assert torch.equal(results[0].output.loss, results[1].output.loss)
    assert torch.equal(results[0].gradient, results[1].gradient)
    live = results[1].output
    skipped = unmasked & (torch.arange(4, device=device) == 1)[:, None]
    assert torch.equal(live.log_probs.isnan(), skipped)
    assert live.metrics["live_tokens"] == unmasked[[0, 2, 3]].sum()


def test_sequences_of_three_dimensions(backend, device):
    """The last one has the tokens."""
    logp, old, A, mask = (t.float().to(device) for t in tokens((2, 3, 5)))
    config = policy(level="sequence", loss_agg_mode="seq-mean-token-mean")
    results = []
    for shape in ((2, 3, 5), (6, 5)):
        leaf = logp.view(shape).requires_grad_()
        batch = old.view(shape), A.view(shape), mask.view(shape)
        bounds = 0.8, (1.0 + 0.3 * A.abs()).view(shape)
        options = dict(config=config, bounds=bounds, backend=backend)
        out = bapo_loss_from_log_probs(leaf, *batch, **options)
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        results.append((out.loss, gradient.view(6, 5)))
    assert all(map(torch.equal, *results))


def test_scope_of_a_step(backend, device):
    """Micro-batches of whole sequences, solved together, are the search of one call."""
    logp, old, A, mask = tokens((6, 5), dtype=torch.float32)
    batch = logp.to(device), old.to(device), A.to(device), mask.to(device)
    config = policy("cispo", "sequence", token_weight="uniform")
    metrics = bapo_loss_from_log_probs(*batch, config=config, backend=backend).metrics
    between = metrics["bapo_pos_share_start"] + metrics["bapo_pos_share_max"]
    config = replace(config, target=between.item() / 2)
    search = ClipBoundSearch(config, scope="step")
    for rows in (slice(0, 2), slice(2, 6)):
        search.update(*(t[rows] for t in batch))
    search.step()
    out = bapo_loss_from_log_probs(*batch, config=config, backend=backend)
    assert out.bounds == search.bounds == find_clip_bounds(*batch, config=config)
    assert 1.2 < out.bounds.upper < 3, "the case must need a search"
    flat = [t.flatten() for t in batch]
    offsets = torch.arange(0, 35, 5, device=device)
    assert find_clip_bounds(*flat, config=config, cu_seqlens=offsets) == out.bounds
    token = find_clip_bounds(*batch, config=replace(config, ratio_level="token"))
    assert token != out.bounds, "the ratio of the tokens is another one"


# ---- hidden states and sampling masks -----------------------------------------------------------


def head_case(config):
    return make_case((4, 6), 61, config=config, poison=False, masked=0.2)


def linear_gradients(config, chunk_tokens, bounds, frozen=False, idle_sequence=None):
    case = head_case(config)
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 6, 16, generator=g).requires_grad_()
    weight = torch.randn(61, 16, generator=g).requires_grad_(not frozen)
    logp, _ = linear_log_probs(hidden.detach(), weight.detach(), case.labels)
    noise = 0.3 * torch.randn(4, 6, generator=g)
    if idle_sequence is not None:
        case.advantages[idle_sequence] = 0.0
    batch = case.labels, logp + noise, case.advantages, case.response_mask
    options = dict(config=config, bounds=bounds, chunk_tokens=chunk_tokens)
    out = bapo_linear_loss(hidden, weight, *batch, **options)
    leaves = (hidden,) if frozen else (hidden, weight)
    return out.loss, torch.autograd.grad(out.loss, leaves)


OWN = (per_token((4,), 5, 0.7, 0.95), per_token((4, 6), 6, 1.05, 1.3))


@needs_native
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bounds", [None, OWN], ids=["searched", "own"])
@pytest.mark.parametrize(
    ("surrogate", "level"), [("cispo", "token"), ("clip", "sequence"), ("sapo", "sequence")]
)
def test_chunks_change_nothing_but_rounding(surrogate, level, bounds, frozen):
    bounds = None if surrogate == "sapo" else bounds
    config = policy(surrogate, level, target=0.6)
    loss, wanted = linear_gradients(config, None, bounds, frozen=frozen)
    for chunk_tokens in (5, 1):
        other, gradients = linear_gradients(config, chunk_tokens, bounds, frozen=frozen)
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_sampling_masks(backend, device, surrogate, level):
    bounds = None
    if surrogate == "cispo":
        bounds = per_token(seed=5, low=0.7, high=1.0), per_token(seed=6, low=1.0, high=1.3)
    config = policy(surrogate, level, target=0.6, entropy_coef=0.01)
    case, mask = case_with_sets(device=device, config=config, bounds=bounds, outside=False)
    check_with_sets(case, mask, backend, statistics="live")


# ---- bounds of tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "mask"])
def test_bounds_of_every_kind_are_the_same(backend, device, surrogate):
    case = make_case((3, 7), 50, device=device, config=policy(surrogate))
    wanted = run_kernel(case, backend, bounds=(0.75, 1.25))
    numbers = torch.tensor(0.75, device=device), torch.tensor(1.25, device=device)
    for lower, upper in (
        numbers,
        (0.75, numbers[1].expand(3)),
        (numbers[0].expand(3, 7), 1.25),
        (numbers[0].double().expand(3), numbers[1].half().expand(3, 7)),
    ):
        got = run_kernel(case, backend, bounds=ClipBounds(lower, upper))
        assert torch.equal(got.gradient, wanted.gradient)
        assert torch.equal(got.output.loss, wanted.output.loss)
        for name, value in wanted.output.metrics.items():
            assert torch.equal(got.output.metrics[name], value), name
        own = any(getattr(bound, "ndim", 0) for bound in (lower, upper))
        for shown, value in zip(got.output.bounds, (0.75, 1.25), strict=True):
            assert shown.dtype == torch.float32
            assert shown.shape == ((3, 7) if own else ())
            assert (shown == value).all()
            assert shown.data_ptr() not in {b.data_ptr() for b in numbers}, "they are copied"


def test_metrics_are_means_over_counted_tokens(backend, device):
    logp, old, A, mask = (t.to(device) for t in tokens(dtype=torch.float32))
    lower, upper = per_token((3, 5), 1, 0.5, 1.0), per_token((3,), 2, 1.0, 2.0)
    lower = lower.masked_fill(~mask.cpu(), torch.nan).to(device)
    bounds = lower, upper.to(device)
    out = bapo_loss_from_log_probs(logp, old, A, mask, bounds=bounds, backend=backend)
    wanted = lower[mask].double().mean(), bounds[1][:, None].expand(3, 5)[mask].double().mean()
    for name, value in zip(("bapo_clip_low", "bapo_clip_high"), wanted, strict=True):
        assert_within_budget(name, out.metrics[name], value.float(), value)
    none = bapo_loss_from_log_probs(logp, old, A, mask & False, bounds=bounds, backend=backend)
    assert none.metrics["bapo_clip_low"] == none.metrics["bapo_clip_high"] == none.loss == 0


def test_rows_of_a_frozen_head_without_advantage_take_no_product(monkeypatch):
    """Those of sequences without any, as where the ratio is the token's."""
    added = []

    def add(self, rows, h, dlogits, original=HeadGradients.add):
        added.extend(rows.tolist())
        return original(self, rows, h, dlogits)

    monkeypatch.setattr(HeadGradients, "add", add)
    linear_gradients(policy(level="sequence"), 5, None, frozen=True, idle_sequence=1)
    assert added
    assert not {*range(6, 12)} & {*added}


@needs_native
@pytest.mark.parametrize(
    ("surrogate", "level", "frozen", "passes"),
    [("sapo", "token", False, 1), ("clip", "sequence", False, 2), ("clip", "sequence", True, 1)],
)
def test_rows_of_a_head_that_are_recomputed(monkeypatch, surrogate, level, frozen, passes):
    """Of sequences all rows but those of the last chunk, once; with a frozen head none."""
    rows = []

    def logits(self, of, memory, original=Head.logits):
        rows.append(of.numel())
        return original(self, of, memory)

    monkeypatch.setattr(Head, "logits", logits)
    monkeypatch.setattr("bapo_kernels.core.head.SUM_BYTES", 0)
    linear_gradients(policy(surrogate, level), 5, None, frozen=frozen)
    _, *made = rows  # the log-probs of the case are made first
    counted = int(unmasked_tokens(head_case(BAPOConfig())).sum())
    chunks = -(-counted // 5)
    held = made[chunks - 1]
    assert sum(made[:chunks]) == counted
    assert sum(made[chunks:]) == (passes - 1) * (counted - held)


@needs_native
def test_bounds_of_tokens_need_no_second_pass_over_undecided_rows(monkeypatch):
    """The row pass makes every gradient."""
    from bapo_kernels.core import logits

    monkeypatch.setattr(logits, "second_pass", None)
    for options in (dict(bounds=OWN), dict(config=policy("sapo"))):
        case = make_case((4, 6), 61, poison=False, **options)
        assert run_kernel(case, "cpu").gradient.any()


# ---- misuse -------------------------------------------------------------------------------------

BATCH = torch.zeros(2, 3), None, torch.ones(2, 3)
REFUSED = {
    "sapo bounds": (
        lambda: bapo_loss_from_log_probs(*BATCH, config=policy("sapo"), bounds=(0.8, 1.2)),
        "bounds must be None with surrogate='sapo', which has no bounds, got tuple",
    ),
    "sapo search": (
        lambda: find_clip_bounds(*BATCH, config=policy("sapo")),
        "config.surrogate must have bounds to search for, got 'sapo'",
    ),
    "sapo search of the reference": (
        lambda: reference.find_clip_bounds(*BATCH, config=policy("sapo")),
        "config.surrogate must have bounds to search for, got 'sapo'",
    ),
    "packed tokens of the reference": (
        lambda: reference.find_clip_bounds(
            BATCH[0][0], None, BATCH[2][0], config=policy(level="sequence")
        ),
        "cu_seqlens must be given for packed log_probs of shape (3,) with ratio_level='sequence', "
        "got None",
    ),
    "packed loss of the reference": (
        lambda: reference.bapo_loss_from_log_probs(
            BATCH[0][0], None, BATCH[2][0], config=policy(level="sequence")
        ),
        "cu_seqlens must be given for packed log_probs of shape (3,) with ratio_level='sequence', "
        "got None",
    ),
    "another level of the ratio": (
        lambda: ContributionHistogram(policy()).solve(policy(level="sequence")),
        "config.ratio_level must be that of the histogram ('token'), got 'sequence'",
    ),
    "state of another level of the ratio": (
        lambda: ClipBoundSearch(policy(level="sequence"), scope="step").load_state_dict(
            ClipBoundSearch(policy(), scope="step").state_dict()
        ),
        "config.ratio_level must be 'sequence' in the state too, got 'token'",
    ),
    "state that is older than the level": (
        lambda: ClipBoundSearch(policy(level="sequence"), scope="step").load_state_dict(
            dict(scope="step", config={}, bounds=None, metrics={}, table=None)
        ),
        "config.ratio_level must be 'sequence' in the state too, got 'token'",
    ),
    "sapo histogram": (
        lambda: ContributionHistogram(policy("sapo")),
        "config.surrogate must have bounds to search for, got 'sapo'",
    ),
    "sapo solve": (
        lambda: ContributionHistogram().solve(policy("sapo")),
        "config.surrogate must have bounds to search for, got 'sapo'",
    ),
    "sapo scope": (
        lambda: ClipBoundSearch(policy("sapo"), scope="lagged"),
        "scope must be 'call' with surrogate='sapo', which has no search, got 'lagged'",
    ),
    "cispo dual clip": (
        lambda: policy("cispo", clip_ratio_c=3.0),
        "clip_ratio_c must be None with surrogate='cispo', which has no dual clip, got 3.0",
    ),
    "cispo contribution": (
        lambda: policy("cispo", contribution="gradient"),
        "contribution must be 'surrogate' with surrogate='cispo', which clips no gradient away, "
        "got 'gradient'",
    ),
    "surrogate": (
        lambda: policy("gspo"),
        "surrogate must be one of ['cispo', 'clip', 'mask', 'sapo'], got 'gspo'",
    ),
    "ratio level": (
        lambda: policy(level="seq"),
        "ratio_level must be one of ['sequence', 'token'], got 'seq'",
    ),
    "tau": (
        lambda: policy("sapo", sapo_tau_neg=0.0),
        "sapo_tau_neg must be finite and > 0, got 0.0",
    ),
    "packed tokens": (
        lambda: find_clip_bounds(BATCH[0][0], None, BATCH[2][0], config=policy(level="sequence")),
        "cu_seqlens must be given for packed log_probs of shape (3,) with ratio_level='sequence', "
        "got None",
    ),
    "shape of bounds": (
        lambda: bapo_loss_from_log_probs(*BATCH, bounds=(0.8, torch.full((3,), 1.2))),
        "bounds.upper must have one element, or have the shape of log_probs (2, 3) or one entry "
        "per sequence (2,), got (3,)",
    ),
    "integer bounds": (
        lambda: bapo_loss_from_log_probs(*BATCH, bounds=(torch.ones(2).long(), 1.2)),
        "bounds.lower must be floating point, got torch.int64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_what_looks_like_misuse_and_is_not():
    assert BAPOConfig.recipe(surrogate="cispo").clip_ratio_c is None
    assert BAPOConfig.fixed(0.8, 1.2, surrogate="sapo").upper_grid == [math.inf]
    search = ClipBoundSearch(policy("sapo"))
    search.update(*BATCH)
    search.step()
    search.load_state_dict(search.state_dict())
    assert bapo_loss_from_log_probs(*BATCH, **search.options).loss < 0


def test_check_inputs_names_the_bounds_of_a_token():
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3).long()
    upper = torch.full((2, 3), 1.2)
    upper[1, 2] = 0.28
    message = r"bounds.upper must be >= 1, .*not an epsilon, got 0.28.* at \(1, 2\)"
    batch = labels, None, torch.ones(2)
    with pytest.raises(ValueError, match=message):
        debug.check_inputs(logits, *batch, bounds=(0.8, upper))
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    debug.check_inputs(logits, *batch, mask, bounds=(0.8, upper))
    with pytest.raises(
        ValueError, match=r"bounds.lower must be in \[0, 1\], .* got 1.5 at \(0, 0\)"
    ):
        debug.check_inputs(logits, *batch, bounds=(torch.tensor([1.5, 0.5]), upper))
