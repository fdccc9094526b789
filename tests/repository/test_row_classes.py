"""Classes of rows: they partition the tokens, and agree with the gradients of the reference."""

import torch

from bapo_kernels import BAPOConfig, reference
from benchmarks.row_classes import row_classes


def gradient(log_probs, *rest, bounds):
    leaf = log_probs.double().requires_grad_()
    loss = reference.bapo_loss_from_log_probs(leaf, *rest, bounds=bounds).loss
    return torch.autograd.grad(loss, leaf)[0]


def test_classes_agree_with_the_gradients():
    g = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(400, generator=g)
    A = torch.randn(400, generator=g) * (torch.rand(400, generator=g) < 0.8)
    mask = torch.rand(400, generator=g) < 0.7
    tokens = log_probs, log_probs - torch.randn(400, generator=g), A, mask
    config = BAPOConfig()
    classes = row_classes(*tokens, config)
    assert torch.stack(classes).sum(0).eq(1).all()
    assert all(of_class.any() for of_class in classes)
    start = gradient(*tokens, bounds=(config.ratio_lower_start, config.ratio_upper_start))
    last = gradient(*tokens, bounds=(config.ratio_lower_max, config.ratio_upper_max))
    assert torch.equal(classes.skipped, ~mask)
    assert torch.equal(classes.undecided, start != last)
    assert torch.equal(classes.kept, (start != 0) & (start == last))
    assert not (start + last)[classes.clipped | classes.idle].any()
    fixed = row_classes(*tokens, config, bounds=(0.8, 1.3))
    assert not fixed.undecided.any()
    assert torch.equal(fixed.kept, gradient(*tokens, bounds=(0.8, 1.3)) != 0)
