"""log_probs of every backend: values, and gradients for any incoming gradient."""

import pytest
import torch
from accuracy import assert_as_reference
from helpers import allowed_by, sets_of

from bapo_kernels import SamplingMask, log_probs, reference

OPTIONS = [
    dict(),
    dict(temperature=0.6),
    dict(logit_scale=2.0),
    dict(final_logit_softcapping=8.0, temperature=1.2),
    dict(temperature=torch.linspace(0.5, 2.0, 12).view(6, 2).T),
    dict(final_logit_softcapping=8.0, temperature=torch.tensor([0.5, 1.25])),
    dict(temperature=torch.tensor(0.75)),
    dict(sets=True),
    dict(sets=True, final_logit_softcapping=8.0, temperature=torch.linspace(0.5, 2, 12).view(2, 6)),
]


def run(function, logits, labels, dlogp, dentropy, **options):
    logits = logits.clone().requires_grad_()
    logp, entropy = function(logits, labels, **options)
    (logp * dlogp + entropy * dentropy).sum().backward()
    return logp.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("V", [1, 37, 4100])  # one token, a tail, more than a block
def test_against_float64(backend, device, dtype, options, V):
    logits = (3 * torch.randn(2, 6, V)).to(device, dtype)
    labels = torch.randint(0, V, (2, 6), device=device)
    labels[1, 2] = -100
    weights = torch.randn(2, 2, 6, device=device)
    weights[:, 0, 3] = 0.0
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    given, of_kernel = logits, dict(backend=backend)
    if options.pop("sets", False):  # for the reference the others are -inf
        sets = sets_of(labels.cpu(), V)
        outside = ~allowed_by(sets, V).view(2, 6, V).to(device)
        given, logits = (logits.masked_fill(outside, x) for x in (torch.nan, -torch.inf))
        of_kernel |= dict(sampling_mask=SamplingMask.from_lists(sets, device))
    got = run(log_probs, given, labels, *weights, **of_kernel, **options)
    assert got[0].dtype == got[1].dtype == torch.float32

    def expected(kind):
        factors = weights.to(torch.promote_types(kind, torch.float32))
        return run(reference.log_probs, logits.to(kind), labels, *factors, **options)

    largest = got[0].nan_to_num(neginf=0.0).abs().max().item()
    assert_as_reference(got, expected, dtype, operand=(0, largest, 0))
    assert not got[2][1, 2].any()
    assert not got[2][0, 3].any()


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
    assert torch.equal(first, second)


def test_without_entropy(backend, device):
    x = torch.randn(3, 20, device=device)
    labels = torch.tensor([1, -100, 20], device=device)
    logp, entropy = log_probs(x, labels, return_entropy=False, backend=backend)
    assert entropy is None
    assert logp[1] == 0
    assert logp[2].isnan()
