"""Classes of rows: they partition the tokens, and agree with the gradients of the reference."""

import pytest
import torch

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.reference.tokens import clipped
from benchmarks.row_classes import row_classes


@pytest.fixture
def tokens():
    g = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(400, generator=g)
    old = log_probs - torch.randn(400, generator=g)
    A = torch.randn(400, generator=g) * (torch.rand(400, generator=g) < 0.8)
    return log_probs, old, A, torch.rand(400, generator=g) < 0.7


def gradient(tokens, bounds):
    log_probs, *rest = tokens
    leaf = log_probs.double().requires_grad_()
    loss = reference.bapo_loss_from_log_probs(leaf, *rest, bounds=bounds).loss
    return torch.autograd.grad(loss, leaf)[0]


def test_every_token_is_in_one_class(tokens):
    classes = row_classes(*tokens, BAPOConfig())
    assert torch.stack(classes).sum(0).eq(1).all()
    assert all(mask.any() for mask in classes)
    assert torch.equal(classes.skipped, ~tokens[-1])


def test_classes_agree_with_the_gradients(tokens):
    config = BAPOConfig()
    start = gradient(tokens, (config.ratio_lower_start, config.ratio_upper_start))
    last = gradient(tokens, (config.ratio_lower_max, config.ratio_upper_max))
    classes = row_classes(*tokens, config)
    assert torch.equal(classes.undecided, start != last)
    assert torch.equal(classes.kept, (start != 0) & (start == last))
    assert not (start + last)[classes.clipped | classes.idle | classes.skipped].any()
    fixed = row_classes(*tokens, config, bounds=(0.8, 1.3))
    assert not fixed.undecided.any()
    assert torch.equal(fixed.kept, gradient(tokens, (0.8, 1.3)) != 0)


def test_a_ratio_at_its_bound_is_not_clipped():
    bounds, A = torch.tensor([0.8, 1.3]), torch.tensor([-1.0, 1.0])
    outside = torch.nextafter(bounds, torch.tensor([0.0, 2.0]))
    for ratio, expected in ((bounds, False), (outside, True)):
        below, above = clipped(ratio, A, *bounds)
        assert (below | above).eq(expected).all()
