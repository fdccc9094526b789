"""Calls that could give a wrong number: each is right to the bit, or raises and says why."""

import copy
import io
import pickle
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from accuracy import assert_as_reference, assert_same, assert_within_budget
from helpers import make_case, needs_native, run_kernel
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from bapo_kernels import (
    BAPOConfig,
    BAPOLinearLoss,
    BAPOLoss,
    ClipBoundSearch,
    ContributionHistogram,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    log_probs,
    reference,
    warm_up,
)
from bapo_kernels.core.arguments import single
from bapo_kernels.core.call import Products
from bapo_kernels.core.head.head import Head, HeadGradients
from bapo_kernels.debug import check_inputs

V, H = 65, 8
CONFIG = BAPOConfig(entropy_coef=0.1)


def problem(device="cpu", shape=(2, 4), **options):
    """Differentiable inputs of every public function by name, and the tokens."""
    case = make_case(shape, V, device=device, poison=False, **options)
    torch.manual_seed(0)
    inputs = dict(
        logits=case.logits,
        hidden=torch.randn(*shape, H, device=device),
        weight=torch.randn(V, H, device=device),
        log_probs=case.old_log_probs + 0.3 * torch.randn(shape, device=device),
        entropy=torch.rand(shape, device=device),
    )
    return {name: x.clone().requires_grad_() for name, x in inputs.items()}, case


def of_logits(x, case, backend, **options):
    return bapo_loss(x["logits"], *case.arguments(), backend=backend, **options)


def of_hidden(x, case, backend, **options):
    arguments = x["hidden"], x["weight"], *case.arguments()
    return bapo_linear_loss(*arguments, backend=backend, chunk_tokens=3, **options)


def of_log_probs(x, case, backend, **options):
    _, *arguments = case.arguments()
    options = dict(entropy=x["entropy"], config=CONFIG, backend=backend) | options
    return bapo_loss_from_log_probs(x["log_probs"], *arguments, **options)


def of_overwritten_logits(x, case, backend, **options):
    x = dict(x, logits=x["logits"] * 1)
    return of_logits(x, case, backend, **({"inplace": backend != "reference"} | options))


def of_half_logits(x, case, backend, **options):
    return of_logits(dict(x, logits=x["logits"].half()), case, backend, **options)


def log_probs_of_logits(x, case, backend):
    return log_probs(x["logits"], case.labels, backend=backend)


def log_probs_of_hidden(x, case, backend):
    arguments = x["hidden"], x["weight"], case.labels
    return linear_log_probs(*arguments, backend=backend, chunk_tokens=3)


LOSSES = [of_logits, of_hidden, of_log_probs]
LOG_PROBS = [log_probs_of_logits, log_probs_of_hidden]


class Call:
    """Of a loss, or of log-probs without their entropy; a test may change the inputs."""

    def __init__(self, function, backend, device="cpu"):
        self.function, self.backend, self.device = function, backend, device
        self.x, self.case = problem(device)

    def __call__(self, x=None, **options):
        x = self.x if x is None else x
        return self.function(x, self.case, self.backend, **options)[0]

    def gradients(self):
        return [leaf.grad for leaf in self.x.values()]

    def results(self, value):
        """The value and the gradients of all inputs, after its backward."""
        value.sum().backward()
        return [value.detach(), *self.gradients()]

    @property
    def plain(self):
        return plain_results(self.function, self.backend, self.device)

    def check(self, value):
        """The value and its gradients are those of a plain call, to the bit."""
        assert_same(self.results(value), self.plain)

    def check_gradients(self):
        assert_same(self.gradients(), self.plain[1:])


@cache
def plain_results(function, backend, device):
    """Those of a plain call, which no test may change."""
    call = Call(function, backend, device)
    return call.results(call())


@pytest.fixture(params=[*LOSSES, *LOG_PROBS])
def function(request):
    return request.param


@pytest.fixture
def call(function, backend, device):
    plain_results(function, backend, device)  # in no context of the test
    return Call(function, backend, device)


def test_inputs_that_change_before_backward(call):
    """A loss has the gradient of its forward; log-probs keep their labels."""
    value, case = call(), call.case
    inputs = call.x.values() if call.function in LOSSES else ()
    with torch.no_grad():
        for changed in (*inputs, case.labels, case.advantages, case.old_log_probs):
            changed.mul_(2)
    call.check(value)


@pytest.mark.parametrize(
    ("function", "name", "dtype"),
    [
        (log_probs_of_logits, "logits", torch.float32),
        (log_probs_of_hidden, "hidden", torch.float32),
        (log_probs_of_hidden, "weight", torch.float32),
        (of_logits, "logits", torch.float16),  # the gradient of such a loss is made in backward
        (of_hidden, "hidden", torch.float16),
        (of_hidden, "weight", torch.float16),
    ],
)
def test_inputs_that_backward_reads_and_that_changed_raise(call, name, dtype):
    x = {key: (leaf * 1).to(dtype) for key, leaf in call.x.items()}
    value = call(x)
    x[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize("function", LOSSES)
def test_second_backward_is_refused(call, retain_graph):
    loss = call()
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="of this loss can be called once"):
        loss.backward()


def frozen(function):
    """With a head that needs no gradient."""

    def call(x, case, backend, **options):
        return function(dict(x, weight=x["weight"].detach()), case, backend, **options)

    return call


def of_two_labels(function):
    """With the labels of each row twice."""

    def call(x, case, backend):
        twice = torch.stack([case.labels, case.labels.clamp(min=0)], -1)
        return function(x, replace(case, labels=twice), backend)

    return call


def with_sets(function):
    """With a sampling mask in half of the rows."""

    def call(x, case, backend):
        lists = [list(range(0, V, 2)) * (n % 2) for n in range(case.labels.numel())]
        mask = SamplingMask.from_lists(lists, case.labels.device)
        tokens = case.arguments() if function is bapo_loss else [case.labels]
        return function(x["logits"], *tokens, sampling_mask=mask, backend=backend)

    return call


SECOND_DERIVATIVES = {
    "logits": of_logits,
    "in place": of_overwritten_logits,
    "float16": of_half_logits,
    "float16 in place": partial(of_half_logits, inplace=True),
    "entropy": partial(of_logits, config=CONFIG),
    "sets": with_sets(bapo_loss),
    "reference in place": lambda x, case, _: of_overwritten_logits(
        x, case, "reference", inplace=True
    ),
    "hidden": of_hidden,
    "hidden, frozen": frozen(of_hidden),
    "hidden, entropy": partial(of_hidden, config=CONFIG),
    "from log-probs": of_log_probs,
    "log-probs": log_probs_of_logits,
    "log-probs, labels": of_two_labels(log_probs_of_logits),
    "log-probs, sets": with_sets(log_probs),
    "log-probs of hidden": log_probs_of_hidden,
    "log-probs of hidden, frozen": frozen(log_probs_of_hidden),
    "log-probs of hidden, labels": of_two_labels(log_probs_of_hidden),
    "log-probs of hidden, labels, frozen": of_two_labels(frozen(log_probs_of_hidden)),
}


def first(value, by, factor=1.0):
    return torch.autograd.grad(value(by) * factor, by, create_graph=True, allow_unused=True)[0]


def by_a_factor(value, by):
    factor = torch.ones_like(by.sum()).detach().requires_grad_()
    torch.autograd.grad(first(value, by, factor).sum(), factor)


@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_are_refused(backend, device, name):
    """Whatever is asked for: an input, what it is made of, or what multiplies the value."""
    call = Call(SECOND_DERIVATIVES[name], backend, device)
    asked = (
        lambda value, by: torch.autograd.grad(first(value, by).square().sum(), by),
        lambda value, by: first(value, by).square().sum().backward(),
        torch.autograd.functional.hessian,
        by_a_factor,
    )
    refused = 0
    for leaf, ask in product(call.x, asked):

        def value(x, leaf=leaf):
            return call(call.x | {leaf: x * 2.0}).sum()

        if first(value, call.x[leaf]) is not None:
            with pytest.raises(RuntimeError, match="reference has all derivatives"):
                ask(value, call.x[leaf])
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
@pytest.mark.parametrize("function", [of_logits, of_overwritten_logits, of_hidden])
def test_gradient_through_log_probs_or_entropy_raises(call, backend, name):
    """Forward computes the gradient of the loss alone; 0 for other terms would be wrong."""

    def term():
        out = call.function(call.x, call.case, backend)
        return out.loss, getattr(out, name)

    loss, values = term()
    with pytest.raises(RuntimeError, match=r"log_probs and entropy .* have no gradient"):
        (loss + 0.1 * values.mean()).backward()
    assert not any(gradient is not None for gradient in call.gradients())
    loss, values = term()
    (loss + 0.1 * values.detach().mean()).backward()
    call.check_gradients()


def test_without_gradient(call):
    data = {name: leaf.detach() for name, leaf in call.x.items()}
    for x, mode in (
        (call.x, torch.no_grad()),
        (call.x, torch.inference_mode()),
        (data, torch.enable_grad()),
    ):
        with mode:
            value = call(x)
        assert not value.requires_grad
        assert_same(value, call.plain[0])


class FirstOfTwo(torch.autograd.Function):
    """Hands None to the second, as DDP does for outputs that a loss does not use."""

    @staticmethod
    def forward(ctx, first, second):
        return first.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("function", LOSSES)
def test_a_loss_that_is_not_used(call, device):
    loss, other = call(), torch.ones((), device=device, requires_grad=True)
    FirstOfTwo.apply(other, loss).backward(retain_graph=True)
    assert other.grad == 1
    assert not any(gradient is not None and gradient.any() for gradient in call.gradients())
    loss.backward()  # has its gradient still
    call.check_gradients()


@pytest.mark.parametrize("function", [of_logits])
def test_changes_of_metrics_leave_the_loss_alone(call, backend):
    """All are entries of one report, and autograd counts changes per tensor."""
    out = of_logits(call.x, call.case, backend)
    squared = out.loss**2
    for metric in out.metrics.values():
        metric.zero_()
    out.log_probs.detach().zero_()
    squared.backward()


INCOMING = {
    "strided": lambda g: g.T.contiguous().T,
    "expanded": lambda g: g[:1, :1].expand(2, 4),
    "zero": torch.zeros_like,
    "float64": torch.Tensor.double,
}


@pytest.mark.parametrize("name", INCOMING)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_incoming_gradient_of_log_probs(function, backend, device, name):
    incoming = INCOMING[name](torch.randn(2, 4, device=device))
    results = []
    for gradient in (incoming, incoming.float().contiguous()):
        call = Call(function, backend, device)
        call().backward(gradient)
        results.append(call.gradients())
    assert_same(*results)
    if name == "zero":
        assert not any(bool(g.any()) for g in results[0] if g is not None)


@pytest.mark.parametrize("function", [log_probs_of_logits])
def test_incoming_nan_stays_in_its_row(call, device):
    incoming = torch.ones(2, 4, device=device)
    call.case.labels[0, 0], incoming[0, 0] = 1, torch.nan
    call().backward(incoming)
    at = call.x["logits"].grad.isnan().any(-1)
    assert at.sum() == at[0, 0] == 1


@pytest.mark.parametrize("function", LOSSES)
def test_incoming_nan_reaches_every_gradient(call):
    (call() * torch.nan).backward()
    assert all(gradient is None or gradient.isnan().all() for gradient in call.gradients())


FACTORS = {
    "used twice": lambda loss: 0.375 * loss + loss.square() * 0 + 0.625 * loss,
    "expanded": lambda loss: loss.expand(4).mean(),
    "float64": lambda loss: loss.double(),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("function", LOSSES)
def test_functions_of_the_loss(call, name):
    """Autograd adds the incoming gradients before the kernel gets them."""
    FACTORS[name](call()).backward()
    call.check_gradients()


def of_hidden_under_autocast(x, case, backend, **options):
    """Parameters in float32, products in float16."""
    x = {name: leaf.float() for name, leaf in x.items()}
    enabled = backend != "reference"
    with torch.autocast(x["hidden"].device.type, torch.float16, enabled=enabled):
        return of_hidden(x, case, backend, **options)


@pytest.mark.parametrize("function", [*LOSSES, of_overwritten_logits, of_hidden_under_autocast])
def test_loss_scale_of_float16(backend, device, function):
    """Derivatives too small for float16 are right if the loss is scaled."""
    expected = partial(scaled_gradients, function, "reference", device)
    got = scaled_gradients(function, backend, device)
    assert_as_reference(got, expected, torch.float16)


def test_loss_scale_of_float16_in_the_reference_in_place(device):
    overwritten = partial(of_overwritten_logits, inplace=True)
    expected = partial(scaled_gradients, of_logits, "reference", device)
    got = scaled_gradients(overwritten, "reference", device)
    assert_as_reference(got, expected, torch.float16)


def scaled_gradients(function, backend, device, dtype=torch.float16):
    """Gradients of 2^16 times a loss over 2^16 tokens, from inputs that float16 represents."""
    x, case = problem(device)
    leaves = {k: leaf.detach().half().to(dtype).requires_grad_() for k, leaf in x.items()}
    loss = function(leaves, case, backend, batch_num_tokens=2.0**16).loss
    (loss * 2.0**16).backward()
    return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def test_only_the_policy_has_a_gradient(backend, device):
    """Everything else is data: no gradient, never a wrong one."""
    x, case = problem(device)
    data = dict(
        old_log_probs=case.old_log_probs,
        advantages=case.advantages,
        response_mask=case.response_mask.float(),
        ref_log_probs=case.old_log_probs.clone(),
        rollout_log_probs=case.old_log_probs.clone(),
        rollout_is_weights=torch.rand_like(case.advantages),
        batch_num_tokens=torch.tensor(7.0, device=device),
    )
    config = BAPOConfig(kl_loss_coef=0.1, entropy_coef=0.1)
    bounds = [torch.tensor(b, device=device, requires_grad=True) for b in (0.8, 1.2)]
    leaves = {name: value.requires_grad_() for name, value in data.items()}
    for options in ({}, {"bounds": bounds}):
        options = dict(backend=backend, config=config) | options
        calls = (
            bapo_loss(x["logits"], case.labels, **leaves, **options),
            bapo_linear_loss(x["hidden"], x["weight"], case.labels, **leaves, **options),
            bapo_loss_from_log_probs(x["log_probs"], entropy=x["entropy"], **leaves, **options),
        )
        for out in calls:
            given = torch.autograd.grad(out.loss, [*leaves.values(), *bounds], allow_unused=True)
            assert given == (None,) * len(given)
            assert not any(x.requires_grad for x in (*out.bounds, *out.metrics.values()))
    loss = bapo_loss(x["logits"].detach(), case.labels, backend=backend, **leaves).loss
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_uint8_label_156_is_not_ignored(backend, device):
    """-100 as uint8 is 156."""
    logits, A = torch.randn(2, 3, 257, device=device), torch.ones(2, 3, device=device)
    labels = torch.full((2, 3), 156, device=device)
    losses = [partial(bapo_loss, backend=name) for name in (backend, "reference")]
    for loss_of in (*losses, reference.bapo_loss):
        of_kinds = [loss_of(logits, kind, None, A).log_probs for kind in (labels, labels.byte())]
        assert of_kinds[0].all()
        assert_same(*of_kinds)
    assert_same(*(reference.log_probs(logits, y)[0] for y in (labels, labels.byte())))
    with pytest.raises(ValueError, match=r"labels must be in \[0, 100\) or -100, got 156"):
        check_inputs(logits[..., :100], labels.byte(), None, A)


WRONG_OFFSETS = {
    "from 1": [1, 5, 9],
    "below 0": [-2, 5, 9],
    "falling": [0, 7, 5, 9],
    "falling below 0": [0, -9, 9],
    "beyond N": [0, 5, 40],
}
MODES = dict(loss_agg_mode="token-mean"), dict(loss_agg_mode="seq-mean-token-mean")


@pytest.mark.parametrize("mode", [*MODES, dict(ratio_level="sequence")])
@pytest.mark.parametrize("name", WRONG_OFFSETS)
def test_wrong_offsets_make_the_loss_nan(backend, device, name, mode, monkeypatch):
    """On a GPU, where they are not read; here they are as unread."""
    monkeypatch.setattr(single, "is_readable", lambda offsets: False)
    offsets = torch.tensor(WRONG_OFFSETS[name], device=device)
    case = make_case((9,), V, device=device, poison=False)
    A = torch.ones(len(offsets) - 1, device=device)
    logits = case.logits.requires_grad_()
    arguments = logits, case.labels, case.old_log_probs, A
    options = dict(config=BAPOConfig(**mode), cu_seqlens=offsets)
    out = bapo_loss(*arguments, backend=backend, **options)
    assert out.loss.isnan()
    assert out.bounds == (0.6, 1.2)
    out.loss.backward()
    assert logits.grad[case.labels != -100].isnan().any(-1).all()
    for reads_them in (check_inputs, partial(bapo_loss, backend="reference")):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 9, got"):
            reads_them(*arguments, **options)


@contextmanager
def changed(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


default_dtype = partial(changed, torch.get_default_dtype, torch.set_default_dtype)
of_algorithms = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
SURROUNDINGS = {
    "float64 by default": partial(default_dtype, torch.float64),
    "bfloat16 by default": partial(default_dtype, torch.bfloat16),
    "meta by default": partial(torch.device, "meta"),
    "deterministic": partial(changed, *of_algorithms, True),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "anomaly": partial(torch.autograd.set_detect_anomaly, True),
}


def test_surroundings_change_nothing(function, backend, device):
    expected = plain_results(function, backend, device)
    _, case = problem(device)
    tokens = case.old_log_probs + 0.3, *case.arguments()[1:]
    bounds = find_clip_bounds(*tokens)
    for name, around in SURROUNDINGS.items():
        call = Call(function, backend, device)
        with around():
            got = call.results(call())
            assert find_clip_bounds(*tokens) == bounds, name
        assert_same(got, expected)


def test_autocast(call, device):
    """It changes nothing without a GEMM; those of a backward have the dtype of the forward's."""
    before = call() if call.function in (of_hidden, log_probs_of_hidden) else None
    with torch.autocast(device, torch.bfloat16):
        call.check(call() if before is None else before)


def test_sum_of_chunks_stays_float32_under_autocast():
    """It would round the product of every chunk to bfloat16."""
    hidden, weight = torch.randn(20, H).bfloat16(), torch.randn(V, H).bfloat16()
    dlogits = torch.randn(20, V).bfloat16()
    made = []
    for enabled in (False, True):
        of_head = Head.of(hidden, weight, None, Products(torch.bfloat16, torch.bfloat16))
        total = HeadGradients(of_head, (True, True, False), one_chunk=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for rows in torch.arange(20).chunk(4):
                total.add(rows, hidden[rows], dlogits[rows])
        made.append(total.like(hidden, weight.float(), None)[:2])
    assert_same(*made)


TOKENS = ("labels", "old_log_probs", "advantages", "response_mask")


def as_function(function, backend, device="cpu"):
    """A function of one tensor, as ``torch.func`` differentiates it, and that tensor."""
    name = {of_logits: "logits", of_log_probs: "log_probs", log_probs_of_logits: "logits"}
    name = name.get(function, "hidden")
    call = Call(function, backend, device)
    x = {key: value.detach() for key, value in call.x.items()}
    return lambda leaf: call(x | {name: leaf}).sum(), x[name]


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None].expand(2, *x.shape)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_are_refused(function, backend, device, name):
    f, x = as_function(function, backend, device)
    with pytest.raises(ValueError, match=f"backend must be 'reference' inside .* got '{backend}'"):
        TRANSFORMS[name](f, x)


SEARCHES = {
    "function": lambda *tokens: find_clip_bounds(*tokens).upper,
    "histogram": lambda *tokens: ContributionHistogram().update(*tokens),
    "search": lambda *tokens: ClipBoundSearch(scope="step").update(*tokens),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("place", range(3))
def test_a_search_is_not_mapped(name, place):
    """Whichever argument, and inside of another transform, too."""
    x, dims = torch.zeros(2, 4), [0 if i == place else None for i in range(3)]
    given = [x if i == place else x[0] for i in range(3)]
    inner = torch.func.grad(lambda y, tokens: SEARCHES[name](*tokens) or y)
    mapped = ("log_probs", "old_log_probs", "advantages")[place]
    for f in (SEARCHES[name], lambda *tokens: inner(torch.ones(()), tokens)):
        with pytest.raises(ValueError, match=f"^{mapped} must not be mapped .*vmap"):
            torch.func.vmap(f, tuple(dims))(*given)


def test_function_transforms_of_the_reference(function):
    f, x = as_function(function, "reference")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    assert_same(TRANSFORMS["grad"](f, x), expected)
    _, along = TRANSFORMS["jvp"](f, x)
    of_each = x.double() * expected
    assert_within_budget("jvp", along, along, of_each.sum(), of_each.abs().sum().item())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(function, backend, device, requires_grad):
    """To drop a tangent would be to return a derivative of 0."""
    f, x = as_function(function, backend, device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(requires_grad), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            f(dual)


@pytest.mark.parametrize("function", [of_logits])
def test_batched_gradients_are_refused(call, device):
    loss, two = call(), torch.ones(2, device=device)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, call.x["logits"], two, is_grads_batched=True)


def test_none_in_a_call_is_the_option_of_the_module():
    x, case = problem()
    config = BAPOConfig.fixed(0.9, 1.1)
    for module, inputs in (
        (BAPOLoss(config, backend="reference"), [x["logits"]]),
        (BAPOLinearLoss(config, backend="reference"), [x["hidden"], x["weight"]]),
    ):
        out = module(*inputs, *case.arguments(), config=None, backend=None)
        assert out.bounds == (0.9, 1.1)
        assert type(out.loss.grad_fn).__name__ != "_PrecomputedGradientBackward"  # of the kernels


def through_torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch]
)
def test_copies(copied):
    x, case = problem()
    for module in (BAPOLoss(CONFIG, statistics="live"), BAPOLinearLoss(CONFIG, chunk_tokens=3)):
        twin = copied(module)
        assert (repr(twin), twin.config) == (repr(module), module.config)
    bounds = []
    for of_step in (copied, lambda x: x):
        search = of_step(ClipBoundSearch(CONFIG, "lagged"))
        search.update(x["log_probs"], *case.arguments()[1:])
        search = of_step(search)
        search.step()
        bounds.append(search.bounds)
    assert bounds[0] == bounds[1]
    with torch.no_grad():
        out = bapo_loss(x["logits"], *case.arguments())
    twin = copied(out)
    assert type(twin) is type(out)
    assert (twin.bounds, twin.metrics) == (out.bounds, out.metrics)
    assert_same(twin.log_probs, out.log_probs)


def loss_and_gradient(seed):
    run = run_kernel(make_case((8, 8), 501, seed=seed), "cpu")
    return run.output.loss.detach(), run.gradient


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start):
    """A process forked after its parent has used threads must not wait for them."""
    expected = [loss_and_gradient(seed) for seed in range(4)]
    options = dict(batch_size=None, num_workers=2, multiprocessing_context=start, timeout=120)
    loader = DataLoader(range(4), collate_fn=loss_and_gradient, **options)
    for got, alone in zip(loader, expected, strict=True):
        assert_same(got, alone)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS, of_overwritten_logits, of_half_logits])
def test_checkpoint(call, use_reentrant):
    """The forward runs twice; the gradient is that of one run."""

    def of(*values):
        values = [value * 1 for value in values]
        return call(dict(zip(call.x, values, strict=True)))

    got = call.results(checkpoint(of, *call.x.values(), use_reentrant=use_reentrant))
    for a, b in zip(got, call.plain, strict=True):
        assert b is None or torch.equal(a, b)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("function", [of_logits])
def test_hooks_of_logits(call, inplace):
    """A hook of logits that are not a leaf may change the gradient."""
    logits = call.x["logits"] * 1
    seen = []
    logits.register_hook(lambda dlogits: seen.append(dlogits.clone()) or 2 * dlogits)
    call(dict(logits=logits), inplace=inplace).backward()
    assert_same(seen[0], call.plain[1])
    assert_same(call.x["logits"].grad, 2 * call.plain[1])


class Named(torch.Tensor):
    pass


class Observed(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class Weight(torch.nn.Parameter):
    pass


KINDS = [Named, Observed, torch.nn.Parameter, Weight, AsyncCollectiveTensor]
COMPILED = pytest.param(True, marks=[pytest.mark.compile, pytest.mark.slow])


@pytest.mark.parametrize("compiled", [False, COMPILED])
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses(call, kind, compiled):
    """The last kind has no memory of its own: it is the result of a collective that may run."""
    named, parameter = kind in (Named, Observed), issubclass(kind, torch.nn.Parameter)
    for name, leaf in call.x.items():
        leaf = leaf.detach().as_subclass(kind if named else torch.Tensor)
        call.x[name] = kind(leaf) if parameter else leaf.requires_grad_()
    for name in TOKENS if not parameter else ():
        values = getattr(call.case, name)
        setattr(call.case, name, values.as_subclass(kind) if named else kind(values))
    value = call()
    if compiled:
        torch.compiler.reset()
        step = torch.compile(lambda: call(), fullgraph=True, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            value = [step() for _ in range(2)][-1]
    value.sum().backward()
    for got, same in zip([value, *call.gradients()], call.plain, strict=True):
        assert same is None or torch.equal(got, same)


def test_warm_up(call):
    """It runs both passes and leaves nothing behind."""
    before, passed = {name: leaf.detach().clone() for name, leaf in call.x.items()}, []

    def observed(x):
        for leaf in x.values():
            leaf.register_hook(lambda gradient: passed.append(gradient.shape))
        return call(x)

    warm_up(observed, call.x)
    assert passed
    for name, leaf in call.x.items():
        assert_same(leaf, before[name])
        assert leaf.grad is None
        assert not leaf._backward_hooks


@pytest.mark.parametrize(
    ("shape", "masked"),
    [*(((2, 4), 1.0), ((0,), 0.0), ((0, 4), 0.0), ((2, 0), 0.0))]
    + [*(((), 0.0), ((1,), 0.0), ((1, 1), 0.0))],
)
def test_no_token_and_one_token(function, backend, device, shape, masked):
    """Masked ones may be NaN."""
    x, case = problem(device, shape, masked=masked)
    if masked:
        case.labels[:] = -100
        for name in x.keys() - {"weight"}:
            x[name].data.fill_(torch.nan)
    out = function(x, case, backend)
    assert out[0].shape == (() if function in LOSSES else shape)
    value = out[0].sum()
    value.backward()
    gradients = [leaf.grad for leaf in x.values() if leaf.grad is not None]
    assert gradients
    if masked or 0 in shape:
        assert not any(each.any() for each in (value, *gradients))
        if function in LOSSES:
            assert out.bounds == (0.6, 1.2)
            assert all(v.isfinite() or "ratio" in k for k, v in out.metrics.items())
    else:
        assert all(each.isfinite().all() for each in (value, *gradients))
