"""The specification itself: gradients checked by finite differences, values by hand."""

import math
from functools import partial

import pytest
import torch
from accuracy import assert_rounded, assert_same
from helpers import transform_of
from test_loss import OPTIONS, build_config
from torch.utils._pytree import tree_map_only

from bapo_kernels import BAPOConfig, ClipBounds, reference
from bapo_kernels.sampling_mask import SamplingMask

SHAPE = (2, 4)
by_hand = partial(assert_rounded, roundings=8)  # four operations, here and there


def double_case(V=5, shape=SHAPE):
    torch.manual_seed(0)
    logits = torch.randn(*shape, V, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, shape)
    old = reference.log_probs(logits.detach(), labels)[0] + 0.3 * torch.randn(shape)
    advantages = torch.randn(shape, dtype=torch.float64)
    mask = torch.ones(shape)
    mask.view(-1)[2] = 0
    return logits, labels, old, advantages, mask


def of_shape(options):
    """What is per token for a case of ``SHAPE``, in float64."""
    B, S = SHAPE
    return tree_map_only(torch.Tensor, lambda v: v[:B, :S].double() if v.ndim == 2 else v, options)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    """At the bounds found; CISPO holds the ratio constant, so the old log-probs move with it."""
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    logits, *arguments = double_case()
    options = of_shape(call_options)
    labels, old, *others = arguments
    out = reference.bapo_loss(logits.detach(), *arguments, config=config, **options)
    if config.has_bounds:
        options = options | {"bounds": out.bounds}
    of_labels = partial(reference.log_probs, labels=labels, **transform_of(config))
    delta = old - of_labels(logits.detach())[0]

    def loss(x):
        before = old if config.surrogate != "cispo" else of_labels(x)[0].detach() + delta
        return reference.bapo_loss(x, labels, before, *others, config=config, **options).loss

    assert torch.autograd.gradcheck(loss, logits)


def test_gradcheck_on_policy_and_log_probs():
    x, labels, _, advantages, mask = double_case()
    loss = reference.bapo_loss(x, labels, None, advantages, mask).loss
    logp = reference.log_probs(x, labels)[0]
    weighted = -(logp * advantages * mask).sum() / mask.sum()
    got, expected = (torch.autograd.grad(of, x)[0] for of in (loss, weighted))
    by_hand(got, expected, of=(advantages / mask.sum()).abs().max())
    assert torch.autograd.gradcheck(
        lambda z: reference.log_probs(z, labels, final_logit_softcapping=3.0), x
    )


def test_gradcheck_linear():
    _, labels, *others = double_case()
    torch.manual_seed(0)
    shapes = (2, 4, 3), (5, 3), (5,)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2))

    def loss(*parameters):
        *operands, bias = parameters
        options = dict(bias=bias, bounds=bounds)
        return reference.bapo_linear_loss(*operands, labels, *others, **options).loss

    assert torch.autograd.gradcheck(loss, leaves)
    hidden, weight, bias = leaves
    logp = reference.linear_log_probs(hidden, weight, labels, bias=bias)[0]
    expected = reference.log_probs(hidden @ weight.T + bias, labels)[0]
    by_hand(logp, expected, of=(hidden.abs() @ weight.abs().T + bias.abs()).max())


def one(*values):
    """Tokens with one value each."""
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    ("r", "A", "c", "expected"),
    [
        (1.1, 2.0, None, -2.2),  # inside
        (1.5, 2.0, None, -2.4),  # clipped above
        (0.5, 2.0, None, -1.0),  # A > 0 has no lower clip
        (0.5, -2.0, None, 1.6),  # clipped below
        (5.0, -2.0, None, 10.0),  # A < 0 has no upper clip
        (5.0, -2.0, 3.0, 6.0),  # except with dual clip
        (0.5, -2.0, 3.0, 1.6),
        (1.0, 0.0, 3.0, 0.0),
        (math.exp(50), -1.0, None, math.exp(20)),  # the ratio is clamped
    ],
)
def test_token_loss_by_hand(r, A, c, expected):
    config = BAPOConfig.fixed(0.8, 1.2, loss_agg_mode="token-sum", clip_ratio_c=c)
    out = reference.bapo_loss_from_log_probs(*one(math.log(r), 0.0, A), config=config)
    by_hand(out.loss.float(), expected)  # the bounds are in float32


def test_shares_by_hand():
    logp, A = torch.tensor([2.0, 0.5]).log(), torch.tensor([1.0, -3.0])
    config = BAPOConfig.fixed(0.8, 1.2, token_weight="uniform")
    metrics = reference.bapo_loss_from_log_probs(logp, torch.zeros(2), A, config=config).metrics
    by_hand(metrics["bapo_pos_share"], 1.2 / (1.2 + 2.4))
    by_hand(metrics["bapo_pos_neg_ratio"], 0.5)
    assert metrics["pg_clipfrac"].item() == 1.0
    for name in ("bapo_pos_share_start", "bapo_pos_share_max"):  # grids of one point
        assert metrics[name] == metrics["bapo_pos_share"]


@pytest.mark.parametrize("bounds", [None, (1.0, 1.0)])
@pytest.mark.parametrize(
    ("contribution", "start", "highest"),
    [
        # At (0.6, 1.2): 2*1.2 and 3*0.7 + 1. The highest share is at (0.6, 3.0), with 2*1.5.
        ("surrogate", 2.4 / (2.4 + 3.1), 3.0 / (3.0 + 3.1)),
        # At (0.6, 1.2) 1.5 is not counted. The highest is at (0.9, 3.0), where 0.7 is not.
        ("gradient", 0.0, 3.0 / (3.0 + 1.0)),
    ],
)
def test_shares_on_the_grids_by_hand(contribution, start, highest, bounds):
    """Of the grids of the config, whatever the bounds are."""
    logp = torch.tensor([1.5, 0.7, 1.0]).log()
    A = torch.tensor([2.0, -3.0, -1.0])
    config = BAPOConfig(token_weight="uniform", contribution=contribution, target=0.0)
    out = reference.bapo_loss_from_log_probs(logp, torch.zeros(3), A, config=config, bounds=bounds)
    by_hand(out.metrics["bapo_pos_share_start"], start)
    by_hand(out.metrics["bapo_pos_share_max"], highest)
    assert out.metrics["bapo_saturated"] == 0, "a share of 0 meets a target of 0"


@pytest.mark.parametrize(
    ("kind", "logp", "ref", "expected"),
    [
        ("k1", -1.0, -3.0, 2.0),
        ("k1", -3.0, -1.0, -2.0),
        ("k2", -1.0, -3.0, 2.0),
        ("k3", -1.0, -3.0, math.exp(-2) + 1),
        ("low_var_kl", -3.0, -1.0, math.exp(2) - 3),
        ("k3", -9.0, -1.0, 10.0),  # the value is capped at 10
        ("k3", -1.0, -40.0, 10.0),  # the exponent is clamped at -20, then the value
        ("k3", -2.0, -2.0, 0.0),
    ],
)
def test_kl_by_hand(kind, logp, ref, expected):
    *batch, ref = one(logp, logp, 0.0, ref)
    config = BAPOConfig(kl_loss_coef=0.5, kl_loss_type=kind)
    out = reference.bapo_loss_from_log_probs(*batch, ref_log_probs=ref, config=config)
    by_hand(out.loss, 0.5 * expected, of=math.exp(2))
    by_hand(out.metrics["kl_loss"], expected, of=math.exp(2))
    assert out.metrics["pg_loss"].item() == 0


def test_entropy_and_log_prob_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]], dtype=torch.float64)  # p = 1/4, 3/4, 0
    of_label = partial(reference.log_probs, logits, torch.tensor([1]))
    logp, entropy = of_label()
    of = math.log(10)  # the largest logarithm of a sum
    by_hand(logp, math.log(0.75), of=of)
    by_hand(entropy, -0.25 * math.log(0.25) - 0.75 * math.log(0.75), of=of)
    by_hand(of_label(temperature=0.5)[0], math.log(0.9), of=of)  # p = 1/10, 9/10
    x = 2 * math.tanh(3 * math.log(3.0) / 2)
    capped, _ = of_label(final_logit_softcapping=2.0, logit_scale=3.0)
    by_hand(capped, x - math.log(1 + math.exp(x)), of=of)


def test_importance_weight_by_hand():
    """The weight multiplies the policy term, not the KL and entropy terms."""
    logp, A, entropy, weight, ref = one(-1.0, -2.0, 4.0, 3.0, -2.0)
    config = BAPOConfig(kl_loss_coef=1.0, kl_loss_type="k1", entropy_coef=0.5)
    options = dict(entropy=entropy, rollout_is_weights=weight, ref_log_probs=ref, config=config)
    out = reference.bapo_loss_from_log_probs(logp, logp, A, **options)
    assert out.loss.item() == 3 * 2.0 + 1.0 - 0.5 * 4.0


@pytest.mark.parametrize("c", [None, 1.5])
@pytest.mark.parametrize("A", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("log_ratio", [-25.0, -1.0, -0.1, 0.0, 0.1, 0.3, 1.0, 25.0])
def test_gradient_coefficient_by_hand(log_ratio, A, c):
    """All cases of g = d l / d logp."""
    r = math.exp(log_ratio)
    kept = {1: r <= 1.2, -1: 0.8 <= r <= (c or math.inf), 0: False}[(A > 0) - (A < 0)]
    expected = -A * r if kept and abs(log_ratio) <= 20 else 0.0
    logp, *batch = one(log_ratio, 0.0, A)
    config = BAPOConfig.fixed(0.8, 1.2, clip_ratio_c=c)
    out = reference.bapo_loss_from_log_probs(logp.requires_grad_(), *batch, config=config)
    by_hand(torch.autograd.grad(out.loss, logp)[0], expected)


def test_sampling_mask_by_hand():
    """Sets of two ids, of one, of all, none, and one without the label."""
    logits = torch.tensor([[1.0, torch.nan, 1.0, torch.inf], *[[0.0, 0.0, 2.0, 0.0]] * 4])
    logits = logits.double().requires_grad_()
    mask = SamplingMask.from_lists([[2, 0], [2], [3, 2, 0, 1], [], [0, 1]])
    logp, entropy = reference.log_probs(logits, torch.tensor([2, 2, 0, 0, 2]), sampling_mask=mask)
    whole = -math.log(3 + math.exp(2))
    of_all = -whole - 2 * math.exp(2 + whole)
    expected = [-math.log(2), 0.0, whole, whole, -torch.inf]
    by_hand(logp, expected, of=whole)
    expected = [math.log(2), 0.0, of_all, of_all, math.log(2)]
    by_hand(entropy, expected, of=whole)
    (gradient,) = torch.autograd.grad(logp[:2].sum(), logits)
    assert gradient.tolist() == [[-0.5, 0.0, 0.5, 0.0], *[[0.0] * 4] * 4]


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_mask_equals_logits_of_minus_infinity(name):
    config_options, call_options = OPTIONS[name]
    options = dict(config=build_config(config_options), **of_shape(call_options))
    logits, labels, *rest = double_case(V=9)
    allowed = (torch.rand(*SHAPE, 9) < 0.4).scatter(-1, labels[..., None], True)
    allowed[0, 1, labels[0, 1]] = False  # a label outside of its set
    allowed[1, 2] = True
    results = []
    for outside, mask in ((torch.nan, SamplingMask.from_bool(allowed)), (-torch.inf, None)):
        x = logits.detach().masked_fill(~allowed, outside).requires_grad_()
        out = reference.bapo_loss(x, labels, *rest, sampling_mask=mask, **options)
        results.append((out, torch.autograd.grad(out.loss, x)[0]))
    (got, gradient), (expected, expected_gradient) = results
    assert got.metrics.pop("label_outside_mask") == 1
    assert got.metrics == expected.metrics
    assert_same(got.loss, expected.loss)
    assert_same(got.log_probs, expected.log_probs)
    assert_same(got.entropy, expected.entropy)
    assert_same(gradient, expected_gradient)


def test_gradcheck_with_sampling_mask():
    logits, _, *rest = double_case()
    mask = SamplingMask.from_lists([*[[1, 0, 4], [2, 0], [3, 0, 4]] * 2, [], [2]])
    labels = torch.tensor([[1, 0, 3, 0], [0, 3, 4, 2]])
    config = BAPOConfig(entropy_coef=0.1, final_logit_softcapping=3.0)
    options = dict(bounds=(0.8, 1.2), config=config, sampling_mask=mask)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def loss(x, h, w):
        loss = reference.bapo_loss(x, labels, *rest, **options).loss
        of_head = reference.bapo_linear_loss(h, w, labels, *rest, **options).loss
        return loss, of_head, sum(reference.linear_log_probs(h, w, labels, sampling_mask=mask))

    assert torch.autograd.gradcheck(loss, (logits, hidden, weight))


@pytest.mark.parametrize("ids", [[3, 3], [0, 1, 0], [5], [-1, 2], [2**40]])
def test_wrong_sets_make_their_rows_nan(ids):
    """Ids that are repeated or in no vocabulary; those of masked rows change nothing."""
    logits, labels, *rest = double_case()
    for row in range(8):
        mask = SamplingMask.from_lists([ids if n == row else [] for n in range(8)])
        for values in reference.log_probs(logits, labels, sampling_mask=mask):
            assert values.isnan().flatten().tolist() == [n == row for n in range(8)]
        loss = reference.bapo_loss(logits, labels, *rest, sampling_mask=mask).loss
        assert loss.isnan() == (row != 2)
        assert row != 2 or torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_wrong_offsets_make_every_row_nan():
    logits, labels, *_ = double_case()
    for offsets in ([0] * 8 + [3], [1] * 8 + [2], [0, 2, 1] + [2] * 6, [-1] * 9):
        mask = SamplingMask._of(torch.arange(2), torch.tensor(offsets))
        for values in reference.log_probs(logits, labels, sampling_mask=mask):
            assert values.isnan().all()
