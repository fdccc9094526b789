"""Calls that could give a wrong number: each is right to the bit, or raises and says why."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import get_args

import pytest
import torch
from helpers import assert_within_budget, make_case, needs_native, run_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
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
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    log_probs,
    reference,
    warm_up,
)
from bapo_kernels.config import LossAggMode
from bapo_kernels.core.head import Head, HeadGradients
from bapo_kernels.debug import check_inputs

V, H = 65, 8
CONFIG = BAPOConfig(entropy_coef=0.1)


def problem(device="cpu"):
    """Differentiable inputs of every public function by name, and the tokens."""
    case = make_case((2, 4), V, device=device, poison=False)
    torch.manual_seed(0)
    inputs = dict(
        logits=case.logits,
        hidden=torch.randn(2, 4, H, device=device),
        weight=torch.randn(V, H, device=device),
        log_probs=case.old_log_probs + 0.3 * torch.randn(2, 4, device=device),
        entropy=torch.rand(2, 4, device=device),
    )
    return {name: x.clone().requires_grad_() for name, x in inputs.items()}, case


def of_logits(x, case, backend, **options):
    return bapo_loss(x["logits"], *case.arguments(), backend=backend, **options).loss


def of_hidden(x, case, backend, **options):
    arguments = x["hidden"], x["weight"], *case.arguments()
    return bapo_linear_loss(*arguments, backend=backend, chunk_tokens=3, **options).loss


def of_log_probs(x, case, backend, **options):
    _, *arguments = case.arguments()
    options = dict(entropy=x["entropy"], config=CONFIG, backend=backend) | options
    return bapo_loss_from_log_probs(x["log_probs"], *arguments, **options).loss


def log_probs_of_logits(x, case, backend):
    return log_probs(x["logits"], case.labels, backend=backend)[0]


def log_probs_of_hidden(x, case, backend):
    arguments = x["hidden"], x["weight"], case.labels
    return linear_log_probs(*arguments, backend=backend, chunk_tokens=3)[0]


LOSSES = [of_logits, of_hidden, of_log_probs]
LOG_PROBS = [log_probs_of_logits, log_probs_of_hidden]


def gradients(function, backend, device, around=nullcontext, **options):
    """Value of a function and the gradients of all inputs, computed inside ``around()``."""
    x, case = problem(device)
    with around():
        value = function(x, case, backend, **options)
        value.sum().backward()
    return [value.detach(), *(leaf.grad for leaf in x.values())]


@cache
def expected_gradients(function, backend, device):
    """Those of a plain call, which no test may change."""
    return gradients(function, backend, device)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


class TestChangedBeforeBackward:
    @pytest.mark.parametrize("function", LOSSES)
    def test_a_loss_has_the_gradient_of_its_forward(self, backend, device, function):
        x, case = problem(device)
        value = function(x, case, backend)
        with torch.no_grad():
            for changed in (*x.values(), case.labels, case.advantages, case.old_log_probs):
                changed.mul_(2)
        value.backward()
        expected = expected_gradients(function, backend, device)
        assert_same([value.detach(), *(leaf.grad for leaf in x.values())], expected)

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (log_probs_of_logits, "logits"),
            (log_probs_of_hidden, "hidden"),
            (log_probs_of_hidden, "weight"),
        ],
    )
    def test_log_probs_raise(self, backend, device, function, name):
        x, case = problem(device)
        value = function(x, case, backend)
        with torch.no_grad():
            x[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()

    @pytest.mark.parametrize("function", [log_probs_of_logits, log_probs_of_hidden])
    def test_log_probs_keep_the_labels_of_their_forward(self, backend, device, function):
        x, case = problem(device)
        value = function(x, case, backend)
        case.labels.zero_()
        value.sum().backward()
        expected = expected_gradients(function, backend, device)
        assert_same([value.detach(), *(leaf.grad for leaf in x.values())], expected)

    @pytest.mark.parametrize("function", [of_logits, of_hidden])
    def test_a_loss_of_float16_raises(self, backend, device, function):
        """Its gradient is computed in backward."""
        x, case = problem(device)
        half = {name: (leaf * 1).half() for name, leaf in x.items()}
        loss = function(half, case, backend)
        for changed in half.values():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("rows", [slice(None), slice(0, -1)])  # whole, and a view of a base
    def test_overwritten_logits_raise(self, backend, device, rows, dtype):
        x, case = problem(device)
        logits = (x["logits"] * 1).to(dtype)[:, rows]
        arguments = (argument[:, rows] for argument in case.arguments())
        loss = bapo_loss(logits, *arguments, backend=backend, inplace=True).loss
        with torch.no_grad():
            logits.copy_(x["logits"][:, rows])  # logits of the next micro-batch
        with pytest.raises(RuntimeError, match=r"logits .*inplace=True.* were changed"):
            loss.backward()


class TestInPlace:
    def test_view_of_a_leaf_is_refused_before_it_is_written(self, backend, device):
        x, case = problem(device)
        arguments = (argument[:, 1:] for argument in case.arguments())
        with pytest.raises(ValueError, match=r"logits must not be a leaf .* got such a view"):
            bapo_loss(x["logits"][:, 1:], *arguments, backend=backend, inplace=True)
        assert torch.equal(x["logits"], case.logits)

    def test_one_of_many_views_is_refused(self, backend, device):
        x, case = problem(device)
        logits, *_ = (x["logits"] * 1).unbind()
        arguments = (argument[0] for argument in case.arguments())
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            bapo_loss(logits, *arguments, backend=backend, inplace=True)

    def test_earlier_use_that_saved_nothing(self, backend, device):
        results = []
        for inplace in (False, True):
            x, case = problem(device)
            logits = x["logits"] * 1
            before = logits.sum()
            loss = bapo_loss(logits, *case.arguments(), backend=backend, inplace=inplace).loss
            (loss + before).backward()
            results.append(x["logits"].grad)
        assert torch.equal(*results)

    @pytest.mark.parametrize("used", ["base", "view"])
    def test_later_use_of_the_memory_raises(self, backend, device, used):
        x, case = problem(device)
        base = x["logits"] * 1
        view = base[:1]
        logits = {"base": base[:1], "view": base[:1]}[used]
        arguments = (argument[:1] for argument in case.arguments())
        loss = bapo_loss(logits, *arguments, backend=backend, inplace=True).loss
        with pytest.raises(RuntimeError, match="overwritten with their gradient"):
            (loss + {"base": base, "view": view}[used].sum()).backward()

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_leaf_without_grad_mode(self, backend, device, mode):
        x, case = problem(device)
        _, *expected = expected_gradients(of_logits, backend, device)
        with mode():
            bapo_loss(x["logits"], *case.arguments(), backend=backend, inplace=True)
        assert torch.equal(x["logits"], expected[0])


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("function", LOSSES)
def test_second_backward_is_refused(backend, device, function, retain_graph):
    x, case = problem(device)
    loss = function(x, case, backend)
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="of this loss can be called once"):
        loss.backward()


@pytest.mark.parametrize("function", LOG_PROBS)
def test_second_backward_of_log_probs(backend, device, function):
    x, case = problem(device)
    value = function(x, case, backend).sum()
    value.backward(retain_graph=True)
    value.backward()
    _, *expected = expected_gradients(function, backend, device)
    twice = [None if gradient is None else 2 * gradient for gradient in expected]
    assert_same([leaf.grad for leaf in x.values()], twice)


INCOMING = {
    "strided": lambda g: g.T.contiguous().T,
    "expanded": lambda g: g[:1, :1].expand(2, 4),
    "zero": torch.zeros_like,
    "float64": torch.Tensor.double,
}


@pytest.mark.parametrize("name", INCOMING)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_incoming_gradient_of_log_probs(backend, device, function, name):
    incoming = INCOMING[name](torch.randn(2, 4, device=device))
    results = []
    for gradient in (incoming, incoming.float().contiguous()):
        x, case = problem(device)
        function(x, case, backend).backward(gradient)
        results.append([leaf.grad for leaf in x.values()])
    assert_same(*results)
    if name == "zero":
        assert not any(bool(g.any()) for g in results[0] if g is not None)


def test_incoming_nan_stays_in_its_row(backend, device):
    x, case = problem(device)
    incoming = torch.ones(2, 4, device=device)
    case.labels[0, 0], incoming[0, 0] = 1, torch.nan
    log_probs_of_logits(x, case, backend).backward(incoming)
    at = x["logits"].grad.isnan().any(-1)
    assert at.sum() == at[0, 0] == 1


@pytest.mark.parametrize("function", LOSSES)
def test_incoming_nan_reaches_every_gradient(backend, device, function):
    x, case = problem(device)
    (function(x, case, backend) * torch.nan).backward()
    assert all(leaf.grad is None or leaf.grad.isnan().all() for leaf in x.values())


FACTORS = {
    "sum": lambda loss: loss.sum(),
    "expanded": lambda loss: loss.expand(4).mean(),
    "float64": lambda loss: loss.double(),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("function", LOSSES)
def test_functions_of_the_loss(backend, device, function, name):
    x, case = problem(device)
    FACTORS[name](function(x, case, backend)).backward()
    _, *expected = expected_gradients(function, backend, device)
    assert_same([leaf.grad for leaf in x.values()], expected)


@pytest.mark.parametrize("function", LOSSES)
def test_grad_scaler(backend, device, function):
    x, case = problem(device)
    optimizer = torch.optim.SGD(x.values(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    scaler.scale(function(x, case, backend)).backward()
    scaler.unscale_(optimizer)
    _, *expected = expected_gradients(function, backend, device)
    assert_same([leaf.grad for leaf in x.values()], expected)


def of_overwritten_logits(x, case, backend, **options):
    x = dict(x, logits=x["logits"] * 1)
    return of_logits(x, case, backend, **({"inplace": backend != "reference"} | options))


def of_hidden_under_autocast(x, case, backend, **options):
    """Parameters in float32, products in float16."""
    x = {name: leaf.float() for name, leaf in x.items()}
    enabled = backend != "reference"
    with torch.autocast(x["hidden"].device.type, torch.float16, enabled=enabled):
        return of_hidden(x, case, backend, **options)


@pytest.mark.parametrize("function", [*LOSSES, of_overwritten_logits, of_hidden_under_autocast])
def test_loss_scale_of_float16(backend, device, function):
    """Derivatives too small for float16 are right if the loss is scaled."""
    got = scaled_gradients(function, torch.float16, backend, device)
    plain = scaled_gradients(function, torch.float16, "reference", device)
    truth = scaled_gradients(function, torch.float64, "reference", device)
    for gradients_of_leaf in zip(got, plain, truth, strict=True):
        assert_within_budget(function.__name__, *gradients_of_leaf)


def test_loss_scale_of_float16_in_the_reference_in_place(device):
    overwritten = partial(of_overwritten_logits, inplace=True)
    (got,) = scaled_gradients(overwritten, torch.float16, "reference", device)
    (plain,) = scaled_gradients(of_logits, torch.float16, "reference", device)
    (truth,) = scaled_gradients(of_logits, torch.float64, "reference", device)
    assert_within_budget("gradient", got, plain, truth)


def scaled_gradients(function, dtype, backend, device):
    """Gradients of 2^16 times a loss over 2^16 tokens, from inputs that float16 represents."""
    x, case = problem(device)
    leaves = {k: leaf.detach().half().to(dtype).requires_grad_() for k, leaf in x.items()}
    (function(leaves, case, backend, batch_num_tokens=2.0**16) * 2.0**16).backward()
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


def refused(**changes):
    labels, advantages = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5)
    given = dict(logits=torch.randn(2, 5, V), labels=labels, old_log_probs=None)
    return given | dict(advantages=advantages) | changes


REFUSED = {
    "complex logits": (
        refused(logits=torch.randn(2, 5, V, dtype=torch.complex64)),
        "logits must be floating point, got torch.complex64",
    ),
    "quantised logits": (
        refused(logits=torch.empty(2, 5, V, dtype=torch.qint8)),
        "logits must be floating point, got torch.qint8",
    ),
    "nested logits": (
        refused(
            logits=torch.nested.nested_tensor(
                [torch.randn(5, V), torch.randn(4, V)], layout=torch.jagged
            )
        ),
        "logits must be a dense tensor, got torch.jagged",
    ),
    "bool advantages": (
        refused(advantages=torch.ones(2, 5, dtype=torch.bool)),
        "advantages must be floating point, got torch.bool",
    ),
    "sparse advantages": (
        refused(advantages=torch.ones(2, 5).to_sparse()),
        "advantages must be a dense tensor, got torch.sparse_coo",
    ),
    "sparse labels": (
        refused(labels=torch.zeros(2, 5, dtype=torch.long).to_sparse()),
        "labels must be a dense tensor, got torch.sparse_coo",
    ),
    "sparse mask": (
        refused(response_mask=torch.ones(2, 5).to_sparse()),
        "response_mask must be a dense tensor, got torch.sparse_coo",
    ),
    "mask on another device": (
        refused(response_mask=torch.ones(2, 5, device="meta")),
        r"response_mask must be on the device of labels \(cpu\), got meta",
    ),
    "advantages on another device": (
        refused(advantages=torch.ones(2, 5, device="meta")),
        r"advantages must be on the device of labels \(cpu\), got meta",
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tensors_are_refused(name):
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        bapo_loss(**given)


def test_float64_logits_take_the_reference():
    x, case = problem()
    out = bapo_loss(x["logits"].double(), *case.arguments())
    expected = reference.bapo_loss(x["logits"].double(), *case.arguments())
    assert out.loss.dtype == torch.float64
    assert torch.equal(out.loss, expected.loss)


@pytest.mark.parametrize("name", [None, "reference", "of the reference"])
def test_uint8_label_156_is_not_ignored(backend, device, name):
    """-100 as uint8 is 156."""
    logits = torch.randn(2, 3, 257, device=device)
    labels = torch.full((2, 3), 156, device=device)
    advantages = torch.ones(2, 3, device=device)
    loss_of = partial(bapo_loss, backend=name or backend)
    if name == "of the reference":
        loss_of = reference.bapo_loss
    kinds = labels, labels.to(torch.uint8)
    results = [loss_of(logits, kind, None, advantages) for kind in kinds]
    assert results[0].log_probs.all()
    assert torch.equal(results[0].log_probs, results[1].log_probs)
    assert torch.equal(*(reference.log_probs(logits, kind)[0] for kind in kinds))


WRONG_OFFSETS = {
    "from 1": [1, 5, 9],
    "below 0": [-2, 5, 9],
    "falling": [0, 7, 5, 9],
    "beyond N": [0, 5, 40],
}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", WRONG_OFFSETS)
def test_wrong_offsets_make_the_loss_nan(backend, device, name, mode, monkeypatch):
    """On a GPU, where they are not read; here they are as unread."""
    monkeypatch.setattr("bapo_kernels.core.inputs.is_readable", lambda offsets: False)
    offsets = torch.tensor(WRONG_OFFSETS[name], device=device)
    case = make_case((9,), V, device=device, poison=False)
    A = torch.ones(len(offsets) - 1, device=device)
    logits = case.logits.requires_grad_()
    arguments = logits, case.labels, case.old_log_probs, A
    config = BAPOConfig(loss_agg_mode=mode)
    out = bapo_loss(*arguments, config=config, cu_seqlens=offsets, backend=backend)
    assert out.loss.isnan()
    assert [bound.item() for bound in out.bounds] == pytest.approx([0.6, 1.2])
    out.loss.backward()
    assert logits.grad[case.labels != -100].isnan().any(-1).all()
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 9, got"):
        check_inputs(*arguments, cu_seqlens=offsets)


def test_offsets_are_not_read_while_a_call_is_traced():
    with FakeTensorMode():
        tokens, offsets = torch.empty(9), torch.empty(4, dtype=torch.int64)
        out = bapo_loss_from_log_probs(tokens, None, tokens, cu_seqlens=offsets)
    assert out.log_probs.shape == (9,)


def packed_problem(device):
    """9 tokens in sequences that end at 7; the other two hold anything, as masked tokens may."""
    case = make_case((9,), V, device=device, staleness=0.5, poison=False, masked=0.0)
    case.labels[7:], case.old_log_probs[7:] = torch.tensor([0, V - 1], device=device), -torch.inf
    torch.manual_seed(0)
    x = dict(logits=case.logits, hidden=torch.randn(9, H, device=device))
    x |= dict(weight=torch.randn(V, H, device=device), log_probs=-torch.rand(9, device=device))
    x |= dict(entropy=torch.rand(9, device=device))
    for name in ("logits", "hidden", "log_probs", "entropy"):
        x[name][7:] = torch.nan
    return {name: leaf.requires_grad_() for name, leaf in x.items()}, case


def results_of(loss_of, device, advantages, mask=None, **options):
    """Everything that a packed call returns, and the gradients."""
    x, case = packed_problem(device)
    case.response_mask = torch.ones(9, device=device) if mask is None else mask
    case.advantages = advantages
    out = loss_of(x, case, **options)
    out.loss.backward()
    gradients = [leaf.grad for leaf in x.values()]
    return [*out[:3], *out.bounds, *out.metrics.values(), *gradients]


def outputs_of_logits(x, case, **options):
    return bapo_loss(x["logits"], *case.arguments(), **options)


def outputs_of_hidden(x, case, **options):
    if options["backend"] != "reference":
        options |= dict(chunk_tokens=3)
    return bapo_linear_loss(x["hidden"], x["weight"], *case.arguments(), **options)


def outputs_of_log_probs(x, case, **options):
    _, *arguments = case.arguments()
    return bapo_loss_from_log_probs(x["log_probs"], *arguments, entropy=x["entropy"], **options)


LEVELS_AND_MODES = [  # a mode is a weight per token: all modes at one level are enough
    *((outputs_of_log_probs, mode) for mode in get_args(LossAggMode)),
    (outputs_of_logits, "seq-mean-token-mean"),
    (outputs_of_hidden, "token-mean"),
]


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize(("loss_of", "mode"), LEVELS_AND_MODES)
def test_tokens_after_the_last_sequence_are_masked(backend, device, loss_of, mode, statistics):
    """Bit for bit as if they were masked: they count nowhere."""
    offsets = torch.tensor([0, 3, 7], device=device)
    mask = (torch.arange(9, device=device) < 7).float()
    config = BAPOConfig(loss_agg_mode=mode, entropy_coef=0.1, loss_scale_factor=5.0)
    options = dict(config=config, cu_seqlens=offsets, statistics=statistics)
    per_token = torch.tensor([1.0, -2.0, 0.0, 3.0, -1.0, 1.0, 2.0, 5.0, 7.0], device=device)
    for name, A in ((backend, per_token[:2]), ("reference", per_token)):
        options |= dict(advantages=A, backend=name)
        got = results_of(loss_of, device, **options)
        assert_same(got, results_of(loss_of, device, mask=mask, **options))
        assert got[0].isfinite()
        assert not got[1][7:].any()
        assert all(g is None or g.isfinite().all() for g in got[5:])


def test_search_ignores_tokens_after_the_last_sequence(device):
    x, case = packed_problem(device)
    log_probs = x["log_probs"].detach()
    A, offsets = torch.tensor([1.0, -2.0], device=device), torch.tensor([0, 3, 7], device=device)
    tables, sums = [], []
    for n in (7, 9):
        given = log_probs[:n], case.old_log_probs[:n], A
        tables.append(ContributionHistogram().update(*given, cu_seqlens=offsets).table)
        probe = reference.Contributions(BAPOConfig(), *given, None, cu_seqlens=offsets)
        sums.append(probe.sums(0.8, 1.2))
    assert torch.equal(*tables)
    assert sums[0] == sums[1]
    assert all(sums[0])


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS = {
    "float64": partial(default_dtype, torch.float64),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "meta": partial(torch.device, "meta"),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_defaults_of_torch_change_nothing(backend, device, function, name):
    x, case = problem(device)
    with DEFAULTS[name]():
        value = function(x, case, backend)
        value.sum().backward()
        bounds = find_clip_bounds(x["log_probs"], *case.arguments()[1:])
    got = [value.detach(), *(leaf.grad for leaf in x.values())]
    assert_same(got, expected_gradients(function, backend, device))
    assert bounds == find_clip_bounds(x["log_probs"], *case.arguments()[1:])


class TestAutocast:
    @pytest.mark.parametrize("function", [of_logits, of_log_probs, log_probs_of_logits])
    def test_functions_without_a_gemm(self, backend, device, function):
        got = gradients(function, backend, device, partial(torch.autocast, device, torch.bfloat16))
        assert_same(got, expected_gradients(function, backend, device))

    @pytest.mark.parametrize("function", [of_hidden, log_probs_of_hidden])
    def test_backward_under_autocast(self, backend, device, function):
        """Its GEMMs have the dtype of the forward's."""
        x, case = problem(device)
        value = function(x, case, backend)
        with torch.autocast(device, torch.bfloat16):
            value.sum().backward()
        got = [value.detach(), *(leaf.grad for leaf in x.values())]
        assert_same(got, expected_gradients(function, backend, device))

    def test_sum_of_chunks_stays_float32(self):
        """Autocast would round the product of every chunk to bfloat16."""
        hidden, weight = torch.randn(20, H).bfloat16(), torch.randn(V, H).bfloat16()
        dlogits = torch.randn(20, V).bfloat16()
        made = []
        for enabled in (False, True):
            of_head = Head.of(hidden, weight, None, torch.bfloat16)
            total = HeadGradients(of_head, (True, True, False), one_chunk=False)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for rows in torch.arange(20).chunk(4):
                    total.add(rows, hidden[rows], dlogits[rows])
            made.append(total.of(hidden, weight.float(), None)[:2])
        assert_same(*made)


class TestInferenceTensors:
    @pytest.mark.parametrize("function", LOSSES)
    def test_tokens_of_a_rollout(self, backend, device, function):
        x, case = problem(device)
        with torch.inference_mode():
            case.labels, case.old_log_probs = case.labels.clone(), case.old_log_probs.clone()
            case.advantages, case.response_mask = case.advantages * 1, case.response_mask.clone()
        value = function(x, case, backend)
        value.backward()
        got = [value.detach(), *(leaf.grad for leaf in x.values())]
        assert_same(got, expected_gradients(function, backend, device))

    @pytest.mark.parametrize("function", LOG_PROBS)
    def test_labels_of_log_probs(self, backend, device, function):
        x, case = problem(device)
        with torch.inference_mode():
            case.labels = case.labels.clone()
        value = function(x, case, backend)
        value.sum().backward()
        got = [value.detach(), *(leaf.grad for leaf in x.values())]
        assert_same(got, expected_gradients(function, backend, device))


def as_function(function, case, backend):
    """A function of one tensor, as ``torch.func`` differentiates it, and that tensor."""
    name = {of_logits: "logits", of_log_probs: "log_probs", log_probs_of_logits: "logits"}
    name = name.get(function, "hidden")
    x, _ = problem(case.logits.device)
    x = {key: value.detach() for key, value in x.items()}

    def of(leaf):
        return function(x | {name: leaf}, case, backend).sum()

    return of, x[name]


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
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_function_transforms_are_refused(backend, device, function, name):
    _, case = problem(device)
    f, x = as_function(function, case, backend)
    with pytest.raises(ValueError, match=f"backend must be 'reference' inside .* got '{backend}'"):
        TRANSFORMS[name](f, x)


@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_function_transforms_of_the_reference(function):
    _, case = problem()
    f, x = as_function(function, case, "reference")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(TRANSFORMS["grad"](f, x), expected)
    _, along = TRANSFORMS["jvp"](f, x)
    torch.testing.assert_close(along, (x * expected).sum())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_forward_mode_is_refused(backend, device, function, requires_grad):
    """To drop a tangent would be to return a derivative of 0."""
    _, case = problem(device)
    f, x = as_function(function, case, backend)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(requires_grad), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            f(dual)


def test_batched_gradients_are_refused(backend, device):
    x, case = problem(device)
    loss = of_logits(x, case, backend)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, x["logits"], torch.ones(2, device=device), is_grads_batched=True)


def test_functional_call(backend, device):
    x, case = problem(device)
    module = BAPOLoss(CONFIG, backend=backend)
    out = torch.func.functional_call(module, {}, (x["logits"], *case.arguments()))
    out.loss.backward()
    _, *expected = gradients(partial(of_logits, config=CONFIG), backend, device)
    assert torch.equal(x["logits"].grad, expected[0])


def test_none_in_a_call_is_the_option_of_the_module():
    x, case = problem()
    config = BAPOConfig.fixed(0.9, 1.1)
    for module, inputs in (
        (BAPOLoss(config, backend="reference"), [x["logits"]]),
        (BAPOLinearLoss(config, backend="reference"), [x["hidden"], x["weight"]]),
    ):
        out = module(*inputs, *case.arguments(), config=None, backend=None)
        assert [float(bound) for bound in out.bounds] == pytest.approx([0.9, 1.1])
        assert type(out.loss.grad_fn).__name__ != "_PrecomputedGradientBackward"  # of the kernels


def through_torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch]
)
def test_copies(copied):
    x, case = problem()
    for module in (BAPOLoss(CONFIG, statistics="live"), BAPOLinearLoss(CONFIG, chunk_tokens=3)):
        twin = copied(module)
        assert repr(twin) == repr(module)
        assert twin.config == module.config
    search = ClipBoundSearch(CONFIG, "lagged")
    twins = []
    for of_step in (copied, lambda x: x):
        twin = of_step(search)
        twin.update(x["log_probs"], *case.arguments()[1:])
        twins.append(of_step(twin))
        twins[-1].step()
    assert twins[0].bounds == twins[1].bounds
    with torch.no_grad():
        out = bapo_loss(x["logits"], *case.arguments())
    twin = copied(out)
    assert type(twin) is type(out)
    assert twin.bounds == out.bounds
    assert twin.metrics == out.metrics
    assert torch.equal(twin.log_probs, out.log_probs)


class Losses(torch.utils.data.Dataset):
    """The loss of a batch, computed in the process that loads the data."""

    def __len__(self):
        return 4

    def __getitem__(self, seed):
        case = make_case((8, 8), 501, seed=seed)
        run = run_kernel(case, "cpu")
        return run.output.loss.detach(), run.gradient


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start):
    """A process forked after its parent has used threads must not wait for them."""
    expected = [Losses()[seed] for seed in range(4)]
    loader = DataLoader(
        Losses(), batch_size=None, num_workers=2, multiprocessing_context=start, timeout=120
    )
    for got, alone in zip(loader, expected, strict=True):
        assert_same(got, alone)


@needs_native
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_threads(function):
    problems = [problem() for _ in range(8)]
    expected = expected_gradients(function, "cpu", "cpu")

    def run(given):
        x, case = given
        value = function(x, case, "cpu")
        value.sum().backward()
        return [value.detach(), *(leaf.grad for leaf in x.values())]

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(run, problems):
            assert_same(got, expected)


CONTEXTS = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "anomaly": partial(torch.autograd.set_detect_anomaly, True),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_contexts_of_autograd(backend, device, function, name):
    got = gradients(function, backend, device, CONTEXTS[name])
    assert_same(got, expected_gradients(function, backend, device))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_checkpoint(backend, device, function, use_reentrant):
    x, case = problem(device)

    def of(*values):
        values = [value * 1 for value in values]
        return function(dict(zip(x, values, strict=True)), case, backend)

    value = checkpoint(of, *x.values(), use_reentrant=use_reentrant)
    value.sum().backward()
    expected = expected_gradients(function, backend, device)
    got = [value.detach(), *(leaf.grad for leaf in x.values())]
    for a, b in zip(got, expected, strict=True):
        assert b is None or torch.equal(a, b)


@pytest.mark.parametrize("inplace", [False, True])
def test_hooks_of_logits(backend, device, inplace):
    """A hook of logits that are not a leaf may change the gradient."""
    x, case = problem(device)
    logits = x["logits"] * 1
    seen = []
    logits.register_hook(lambda dlogits: seen.append(dlogits.clone()) or 2 * dlogits)
    bapo_loss(logits, *case.arguments(), backend=backend, inplace=inplace).loss.backward()
    _, expected, *_ = expected_gradients(of_logits, backend, device)
    assert torch.equal(seen[0], expected)
    assert torch.equal(x["logits"].grad, 2 * expected)


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [Named, torch.nn.Parameter, AsyncCollectiveTensor])
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_subclasses(backend, device, function, kind):
    """The last kind has no memory of its own: it is the result of a collective that may run."""
    x, case = problem(device)
    x = {name: leaf.detach().as_subclass(torch.Tensor) for name, leaf in x.items()}
    if kind is Named:
        x = {name: leaf.as_subclass(Named) for name, leaf in x.items()}
    elif kind is torch.nn.Parameter:
        x = {name: torch.nn.Parameter(leaf) for name, leaf in x.items()}
    if kind is not torch.nn.Parameter:
        for name in ("labels", "old_log_probs", "advantages", "response_mask"):
            values = getattr(case, name)
            wrapped = values.as_subclass(Named) if kind is Named else kind(values)
            setattr(case, name, wrapped)
    x = {name: leaf.requires_grad_() for name, leaf in x.items()}
    value = function(x, case, backend)
    value.sum().backward()
    expected = expected_gradients(function, backend, device)
    for got, same in zip([value, *(leaf.grad for leaf in x.values())], expected, strict=True):
        assert same is None or torch.equal(got, same)


@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_warm_up(backend, device, function):
    """It runs both passes and leaves nothing behind."""
    x, case = problem(device)
    before, passed = {name: leaf.detach().clone() for name, leaf in x.items()}, []

    def observed(x):
        for leaf in x.values():
            leaf.register_hook(lambda gradient: passed.append(gradient.shape))
        return function(x, case, backend)

    warm_up(observed, x)
    assert passed
    for name, leaf in x.items():
        assert torch.equal(leaf, before[name])
        assert leaf.grad is None
        assert not leaf._backward_hooks


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0), (1,), (1, 1)])
@pytest.mark.parametrize("function", [*LOSSES, *LOG_PROBS])
def test_no_token_and_one_token(backend, device, function, shape):
    case = make_case(shape, V, device=device, poison=False, masked=0.0)
    x = dict(
        logits=case.logits,
        hidden=torch.randn(*shape, H, device=device),
        weight=torch.randn(V, H, device=device),
        log_probs=torch.zeros(shape, device=device),
        entropy=torch.zeros(shape, device=device),
    )
    x = {name: leaf.requires_grad_() for name, leaf in x.items()}
    value = function(x, case, backend).sum()
    value.backward()
    assert value.isfinite()
    assert 0 not in shape or value == 0
    grads = [leaf.grad for leaf in x.values() if leaf.grad is not None]
    assert grads
    assert all(gradient.isfinite().all() for gradient in grads)
