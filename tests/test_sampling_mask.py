"""Sampling masks: as if every logit outside of the sets were -inf, on every backend."""

import copy
import io
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICES,
    EPS,
    KERNELS,
    Case,
    allowed_by,
    assert_within_budget,
    case_with_sets,
    check_result_with_sets,
    check_with_sets,
    examples,
    make_case,
    needs_native,
    per_token,
    run_kernel,
    run_kernel_with_sets,
    sets_of,
    transform_of,
    unmasked_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear import CONFIGS, build, problem
from test_loss import NO_EXPLANATION, OPTIONS, build_config
from torch._subclasses.fake_tensor import FakeTensorMode
from world import grid

from bapo_kernels import (
    BAPOConfig,
    BAPOLinearLoss,
    BAPOLoss,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    linear_log_probs,
    log_probs,
    reference,
)
from bapo_kernels.tools.budget import Result

B, S, H, V = 3, 7, 24, 193
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITE_KL = "k1", "k2"  # of a label outside of its set


@pytest.fixture
def thin(interpreted):
    """Skips what the interpreter, where a call takes a second, need not run too."""

    def keep(condition):
        if interpreted and not condition:
            pytest.skip("too slow in the interpreter, and of the same kernels as others")

    return keep


def case_of(name, device, dtype=torch.float32):
    """With these options of test_loss.py, and sets."""
    config_options, call_options = OPTIONS[name]
    options = call_options | dict(config=build_config(config_options))
    return case_with_sets(dtype=dtype, device=device, outside=name not in INFINITE_KL, **options)


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, device, thin, statistics, name):
    thin(name in ("together", "temperatures, together") and statistics == "all")
    check_with_sets(*case_of(name, device), backend, statistics=statistics)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paper", "together", "temperatures, together"])
def test_dtypes(backend, device, thin, dtype, name):
    thin(name == "together")
    check_with_sets(*case_of(name, device, dtype), backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 2, 33, 4097])  # one token, few, a tail, more than a block
def test_vocabulary_sizes(backend, device, thin, dtype, V):
    thin(V in (1, 4097) and dtype == torch.float32)
    config = BAPOConfig(entropy_coef=0.01)
    given = case_with_sets((2, 7), V, dtype, device, config=config, masked=0.0)
    check_with_sets(*given, backend)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 2, 3)])  # 0 to 3 leading sizes
def test_leading_shapes(backend, device, thin, shape):
    thin(shape in ((), (2, 2, 3)))
    given = case_with_sets(shape, 33, device=device, masked=0.0, poison=False)
    got = check_with_sets(*given, backend)
    assert got.output.log_probs.shape == shape


@pytest.mark.parametrize("staleness", [0.0, 0.3, 60.0])
@pytest.mark.parametrize("preset", ["paper", "recipe"])
def test_staleness(backend, device, thin, staleness, preset):
    """Kept, clipped and undecided rows, with and without sets."""
    thin(staleness == 0.3 and preset == "paper")
    config = build_config(dict(preset=preset))
    case, mask = case_with_sets((4, 16), 65, device=device, staleness=staleness, config=config)
    check_with_sets(case, mask, backend)
    case.old_log_probs = None
    check_with_sets(case, mask, backend)


def unread(logits):
    """NaN outside of the sets."""
    return logits.masked_fill(logits == -torch.inf, torch.nan)


def loss_of(logits, case, mask, backend, **options):
    options |= case.options | dict(sampling_mask=mask, backend=backend)
    return bapo_loss(logits, *case.arguments(), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["paper", "entropy", "temperatures"])
def test_in_place(backend, device, thin, dtype, name):
    """The bits of the gradient that is not in place, with zeros outside of the sets."""
    thin(name == "entropy" and dtype != torch.bfloat16)
    case, mask = case_of(name, device, dtype)
    expected = run_kernel_with_sets(case, mask, backend)
    leaf = unread(case.logits).requires_grad_()
    logits = leaf * 1
    out = loss_of(logits, case, mask, backend, inplace=True)
    out.loss.backward()
    assert torch.equal(leaf.grad, expected.gradient)
    assert torch.equal(out.loss, expected.output.loss)
    if dtype != torch.float16:  # made in forward
        assert torch.equal(logits.detach(), expected.gradient)


@pytest.mark.parametrize("layout", ["slice", "last"])
def test_strided_logits(backend, device, thin, layout):
    thin(layout == "slice")
    case, mask = case_with_sets((2, 8), 33, device=device)
    expected = run_kernel_with_sets(case, mask, backend)
    logits = unread(case.logits)
    whole = F.pad(logits, (0, 0, 0, 1)) if layout == "slice" else logits.mT.contiguous()

    def strided(x):
        return x[:, :-1] if layout == "slice" else x.mT

    loss_of(strided(whole.requires_grad_()), case, mask, backend).loss.backward()
    assert torch.equal(strided(whole.grad), expected.gradient)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_packed_batches(backend, device, thin, mode):
    """With tokens after the last sequence, and one advantage and temperature per sequence."""
    thin(mode == "seq-mean-token-mean")
    cu = torch.tensor([0, 5, 5, 12, 20], device=device)
    config = BAPOConfig(loss_agg_mode=mode)
    case, mask = case_with_sets((24,), 65, device=device, config=config, cu_seqlens=cu)
    case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    temperature = torch.tensor([0.5, torch.nan, 1.25, 2.0], device=device)
    got = check_with_sets(case, mask, backend, temperature=temperature)
    assert not got.gradient[20:].any()


def test_labels_outside_of_their_sets(backend, device):
    """They have probability 0: the ratio is its least value, and nothing is NaN."""
    case = make_case((2, 6), 33, device=device, masked=0.0, idle=0.0, poison=False)
    case.labels[:] = 3
    case.labels[0, 1] = -100
    case.response_mask[0, 2] = False
    sets = [[4, 5], [4], [4], [3], [], [7, 3], [2], [1, 30, 2, 8], [3], [], [3, 4, 5], [4]]
    mask = SamplingMask.from_lists(sets, device)
    got = run_kernel(case, backend, sampling_mask=mask)
    outside = torch.zeros(2, 6, dtype=torch.bool)
    outside.view(-1)[[0, 6, 7, 11]] = True
    assert torch.equal((got.output.log_probs == -torch.inf).cpu(), outside)
    assert got.output.metrics["label_outside_mask"] == 4
    assert got.output.loss.isfinite()
    assert got.gradient.isfinite().all()
    assert not got.gradient.cpu()[outside].any()
    of_one = got.output.log_probs.view(-1)[[3, 8]]
    assert not of_one.any(), "a set of the label alone is certain"
    live = run_kernel(case, backend, sampling_mask=mask, statistics="live")
    assert live.output.metrics["label_outside_mask"] == 4


def test_rows_without_a_set_have_the_same_bits(backend, device):
    """As without a mask, and as in a call of their own; rows with a set too."""
    case, mask = case_with_sets((6, 7), 65, device=device, bounds=(0.8, 1.25), batch_num_tokens=9)
    got = run_kernel_with_sets(case, mask, backend)
    again = run_kernel_with_sets(case, mask, backend)
    assert torch.equal(got.gradient, again.gradient)
    assert torch.equal(got.output.log_probs, again.output.log_probs)
    plain = run_kernel(case, backend)
    whole = (mask.offsets.diff() == 0).view(6, 7)
    assert 0 < whole.sum() < 42
    for a, b in zip(parts_of(got), parts_of(plain), strict=True):
        assert torch.equal(a[whole], b[whole])
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        tokens = [t if t is None else t[rows] for t in case.arguments()]
        part = Case(case.logits[rows], *tokens, case.options)
        of_part = mask[7 * rows.start : 7 * rows.stop]
        alone = run_kernel_with_sets(part, of_part, backend)
        for a, b in zip(parts_of(alone), parts_of(got), strict=True):
            assert torch.equal(a, b[rows])


def parts_of(result):
    return result.output.log_probs, result.output.entropy, result.gradient


def test_no_ids_no_rows_and_all_masked(backend, device):
    case = make_case((2, 5), 65, device=device)
    no_ids, some, nothing = (
        dict(sampling_mask=SamplingMask.from_lists(sets, device))
        for sets in ([[]] * 10, [[2, 0, 70]] * 10, [])
    )
    expected, got = run_kernel(case, backend), run_kernel(case, backend, **no_ids)
    assert torch.equal(got.gradient, expected.gradient)
    assert torch.equal(got.output.loss, expected.output.loss)
    assert got.output.metrics["label_outside_mask"] == 0
    logits = torch.empty(0, 11, device=device, requires_grad=True)
    tokens = torch.empty(0, device=device)
    out = bapo_loss(logits, tokens.long(), tokens, tokens, backend=backend, **nothing)
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == logits.shape
    case.response_mask = torch.zeros_like(case.response_mask)
    masked = run_kernel(case, backend, **some)
    assert masked.output.loss == 0
    assert not masked.gradient.any()


# Of hidden states. The oracle puts -inf into the logits, and knows no sampling mask.


@pytest.fixture(autouse=True)
def chunks_as_asked_for(monkeypatch):
    """Also where one would take less memory, because the sum of several does."""
    monkeypatch.setattr("bapo_kernels.core.head.SUM_BYTES", 0)


def masked_logits(hidden, weight, bias, allowed):
    return F.linear(hidden, weight, bias).masked_fill(~allowed, -torch.inf)


def of_masked_logits(hidden, weight, *batch, bias, allowed, **options):
    return reference.bapo_loss(masked_logits(hidden, weight, bias, allowed), *batch, **options)


def hidden_case(dtype, device, config, outside=True, shape=(B, S), staleness=0.4, **options):
    """Hidden states, weight and bias; a stale batch; its sets, and what they allow."""
    parameters, case = problem(dtype, "cpu", config, shape=shape)
    sets = sets_of(case.labels, V, outside)
    allowed = allowed_by(sets, V).view(*shape, V)
    case = case.with_options(**options)
    unmasked = unmasked_tokens(case)
    hidden, weight, bias = (p.double() for p in parameters)
    logits = masked_logits(hidden.masked_fill(~unmasked[..., None], 0.0), weight, bias, allowed)
    transform = transform_of(config) | {k: v for k, v in options.items() if k == "temperature"}
    logp, _ = reference.log_probs(logits, case.labels, **transform)
    old = (logp + staleness * torch.randn(shape)).masked_fill(logp == -torch.inf, -3.0)
    case.old_log_probs = torch.where(unmasked, old, torch.nan).float()
    tokens = [t.to(device) for t in case.arguments()]
    options = {k: v.to(device) if hasattr(v, "to") else v for k, v in case.options.items()}
    mask = SamplingMask.from_lists(sets, device)
    parameters = [p.to(device) for p in parameters]
    return parameters, Case(None, *tokens, options), mask, allowed.to(device)


def run_hidden(function, parameters, case, kind=None, frozen=False, **options):
    leaves = [p.detach().to(kind or p.dtype).clone() for p in parameters]
    for leaf in leaves[: 1 if frozen else 3]:
        leaf.requires_grad_()
    hidden, weight, bias = leaves
    if function is of_masked_logits:  # 0*NaN of a masked row would reach the weight
        hidden = torch.where(unmasked_tokens(case)[..., None], hidden, 0.0)
    out = function(hidden, weight, *case.arguments(), bias=bias, **(case.options | options))
    out.loss.backward()
    return out, [leaf.grad for leaf in leaves]


def check_hidden(problem, backend, frozen=False, **options):
    parameters, case, mask, allowed = problem
    kept = {k: v for k, v in options.items() if k == "statistics"}
    got, same, truth = (
        run_hidden(function, parameters, case, kind, frozen, **extra)
        for function, kind, extra in (
            (bapo_linear_loss, None, dict(backend=backend, sampling_mask=mask, **options)),
            (of_masked_logits, None, dict(allowed=allowed, **kept)),
            (of_masked_logits, torch.float64, dict(allowed=allowed, **kept)),
        )
    )
    log_probs = [r[0].log_probs for r in (got, same, truth)]
    size = log_probs[2][log_probs[2].isfinite()].abs().max().item()
    of_each = zip(("hidden", "weight", "bias"), got[1], same[1], truth[1], strict=True)
    for name, *gradients in of_each:
        if frozen and name != "hidden":
            assert gradients[0] is None
            continue
        assert gradients[0].dtype == parameters[0].dtype
        inherited = EPS[torch.float32] * size * gradients[2].abs().max().item()
        assert_within_budget(f"gradient of {name}", *gradients, inherited=inherited)
    for a, b in zip(got[0].bounds, truth[0].bounds, strict=True):
        assert a.item() == b.item()
    assert_within_budget("log_probs", *log_probs, inherited=2.0**-22 * size)  # sums of 24 products
    expected = unmasked_tokens(case) & (truth[0].log_probs == -torch.inf)
    if "statistics" not in options:
        assert got[0].metrics["label_outside_mask"] == expected.sum()
    if parameters[0].dtype == torch.float32:
        for name in ("loss", "entropy"):
            values = (getattr(r[0], name).double() for r in (got, truth))
            torch.testing.assert_close(*values, rtol=2e-5, atol=1e-6, equal_nan=True)
        assert set(got[0].metrics) == {*truth[0].metrics, "label_outside_mask"}
        for name, value in truth[0].metrics.items():
            mine = got[0].metrics[name].double()
            torch.testing.assert_close(mine, value.double(), rtol=2e-5, atol=1e-6)
    return got


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_options_of_hidden_states(backend, device, thin, name, chunk_tokens):
    """Stale batches: rows of every class, with and without sets, in chunks of any size."""
    thin(name == "softcap" and chunk_tokens == 5)
    problem = hidden_case(torch.float32, device, build(name), name not in INFINITE_KL)
    statistics = "all" if chunk_tokens is None else "live"
    check_hidden(problem, backend, statistics=statistics, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paper", "entropy", "softcap"])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_dtypes_of_hidden_states(backend, device, thin, dtype, name, logits_dtype):
    thin(name == "paper" and logits_dtype is None)
    problem = hidden_case(dtype, device, build(name))
    problem[1].old_log_probs = None
    check_hidden(problem, backend, logits_dtype=logits_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["far", "entropy", "kl"])
def test_frozen_head(backend, device, thin, dtype, name):
    thin(name == "far" and dtype == torch.float32)
    problem = hidden_case(dtype, device, build(name))
    if dtype != torch.float32:  # the ratios of rounded logits would be far off
        problem[1].old_log_probs = None
    for chunk_tokens in (None, 4):
        check_hidden(problem, backend, frozen=True, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("shape", [(), (B,), (B, S)])
def test_temperatures_of_hidden_states(backend, device, thin, shape):
    thin(shape == (B, S))
    options = dict(temperature=per_token(shape, 9, 0.5, 2.0))
    check_hidden(hidden_case(torch.float32, device, build("softcap"), **options), backend)


def test_packed_hidden_states(backend, device):
    cu = torch.tensor([0, 5, 5, 12, 20])
    config = BAPOConfig.recipe(loss_agg_mode="seq-mean-token-mean")
    options = dict(shape=(20,), cu_seqlens=cu, global_batch_size=7)
    check_hidden(hidden_case(torch.float32, device, config, **options), backend)


def test_hidden_states_in_two_calls_have_the_same_bits(backend, device, interpreted):
    """Of every row, whatever is in its batch; weight and bias need the same batch."""
    config = BAPOConfig.fixed(0.8, 1.2)
    parameters, case, mask, _ = hidden_case(torch.float32, device, config)
    options = dict(backend=backend, batch_num_tokens=9)

    def run(*given):
        return run_hidden(bapo_linear_loss, *given[:-1], sampling_mask=given[-1], **options)

    results = [run(parameters, case, mask) for _ in range(2)]
    assert all(map(torch.equal, results[0][1], results[1][1]))
    has_set = (mask.offsets.diff() > 0).view(B, S)
    for row in range(1 if interpreted else B):
        ref = case.options["ref_log_probs"][row : row + 1]
        tokens = [t[row : row + 1] for t in case.arguments()]
        part = Case(None, *tokens, case.options | dict(ref_log_probs=ref))
        rows = [parameters[0][row : row + 1], *parameters[1:]]
        out, gradients = run(rows, part, mask[S * row : S * (row + 1)])
        own = has_set[row]  # rows of a matrix product may depend on how many there are
        assert torch.equal(out.log_probs[0, own], results[0][0].log_probs[row, own])
        assert torch.equal(gradients[0][0, own], results[0][1][0][row, own])


def test_rows_of_the_head_that_no_set_has_are_never_read(backend, device):
    """They may be full of NaN, and their gradient is 0."""
    config = BAPOConfig(entropy_coef=0.1)
    parameters, case, _, _ = hidden_case(torch.float32, device, config)
    sets = [[max(label, 0), n + 30] for n, label in enumerate(case.labels.flatten().tolist())]
    mask = SamplingMask.from_lists(sets, device)
    options = dict(backend=backend, sampling_mask=mask)
    expected = run_hidden(bapo_linear_loss, parameters, case, **options)
    unmasked = unmasked_tokens(case).flatten().tolist()
    used = {i for ids, counts in zip(sets, unmasked, strict=True) if counts for i in ids}
    unused = [v for v in range(V) if v not in used]
    assert unused
    for p in parameters[1:]:
        p[unused] = torch.nan
    got = run_hidden(bapo_linear_loss, parameters, case, **options)
    for a, b in zip(got[1], expected[1], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    assert not got[1][1][unused].any()
    assert torch.equal(got[0].loss, expected[0].loss)


def test_parameters_of_any_strides(backend, device):
    """As views of other tensors; they are read as if they were contiguous."""
    parameters, case, mask, _ = hidden_case(torch.float32, device, BAPOConfig())
    hidden, weight, bias = parameters
    strided = hidden.mT.contiguous().mT, weight.T.contiguous().T, bias.repeat_interleave(2)[::2]
    options = dict(backend=backend, sampling_mask=mask)
    expected, got = (
        bapo_linear_loss(*given[:2], *case.arguments(), bias=given[2], **case.options, **options)
        for given in (parameters, strided)
    )
    assert not any(p.is_contiguous() for p in strided)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.log_probs, expected.log_probs)


def test_autocast(backend, device):
    """float32 parameters, operands in bfloat16, gradients in float32."""
    parameters, case, mask, allowed = hidden_case(torch.float32, device, BAPOConfig())
    case.old_log_probs = None
    with torch.autocast(device, torch.bfloat16):
        got = run_hidden(bapo_linear_loss, parameters, case, backend=backend, sampling_mask=mask)
    truth = run_hidden(of_masked_logits, parameters, case, torch.float64, allowed=allowed)
    for gradient, expected in zip(got[1], truth[1], strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient.double() - expected).norm() <= 2e-2 * expected.norm()


def test_without_gradient_and_tied_weight(backend, device):
    parameters, case, mask, allowed = hidden_case(torch.float32, device, BAPOConfig())
    options = case.options | dict(sampling_mask=mask, backend=backend)
    embedding = parameters[1].clone().requires_grad_()
    true = parameters[1].double().requires_grad_()
    ids = case.labels.clamp(min=0)
    out = bapo_linear_loss(0.5 * embedding[ids], embedding, *case.arguments(), **options)
    out.loss.backward()
    expected = of_masked_logits(
        0.5 * true[ids], true, *case.arguments(), bias=None, allowed=allowed, **case.options
    )
    expected.loss.backward()
    assert (embedding.grad - true.grad).abs().max() <= 1e-5 * true.grad.abs().max()
    with torch.no_grad():
        again = bapo_linear_loss(0.5 * embedding[ids], embedding, *case.arguments(), **options)
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(again.log_probs, out.log_probs)


# Log-probs and entropies, for any incoming gradients.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["logits", "hidden states", "frozen head"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(final_logit_softcapping=8.0, temperature=torch.linspace(0.5, 2.0, B * S).view(B, S))],
)
def test_log_probs(backend, device, thin, dtype, level, options):
    thin(len(options) > 0 and dtype == torch.float32 and level != "frozen head")
    parameters, case, mask, allowed = hidden_case(dtype, device, BAPOConfig())
    unmasked = unmasked_tokens(case)
    labels = torch.where(unmasked, case.labels, -100)
    incoming = torch.randn(2, B, S, device=device) * (torch.rand(2, B, S, device=device) < 0.6)
    options = {k: v.to(device) if hasattr(v, "to") else v for k, v in options.items()}
    parameters[0] = parameters[0].masked_fill(~unmasked[..., None], 0.0)
    if level == "logits":
        parameters = [masked_logits(*parameters, allowed).to(dtype)]

    def run(kind, **of_call):
        leaves = [p.to(kind or dtype).clone() for p in parameters]
        for leaf in leaves[: 1 if level == "frozen head" else 3]:
            leaf.requires_grad_()
        both = of_leaves(leaves, **of_call)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return both, torch.autograd.grad(both, wanted, [x.to(both[0].dtype) for x in incoming])

    def of_leaves(leaves, sampling_mask=None, **of_call):
        if level == "logits":
            (x,) = leaves
            x = x if sampling_mask is None else x.masked_fill(~allowed, torch.nan)
            return log_probs(x, labels, sampling_mask=sampling_mask, **of_call, **options)
        if sampling_mask is None:
            return reference.log_probs(masked_logits(*leaves, allowed), labels, **options)
        hidden, weight, bias = leaves
        of_call |= dict(bias=bias, sampling_mask=sampling_mask, chunk_tokens=4)
        return linear_log_probs(hidden, weight, labels, **of_call, **options)

    got, same, truth = (
        run(None, sampling_mask=mask, backend=backend),
        run(None, backend="reference"),
        run(torch.float64, backend="reference"),
    )
    size = truth[0][0][truth[0][0].isfinite()].abs().max().item()
    for k, name in enumerate(("log_probs", "entropy")):
        values = (r[0][k] for r in (got, same, truth))
        assert_within_budget(name, *values, operand=size, inherited=2.0**-22 * size)
    for k, gradients in enumerate(zip(got[1], same[1], truth[1], strict=True)):
        of_logits = EPS[torch.float32] * size * gradients[2].abs().max().item()
        assert_within_budget(f"gradient {k}", *gradients, inherited=of_logits)


# What breaks a rule.

WRONG = "twice", "too large", "negative", "beyond 32 bits"
KINDS = "none", "label", "few", "all", "lacks the label", *WRONG


def set_of(kind, label, V, g):
    order = torch.randperm(V, generator=g).tolist()
    label = label if 0 <= label < V else order[0]
    few = [label, *(i for i in order[: V // 3] if i != label)][::-1]
    return {
        "none": [],
        "label": [label],
        "few": few,
        "all": order,
        "lacks the label": [i for i in order[: 1 + V // 2] if i != label],
        "twice": [*few, label],
        "too large": [V, *few],
        "negative": [*few, -1],
        "beyond 32 bits": [label + 2**32],
    }[kind]


@settings(max_examples=examples(40), phases=NO_EXPLANATION)
@given(
    backend=st.sampled_from(KERNELS or ["none"]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    V=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    of_ids=st.sampled_from([torch.int32, torch.int64]),
    of_offsets=st.sampled_from([torch.int32, torch.int64]),
    statistics=st.sampled_from(["all", "live"]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.skipif(not KERNELS, reason="no kernels")
def test_any_sets(backend, kinds, V, dtype, of_ids, of_offsets, statistics, seed):
    """Rows whose set is wrong are NaN, unless they are masked; they change no other row."""
    device, N, g = DEVICES[backend], len(kinds), torch.Generator().manual_seed(seed)
    if of_ids == torch.int32:
        kinds = ["negative" if kind == "beyond 32 bits" else kind for kind in kinds]
    labels = make_case((N,), V, logits=torch.zeros(N, V), seed=seed).labels.tolist()
    sets = [set_of(kind, label, V, g) for kind, label in zip(kinds, labels, strict=True)]
    wrong = torch.tensor([kind in WRONG for kind in kinds], device=device)
    right = [[] if kind in WRONG else ids for kind, ids in zip(kinds, sets, strict=True)]
    config = BAPOConfig(entropy_coef=0.1 if seed % 2 else 0.0)
    options = dict(sets=right, seed=seed, config=config, poison=False)
    case, _ = case_with_sets((N,), V, dtype, device, **options)
    ids = torch.tensor([i for ids in sets for i in ids], dtype=of_ids, device=device)
    offsets = torch.tensor([0, *map(len, sets)], device=device).cumsum(0)
    mask = SamplingMask(ids, offsets.to(of_offsets))

    labelled, unmasked = case.labels != -100, unmasked_tokens(case)
    both = log_probs(case.logits, case.labels, sampling_mask=mask, backend=backend)
    hidden, weight = torch.randn(N, 5, device=device), torch.randn(V, 5, device=device)
    given = dict(sampling_mask=mask, backend=backend)
    of_hidden = linear_log_probs(hidden, weight, case.labels, **given)
    for values in (*both, *of_hidden):
        assert torch.equal(values.isnan(), wrong & labelled)
    out = run_kernel_with_sets(case, mask, backend, statistics=statistics).output
    counted = unmasked & ((case.advantages != 0) | (seed % 2 == 1))
    if statistics == "all" or seed % 2 == 1:
        counted = unmasked
    assert out.loss.isnan() == (wrong & counted).any()

    case.response_mask = case.response_mask & ~wrong
    check_with_sets(case, mask, backend, statistics=statistics)


@pytest.mark.parametrize("ids", [[9], [2, 9], [-1], [2, 2], [2, 2**33 + 3]])
def test_wrong_sets_without_their_label(backend, device, ids):
    """NaN, not -inf, which would let the loss be finite."""
    mask = SamplingMask.from_lists([ids, [1, 2]], device)
    labels, old = torch.tensor([3, 1], device=device), torch.full((2,), -1.0, device=device)
    logits = torch.randn(2, 6, device=device)
    options = dict(sampling_mask=mask, backend=backend)
    out = bapo_loss(logits, labels, old, torch.ones(2, device=device), **options)
    assert out.loss.isnan()
    assert out.log_probs.isnan().tolist() == [True, False]
    both = linear_log_probs(logits[:, :4], logits.new_ones(6, 4), labels, **options)
    assert [x.isnan().tolist() for x in both] == [[True, False]] * 2


@pytest.fixture
def poisoned_memory():
    """Fresh tensors, those allocated in C++ too, are full of NaN or of the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(deterministic)


BROKEN_OFFSETS = [
    [0, 2, 4, 5, 7],
    [0, 2, 4, 5, 5],
    [1, 2, 3, 4, 6],
    [0, 4, 2, 5, 6],
    [0, 7, 2, 4, 6],
    [-5, 1, 2, 3, 6],
    [0, -1, 2, 3, 6],
    [0, 9, 9, 9, 9],
    [0, 2**62, -(2**62), 3, 6],
    [-1] * 5,
]


@pytest.mark.parametrize("level", ["logits", "in place", "hidden states", "frozen head"])
@pytest.mark.parametrize("offsets", BROKEN_OFFSETS)
def test_broken_offsets(backend, device, thin, poisoned_memory, level, offsets):
    """As on a GPU, where nobody reads them: the loss is NaN, and nothing foreign is touched."""
    thin(offsets in BROKEN_OFFSETS[3::3] and level != "in place")
    ids = torch.tensor([5, 5, 3, 0, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    mask = SamplingMask._of(ids, torch.tensor(offsets, device=device))
    labels = torch.tensor([3, 0, 8, 9], device=device)
    batch = labels, None, torch.ones(4, device=device)
    options = dict(sampling_mask=mask, backend=backend)
    hidden = torch.randn(4, H, device=device, requires_grad=True)
    weight = torch.randn(10, H, device=device).requires_grad_(level != "frozen head")
    for shown in (False, True):
        response_mask = torch.full((4,), shown, device=device)
        if level in ("logits", "in place"):
            logits = hidden @ weight.T
            given = (logits, *batch, response_mask)
            out = bapo_loss(*given, inplace=level == "in place", **options)
            both = log_probs(hidden @ weight.T, labels, **options)
        else:
            out = bapo_linear_loss(hidden, weight, *batch, response_mask, **options)
            both = linear_log_probs(hidden, weight, labels, **options)
        assert out.loss.isnan() == shown
        assert both[0].isnan().any()
        out.loss.backward(retain_graph=True)
        assert shown or not hidden.grad.any()
        if level == "hidden states":  # values that no row has are not summed
            assert shown or not weight.grad.any()
        torch.autograd.grad(both, hidden, [torch.ones_like(x) for x in both])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_fresh_memory_reaches_no_result(
    backend, device, thin, dtype, entropy_coef, poisoned_memory
):
    thin(entropy_coef > 0 and dtype == torch.float32)
    config = BAPOConfig(entropy_coef=entropy_coef)
    case, mask = case_with_sets((3, 8), 65, dtype, device, config=config, staleness=0.4)
    check_with_sets(case, mask, backend)
    problem = hidden_case(dtype, device, config, staleness=0.4)
    for frozen in (False, True):
        check_hidden(problem, backend, frozen=frozen, chunk_tokens=5)


def test_offsets_beyond_32_bits(backend, device):
    """Rows past 2^31 elements; the memory between the logits of the sets is never read."""
    rows, V = 3, 2**30
    logits = torch.empty(rows, V, dtype=torch.bfloat16, device=device)
    sets = [[5, 0, V - 1], [V - 1], [V - 2, 7, 9, V // 2]]
    for row, ids in zip(logits, sets, strict=True):
        row[ids] = torch.randn(len(ids), device=device).bfloat16()
    labels = torch.tensor([ids[0] for ids in sets], device=device)
    mask = SamplingMask.from_lists(sets, device)
    got = log_probs(logits, labels, sampling_mask=mask, backend=backend)
    for n, ids in enumerate(sets):
        expected = reference.log_probs(
            logits[n : n + 1, ids].double(), torch.tensor([0]).to(device)
        )
        for value, true in zip(got, expected, strict=True):
            torch.testing.assert_close(value[n].double(), true[0], rtol=1e-6, atol=1e-6)


ERRORS = {
    "type": ([[0], [1]], "sampling_mask must be None or a SamplingMask, got list"),
    "rows": (SamplingMask.from_lists([[0]]), r"sampling_mask must have 2 rows, .*\(2,\).* got 1"),
    "device": (
        SamplingMask.from_lists([[0], [1]], "meta"),
        r"sampling_mask must be on the device of labels \(cpu\), got meta",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    mask, message = ERRORS[name]
    labels, A, options = torch.tensor([0, 1]), torch.ones(2), dict(sampling_mask=mask)
    logits, hidden, weight = torch.ones(2, 5), torch.ones(2, 4), torch.ones(5, 4)
    for function, *arguments in (
        (bapo_loss, logits, labels, None, A),
        (BAPOLoss(), logits, labels, None, A),
        (log_probs, logits, labels),
        (bapo_linear_loss, hidden, weight, labels, None, A),
        (BAPOLinearLoss(), hidden, weight, labels, None, A),
        (linear_log_probs, hidden, weight, labels),
        (reference.bapo_loss, logits, labels, None, A),
        (reference.linear_log_probs, hidden, weight, labels),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)


# Compilers, ranks.


@pytest.mark.slow
@needs_native
@pytest.mark.compile
@pytest.mark.parametrize(
    ("level", "inside"), [("logits", True), ("log-probs", False), ("hidden states", False)]
)
def test_compiled(level, inside):
    """The mask is an argument or made in the graph; other sets do not compile again."""
    torch._dynamo.reset()
    backend = device = "cpu"  # the graph is the same for every backend
    weight = torch.randn(V, H, device=device)

    def loss(x, token_ids, offsets, mask, labels, *batch):
        given = SamplingMask(token_ids, offsets) if inside else mask
        options = dict(sampling_mask=given, backend=backend)
        if level == "log-probs":
            both = log_probs(x, labels, **options)
            return (both[0].exp() + both[1]).mean(), both[1].detach()
        if level == "hidden states":
            out = bapo_linear_loss(x, weight, labels, *batch, **options)
        else:
            out = bapo_loss(x, labels, *batch, **options)
        return out.loss, out.metrics["label_outside_mask"]

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (S, S + 4):
        parameters, case, mask, allowed = hidden_case(
            torch.float32, device, BAPOConfig(), shape=(B, size)
        )
        x = parameters[0].masked_fill(~unmasked_tokens(case)[..., None], 0.0)
        if level != "hidden states":
            x = (x @ weight.T).masked_fill(~allowed, torch.nan)
        results = []
        for function in (loss, compiled):
            leaf = x.clone().requires_grad_()
            with torch._dynamo.config.patch(error_on_recompile=size != S):
                value, aside = function(leaf, mask.token_ids, mask.offsets, mask, *case.arguments())
            value.backward()
            results.append((value.detach(), aside, leaf.grad))
        for expected, got in zip(*results, strict=True):
            if level == "hidden states":  # compiled, backward makes the gradient
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(got, expected)


@pytest.mark.compile
def test_traced_values_are_not_read():
    """As on a GPU: ids are sorted unseen, and offsets that break their rule become -1."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def made(token_ids, offsets):
        mask = SamplingMask(token_ids, offsets)
        both = SamplingMask.cat([mask, mask])
        return mask._ids, mask._offsets, both._offsets

    ids, *offsets = made(torch.tensor([9, 3, 2**40, -(2**40), 0]), torch.tensor([0, 2, 2, 5]))
    assert ids.tolist() == [3, 9, -1, 0, 2**31 - 1]
    assert [o.tolist() for o in offsets] == [[0, 2, 2, 5], [0, 2, 2, 5, 7, 7, 10]]
    for broken in BROKEN_OFFSETS:
        ids, *offsets = made(torch.arange(6), torch.tensor(broken))
        assert sorted(ids.tolist()) == [*range(6)]
        assert [set(o.tolist()) for o in offsets] == [{-1}, {-1}]


def sharded_rank(rank, level, backend, columns, dtype):
    group = grid(1, len(columns)).get_group("tensor")
    own = slice(sum(columns[:rank]), sum(columns[: rank + 1]))
    options = dict(vocab_group=group, backend=backend)
    if level == "logits":
        case, mask = sharded_case(dtype)
        leaves = [unread(case.logits)[..., own].clone().requires_grad_()]
        given = leaves
    else:
        parameters, case, mask, _ = hidden_case(dtype, "cpu", BAPOConfig(target=0.6))
        hidden, *head = parameters
        leaves = [hidden, *(p[own].clone() for p in head)]
        for leaf in leaves[: 1 if level == "frozen head" else 3]:
            leaf.requires_grad_()
        given, options["bias"] = leaves[:2], leaves[2]
    out = (bapo_loss if level == "logits" else bapo_linear_loss)(
        *given, *case.arguments(), sampling_mask=mask, **options, **case.options
    )
    out.loss.backward()
    return out._replace(loss=out.loss.detach()), [leaf.grad for leaf in leaves]


def sharded_case(dtype):
    config = BAPOConfig(target=0.6, entropy_coef=0.05)
    return case_with_sets((4, 7), 67, dtype, staleness=0.4, config=config)


COLUMNS = [[40, 27], [20, 0, 30, 17]]  # shards that have none of a set, and one without a column
# What ranks exchange does not depend on the backend.
BACKENDS = [*(name for name in KERNELS if DEVICES[name] == "cpu"), "reference"]
OF_BACKENDS = [
    (backend, columns, dtype)
    for backend in BACKENDS
    for columns in COLUMNS
    for dtype in (torch.float32, torch.bfloat16)
    if backend == "cpu" or (columns, dtype) == (COLUMNS[0], torch.float32)
]


@pytest.mark.xdist_group("world")
@pytest.mark.parametrize(("backend", "columns", "dtype"), OF_BACKENDS)
def test_shards_of_logits(worlds, backend, columns, dtype):
    ranks = worlds(len(columns)).run(sharded_rank, "logits", backend, columns, dtype)
    case, _ = sharded_case(dtype)
    outputs, gradients = zip(*ranks, strict=True)
    for out in outputs[1:]:
        assert torch.equal(out.loss, outputs[0].loss)
        assert torch.equal(out.log_probs, outputs[0].log_probs)
    gradient = torch.cat([of_rank for (of_rank,) in gradients], -1)
    check_result_with_sets(case, Result(outputs[0], (gradient,)))


@pytest.mark.xdist_group("world")
@pytest.mark.parametrize("level", ["hidden states", "frozen head"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_the_head(worlds, backend, level):
    columns = [100, 0, 93]
    ranks = worlds(len(columns)).run(sharded_rank, level, backend, columns, torch.float32)
    torch.manual_seed(0)  # as on every rank
    parameters, case, _, allowed = hidden_case(torch.float32, "cpu", BAPOConfig(target=0.6))
    truth = run_hidden(of_masked_logits, parameters, case, torch.float64, allowed=allowed)
    outputs, gradients = zip(*ranks, strict=True)
    for out, (of_hidden, *_) in zip(outputs, gradients, strict=True):
        assert torch.equal(out.loss, outputs[0].loss)
        torch.testing.assert_close(out.loss.double(), truth[0].loss, rtol=2e-5, atol=1e-6)
        assert out.metrics["label_outside_mask"] > 0
        torch.testing.assert_close(of_hidden.double(), truth[1][0], rtol=2e-5, atol=1e-6)
    for k in (1, 2):
        of_ranks = [gradient[k] for gradient in gradients]
        if level == "frozen head":
            assert of_ranks == [None] * 3
        else:
            whole = torch.cat(of_ranks).double()
            torch.testing.assert_close(whole, truth[1][k], rtol=2e-5, atol=1e-6)


# The class.

SETS = [[7, 3], [], [5, 0, 2], [], [1], []]


def lists_of(mask):
    """The sets as the kernels read them."""
    ids, offsets = mask._ids.tolist(), mask._offsets.tolist()
    assert (mask._ids.dtype, mask._offsets.dtype) == (torch.int32, torch.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [ids[a:b] for a, b in pairwise(offsets)]


SORTED = [sorted(ids) for ids in SETS]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_constructors(kind):
    ids = torch.tensor([i for ids in SETS for i in ids], dtype=kind)
    counts = torch.tensor([*map(len, SETS)], dtype=kind).view(2, 3)
    padded = torch.tensor([[-7, *ids, -7, -7, -7, -7][:5] for ids in SETS], dtype=kind)
    allowed = torch.tensor([[v in ids for v in range(9)] for ids in SETS])
    offsets = torch.tensor([0, 2, 2, 5, 5, 6, 6], dtype=kind)
    for mask in (
        SamplingMask(ids, offsets),
        SamplingMask.from_lists(SETS),
        SamplingMask.from_counts(ids, counts),
        SamplingMask.from_padded(padded.view(2, 3, 5), padding=-7),
        SamplingMask.from_bool(allowed.view(2, 3, 9)),
    ):
        assert lists_of(mask) == SORTED
        assert len(mask) == 6
    given = SamplingMask(ids, offsets)
    for got, expected in ((given.token_ids, ids), (given.offsets, offsets)):
        assert torch.equal(got, expected)
        assert got.dtype == kind


def test_of_no_rows_and_of_no_ids():
    for mask, rows in (
        (SamplingMask.from_lists([]), 0),
        (SamplingMask.from_lists([[], []]), 2),
        (SamplingMask.from_padded(torch.full((2, 3), -1)), 2),
        (SamplingMask.from_padded(torch.empty(0, 3, dtype=torch.int64)), 0),
        (SamplingMask.from_bool(torch.zeros(2, 9, dtype=torch.bool)), 2),
        (SamplingMask.from_bool(torch.empty(0, 9, dtype=torch.bool)), 0),
    ):
        assert lists_of(mask) == [[]] * rows
        assert len(mask) == rows
        assert lists_of(mask[:1]) == [[]] * min(rows, 1)
        assert lists_of(SamplingMask.cat([mask, mask])) == [[]] * (2 * rows)
    assert lists_of(SamplingMask.from_bool(torch.ones(2, 3, dtype=torch.bool))) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("of", [list, sorted])
def test_later_writes_change_no_mask(of, kind):
    """Whether or not the ids have to be sorted; the reference reads the ids as they were given."""
    ids, offsets = torch.tensor(of([7, 3, 5]), dtype=kind), torch.tensor([0, 3, 3], dtype=kind)
    mask = SamplingMask(ids, offsets)
    ids.zero_(), offsets.zero_()
    assert lists_of(mask) == [[3, 5, 7], []]
    assert mask.token_ids.tolist() == of([7, 3, 5])
    assert mask.offsets.tolist() == [0, 3, 3]


def test_ids_beyond_32_bits_stay_in_no_vocabulary():
    ids = [2**40, 3, 2**32 + 3, -(2**40), 2**31]
    assert lists_of(SamplingMask.from_lists([ids])) == [[-1, 3, *[2**31 - 1] * 3]]
    for n in ids[2:] + ids[:1]:
        assert lists_of(SamplingMask.from_lists([[n]]))[0][0] in (-1, 2**31 - 1)


@given(
    sets=st.lists(st.lists(st.integers(-1, 12), max_size=5), max_size=8),
    cuts=st.lists(st.integers(-10, 10), max_size=4),
)
def test_slices_and_their_concatenation(sets, cuts):
    mask, expected = SamplingMask.from_lists(sets), [sorted(ids) for ids in sets]
    assert lists_of(mask) == expected
    for a, b in pairwise([None, *cuts, None]):
        assert lists_of(mask[a:b]) == expected[a:b]
    places = sorted({0, len(sets), *(abs(cut) % (len(sets) + 1) for cut in cuts)})
    parts = [mask[a:b] for a, b in pairwise(places)] or [mask]
    whole = SamplingMask.cat(parts)
    assert lists_of(whole) == expected
    assert torch.equal(whole.offsets, mask._offsets)


def from_file(mask):
    """As torch reads files by default, without the code of any class that it does not know."""
    file = io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["mask"]


def test_other_devices_copies_and_files():
    mask = SamplingMask.from_lists(SETS)
    assert mask.to("cpu") is mask.to(torch.device("cpu"), non_blocking=True) is mask
    there = mask.to("meta")
    assert {t.device.type for t in (there.token_ids, there.offsets, there._ids)} == {"meta"}
    assert len(there) == 6
    assert SamplingMask.from_lists(SETS, device="meta")._offsets.device.type == "meta"
    for copied in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert lists_of(copied) == SORTED
        assert torch.equal(copied.token_ids, mask.token_ids)
    with pytest.raises(FrozenInstanceError):
        mask.offsets = mask.offsets + 1
    loaded = from_file(mask)
    assert lists_of(loaded) == SORTED
    assert torch.equal(loaded.token_ids, mask.token_ids)
    with pytest.raises(ValueError, match=r"offsets must rise from 0 to 1, got 7 at \(1,\)"):
        from_file(SamplingMask._of(torch.arange(1), torch.tensor([0, 7])))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("without_memory", [lambda: torch.device("meta"), FakeTensorMode])
def test_values_on_a_device_are_not_read(without_memory, kind):
    """Tensors without memory have none to read; fake ones say that they are on a CPU."""
    with without_memory():
        ids, offsets = torch.empty(6, dtype=torch.int64), torch.empty(4, dtype=kind)
        mask = SamplingMask(ids.to(kind), offsets)
        assert (mask._ids.shape, mask._ids.dtype) == ((6,), torch.int32)
        assert len(SamplingMask.cat([mask, mask])) == 6
        assert len(SamplingMask.from_counts(ids, offsets.view(2, 2))) == 4


ONE, NONE = torch.tensor([0, 1]), torch.arange(0)
BAD = {
    "token_ids must be a tensor, got l": lambda: SamplingMask([1], ONE),
    "token_ids must be int32 or int64, got torch.float32": lambda: SamplingMask(torch.ones(1), ONE),
    "offsets must be int32 or int64, got torch.bool": lambda: SamplingMask(NONE, ONE.bool()),
    r"token_ids must have shape \(K,\), got \(1, 2\)": lambda: SamplingMask(ONE[None], ONE),
    r"offsets must have shape \(N \+ 1,\), got \(0,\)": lambda: SamplingMask(NONE, NONE),
    r"offsets must have shape \(N \+ 1,\), got \(\)": lambda: SamplingMask(NONE, ONE[0]),
    r"offsets must be on the device of token_ids \(cpu\), got meta": lambda: SamplingMask(
        NONE, ONE.to("meta")
    ),
    r"offsets must rise from 0 to 2, got 1 at \(2,\)": lambda: SamplingMask.from_counts(ONE, ONE),
    r"offsets must rise from 0 to 2, got 2 at \(2,\)": lambda: SamplingMask.from_counts(
        ONE, torch.tensor([3, -1])
    ),
    "counts must be int32 or int64, got torch.float32": lambda: SamplingMask.from_counts(
        ONE, torch.ones(2)
    ),
    r"token_ids must have shape \(..., M\), got \(\)": lambda: SamplingMask.from_padded(ONE[0]),
    "allowed must be bool, got torch.int64": lambda: SamplingMask.from_bool(ONE[None]),
    "rows must be a slice, got 0": lambda: SamplingMask.from_lists([[1]])[0],
    "rows must have step 1, got 2": lambda: SamplingMask.from_lists([[1]])[::2],
    r"masks must be SamplingMasks, got \['list'\]": lambda: SamplingMask.cat([[[1]]]),
    "masks must be one or more, got 0": lambda: SamplingMask.cat([]),
    r"masks must be on the device of the first one \(cpu\), got meta": lambda: SamplingMask.cat(
        [SamplingMask.from_lists([[1]], device) for device in ("cpu", "meta")]
    ),
    r"offsets must rise from 0 to 2, got -1 at \(0,\)": lambda: SamplingMask._of(
        ONE, torch.tensor([-1, -1, -1])
    )[1:],
    **{
        f"sets must have a list of int64 ids for each row .*sum.sets, .*, got {shown}$": (
            lambda sets=sets: SamplingMask.from_lists(sets)
        )
        for sets, shown in (
            ([[1, 2.5]], r"\[1, 2.5\] at \(0,\)"),
            ([[1], None], r"None at \(1,\)"),
            ([1, 2, 3], r"1 at \(0,\)"),
            ([[[1, 2], [3]], [[4], [5]]], r"\[\[1, 2\], \[3\]\] at \(0,\)"),
            ([[[1], [2]]], r"\[\[1\], \[2\]\] at \(0,\)"),
            ([[], ["a"]], r"\['a'\] at \(1,\)"),
            ([[2**63]], r"\[9223372036854775808\] at \(0,\)"),
            ([[3], [True]], r"\[True\] at \(1,\)"),
        )
    },
}


@pytest.mark.parametrize("message", BAD)
def test_errors_of_the_class(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


@pytest.mark.parametrize("offsets", BROKEN_OFFSETS)
def test_offsets_on_a_cpu_are_checked(offsets):
    with pytest.raises(ValueError, match="offsets must rise from 0 to 6, got "):
        SamplingMask(torch.arange(6), torch.tensor(offsets))
