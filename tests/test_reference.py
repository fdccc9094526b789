"""The specification itself: gradients checked by finite differences, values by hand."""

import math

import pytest
import torch
from test_loss import CU, OPTIONS, build_config

from bapo_kernels import BAPOConfig, ClipBounds, reference

SHAPE = (2, 4)


def double_case(V=5, shape=SHAPE):
    torch.manual_seed(0)
    logits = torch.randn(*shape, V, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, shape)
    old = reference.log_probs(logits.detach(), labels)[0] + 0.3 * torch.randn(shape)
    advantages = torch.randn(shape, dtype=torch.float64)
    mask = torch.ones(shape)
    mask.view(-1)[2] = 0
    return logits, labels, old, advantages, mask


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    logits, *arguments = double_case()
    options = {
        k: v[: SHAPE[0], : SHAPE[1]].double() if getattr(v, "ndim", 0) == 2 else v
        for k, v in call_options.items()
    }
    found = reference.bapo_loss(logits.detach(), *arguments, config=config, **options).bounds
    options = options | {"bounds": found}

    def loss(x):
        return reference.bapo_loss(x, *arguments, config=config, **options).loss

    assert torch.autograd.gradcheck(loss, logits)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_gradcheck_packed(mode):
    logits, *arguments = double_case(shape=(20,))
    options = dict(config=BAPOConfig(loss_agg_mode=mode), cu_seqlens=CU, bounds=(0.8, 1.2))
    assert torch.autograd.gradcheck(
        lambda x: reference.bapo_loss(x, *arguments, **options).loss, logits
    )


def test_gradcheck_on_policy_and_log_probs():
    logits, labels, _, advantages, mask = double_case()
    x = logits.detach().requires_grad_()
    out = reference.bapo_loss(x, labels, None, advantages, mask)
    (gradient,) = torch.autograd.grad(out.loss, x)
    logp = reference.log_probs(x, labels)[0]
    weighted = -(logp * advantages * mask).sum() / mask.sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(weighted, x)[0])
    for i in (0, 1):
        assert torch.autograd.gradcheck(
            lambda z, i=i: reference.log_probs(z, labels, final_logit_softcapping=3.0)[i], x
        )


def test_gradcheck_linear():
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    _, labels, old, advantages, mask = double_case()
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2))

    def loss(h, w, b):
        return reference.bapo_linear_loss(
            h, w, labels, old, advantages, mask, bias=b, bounds=bounds
        ).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    logp = reference.linear_log_probs(hidden, weight, labels, bias=bias)[0]
    expected = reference.log_probs(hidden @ weight.T + bias, labels)[0]
    torch.testing.assert_close(logp, expected)


def loss_by_hand(logp, old, A, **options):
    config = BAPOConfig.fixed(0.8, 1.2, loss_agg_mode="token-sum", **options)
    tensors = (torch.tensor([v], dtype=torch.float64) for v in (logp, old, A))
    return reference.bapo_loss_from_log_probs(*tensors, config=config).loss.item()


@pytest.mark.parametrize(
    ("r", "A", "c", "expected"),
    [
        (1.1, 2.0, None, -2.2),  # inside
        (1.5, 2.0, None, -2.4),  # clipped above
        (0.5, 2.0, None, -1.0),  # A > 0 has no lower clip
        (0.5, -2.0, None, 1.6),  # clipped below
        (5.0, -2.0, None, 10.0),  # A < 0 has no upper clip
        (5.0, -2.0, 3.0, 6.0),  # but dual clip
        (0.5, -2.0, 3.0, 1.6),
        (1.0, 0.0, 3.0, 0.0),
    ],
)
def test_token_loss_by_hand(r, A, c, expected):
    assert loss_by_hand(math.log(r), 0.0, A, clip_ratio_c=c) == pytest.approx(expected)


def test_ratio_is_clamped():
    assert loss_by_hand(50.0, 0.0, -1.0) == pytest.approx(math.exp(20))


@pytest.mark.parametrize(
    ("mode", "expected"),
    # losses 1, 2 | 3 with one token masked in the second sequence
    [
        ("token-mean", 2.0),
        ("token-sum", 6.0),
        ("seq-mean-token-sum", 3.0),
        ("seq-mean-token-sum-norm", 1.5),
        ("seq-mean-token-mean", 2.25),
    ],
)
def test_aggregation_by_hand(mode, expected):
    zeros = torch.zeros(3, 2)
    advantages = torch.tensor([[-1.0, -2.0], [-3.0, -99.0], [5.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    config = BAPOConfig.fixed(0.8, 1.2, loss_agg_mode=mode)
    out = reference.bapo_loss_from_log_probs(zeros, zeros, advantages, mask, config=config)
    assert out.loss.item() == pytest.approx(expected)


def test_shares_by_hand():
    logp = torch.tensor([2.0, 0.5]).log()
    config = BAPOConfig.fixed(0.8, 1.2, token_weight="uniform")
    A = torch.tensor([1.0, -3.0])
    out = reference.bapo_loss_from_log_probs(logp, torch.zeros(2), A, config=config)
    assert out.metrics["bapo_pos_share"].item() == pytest.approx(1.2 / (1.2 + 2.4))
    assert out.metrics["bapo_pos_neg_ratio"].item() == pytest.approx(0.5)
    assert out.metrics["pg_clipfrac"].item() == 1.0
