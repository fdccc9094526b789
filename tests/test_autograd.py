"""The gradient computed in forward: scaled, used once, refused where it would be wrong."""

import gc

import pytest
import torch
from accuracy import assert_as_reference, assert_rounded, assert_same, inputs_of
from helpers import Result, make_case, plain_result, run_kernel, unmasked_tokens
from torch import Tensor

import bapo_kernels
from bapo_kernels import bapo_loss, bapo_loss_from_log_probs, log_probs, reference


@pytest.mark.parametrize("scale", [0.0, 0.37, -2.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_scaled_by_the_incoming_one(backend, device, scale, dtype):
    case = make_case(dtype=dtype, device=device)
    once = plain_result(backend, dtype=dtype)
    scaled = run_kernel(case, backend, scale=scale)
    assert_same(scaled.gradient, (once.gradient.float() * scale).to(dtype), "gradient")


def test_gradient_is_not_copied(backend, device):
    """Autograd keeps the memory that the kernel wrote, and adds that of another loss."""
    case = make_case(device=device)
    x = case.logits.clone().requires_grad_()
    out = bapo_loss(x, *case.arguments(), backend=backend)
    pointer = out.loss.grad_fn.gradients[0].data_ptr()
    out.loss.backward()
    assert x.grad.data_ptr() == pointer
    bapo_loss(x, *case.arguments(), backend=backend).loss.backward()
    assert_same(x.grad, 2 * plain_result(backend).gradient, "gradient")


@pytest.mark.parametrize("level", ["float16 logits", "log-probs", "reference"])
def test_log_probs_and_entropy_with_a_gradient(backend, device, level):
    """Where backward computes the gradient, it covers every term."""
    dtype = torch.float16 if level == "float16 logits" else torch.float32
    case = make_case((2, 5), 65, dtype=dtype, device=device, poison=False)
    unmasked = unmasked_tokens(case)
    x = case.logits.clone().requires_grad_()
    logp, entropy = log_probs(x, case.labels, backend=backend)
    if level == "log-probs":
        arguments = case.arguments()[1:]
        out = bapo_loss_from_log_probs(logp, *arguments, entropy=entropy, backend=backend)
    else:
        named = "reference" if level == "reference" else backend
        out = bapo_loss(x, *case.arguments(), backend=named)

    def gradient(x, *terms):
        total = sum(torch.where(unmasked, term, 0.0).sum() for term in terms)
        return torch.autograd.grad(total, x)[0]

    def expected(kind):
        leaf = case.logits.to(kind, copy=True).requires_grad_()
        logp, entropy = reference.log_probs(leaf, case.labels)
        return gradient(leaf, logp, 0.3 * entropy)

    got = gradient(x, out.log_probs, 0.3 * out.entropy)
    assert_as_reference(got, expected, dtype, names=["gradient"], inputs=inputs_of(case))


def changed(logits):
    """To those of the next micro-batch."""
    with torch.no_grad():
        return logits.mul_(2).sum()


OVERWRITTEN = "overwritten with their gradient"
USES = {  # of logits that are overwritten: of what, when, and the error
    "logits": (Tensor.sum, "after", OVERWRITTEN),
    "base": (Tensor.sum, "after", OVERWRITTEN),
    "view": (Tensor.sum, "after", OVERWRITTEN),
    "saved": (lambda logits: logits.square().sum(), "before", "modified by an inplace operation"),
    "changed": (changed, "after", r"logits .*inplace=True.* were changed"),
}


class TestInPlace:
    def problem(self, device, dtype=torch.float32):
        """A linear layer, its input, and a batch near the policy of its logits."""
        torch.manual_seed(1)
        linear = torch.nn.Linear(8, 257, device=device, dtype=dtype)
        hidden = torch.randn(3, 7, 8, device=device, dtype=dtype)
        case = make_case(device=device, poison=False)
        logp = reference.log_probs(linear(hidden).detach().float(), case.labels)[0]
        case.old_log_probs = logp + 0.3 * torch.randn_like(logp)
        return linear, hidden, case

    # By the incoming gradient, and by that of an earlier use that has saved nothing.
    @pytest.mark.parametrize(("scale", "earlier"), [(1.0, 0.0), (0.5, 0.0), (1.0, 1e-3)])
    @pytest.mark.parametrize("rows", [slice(None), slice(0, -1)])  # whole, and a view of a base
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # forward, backward
    def test_gradient_through_a_linear_layer(self, backend, device, rows, scale, earlier, dtype):
        linear, hidden, case = self.problem(device, dtype)
        arguments = [a[:, rows] for a in case.arguments()]
        gradients = []
        for inplace in (False, True):
            linear.zero_grad()
            logits = linear(hidden)[:, rows]
            before = earlier * logits.sum()
            out = bapo_loss(logits, *arguments, backend=backend, inplace=inplace)
            (out.loss * scale + before).backward()
            gradients.append(linear.weight.grad.clone())
        assert_same(*gradients, "weight gradient")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_backward_releases_the_logits(self, backend, device, dtype):
        """A loss kept after its backward does not keep the logits in memory."""
        linear, hidden, case = self.problem(device, dtype)
        logits = linear(hidden)
        address, shape = logits.data_ptr(), logits.shape
        loss = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True).loss
        loss.backward()
        del logits
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        # Those of a compiler may have symbols for sizes.
        alike = [t for t in tensors if all(type(n) is int for n in t.shape) and t.shape == shape]
        assert address not in [t.data_ptr() for t in alike]

    def test_logits_hold_the_gradient(self, backend, device):
        """Those that no graph knows: plain ones, inference tensors, leaves without grad mode."""
        case = make_case(device=device, staleness=0.4)
        expected = run_kernel(case, backend)
        with torch.inference_mode():
            of_inference = case.logits.clone()
        for logits, mode in (
            (case.logits.clone(), torch.enable_grad()),
            (of_inference, torch.enable_grad()),
            (case.logits.clone().requires_grad_(), torch.no_grad()),
            (case.logits.clone().requires_grad_(), torch.inference_mode()),
        ):
            with mode:
                out = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
            assert_same(Result(out, (logits,)), expected)
            assert logits.is_inference() or logits._version > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("name", USES)
    def test_overwritten_logits_used_again_raise(self, backend, device, name, dtype):
        linear, hidden, case = self.problem(device, dtype)
        use, when, message = USES[name]
        base = linear(hidden)
        logits = base[:, :-1]
        used = dict(base=base, view=base[:, :-1]).get(name, logits)
        arguments = [a[:, :-1] for a in case.arguments()]
        before = use(used) if when == "before" else 0
        loss = bapo_loss(logits, *arguments, backend=backend, inplace=True).loss
        with pytest.raises(RuntimeError, match=message):
            (loss + (use(used) if when == "after" else before)).backward()

    def test_what_cannot_be_overwritten_is_refused(self, backend, device):
        """Before it is written to."""
        case = make_case(device=device, poison=False)
        x, leaf = case.logits, case.logits.clone().requires_grad_()
        a_leaf = r"logits must not be a leaf .* inplace=True, got such a"
        of_rows = "logits must have rows without overlap"
        for logits, error, message in (
            (leaf, ValueError, f"{a_leaf} leaf"),
            (leaf[:, 1:], ValueError, f"{a_leaf} view"),
            ((leaf * 1).unbind(1)[0], RuntimeError, "is a view and is being modified inplace"),
            (x[:1].expand(3, 7, 257), ValueError, of_rows),
            (x.mT.contiguous().mT, ValueError, of_rows),
        ):
            rows = slice(7 - logits.shape[1], 7) if logits.ndim == 3 else 0
            arguments = (argument[:, rows] for argument in case.arguments())
            with pytest.raises(error, match=message):
                bapo_loss(logits, *arguments, backend=backend, inplace=True)
        assert_same(leaf, case.logits, "logits")

    def test_no_allocation_of_the_size_of_the_logits(self, backend, device):
        linear, hidden, case = self.problem(device)
        logits = linear(hidden)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            out = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
        sizes = [
            abs(e.self_cpu_memory_usage) + abs(e.self_device_memory_usage) for e in profile.events()
        ]
        assert sum(sizes) < logits.numel() * logits.element_size() / 2
        out.loss.backward()


class TestFromLogProbs:
    def test_gradient_of_float64(self, device):
        """It has their dtype and accuracy."""
        case = make_case((4, 9), device=device, staleness=0.4)
        batch = case.old_log_probs, case.advantages, unmasked_tokens(case)
        logp = (case.old_log_probs + 0.3 * torch.randn(4, 9, device=device)).double()
        gradients = []
        for loss_of in (bapo_loss_from_log_probs, reference.bapo_loss_from_log_probs):
            leaf = logp.clone().requires_grad_()
            out = loss_of(leaf, *batch)
            assert out.entropy is None
            gradients += torch.autograd.grad(out.loss, leaf)
        assert_rounded(*gradients, 8)  # exp, weight and two products, on either side

    def test_gradient_of_entropy_alone(self, device):
        case = make_case(device=device)
        entropy = torch.rand(3, 7, device=device, requires_grad=True)
        options = dict(entropy=entropy, config=bapo_kernels.BAPOConfig(entropy_coef=0.1))
        batch = None, case.advantages, (unmasked := unmasked_tokens(case))
        bapo_loss_from_log_probs(case.old_log_probs, *batch, **options).loss.backward()
        assert_rounded(entropy.grad, -0.1 * unmasked.double() / unmasked.sum(), 2)


@pytest.mark.parametrize("chunk_tokens", [2, None])
def test_scaled_gradients_of_any_layout(backend, device, chunk_tokens):
    """Hidden states by columns and a transposed weight: backward multiplies what forward made."""
    case = make_case((3, 4), 65, device=device, poison=False)
    gradients = []
    for scale in (1.0, 4.0):
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(4, 3, 8, generator=g).to(device).bfloat16().transpose(0, 1)
        weight = torch.randn(8, 65, generator=g).to(device).bfloat16().t()
        leaves = [leaf.detach().requires_grad_() for leaf in (hidden, weight)]
        options = dict(backend=backend, chunk_tokens=chunk_tokens)
        loss = bapo_kernels.bapo_linear_loss(*leaves, *case.arguments(), **options).loss
        (scale * loss).backward()
        gradients.append([leaf.grad for leaf in leaves])
    once, four_times = gradients
    assert all(gradient.any() for gradient in once)
    assert_same([4 * gradient for gradient in once], four_times, "gradient")
