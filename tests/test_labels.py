"""Labels of rows, one or several: log-probs, entropies, gradients of every backend; the best."""

from functools import partial

import numpy as np
import pytest
import torch
from accuracy import assert_as_reference, assert_same
from helpers import allowed_by, real_in_turns, sets_of
from torch.testing import assert_close

from bapo_kernels import (
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    linear_log_probs,
    linear_top_k,
    log_probs,
    reference,
)
from bapo_kernels.tools.budget import GRADIENTS
from bapo_kernels.tools.real_rows import real_head, real_rows

B, S, H = 2, 4, 16
OPTIONS = {  # the first runs everywhere
    "soft cap": dict(final_logit_softcapping=6.0, temperature=torch.tensor([0.5, 1.25])),
    "plain": dict(),
    "temperature": dict(temperature=0.6, logit_scale=1.5),
    "temperatures": dict(temperature=torch.linspace(0.5, 2.0, B * S).view(S, B).T),
    "sets": dict(sets=True),
    "sets, soft cap": dict(sets=True, final_logit_softcapping=6.0),
}
V, OF_HEAD = 1_003, 257


def labels_of(K, columns=V, first=None):
    """With repeated ones, -100, others outside of the vocabulary, and a row of -100 alone."""
    labels = torch.randint(0, columns, (B, S, K), generator=torch.Generator().manual_seed(K))
    if first is not None:
        labels[..., 0] = first
    labels[0, 1] = -100
    labels[0, 2, K // 2] = -100
    labels[1, 0, K // 2 :] = labels[1, 0, : K - K // 2].clone()  # in another order than first
    labels[1, 1] = labels[1, 1, :1]
    labels[1, 2, -1] = columns
    labels[1, 2, : K // 3] = -7
    return labels


def options_of(name, labels, device="cpu", columns=V):
    """Options of kernels, and the logits that a mask forbids."""
    options = dict(OPTIONS[name])
    outside = None
    if options.pop("sets", False):
        sets = sets_of(labels[..., 0], columns)
        sets[4] = sorted({*sets[4], *labels[1, 0].tolist()}) if sets[4] else []
        outside = ~allowed_by(sets, columns).view(B, S, columns).to(device)
        options["sampling_mask"] = SamplingMask.from_lists(sets, device)
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}, outside


def head_of(columns, real):
    """Hidden states, weight and bias, and what real rows have drawn."""
    parts = torch.randn(B, S, H), torch.randn(columns, H) / 2, None
    hidden, weight, drawn = real_head((B, S), columns, H, real) if real else parts
    return hidden, weight, torch.randn(columns), drawn


def gradients_of(function, leaves, labels, weights, **options):
    leaves = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    if len(leaves) == 3:
        options["bias"] = leaves.pop()
    logp, entropy = function(*leaves, labels, **options)
    wanted = [x for x in (*leaves, options.get("bias")) if x is not None and x.requires_grad]
    incoming = [w.to(logp) for w in weights]
    gradients = torch.autograd.grad([logp, entropy], wanted, incoming, allow_unused=True)
    return logp.detach(), entropy.detach(), *gradients


def check_labels(backend, device, dtype, K, name, columns=V, real=None):
    """Of logits; what a mask forbids is NaN for the kernels and -inf for the reference."""
    parts = 3 * torch.randn(B, S, columns), None
    logits, drawn = real_rows((B, S), columns, real) if real else parts
    labels, logits = labels_of(K, columns, drawn), logits.to(device, dtype)
    options, outside = options_of(name, labels, device, columns)
    logits[0, 1] = torch.nan  # of -100 alone
    given = logits if outside is None else logits.masked_fill(outside, torch.nan)
    labels = labels.to(device)
    weights = torch.randn(B, S, K), torch.randn(B, S)
    call = partial(gradients_of, labels=labels, weights=weights, **options)
    got = call(log_probs, [given.requires_grad_()], backend=backend)
    assert got[0].dtype == got[1].dtype == torch.float32

    def expected(kind):
        return call(reference.log_probs, [logits.to(kind).requires_grad_()])

    largest = got[0].nan_to_num(neginf=0.0).abs().max().item()
    named = dict(names=("log-probs", "entropy", "gradient"), inputs={"first label": labels[..., 0]})
    assert_as_reference(got, expected, dtype, (0, largest, 0), **named)
    assert not got[0][0, 1].any()
    assert not got[2][0, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("K", "columns"),  # also a vocabulary of one token, a tail, and more than a block
    [*((K, V) for K in (1, 7, 64, 1_000)), (1, 1), (1, 37), (1, 4_100)],
)
def test_of_logits(backend, device, dtype, name, K, columns):
    given = backend, device, dtype, K, name, columns
    check_labels(*given, real_in_turns(OPTIONS, name, K, columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dentropy", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_of_hidden_states(backend, device, dtype, name, frozen, dentropy):
    K = 9
    *leaves, drawn = head_of(OF_HEAD, real_in_turns(OPTIONS, name, frozen))
    labels = labels_of(K, OF_HEAD, drawn)
    options, _ = options_of(name, labels, device, OF_HEAD)
    labels = labels.to(device)
    leaves[0][0, 1] = torch.nan
    weights = torch.randn(B, S, K) * (torch.rand(B, S, 1) > 0.3), torch.randn(B, S) * dentropy
    leaves = [x.to(device, dtype) for x in leaves]

    def run(kind, function=reference.linear_log_probs, **more):
        given = [x.to(kind) for x in leaves]
        for leaf in given[: 1 if frozen else 3]:
            leaf.requires_grad_()
        return gradients_of(function, given, labels, weights, **options, **more)

    got = run(dtype, linear_log_probs, backend=backend, chunk_tokens=4)
    largest = got[0].nan_to_num(neginf=0.0).abs().max().item()
    given = {"first label": labels[..., 0]}
    named = dict(names=("log-probs", "entropy"), inputs=given)
    assert_as_reference(got[:2], lambda kind: run(kind)[:2], dtype, (0, largest), **named)
    # A probability has the relative rounding of its log-prob, which is float32.
    inherited = largest if dtype == torch.float32 else 0
    named = dict(names=GRADIENTS, inputs=given, roundings=inherited)
    assert_as_reference(got[2:], lambda kind: run(kind)[2:], dtype, **named)


def test_confident_rows_of_a_frozen_head(backend, device):
    """What 1 - p leaves of a gradient is not lost in the rounding of p."""
    hidden, weight = torch.zeros(3, H), 0.1 * torch.randn(300, H)
    hidden[:, 0], weight[5:7, 0] = 4.0, torch.tensor([5.0, 3.0])
    labels, incoming = torch.tensor([[5, 6, 5], [5, 1, 2], [6, 5, 0]]), torch.rand(3, 3)

    def run(kind, function=reference.linear_log_probs, **more):
        x, W = (x.to(device, torch.bfloat16).to(kind) for x in (hidden, weight))
        x.requires_grad_()
        logp, _ = function(x, W, labels.to(device), **more)
        return torch.autograd.grad(logp, x, incoming.to(logp))[0]

    assert_as_reference(run(torch.bfloat16, linear_log_probs, backend=backend), run, torch.bfloat16)


def test_values_and_bits(backend, device):
    """One label is as without a dimension; every label has its value; bits are always the same."""
    logits, labels = torch.randn(B, S, V, device=device), labels_of(7).to(device)
    one, entropy = log_probs(logits, labels[..., 0], backend=backend)
    logp, same_entropy = log_probs(logits, labels[..., :1], backend=backend)
    assert_close(logp[..., 0], one, rtol=0, atol=0, equal_nan=True)
    assert_same(same_entropy, entropy)
    logp, _ = log_probs(logits, labels, backend=backend)
    ok = (labels >= 0) & (labels < V)
    assert_same(logp.isnan(), ~ok & (labels != -100))
    assert not logp[labels == -100].any()
    assert_same(logp[1, 1], logp[1, 1, :1].expand(7))
    # Where all is -100 but for an id outside, the row is computed.
    outside = torch.full((1, 1, 3), -100, device=device)
    outside[..., 1] = V
    logp, entropy = log_probs(logits[:1, :1], outside, backend=backend)
    assert logp.isnan().tolist() == [[[False, True, False]]]
    assert entropy > 1

    def gradient():
        x = logits.clone().requires_grad_()
        logp, _ = log_probs(x, labels, backend=backend)
        return torch.autograd.grad(logp[ok].sum(), x)[0]

    assert_same(gradient(), gradient())


def test_entries_without_a_gradient(backend, device):
    """NaN and -inf: whatever arrives there, the other labels and entries keep theirs."""
    logits = torch.randn(3, 30, device=device)
    logits[0, 4] = -torch.inf
    mask = SamplingMask.from_lists([[], [1, 2, 3], []], device)
    labels = torch.tensor([[4, 1, 2], [9, 1, 2], [30, 1, -100]], device=device)

    def gradient(incoming, labels=labels):
        x = logits.clone().requires_grad_()
        logp, _ = log_probs(x, labels, sampling_mask=mask, backend=backend)
        return torch.autograd.grad(logp, x, incoming.to(device).expand(logp.shape))[0]

    masked = labels.clone()
    masked[:, 0] = masked[2, 2] = -100
    got = gradient(torch.tensor([torch.nan, 1.0, 2.0]))
    assert_same(got, gradient(torch.tensor([0.0, 1.0, 2.0]), masked))
    assert not got[0, 4]
    assert not got[1, 4:].any()


def test_no_rows(backend, device):
    x, W = torch.empty(0, H, device=device).requires_grad_(), torch.randn(V, H, device=device)
    labels = torch.empty(0, 3, dtype=torch.int64, device=device)
    for head in (W, W.clone().requires_grad_()):
        logp, entropy = linear_log_probs(x, head, labels, backend=backend)
        logp.sum().backward()
        assert (logp.shape, entropy.shape, x.grad.shape) == ((0, 3), (0,), (0, H))
    logits = (x @ W.T).detach().requires_grad_()
    log_probs(logits, labels, backend=backend)[0].sum().backward()
    assert logits.grad.shape == (0, V)
    assert linear_top_k(x, W, np.int64(2), backend=backend)[1].shape == (0, 2)


def test_reference_by_differences():
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 1, 5], [-100, 2, 3], [0, 7, -100]])
    options = dict(temperature=0.7, final_logit_softcapping=3.0)
    call = partial(reference.log_probs, labels=labels, **options)
    assert torch.autograd.gradcheck(call, logits)
    assert torch.autograd.gradgradcheck(call, logits)


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_for_any_number_of_labels():
    x, weight = torch.randn(6, H, requires_grad=True), torch.randn(40, H)
    counts, torch._dynamo.config.error_on_recompile = [], False

    def counted(graph, inputs):
        counts.append(len(inputs))
        return graph

    for function in (
        lambda h, y: log_probs(h @ weight.T, y),
        lambda h, y: linear_log_probs(h, weight, y),
        lambda h, y: linear_log_probs(h, weight, linear_top_k(h, weight, y.shape[1])[1]),
    ):
        torch._dynamo.reset()
        counts.clear()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counted)
        for K in (2, 5, 9):
            labels = torch.arange(6 * K).view(6, K) % 40
            made = [
                torch.autograd.grad((f(x, labels)[0] ** 2).sum(), x) for f in (compiled, function)
            ]
            assert_same(made[0][0], made[1][0])
        assert len(counts) == 1


def test_errors(backend, device):
    logits, labels = torch.randn(2, 5, 9), torch.zeros(2, 5, 3, dtype=torch.int64)
    logits, labels = logits.to(device), labels.to(device)
    rule = (
        r"labels must have the leading shape of logits \(2, 5\), then K >= 1 labels per row, got "
    )
    for wrong in (labels[..., :0], labels[:, :4]):
        with pytest.raises(ValueError, match=rule):
            log_probs(logits, wrong, backend=backend)
    for loss in (partial(bapo_loss, logits), partial(bapo_linear_loss, logits, logits[0, :3])):
        with pytest.raises(
            ValueError, match=r"labels must have the leading shape of \w+ \(2, 5\), got"
        ):
            loss(labels, None, torch.ones(2, 5, device=device), backend=backend)
    for k, got in {
        0: "an integer >= 1, got 0",
        6: "at most 5, the size of the vocabulary, got 6",
        2.5: r"an integer >= 1, got 2.5 \(float\)",
        "3": r"an integer >= 1, got '3' \(str\)",
        True: r"an integer >= 1, got True \(bool\)",
        torch.tensor(3): "an integer >= 1, got Tensor",
    }.items():
        for top_k in (partial(linear_top_k, backend=backend), reference.linear_top_k):
            with pytest.raises(ValueError, match=f"k must be {got}"):
                top_k(logits, logits[0, :5], k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("k", [1, 5, V])
def test_top_k(backend, device, dtype, name, k):
    options, _ = options_of(name, labels_of(3), device)
    *leaves, _ = head_of(V, real_in_turns(OPTIONS, name, k))
    leaves = [x.to(device, dtype) for x in leaves]

    def run(kind, function=reference.linear_top_k, **more):
        given = [x.to(kind) for x in leaves]
        return function(*given[:2], k, bias=given[2], **options, **more)

    logp, ids = run(dtype, linear_top_k, backend=backend, chunk_tokens=3)
    none = ids == -100
    assert_same(none, logp == -torch.inf)
    assert_same(none.sum(-1), (run(torch.float64)[1] == -100).sum(-1))

    def of_these(kind):
        given = [x.to(kind) for x in leaves]
        of_ids, _ = reference.linear_log_probs(*given[:2], ids, bias=given[2], **options)
        return of_ids.masked_fill(none, -torch.inf), run(kind)[0]

    assert_as_reference((logp, logp), of_these, dtype)
    assert all(len({*row}) == len(row) for row in (r[r >= 0].tolist() for r in ids.flatten(0, 1)))
