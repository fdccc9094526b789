"""log_probs of every backend: one output, no entropy, two backward passes.

Values and gradients with all options are in test_labels.py, of one label per row and of several.
"""

import torch
from accuracy import assert_as_reference, assert_same

from bapo_kernels import log_probs


def test_gradient_of_one_output(backend, device):
    logits = torch.randn(3, 4, 20, device=device)
    labels, incoming = torch.randint(0, 20, (3, 4), device=device), torch.randn(3, 4, device=device)
    for which in (0, 1):

        def gradient(kind, name="reference", which=which):
            x = logits.to(kind, copy=True).requires_grad_()
            value = log_probs(x, labels, backend=name)[which]
            return torch.autograd.grad(value, x, incoming.to(kind))[0]

        assert_as_reference(gradient(torch.float32, backend), gradient)


def test_second_backward_gives_the_same_gradient(backend, device):
    """log_probs recomputes, so a second backward is right."""
    x = torch.randn(3, 20, device=device, requires_grad=True)
    logp, _ = log_probs(x, torch.tensor([1, 2, 3], device=device), backend=backend)
    first = torch.autograd.grad(logp.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(logp.sum(), x)[0]
    assert_same(first, second)


def test_without_entropy(backend, device):
    x = torch.randn(3, 20, device=device)
    labels = torch.tensor([1, -100, 20], device=device)
    logp, entropy = log_probs(x, labels, return_entropy=False, backend=backend)
    assert entropy is None
    assert logp[1] == 0
    assert logp[2].isnan()
