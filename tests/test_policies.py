"""Surrogates, ratios of sequences and bounds of tokens: formulas, derivatives, flows, misuse.

Their numbers on every backend are in the tests of the losses, whose options they are;
test_policy_parity.py compares them with TRL and verl.
"""

import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from accuracy import assert_rounded, assert_same, assert_within_budget
from helpers import (
    check_against_reference,
    make_case,
    per_token,
    run_kernel,
    unmasked_tokens,
)

from bapo_kernels import (
    BAPOConfig,
    ClipBounds,
    ClipBoundSearch,
    ContributionHistogram,
    bapo_loss_from_log_probs,
    debug,
    find_clip_bounds,
    reference,
)
from bapo_kernels.tools.budget import Case

SURROGATES = ["clip", "cispo", "sapo", "mask"]
LEVELS = ["token", "sequence"]


def policy(surrogate="clip", level="token", **options):
    return BAPOConfig(surrogate=surrogate, ratio_level=level, **options)


def tokens(shape=(3, 5), seed=0, dtype=torch.float64, device="cpu"):
    """Log-probs, old ones, advantages and a mask."""
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(shape, generator=g, dtype=dtype)
    old = logp + 0.4 * torch.randn(shape, generator=g, dtype=dtype)
    advantages = torch.randn(shape, generator=g, dtype=dtype)
    mask = torch.rand(shape, generator=g) < 0.8
    return [t.to(device) for t in (logp, old, advantages, mask)]


def loss_and_gradient(logp, *batch, **options):
    leaf = logp.detach().clone().requires_grad_()
    out = bapo_loss_from_log_probs(leaf, *batch, **options)
    return out, torch.autograd.grad(out.loss, leaf)[0]


def test_cispo_by_hand(backend, device):
    """Clipped from both sides, whatever the sign; the loss is -weight*A*logp."""
    r = torch.tensor([1.1, 1.5, 0.5, 1.5, 0.5, 9.0], device=device)
    A = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, 0.0], device=device)
    weight = torch.tensor([1.1, 1.2, 0.8, 1.2, 0.8, 1.2], device=device)
    config = BAPOConfig.fixed(0.8, 1.2, surrogate="cispo")
    for i in range(6):
        logp, of_one = torch.tensor([-0.7], device=device), slice(i, i + 1)
        batch = logp - r[of_one].log(), A[of_one]
        out, g = loss_and_gradient(logp, *batch, config=config, backend=backend)
        assert_rounded(g, -weight[of_one] * A[of_one], 4)  # old log-prob, its logarithm, r, product
        assert_rounded(out.loss, (logp.double() * g).sum(), 2)
        assert out.metrics["pg_clipfrac"] == (r[i] != weight[i])


def test_mask_by_hand(backend, device):
    """Outside of the bounds nothing is left, whatever the sign; an infinite one masks no token."""
    r, upper, kept = torch.tensor(
        [(1.1, 1.2, 1), (1.5, 1.2, 0), (0.5, 1.2, 0), (9.0, math.inf, 1)], device=device
    ).T
    A = torch.tensor([[2.0], [-1.0], [0.5]], device=device)  # each of all four
    r, upper, kept, A = torch.broadcast_tensors(r, upper, kept, A)
    logp = torch.full_like(r, -0.7)
    options = dict(bounds=(torch.full_like(r, 0.8), upper), backend=backend)
    options["config"] = policy("mask", loss_agg_mode="token-sum")
    out, g = loss_and_gradient(logp, old := logp - r.log(), A, **options)
    expected = -(logp.double() - old).exp() * A * kept
    assert_rounded(g, expected, 4)  # log-ratios below 4, ratio, product
    assert_within_budget("loss", out.loss, g.sum(), expected.sum(), expected.abs().sum().item())
    assert out.metrics["pg_clipfrac"] == 0.5
    assert out.metrics["pg_clipfrac_lower"] == 0.25


def test_sapo_by_hand(backend, device):
    logp = torch.full((3,), -0.7, device=device)
    old = logp - torch.tensor([0.3, 1.0, 2.5], device=device).log()
    r = (logp.double() - old).exp()
    config = policy("sapo", sapo_tau_pos=1.5, sapo_tau_neg=0.7, loss_agg_mode="token-sum")
    for A, tau in ((2.0, 1.5), (-2.0, 0.7), (0.0, 0.7)):
        given = logp, old, torch.full_like(logp, A)
        out, g = loss_and_gradient(*given, config=config, backend=backend)
        gate = 1 / (1 + torch.exp(-tau * (r - 1)))
        # Ratio, exponent (of at most 2.25), exp, sum and quotient; products.
        assert_rounded(out.loss, (-A * 4 / tau * gate).sum(), 10)
        assert_rounded(g, -A * 4 * gate * (1 - gate) * r, 10)
        assert out.bounds == (0, math.inf)
        assert out.metrics["pg_clipfrac"] == out.metrics["bapo_saturated"] == 0


def test_ratio_of_a_sequence_by_hand(backend, device):
    """The mean over three unmasked tokens; the gradient of each is a third of the sum of all."""
    logp = torch.tensor([[-1.0, -2.0, -3.0, torch.nan]], device=device)
    old = torch.tensor([[-1.1, -1.9, -3.3, torch.nan]], device=device)
    A = torch.tensor([[1.0, 0.0, 4.0, torch.nan]], device=device)
    mask = torch.tensor([[1, 1, 1, 0]], device=device)
    options = dict(config=policy(level="sequence"), backend=backend)
    out, g = loss_and_gradient(logp, old, A, mask, **options)
    log_ratio = (logp.double() - old)[0, :3].mean()  # of 0.1, -0.1 and 0.3
    expected = -log_ratio.exp() * 5 / 3
    assert_rounded(out.loss, expected, 4)  # mean, exp, product, quotient
    assert_rounded(g, expected / 3 * mask, 4)
    assert_rounded(out.metrics["ppo_kl"], -log_ratio, 4)


def test_gradient_of_the_clamped_ratio_of_a_sequence(backend, device):
    """A log-ratio beyond 20, of the mean: no gradient, a finite loss."""
    logp = torch.tensor([[0.0, -1.0], [-0.5, -1.0]], device=device)
    old = logp - torch.tensor([[70.0, 0.0], [70.0, -69.9]], device=device)
    options = dict(config=policy(level="sequence", loss_agg_mode="token-sum"), backend=backend)
    out, g = loss_and_gradient(logp, old, -torch.ones_like(logp), **options)
    r = (logp.double() - old).mean(-1).clamp(max=20).exp()
    assert_rounded(out.loss, 2 * r.sum(), 4)
    assert g[0].tolist() == [0, 0]
    assert_rounded(g[1], r[1].expand(2), 70)  # a token's log-ratio of 70 is rounded


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_forbidden_labels(backend, device, surrogate, level):
    """A log-prob of -inf: a ratio of exp(-20), and a gradient without NaN, also of a KL term."""
    kinds = (None, "k1", "k3") if (surrogate, level) == ("clip", "token") else (None,)  # not k2
    for on_policy, advantage, kind in product((False, True), (1.0, -1.0), kinds):
        kl = dict(kl_loss_coef=0.1, kl_loss_type=kind) if kind else {}
        options = dict(config=policy(surrogate, level, **kl), ref_log_probs=per_token((2, 4)))
        case = make_case((2, 4), 33, device=device, masked=0.0, idle=0.0, **options)
        case.response_mask[0, 1] = True
        case.labels[0, 1], case.advantages[0, 1], case.logits[0, 1] = 5, advantage, 1.0
        case.logits[0, 1, 5] = -torch.inf
        case.old_log_probs[0, 1] = -2.0
        if on_policy:
            case.old_log_probs = None
        got = check_against_reference(case, backend)
        assert got.output.log_probs[0, 1] == -torch.inf
        assert got.gradient.isfinite().all()
        if kind:
            assert got.gradient[0, 1, 5] == 0
        else:
            assert got.output.loss.isfinite() == (surrogate != "cispo"), "-clip(r)*A*logp: infinite"
            assert surrogate == "cispo" or not got.gradient[0, 1].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_bad_old_log_probs_and_bounds_make_the_loss_nan(backend, device, surrogate, level):
    """Where they are not masked, as the first token is."""
    logp, old, A, _ = tokens(dtype=torch.float32, device=device)
    mask = torch.ones_like(A)
    mask[0, 0] = 0
    lower, upper = torch.full_like(A, 0.7), torch.full_like(A, 1.3)

    def is_nan(old, **bounds):
        options = dict(config=policy(surrogate, level), backend=backend) | bounds
        return bapo_loss_from_log_probs(logp, old, A, mask, **options).loss.isnan()

    for place, expected in (((0, 0), False), ((1, 2), True)):
        at = torch.zeros_like(mask, dtype=torch.bool)
        at[place] = True
        for bad in (torch.inf, -torch.inf, torch.nan):
            assert is_nan(old.masked_fill(at, bad)) == expected
        for bad in () if surrogate == "sapo" else (-0.1, 1.4, torch.nan):
            assert is_nan(old, bounds=(lower.masked_fill(at, bad), upper)) == expected


def test_sequences_alone_and_together_have_the_same_bits(backend, device):
    """Of 1,300 tokens, more than a block of any kernel."""
    batch = tokens((3, 1_300), dtype=torch.float32, device=device)
    batch[3] = (torch.rand(3, 1_300) < 0.9).to(device)
    config = policy(level="sequence", loss_agg_mode="token-sum")

    def gradient(rows):
        options = dict(config=config, bounds=(0.5, 2.0), backend=backend)
        return loss_and_gradient(*(t[rows] for t in batch), **options)[1]

    together = gradient(slice(None))
    assert together.any()
    for row in range(3):
        assert_same(gradient(slice(row, row + 1))[0], together[row])
    assert_same(gradient(slice(None)), together)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_live_statistics_skip_whole_sequences(backend, device, surrogate, packed):
    """A token without advantage is part of its sequence's ratio, if another one has one."""
    case = make_case((4, 6), 50, device=device, config=policy(surrogate, "sequence"), poison=False)
    case.advantages[1] = 0.0
    case.advantages[2] = torch.tensor([0.0, 0.0, 0.7, 0.0, 0.0, 0.0])
    unmasked = unmasked_tokens(case)
    if packed:
        flat = [x.flatten(0, 1) for x in (case.logits, *case.arguments())]
        case = Case(*flat, case.options | dict(cu_seqlens=torch.arange(0, 30, 6, device=device)))
    everything, live = (run_kernel(case, backend, statistics=s) for s in ("all", "live"))
    assert_same(everything, live)
    skipped = unmasked & (torch.arange(4, device=device) == 1)[:, None]
    assert_same(live.output.log_probs.isnan().view(4, 6), skipped)
    assert live.output.metrics["live_tokens"] == unmasked[[0, 2, 3]].sum()


def test_sequences_of_three_dimensions(backend, device):
    """The last one has the tokens."""
    batch = tokens((2, 3, 5), dtype=torch.float32, device=device)
    batch.append(1.0 + 0.3 * batch[2].abs())  # upper bounds
    config = policy(level="sequence", loss_agg_mode="seq-mean-token-mean")
    results = []
    for shape in ((2, 3, 5), (6, 5)):
        *arguments, upper = (t.view(shape) for t in batch)
        options = dict(config=config, bounds=(0.8, upper), backend=backend)
        out, gradient = loss_and_gradient(*arguments, **options)
        results.append((out.loss, gradient.view(6, 5)))
    assert_same(*results, "loss, gradient")


def test_scope_of_a_step(backend, device):
    """Micro-batches of whole sequences, solved together, are the search of one call."""
    batch = tokens((6, 5), dtype=torch.float32, device=device)
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
        assert_same(got, wanted)
        torch.testing.assert_close(got.output.metrics, wanted.output.metrics, rtol=0, atol=0)
        own = any(getattr(bound, "ndim", 0) for bound in (lower, upper))
        for shown, value in zip(got.output.bounds, (0.75, 1.25), strict=True):
            assert shown.dtype == torch.float32
            assert shown.shape == ((3, 7) if own else ())
            assert (shown == value).all()
            assert shown.data_ptr() not in {b.data_ptr() for b in numbers}, "they are copied"


def test_metrics_are_means_over_counted_tokens(backend, device):
    logp, old, A, mask = tokens(dtype=torch.float32, device=device)
    lower, upper = per_token((3, 5), 1, 0.5, 1.0), per_token((3,), 2, 1.0, 2.0)
    bounds = lower.to(device).masked_fill(~mask, torch.nan), upper.to(device)
    options = dict(bounds=bounds, backend=backend)
    out = bapo_loss_from_log_probs(logp, old, A, mask, **options)
    wanted = bounds[0][mask], bounds[1][:, None].expand(3, 5)[mask]
    for name, values in zip(("bapo_clip_low", "bapo_clip_high"), wanted, strict=True):
        mean = values.double().mean()
        assert_within_budget(name, out.metrics[name], mean.float(), mean)
    none = bapo_loss_from_log_probs(logp, old, A, mask & False, **options)
    assert none.metrics["bapo_clip_low"] == none.metrics["bapo_clip_high"] == none.loss == 0


BATCH = torch.zeros(2, 3), None, torch.ones(2, 3)
PACKED = torch.zeros(3), None, torch.ones(3)
SAPO, SEQUENCE = policy("sapo"), policy(level="sequence")


def load(state):
    ClipBoundSearch(SEQUENCE, scope="step").load_state_dict(state)


loss_of = bapo_loss_from_log_probs
# By message, the calls that it refuses.
REFUSED = {
    "bounds must be None with surrogate='sapo', which has no bounds, got tuple": [
        lambda: loss_of(*BATCH, config=SAPO, bounds=(0.8, 1.2))
    ],
    "config.surrogate must have bounds to search for, got 'sapo'": [
        lambda: find_clip_bounds(*BATCH, config=SAPO),
        lambda: reference.find_clip_bounds(*BATCH, config=SAPO),
        lambda: ContributionHistogram(SAPO),
        lambda: ContributionHistogram().solve(SAPO),
    ],
    "cu_seqlens must be given for packed log_probs of shape (3,) with ratio_level='sequence', "
    "got None": [
        lambda: find_clip_bounds(*PACKED, config=SEQUENCE),
        lambda: reference.find_clip_bounds(*PACKED, config=SEQUENCE),
        lambda: reference.bapo_loss_from_log_probs(*PACKED, config=SEQUENCE),
    ],
    "config.ratio_level must be that of the histogram ('token'), got 'sequence'": [
        lambda: ContributionHistogram(policy()).solve(SEQUENCE)
    ],
    "config.ratio_level must be 'sequence' in the state too, got 'token'": [
        lambda: load(ClipBoundSearch(policy(), scope="step").state_dict())
    ],
    "scope must be 'call' with surrogate='sapo', which has no search, got 'lagged'": [
        lambda: ClipBoundSearch(SAPO, scope="lagged")
    ],
    "clip_ratio_c must be None with surrogate='cispo', which has no dual clip, got 3.0": [
        lambda: policy("cispo", clip_ratio_c=3.0)
    ],
    "contribution must be 'surrogate' with surrogate='cispo', which clips no gradient away, got "
    "'gradient'": [lambda: policy("cispo", contribution="gradient")],
    "surrogate must be one of ['cispo', 'clip', 'mask', 'sapo'] (another: docs/guide.md, "
    "'Your own loss'), got 'x'": [lambda: policy("x")],
    "ratio_level must be one of ['sequence', 'token'], got 'x'": [lambda: policy(level="x")],
    "sapo_tau_neg must be finite and > 0, got 0.0": [lambda: policy("sapo", sapo_tau_neg=0.0)],
    "bounds.upper must have one element, or have the shape of log_probs (2, 3) or one entry per "
    "sequence (2,), got (3,)": [lambda: loss_of(*BATCH, bounds=(0.8, torch.full((3,), 1.2)))],
    "bounds.lower must be floating point, got torch.int64": [
        lambda: loss_of(*BATCH, bounds=(torch.ones(2).long(), 1.2))
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_misuse(message):
    for call in REFUSED[message]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_what_looks_like_misuse_and_is_not():
    assert BAPOConfig.recipe(surrogate="cispo").clip_ratio_c is None
    assert BAPOConfig.fixed(0.8, 1.2, surrogate="sapo").upper_grid == [math.inf]
    search = ClipBoundSearch(SAPO)
    search.update(*BATCH)
    search.step()
    search.load_state_dict(search.state_dict())
    assert bapo_loss_from_log_probs(*BATCH, **search.options).loss < 0


def test_check_inputs_names_the_bounds_of_a_token():
    given = torch.zeros(2, 3, 5), torch.zeros(2, 3).long(), None, torch.ones(2)
    upper, mask = torch.full((2, 3), 1.2), torch.ones(2, 3)
    upper[1, 2], mask[1, 2] = 0.28, 0
    debug.check_inputs(*given, mask, bounds=(0.8, upper))
    for message, bounds in (
        (r"upper must be >= 1, .*not an epsilon, got 0.28.* at \(1, 2\)", (0.8, upper)),
        (r"lower must be in \[0, 1\], .* got 1.5 at \(0, 0\)", (torch.tensor([1.5, 0.5]), 1.2)),
    ):
        with pytest.raises(ValueError, match=f"bounds.{message}"):
            debug.check_inputs(*given, bounds=bounds)
