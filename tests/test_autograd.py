"""The gradient computed in forward: scaled, used once, refused where it would be wrong."""

import gc

import pytest
import torch
import torch.utils.checkpoint
from helpers import make_case, plain_result, run_kernel, unmasked_tokens

from bapo_kernels import (
    BAPOConfig,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    log_probs,
    reference,
)


@pytest.mark.parametrize("scale", [1.0, 0.37, 0.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_scaled_by_the_incoming_one(backend, device, scale, dtype):
    case = make_case(dtype=dtype, device=device)
    once = plain_result(backend, dtype=dtype)
    scaled = run_kernel(case, backend, scale=scale)
    assert torch.equal(scaled.gradient, (once.gradient.float() * scale).to(dtype))


def test_gradient_is_not_copied(backend, device):
    """Autograd keeps the memory that the kernel wrote."""
    case = make_case(device=device)
    x = case.logits.clone().requires_grad_()
    out = bapo_loss(x, *case.arguments(), backend=backend)
    pointer = out.loss.grad_fn.gradients[0].data_ptr()
    out.loss.backward()
    assert x.grad.data_ptr() == pointer


def test_second_backward_is_refused(backend, device):
    case = make_case(device=device)
    x = case.logits.clone().requires_grad_()
    loss = bapo_loss(x, *case.arguments(), backend=backend).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="of this loss can be called once"):
        loss.backward()


@pytest.mark.parametrize("function", ["bapo_loss", "log_probs"])
def test_double_backward_is_refused(backend, device, function):
    case = make_case(device=device)
    x = case.logits.nan_to_num(0.0).requires_grad_()
    if function == "bapo_loss":
        value = bapo_loss(x, *case.arguments(), backend=backend).loss
    else:
        value = log_probs(x, case.labels, backend=backend)[0].sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        gradient.square().sum().backward()


def test_gradients_of_two_losses_accumulate(backend, device):
    case = make_case(device=device)
    single = plain_result(backend).gradient
    x = case.logits.clone().requires_grad_()
    for _ in range(2):
        bapo_loss(x, *case.arguments(), backend=backend).loss.backward()
    assert torch.equal(x.grad, 2 * single)


def test_only_the_loss_has_a_gradient(backend, device):
    case = make_case(device=device)
    x = case.logits.clone().requires_grad_()
    old = case.old_log_probs.clone().requires_grad_()
    out = bapo_loss(x, case.labels, old, case.advantages, case.response_mask, backend=backend)
    assert out.loss.requires_grad
    assert not any(t.requires_grad for t in (*out.bounds, *out.metrics.values()))
    out.loss.backward()
    assert old.grad is None


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradient_through_log_probs_or_entropy_raises(backend, device, name, inplace):
    """Forward computes the gradient of the loss alone; 0 for other terms would be wrong."""
    case = make_case(device=device, poison=False)
    x = case.logits.clone().requires_grad_()

    def term():
        out = bapo_loss(x * 1.0, *case.arguments(), backend=backend, inplace=inplace)
        return out.loss, getattr(out, name)

    loss, values = term()
    with pytest.raises(RuntimeError, match=r"log_probs and entropy .* have no gradient"):
        (loss + 0.1 * values.mean()).backward()
    loss, values = term()
    with pytest.raises(RuntimeError, match=r"have no gradient"):
        torch.autograd.grad(loss + 0.1 * values.mean(), x)
    assert x.grad is None
    loss, values = term()
    (loss + 0.1 * values.detach().mean()).backward()
    assert x.grad.isfinite().all()
    with torch.no_grad():
        assert not term()[1].requires_grad


def test_gradient_through_entropy_of_hidden_states_raises(backend, device):
    case = make_case((2, 5), 65, device=device, poison=False)
    hidden = torch.randn(2, 5, 16, device=device, requires_grad=True)
    weight = torch.randn(65, 16, device=device)
    out = bapo_linear_loss(hidden, weight, *case.arguments(), backend=backend)
    with pytest.raises(RuntimeError, match=r"have no gradient"):
        (out.loss + out.entropy.mean()).backward()


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

    def gradient(*terms):
        total = sum(torch.where(unmasked, term, 0.0).sum() for term in terms)
        return torch.autograd.grad(total, x, retain_graph=True)[0]

    got, expected = gradient(out.log_probs, 0.3 * out.entropy), gradient(logp, 0.3 * entropy)
    torch.testing.assert_close(got, expected)
    assert got.any()


class TestWithoutGradient:
    def check(self, case, backend, logits, mode):
        expected = plain_result(backend).output
        with mode:
            out = bapo_loss(logits, *case.arguments(), backend=backend)
        assert not out.loss.requires_grad
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out.log_probs, expected.log_probs)

    def test_no_grad(self, backend, device):
        case = make_case(device=device)
        self.check(case, backend, case.logits.clone().requires_grad_(), torch.no_grad())

    def test_inference_mode(self, backend, device):
        case = make_case(device=device)
        self.check(case, backend, case.logits, torch.inference_mode())

    def test_nothing_requires_grad(self, backend, device):
        case = make_case(device=device)
        self.check(case, backend, case.logits, torch.enable_grad())


def test_autocast_changes_nothing(backend, device):
    case = make_case(device=device, dtype=torch.bfloat16)
    expected = plain_result(backend, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        got = run_kernel(case, backend)
    assert torch.equal(got.gradient, expected.gradient)


class TestInPlace:
    def model(self, device, V=257, dtype=torch.float32):
        torch.manual_seed(1)
        linear = torch.nn.Linear(8, V, device=device, dtype=dtype)
        return linear, torch.randn(3, 7, 8, device=device, dtype=dtype)

    def case(self, device, linear, hidden):
        case = make_case(device=device, poison=False)
        logp = reference.log_probs(linear(hidden).detach().float(), case.labels)[0]
        case.old_log_probs = logp + 0.3 * torch.randn_like(logp)
        return case

    @pytest.mark.parametrize("scale", [1.0, 0.5])
    @pytest.mark.parametrize("rows", [slice(None), slice(0, -1)])  # whole, and a view of a base
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # forward, backward
    def test_gradient_through_a_linear_layer(self, backend, device, rows, scale, dtype):
        linear, hidden = self.model(device, dtype=dtype)
        case = self.case(device, linear, hidden)
        arguments = [a[:, rows] for a in case.arguments()]
        gradients = []
        for inplace in (False, True):
            linear.zero_grad()
            logits = linear(hidden)[:, rows]
            out = bapo_loss(logits, *arguments, backend=backend, inplace=inplace)
            (out.loss * scale).backward()
            gradients.append(linear.weight.grad.clone())
        assert torch.equal(*gradients)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_backward_releases_the_logits(self, backend, device, dtype):
        """A loss kept after its backward does not keep the logits in memory."""
        linear, hidden = self.model(device, dtype=dtype)
        case = self.case(device, linear, hidden)
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
        case = make_case(device=device, staleness=0.4)
        expected = run_kernel(case, backend)
        logits = case.logits.clone()
        version = logits._version
        out = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
        assert torch.equal(logits, expected.gradient)
        assert torch.equal(out.loss, expected.output.loss)
        assert logits._version > version

    def test_inference_tensors_are_overwritten(self, backend, device):
        case = make_case(device=device)
        expected = plain_result(backend)
        with torch.inference_mode():
            logits = case.logits.clone()
        bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
        assert torch.equal(logits, expected.gradient)

    def test_later_use_of_the_logits_raises(self, backend, device):
        linear, hidden = self.model(device)
        case = self.case(device, linear, hidden)
        logits = linear(hidden)
        out = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
        with pytest.raises(RuntimeError, match="overwritten with their gradient"):
            (out.loss + logits.sum()).backward()

    def test_earlier_use_that_saved_the_logits_raises(self, backend, device):
        linear, hidden = self.model(device)
        case = self.case(device, linear, hidden)
        logits = linear(hidden)
        squared = logits.square().sum()
        out = bapo_loss(logits, *case.arguments(), backend=backend, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (out.loss + squared).backward()

    def test_leaf_is_refused_before_it_is_written(self, backend, device):
        case = make_case(device=device, poison=False)
        leaf = case.logits.clone().requires_grad_()
        with pytest.raises(ValueError, match=r"logits must not be a leaf .* inplace=True"):
            bapo_loss(leaf, *case.arguments(), backend=backend, inplace=True)
        assert torch.equal(leaf, case.logits)

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: x[:1].expand(3, 7, 257),
            lambda x: x.transpose(0, 2).transpose(0, 2).mT.contiguous().mT,
        ],
    )
    def test_overlapping_or_strided_rows_are_refused(self, backend, device, make):
        case = make_case(device=device, poison=False)
        with pytest.raises(ValueError, match="logits must have rows without overlap"):
            bapo_loss(make(case.logits), *case.arguments(), backend=backend, inplace=True)

    def test_no_allocation_of_the_size_of_the_logits(self, backend, device):
        linear, hidden = self.model(device)
        case = self.case(device, linear, hidden)
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
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_gradients_of_both_inputs(self, backend, device, dtype):
        case = make_case((4, 9), device=device, staleness=0.4)
        config = BAPOConfig(entropy_coef=0.1)
        logp = (case.old_log_probs + 0.3 * torch.randn(4, 9, device=device)).to(dtype)
        entropy = torch.rand(4, 9, device=device).to(dtype)
        results = []
        for module in (bapo_loss_from_log_probs, reference.bapo_loss_from_log_probs):
            kind = torch.float64 if module is not bapo_loss_from_log_probs else dtype
            leaves = [t.to(kind).requires_grad_() for t in (logp.clone(), entropy.clone())]
            out = module(
                leaves[0],
                case.old_log_probs,
                case.advantages,
                unmasked_tokens(case),
                entropy=leaves[1],
                config=config,
            )
            out.loss.backward()
            results.append((out, [t.grad for t in leaves]))
        (got, got_grads), (truth, true_grads) = results
        torch.testing.assert_close(got.loss.double(), truth.loss, rtol=1e-6, atol=1e-9)
        for gradient, expected in zip(got_grads, true_grads, strict=True):
            assert gradient.dtype == dtype
            torch.testing.assert_close(
                gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-12
            )
        for name, value in truth.metrics.items():
            torch.testing.assert_close(got.metrics[name].double(), value, rtol=1e-6, atol=1e-7)
        assert got.bounds == truth.bounds

    def test_gradient_of_entropy_alone(self, backend, device):
        case = make_case(device=device)
        entropy = torch.rand(3, 7, device=device, requires_grad=True)
        config = BAPOConfig(entropy_coef=0.1)
        bapo_loss_from_log_probs(
            case.old_log_probs,
            None,
            case.advantages,
            unmasked_tokens(case),
            entropy=entropy,
            config=config,
        ).loss.backward()
        assert entropy.grad.sum().item() == pytest.approx(-0.1)

    def test_agrees_with_the_loss_of_logits(self, backend, device):
        case = make_case(device=device, staleness=0.4)
        full = run_kernel(case, backend).output
        unmasked = unmasked_tokens(case)
        out = bapo_loss_from_log_probs(
            full.log_probs, case.old_log_probs, case.advantages, unmasked, statistics="live"
        )
        torch.testing.assert_close(out.loss, full.loss, rtol=1e-5, atol=1e-7)
        assert out.entropy is None
        assert out.metrics["live_tokens"] == (unmasked & (case.advantages != 0)).sum()


def test_loss_used_twice_in_one_graph(backend, device):
    """Autograd adds the incoming gradients before the kernel gets them."""
    case = make_case(device=device)
    once = plain_result(backend).gradient
    x = case.logits.clone().requires_grad_()
    loss = bapo_loss(x, *case.arguments(), backend=backend).loss
    (1.5 * loss + loss.square() * 0 + 2.5 * loss).backward()
    torch.testing.assert_close(x.grad, 4 * once, rtol=1e-6, atol=0)


def test_zero_incoming_gradient_writes_zeros(backend, device):
    case = make_case(device=device, dtype=torch.bfloat16)
    gradient = run_kernel(case, backend, scale=0.0).gradient
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_checkpointing_gives_the_same_gradient(backend, device, inplace, dtype):
    """The forward runs twice; the gradient is that of one run."""
    torch.manual_seed(2)
    weight = torch.randn(8, 257, device=device, dtype=dtype, requires_grad=True)
    hidden = torch.randn(3, 7, 8, device=device, dtype=dtype)
    case = make_case(device=device, poison=False)

    def loss(h):
        return bapo_loss(h @ weight, *case.arguments(), backend=backend, inplace=inplace).loss

    (expected,) = torch.autograd.grad(loss(hidden), weight)
    value = torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(value, weight)[0], expected)


def test_log_probs_of_logits_changed_afterwards_raise(backend, device):
    """Backward reads the logits again: it must raise rather than return a wrong gradient."""
    leaf = torch.randn(3, 20, device=device, requires_grad=True)
    x = leaf * 1.0
    logp, _ = log_probs(x, torch.tensor([1, 2, 3], device=device), backend=backend)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_log_probs_without_gradient(backend, device, mode):
    x = torch.randn(3, 20, device=device, requires_grad=True)
    labels = torch.tensor([1, 2, 3], device=device)
    expected = log_probs(x, labels, backend=backend)
    with mode():
        got = log_probs(x, labels, backend=backend)
    assert not got[0].requires_grad
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_log_probs_under_autocast_and_without_tokens(backend, device):
    x = torch.randn(3, 20, device=device).bfloat16()
    labels = torch.tensor([1, 2, 3], device=device)
    with torch.autocast(device, torch.bfloat16):
        got, entropy = log_probs(x, labels, backend=backend)
    assert got.dtype == entropy.dtype == torch.float32
    assert torch.equal(got, log_probs(x, labels, backend=backend)[0])
    empty = torch.empty(0, 20, device=device, requires_grad=True)
    log_probs(empty, labels[:0], backend=backend)[0].sum().backward()
    assert empty.grad.shape == (0, 20)


def test_all_masked_loss_is_connected_to_the_graph(backend, device):
    """A rank without tokens must still take part in the backward of the others."""
    case = make_case(device=device)
    linear = torch.nn.Linear(8, 257, device=device)
    logits = linear(torch.randn(3, 7, 8, device=device))
    mask = torch.zeros_like(case.response_mask)
    arguments = (case.labels, case.old_log_probs, case.advantages, mask)
    for inplace in (False, True):
        linear.zero_grad()
        bapo_loss(logits * 1, *arguments, backend=backend, inplace=inplace).loss.backward(
            retain_graph=True
        )
        assert torch.equal(linear.weight.grad, torch.zeros_like(linear.weight))


class FirstOfTwo(torch.autograd.Function):
    """Hands None to the second, as DDP does for outputs that a loss does not use."""

    @staticmethod
    def forward(ctx, first, second):
        return first.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_loss_that_is_not_used(backend, device):
    case = make_case(device=device)
    logits = case.logits.requires_grad_()
    out = bapo_loss(logits, *case.arguments(), backend=backend)
    other = torch.ones((), device=device, requires_grad=True)
    FirstOfTwo.apply(other, out.loss).backward(retain_graph=True)
    assert other.grad == 1
    assert logits.grad is None or not logits.grad.any()
    out.loss.backward()  # has its gradient still
    assert torch.equal(logits.grad, run_kernel(case, backend).gradient)


def test_changes_of_metrics_leave_the_loss_alone(backend, device):
    """All are entries of one report, and autograd counts changes per tensor."""
    case = make_case(device=device)
    out = bapo_loss(case.logits.requires_grad_(), *case.arguments(), backend=backend)
    squared = out.loss**2
    for metric in out.metrics.values():
        metric.zero_()
    out.log_probs.detach().zero_()
    squared.backward()


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
        loss = bapo_linear_loss(*leaves, *case.arguments(), **options).loss
        (scale * loss).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for once, four_times in zip(*gradients, strict=True):
        assert once.any()
        assert torch.equal(4 * once, four_times)
