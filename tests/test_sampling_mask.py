"""Sampling masks: as if every logit outside of the sets were -inf, on every backend."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EPS,
    Case,
    allowed_by,
    assert_within_budget,
    case_with_sets,
    check_with_sets,
    make_case,
    per_token,
    run_kernel,
    run_kernel_with_sets,
    sets_of,
    transform_of,
    unmasked_tokens,
)
from test_linear import CONFIGS, build, problem
from test_loss import OPTIONS, build_config

from bapo_kernels import (
    BAPOConfig,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    gemm,
    linear_log_probs,
    log_probs,
    reference,
)

B, S, H, V = 3, 7, 24, 193
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITE_KL = "k1", "k2"  # of a label outside of its set


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, device, statistics, name):
    config_options, call_options = OPTIONS[name]
    config, outside = build_config(config_options), name not in INFINITE_KL
    case, mask = case_with_sets(device=device, config=config, outside=outside, **call_options)
    check_with_sets(case, mask, backend, statistics=statistics)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paper", "together", "temperatures, together"])
def test_dtypes(backend, device, dtype, name):
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    case, mask = case_with_sets(dtype=dtype, device=device, config=config, **call_options)
    check_with_sets(case, mask, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 2, 33, 4097])  # one token, few, a tail, more than a block
def test_vocabulary_sizes(backend, device, dtype, V):
    config = BAPOConfig(entropy_coef=0.01)
    case, mask = case_with_sets((2, 7), V, dtype, device, config=config, masked=0.0)
    check_with_sets(case, mask, backend)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 2, 3)])  # 0 to 3 leading sizes
def test_leading_shapes(backend, device, shape):
    case, mask = case_with_sets(shape, 33, device=device, masked=0.0, poison=False)
    got = check_with_sets(case, mask, backend)
    assert got.output.log_probs.shape == shape


@pytest.mark.parametrize("staleness", [0.0, 0.3, 60.0])
@pytest.mark.parametrize("preset", ["paper", "recipe"])
def test_staleness(backend, device, staleness, preset):
    """Kept, clipped and undecided rows, with and without sets."""
    config = build_config(dict(preset=preset))
    case, mask = case_with_sets((4, 16), 65, device=device, staleness=staleness, config=config)
    check_with_sets(case, mask, backend)
    case.old_log_probs = None
    check_with_sets(case, mask, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["paper", "entropy", "temperatures"])
def test_in_place(backend, device, dtype, name):
    """The bits of the gradient that is not in place, with zeros outside of the sets."""
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    case, mask = case_with_sets(dtype=dtype, device=device, config=config, **call_options)
    expected = run_kernel_with_sets(case, mask, backend)
    leaf = case.logits.masked_fill(case.logits == -torch.inf, torch.nan).requires_grad_()
    logits = leaf * 1
    options = case.options | dict(sampling_mask=mask, backend=backend, inplace=True)
    out = bapo_loss(logits, *case.arguments(), **options)
    out.loss.backward()
    assert torch.equal(leaf.grad, expected.gradient)
    assert torch.equal(out.loss, expected.output.loss)
    if dtype != torch.float16:  # made in forward
        assert torch.equal(logits.detach(), expected.gradient)


@pytest.mark.parametrize("layout", ["slice", "last"])
def test_strided_logits(backend, device, layout):
    case, mask = case_with_sets((2, 8), 33, device=device)
    expected = run_kernel_with_sets(case, mask, backend)
    logits = case.logits.masked_fill(case.logits == -torch.inf, torch.nan)
    whole = F.pad(logits, (0, 0, 0, 1)) if layout == "slice" else logits.mT.contiguous()
    whole.requires_grad_()
    strided = whole[:, :-1] if layout == "slice" else whole.mT
    options = case.options | dict(sampling_mask=mask, backend=backend)
    out = bapo_loss(strided, *case.arguments(), **options)
    out.loss.backward()
    gradient = whole.grad[:, :-1] if layout == "slice" else whole.grad.mT
    assert torch.equal(gradient, expected.gradient)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_packed_batches(backend, device, mode):
    """With tokens after the last sequence, and one advantage and temperature per sequence."""
    cu = torch.tensor([0, 5, 5, 12, 20], device=device)
    config = BAPOConfig(loss_agg_mode=mode)
    options = dict(device=device, config=config, cu_seqlens=cu)
    case, mask = case_with_sets((24,), 65, **options)
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
    expected = run_kernel(case, backend)
    got = run_kernel(case, backend, sampling_mask=SamplingMask.from_lists([[]] * 10, device))
    assert torch.equal(got.gradient, expected.gradient)
    assert torch.equal(got.output.loss, expected.output.loss)
    assert got.output.metrics["label_outside_mask"] == 0
    ids = torch.zeros(0, dtype=torch.int32, device=device)
    nothing = SamplingMask(ids, torch.zeros(1, dtype=torch.int64, device=device))
    logits = torch.empty(0, 11, device=device, requires_grad=True)
    tokens = torch.empty(0, device=device)
    options = dict(backend=backend, sampling_mask=nothing)
    out = bapo_loss(logits, tokens.long(), tokens, tokens, **options)
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == logits.shape
    case.response_mask = torch.zeros_like(case.response_mask)
    masked = run_kernel(
        case, backend, sampling_mask=SamplingMask.from_lists([[2, 0, 70]] * 10, device)
    )
    assert masked.output.loss == 0
    assert not masked.gradient.any()


# Of hidden states. The oracle puts -inf into the logits, and knows no sampling mask.


@pytest.fixture(autouse=True)
def chunks_as_asked_for(monkeypatch):
    """Also where one would take less memory, because the sum of several does."""
    monkeypatch.setattr(gemm, "SUM_BYTES", 0)


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
def test_options_of_hidden_states(backend, device, name, chunk_tokens):
    """Stale batches: rows of every class, with and without sets, in chunks of any size."""
    problem = hidden_case(torch.float32, device, build(name), name not in INFINITE_KL)
    statistics = "all" if chunk_tokens is None else "live"
    check_hidden(problem, backend, statistics=statistics, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paper", "entropy", "softcap"])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_dtypes_of_hidden_states(backend, device, dtype, name, logits_dtype):
    problem = hidden_case(dtype, device, build(name))
    problem[1].old_log_probs = None
    check_hidden(problem, backend, logits_dtype=logits_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["far", "entropy", "kl"])
def test_frozen_head(backend, device, dtype, name):
    problem = hidden_case(dtype, device, build(name))
    if dtype != torch.float32:  # the ratios of rounded logits would be far off
        problem[1].old_log_probs = None
    for chunk_tokens in (None, 4):
        check_hidden(problem, backend, frozen=True, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("shape", [(), (B,), (B, S)])
def test_temperatures_of_hidden_states(backend, device, shape):
    T = per_token(shape, 9, 0.5, 2.0)
    problem = hidden_case(torch.float32, device, build("softcap"), temperature=T)
    check_hidden(problem, backend)


def test_packed_hidden_states(backend, device):
    cu = torch.tensor([0, 5, 5, 12, 20])
    config = BAPOConfig.recipe(loss_agg_mode="seq-mean-token-mean")
    options = dict(shape=(20,), cu_seqlens=cu, global_batch_size=7)
    check_hidden(hidden_case(torch.float32, device, config, **options), backend)


def test_hidden_states_in_two_calls_have_the_same_bits(backend, device):
    """Of every row, whatever is in its batch; weight and bias need the same batch."""
    config = BAPOConfig.fixed(0.8, 1.2)
    parameters, case, mask, _ = hidden_case(torch.float32, device, config)
    options = dict(backend=backend, batch_num_tokens=9)
    results = [
        run_hidden(bapo_linear_loss, parameters, case, sampling_mask=mask, **options)
        for _ in range(2)
    ]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)
    has_set = (mask.offsets.diff() > 0).view(B, S)
    for row in range(B):
        ref = case.options["ref_log_probs"][row : row + 1]
        tokens = [t[row : row + 1] for t in case.arguments()]
        part = Case(None, *tokens, case.options | dict(ref_log_probs=ref))
        rows = [parameters[0][row : row + 1], *parameters[1:]]
        of_row = mask[S * row : S * (row + 1)]
        out, gradients = run_hidden(bapo_linear_loss, rows, part, sampling_mask=of_row, **options)
        own = has_set[row]  # rows of a matrix product may depend on how many there are
        assert torch.equal(out.log_probs[0, own], results[0][0].log_probs[row, own])
        assert torch.equal(gradients[0][0, own], results[0][1][0][row, own])


def test_rows_of_the_head_that_no_set_has_are_never_read(backend, device):
    """They may be full of NaN, and their gradient is 0."""
    config = BAPOConfig(entropy_coef=0.1)
    parameters, case, _, _ = hidden_case(torch.float32, device, config)
    sets = [[max(label, 0), n + 30] for n, label in enumerate(case.labels.flatten().tolist())]
    mask = SamplingMask.from_lists(sets, device)
    expected = run_hidden(bapo_linear_loss, parameters, case, backend=backend, sampling_mask=mask)
    unmasked = unmasked_tokens(case).flatten().tolist()
    used = {i for ids, counts in zip(sets, unmasked, strict=True) if counts for i in ids}
    unused = [v for v in range(V) if v not in used]
    assert unused
    hidden, weight, bias = (p.clone() for p in parameters)
    weight[unused], bias[unused] = torch.nan, torch.nan
    parameters = hidden, weight, bias
    got = run_hidden(bapo_linear_loss, parameters, case, backend=backend, sampling_mask=mask)
    for a, b in zip(got[1], expected[1], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    assert not got[1][1][unused].any()
    assert torch.equal(got[0].loss, expected[0].loss)


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
def test_log_probs(backend, device, dtype, level, options):
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
